"""The modes in which a network runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import fastlayers
from benchmarks.networks.language import LanguageModel
from benchmarks.networks.network import Network
from fastlayers.patching.dynamo import dynamo_backend

#: The modes, with their names in tables and plots, in the order of the tables.
MODES = {
    "eager": "torch",
    "compile": "torch.compile",
    "reduce_overhead": "reduce-overhead",
    "liger": "Liger",
    "fastlayers": "fastlayers",
    "fastlayers_graph": "fastlayers + graph_model",
    "backend": 'backend="fastlayers"',
    "fastlayers_compile": "fastlayers + torch.compile",
}
#: The arguments of torch.compile in the modes that compile.
COMPILED: dict[str, dict[str, Any]] = {
    "compile": {},
    "reduce_overhead": {"mode": "reduce-overhead"},
    "backend": {"backend": dynamo_backend},  # its name is known only where fastlayers is installed
    "fastlayers_compile": {},
}
PATCHED = ("fastlayers", "fastlayers_graph", "fastlayers_compile")
GRAPHED = ("fastlayers_graph",)
#: The modes whose results depend on this repository.
OURS = (*PATCHED, "backend")
#: The modes whose code is compiled before they are measured: by torch.compile, or by Triton.
AHEAD = frozenset({*COMPILED, "fastlayers", *GRAPHED})
#: The order in which a run measures them: if it is cut short, the most useful rows are there.
STAGES = (
    ("fastlayers",),
    ("eager",),
    GRAPHED,
    ("compile", "reduce_overhead"),
    ("liger",),
    ("backend", "fastlayers_compile"),
)


def exists(network: Network, mode: str) -> bool:
    """Whether the mode may exist for this network: Liger replaces layers of language models."""
    return mode != "liger" or isinstance(network, LanguageModel)


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
    of_peft: Any = getattr(model, "get_base_model", None)
    model = model if of_peft is None else of_peft()
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
    return torch.compile(model, dynamic=False, **COMPILED[mode])  # type: ignore[return-value]


@contextmanager
def graphed(model: nn.Module, mode: str) -> Iterator[None]:
    """Replay the calls of the model if the mode does so. Leaving it frees the graphs."""
    if mode not in GRAPHED:
        yield
        return
    fastlayers.graph_model(model)
    try:
        yield
    finally:
        fastlayers.ungraph_model(model)


def graph_summary(model: nn.Module, mode: str) -> str:
    """A summary of the graphs of the model; empty in modes without graphs."""
    return fastlayers.graph_report(model).summary() if mode in GRAPHED else ""


def folds(model: nn.Module, mode: str) -> bool:
    """Whether inference folds BatchNorms, as a user of fastlayers would."""
    return mode in PATCHED and any(isinstance(module, _BatchNorm) for module in model.modules())
