"""Runs the cases: checks every contestant against float64, times it, and writes the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import DTYPE_NAMES, Case
from benchmarks.environment import environment
from benchmarks.implementations import as_tuple, contestants, forced, function, missing
from benchmarks.precompile import precompile, share_compiled_code
from benchmarks.result_file import rounded, write
from benchmarks.startup import startup
from benchmarks.timing import Clock, Task, clock_for, copy_bandwidth, host_us, loop_us, relative_error
from fastlayers.backends import BackendError, backend

#: Largest relative error against float64, or twice torch's own error if that is larger (a row of 2^20 float16
#: probabilities has only subnormal numbers). It is loose, and finds a wrong kernel. Eager and naive code may keep
#: bfloat16 in between, and only has to be finite.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}


class WrongAnswerError(Exception):
    """A contestant computes something else, so its time means nothing."""


class DeviceLostError(Exception):
    """A CUDA error after which this process cannot use the GPU any more."""


@dataclass
class Settings:
    samples: int = 20
    everything: bool = False
    only_implementations: tuple[str, ...] = ()
    time_limit: float | None = None
    startup: bool = False

    def names(self, case: Case) -> tuple[str, ...]:
        names = contestants(case, self.everything)
        return tuple(name for name in names if not self.only_implementations or name in self.only_implementations)


@dataclass
class Entrant:
    """A contestant that can run this case, with its inputs bound.

    ``originals`` are copies of ``upstream`` for a contestant that writes over it. ``kernels`` has the names of the
    kernels that each direction launched.
    """

    name: str
    function: Callable[[], Any]
    wanted: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]
    originals: tuple[Tensor, ...] = ()
    first_call_s: float = 0.0
    error: float = 0.0
    step: bool = False
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def gradients(self, outputs: Any) -> tuple[Tensor, ...]:
        """The gradients of the inputs that need one; empty if the case has no backward."""
        return torch.autograd.grad(as_tuple(outputs), self.wanted, self.upstream) if self.wanted else ()

    def train(self) -> None:
        self.gradients(self.function())

    def training(self) -> AbstractContextManager:
        return backend(forced(self.name))

    @contextmanager
    def inference(self) -> Iterator[None]:
        with backend(forced(self.name)), torch.no_grad():
            yield

    def prepare(self) -> Any:
        """Run the forward for a timed backward, after restoring the incoming gradients."""
        self.restore()
        return self.function()

    def restore(self) -> None:
        for original, dy in zip(self.originals, self.upstream, strict=False):
            dy.copy_(original)

    def tasks(self) -> dict[str, Task]:
        """What to time, by direction."""
        forward = Task(lambda _: self.function(), context=self.inference)
        if self.step:
            return {"forward": forward, "step": Task(lambda _: self.train(), self.restore, self.training)}
        backward = Task(self.gradients, prepare=self.prepare, context=self.training)
        return {"forward": forward, "backward": backward} if self.wanted else {"forward": forward}


@dataclass
class Results:
    """The results of a run, written to ``path`` after every case, so that an interrupted run keeps its rows."""

    path: Path
    environment: dict[str, object]
    copy_gbps: dict[str, float] = field(default_factory=dict)
    clock: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    startup: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def save(self) -> None:
        write(self.path, {name: value for name, value in asdict(self).items() if name != "path"})


def run(
    cases: Iterable[Case],
    path: Path,
    settings: Settings,
    device_for: Callable[[str], torch.device] = torch.device,
    report: Callable[[str], None] = lambda line: None,
) -> Results:
    """Run the cases in order and write the JSON file ``path``; ``report`` gets a line after each case.

    Raises:
        DeviceLostError: a kernel broke the CUDA context. The file has the rows of all cases before.
    """
    cases = list(cases)
    started = time.monotonic()
    main_device = device_for("cuda" if any(case.device_type == "cuda" for case in cases) else "cpu")
    results = Results(path, environment(main_device))
    if settings.startup:
        results.startup = startup()
        report("startup measured")
    share_compiled_code()
    to_compile = [case for case in cases if case.device_type == "cuda" and "compile" in settings.names(case)]
    if main_device.type == "cuda" and len(to_compile) > 1:
        precompile(to_compile, report)
    clocks: dict[str, Clock] = {}
    for case in cases:
        if settings.time_limit is not None and time.monotonic() - started > settings.time_limit:
            results.skipped.append(case.id)
            continue
        device = device_for(case.device_type)
        if device.type not in clocks:
            clocks[device.type] = clock_for(device)
            results.clock[device.type] = clocks[device.type].name
            results.copy_gbps[device.type] = copy_bandwidth(clocks[device.type], device)
        case_started = time.monotonic()
        try:
            rows = run_case(case, device, clocks[device.type], settings, results.copy_gbps[device.type])
        except DeviceLostError:
            results.skipped.append(case.id)
            results.save()
            raise
        results.rows += rows
        results.save()
        report(f"{case.id}: {time.monotonic() - case_started:.1f} s{complaints(rows)}")
    results.save()
    return results


def complaints(rows: list[dict[str, Any]]) -> str:
    failed = [f"{row['implementation']} FAILED: {row['reason']}" for row in rows if row["status"] == "failed"]
    return "".join(f"\n    {line}" for line in failed)


def run_case(
    case: Case, device: torch.device, clock: Clock, settings: Settings, copy_gbps: float
) -> list[dict[str, Any]]:
    """Run a case. Returns one row for each contestant."""
    rows = {name: new_row(case, name, device) for name in settings.names(case)}
    inputs = case.tensors(device)
    expected, upstream, expected_gradients = reference(case, inputs)
    entrants = []
    stock_error = 0.0  # torch's, which runs first; twice this error is allowed for the others
    for name, row in rows.items():
        try:
            entrant = enter(name, case, inputs, upstream, (*expected, *expected, *expected_gradients), 2 * stock_error)
            stock_error = entrant.error if name == "eager" else stock_error
            entrants.append(entrant)
        except BackendError as error:
            row.update(status="unavailable", reason=str(error))
        except Exception as error:  # any contestant may fail in any way; the others still run
            raise_if_lost(error)
            row.update(status="failed", reason=f"{type(error).__name__}: {error}"[:500])
    del expected, expected_gradients
    try:
        measure(case, entrants, rows, clock, settings.samples, copy_gbps)
    except Exception as error:
        raise_if_lost(error)
        measure_apart(case, entrants, rows, clock, settings.samples, copy_gbps)
    mark_torch_kernels(entrants, rows)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return list(rows.values())


def new_row(case: Case, name: str, device: torch.device) -> dict[str, Any]:
    return {
        "case": case.id,
        "suite": case.suite,
        "op": case.op.name,
        "family": case.op.family,
        "title": case.title,
        "shape": case.shape,
        "dtype": DTYPE_NAMES[case.dtype],
        "device": device.type,
        "bytes": {"forward": case.forward_bytes, "backward": case.backward_bytes},
        "bars": dict(case.bars),
        "implementation": name,
        "status": "ok",
        "reason": None,
    }


def raise_if_lost(error: Exception) -> None:
    if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
        raise DeviceLostError(str(error)) from error


def reference(
    case: Case, inputs: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs in float64, random gradients for them in the dtype that they should have, and those of the inputs."""
    wide = tuple(x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs)
    outputs = as_tuple(case.op.eager(*wide, **case.options))
    upstream = tuple(torch.randn_like(out, dtype=case.result_dtype or case.dtype) for out in outputs)
    wanted = [x for x in wide if x.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, [dy.double() for dy in upstream]) if wanted else ()
    return tuple(out.detach() for out in outputs), upstream, gradients


