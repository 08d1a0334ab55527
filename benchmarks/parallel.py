"""Steps on two GPUs: tensor and sequence parallelism, FSDP2, and the loss of a vocabulary that is spread over both.

Each is measured in processes of its own. The loss is compared with what Megatron-LM computes for it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fastlayers
from benchmarks.environment import environment, version
from benchmarks.networks.language import LLAMA
from benchmarks.networks.modes import COMPILED, GRAPHED, PATCHED, compiled, prepare
from benchmarks.report import Line, caption, markdown_table, print_table
from benchmarks.result_file import rounded, write
from benchmarks.timing import peak_bytes
from fastlayers import functional

HEADS = ("step", "what")
MODES = {
    "eager": "stock", "compile": "torch.compile", "fastlayers": "fastlayers", "fastlayers_graph": "fastlayers, graphs",
}  # fmt: skip
GPUS = 2
#: Steps before those that are timed, which train and so give a curve of losses, and timed ones: forward and backward.
WARM, TIMED = 6, 7
#: Seconds after which a process that has not ended says where it is, and ends: one takes some 25.
HANGS = 100
LEARNING_RATE = 0.05
#: A parallelized head has a weight of its own.
NETWORK = replace(LLAMA, options={**LLAMA.options, "tie_word_embeddings": False})
ROWS, CLASSES = 8192, 128256

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A kind of step. ``bar``: the most of the time in each other mode that a patched step may take."""

    kind: str
    labels: tuple[str, str]
    bar: dict[str, float]
    modes: tuple[str, ...] = ("eager", "compile", "fastlayers")


LLAMA_STEP = f"{LLAMA.title}, {LLAMA.shape()} tokens"
JOBS = (
    Job(
        "loss",
        (f"loss of {ROWS} rows, {CLASSES} classes", "half of them on each GPU; stock is Megatron-LM's"),
        {"eager": 0.6},
        ("eager", "fastlayers"),
    ),
    Job("tensor", (LLAMA_STEP, "tensor and sequence parallel"), {"eager": 0.85, "compile": 0.85}, tuple(MODES)),
    Job("fsdp", (f"{LLAMA_STEP} on each GPU", "FSDP2"), {"eager": 0.8}),
)


# -- the loss ---------------------------------------------------------------------------------------------------------


class MegatronLoss(torch.autograd.Function):
    """Cross-entropy of logits whose classes are spread over the ranks, as Megatron-LM computes it, in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        scores = logits.float()
        top = scores.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        scores = scores - top[:, None]
        columns = scores.shape[1]
        first = dist.get_rank() * columns
        elsewhere = (target < first) | (target >= first + columns)
        classes = (target - first).masked_fill(elsewhere, 0)
        own = scores.gather(1, classes[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        dist.all_reduce(own)
        exponentials = scores.exp_()
        total = exponentials.sum(-1)
        dist.all_reduce(total)
        exponentials.div_(total[:, None])
        ctx.save_for_backward(exponentials, elsewhere, classes)
        ctx.dtype = logits.dtype
        return total.log() - own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        d, elsewhere, classes = ctx.saved_tensors
        rows = torch.arange(len(d), device=d.device)
        d[rows, classes] -= (~elsewhere).float()
        return d.mul_(dy[:, None]).to(ctx.dtype), None


def loss_step(mode: str, device: torch.device) -> Callable[[bool], Tensor]:
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (ROWS, CLASSES // GPUS)
    logits = torch.randn(shape, device=device, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), device=device, generator=torch.Generator(device).manual_seed(7))

    def step(trains: bool) -> Tensor:
        if mode == "eager":
            loss = MegatronLoss.apply(logits, target).mean()
        else:
            loss = functional.vocab_parallel_cross_entropy(logits, target)
        loss.backward()
        logits.grad = None
        return loss.detach()

    return step


# -- the network ------------------------------------------------------------------------------------------------------


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """torch's plan for a Llama of transformers: norms on shards of the sequence, the rest on heads and features."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows = Shard(1)
    to_rows: dict[str, Any] = {"output_layouts": rows, "use_local_output": False}
    parallelize_module(
        model, mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **to_rows),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
        },
    )  # fmt: skip
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(
            layer, mesh,
            {
                "input_layernorm": SequenceParallel(),
                "post_attention_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": rows},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
                **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
                **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
                "self_attn.o_proj": RowwiseParallel(**to_rows),
                "mlp.down_proj": RowwiseParallel(**to_rows),
            },
        )  # fmt: skip


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def network_step(kind: str, mode: str, device: torch.device, seed: int = 0) -> Callable[[bool], Tensor]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(seed)
    model = NETWORK.build(device).train()
    mesh = init_device_mesh("cuda", (GPUS,))
    if kind == "tensor":
        parallelize(model, mesh)  # before: what a patched forward does itself, a hook would have to be called for
        prepare(model, mode)
    else:
        prepare(model, mode)
        shard(model, mesh)
    if kind == "tensor" and mode == "compile":
        # As torchtitan does. The backward of the whole model fails in torch 2.11: the gradient of its logits is no
        # DTensor.
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.compile(dynamic=False, **COMPILED[mode])
    else:
        model = compiled(model, mode)
    if mode in GRAPHED:
        fastlayers.graph_model(model)
    torch.manual_seed(1 if kind == "tensor" else 1 + dist.get_rank())
    batch = NETWORK.example(device)

    def step(trains: bool) -> Tensor:
        with loss_parallel():
            loss = NETWORK.loss(model, batch)
            loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                if trains and weight.grad is not None:
                    weight.add_(weight.grad, alpha=-LEARNING_RATE)
                weight.grad = None
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return step


