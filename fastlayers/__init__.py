"""fastlayers: drop-in fused layers for PyTorch, forward and backward, on any model."""

from fastlayers import functional, modules
from fastlayers.checkpoint import load_model, save_model
from fastlayers.graphs import graph_model, graph_report, ungraph_model
from fastlayers.modules import *  # noqa: F403  (its __all__: the layers and DROP_IN)
from fastlayers.patching import (
    compile_report,
    explain,
    fold_batch_norm,
    patch_model,
    patch_report,
    patched,
    plan_fold,
    plan_patch,
    profile_patch,
    unfold_batch_norm,
    unpatch_model,
    unpatched,
    verify_patch,
)
from fastlayers.version import __version__ as __version__

__all__ = [
    "compile_report",
    "explain",
    "fold_batch_norm",
    "functional",
    "graph_model",
    "graph_report",
    "load_model",
    "modules",
    "patch_model",
    "patch_report",
    "patched",
    "plan_fold",
    "plan_patch",
    "profile_patch",
    "save_model",
    "unfold_batch_norm",
    "ungraph_model",
    "unpatch_model",
    "unpatched",
    "verify_patch",
]
__all__ += modules.__all__
