"""Steps of fine-tuning as its trainers run them: TRL's DPO and GRPO, LoRA, DoRA and QLoRA, stock and patched.

Each is measured in a process of its own, on a Llama of 1.2B parameters and texts of random words. What TRL generates
for GRPO is part of a step's time, and is given apart, since it takes most of it.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.environment import environment, version
from benchmarks.networks.language import LLAMA, LLAMA_DORA, LLAMA_LORA, LLAMA_LORA_DROPOUT, LLAMA_QLORA
from benchmarks.networks.modes import UnavailableError, prepare
from benchmarks.networks.network import Network
from benchmarks.report import Line, caption, markdown_table, print_table
from benchmarks.result_file import rounded, write

HEADS = ("step", "what")
MODES = {"eager": "stock", "fastlayers": "fastlayers"}
#: Steps before those that are timed, of which the second records regions, and timed ones.
WARM, TIMED = 3, 4
#: The most of stock's time and memory that a patched step may take.
BARS = {
    "dpo": (0.75, 0.5), "grpo": (0.75, 0.5), "lora": (0.7, 0.5), "dropout": (None, None), "dora": (None, None),
    "qlora": (None, 0.45),
}  # fmt: skip
#: Whose steps a trainer of TRL runs.
TRAINERS = ("dpo", "grpo")

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A kind of step. ``checkpoints``: whether the activations of the layers are computed again in the backward."""

    kind: str
    title: str
    network: Network
    checkpoints: bool = False

    @property
    def labels(self) -> tuple[str, str]:
        return self.title, "checkpointed" if self.checkpoints else ""


JOBS = (
    Job("dpo", "DPO, 4 pairs of 1024 tokens", LLAMA),
    Job("dpo", "DPO with LoRA, 4 pairs of 1024 tokens", LLAMA_LORA),
    Job("dpo", "DPO with LoRA, 4 pairs of 1024 tokens", LLAMA_LORA, checkpoints=True),
    Job("grpo", "GRPO with LoRA, 16 completions of 64 tokens", LLAMA_LORA),
    Job("lora", "LoRA, 4x2048 tokens", LLAMA_LORA),
    Job("dropout", "LoRA with a dropout of 0.05, 4x2048 tokens", LLAMA_LORA_DROPOUT),
    Job("dora", "DoRA, 4x2048 tokens", LLAMA_DORA),
    Job("qlora", "QLoRA, 4x2048 tokens", LLAMA_QLORA),
)


def tokenizer(words: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(words - 2))])}
    splits = Tokenizer(models.WordLevel(vocabulary, "<eos>"))
    splits.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=splits, pad_token="<pad>", eos_token="<eos>")


def trainer(job: Job, model: nn.Module, callback: Any) -> Any:
    """TRL's trainer for a job, which runs as many steps as are measured."""
    import trl
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    words = job.network.options["vocab_size"]

    def text(length: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(words - 2, (length,), generator=generator).tolist())

    given: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": True,
        "gradient_checkpointing": job.checkpoints, "max_steps": WARM + TIMED, "logging_steps": 1, "seed": 0,
        "learning_rate": 1e-5,
    }  # fmt: skip
    rest = {"model": model, "processing_class": tokenizer(words), "callbacks": [callback]}
    if job.kind == "dpo":
        rows = [{"prompt": text(224), "chosen": f" {text(800)}", "rejected": f" {text(800)}"} for _ in range(32)]
        arguments = trl.DPOConfig(per_device_train_batch_size=4, max_length=1024, **given)
        if job.network is LLAMA:
            rest["ref_model"] = job.network.build(torch.device("cuda"))
            if callback.mode == "fastlayers":
                prepare(rest["ref_model"], "fastlayers")
        return trl.DPOTrainer(args=arguments, train_dataset=Dataset.from_list(rows), **rest)
    rows = [{"prompt": text(128)} for _ in range(64)]
    arguments = trl.GRPOConfig(
        per_device_train_batch_size=16, num_generations=8, max_completion_length=64, steps_per_generation=1,
        beta=0.0, **given,
    )  # fmt: skip
    rewards = lambda completions, **_: [float(len(text) % 7) for text in completions]  # noqa: E731
    return trl.GRPOTrainer(args=arguments, train_dataset=Dataset.from_list(rows), reward_funcs=rewards, **rest)


