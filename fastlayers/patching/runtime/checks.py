"""Tests of modules and tensors: the engine makes them once, and generated code on every call."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from fastlayers import backends
from fastlayers.ops.guard import is_plain
from fastlayers.ops.modes import sees_functions
from fastlayers.patching.reasons import PatchError

__all__ = [
    "GLOBAL_HOOKS",
    "HOOKS",
    "OWN_CALLS",
    "Casts",
    "IdleTest",
    "calls_are_torchs",
    "cast_dtype",
    "casts_input",
    "check_defaults",
    "hooked",
    "is_plain_layer",
    "is_sequential",
    "must_be_stock",
    "no_hooks",
    "original_class",
    "original_of",
    "plain",
    "plain_any",
    "rewritten_everywhere",
    "stock_forwards",
    "untouched",
    "with_little",
    "without_gradients",
    "without_kernels",
]

#: The hooks on all modules, and the attributes with those of one module.
GLOBAL_HOOKS = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes of a module that a call runs in place of what its class has. ``Module.compile`` sets the last one.
OWN_CALLS = ("forward", "_call_impl", "_compiled_call_impl")
#: Elements that a kernel reads and writes in some 2 us, while the host takes 20 us to call it.
LITTLE = 2**18
#: Elements that a CPU reads and writes in the few us that a call costs.
LITTLE_ON_A_CPU = 2**12

#: What a call of a module runs, as torch has it. Tracers and debuggers replace one of these, to see all calls.
_call: Any = nn.Module.__call__
_call_impl: Any = nn.Module._call_impl

_rewritten_everywhere = False
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_is_tracing: Callable[[], bool] = torch._C._is_tracing


#: A test of the first argument of a call.
IdleTest: TypeAlias = Callable[[object], bool]


class _Thread(threading.local):
    """Whether forwards of this thread are those of the stock classes."""

    stock = False


_thread = _Thread()


@contextmanager
def stock_forwards() -> Iterator[None]:
    """Let patched modules run what they ran before, in this thread: torch differentiates its own operations twice in
    less time than what stands for several."""
    before, _thread.stock = _thread.stock, True
    try:
        yield
    finally:
        _thread.stock = before


def must_be_stock() -> bool:
    """Whether somebody looks at the functions of torch that a forward calls: a trace, which exports them, or a mode; or
    whether this thread asked for stock forwards."""
    if is_compiling():  # Dynamo knows neither variables of threads nor the function below torch.jit's.
        return torch.jit.is_tracing() or (bool(_function_modes()) and sees_functions())
    return _is_tracing() or _thread.stock or (_function_modes() > 0 and sees_functions())


def without_kernels(x: object) -> bool:
    """Whether a call on ``x`` would run no kernel of ours. What a rewritten forward calls is then slower than torch."""
    if type(x) is list and x:  # of tensors, as in DenseNet
        x = x[0]
    return (
        is_plain(x)
        and not x.is_cuda  # type: ignore[attr-defined]
        and not _rewritten_everywhere
        and backends.get_backend() is None
    )


def without_gradients(x: object) -> bool:
    """Whether a call on ``x`` would run no kernel of ours that is for training. Under autocast a norm that is used
    twice gains otherwise, too: it is cast as it is written."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return without_kernels(x)
    return not _rewritten_everywhere and backends.get_backend() is None


def with_little(x: object) -> bool:
    """Whether a call on ``x`` is one that the host takes longer for than the GPU or the kernels of a CPU. Calls that
    are recorded for a region are not: there a kernel may become a part of a larger one."""
    return (
        is_plain(x)
        and x.numel() <= (LITTLE if x.is_cuda else LITTLE_ON_A_CPU)  # type: ignore[attr-defined]
        and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"))
        and not _rewritten_everywhere
        and backends.get_backend() is None
        and not torch._C._len_torch_dispatch_stack()
    )


@contextmanager
def rewritten_everywhere(wanted: bool = True) -> Iterator[None]:
    """Let rewritten forwards run where they gain nothing, too: to test them, or to count what they would save."""
    global _rewritten_everywhere
    before, _rewritten_everywhere = _rewritten_everywhere, wanted
    if wanted != before:
        backends.changed()  # What was recorded ran otherwise.
    try:
        yield
    finally:
        _rewritten_everywhere = before
        if wanted != before:
            backends.changed()


def original_class(module: nn.Module) -> type[nn.Module]:
    """The original class of a module, whether it is patched or not."""
    return getattr(type(module), "__dict__", {}).get("__fastlayers_original__", type(module))  # type: ignore[no-any-return]


