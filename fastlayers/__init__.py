"""fastlayers: drop-in fused layers for PyTorch, forward and backward, on any model."""

from fastlayers import functional, modules
from fastlayers.modules import DROP_IN, FusedAddReLU, FusedLogSoftmax, FusedMul, FusedReLUAdd, FusedSoftmax

__version__ = "0.1.0"
__all__ = ["DROP_IN", "FusedAddReLU", "FusedLogSoftmax", "FusedMul", "FusedReLUAdd", "FusedSoftmax", "functional", "modules"]
