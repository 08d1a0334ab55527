"""Fused layers as :class:`torch.nn.Module` classes, one file per family."""

from torch import nn

from fastlayers.modules.elementwise import FusedAddReLU, FusedMul, FusedReLUAdd
from fastlayers.modules.softmax import FusedLogSoftmax, FusedSoftmax

#: Torch classes that one fused class replaces, layer for layer. A fused class here adds no attribute to the torch
#: class: assigning ``module.__class__`` is all that a swap takes, in both directions.
DROP_IN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Softmax: FusedSoftmax,
    nn.LogSoftmax: FusedLogSoftmax,
}

__all__ = ["DROP_IN", "FusedAddReLU", "FusedLogSoftmax", "FusedMul", "FusedReLUAdd", "FusedSoftmax"]
