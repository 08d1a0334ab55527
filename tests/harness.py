"""What the contract tests share: the places where a call runs, how it runs, and how its result is judged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only

from fastlayers import backends
from tests.table import OPS
from tests.table.sample import Call, Input, Op, Sample, contiguous

_NO_GPU = "torch sees no CUDA device"
_gpu_marks = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=_NO_GPU))


def needs_gpu(test: Any) -> Any:
    for mark in _gpu_marks:
        test = mark(test)
    return test


# ---- where -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A device, and the backend that is forced there."""

    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.device}-{self.backend}"

    def missing(self) -> str | None:
        """Why this machine lacks this place; None where it has it."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return _NO_GPU
        return backends.problem(self.backend, torch.device(self.device))

    def marks(self) -> list[Any]:
        missing = self.missing()
        marks = [pytest.mark.gpu] if self.device == "cuda" else []
        return marks if missing is None else [*marks, pytest.mark.skip(reason=missing)]

    def forced(self, sample: Sample) -> AbstractContextManager[None]:
        """Forces the backend. Where it has no kernel for the call nothing is forced: the op must fall back."""
        return nullcontext() if self.backend in sample.refused else backends.backend(self.backend)

    def is_slow(self) -> bool:
        """Whether thousands of calls would take too long."""
        return self.device == "cuda" or self.backend == "triton"


INTERPRETER = Place("cpu", "triton")
#: The interpreter gets no larger tensor: the time goes with the number of programs, and several are enough.
INTERPRETED = 2**17
PLACES = (
    Place("cpu", "eager"),
    Place("cpu", "cpu"),
    # test_triton_interpreter.py runs tests in a process where this holds.
    *([INTERPRETER] if backends.triton_interprets() else []),
    Place("cuda", "eager"),
    Place("cuda", "triton"),
    Place("cuda", "cuda"),
)
DEVICES = ("cpu", pytest.param("cuda", marks=_gpu_marks))


def cases(
    samples: Callable[[Op], Iterable[Sample]] = lambda op: op.samples,
    dtypes: Sequence[torch.dtype] | None = None,
    ops: Iterable[Op] = OPS,
    devices: Sequence[str] = ("cpu", "cuda"),
) -> Any:
    """Parametrises a test over (op, sample, place, dtype): each place with a kernel of the op, each of its dtypes."""
    if "cpu" in devices and not torch.cuda.is_available():
        devices = ("cpu",)  # collecting 20,000 tests to leave them out takes each process four seconds
    return pytest.mark.parametrize(
        ("op", "sample", "place", "dtype"),
        [
            pytest.param(
                op, sample, place, dtype, marks=place.marks(), id=f"{op.name}-{place}-{str(dtype)[6:]}-{sample.name}"
            )
            for op in ops
            for place in PLACES
            if place.backend in ("eager", *op.kernels) and place.device in devices
            for dtype in op.dtypes
            if dtypes is None or dtype in dtypes
            for sample in samples(op)
            if dtype in sample.dtypes and _worth_running(op, sample, place, dtype)
        ],
    )


def _worth_running(op: Op, sample: Sample, place: Place, dtype: torch.dtype) -> bool:
    if place.device == "cpu" and sample.gpu_only:
        return False
    if place.backend == "eager":
        # torch itself: one dtype shows that it is called right, and one call that a GPU has it.
        return dtype == torch.float32 and (place.device == "cpu" or sample is op.samples[0])
    if place == INTERPRETER:
        # It takes minutes, and a GPU has every call. Each op takes its plainest call and, in each dtype, every third
        # one, from another place on: in some dtype it takes all. So do ops that share kernels, which are neighbours
        # in the table, together in each dtype.
        alike = [other for other in op.samples if other.smooth == sample.smooth]
        first = (OPS.index(op) if op in OPS else 0) + op.dtypes.index(dtype)
        if sample in alike[1:] and (alike.index(sample) + first) % 3:
            return False
        if elements(sample) > INTERPRETED:
            return False
        # torch's BatchNorm on CPU adds float32 up in float64: its error says nothing of sums in float32. A GPU's does.
        return dtype != torch.float32 or op.fused.__name__ not in ("batch_norm", "instance_norm")
    if place.backend == "triton" and dtype in (torch.float16, torch.float64):
        # A kernel is compiled for each dtype and kind of shape, in half a second: these two get every third call.
        return op.samples.index(sample) % 3 == 0 if sample in op.samples else True
    return True


def elements(sample: Sample) -> int:
    """The number of elements of the largest argument."""
    return max(math.prod(value.shape) for value in sample.args if isinstance(value, Input))


def plain(op: Op) -> Iterable[Sample]:
    return op.samples[:1]


def smooth(op: Op) -> Iterable[Sample]:
    return (sample for sample in op.samples if sample.smooth)


# ---- running ---------------------------------------------------------------------------------------------------------


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def joined(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """``function``, its results stacked in one tensor where it has several."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        result = function(*args, **kwargs)
        return torch.stack(result) if isinstance(result, tuple) else result

    return call