# -- processes --------------------------------------------------------------------------------------------------------


def measured(job: Job, mode: str, device: torch.device) -> Row:
    step = loss_step(mode, device) if job.kind == "loss" else network_step(job.kind, mode, device)
    losses, seconds = [], []
    for i in range(WARM + TIMED):
        if i == WARM:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            counted = fallbacks()
        dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = step(i < WARM)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    row: Row = {
        "ms": rounded(1e3 * statistics.median(seconds[WARM:])),
        "peak_bytes": peak_bytes(device),
        "losses": losses,
        "fallbacks": fallbacks() - counted,
    }
    if mode == "eager" and job.kind != "loss":
        del step, loss
        gc.collect()
        other = network_step(job.kind, mode, device, seed=1)
        row["losses_of_another_seed"] = [other(True).item() for _ in range(WARM)]
    return row


def measure(rank: int, index: int, mode: str, folder: str) -> None:
    """What one process does. The first one writes what it measured."""
    faulthandler.dump_traceback_later(HANGS, exit=True)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=GPUS, device_id=device)
    try:
        row = measured(JOBS[index], mode, device)
        gc.collect()  # Graphs with collectives inside have to go before the group does.
        if rank == 0:
            Path(folder, "row.json").write_text(json.dumps(row))
    finally:
        dist.destroy_process_group()


def fallbacks() -> int:
    """How many calls on DTensors got torch's composition."""
    from fastlayers.ops import sharding

    return sum(sharding.fallbacks().values())


def run(path: Path, only: tuple[str, ...], report: Callable[[str], None]) -> None:
    """Measure the jobs in their modes, and write the file after each."""
    rows: list[Row] = []
    content = {
        "kind": "parallel",
        "environment": environment(torch.device("cuda")) | {"libraries": {"transformers": version("transformers")}},
        "rows": rows,
    }
    for index, job in enumerate(JOBS):
        if only and job.kind not in only:
            continue
        row: Row = {"kind": job.kind, "labels": job.labels, "status": "ok", "modes": {}}
        rows.append(row)
        for mode in job.modes:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    torch.multiprocessing.spawn(measure, (index, mode, folder), GPUS)
                    row["modes"][mode] = json.loads(Path(folder, "row.json").read_text())
                except Exception as error:
                    row["modes"][mode] = {"reason": f"{type(error).__name__}: {error}"[-1500:]}
            write(path, content)
            report(f"[{len(rows)}] {', '.join(job.labels)}: {MODES[mode]}, {cell(row['modes'][mode])}")
        report(f"[{len(rows)}] {verdict(row)[0]}")


# -- the tables -------------------------------------------------------------------------------------------------------


def verdict(row: Row) -> tuple[str, str]:
    bar = next(job.bar for job in JOBS if job.kind == row["kind"])
    ours = [own for mode in PATCHED if "ms" in (own := row["modes"].get(mode, {}))]
    parts, missed = list[str](), False
    if not ours:
        return "failed", "bad"
    own = min(ours, key=lambda own: own["ms"])
    for mode, stock in row["modes"].items():
        if mode in PATCHED or "ms" not in stock:
            continue
        share = own["ms"] / stock["ms"]
        missed |= share > bar.get(mode, share)
        parts.append(f"{share:.2f}x {MODES[mode]}" + (f" (bar {bar[mode]:.2f}x)" if mode in bar else ""))
    if own["fallbacks"]:
        parts.append(f"{own['fallbacks']} calls fell back")
    if "losses_of_another_seed" in (stock := row["modes"]["eager"]):
        differences = (furthest(stock["losses"], each) for each in (own["losses"], stock["losses_of_another_seed"]))
        parts.append("losses differ by {:.1g}, those of two seeds by {:.1g}".format(*differences))
    return ", ".join(parts), "bad" if missed or own["fallbacks"] else "good"


def furthest(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference between two curves in the steps that train."""
    return max(abs(a - b) for a, b in zip(first[:WARM], second[:WARM], strict=True))


def cell(own: Row) -> str:
    return f"{own['ms']:.4g} ms, {own['peak_bytes'] / 2**30:.1f} GiB" if "ms" in own else "failed"


def lines(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["rows"]:
        cells = {mode: cell(own) for mode, own in row["modes"].items()}
        yield Line(tuple(row["labels"]), cells, (verdict(row),))


def print_tables(results: dict[str, Any], console: Console) -> None:
    print_table("Steps on two GPUs", list(lines(results)), console, HEADS, MODES)
    console.print(caption(results), style="dim")


def markdown(results: dict[str, Any]) -> str:
    return f"{caption(results)}, two GPUs:\n\n{markdown_table(list(lines(results)), HEADS, MODES)}"


#: As :data:`benchmarks.report.PAGES`.
PAGES = {"parallel": markdown}
