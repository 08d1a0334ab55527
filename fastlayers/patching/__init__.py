"""patch_model: fused layers in any PyTorch model, undone as easily."""

from fastlayers.patching.api import (
    fold_batch_norm,
    patch_model,
    patch_report,
    patched,
    plan_fold,
    plan_patch,
    unfold_batch_norm,
    unpatch_model,
)
from fastlayers.patching.reasons import PatchError, PatchWarning, Reason
from fastlayers.patching.report import PatchReport, Row
from fastlayers.patching.verify import Comparison, VerifyReport, verify_patch

__all__ = [
    "Comparison",
    "PatchError",
    "PatchReport",
    "PatchWarning",
    "Reason",
    "Row",
    "VerifyReport",
    "fold_batch_norm",
    "patch_model",
    "patch_report",
    "patched",
    "plan_fold",
    "plan_patch",
    "unfold_batch_norm",
    "unpatch_model",
    "verify_patch",
]
