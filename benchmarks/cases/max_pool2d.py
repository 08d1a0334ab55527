"""max_pool2d as in the stem of ResNet-50. Bytes are those of the input; the output has a quarter of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import Case, Input, Op
from fastlayers import functional


def pool(kernel: int, stride: int, padding: int) -> Op:
    """An op for each window, because what is timed takes only tensors."""
    arguments: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding}
    return Op(
        f"max_pool2d_{kernel}x{kernel}",
        "max_pool2d",
        partial(functional.max_pool2d, **arguments),
        partial(F.max_pool2d, **arguments),
    )


def images(op: Op, *shape: int, nhwc: bool = True) -> Case:
    """The forward reads x and writes a quarter of its elements and one byte for each. The backward does the reverse."""
    moved = "1.25b+2bit"
    return Case(op, (Input(shape, channels_last=nhwc),), torch.bfloat16, moved, moved, label="NHWC" if nhwc else "NCHW")


CASES = [
    *(images(pool(3, 2, 1), 128, 64, 112, 112, nhwc=nhwc) for nhwc in (True, False)),
    images(pool(2, 2, 0), 128, 64, 112, 112),
]
