"""patch_model: fused layers in any PyTorch model, undone as easily."""

from fastlayers.patching.api import (
    explain,
    fold_batch_norm,
    patch_model,
    patch_report,
    plan_fold,
    plan_patch,
    unfold_batch_norm,
    unpatch_model,
)
from fastlayers.patching.dynamo import compile_report, dynamo_backend
from fastlayers.patching.ir.operations import Op
from fastlayers.patching.ir.view import View
from fastlayers.patching.libraries.adapters import Adapter, register_adapter
from fastlayers.patching.measure.profile import Measurement, ProfileReport, profile_patch
from fastlayers.patching.measure.verify import Comparison, VerifyReport, verify_patch
from fastlayers.patching.plan import patched, unpatched
from fastlayers.patching.reasons import PatchError, PatchWarning, Reason, Refusal
from fastlayers.patching.report import PatchReport, RegionRow, Row, SignatureRow
from fastlayers.patching.rules import register_rule
from fastlayers.patching.rules.base import Gains, GraphRule, Match, ModuleRule

__all__ = [
    "Adapter",
    "Comparison",
    "Gains",
    "GraphRule",
    "Match",
    "Measurement",
    "ModuleRule",
    "Op",
    "PatchError",
    "PatchReport",
    "PatchWarning",
    "ProfileReport",
    "Reason",
    "Refusal",
    "RegionRow",
    "Row",
    "SignatureRow",
    "VerifyReport",
    "View",
    "compile_report",
    "dynamo_backend",
    "explain",
    "fold_batch_norm",
    "patch_model",
    "patch_report",
    "patched",
    "plan_fold",
    "plan_patch",
    "profile_patch",
    "register_adapter",
    "register_rule",
    "unfold_batch_norm",
    "unpatch_model",
    "unpatched",
    "verify_patch",
]