def enter(
    name: str,
    case: Case,
    inputs: tuple[Tensor, ...],
    upstream: tuple[Tensor, ...],
    expected: tuple[Tensor, ...],
    excused: float,
) -> Entrant:
    """Bind the contestant to the case, run it once, and compare its results with the expected ones.

    ``expected`` are the outputs of inference, the outputs of training, and the gradients.

    Raises:
        BackendError: the contestant cannot run here.
        WrongAnswerError: its results differ from the reference.
    """
    reason = missing(name, case)
    if reason is not None:
        raise BackendError(reason)
    bound = partial(function(name, case), *inputs, **case.options)
    entrant = Entrant(name, bound, tuple(x for x in inputs if x.requires_grad), upstream, step=case.step)
    if name == "liger":  # its rms_norm overwrites dy with dx
        entrant.upstream, entrant.originals = tuple(dy.clone() for dy in upstream), upstream
    started = time.perf_counter()
    with entrant.inference():
        inferred = as_tuple(entrant.function())
    with entrant.training():
        outputs = as_tuple(entrant.function())
        gradients = entrant.gradients(outputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize(inputs[0].device)
    entrant.first_call_s = time.perf_counter() - started
    answers = (*inferred, *outputs, *gradients)
    entrant.error = worst(relative_error(answer, right) for answer, right in zip(answers, expected, strict=True))
    allowed = float("inf") if name in ("eager", "naive") else max(case.tolerance or TOLERANCE[case.dtype], excused)
    if not entrant.error <= allowed:  # also if it is NaN
        raise WrongAnswerError(f"relative error {entrant.error:.1e} against float64; expected {allowed:.0e}")
    ours = name == "fastlayers" or forced(name) is not None  # others are timed in whatever layout they return
    for out, dy in zip(outputs, upstream, strict=True):
        if ours and (steps(out) != steps(dy) or out.dtype != dy.dtype):
            raise WrongAnswerError(f"{out.dtype} with strides {out.stride()}; expected {dy.dtype} with {dy.stride()}")
    return entrant


def steps(t: Tensor) -> list[int]:
    """The strides of dimensions with more than one element. Those of the others are arbitrary."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]


def worst(errors: Iterable[float]) -> float:
    """The largest error; NaN if one is NaN, which ``max`` may skip."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def measure(
    case: Case, entrants: list[Entrant], rows: dict[str, dict[str, Any]], clock: Clock, samples: int, copy_gbps: float
) -> None:
    timings = iter(clock.time([task for entrant in entrants for task in entrant.tasks().values()], samples))
    for entrant in entrants:
        row = rows[entrant.name]
        row.update(first_call_s=rounded(entrant.first_call_s), error=rounded(entrant.error))
        for direction in entrant.tasks():
            timing = next(timings)
            if timing.us == 0:
                raise RuntimeError(f"the profiler saw no kernel in {direction} of {entrant.name}")
            row[direction] = {"us": rounded(timing.us)}
            if not case.step:
                gbps = case.bytes_moved(direction) / timing.us / 1e3
                row[direction]["fraction"] = rounded(gbps / copy_gbps)
            entrant.kernels[direction] = timing.kernels
        if case.suite == "bars":  # a sweep is for a plot of GPU time, and on a CPU every time is wall time
            measure_host_side(case, entrant, row, clock)


