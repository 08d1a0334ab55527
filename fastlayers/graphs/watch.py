"""What a captured graph takes for granted: the state of modules, and a call that the GPU can do alone."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fastlayers.ops.dispatch import PLAIN
from fastlayers.patching.rewrite.regions import attentions

__all__ = ["Counter", "State", "UncapturedError", "drawn_on_cpu", "waits"]

GLOBAL_HOOKS = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

#: What every module has and no forward reads.
UNREAD = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}


class UncapturedError(Exception):
    """A call cannot be captured. The message is the reason, as the report shows it."""


class State:
    """The modules, parameters, buffers, attributes and hooks of a module, as they are now.

    It does not refer to the module itself, so that it does not keep it alive.

    Raises:
        UncapturedError: a graph could not stand for calls of such a module.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        modules = list(module.modules())
        found: dict[int, Any] = {}
        for each in modules:
            found[id(vars(each))] = vars(each)
            for name, value in vars(each).items():  # What may be changed in place: parameters, a configuration.
                inner = value if isinstance(value, (list, dict)) else getattr(value, "__dict__", None)
                if (
                    isinstance(inner, (list, dict))
                    and not isinstance(value, (nn.Module, Tensor))
                    and name not in UNREAD
                ):
                    found[id(inner)] = inner
        self.dicts = list(found.values())
        self.copies = [value.copy() for value in self.dicts]
        self.hooks = [*GLOBAL_HOOKS, *(vars(each)[name] for each in modules for name in HOOKS)]
        self.inner = modules[1:]
        self.kinds = [*map(type, self.inner)]
        self.classes: list[Any] = [*dict.fromkeys(map(type, modules))]
        self.forwards = [cls.forward for cls in self.classes]
        self.tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        for name, t in (*module.named_parameters(), *module.named_buffers()):
            if type(t) not in PLAIN:
                raise UncapturedError(f"{name} is a {type(t).__name__}")
            if t.device != device:
                raise UncapturedError(f"{name} is on {t.device}, the inputs are on {device}")
        for each in modules:
            if any(vars(each)[name] for name in HOOKS):
                raise UncapturedError(f"a {type(each).__name__} has hooks")
        if any(GLOBAL_HOOKS):
            raise UncapturedError("hooks on all modules")
        self.addresses = [t.data_ptr() for t in self.tensors]
        options: Any = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self.guard = TensorGuards(*self.tensors, **options) if self.tensors else None
        self.flags = GlobalStateGuard()
        self.attentions = attentions()

    def holds(self) -> bool:
        """Whether everything still is as it was."""
        try:
            same = self.dicts == self.copies
        except Exception:  # What cannot be compared is another tensor or array.
            return False
        return (
            same
            and not any(self.hooks)
            and [t.data_ptr() for t in self.tensors] == self.addresses
            and (self.guard is None or self.guard.check(*self.tensors))
            and [*map(type, self.inner)] == self.kinds
            and [cls.forward for cls in self.classes] == self.forwards
            and self.flags.check()
            and attentions() == self.attentions
        )


class Counter(TorchDispatchMode):
    """Counts the operations of torch that compute something, and notes copies of tensors of the CPU: a graph would read
    the memory of the first one in each replay."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.copies = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        self.count += not (returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write)
        if isinstance(out, Tensor) and out.is_cuda:
            given = (*args, *(kwargs or {}).values())
            self.copies |= any(isinstance(t, Tensor) and not t.is_cuda and t.dim() > 0 for t in given)
        return out


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list that receives, at the end, where the host waited for the GPU."""
    found: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if "called a synchronizing CUDA operation" in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        elif "Synchronization debug mode is a prototype" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def drawn_on_cpu() -> tuple[Any, ...]:
    """The states of the random generators of the CPU, for a comparison."""
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()[1].tolist()
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy, numpy and numpy.random.get_state()[2]
