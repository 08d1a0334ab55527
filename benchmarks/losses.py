"""Whether training with fastlayers gives torch's losses, step by step, for two networks of the examples.

Two runs of torch with different seeds, and so with different weights and batches, say how far apart losses may be. A
run with fastlayers has the seed of the first run, and has to stay closer to it than the second run does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.environment import environment
from benchmarks.report import Line, caption, markdown_table, print_table
from benchmarks.result_file import rounded, write

ROOT = Path(__file__).parents[1]
HEADS = ("model", "run", "compared with")
#: Statistics of the distance |loss - loss of the run that it is compared with|.
COLUMNS = {"mean": "mean distance", "greatest": "greatest", "last": "of the last loss", "seeds": "mean of two seeds"}
SMOKE = ("--dim", "32", "--depth", "2", "--heads", "2", "--context", "32", "--batch", "4")

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """``against`` is the run of the same model, with the same seed, that should have the same losses."""

    model: str
    name: str
    against: str | None = None
    layers: str = "torch"
    seed: int = 0
    parallel: str = ""


RUNS = (
    Run("char_gpt", "torch"),
    Run("char_gpt", "torch, another seed", seed=1),
    Run("char_gpt", "patched", "torch", "patched"),
    Run("char_gpt", "fused layers", "torch", "fused"),
    Run("char_gpt", "fused layers, DDP on two", "fused layers", "fused", parallel="ddp"),
    Run("char_gpt", "fused layers, FSDP2 on two", "fused layers", "fused", parallel="fsdp"),
    Run("digits ResNet", "torch"),
    Run("digits ResNet", "torch, another seed", seed=1),
    Run("digits ResNet", "patched", "torch", "patched"),
)


def run(path: Path, device: torch.device, steps: int, smoke: bool, report: Callable[[str], None]) -> None:
    """Train each of ``RUNS``, those for two devices if there are two, and write the losses after each run."""
    rows: list[Row] = []
    content = {"kind": "losses", "environment": environment(device), "steps": steps, "rows": rows}
    for one in RUNS:
        row: Row = {"model": one.model, "run": one.name, "status": "ok"}
        try:
            if one.parallel and device.type == "cuda" and torch.cuda.device_count() < 2:
                row["status"] = "left out: one GPU"
            elif one.model == "char_gpt":
                row["losses"] = char_gpt(one, steps, device, smoke)
            else:
                row["losses"] = digits(one, steps, device)
        except Exception as error:
            row.update(status="failed", reason=str(error)[-2000:])
        rows.append(row)
        write(path, content)
        said = f"last loss {row['losses'][-1]:.4f}" if "losses" in row else row.get("reason", row["status"])
        report(f"[{len(rows)}/{len(RUNS)}] {one.model}, {one.name}: {said}")


def char_gpt(one: Run, steps: int, device: torch.device, smoke: bool) -> list[float]:
    """Run the example as a user runs it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if one.parallel else []
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable, *launcher, str(ROOT / "examples" / "char_gpt.py"), "--steps", str(steps),
            "--layers", one.layers, "--seed", str(one.seed), "--parallel", one.parallel or "ddp",
            "--device", device.type, "--sample", "1", "--out", out, *(SMOKE if smoke else ()),
        ]  # fmt: skip
        variables = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=240)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return [rounded(record["loss"]) for record in json.loads((Path(out) / "char_gpt.json").read_text())]


def digits(one: Run, steps: int, device: torch.device) -> list[float]:
    """Train the example's ResNet; returns a loss for each step instead of each epoch."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from digits import Digits, train_step
        from digits_resnet import DigitsResNet
        from training import seed_all
    finally:
        sys.path.pop(0)
    from fastlayers import patch_model

    seed_all(one.seed)
    data, model = Digits.load(device), DigitsResNet().to(device)
    if one.layers == "patched":
        patch_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    losses: list[torch.Tensor] = []
    while len(losses) < steps:
        losses += [train_step(model, optimizer, *batch) for batch in data.batches(64)]
    return [rounded(loss) for loss in torch.stack(losses[:steps]).tolist()]


# -- the tables -------------------------------------------------------------------------------------------------------


def distances(losses: list[float], expected: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(losses, expected, strict=True)]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def lines(results: dict[str, Any]) -> Iterator[Line]:
    found = {(row["model"], row["run"]): row for row in results["rows"]}
    for one in RUNS:
        row = found.get((one.model, one.name))
        if one.against is None or row is None:
            continue
        labels = (one.model, one.name, one.against)
        needed = [row, *(found[one.model, name] for name in (one.against, "torch", "torch, another seed"))]
        if any(other["status"] != "ok" for other in needed):
            first = next(other for other in needed if other["status"] != "ok")
            said = f"{first['run']}: {first['status']}"
            yield Line(labels, {}, ((said, "bad" if first["status"] == "failed" else "note"),))
            continue
        losses, expected, *torchs = (other["losses"] for other in needed)
        apart, spread = distances(losses, expected), mean(distances(*torchs))
        numbers = {"mean": mean(apart), "greatest": max(apart), "last": apart[-1], "seeds": spread}
        agrees = mean(apart) <= spread  # False if a loss is NaN
        verdict = ("agrees", "good") if agrees else ("APART: farther than two seeds", "bad")
        yield Line(labels, {name: f"{value:.2g}" for name, value in numbers.items()}, (verdict,))


def print_tables(results: dict[str, Any], console: Console) -> None:
    title = f"Losses of {results['steps']} steps"
    print_table(title, list(lines(results)), console, HEADS, COLUMNS)
    console.print(caption(results), style="dim")


def markdown(results: dict[str, Any]) -> str:
    return f"{caption(results)}, {results['steps']} steps:\n\n{markdown_table(list(lines(results)), HEADS, COLUMNS)}\n"


def page(results: dict[str, Any]) -> str:
    return f"![Losses of training with and without fastlayers](../benchmarks/results/losses.png)\n\n{markdown(results)}"


#: As :data:`benchmarks.report.PAGES`.
PAGES = {"losses": page}