def original_of(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module that is not patched, of which this one is that of a patched module, or itself."""
    return cls.__dict__.get("__fastlayers_original__", cls)  # type: ignore[no-any-return]


def calls_are_torchs(kind: Any = nn.Module) -> bool:
    """Whether nobody has replaced what a call of such a module runs."""
    return kind.__call__ is _call and kind._call_impl is _call_impl


def no_hooks(*modules: nn.Module) -> bool:
    """Whether nothing would see or change the inputs and outputs of these modules."""
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return False
    if not calls_are_torchs():
        return False
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return False
    return True


def plain(module: nn.Module, layer: type[nn.Module]) -> bool:
    """Whether ``module`` is still exactly a ``layer``, patched or not, with no forward of its own."""
    kind: Any = type(module)
    if kind is not layer and (
        getattr(kind, "__fastlayers_original__", kind) is not layer or kind.forward is not kind.__fastlayers_forward__
    ):
        return False
    own = module.__dict__
    return not ("forward" in own or "_call_impl" in own or "_compiled_call_impl" in own)


def untouched(*pairs: tuple[nn.Module, type[nn.Module]]) -> bool:
    """:func:`plain` for modules and their layers, and :func:`no_hooks` for the modules.

    Inlined, since this is most of the time of a guard: 2.7 us instead of 7.4 us for 21 children.
    """
    if _global_forward_hooks or _global_forward_pre_hooks or _global_backward_hooks or _global_backward_pre_hooks:
        return False
    if not calls_are_torchs():
        return False
    for module, layer in pairs:
        kind: Any = type(module)
        own = module.__dict__
        if kind is not layer and (
            getattr(kind, "__fastlayers_original__", kind) is not layer
            or kind.forward is not kind.__fastlayers_forward__
        ):
            return False
        if (
            "forward" in own
            or "_call_impl" in own
            or "_compiled_call_impl" in own
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return False
    return True


def plain_any(module: nn.Module, layers: frozenset[type[nn.Module]]) -> bool:
    """:func:`plain` for any one of several layers."""
    kind = type(module)
    layer: type[nn.Module] = getattr(kind, "__fastlayers_original__", kind)
    return layer in layers and plain(module, layer)


def check_defaults(stock: Any, present: Any) -> None:
    """Raise if a forward that was replaced has another default where the one before had one.

    A generated forward passes all arguments on and cannot tell whether a call gave one or meant the default.
    """
    if stock is present:
        return
    parameters = inspect.signature(present).parameters
    for name, parameter in inspect.signature(stock).parameters.items():
        now = parameters[name].default if name in parameters else parameter.empty
        if parameter.default is parameter.empty or now is parameter.empty:
            continue
        if now is not parameter.default and now != parameter.default:
            raise PatchError(
                f"{stock.__qualname__} was replaced by a function with another default of {name} ({now!r}, and "
                f"{parameter.default!r} before), which a patched model does not see: replace it before patching"
            )


def is_plain_layer(module: nn.Module) -> bool:
    return "forward" not in module.__dict__


def hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_sequential(module: nn.Module) -> bool:
    """Whether a module only calls its children in turn, like torch's Sequential."""
    original = original_class(module)
    if not issubclass(original, nn.Sequential) or not is_plain_layer(module):
        return False
    return original.forward is nn.Sequential.forward and original.__iter__ is nn.Sequential.__iter__


#: A test of a module, which :func:`cast_dtype` calls, and the module.
Casts: TypeAlias = tuple[Callable[[Any], bool], nn.Module | None]


def casts_input(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether autocast casts the input of a linear layer or convolution as it is.

    A weight of a tensor subclass, such as a quantised one, may handle the call before autocast.
    """
    padding: Any = getattr(layer, "padding_mode", "zeros")
    return plain(layer, kind) and padding == "zeros" and is_plain(layer.weight)


def cast_dtype(casts: Casts | None, *tensors: Tensor | None) -> torch.dtype | None:
    """The dtype to which autocast casts the result of an operation on these tensors; None if it may have other uses."""
    if casts is None or not isinstance(tensors[0], Tensor):
        return None
    kind = tensors[0].device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return None
    for t in tensors:  # Autocast ignores float64, and tensor subclasses may ignore autocast.
        if t is not None and (t.dtype is torch.float64 or not is_plain(t)):
            return None
    test, module = casts
    return torch.get_autocast_dtype(kind) if test(module) else None
