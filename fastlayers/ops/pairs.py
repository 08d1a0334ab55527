"""A pair of raw ops as an autograd Function: forward, backward, and the backward in torch ops for second derivatives.

Eager mode calls it as it is. The op that torch.compile puts into its graphs is made of it
(:mod:`fastlayers.ops.graph_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

from fastlayers.ops.guard import needs_double_backward

#: A tensor without the functorch wrapper that it outlived; any other tensor as it is.
unwrap: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
#: For each of the first arguments of an op whether it needs a gradient; empty where autograd records nothing.
Needs: TypeAlias = tuple[bool, ...]
#: What a backward returns: a gradient, or None, for each of them.
Gradients: TypeAlias = tuple[Tensor | None, ...]


def differentiate(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], needs: Sequence[bool], dy: Tensor
) -> Gradients:
    """The gradients of ``function(*tensors)`` that are needed, under ``create_graph`` with a graph of their own."""

    def alias(t: Tensor) -> Tensor:  # an argument may itself depend on another one
        return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()

    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [alias(t) if t is not None and needed else t for t, needed in zip(tensors, needs, strict=True)]
        out = function(*aliases)
    wanted = [t for t, needed in zip(aliases, needs, strict=True) if t is not None and needed]
    found = iter(torch.autograd.grad(out, wanted, dy, create_graph=create_graph))
    return tuple(next(found) if needed else None for needed in needs)


def record_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` ends with, for calls that :meth:`Family.kernels_for` let through.

    Before torch 2.14 ``apply`` is Python and costs 3 us: it looks for a ``setup_context`` and an active transform, and
    goes through all arguments for tensors to :data:`unwrap`. The guard does the former, and the caller the latter.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class _WithKeywords(FunctionMeta):
    """torch's metaclass of Functions, which takes no class keywords. These are for ``__init_subclass__`` alone."""

    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(*given)


class Pair(torch.autograd.Function, metaclass=_WithKeywords):
    """A raw forward and a raw backward, with what is kept between the two. The docstring of a subclass says what.

    A subclass has three static methods, which contain no choice of backend and no autograd:

    - ``raw_forward(kernels, needs, *args)`` returns ``(results, kept, rest)``: a tensor, or a tuple of several; the
      tensors that backward needs, None where one is missing; and everything else that it needs.
    - ``raw_backward(kernels, needs, *grads, *kept, *rest)`` returns a gradient, or None, for each of the first
      ``inputs`` arguments; anything for those that need none. Of several results, those that nothing uses have the
      gradient None.
    - ``differentiable_backward(needs, *grads, *kept, *rest)`` returns the same by torch ops, for a second derivative.

    ``needs`` says which of the first ``inputs`` arguments need a gradient; it is empty where nothing is recorded.

    Class keywords:
        inputs: number of arguments, the first ones, that are tensors and may need a gradient.
    """

    raw_forward: ClassVar[Callable[..., tuple[Any, tuple[Tensor | None, ...], tuple[Any, ...]]]]
    raw_backward: ClassVar[Callable[..., Gradients]]
    differentiable_backward: ClassVar[Callable[..., Gradients]]

    _inputs: ClassVar[int]
    _record: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, *, inputs: int) -> None:
        cls._inputs, cls._record = inputs, record_of(cls)

    @staticmethod
    def constant(needs: Needs, results: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Which of several results have no gradient although an input needs one."""
        return ()

    @classmethod
    def run(cls, kernels: Any, *args: Any) -> Any:
        """The results of the forward, recorded by autograd where an input needs a gradient."""
        if torch.is_grad_enabled():
            inputs = args[: cls._inputs]
            for t in inputs:
                if t is not None and t.requires_grad:
                    unwrapped = [None if t is None else unwrap(t) for t in inputs]
                    return cls._record((kernels, args[cls._inputs :]), *unwrapped)
        return cls.raw_forward(kernels, (), *args)[0]

    # Each argument of a Function and each attribute of its context costs the host 0.2 us a call, so there is one.

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, tuple[Any, ...]], *inputs: Tensor | None) -> Any:
        pair, needs, (kernels, options) = ctx._forward_cls, ctx.needs_input_grad[1:], call
        results, kept, rest = pair.raw_forward(kernels, needs, *inputs, *options)
        ctx.save_for_backward(*kept)
        ctx.call = kernels, rest
        if type(results) is tuple:
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*pair.constant(needs, results))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        pair, needs, (kernels, rest) = ctx._forward_cls, ctx.needs_input_grad[1:], ctx.call
        for dy in grads:
            if dy is not None and needs_double_backward(dy):
                found = pair.differentiable_backward(needs, *grads, *ctx.saved_tensors, *rest)
                break
        else:
            found = pair.raw_backward(kernels, needs, *grads, *ctx.saved_tensors, *rest)
        gradients = [None, *found]
        for i, needed in enumerate(ctx.needs_input_grad):  # a comprehension costs the host 0.6 us more
            if not needed:
                gradients[i] = None
        return tuple(gradients)
