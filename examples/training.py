"""Shared by the examples: options, a training loop with a progress bar, checkpoints, and a plot.

For every round the loop seeds torch and Python with the seed of the run and the number of the round. So a resumed run
draws the same numbers as one that was not interrupted, and a checkpoint needs no state of a generator.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from fastlayers.tables import make_console

#: Only the first of torchrun's processes prints.
IS_FIRST = os.environ.get("RANK", "0") == "0"
console = make_console(highlight=False, quiet=not IS_FIRST)

#: The measures of one round of training, and of all rounds of a run in order.
Record: TypeAlias = Mapping[str, float | Tensor]
History: TypeAlias = list[dict[str, float]]


# options -------------------------------------------------------------------------------------------------------------

DEVICE = click.option("--device", default=None, help="cpu or cuda.  [default: cuda if there is a GPU]")
OUT = click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path(__file__).parent / "out", show_default=True
)
RESUME = click.option("--resume", is_flag=True, help="Continue from the checkpoint in --out.")


def find_device(name: str | None) -> torch.device:
    """The device of ``--device``; by default CUDA if there is a GPU."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built without CUDA
        raise click.UsageError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def seed_all(*what: int) -> None:
    """Seed torch and Python from the arguments."""
    number = random.Random(repr(what)).getrandbits(32)  # torch's CPU generator uses 32 bits of a seed
    random.seed(number)
    torch.manual_seed(number)


# checkpoints ---------------------------------------------------------------------------------------------------------


class Checkpoint:
    """One safetensors file with all that a run needs to continue: weights, the optimizer's state and the history.

    A write replaces an older file in one step.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, every: int = 1) -> None:
        """``every`` is the number of rounds between two writes."""
        self.path = path
        self.model = model
        self.optimizer = optimizer
        self.every = every

    def save(self, history: History) -> None:
        from safetensors.torch import save_file

        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        tensors = {name: tensor.contiguous() for name, tensor in self._tensors().items()}
        save_file(tensors, partial, {"history": json.dumps(history)})
        os.replace(partial, self.path)

    def load(self) -> History:
        """Load the model and the optimizer. Returns the history of the rounds that are done."""
        from safetensors import safe_open

        if not self.path.is_file():
            raise click.UsageError(f"--resume: there is no checkpoint {self.path}")
        with safe_open(self.path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            history: History = json.loads(file.metadata()["history"])
        self._check({name: tensor.shape for name, tensor in stored.items()})
        self._restore(stored)
        return history

    def _check(self, stored: Mapping[str, torch.Size]) -> None:
        """Raise if a checkpoint with tensors of these shapes is not of this model and optimizer."""
        expected = {name: tensor.shape for name, tensor in self._tensors().items()}
        odd = [name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name)]
        if odd:
            raise click.UsageError(
                f"--resume: {self.path} is of another model or optimizer: {min(odd)} and {len(odd) - 1} more of its "
                f"{len(stored)} tensors differ"
            )

    def _restore(self, stored: Mapping[str, Tensor]) -> None:
        from torch.distributed.checkpoint.state_dict import (
            get_optimizer_state_dict,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        weights: dict[str, Any] = {
            name.removeprefix("model."): value for name, value in stored.items() if name.startswith("model.")
        }
        set_model_state_dict(self.model, weights)
        # The optimizer's tensors come from the checkpoint, its rates and options from the new run.
        own: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer)
        own["state"] = {
            name: {key: stored.get(f"state.{name}.{key}", value) for key, value in entries.items()}
            for name, entries in own["state"].items()
        }
        set_optimizer_state_dict(self.model, self.optimizer, own)

    def _tensors(self) -> dict[str, Tensor]:
        """The weights and the optimizer's state, under the names that they have without wrappers."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        weights = get_model_state_dict(self.model)
        own: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer)
        # The state is flattened here, because torch 2.13 cannot load what it flattens itself.
        named = {f"model.{name}": value for name, value in weights.items()}
        named |= {
            f"state.{name}.{key}": value for name, entries in own["state"].items() for key, value in entries.items()
        }
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


