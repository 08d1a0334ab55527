"""The order of results in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.patching.fusion.fusable import is_dense
from fastlayers.patching.program.program import is_kernel
from fastlayers.patching.program.tape import Tape

__all__ = ["in_rows"]


def in_rows(tape: Tape, t: Tensor) -> Tensor:
    """A result of tokens in contiguous memory, if torch had to choose between the layouts of two operands.

    Tokens that are made of an image or a sound, as in ``conv(x).flatten(2).mT + positions``, lie channel by channel,
    and torch lets every sum with them lie so, in all layers that follow: each norm and each sum reads across the rows.
    """
    if t.dim() != 3 or t.is_contiguous() or not is_dense(t):
        return t
    name = tape.name(t)
    maker = next((operation for operation in reversed(tape.operations) if name in operation.makes), None)
    if maker is None or maker.view or maker.effect:
        return t
    pointwise = is_kernel(maker.function) or torch.Tag.pointwise in getattr(maker.function, "tags", ())
    operands = [tape.values[operand] for operand in maker.operands]
    differ = any(u.dim() > 1 and u.shape[-2:] == t.shape[-2:] and u.is_contiguous() for u in operands)
    return t.contiguous() if pointwise and differ else t
