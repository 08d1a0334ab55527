"""An estimate of the memory traffic that patching saves, from one run of the model unpatched and one patched.

The estimate is simple. Every operation of torch reads each of its tensors once and writes each of its results once;
views, allocations and the statistics of a norm count nothing. Every function of :mod:`fastlayers.functional` counts as
one operation, since its kernel is one, even if another backend runs here. A patched module saves the difference of the
two sums in the forward. In a training step the backward reads and writes the gradients of the same tensors, so the
estimate is doubled.

Caches, repeated reads of a kernel and tensors that are not saved for the backward do not count;
:func:`fastlayers.profile_patch` measures their effect. If a guard of a rewritten forward fails on the example inputs,
the original code runs, and saves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fastlayers import functional
from fastlayers.ops import layer_norm as ops
from fastlayers.ops.modes import Mode
from fastlayers.patching.measure.runs import buffers_aside, rng_state, trains
from fastlayers.patching.measure.watch import MODULE_CALL, watching
from fastlayers.patching.plan import unpatched
from fastlayers.patching.program.cost import ALLOCATES, nbytes
from fastlayers.patching.rewrite.classes import is_fused
from fastlayers.patching.runtime.checks import rewritten_everywhere

__all__ = ["bytes_saved"]

FUNCTIONS: dict[CodeType, str] = {getattr(functional, name).__code__: name for name in functional.__all__}
#: The ops below that generated forwards call by themselves.
FUNCTIONS |= {op.__code__: op.__name__ for op in (ops.add_layer_norm, ops.add_rms_norm, ops.layer_norm, ops.rms_norm)}
#: Functions that call a matrix product of torch, and the bytes of the intermediate result, which is written and read
#: once: the product of gate and up; the logits, chunk by chunk.
HANDS_ON: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "gated_linear": lambda scope: bytes_in(scope["gate"]),
    "linear_cross_entropy": lambda scope: (
        bytes_in(scope["input"]) // scope["input"].shape[-1] * len(scope["linear_weight"])
    ),
}
#: Operations that move nothing, in addition to the views.
MOVES_NOTHING = ALLOCATES | {"_unsafe_view", "lift_fresh"}


def bytes_in(value: Any) -> int:
    """The bytes of the tensors in a structure."""
    return sum(nbytes(t) for t in tree_iter(value) if isinstance(t, Tensor) and t.layout is torch.strided)


class Traffic(Mode):
    """Counts the bytes that the forward of each chosen module moves, including the modules inside of it.

    Inside of several nested chosen modules, bytes count for the innermost one.
    """

    def __init__(self, chosen: set[nn.Module]) -> None:
        super().__init__()
        self.chosen = chosen
        self.moved: Counter[nn.Module] = Counter()
        #: The chosen modules that were called. The others have been absorbed.
        self.called: set[nn.Module] = set()
        self.inside: list[nn.Module] = []
        self.fused = 0

    def add(self, moved: int) -> None:
        if self.inside and not self.fused:
            self.moved[self.inside[-1]] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in MOVES_NOTHING:
            first = result[0] if "norm" in name and isinstance(result, tuple) else result
            self.add(bytes_in((args, kwargs, first)))
        return result

    def entered(self, frame: FrameType) -> None:
        scope = frame.f_locals
        if frame.f_code is not MODULE_CALL:
            name = FUNCTIONS[frame.f_code]
            self.add(bytes_in(list(scope.values())) + (2 * HANDS_ON[name](scope) if name in HANDS_ON else 0))
            self.fused += 1
        elif scope["self"] in self.chosen:
            self.called.add(scope["self"])
            self.inside.append(scope["self"])

    def left(self, frame: FrameType, result: Any) -> None:
        if frame.f_code is not MODULE_CALL:
            self.fused -= 1
            code = frame.f_code
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            given = [frame.f_locals[name] for name in names]  # A returned argument was not written.
            self.add(bytes_in([t for t in tree_iter(result) if not any(t is value for value in given)]))
        elif frame.f_locals["self"] in self.chosen:
            self.inside.pop()


def traffic(model: nn.Module, chosen: set[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traffic:
    seen = Traffic(chosen)
    with (
        rng_state(),
        buffers_aside(model),
        torch.no_grad(),
        watching({MODULE_CALL, *FUNCTIONS}, seen.entered, seen.left),
        seen,
    ):
        model(*args, **kwargs)
    return seen


@rewritten_everywhere()
def bytes_saved(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[nn.Module, int]:
    """The estimated bytes that each patched module saves in a step with these arguments."""
    patched = set(filter(is_fused, model.modules()))
    after = traffic(model, patched, args, kwargs)
    with unpatched(model):
        before = traffic(model, after.called, args, kwargs)
    passes = 2 if trains(model) else 1
    return {module: passes * (before.moved[module] - after.moved[module]) for module in patched}
