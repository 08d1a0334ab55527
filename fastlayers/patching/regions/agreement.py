"""Whether two runs of a call gave the same: that of its recording, and those of the code that was made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlayers.ops import layouts
from fastlayers.patching.program.executors import KEYS, excluding

__all__ = ["NOISE", "agree", "in_backward", "largest_of", "some_gradient"]

#: The share of the largest element, and of each, that two runs may differ by at most,
ALIKE = 0.05
#: and the roundings of the largest gradient.
NOISE = 4
#: The norm of what a few elements may differ by, as a share of all: of a batch norm of 16 bits, its residual and a ReLU
#: one element of some 2000 has the other sign, and its gradient another 3 % in the norm.
FEW = 0.1


def some_gradient(t: Tensor) -> Tensor:
    """A gradient for a result, of values between -1 and 1 in no order, without drawing random numbers.

    Sums of regular ones would cancel, and leave rounding to be compared.
    """
    mixed = torch.arange(t.numel(), device=t.device) * 0x9E3779B97F4A7C1 + 1
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    values = (mixed >> 40) / 2.0**23
    return layouts.with_strides(values.to(t.dtype).view(t.shape), t.stride())


def agree(
    run: Sequence[Tensor | None],
    known: Sequence[Tensor | None],
    rounding: float,
    grads: Sequence[Tensor] = (),
    kinks: bool = False,
) -> bool:
    """Whether two runs gave the same, but for operations that sum in another order each time.

    Half of the digits that a ``rounding`` leaves have to be the same. Gradients may differ by a rounding of the largest
    number of all, the given ``grads`` among them: those that cancel, as the ones of a key's bias do, are nothing but
    rounding. ``kinks`` allows a few elements anything: where a sum is within a rounding of 0, the gradient of its ReLU
    is all or nothing, and generated code does not round what is added first.
    """
    largest = max((largest_of(t) for t in (*known, *grads) if t is not None), default=0.0) if grads else 0.0
    half = rounding**0.5
    alike, few = min(ALIKE, half), min(FEW, 2 * half)
    for a, b in zip(run, known, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif not b.is_floating_point() or b.numel() == 0:
            if not torch.equal(a, b):
                return False
        else:
            allowed = max(alike * largest_of(b), NOISE * rounding * largest)
            close = torch.allclose(a, b, rtol=alike, atol=allowed, equal_nan=True)
            if not close and not (kinks and (a.double() - b.double()).norm() <= few * b.double().norm()):
                return False
    return True


def largest_of(t: Tensor) -> float:
    return t.detach().nan_to_num(0, 0, 0).abs().max().item() if t.is_floating_point() and t.numel() else 0.0


class Backward(torch.autograd.Function):
    """Calls a function where a gradient would be computed."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return start.view_as(start)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.call()
        return None, None


def in_backward(function: Callable[[], Sequence[Tensor | None]], device: torch.device) -> Sequence[Tensor | None]:
    """The result of a raw backward, called in the thread in which autograd calls those of this device.

    cuDNN's plans are kept by thread, and to make one for the backward of a depthwise convolution takes up to half a
    second.
    """
    found: list[Sequence[Tensor | None]] = []

    def call() -> None:
        with torch.no_grad(), excluding(KEYS):
            found.append(function())

    with torch.enable_grad():
        start = torch.zeros((), device=device, requires_grad=True)
        torch.autograd.grad(Backward.apply(start, call), start, allow_unused=True)
    return found[0]
