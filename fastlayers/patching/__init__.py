"""patch_model: fused layers in any PyTorch model, undone as easily."""

from fastlayers.patching.api import patch_model, patch_report, patched, plan_patch, unpatch_model
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
    "patch_model",
    "patch_report",
    "patched",
    "plan_patch",
    "unpatch_model",
    "verify_patch",
]