def gradients_of(
    outs: tuple[Tensor, ...], layout: Callable[[Tensor], Tensor] = contiguous, draw: int = 0
) -> tuple[Tensor, ...]:
    """Incoming gradients. The same shapes get the same values in every dtype."""
    generator = torch.Generator().manual_seed(7 + draw)
    return tuple(layout(torch.randn(out.shape, generator=generator).to(out.device, out.dtype)) for out in outs)


@dataclass(frozen=True)
class Answer:
    """The results of a call, and the gradients of the tensors that require one."""

    outs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    def named(self) -> list[tuple[str, Tensor]]:
        outs = [(f"output {i}", out) for i, out in enumerate(self.outs)]
        return outs + [(f"gradient {i}", grad) for i, grad in enumerate(self.grads)]


def answer(
    function: Callable[..., Any], call: Call, layout: Callable[[Tensor], Tensor] = contiguous, draw: int = 0
) -> Answer:
    outs = outputs(function(*call.args, **call.kwargs))
    leaves = call.leaves()
    dys = gradients_of(outs, layout, draw)
    sent = [(out, dy) for out, dy in zip(outs, dys, strict=True) if out.requires_grad]
    grads = torch.autograd.grad([out for out, _ in sent], leaves, [dy for _, dy in sent]) if leaves else ()
    return Answer(tuple(out.detach() for out in outs), grads)


# ---- judging ---------------------------------------------------------------------------------------------------------

#: Of so few elements one draw of values says little about torch's greatest error: its roundings may happen to cancel.
FEW_ELEMENTS, DRAWS = 2**15, 12
#: Of the results of a module, where one large rounding on the way decides: twelve draws are too few once in 500 tests.
DRAWS_OF_MODULES = 36


def check_answer(
    op: Op, sample: Sample, place: Place, dtype: torch.dtype, few: int = FEW_ELEMENTS, draws: int = DRAWS
) -> None:
    """Compares the errors of a call and of torch's composition, both against the results in float64.

    A result of fewer than ``few`` elements may err as much as torch does in any of so many draws of the values, and so
    may one in float64, which another one in float64 judges: torch's may be the one that errs.
    """
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        ours = answer(op.fused, call)
    stock = answer(op.reference, call)
    exact = answer(op.reference, call.to_float64())
    # The interpreter truncates to bfloat16, which errs by up to a unit in the last place; to round errs by half of one.
    units = 2.0 if place == INTERPRETER and dtype is torch.bfloat16 else 1.0
    errors = torch_errors(op, call, 0)
    for i, ((what, mine), (_, theirs), (_, true)) in enumerate(
        zip(ours.named(), stock.named(), exact.named(), strict=True)
    ):
        assert_like(mine, theirs, what, true)
        allowed = errors[i]
        draw = 1
        judged_by_chance = mine.numel() < few or mine.dtype is torch.float64
        while judged_by_chance and draw < draws and excess(mine, true, units * allowed):
            other = sample.make(place.device, dtype, draw)
            allowed = max(allowed, torch_errors(op, other, draw)[i])
            if mine.dtype is torch.float64:
                allowed = max(allowed, apart(op, other, draw)[i])
            draw += 1
        problem = excess(mine, true, units * allowed)
        assert problem is None, f"{what}: {problem}"
    for (what, mine), theirs in zip(ours.named(), stock.outs, strict=False):
        assert steps(mine) == steps(theirs), f"{what}: strides {mine.stride()}, and torch has {theirs.stride()}"


