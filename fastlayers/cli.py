"""The command line, ``python -m fastlayers``. A command is one function, and imports what it needs when it runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastlayers import build as builder
from fastlayers.patching.libraries import targets
from fastlayers.patching.libraries.targets import TARGET, Shapes
from fastlayers.tables import Table, make_console

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fastlayers.patching.report import Report

    Inputs: TypeAlias = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]

console = make_console()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Drop-in fused layers for PyTorch: what this machine has, and what they would do to a model."""


# info ----------------------------------------------------------------------------------------------------------------


@main.command()
def info() -> None:
    """Show what was built and which backends this machine has."""
    rows = [*_versions(), *_built(), ("regions are run by", _executor())]
    if forced := os.environ.get("FASTLAYERS_BACKEND"):
        rows.append(("FASTLAYERS_BACKEND", _describe_forced(forced)))
    console.print(Table(("", ""), rows), "", _backends())


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
        # Of a wheel that was made elsewhere, what stopped the build here is not on record.
        problem = builder.platform_problem() or (made.problem if made else None)
        yield "package", "pure Python"
        yield "kernels of csrc", "not built" + (f": {problem}" if problem else "")
        return
    yield "kernels of csrc", str(builder.LIBRARY)
    if made is None:
        yield "built from", f"unknown: {builder.LIBRARY.with_suffix('.json').name} is missing"
        return
    yield "contains", made.contents()
    yield "built with", f"{made.compiler}; nvcc {made.nvcc or 'none'}; headers of torch {made.torch}"


def _executor() -> str:
    from fastlayers.patching.program import executors

    return "C++" if executors.problem is None else f"Python: {executors.problem}"


def _describe_forced(name: str) -> str:
    from fastlayers import backends

    try:
        reason = backends.problem(name)
    except ValueError as error:
        return f"{error}; every call of an op raises until that is mended"
    return f"{name}, forced" + (f", but every call of an op raises: {reason}" if reason else "")


def _backends() -> Table:
    from fastlayers import backends

    reasons = backends.available()
    rows = [
        (name, "yes", "", "") if reason is None else (name, "no", reason, _how_to_get(name))
        for name, reason in reasons.items()
    ]
    styles = ["green" if reason is None else "yellow" for reason in reasons.values()]
    return Table(("backend", "here", "why not", "how to get it"), rows, styles=styles)


def _how_to_get(backend: str) -> str:
    """What the user of this machine has to do first to get a missing backend."""
    import torch

    if builder.platform_problem() is not None:
        return "Linux" if backend == "cpu" else "Linux, with an NVIDIA GPU and a CUDA build of torch"
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
        return f"{error}; fix that, then run `python -m fastlayers build`"
    return "run `python -m fastlayers build`"


# build ---------------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--regions", is_flag=True, help="Compile only what runs regions, and keep the kernels that are there.")
def build(regions: bool) -> None:
    """Compile the C++ and CUDA kernels here, and what runs regions with the torch that is installed.

    \b
    FASTLAYERS_CUDA_ARCHS  compute capabilities, such as "90" or "80;90+PTX"; default: this machine's GPUs
    CUDA_HOME, CXX         the CUDA toolkit and the C++ compiler
    MAX_JOBS               number of compilers to run at once
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=None)

        def report(done: int, total: int, what: str) -> None:
            name, _, warnings = what.partition("\n")
            progress.update(task, completed=done, total=total)
            if not console.is_terminal:  # which shows the bar
                console.print(escape(f"[{done}/{total}] {name}"))
            if warnings:
                console.print(escape(warnings))

        try:
            if regions:
                built, contents = builder.build_regions(report), "runs regions"
            else:
                built, contents = builder.LIBRARY, builder.build_in_place(report).contents()
        except builder.BuildError as error:
            progress.stop()
            raise click.ClickException(str(error)) from None
    console.print(f"[green]{escape(str(built))}[/]: {escape(contents)}")


# scan, verify and bench ----------------------------------------------------------------------------------------------


def _shapes(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Shapes:
    shapes: Shapes = []
    for value in values:
        name, equals, sizes = value.rpartition("=")
        try:
            shapes.append((name if equals else None, tuple(int(size) for size in sizes.split(","))))
        except ValueError:
            raise click.BadParameter(f"expected sizes such as 2,3,224,224, got {sizes}") from None
    if len({name is None for name, _ in shapes}) > 1:
        raise click.BadParameter(f"expected a name for every input or for none, got {' '.join(values)}")
    return shapes


FORMAT = click.option(
    "--format", "form", type=click.Choice(["table", "markdown", "json"]), default="table", show_default=True
)
INPUT = click.option(
    "--input",
    "shapes",
    metavar="[NAME=]SHAPE",
    multiple=True,
    callback=_shapes,
    help="Shape of a random input, as 2,3,224,224 or input_ids=2,64; again for each further input. Names that end with "
    "ids get token numbers.  [default: two images or texts of the size that the model is for]",
)
TINY = click.option("--tiny", is_flag=True, help=targets.TINY)


def _load(target: str, tiny: bool, weights: bool = True) -> nn.Module:
    try:
        return targets.load_target(target, tiny=tiny, weights=weights)
    except targets.TargetError as error:
        raise click.BadParameter(str(error), param_hint="TARGET") from None


def _print(report: Report, form: str) -> None:
    if form == "table":
        console.print(report)
    else:
        click.echo(report.to_markdown() if form == "markdown" else report.to_json())


def _inputs(model: nn.Module, shapes: Shapes, dtype: torch.dtype | None = None) -> Inputs:
    """Random inputs on the device of the model."""
    import torch

    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    try:
        return targets.random_inputs(model, shapes or targets.default_inputs(model), device, dtype)
    except targets.TargetError as error:
        raise click.ClickException(str(error)) from None


def _sizes(inputs: Inputs) -> str:
    args, kwargs = inputs
    named = (f"{name}={tuple(tensor.shape)}" for name, tensor in kwargs.items())
    return ", ".join([*(str(tuple(tensor.shape)) for tensor in args), *named])


@contextmanager
def _speaking(said: set[str]) -> Iterator[None]:
    """Say what patching warns of, each thing once, and a forced backend that cannot serve without a traceback."""
    from fastlayers.backends import BackendError
    from fastlayers.patching import PatchWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PatchWarning)
        try:
            yield
        except BackendError as error:
            raise click.ClickException(str(error)) from None
    for message in {str(warning.message): None for warning in caught if warning.category is PatchWarning}:
        if message not in said:
            said.add(message)
            click.echo(f"Warning: {message}", err=True)


def _try_out(model: nn.Module, inputs: Inputs) -> None:
    """What the model cannot take is the user's to know, without a traceback; what fails only when patched is not."""
    import torch

    args, kwargs = inputs
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        mode = "training" if model.training else "eval"
        raise click.ClickException(
            f"the model itself, unpatched and in {mode} mode, fails on random inputs of {_sizes(inputs)}; "
            f"see --input.\n{type(error).__name__}: {error}"
        ) from None