def measure_apart(
    case: Case, entrants: list[Entrant], rows: dict[str, dict[str, Any]], clock: Clock, samples: int, copy_gbps: float
) -> None:
    """Time each contestant in a profiler session of its own, after one of them broke the common session."""
    for entrant in entrants:
        try:
            measure(case, [entrant], rows, clock, samples, copy_gbps)
        except Exception as error:
            raise_if_lost(error)
            rows[entrant.name].update(status="failed", reason=f"timing: {error}"[:500])


def mark_torch_kernels(entrants: list[Entrant], rows: dict[str, dict[str, Any]]) -> None:
    """Set ``torch_kernels`` in each direction where fastlayers, left to choose, launched the kernels of eager torch."""
    launched = {entrant.name: entrant.kernels for entrant in entrants}
    for direction, kernels in launched.get("fastlayers", {}).items():
        if kernels and kernels == launched.get("eager", {}).get(direction):
            rows["fastlayers"][direction]["torch_kernels"] = True


def measure_host_side(case: Case, entrant: Entrant, row: dict[str, Any], clock: Clock) -> None:
    """Measure wall time, the CPU time of a call, and peak memory."""
    with entrant.inference():
        row["wall_forward_us"] = rounded(loop_us(entrant.function, clock, seconds=0.01))
        if case.host:
            row["host_forward_us"] = rounded(host_us(entrant.function, clock, calls=500))
    if not entrant.wanted:
        return
    with entrant.training():
        row["wall_training_us"] = rounded(loop_us(entrant.train, clock, seconds=0.01))
        row["peak_bytes"] = clock.peak_bytes(entrant.train)
        if case.step and row["peak_bytes"] is not None:
            row["beyond_bytes"] = row["peak_bytes"] - sum(x.nbytes for x in entrant.wanted)
        if case.host:
            row["host_training_us"] = rounded(host_us(entrant.train, clock, calls=200))