def steps(t: Tensor) -> list[int]:
    """The strides that place elements: those of dimensions of size 1 depend on the path that torch took."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1]


def assert_like(ours: Tensor, stock: Tensor, what: str, exact: Tensor | None = None) -> None:
    """Checks that shape, dtype, and the places of NaN and infinities are those of torch.

    Where torch overflows on the way to a number, the ``exact`` result, ours need not.
    """
    assert ours.shape == stock.shape, f"{what}: shape {tuple(ours.shape)}, and torch has {tuple(stock.shape)}"
    assert ours.dtype == stock.dtype, f"{what}: {ours.dtype}, and torch has {stock.dtype}"
    assert torch.equal(ours.isnan(), stock.isnan()), f"{what}: NaN at other places than torch's"
    infinite = stock.isinf()
    if exact is not None:
        infinite = infinite & ~(ours.isfinite() & (exact.abs() <= torch.finfo(ours.dtype).max))
    assert torch.equal(ours.isinf(), infinite), f"{what}: infinite at other places than torch's"
    assert torch.equal(ours[infinite], stock[infinite]), f"{what}: infinities of another sign than torch's"


def excess(ours: Tensor, exact: Tensor, torch_error: float) -> str | None:
    """Says where the error of ``ours`` exceeds 1.5 times the greatest error of torch; None where it does not.

    One unit in the last place of the exact value is allowed besides: even the correctly rounded answer is half a unit
    off, and torch's may be exact by chance.
    """
    finite = ours.isfinite() & exact.isfinite()
    unit = torch.finfo(ours.dtype)
    exact = exact[finite]
    error = (ours[finite].double() - exact).abs()
    allowed = 1.5 * torch_error + unit.eps * exact.abs() + unit.smallest_normal * unit.eps
    if error.numel() == 0 or not bool((error > allowed).any()):
        return None
    worst = int((error - allowed).argmax())
    return (
        f"{int((error > allowed).sum())} of {ours.numel()} elements err more than torch; at worst {error[worst]:.3g}"
        f" from {exact[worst]:.6g}, and torch's greatest error is {torch_error:.3g}"
    )


def torch_errors(op: Op, call: Call, draw: int) -> list[float]:
    """The greatest error of torch's own composition in each result and gradient.

    No wider type judges float64: torch's error in float32 does, in proportion of the units. Two float64 answers may
    both be so far from the truth, so they may be twice as far from each other.
    """
    units = 1.0
    exact = answer(op.reference, call.to_float64(), draw=draw)
    stock = answer(op.reference, call, draw=draw)
    if stock.outs[0].dtype == torch.float64:
        narrow = call.map(lambda t: t.float() if t.is_floating_point() else t)
        kwargs = {name: None if isinstance(value, torch.dtype) else value for name, value in narrow.kwargs.items()}
        stock = answer(op.reference, Call(narrow.args, kwargs), draw=draw)
        units = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return [
        units * greatest_error(mine, true) for (_, mine), (_, true) in zip(stock.named(), exact.named(), strict=True)
    ]


def apart(op: Op, call: Call, draw: int) -> list[float]:
    """How far torch's answers in float64 on this device and on a CPU are from each other.

    A GPU's float32 may err by fewer units than its float64, whose products run in other kernels.
    """
    here, there = (answer(op.reference, each, draw=draw) for each in (call, call.map(Tensor.cpu)))
    return [greatest_error(a.cpu(), b) for (_, a), (_, b) in zip(here.named(), there.named(), strict=True)]


def greatest_error(stock: Tensor, exact: Tensor) -> float:
    finite = stock.isfinite() & exact.isfinite()
    return float((stock.double() - exact)[finite].abs().max()) if bool(finite.any()) else 0.0


class Widened(TorchDispatchMode):
    """Casts to float64 where a forward casts to a narrower dtype, and makes new tensors of the same values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(value, Tensor) for value in tree_leaves(args)):
            return tree_map_only(
                Tensor, lambda t: t.double() if t.is_floating_point() else t, function(*args, **kwargs)
            )
        dtype = kwargs.get("dtype")
        return function(*args, **({**kwargs, "dtype": torch.float64} if dtype and dtype.is_floating_point else kwargs))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Nested values with copies of modules and tensors; the function is applied to floating point numbers."""

    def copied(value: Any) -> Any:
        if isinstance(value, nn.Module):
            held = (t for m in value.modules() for t in (*vars(m).values(), *m.buffers()))
            module = copy.deepcopy(value, {id(t): t.detach().clone() for t in held if is_computed(t)})
            for t in (*module.parameters(), *module.buffers()):
                if t.is_floating_point():
                    t.data = function(t.data)
            return module
        if not isinstance(value, Tensor):
            return value
        copied = function(value.detach()) if value.is_floating_point() else value
        return copied.clone().requires_grad_(value.requires_grad)

    return tree_map(copied, value)


def is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf


def in_float64(function: Callable[..., Any], *args: Any) -> Any:
    """What a function of modules and tensors returns for copies of them in float64."""
    args = mapped(Tensor.double, args)
    with Widened():
        return function(*args)


def assert_no_worse(ours: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Checks that ``ours`` errs at most 1.5 times as much as torch's answer ``function(*args)``, which is returned.

    Float64 measures both: the function also runs on copies of its modules and tensors. How the roundings of one draw
    happen to cancel is chance, so a tensor may also have the error that is usual among the results, as a share of the
    largest element, and where that is not enough torch draws again, from values that are nearly the same. One unit in
    the last place is allowed besides, as in ``excess``. Results in float64 are compared with torch's.
    """
    given = mapped(lambda t: t, args)
    answer = function(*args)
    judge(ours, answer, function, given)
    return answer


