"""The modes in which a network runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import fastlayers

#: The modes, with their names in tables and plots, in the order of the tables.
MODES = {
    "eager": "torch",
    "compile": "torch.compile",
    "liger": "Liger",
    "fastlayers": "fastlayers",
    "fastlayers_compile": "fastlayers + torch.compile",
}
COMPILED = ("compile", "fastlayers_compile")
PATCHED = ("fastlayers", "fastlayers_compile")


class UnavailableError(Exception):
    """A mode that does not exist for this network, or a library that is not installed."""


def prepare(model: nn.Module, mode: str) -> str:
    """Prepare the model for the mode, in place. Returns a summary of what was changed.

    Raises:
        UnavailableError: the mode does not support this model.
    """
    if mode == "liger":
        return apply_liger(model)
    if mode in PATCHED:
        return fastlayers.patch_report(fastlayers.patch_model(model)).summary()
    return ""


def apply_liger(model: nn.Module) -> str:
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UnavailableError(f"Liger is not there: {error}") from error
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnavailableError(f"Liger has nothing for {kind}")
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    return f"Liger's layers for {kind}"


def compiled(model: nn.Module, mode: str) -> nn.Module:
    """The model, or its compiled form if the mode compiles."""
    if mode not in COMPILED:
        return model
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]


def folds(model: nn.Module, mode: str) -> bool:
    """Whether inference folds BatchNorms, as a user of fastlayers would."""
    return mode in PATCHED and any(isinstance(module, _BatchNorm) for module in model.modules())
