"""What a process of models.py measures: one model in one mode."""

from __future__ import annotations

import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fastlayers
from benchmarks.networks.modes import COMPILED, UnavailableError, compiled, folds, graph_summary, graphed, prepare
from benchmarks.networks.network import Batch, Network
from benchmarks.precompile import share_compiled_code
from benchmarks.result_file import rounded
from benchmarks.timing import device_events, peak_bytes

LEARNING_RATE = 1e-4
LOSSES = 10  # steps whose losses are compared; they are the warm-up of the timed steps
READY = 3  # calls after which all code is compiled: regions are recorded in the second
WARM = 5  # calls before anything else is timed: graph_model captures in the fourth
PROFILED = 2  # calls in a profile: their kernels take nearly the same time
LEAST, MOST = 10, 200  # timed calls in a loop
TURNS = 6  # loops of each of two models that are measured in turn
HOST_CALLS = 25  # calls whose host time is taken
#: A call of the warm-up is slow if it takes longer than a later one by this factor: the model is not ready yet.
SLOW = 1.5
#: Kernels that wait for the GPU before a launch waits as well. With more, the host time is the time of the GPU.
QUEUE = 1000
OUTPUTS = 64  # elements of the result of inference that are kept for comparison

#: The kind of a kernel is the first pattern that its name contains. Inductor's kernels come first, because their names
#: contain the operations that were fused. A 1x1 convolution that runs as a matrix product counts as one.
PATTERNS = {
    "compiled by torch": re.compile(r"^triton_(poi|red|per|for|mix)"),
    "attention": re.compile(r"flash|fmha|attention|sdpa"),
    "optimizer": re.compile(r"multi_tensor_apply|[Ff]used_?[Aa]dam"),
    "convolutions": re.compile(r"fprop|dgrad|wgrad|conv\dd|conv_|convolv|depthwise|implicit_gemm|n(chw|hwc)ToN"),
    "matrix products": re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitK|^triton_tem_"),
    "copies": re.compile(r"^Mem(cpy|set)"),
}
FUSED, OTHER = "fused layers", "other torch kernels"


def work(
    result: Path,
    output: Path,
    chosen: Network,
    mode: str,
    device: str,
    seconds: float,
    compile_only: bool,
    threads: int | None,
) -> None:
    """The work of a process: write the row to the file ``result`` and what is printed to ``output``.

    Args:
        compile_only: fill the caches of compiled code and time nothing.
        threads: the number of threads of torch.compile; None leaves the choice to torch.
    """
    os.setsid()  # one group with the processes that it starts, so that all can be ended together
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    share_compiled_code(threads)
    try:
        row = measure(chosen, mode, torch.device(device), seconds, compile_only)
    except (UnavailableError, ImportError) as error:
        row = {"status": "unavailable", "reason": str(error)}
    except Exception as error:  # a mode may fail in any way; the parent continues with the others
        row = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}
    result.write_text(json.dumps(row))


