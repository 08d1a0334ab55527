"""How time and memory are measured.

The GPU time of a call is the sum of its kernels, memsets and copies in :mod:`torch.profiler`, with a cold L2 cache, as
the median of many calls. Everything runs on one stream, in order. Before and after each call runs
``torch.cuda._sleep(1)``, whose kernel no op uses, and the kernels between these two markers belong to the call. So
launches need not be matched with kernels, and neither the forward of a timed backward nor the write that flushes the
cache is counted.

On a CPU the same interface measures wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MARKER = "spin_kernel"  # what torch.cuda._sleep launches
FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H100
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # a CPU reaches its full bandwidth with less
DROPPED = 2  # first samples of a task, not counted


@dataclass(frozen=True)
class Task:
    """What to time: ``call(prepare())`` inside ``context()``. Only ``call`` counts."""

    call: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass(frozen=True)
class Timing:
    """Median time of a call in us, and the names of the kernels that it launched."""

    us: float
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceEvent:
    """One kernel, memset or copy on the device's time line."""

    name: str
    start_us: float
    duration_us: float


class Clock(Protocol):
    """Times tasks on one kind of device."""

    name: str

    def time(self, tasks: Sequence[Task], samples: int) -> list[Timing]: ...

    def synchronize(self) -> None: ...

    def peak_bytes(self, function: Callable[[], object]) -> int | None: ...


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def summarize(durations: Sequence[float], kernels: Iterable[str] = ()) -> Timing:
    return Timing(statistics.median(durations), tuple(dict.fromkeys(kernels)))


def between_markers(events: Iterable[DeviceEvent], calls: int) -> list[list[DeviceEvent]]:
    """The events of each call: those between its two markers.

    Raises:
        RuntimeError: there are not two markers for each call, so the profiler lost events or another stream ran.
    """
    per_call: list[list[DeviceEvent]] = []
    markers = 0
    for event in sorted(events, key=lambda event: event.start_us):
        if MARKER in event.name:
            markers += 1
            if markers % 2:
                per_call.append([])
        elif markers % 2:
            per_call[-1].append(event)
    if markers != 2 * calls:
        raise RuntimeError(f"the profiler shows {markers} marker kernels; expected {2 * calls}, two per timed call")
    return per_call


def device_events(prof: profile) -> list[DeviceEvent]:
    """The events of the GPU, without the ranges of annotations."""
    return [
        DeviceEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in prof.events() or ()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


class CudaClock:
    """GPU time as the sum of kernels, with the L2 cache flushed before every call."""

    name = "GPU time: summed kernels, cold L2"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        with profile(activities=[ProfilerActivity.CUDA]):  # the first session starts CUPTI and may miss kernels
            self.flush.fill_(1)
            torch.cuda.synchronize(device)

    def time(self, tasks: Sequence[Task], samples: int) -> list[Timing]:
        """Time all tasks in one profiler session, because a session costs more than the calls."""
        each = samples + DROPPED
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for task in tasks:
                with task.context():
                    for _ in range(each):
                        self._sample(task)
            torch.cuda.synchronize(self.device)
        calls = between_markers(device_events(prof), each * len(tasks))
        timings = []
        for first in range(0, len(calls), each):
            counted = calls[first + DROPPED : first + each]
            durations = [sum(event.duration_us for event in call) for call in counted]
            timings.append(summarize(durations, (event.name for call in counted for event in call)))
        return timings

    def _sample(self, task: Task) -> None:
        state = task.prepare()
        self.flush.fill_(1)
        torch.cuda._sleep(1)
        # The result lives until after the marker, so that no memory of the call is reused before its end.
        result = task.call(state)
        torch.cuda._sleep(1)
        del result

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def peak_bytes(self, function: Callable[[], object]) -> int | None:
        """Peak memory of the call, without the memory that was allocated before."""
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


class CpuClock:
    """Wall time of each call."""

    name = "CPU wall time"

    def time(self, tasks: Sequence[Task], samples: int) -> list[Timing]:
        """Time the tasks in turns, so that other work on the machine affects all of them."""
        durations: list[list[float]] = [[] for _ in tasks]
        for _ in range(samples + DROPPED):
            for task, its in zip(tasks, durations, strict=True):
                with task.context():
                    its.append(self._sample(task))
        return [summarize(its[DROPPED:]) for its in durations]

    def _sample(self, task: Task) -> float:
        state = task.prepare()
        start = time.perf_counter()
        result = task.call(state)
        us = (time.perf_counter() - start) * 1e6
        del result
        return us

    def synchronize(self) -> None:
        pass

    def peak_bytes(self, function: Callable[[], object]) -> int | None:
        return None


def peak_bytes(device: torch.device) -> int:
    """Peak memory since the statistics were reset, with what CUDA graphs keep."""
    return torch.cuda.max_memory_allocated(device) + idle_in_graphs(torch.cuda.memory_snapshot())


def idle_in_graphs(segments: list[dict[str, Any]]) -> int:
    """Bytes that CUDA graphs reserve beyond what counts as allocated: nobody else can use them between replays."""
    of_graphs = (segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in of_graphs)


def copy_bandwidth(clock: Clock, device: torch.device, samples: int = 20) -> float:
    """GB/s of a copy on the device, bytes read plus bytes written: the limit of every memory-bound op."""
    size = COPY_BYTES[device.type]
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    [timing] = clock.time([Task(lambda _: target.copy_(source))], samples)
    return 2 * size / timing.us / 1e3


def loop_us(function: Callable[[], object], clock: Clock, seconds: float, rounds: int = 3) -> float:
    """Time of a call in a loop of about ``seconds`` with a synchronisation at its end; median of a few rounds."""
    clock.synchronize()
    start = time.perf_counter()
    function()
    clock.synchronize()
    calls = max(1, min(500, int(seconds / (time.perf_counter() - start))))
    return statistics.median(_round_us(function, calls, clock.synchronize) for _ in range(rounds))


def host_us(function: Callable[[], object], clock: Clock, calls: int, rounds: int = 5) -> float:
    """Time until a call returns, without waiting for the device. ``calls`` must not fill the device's queue."""
    rounds_us = []
    for _ in range(rounds):
        clock.synchronize()
        rounds_us.append(_round_us(function, calls, lambda: None))
    return statistics.median(rounds_us)


def _round_us(function: Callable[[], object], calls: int, finish: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    finish()
    return (time.perf_counter() - start) / calls * 1e6


def relative_error(result: Tensor, expected: Tensor) -> float:
    """‖result − expected‖ / ‖expected‖, in the precision of ``expected``; NaN if either has a NaN."""
    difference = result.detach().to(expected.dtype) - expected
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(expected))