def seconds_of(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def steps_of_trainer(job: Job, model: nn.Module, mode: str) -> Row:
    import transformers

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.mode, self.seconds, self.generating = mode, list[float](), list[float]()

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            if len(self.seconds) == WARM:
                torch.cuda.reset_peak_memory_stats()
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.started)

    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = 0, None if config is model.generation_config else 1  # type: ignore
    clock = Clock()
    trains = trainer(job, model, clock)
    if job.kind == "grpo":
        generate = trains._generate_and_score_completions

        def timed(*args: Any, **kwargs: Any) -> Any:
            found = []
            clock.generating.append(seconds_of(lambda: found.append(generate(*args, **kwargs))))
            return found[0]

        trains._generate_and_score_completions = timed
    trains.train()
    row = {"ms": rounded(1e3 * statistics.median(clock.seconds[WARM:]))}
    if clock.generating:
        learning = [a - b for a, b in zip(clock.seconds[WARM:], clock.generating[WARM:], strict=False)]
        row["learning_ms"] = rounded(1e3 * statistics.median(learning))
    losses = [entry["loss"] for entry in trains.state.log_history if "loss" in entry]
    return row | {"losses": losses}


def steps_alone(job: Job, model: nn.Module) -> Row:
    """Forward and backward."""
    batch, losses = job.network.example(torch.device("cuda")), []
    model.train()

    def step() -> None:
        loss = job.network.loss(model, batch)
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())

    for _ in range(WARM):
        step()
    torch.cuda.reset_peak_memory_stats()
    return {"ms": rounded(1e3 * statistics.median(seconds_of(step) for _ in range(TIMED))), "losses": losses}


def measure(index: int, mode: str) -> Row:
    job = JOBS[index]
    torch.manual_seed(0)
    model = job.network.build(torch.device("cuda"))
    prepare(model, mode)
    gc.collect()
    row = steps_of_trainer(job, model, mode) if job.kind in TRAINERS else steps_alone(job, model)
    return row | {"peak_bytes": torch.cuda.max_memory_allocated()}


def run(path: Path, only: tuple[str, ...], report: Callable[[str], None]) -> None:
    """Measure the jobs, and write the file after each."""
    libraries = {name: version(name) for name in ("transformers", "trl", "peft", "bitsandbytes")}
    rows: list[Row] = []
    content = {
        "kind": "fine_tuning",
        "environment": environment(torch.device("cuda")) | {"libraries": libraries},
        "rows": rows,
    }
    for index, job in enumerate(JOBS):
        if only and job.kind not in only:
            continue
        row: Row = {"kind": job.kind, "labels": job.labels, "status": "ok", "modes": {}}
        for mode in MODES:
            try:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                    row["modes"][mode] = process.submit(measure, index, mode).result()
            except (UnavailableError, ImportError) as error:
                row.update(status="unavailable", reason=str(error))
            except Exception as error:
                row.update(status="failed", reason=f"{type(error).__name__}: {error}"[-500:])
        rows.append(row)
        write(path, content)
        report(f"[{len(rows)}] {', '.join(filter(None, job.labels))}: {row.get('reason') or verdict(row)[0]}")


# -- the tables -------------------------------------------------------------------------------------------------------


def shares(row: Row) -> tuple[float, float]:
    """The patched step's share of stock's time, and of its memory."""
    stock, own = (row["modes"][mode] for mode in MODES)
    return own["ms"] / stock["ms"], own["peak_bytes"] / stock["peak_bytes"]


def verdict(row: Row) -> tuple[str, str]:
    parts, missed = [], False
    for name, share, bar in zip(("time", "memory"), shares(row), BARS[row["kind"]], strict=True):
        parts.append(f"{name} {share:.2f}x" + ("" if bar is None else f" (bar {bar:.2f}x)"))
        missed |= bar is not None and share > bar
    if "learning_ms" in row["modes"]["eager"]:
        stock, own = (row["modes"][mode]["learning_ms"] for mode in MODES)
        parts.append(f"without generation {own / stock:.2f}x")
    return ", ".join(parts), "bad" if missed else "good"


def lines(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["rows"]:
        if row["status"] != "ok":
            yield Line(tuple(row["labels"]), {}, ((f"{row['status']}: {row['reason'].splitlines()[0]}", "bad"),))
            continue
        cells = {mode: f"{own['ms']:.4g} ms, {own['peak_bytes'] / 2**30:.1f} GiB" for mode, own in row["modes"].items()}
        yield Line(tuple(row["labels"]), cells, (verdict(row),))


def print_tables(results: dict[str, Any], console: Console) -> None:
    print_table("Steps of fine-tuning", list(lines(results)), console, HEADS, MODES)
    console.print(caption(results), style="dim")


def markdown(results: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {found}" for name, found in results["environment"]["libraries"].items())
    return f"{caption(results)}, {libraries}:\n\n{markdown_table(list(lines(results)), HEADS, MODES)}"


#: As :data:`benchmarks.report.PAGES`.
PAGES = {"fine_tuning": markdown}