def measure(chosen: Network, mode: str, device: torch.device, seconds: float, compile_only: bool) -> dict[str, Any]:
    """Measure inference with the initial weights, then training, then the kernels of both.

    The profiler runs last: its first session attaches CUPTI to the process, and CUPTI stays and slows every launch
    (Kineto detaches it only with TEARDOWN_CUPTI=1).
    """
    model, batch, patched = make(chosen, mode, device)
    row: dict[str, Any] = {"status": "ok", "reason": None, "patched": patched}
    row["weights_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    called = compiled(model, mode)
    little = batch if mode in COMPILED else chosen.for_host_time().example(device)
    predict = predictor(chosen, called, batch, device)
    with evaluating(model, mode) as folded:
        row["inference"] = timed(predict, device, WARM, seconds, compile_only) | {"folded": folded}
        row["inference"]["outputs"] = sample(predict())
        if not compile_only:
            (row["inference"]["host_ms"],) = host_ms([predictor(chosen, called, little, device)], device)
            if chosen.decodes and mode not in COMPILED:
                row["decode"] = timed(chosen.decoder(model, batch), device, WARM, seconds, compile_only)
    losses: list[Tensor] = []
    with graphed(model, mode):
        step = trainer(chosen, model, called, batch, device, seed=1)
        row["training"] = timed(lambda: losses.append(step()), device, LOSSES, seconds, compile_only)
        row["training"]["losses"] = [loss.item() for loss in losses[:LOSSES]]
        if compile_only:
            return row
        (row["training"]["host_ms"],) = host_ms(
            [backpropagator(chosen, called, little, device)], device, after=lambda: model.zero_grad()
        )
        row["graphs"] = graph_summary(model, mode)
        if mode == "fastlayers":
            row["in_turn"] = in_turn_with_eager(chosen, model, batch, little, device, seconds)
        if device.type == "cuda":
            row["training"] |= kinds_of(step, device)
    if device.type == "cuda":
        with evaluating(model, mode):
            row["inference"] |= kinds_of(predict, device)
    if mode in COMPILED:
        for part in ("training", "inference"):
            if row[part].get("kernels", 0) > QUEUE:
                del row[part]["host_ms"]
    if mode == "eager":
        del model, called, predict, step
        row["training"]["losses_apart"], row["inference"]["outputs_apart"] = other_rounding(chosen, device)
    return row


def make(chosen: Network, mode: str, device: torch.device) -> tuple[nn.Module, Batch, str]:
    """Build the model and the batch, with the same values in every process."""
    torch.manual_seed(0)
    model, batch = chosen.build(device), chosen.example(device)
    return model, batch, prepare(model, mode)


# -- inference and training -------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module, mode: str) -> Iterator[bool]:
    """Prepare the model for inference as a user would; yields whether its BatchNorms are folded."""
    model.eval()
    folded = folds(model, mode)
    if folded:
        fastlayers.fold_batch_norm(model)
    with torch.no_grad(), graphed(model, mode):
        yield folded
    if folded:
        fastlayers.unfold_batch_norm(model)


def predictor(chosen: Network, called: nn.Module, batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    """A function for inference. ``called`` is the model or its compiled form."""

    def predict() -> Tensor:
        with chosen.autocast(device):
            return chosen.predict(called, batch)

    return predict


def trainer(
    chosen: Network, model: nn.Module, called: nn.Module, batch: Batch, device: torch.device, seed: int
) -> Callable[[], Tensor]:
    """A function for one training step with the dropouts of this seed. ``called`` is the model or its compiled form."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    torch.manual_seed(seed)

    def step() -> Tensor:
        with chosen.autocast(device):
            loss = chosen.loss(called, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()  # the next replay of a CUDA graph overwrites its results

    return step


def backpropagator(chosen: Network, called: nn.Module, batch: Batch, device: torch.device) -> Callable[[], None]:
    """A function for forward and backward, without the optimizer."""

    def backpropagate() -> None:
        with chosen.autocast(device):
            loss = chosen.loss(called, batch)
        loss.backward()

    return backpropagate


def other_rounding(chosen: Network, device: torch.device) -> tuple[list[float], list[float]]:
    """Losses and outputs of a second run of eager torch, with other dropouts and with weights that differ by a
    rounding."""
    model, batch, _ = make(chosen, "eager", device)
    rounding = torch.finfo(torch.bfloat16 if device.type == "cuda" else torch.float32).eps / 2
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + rounding * torch.empty_like(weight, dtype=torch.float32).uniform_(-1, 1))
    with evaluating(model, "eager"):
        outputs = sample(predictor(chosen, model, batch, device)())
    step = trainer(chosen, model, model, batch, device, seed=2)
    losses = [step() for _ in range(LOSSES)]
    return [loss.item() for loss in losses], outputs


def sample(result: Tensor) -> list[float]:
    """Elements of the result, at positions that are the same in every process."""
    places = torch.randint(result.numel(), (OUTPUTS,), generator=torch.Generator().manual_seed(0))
    return result.detach().flatten()[places.to(result.device)].float().tolist()


# -- how it is measured -----------------------------------------------------------------------------------------------


def timed(
    call: Callable[[], Any], device: torch.device, warm: int, seconds: float, compile_only: bool
) -> dict[str, Any]:
    """Time and memory of a call, after ``warm`` calls of which the first compiles.

    The time is the median over the calls of one loop, as a training loop has it.
    """
    first = [time_of(call, device) for _ in range(READY if compile_only else warm)]
    found: dict[str, Any] = {"first_s": round(first[0], 3)}
    if compile_only:
        return found
    gc.collect()
    reset_peak(device)
    durations = loop(call, device, seconds, LEAST)
    low, middle, high = statistics.quantiles(durations, n=4)
    found |= {"ms": rounded(middle), "spread_ms": rounded(high - low), "calls": len(durations)}
    slow = [place for place, took in enumerate(first, start=1) if 1e3 * took > SLOW * middle]
    found["ready_s"] = round(sum(first[: max(slow, default=0)]), 3)
    if device.type == "cuda":
        found["peak_bytes"] = peak_bytes(device)
    return found


def time_of(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call, until the GPU has finished."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def loop(call: Callable[[], Any], device: torch.device, seconds: float, least: int) -> list[float]:
    """Call for about this many seconds, and so many times at least, without waiting in between. Returns the time of
    each call in ms.

    On a GPU the time of a call is the time between the end of its work and the end of the next call's work. If Python
    is slower than the GPU, that is Python's time.
    """
    count = max(least, min(MOST, int(seconds / time_of(call, device))))
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            call()
            times.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(times)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    ends[0].record()
    for end in ends[1:]:
        call()
        end.record()
    synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(ends)]


def host_ms(
    calls: Sequence[Callable[[], Any]], device: torch.device, after: Callable[[], Any] = lambda: None
) -> list[float]:
    """For each of several calls, in turn, the time until it returns with an idle GPU before it: what Python takes.
    ``after`` follows each call."""
    durations: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM + HOST_CALLS):
        for call, taken in zip(calls, durations, strict=True):
            synchronize(device)
            started = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - started))
            after()
    return [rounded(statistics.median(taken[WARM:])) for taken in durations]


def in_turn_with_eager(
    chosen: Network, model: nn.Module, batch: Batch, little: Batch, device: torch.device, seconds: float
) -> dict[str, list[float]]:
    """Times in ms of stock torch and of the patched model, in turn in one process.

    Other processes of the machine slow the host down for seconds: the host time of one network in processes of their
    own was 9.4 ms and 14.0 ms within a minute. In turn both meet the same.
    """
    models = (make(chosen, "eager", device)[0], model)

    def zero_grad() -> None:
        for each in models:
            each.zero_grad()

    steps = [trainer(chosen, each, each, batch, device, seed=1) for each in models]
    found = {"training": loops_in_turn(steps, device, seconds)}
    little_steps = [backpropagator(chosen, each, little, device) for each in models]
    found["host"] = host_ms(little_steps, device, after=zero_grad)
    with evaluating(models[0], "eager"), evaluating(model, "fastlayers"):
        found["inference"] = loops_in_turn([predictor(chosen, each, batch, device) for each in models], device, seconds)
        found["host_inference"] = host_ms([predictor(chosen, each, little, device) for each in models], device)
        if chosen.decodes:
            found["decode"] = loops_in_turn([chosen.decoder(each, batch) for each in models], device, seconds)
    for each in models:
        each.train()
    return found


def loops_in_turn(calls: Sequence[Callable[[], Any]], device: torch.device, seconds: float) -> list[float]:
    """The median time of each call, in ms, in short loops that alternate."""
    durations: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(WARM):
            call()
    for _ in range(TURNS):
        for call, taken in zip(calls, durations, strict=True):
            taken += loop(call, device, seconds / TURNS, least=2)
    return [rounded(statistics.median(taken)) for taken in durations]


def kinds_of(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """GPU time of a call by kind of kernel, in ms, and the number of its kernels."""
    for _ in range(WARM):  # torch.compile may have to compile again, and a graph to be captured again
        call()
    with profile(activities=[ProfilerActivity.CUDA]):  # the first session starts CUPTI and may miss kernels
        torch.zeros(1, device=device)
        synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(PROFILED):
            call()
        synchronize(device)
    events = device_events(prof)
    fused = fused_kernels()
    kinds = dict.fromkeys((*PATTERNS, FUSED, OTHER), 0.0)
    for event in events:
        kinds[kind(event.name, fused)] += event.duration_us / 1e3 / PROFILED
    return {
        "tflops": rounded(product_tflops(device)),
        "gpu_ms": rounded(sum(kinds.values())),
        "kinds": {name: rounded(ms) for name, ms in kinds.items()},
        "kernels": len(events) // PROFILED,
    }


def product_tflops(device: torch.device, size: int = 8192, calls: int = 8) -> float:
    """What a product of bfloat16 reaches now: a GPU may be throttled, and what is measured then says nothing."""
    a, b = torch.empty((2, size, size), dtype=torch.bfloat16, device=device).normal_(std=0.1)
    out = a @ b
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return 2e-9 * calls * size**3 / start.elapsed_time(end)


def kind(name: str, fused: frozenset[str]) -> str:
    """The kind of a kernel by its name. ``fused`` are the names of the Triton kernels of fastlayers and Liger."""
    if "fastlayers" in name or name in fused or name.startswith("fused_"):  # the last ones are generated
        return FUSED
    return next((kind for kind, pattern in PATTERNS.items() if pattern.search(name)), OTHER)


def fused_kernels() -> frozenset[str]:
    """The names of the Triton kernels in the imported modules of fastlayers and Liger."""
    return frozenset(
        value.__name__
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(("fastlayers.kernels.", "liger_kernel."))
        for value in vars(module).values()
        if type(value).__module__.startswith("triton.") and hasattr(value, "__name__")
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
