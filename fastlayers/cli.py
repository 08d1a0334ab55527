"""The command line, ``python -m fastlayers``. A command is one function, and imports what it needs when it runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastlayers import build as builder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fastlayers.patching import PatchReport, VerifyReport

console = Console()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Drop-in fused layers for PyTorch: what this machine has, and what they would do to a model."""


# info ----------------------------------------------------------------------------------------------------------------


@main.command()
def info() -> None:
    """Show what was built and which backends this machine has."""
    table = Table("", "", title="fastlayers", title_justify="left", show_header=False)
    table.columns[1].overflow = "fold"
    for name, value in _versions():
        table.add_row(name, escape(value))
    table.add_section()
    for name, value in _built():
        table.add_row(name, escape(value))
    if forced := os.environ.get("FASTLAYERS_BACKEND"):
        table.add_section()
        table.add_row("FASTLAYERS_BACKEND", escape(_describe_forced(forced)))
    console.print(table)
    console.print(_backends())


def _versions() -> Iterator[tuple[str, str]]:
    import torch

    import fastlayers

    yield "fastlayers", fastlayers.__version__
    yield "python", platform.python_version()
    yield "torch", str(torch.__version__)
    yield "triton", _version_of("triton")
    yield "CUDA of torch", torch.version.cuda or "none: a CPU build of torch"
    if not torch.cuda.is_available():
        yield "GPU", "none that torch sees"
    for index in range(torch.cuda.device_count()):
        yield f"GPU {index}", _describe_gpu(torch.cuda.get_device_properties(index))


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe_gpu(gpu: torch.cuda._CudaDeviceProperties) -> str:
    return f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"


def _built() -> Iterator[tuple[str, str]]:
    made = builder.BuildInfo.read(builder.LIBRARY)
    if not builder.LIBRARY.exists():
        yield "kernels of csrc", "not built" + (f": {made.problem}" if made and made.problem else "")
        return
    yield "kernels of csrc", str(builder.LIBRARY)
    if made is None:
        yield "built from", f"unknown: {builder.LIBRARY.with_suffix('.json').name} is missing"
        return
    yield "holds", made.contents()
    yield "built with", f"{made.compiler}; nvcc {made.nvcc or 'none'}; headers of torch {made.torch}"


def _describe_forced(name: str) -> str:
    from fastlayers import backends

    try:
        reason = backends.problem(name)
    except ValueError as error:
        return f"{error}; every call of an op raises until that is mended"
    return f"{name}, forced" + (f", but every call of an op raises: {reason}" if reason else "")


def _backends() -> Table:
    from fastlayers import backends

    table = Table("backend", "here", "why not", "how to get it", title="backends", title_justify="left")
    for name, reason in backends.available().items():
        if reason is None:
            table.add_row(name, "[green]yes[/]", "", "")
        else:
            table.add_row(name, "[red]no[/]", escape(reason), escape(_how_to_get(name)))
    return table


def _how_to_get(backend: str) -> str:
    """What the user of this machine has to do for a backend that is missing: the first obstacle, not all of them."""
    import torch

    if backend in ("triton", "cuda") and torch.version.cuda is None:
        return "a machine with an NVIDIA GPU, and a CUDA build of torch instead of this CPU build"
    if backend in ("triton", "cuda") and not torch.cuda.is_available():
        return "an NVIDIA GPU with a driver that torch.cuda.is_available() accepts"
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "pip install triton"
        return "a GPU of compute capability 8.0 or later"
    return _how_to_build(backend)


def _how_to_build(backend: str) -> str:
    try:
        builder.find_torch()
        builder.find_compiler()
        if backend == "cuda":
            builder.find_nvcc()
    except builder.CudaBuildError:
        return "install the CUDA toolkit (for its nvcc), then run `python -m fastlayers build`"
    except builder.BuildError as error:
        return f"{error}; once that is mended, run `python -m fastlayers build`"
    return "run `python -m fastlayers build`"


# build ---------------------------------------------------------------------------------------------------------------


@main.command()
def build() -> None:
    """Compile the C++ and CUDA kernels here.

    \b
    FASTLAYERS_CUDA_ARCHS  compute capabilities, as "90" or "80;90"; default: this machine's GPUs
    CUDA_HOME, CXX         the CUDA toolkit and the C++ compiler
    MAX_JOBS               how many compilers run at once
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=None)

        def report(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total)
            progress.console.print(escape(what))

        try:
            made = builder.build_in_place(report)
        except builder.BuildError as error:
            progress.stop()
            raise click.ClickException(str(error)) from None
    console.print(f"[green]{escape(str(builder.LIBRARY))}[/]: {escape(made.contents())}")


# scan and verify -----------------------------------------------------------------------------------------------------

FORMAT = click.option(
    "--format", "form", type=click.Choice(["table", "markdown", "json"]), default="table", show_default=True
)


def _load(target: str) -> nn.Module:
    from fastlayers.patching.targets import TargetError, load_target

    try:
        return load_target(target)
    except TargetError as error:
        raise click.BadParameter(str(error), param_hint="TARGET") from None


def _print(report: PatchReport | VerifyReport, form: str) -> None:
    if form == "table":
        console.print(report)
    else:
        click.echo(report.to_markdown() if form == "markdown" else report.to_json())


@main.command()
@click.argument("target")
@FORMAT
def scan(target: str, form: str) -> None:
    """Show what patch_model would do to a model.

    The report has a row for what would be fused, and for what would be left alone and why.

    TARGET is timm:NAME, torchvision:NAME or package.module:CALLABLE (anything that returns a module).
    """
    from fastlayers import plan_patch

    _print(plan_patch(_load(target)), form)


def _shape(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, ...]]:
    try:
        return [tuple(int(size) for size in value.split(",")) for value in values]
    except ValueError:
        raise click.BadParameter(f"expected sizes such as 2,3,224,224, got {' '.join(values)}") from None


@main.command()
@click.argument("target")
@click.option(
    "--input",
    "shapes",
    multiple=True,
    callback=_shape,
    help="Shape of a random input, as 2,3,224,224; again for each further input.  [default: two images]",
)
@FORMAT
def verify(target: str, shapes: list[tuple[int, ...]], form: str) -> None:
    """Compare a model patched with the same one unpatched.

    It runs both in training and in eval mode, on random inputs, and compares outputs, gradients and buffers.

    TARGET is timm:NAME, torchvision:NAME or package.module:CALLABLE (anything that returns a module). The exit status
    is 1 where they differ.
    """
    import torch

    from fastlayers import verify_patch
    from fastlayers.backends import BackendError
    from fastlayers.patching import PatchWarning
    from fastlayers.patching.targets import default_input

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _load(target).to(device)
    inputs = [torch.randn(shape, device=device) for shape in shapes or [default_input(model)]]
    equal = True
    said: set[str] = set()
    for training in (True, False):
        _try_out(model.train(training), inputs)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PatchWarning)
            try:
                report = verify_patch(model, *inputs)
            except BackendError as error:
                raise click.ClickException(str(error)) from None
        equal = equal and report.ok
        for message in {str(warning.message) for warning in caught} - said:
            said.add(message)
            click.echo(f"Warning: {message}", err=True)
        _print(report, form)
    raise SystemExit(0 if equal else 1)


def _try_out(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """What the model cannot take is the user's to know, without a traceback; what fails only when patched is not."""
    import torch

    try:
        with torch.no_grad():
            model(*inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        mode = "training" if model.training else "eval"
        raise click.ClickException(
            f"the model itself, unpatched and in {mode} mode, fails on random inputs of {shapes}; see --input.\n"
            f"{type(error).__name__}: {error}"
        ) from None
