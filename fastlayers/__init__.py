"""fastlayers: drop-in fused layers for PyTorch, forward and backward, on any model."""

from fastlayers import functional, modules
from fastlayers.checkpoint import load_model, save_model
from fastlayers.modules import DROP_IN, FusedAddReLU, FusedLogSoftmax, FusedMul, FusedReLUAdd, FusedSoftmax
from fastlayers.patching import patch_model, patch_report, patched, plan_patch, unpatch_model, verify_patch

__version__ = "0.1.0"
__all__ = [
    "DROP_IN",
    "FusedAddReLU",
    "FusedLogSoftmax",
    "FusedMul",
    "FusedReLUAdd",
    "FusedSoftmax",
    "functional",
    "load_model",
    "modules",
    "patch_model",
    "patch_report",
    "patched",
    "plan_patch",
    "save_model",
    "unpatch_model",
    "verify_patch",
]
