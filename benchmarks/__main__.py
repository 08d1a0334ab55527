"""``python3 -m benchmarks``: run the benchmark, print its tables, draw its plots."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import cpu_models, fine_tuning, losses, model_report, models, parallel, report
from benchmarks.case import Case
from benchmarks.cases import all_cases
from benchmarks.implementations import TITLES
from benchmarks.networks import MODES, NETWORKS
from benchmarks.run import DeviceLostError, Settings
from benchmarks.run import run as run_cases
from fastlayers.tables import make_console

RESULTS = Path(__file__).with_name("results")
SUITES = ("bars", "sweep", "cpu")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure the fused ops against eager PyTorch, torch.compile and, where installed, Liger."""


def selection(function: Any) -> Any:
    """Add the options that choose cases, for `run` and `list`."""
    options = (
        click.option("--only", multiple=True, help="Cases whose id contains this; * and ? are wildcards; repeatable."),
        click.option("--suite", "suites", multiple=True, type=click.Choice(SUITES), help="Default: all that can run."),
        click.option("--all", "everything", is_flag=True, help="Every N of the sweep; torch.compile in every dtype."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def chosen(only: tuple[str, ...], suites: tuple[str, ...], everything: bool) -> list[Case]:
    wanted = suites or (SUITES if torch.cuda.is_available() else ("cpu",))
    found = [
        case
        for case in all_cases()
        if case.suite in wanted
        and (everything or not case.extra)
        and any(fnmatch(case.id, f"*{part}*") for part in only or ("",))
    ]
    if not found:
        raise click.UsageError(
            f"no case matches --only {' or '.join(map(repr, only))} in {', '.join(wanted)}; "
            "see `python3 -m benchmarks list`"
        )
    return found


@main.command()
@selection
@click.option(
    "--impl", "implementations", multiple=True, type=click.Choice(list(TITLES)), help="Only these; repeatable."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--name", default="results", show_default=True, help="The result file is NAME.json.")
@click.option("--samples", default=20, show_default=True, type=click.IntRange(min=2), help="Timed calls per number.")
@click.option(
    "--startup", is_flag=True, help="Measure the import and the first call too. A run of all cases does so by default."
)
@click.option("--time-limit", type=float, help="Start no further case after this many seconds.")
def run(
    only: tuple[str, ...],
    suites: tuple[str, ...],
    everything: bool,
    implementations: tuple[str, ...],
    out: Path,
    name: str,
    samples: int,
    startup: bool,
    time_limit: float | None,
) -> None:
    """Measure, write OUT/NAME.json after every case, print the tables and draw the plots.

    Without a GPU only the cpu suite runs.
    """
    cases = chosen(only, suites, everything)
    if not torch.cuda.is_available() and any(case.device_type == "cuda" for case in cases):
        raise click.UsageError("the suites bars and sweep need a GPU, and torch sees none; --suite cpu runs here")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    console = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    selective = bool(only or suites or implementations)
    settings = Settings(samples, everything, implementations, time_limit, startup or not selective)
    with progress if sys.stderr.isatty() else nullcontext():
        task = progress.add_task("benchmarks", total=len(cases))

        def done(line: str) -> None:
            progress.advance(task)
            console.print(f"[{int(progress.tasks[0].completed)}/{len(cases)}] {line}", markup=False, soft_wrap=True)

        try:
            run_cases(cases, path, settings, report=done)
        except DeviceLostError as error:
            raise click.ClickException(
                f"a kernel broke the CUDA context; what was measured is in {path}\n{error}"
            ) from None
    show_and_draw(path)


@main.command("models")
@click.option("--only", multiple=True, type=click.Choice([n.name for n in NETWORKS]), help="Only these; repeatable.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), help="Only these; repeatable.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--name", default="models", show_default=True, help="The result file is NAME.json.")
@click.option("--seconds", default=1.0, show_default=True, help="About how long each timed loop takes.")
@click.option("--run-limit", default=240.0, show_default=True, help="End a process after this many seconds.")
@click.option("--time-limit", type=float, help="Start no further process after this many seconds.")
@click.option("--resume", is_flag=True, help="Keep the rows of the file, and measure the rest.")
@click.option(
    "--smoke", is_flag=True, help="Test that everything runs, with tiny models on the CPU. Writes NAME-smoke.json."
)
def run_models(
    only: tuple[str, ...],
    modes: tuple[str, ...],
    out: Path,
    name: str,
    seconds: float,
    run_limit: float,
    time_limit: float | None,
    resume: bool,
    smoke: bool,
) -> None:
    """Measure whole models: training step, inference and host time, in every mode, each in a fresh process."""
    if not smoke and not torch.cuda.is_available():
        raise click.UsageError("whole models need a GPU, and torch sees none; --smoke runs tiny ones here")
    out.mkdir(parents=True, exist_ok=True)
    name = f"{name}-smoke" if smoke else name
    device, seconds = ("cpu", 0.0) if smoke else ("cuda", seconds)
    settings = models.Settings(device, smoke, seconds, run_limit, time_limit)
    jobs = models.all_jobs([n for n in NETWORKS if n.name in only or not only], modes or MODES)
    path = out / f"{name}.json"
    try:
        models.run(jobs, path, settings, resume, lambda line: click.echo(line, err=True))
    except ValueError as error:
        raise click.ClickException(f"{error}; run without --resume to overwrite it") from None
    show_and_draw(path)


@main.command("cpu-models")
@click.option("--only", multiple=True, type=click.Choice(sorted({job.network.name for job in cpu_models.JOBS})))
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(cpu_models.MODES)), help="Default: not compile.")
@click.option("--turns", default=20, show_default=True, type=click.IntRange(min=1), help="Timed calls of each.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--name", default="cpu_models", show_default=True, help="The result file is NAME.json.")
def run_cpu_models(only: tuple[str, ...], modes: tuple[str, ...], turns: int, out: Path, name: str) -> None:
    """Measure whole models on a CPU: stock, patched and, if asked for, compiled ones in turns."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    chosen = tuple(mode for mode in cpu_models.MODES if mode in (modes or ("eager", "fastlayers")))
    if not {"eager", "fastlayers"} <= set(chosen):
        raise click.UsageError("the tables compare eager and fastlayers: name both, and compile besides")
    cpu_models.run(path, chosen, only, turns, lambda line: click.echo(line, err=True))
    show(load(path))


@main.command("fine-tuning")
@click.option("--only", multiple=True, type=click.Choice(list(fine_tuning.BARS)), help="Only these; repeatable.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--name", default="fine_tuning", show_default=True, help="The result file is NAME.json.")
def run_fine_tuning(only: tuple[str, ...], out: Path, name: str) -> None:
    """Measure steps of TRL's trainers and of QLoRA, stock and patched."""
    if not torch.cuda.is_available():
        raise click.UsageError("models of 1.2B parameters need a GPU, and torch sees none")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    fine_tuning.run(path, only, lambda line: click.echo(line, err=True))
    show(load(path))


@main.command("parallel")
@click.option(
    "--only", multiple=True, type=click.Choice([job.kind for job in parallel.JOBS]), help="Only these; repeatable."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--name", default="parallel", show_default=True, help="The result file is NAME.json.")
def run_parallel(only: tuple[str, ...], out: Path, name: str) -> None:
    """Measure steps on two GPUs: tensor parallel, FSDP2, and the loss of a sharded vocabulary."""
    if torch.cuda.device_count() < parallel.GPUS:
        raise click.UsageError(f"it takes {parallel.GPUS} GPUs, and torch sees {torch.cuda.device_count()}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    parallel.run(path, only, lambda line: click.echo(line, err=True))
    show(load(path))


@main.command("losses")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, show_default=True)
@click.option("--name", default="losses", show_default=True, help="The result file is NAME.json.")
@click.option(
    "--smoke", is_flag=True, help="Test that everything runs, with a tiny model on the CPU. Writes NAME-smoke.json."
)
def run_losses(steps: int, out: Path, name: str, smoke: bool) -> None:
    """Compare the losses of training with fastlayers to torch's, with two GPUs under DDP and FSDP2 too."""
    if not smoke and not torch.cuda.is_available():
        raise click.UsageError("torch sees no GPU; --smoke trains a tiny model here")
    out.mkdir(parents=True, exist_ok=True)
    name = f"{name}-smoke" if smoke else name
    path = out / f"{name}.json"
    device = torch.device("cpu" if smoke else "cuda")
    losses.run(path, device, steps, smoke, lambda line: click.echo(line, err=True))
    show_and_draw(path)


@main.command("list")
@selection
def list_cases(only: tuple[str, ...], suites: tuple[str, ...], everything: bool) -> None:
    """Print the ids of the cases."""
    for case in chosen(only, suites or SUITES, everything):
        click.echo(case.id)


result_file = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@main.command()
@result_file
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option(
    "--into",
    "pages",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Write them between the markers of this Markdown file instead, such as README.md; repeatable.",
)
def table(file: Path, markdown: bool, pages: tuple[Path, ...]) -> None:
    """Print the tables of a result file."""
    results = load(file)
    of_kind = renderer(results)
    for page in pages:
        try:
            page.write_text(report.put_into(page.read_text(), results, of_kind.PAGES))
        except ValueError as error:
            raise click.ClickException(f"{page}: {error}") from None
    if pages:
        return
    if markdown:
        click.echo(of_kind.markdown(results), nl=False)
    else:
        show(results)


@main.command()
@result_file
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Default: beside the file.")
def plot(file: Path, out: Path | None) -> None:
    """Draw the plots of a result file."""
    draw(load(file), out or file.parent, file.stem)


def draw(results: dict[str, Any], out: Path, name: str) -> None:
    from benchmarks import plots  # matplotlib takes a second to import

    for path in plots.draw_all(results, out, name):
        click.echo(f"drew {path}", err=True)


def show(results: dict[str, Any]) -> None:
    renderer(results).print_tables(results, make_console(highlight=False))


def show_and_draw(path: Path) -> None:
    """Print the tables of a finished run, and draw its plots beside the result file."""
    results = load(path)
    show(results)
    draw(results, path.parent, path.stem)


def renderer(results: dict[str, Any]) -> Any:
    """Return the module that renders these results: ops, whole models, or losses."""
    renderers = {
        "models": model_report, "losses": losses, "cpu_models": cpu_models, "fine_tuning": fine_tuning,
        "parallel": parallel,
    }  # fmt: skip
    return renderers.get(results.get("kind", ""), report)


def load(path: Path) -> dict[str, Any]:
    results = json.loads(path.read_text())
    missing = {"environment", "rows", *([] if "kind" in results else ["copy_gbps"])} - results.keys()
    if missing:
        raise click.ClickException(f"{path} is no result of this benchmark: it has no {', '.join(sorted(missing))}")
    return results


if __name__ == "__main__":
    main(prog_name="python3 -m benchmarks")
