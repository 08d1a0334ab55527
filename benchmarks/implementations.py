"""The contestants: which implementations are timed, and how each is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.case import Case
from fastlayers.backends import available

#: Names in tables and plots, in the order of the tables.
TITLES = {
    "naive": "naive",
    "eager": "torch",
    "compile": "torch.compile",
    "chunked": "torch, chunked",
    "liger": "Liger",
    "trl": "TRL",
    "fastlayers": "fastlayers",
    "triton": "Triton",
    "cuda": "CUDA",
    "cpu": "C++",
}
#: fastlayers with one backend forced.
FORCED = ("triton", "cuda", "cpu")
#: fastlayers must not be slower than these; in GPU time not slower than those below either.
RIVALS = ("eager", "compile")
GPU_RIVALS = (*RIVALS, "chunked", "liger", "trl")


def contestants(case: Case, everything: bool = False) -> tuple[str, ...]:
    """The contestants of a case. By default only bfloat16 is compiled, because compiling takes most of a run."""
    compiled = everything or case.dtype == torch.bfloat16
    return tuple(name for name in case.contestants if name != "compile" or compiled)


def missing(name: str, case: Case) -> str | None:
    """Why this contestant cannot run the case here; None if it can."""
    if name in FORCED:
        return available()[name]
    if name == "naive" and case.op.naive is None:
        return "no naive version"
    if name == "chunked" and case.op.chunked is None:
        return "this torch has no such function"
    if name == "liger" and case.op.liger is None:
        return "Liger has no such function" if "liger_kernel" in sys.modules else "liger_kernel is not installed"
    if name == "trl" and case.op.trl is None:
        return "TRL has no such function, or is not installed"
    return None


def function(name: str, case: Case) -> Callable[..., Any]:
    """The function to call as ``function(*inputs, **case.options)``, inside ``backend(forced(name))``."""
    if name == "compile":
        torch._dynamo.reset()
        return torch.compile(case.op.eager, dynamic=False, fullgraph=True)
    op = case.op
    stock = {"naive": op.naive, "eager": op.eager, "liger": op.liger, "chunked": op.chunked, "trl": op.trl}
    chosen = stock.get(name, op.fused)
    assert chosen is not None, f"{name} was not asked for by missing()"
    return chosen


def liger(name: str, **fixed: Any) -> Callable[..., Any] | None:
    """Liger's function of that name with these options instead of the case's; None if Liger is not installed."""
    try:
        functions = import_module("liger_kernel.transformers.functional")
    except ImportError:
        return None
    return lambda *inputs, **options: getattr(functions, name)(*inputs, **fixed)


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of a contestant as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def forced(name: str) -> str | None:
    """The backend of fastlayers to force while this contestant runs."""
    return name if name in FORCED else None