@main.command(epilog=TARGET)
@click.argument("target")
@INPUT
@TINY
@FORMAT
@click.option("--details", is_flag=True, help="A line for each module; else equal ones share a line.")
def scan(target: str, shapes: Shapes, tiny: bool, form: str, details: bool) -> None:
    """Show what patch_model would do to a model.

    The report has a row for what would be fused, and for what would be left alone and why; where the inputs of the
    model are known, with an estimate of the bytes that it saves a step. A model of transformers is looked at without
    weights.
    """
    from fastlayers import plan_patch

    model = _load(target, tiny, weights=False)
    examples: Any = None
    if shapes or targets.names_library(target):
        try:
            args, kwargs = inputs = _inputs(model, shapes)
            _try_out(model, inputs)
            examples = kwargs or args
        except click.ClickException as error:
            if shapes:
                raise
            click.echo(f"No estimate of what is saved: {error.message}", err=True)
    _print(plan_patch(model, example_inputs=examples, details=details), form)


@main.command(epilog=TARGET)
@click.argument("target")
@INPUT
@TINY
@FORMAT
@click.option("--bisect", is_flag=True, help="Name the pass, the operation and the line of source behind a difference.")
def verify(target: str, shapes: Shapes, tiny: bool, form: str, bisect: bool) -> None:
    """Compare a model patched with the same one unpatched.

    It runs both in training and in eval mode, on random inputs, and compares outputs, gradients and buffers. The exit
    status is 1 where they differ.
    """
    import torch

    from fastlayers import verify_patch
    from fastlayers.patching.measure.bisect import bisect_patch

    torch.manual_seed(0)
    model = _load(target, tiny).to("cuda" if torch.cuda.is_available() else "cpu")
    args, kwargs = inputs = _inputs(model, shapes)
    equal = True
    said: set[str] = set()
    for training in (True, False):
        _try_out(model.train(training), inputs)
        for check in (verify_patch, bisect_patch) if bisect else (verify_patch,):
            with _speaking(said):
                report = check(model, *args, **kwargs)
            equal = equal and report.ok
            _print(report, form)
    raise SystemExit(0 if equal else 1)


@main.command(epilog=TARGET)
@click.argument("target")
@INPUT
@TINY
@click.option("--eval", "inference", is_flag=True, help="Measure a forward in eval mode, not a forward and a backward.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Of parameters and inputs.",
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw a picture into this file, as profile.png.")
@FORMAT
def bench(target: str, shapes: Shapes, tiny: bool, inference: bool, dtype: str, plot: str | None, form: str) -> None:
    """Measure a step of a model unpatched and patched: time, time by kind of kernel, peak memory."""
    import torch

    from fastlayers import profile_patch

    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib")
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = _load(target, tiny).to("cuda" if torch.cuda.is_available() else "cpu", kind).train(not inference)
    args, kwargs = inputs = _inputs(model, shapes, kind)
    _try_out(model, inputs)
    with _speaking(set()):
        report = profile_patch(model, *args, **kwargs)
    _print(report, form)
    if plot is not None:
        report.plot(plot)
