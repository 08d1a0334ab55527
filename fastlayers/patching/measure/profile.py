"""profile_patch: the time and the memory of a step, unpatched and patched.

The step time is wall time from an idle device to an idle device. Unpatched and patched steps alternate, so that other
load on the machine affects both. The time by kind of kernel comes from a separate profiler session: the sum of the
kernels on a GPU, the self time of each operator on a CPU.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from fastlayers.patching.measure.runs import buffers_aside, loss_or_outputs, rng_state, trains, unwrap
from fastlayers.patching.plan import unpatched
from fastlayers.patching.report import Report, readable
from fastlayers.patching.rewrite.classes import working
from fastlayers.patching.runtime.checks import original_class
from fastlayers.tables import Table

__all__ = ["Measurement", "ProfileReport", "profile_patch"]

WARM_UPS = 3
#: Bounds on the number of timed steps of each. Within them, as many steps run as fit into the seconds.
STEPS = (3, 20)
SECONDS = 4.0
PROFILED = 3  # steps in the profiler session

#: Kinds of kernels by patterns in their names; the first match counts. The names are those of CUDA kernels (of ATen,
#: cuDNN, cuBLAS, Inductor and fastlayers) and, on a CPU, of operators. Kernels that fastlayers generates are named by
#: what they compute, and in which forward: fused_add_layer_norm_gelu__block_py_88. Some other Triton kernels of
#: fastlayers for norms and for softmax have the same names, and count as norms.
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("generated", r"^fused_"),
        ("attention", r"flash|fmha|sdpa|attention"),
        ("convolution", r"conv(?!ert)|implicit_gemm|fprop|dgrad|wgrad|winograd|cudnn::cnn|im2col|col2im"),
        ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|xmma|split_?k|aten::(addmm|mm|bmm|baddbmm|addmv|mv|dot|linear)\b"),
        (
            "norm",
            r"(layer|batch|group|instance|rms)_?norm|cudnn::bn_|RowwiseMoments|GammaBeta|ComputeInternalGradients"
            r"|Compute(Backward)?FusedParams|^_(whole|long)_(for|back)ward|^_(normalise|(finish_)?(statistics|sums))"
            r"|^_(column_sums|gradient)|add_pieces",
        ),
        ("copy", r"memcpy|memset|copy|convert|fillfunctor|nchwToNhwc|nhwcToNchw|aten::(clone|fill_|zero_|cat|stack)\b"),
        (
            "reduction",
            r"softmax|reduce|entropy|nll|kl_div|_losses|_total|arg(max|min)|triton_(red|per)|_sum_rows|sum_partials"
            r"|aten::(sum|mean|amax|max|norm|var|logsumexp|cumsum|topk)\b",
        ),
        (
            "elementwise",
            r"elementwise|pointwise|triton_poi|functor|dropout|_flat|relu|gated|bias_act|act_backward|scale_|mul_|rotate"
            r"|^_(relu|add|mul|scale|dropout|rotary|rotate|gated|bias|act|repeated)|repeated_"
            r"|aten::(add|sub|mul|div|neg|abs|exp|log|pow|sqrt|rsqrt|sin|cos|tanh|sigmoid|silu|gelu|mish|elu|where|clamp"
            r"|threshold|masked_fill|bernoulli|hardswish|hardsigmoid|hardtanh|leaky_relu|addcmul|addcdiv|reciprocal)",
        ),
    )
)
OTHER = "other"


def kind_of(kernel: str) -> str:
    """The kind of a kernel or CPU operator by its name."""
    return next((kind for kind, pattern in KINDS if pattern.search(kernel)), OTHER)


@dataclass(frozen=True)
class Measurement:
    """One step of a model.

    Attributes:
        step_ms: median wall time.
        spread_ms: interquartile range of the wall time.
        kinds: device time in ms by kind of kernel, on a CPU the self time of operators; "other" matches no kind.
        kernels: the number of kernels, copies and memsets, on a CPU the number of operator calls.
        peak_bytes: peak memory, minus the memory before the step, such as the weights.
    """

    step_ms: float
    spread_ms: float
    kinds: dict[str, float]
    kernels: int
    peak_bytes: int

    @property
    def device_ms(self) -> float:
        """The device time of all kernels."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class ProfileReport(Report):
    """The result of :func:`profile_patch`.

    Attributes:
        before, after: a step of the unpatched and of the patched model.
        model: the name of the model's class.
        patched: the number of patched modules.
        training: whether a step has a backward.
        device: the name of the device.
        on_gpu: whether the device is a GPU.
    """

    before: Measurement
    after: Measurement
    model: str
    patched: int
    training: bool
    device: str
    on_gpu: bool

    @property
    def speedup(self) -> float:
        """The step time of the unpatched model divided by the step time of the patched one."""
        return self.before.step_ms / self.after.step_ms

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of kernels that ran."""
        known = (*(kind for kind, _ in KINDS), OTHER)
        return tuple(kind for kind in known if kind in self.before.kinds or kind in self.after.kinds)

    def summary(self) -> str:
        """One line."""
        step = "forward and backward" if self.training else "forward"
        return f"{self.model}, {self.patched} modules patched, {step} on {self.device}: {self.speedup:.2f}x as fast"

    def _table(self) -> Table:
        """A row for the step, for each kind of kernel, for their number and for the memory."""
        before, after = self.before, self.after
        device = "GPU time" if self.on_gpu else "operators"
        rows = [("step", before.step_ms, after.step_ms), (device, before.device_ms, after.device_ms)]
        rows += [(f"  {kind}", before.kinds.get(kind, 0.0), after.kinds.get(kind, 0.0)) for kind in self.kinds]
        lines = [(name, f"{a:.3f} ms", f"{b:.3f} ms", change(a, b)) for name, a, b in rows]
        count = "kernels" if self.on_gpu else "operator calls"
        lines.append((count, str(before.kernels), str(after.kernels), change(before.kernels, after.kernels)))
        a, b = before.peak_bytes, after.peak_bytes
        lines.append(("peak memory", readable(a), readable(b), change(a, b)))
        return Table(HEADER, lines, self.summary(), right=HEADER[1:])

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python data."""
        return {
            "model": self.model,
            "patched": self.patched,
            "training": self.training,
            "device": self.device,
            "speedup": self.speedup,
            "before": {**vars(self.before), "device_ms": self.before.device_ms},
            "after": {**vars(self.after), "device_ms": self.after.device_ms},
        }

    def plot(self, path: str | Path) -> Path:
        """Draw step time, device time by kind and peak memory, before and after, into a file.

        Args:
            path: the file. Its suffix determines the format, as in :meth:`matplotlib.figure.Figure.savefig`.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from fastlayers.patching.measure.picture import draw

        sides = (self.before, self.after)
        return draw(
            Path(path),
            self.summary(),
            "GPU time, ms" if self.on_gpu else "operators, ms",
            [side.step_ms for side in sides],
            {kind: [side.kinds.get(kind, 0.0) for side in sides] for kind in self.kinds},
            [side.peak_bytes / 2**20 for side in sides],
        )


HEADER = ("", "unpatched", "patched", "change")


def change(before: float, after: float) -> str:
    """The change in percent."""
    return f"{(after / before - 1) * 100:+.0f} %" if before else ""


def profile_patch(model: nn.Module, *inputs: Any, **kwargs: Any) -> ProfileReport:
    """Measure a step of a model unpatched and patched: time, device time by kind of kernel, peak memory.

    A patched model is measured as it is, an unpatched one as :func:`patch_model` would leave it. In training mode with
    gradients enabled, a step is a forward and a backward, from the output ``loss`` if the model has one, otherwise from
    all outputs with random gradients. In other modes a step is a forward. It runs in the present autocast state.

    Afterwards parameters, their gradients, buffers, the random state and the patches are as before. Hooks and the
    model's own Python code run in every step.

    Args:
        model: any module. A DDP or ``torch.compile`` wrapper is unwrapped, and the model inside runs as it is.
        inputs, kwargs: the arguments of the model.

    Returns:
        A report that prints as a table, Markdown and JSON, and draws a picture.

    Raises:
        TypeError: ``model`` is not a module.
    """
    model, in_patched = unwrap(model)
    tensors = [*model.parameters(), *(leaf for leaf in tree_leaves((inputs, kwargs)) if isinstance(leaf, Tensor))]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
    with rng_state(), buffers_aside(model), in_patched:
        before, after = measure(Step(model, inputs, kwargs), device)
        patches = len(working(model))
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    return ProfileReport(before, after, original_class(model).__name__, patches, trains(model), name, gpu)


class Step:
    """A step of a model with copies of the inputs, which stores no gradients."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.given = args, kwargs
        self.trains = trains(model)
        self.seeds: list[Tensor] = []

    def prepare(self) -> Any:
        """Copy the inputs for a step, since a model may overwrite them."""

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().clone().requires_grad_(value.requires_grad)

        return tree_map(own, self.given)

    def __call__(self, given: Any) -> None:
        args, kwargs = given
        if not self.trains:
            with torch.no_grad():
                self.model(*args, **kwargs)
            return
        outputs = loss_or_outputs(self.model(*args, **kwargs))
        if [seed.shape for seed in self.seeds] != [output.shape for output in outputs]:
            self.seeds = [torch.randn_like(output) for output in outputs]
        wanted = [tensor for tensor in (*self.model.parameters(), *tree_leaves(given)) if requires_grad(tensor)]
        if outputs:
            torch.autograd.grad(outputs, wanted, self.seeds, allow_unused=True)


def requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def measure(step: Step, device: torch.device) -> tuple[Measurement, Measurement]:
    """Measure the unpatched and the patched step of a patched model."""
    states: tuple[Callable[[], AbstractContextManager[Any]], ...] = (lambda: unpatched(step.model), nullcontext)
    for state in states:
        with state():
            for _ in range(WARM_UPS):
                step(step.prepare())
    times: tuple[list[float], list[float]] = [], []
    least, most = STEPS
    end = time.perf_counter() + SECONDS
    while len(times[0]) < least or (len(times[0]) < most and time.perf_counter() < end):
        for state, its in zip(states, times, strict=True):
            with state():
                its.append(wall_ms(step, device))
    measurements = []
    for state, its in zip(states, times, strict=True):
        low, middle, high = statistics.quantiles(its, n=4)
        with state():
            kinds, kernels, peak = profiled(step, device)
        measurements.append(Measurement(middle, high - low, kinds, kernels, peak))
    return measurements[0], measurements[1]


def wall_ms(step: Step, device: torch.device) -> float:
    given = step.prepare()
    synchronize(device)
    start = time.perf_counter()
    step(given)
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- what a step consists of ------------------------------------------------------------------------------------------


def profiled(step: Step, device: torch.device) -> tuple[dict[str, float], int, int]:
    """Device time in ms by kind of kernel, the number of kernels, and the peak memory of a step."""
    events = events_of(step, device)
    kinds: Counter[str] = Counter()
    for name, us in events:
        kinds[kind_of(name)] += us / 1e3 / PROFILED  # type: ignore[assignment]
    peak = gpu_peak(step, device) if device.type == "cuda" else cpu_peak(step)
    return dict(kinds), round(len(events) / PROFILED), peak


def events_of(step: Step, device: torch.device) -> list[tuple[str, float]]:
    """The names and times in us of everything that ran on a GPU; on a CPU of the operators, their self times."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]
    if gpu:
        with profile(activities=activities, acc_events=True):
            synchronize(device)  # The first session starts CUPTI, and may miss kernels.
    inputs = [step.prepare() for _ in range(PROFILED)]
    synchronize(device)
    with profile(activities=activities, acc_events=True) as prof:
        for given in inputs:
            step(given)
        synchronize(device)
    events = prof.events() or ()
    if not gpu:
        operators = (event for event in events if event.name.startswith(("aten::", "fastlayers::")))
        return [(event.name, event.self_cpu_time_total) for event in operators]
    return [
        (event.name, event.time_range.elapsed_us())
        for event in events
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def gpu_peak(step: Step, device: torch.device) -> int:
    given = step.prepare()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step(given)
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def cpu_peak(step: Step) -> int:
    given = step.prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        step(given)
    results: Any = prof.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in changes), initial=0))
