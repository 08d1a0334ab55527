"""A benchmark case: an op, its inputs, the bytes that it must move, and the bars that it has to reach."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Op:
    """One operation in every implementation that is timed. All of them take the same arguments.

    Args:
        family: the file of ``fastlayers.ops`` with the op; a family shares a plot.
        fused: the function of :mod:`fastlayers.functional`.
        eager: the composition as a torch user writes it. torch.compile gets it too, and in float64 it is the reference.
        naive: the formula step by step, without torch's own fused function.
        liger: Liger's function; None if it has none or is not installed.
        chunked: torch's own function that computes in chunks; None if this torch has none.
        trl: TRL's function; None if it has none or is not installed.
    """

    name: str
    family: str
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    naive: Callable[..., Any] | None = None
    liger: Callable[..., Any] | None = None
    chunked: Callable[..., Any] | None = None
    trl: Callable[..., Any] | None = None


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Input:
    """One input tensor.

    Args:
        make: creates it, as ``make(shape, dtype, device)``. Never with zeros, which can run faster than data.
        dtype: its dtype, if that is not the dtype of the case.
        parameter: whether it is a weight, a bias or a running statistic, which does not define the shape of the output.
    """

    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor] = normal
    grad: bool = True
    channels_last: bool = False
    dtype: torch.dtype | None = None
    parameter: bool = False

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = self.make(self.shape, self.dtype or dtype, device)
        if self.channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor.requires_grad_(self.grad)


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Args:
        op: what is computed, as ``function(*inputs, **options)``.
        inputs: the tensors. The output has the shape that they broadcast to, without the parameters. If no input needs
            a gradient, there is no backward.
        forward_bytes, backward_bytes: what a call has to read and write, such as ``"2b+1bit"``: ``b`` is the size of
            the output in bytes, ``bit`` one bit for each of its elements.
        bars: what has to be reached, by metric. ``forward`` and ``backward``: smallest fraction of the copy bandwidth.
            ``host_forward``, ``host_training``, ``forward_ratio``: largest ratio to eager's time. ``step/NAME`` and
            ``beyond/NAME``: largest ratio to the time and memory of a contestant. ``beyond``: largest number of MiB.
        suite: ``bars`` (the rows that an issue names), ``sweep`` (a line of a plot) or ``cpu``.
        contestants: the implementations to time. The result says which of them this machine does not have.
        result_dtype: the dtype of the outputs and their gradients, if that is not the dtype of the case.
        tolerance: largest relative error against float64; default: that of the dtype.
        step: time forward and backward together, because an op may do in its forward what others do in their backward.
            Its time is in matrix products, so no bytes are counted.
        host: measure the CPU time of a call, for inputs so small that the GPU is never the bottleneck.
        extra: run the case only with ``--all``.
    """

    op: Op
    inputs: tuple[Input, ...]
    dtype: torch.dtype
    forward_bytes: str
    backward_bytes: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    bars: Mapping[str, float] = field(default_factory=dict)
    suite: str = "bars"
    contestants: tuple[str, ...] = ("eager", "compile", "fastlayers", "triton", "cuda", "liger")
    result_dtype: torch.dtype | None = None
    tolerance: float | None = None
    step: bool = False
    host: bool = False
    extra: bool = False

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(torch.broadcast_shapes(*(spec.shape for spec in self.inputs if not spec.parameter)))

    @property
    def title(self) -> str:
        elements = self.shape[0]
        one_power = len(self.shape) == 1 and elements.bit_count() == 1
        size = f"2^{elements.bit_length() - 1}" if one_power else "x".join(map(str, self.shape))
        return f"{size} {self.label}".rstrip()

    @property
    def id(self) -> str:
        """What ``--only`` matches."""
        return f"{self.suite}/{self.op.name}/{self.title}/{DTYPE_NAMES[self.dtype]}".replace(" ", "-")

    @property
    def device_type(self) -> str:
        return "cpu" if self.suite == "cpu" else "cuda"

    def bytes_moved(self, direction: str) -> float:
        spelled = self.forward_bytes if direction == "forward" else self.backward_bytes
        return count_bytes(spelled, math.prod(self.shape), self.dtype.itemsize)

    def tensors(self, device: torch.device) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return tuple(spec.tensor(self.dtype, device) for spec in self.inputs)


def count_bytes(spelled: str, elements: int, itemsize: int) -> float:
    """The number of bytes that ``"2b+1bit"``, for example, stands for."""
    total = 0.0
    for term in spelled.split("+"):
        match = re.fullmatch(r"([\d.]*)(b|bit)", term.strip())
        if match is None:
            raise ValueError(f"bytes spelled {spelled!r}; expected terms like 2b and 1bit joined by +")
        count = float(match[1] or 1)
        total += count * elements * (itemsize if match[2] == "b" else 1 / 8)
    return total
