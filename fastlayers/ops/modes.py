"""Modes that see the operations of a forward: those of fastlayers, and those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Mode(TorchDispatchMode):
    """A mode of fastlayers, which knows the kernels."""

    #: Whether it has to see the operations of a forward one by one.
    needs_operations = True


class QuietMode(Mode):
    """A mode in which torch compiles, and runs what it has compiled, as outside of one.

    Dynamo skips a function that is called in another mode, in torch 2.13 for all calls to come, and raises an error if
    it was to compile all of it, as flex_attention asks. Of a DTensor the mode sees the operations on this rank's shard.
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # The DTensor calls operations on the shard then.
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation."""
        raise NotImplementedError


def needs_operations() -> bool:
    """Whether a mode has to see the operations of a forward one by one."""
    return bool(_dispatch_modes()) and any(
        getattr(mode, "needs_operations", True) for mode in _get_current_dispatch_mode_stack()
    )


def sees_functions() -> bool:
    """Whether a mode of ``__torch_function__`` has to see the functions of torch that a forward calls: any but torch's
    default device, unless it says otherwise."""
    modes = map(torch._C._get_function_stack_at, range(_function_modes()))
    return any(type(mode) is not DeviceContext and getattr(mode, "needs_operations", True) for mode in modes)


def is_watched() -> bool:
    """Whether a mode of somebody else sees what torch's dispatcher does: a counter of FLOPs, or the policy of a
    selective checkpoint. They know the products of torch, and no kernel that has one inside."""
    return bool(_dispatch_modes()) and not all(isinstance(mode, Mode) for mode in _get_current_dispatch_mode_stack())
