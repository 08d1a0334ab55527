"""Whole models on a CPU: inference, decoding and training steps of stock, compiled and patched models, in turns.

The copies of a model have the same weights and inputs and take turns in one process, so that other work on the machine
slows all of them down. Each time is the median of the turns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.environment import environment, version
from benchmarks.networks.language import BERT as MASKED_BERT
from benchmarks.networks.language import GPT2, LanguageModel
from benchmarks.networks.network import Batch, Network, Transformer
from benchmarks.networks.vision import CLASSES, TorchvisionModel, VisionModel
from benchmarks.report import Line, caption, markdown_table, print_table
from benchmarks.result_file import rounded, write
from benchmarks.timing import CpuClock, Task
from fastlayers import patch_model

HEADS = ("model", "batch", "what")
#: The modes, with their names in tables. torch.compile is left out unless it is asked for: it takes minutes.
MODES = {"eager": "torch", "compile": "torch.compile", "fastlayers": "fastlayers"}
CPU = torch.device("cpu")
#: What stock's time over the patched model's has to be, in the geometric mean of inference and of training.
BAR = 1.15
#: Seconds after which a model gets no more turns, if it had this many.
SECONDS, LEAST_TURNS = 60.0, 5

Row = dict[str, Any]


@dataclass(frozen=True)
class Encoder(Transformer):
    """An encoder without a head, as embeddings of texts are computed."""

    def example(self, device: torch.device) -> Batch:
        return {"input_ids": self.ids(self.size, device), "attention_mask": torch.ones(self.batch, self.size).long()}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).last_hidden_state


MINILM = Encoder(
    "minilm",
    "MiniLM-L6",
    "BertConfig",
    1,
    128,
    {
        "vocab_size": 30522,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
)
ENCODER = Encoder("bert", MASKED_BERT.title, "BertConfig", 1, 128, {"vocab_size": 30522})
RESNET = TorchvisionModel("resnet50", "ResNet-50", "resnet50", 1, 224, CLASSES, channels_last=False)
MOBILENET = TorchvisionModel("mobilenetv3", "MobileNetV3-L", "mobilenet_v3_large", 1, 224, CLASSES, channels_last=False)
VIT = VisionModel("vit_small", "ViT-S/16", "vit_small_patch16_224", 8, 224, CLASSES, channels_last=False)
LLAMA = LanguageModel(
    "llama",
    "small Llama",
    "LlamaConfig",
    2,
    256,
    {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
)
TRAINED_GPT2 = replace(GPT2, batch=2, size=256)


@dataclass(frozen=True)
class Job:
    network: Network
    what: str  # "inference", "a token" or "training"

    @property
    def labels(self) -> tuple[str, str, str]:
        return self.network.title, self.network.shape(), self.what


JOBS = (
    *(Job(replace(network, batch=batch), "inference") for network in (MINILM, ENCODER) for batch in (1, 32)),
    *(Job(replace(network, batch=batch), "inference") for network in (RESNET, MOBILENET) for batch in (1, 8)),
    Job(TRAINED_GPT2, "a token"),
    *(Job(network, "training") for network in (TRAINED_GPT2, LLAMA, VIT)),
    *(Job(replace(network, batch=8), "training") for network in (RESNET, MOBILENET)),
)


def task_of(job: Job, model: nn.Module, batch: Batch) -> Callable[[], object]:
    """One call of the model, as the job says."""
    if job.what == "a token":
        with torch.no_grad():
            return job.network.decoder(model.eval(), batch)
    if job.what == "inference":
        model.eval()
        return lambda: job.network.predict(model, batch)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad()
        job.network.loss(model, batch).backward()
        optimizer.step()

    return step


def measure(job: Job, modes: tuple[str, ...], turns: int) -> Row:
    torch.manual_seed(0)
    network = job.network
    stock, batch = network.build(CPU), network.example(CPU)
    calls = {}
    for mode in modes:
        model = copy.deepcopy(stock)
        if mode == "fastlayers":
            patch_model(model)
        if mode == "compile":
            model.compile()
        calls[mode] = task_of(job, model, batch)
    clock, context = CpuClock(), torch.enable_grad if job.what == "training" else torch.inference_mode
    tasks = [Task(lambda state, call=call: call(), context=context) for call in calls.values()]  # type: ignore[misc]
    seconds = sum(timing.us for timing in clock.time(tasks, 1)) / 1e6  # the first calls of all
    timings = clock.time(tasks, max(LEAST_TURNS, min(turns, int(SECONDS / seconds))))
    return {"ms": {mode: rounded(timing.us / 1e3) for mode, timing in zip(calls, timings, strict=True)}}


def run(path: Path, modes: tuple[str, ...], only: tuple[str, ...], turns: int, report: Callable[[str], None]) -> None:
    """Measure the jobs, and write the file after each."""
    jobs = [job for job in JOBS if not only or job.network.name in only]
    libraries = {name: version(name) for name in ("transformers", "timm", "torchvision")}
    rows: list[Row] = []
    content = {"kind": "cpu_models", "environment": environment(CPU) | {"libraries": libraries}, "rows": rows}
    for job in jobs:
        row: Row = {"model": job.network.name, "labels": job.labels, "status": "ok"}
        try:
            row |= measure(job, modes, turns)
        except Exception as error:
            row.update(status="failed", reason=f"{type(error).__name__}: {error}"[-2000:])
        rows.append(row)
        write(path, content)
        said = ", ".join(f"{MODES[mode]} {ms} ms" for mode, ms in row.get("ms", {}).items())
        report(f"[{len(rows)}/{len(jobs)}] {', '.join(job.labels)}: {said or row['reason']}")


# -- the tables -------------------------------------------------------------------------------------------------------


def gain(row: Row) -> float:
    """Stock's time over the patched model's."""
    return row["ms"]["eager"] / row["ms"]["fastlayers"]


def lines(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["rows"]:
        if row["status"] != "ok":
            yield Line(tuple(row["labels"]), {}, ((f"failed: {row['reason'].splitlines()[0]}", "bad"),))
            continue
        cells = {mode: f"{ms:.4g}" for mode, ms in row["ms"].items()}
        yield Line(tuple(row["labels"]), cells, ((f"{gain(row):.2f}x", "good" if gain(row) >= 1 else "bad"),))


def summary(results: dict[str, Any]) -> str:
    measured = [row for row in results["rows"] if row["status"] == "ok"]
    said = []
    for kind, of_kind in (("training", True), ("inference", False)):
        gains = [gain(row) for row in measured if (row["labels"][2] == "training") == of_kind]
        if gains:
            mean = geometric_mean(gains)
            said.append(
                f"{kind} {mean:.2f}x in the geometric mean, bar {BAR:.2f}x {'met' if mean >= BAR else 'missed'}"
            )
    slower = sum(gain(row) < 0.98 for row in measured)
    return "; ".join([*said, f"{slower} of {len(measured)} slower than stock by more than 2 %"])


def print_tables(results: dict[str, Any], console: Console) -> None:
    print_table("Whole models on a CPU, ms", list(lines(results)), console, HEADS, MODES)
    console.print(f"{caption(results)}\n{summary(results)}", style="dim")


def markdown(results: dict[str, Any]) -> str:
    return f"{caption(results)}, {results['environment']['threads']} threads, ms:\n\n" + (
        f"{markdown_table(list(lines(results)), HEADS, MODES)}\n{summary(results)}.\n"
    )


#: As :data:`benchmarks.report.PAGES`.
PAGES = {"cpu_models": markdown}
