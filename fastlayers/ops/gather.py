"""The gradient of torch.gather along the last dimension, which has no forward of its own here.

A region puts it in place of torch's scatter_add, which adds element by element with atomics in global memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import raw_ops


class Kernels(raw_ops.Kernels):
    @staticmethod
    def gather_backward(dy: Tensor, index: Tensor, columns: int) -> Tensor:
        return torch.empty((*dy.shape[:-1], columns), dtype=dy.dtype, device=dy.device)


FAMILY = raw_ops.Family("gather", Kernels, csrc_only=("gather_backward",))

#: Columns up to which a block has the sums of several rows in shared memory.
COLUMNS = 2048