# That it saves for one process alone is meant here.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class ShardedCheckpoint(Checkpoint):
    """The same for several processes, in a folder: each writes its shards, and reads what its new shards need.

    A run can continue with another number of processes, which share the model in another way. Each write has a folder
    of its own; the older one is removed when the new one is complete.
    """

    def save(self, history: History) -> None:
        import torch.distributed.checkpoint as dcp

        folder = self.path / f"{len(history):08d}"
        dcp.save(self._tensors(), checkpoint_id=folder)
        if IS_FIRST:
            (folder / "history.json").write_text(json.dumps(history))
            for other in self.path.iterdir():
                if other != folder:
                    shutil.rmtree(other)

    def load(self) -> History:
        import torch.distributed.checkpoint as dcp

        complete = sorted(self.path.glob("*/history.json"))
        if not complete:
            raise click.UsageError(f"--resume: there is no checkpoint {self.path}")
        folder = complete[-1].parent
        metadata: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        self._check({name: entry.size for name, entry in metadata.items()})
        tensors = self._tensors()
        dcp.load(tensors, checkpoint_id=folder)
        self._restore(tensors)
        history: History = json.loads((folder / "history.json").read_text())
        return history


# the loop ------------------------------------------------------------------------------------------------------------


def cosine(done: float, warmup: float = 0.0) -> float:
    """The factor of the learning rate after the fraction ``done`` of a run: a linear warm-up, then a cosine."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def fit(
    title: str,
    rounds: int,
    one_round: Callable[[int], Record],
    *,
    seed: int = 0,
    report: int = 1,
    stop_at: int | None = None,
    checkpoint: Checkpoint | None = None,
    resume: bool = False,
) -> History:
    """Call ``one_round`` with 0, 1, ... under a progress bar. Returns the measures of all rounds, also earlier ones.

    A round is an epoch or a step, as the caller likes. Its measures may be tensors. They are read only every ``report``
    rounds, because the GPU has to wait then.

    Args:
        stop_at: the round after which to stop, as a time limit of a cluster would.
        checkpoint: written after every ``checkpoint.every`` rounds and at the end.
        resume: start from the checkpoint.
    """
    history: History = checkpoint.load() if checkpoint is not None and resume else []
    last = rounds if stop_at is None else min(stop_at, rounds)
    unread: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        bar = progress.add_task(title, total=rounds, completed=len(history), state="")
        for index in range(len(history), last):
            seed_all(seed, index)
            unread.append(one_round(index))
            over = index + 1
            saving = checkpoint is not None and (over % checkpoint.every == 0 or over == last)
            if saving or over % report == 0 or over == last:
                history += [{name: float(value) for name, value in record.items()} for record in unread]
                unread = []
                state = ", ".join(f"{name} {value:.3f}" for name, value in latest(history).items())
                progress.update(bar, completed=over, state=state)
            if checkpoint is not None and saving:
                checkpoint.save(history)
    return history


def latest(history: History) -> dict[str, float]:
    """The last value of each measure. Not every round has all measures."""
    return {name: value for record in history for name, value in record.items()}


# timing --------------------------------------------------------------------------------------------------------------


def in_turns(
    first: Callable[[], object], second: Callable[[], object], device: torch.device, turns: int = 20, warm_up: int = 5
) -> tuple[float, float]:
    """Milliseconds of both functions: the median of ``turns`` calls, called in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(warm_up + turns):
        for function, its in zip((first, second), times, strict=True):
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if turn >= warm_up:
                its.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# the picture ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """One plot of one or more measures over the rounds."""

    title: str
    measures: tuple[str, ...]
    log: bool = False
    percent: bool = False


def draw_curves(phases: dict[str, History], panels: tuple[Panel, ...], path: Path, unit: str = "epoch") -> None:
    """Save the panels side by side. Each phase of the training has its own colour."""
    if not IS_FIRST:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter

    figure, row = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 3.4), layout="constrained", squeeze=False)
    for axes, panel in zip(row[0], panels, strict=True):
        colours = iter(("#0072B2", "#D55E00", "#009E73", "#CC79A7"))
        first = 1
        for phase, history in phases.items():
            for measure in panel.measures:
                points = [(first + i, record[measure]) for i, record in enumerate(history) if measure in record]
                label = phase if len(panel.measures) == 1 else measure
                marker = "o" if len(points) <= 50 else None
                axes.plot(*zip(*points, strict=True), color=next(colours), marker=marker, markersize=3.5, label=label)
            first += len(history)
        axes.set_title(panel.title)
        if panel.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        if panel.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="#E4E4E4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