def judge(ours: Any, answer: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> None:
    """``assert_no_worse`` where torch's answer is there, and copies of the arguments as they were before."""
    mine, stock = tensors_of(ours), tensors_of(answer)
    assert mine.keys() == stock.keys()
    if all(same_bits(mine[name], stock[name]) for name in mine):
        return
    true = tensors_of(in_float64(function, *given))
    for name, tensor in stock.items():
        is_judged = tensor.is_floating_point() and tensor.dtype is not torch.float64
        assert_like(mine[name], tensor, name, true[name] if is_judged else None)
        if not is_judged:
            torch.testing.assert_close(mine[name], tensor, equal_nan=True, msg=lambda text, at=name: f"{at}: {text}")
            del mine[name], true[name]
    allowed, draw = errors_of(stock, true), 1
    while (problem := more_than(allowed, mine, true)) and draw < DRAWS_OF_MODULES:
        near = mapped(partial(nudged, torch.Generator().manual_seed(draw)), given)
        exact = tensors_of(in_float64(function, *near))
        again = errors_of(tensors_of(function(*near)), exact)
        allowed = {name: max(error, again[name]) for name, error in allowed.items()}
        draw += 1
    assert problem is None, problem


def nudged(generator: torch.Generator, t: Tensor) -> Tensor:
    """Up to one hundredth more: other roundings, also of 16 bits."""
    return t * (1 + 0.01 * torch.rand(t.shape, generator=generator)).to(t.device, t.dtype)


def tensors_of(value: Any) -> dict[str, Tensor]:
    """The tensors of nested values by their places."""
    return {keystr(path): t.detach() for path, t in tree_flatten_with_path(value)[0] if isinstance(t, Tensor)}


def errors_of(stock: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The greatest error of each tensor, or what the median of them is as a share of the largest element."""
    errors = {name: greatest_error(stock[name], true) for name, true in exact.items()}
    sizes = {name: largest(true) for name, true in exact.items()}
    share = median_high([errors[name] / size for name, size in sizes.items() if size] or [0.0])
    return {name: max(error, share * sizes[name]) for name, error in errors.items()}


def more_than(errors: dict[str, float], ours: dict[str, Tensor], exact: dict[str, Tensor]) -> str | None:
    """Says which result errs more than 1.5 times as much as these errors and a unit in the last place."""
    for name, usual in errors.items():
        error = greatest_error(ours[name], exact[name])
        allowed = 1.5 * usual + torch.finfo(ours[name].dtype).eps * largest(exact[name])
        if error > allowed:
            return f"{name}: errs by {error:.3g}, and torch's errors allow {allowed:.3g}"
    return None


def largest(t: Tensor) -> float:
    return greatest_error(torch.zeros_like(t), t)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, where NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_close(ours: Any, theirs: Any) -> None:
    """Compares nested results up to rounding, in tests of *which* derivative a call gives."""
    torch.testing.assert_close(ours, theirs, equal_nan=True, check_stride=False)
