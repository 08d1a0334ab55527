"""A pair of raw ops as autograd takes it: forward, backward, and the backward in torch ops for second derivatives.

The autograd Function of eager mode follows from the pair, and so does the op that torch.compile puts into its graphs
(:mod:`fastlayers.ops.graph_ops`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

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


class Pair:
    """A raw forward and a raw backward, with what is kept between the two. The docstring of a subclass says what.

    A subclass has three static methods, which contain no choice of backend and no autograd:

    - ``forward(kernels, needs, *args)`` returns ``(results, kept, rest)``: the tensors that backward needs, None where
      one is missing, and everything else that it needs.
    - ``backward(kernels, needs, *grads, *kept, *rest)`` returns a gradient, or None, for each of the first ``inputs``
      arguments; anything for those that need none.
    - ``differentiable_backward(needs, *grads, *kept, *rest)`` returns the same by torch ops, for a second derivative.

    ``needs`` says which of the first ``inputs`` arguments need a gradient; it is empty where nothing is recorded.

    Class keywords:
        inputs: number of arguments, the first ones, that are tensors and may need a gradient.
        materialize: whether a result without a gradient gets one of zeros; otherwise backward is given None.
    """

    forward: ClassVar[Callable[..., tuple[Any, tuple[Tensor | None, ...], tuple[Any, ...]]]]
    backward: ClassVar[Callable[..., Gradients]]
    differentiable_backward: ClassVar[Callable[..., Gradients]]

    #: The autograd Function of the pair.
    node: ClassVar[type[torch.autograd.Function]]
    #: ``run(kernels, *args)``: the results of the forward, recorded by autograd where an input needs a gradient.
    run: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, *, inputs: int, materialize: bool = True) -> None:
        _generate(cls, inputs, materialize)

    @staticmethod
    def non_differentiable(needs: Needs, results: Any) -> tuple[Tensor, ...]:
        """The results that have no gradient although an input needs one."""
        return ()


def record_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What ``function.apply`` ends with, for calls that :meth:`Family.kernels_for` let through.

    Before torch 2.14 ``apply`` is Python and costs 3 us: it looks for a ``setup_context`` and an active transform, and
    goes through all arguments for tensors to :data:`unwrap`. The guard does the former, and the caller the latter.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


#: What :func:`_generate` makes of a pair, written out for its arguments: loops over them cost the host 2 us a call.
_TEMPLATE = """
def run(kernels, {args}):
    if is_grad_enabled() and ({wants_gradient}):
        return record({unwrapped}, (kernels, {rest}))
    return pair.forward(kernels, (), {args})[0]

def forward(ctx, {inputs}, rest):
    ctx.kernels, {rest} = rest
    results, kept, ctx.rest = pair.forward(ctx.kernels, ctx.needs_input_grad[:-1], {args})
    ctx.save_for_backward(*kept)
    return results

def forward_without_materialized_grads(ctx, {inputs}, rest):
    results = forward(ctx, {inputs}, rest)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*pair.non_differentiable(ctx.needs_input_grad[:-1], results))
    return results

def backward(ctx, *grads):
    needs = ctx.needs_input_grad[:-1]
    for dy in grads:
        if dy is not None and needs_double_backward(dy):
            {inputs}, = pair.differentiable_backward(needs, *grads, *ctx.saved_tensors, *ctx.rest)
            break
    else:
        {inputs}, = pair.backward(ctx.kernels, needs, *grads, *ctx.saved_tensors, *ctx.rest)
    return {needed}, None
"""


def _generate(pair: type[Pair], inputs: int, materialize: bool) -> None:
    """Give a pair its autograd Function and its ``run``."""
    _, _, *parameters = inspect.signature(pair.forward).parameters.values()
    names = [p.name for p in parameters]
    optional = {p.name for p in parameters if "None" in p.annotation}
    wants = [
        f"({t} is not None and {t}.requires_grad)" if t in optional else f"{t}.requires_grad" for t in names[:inputs]
    ]
    needed = [f"{t} if needs[{i}] else None" for i, t in enumerate(names[:inputs])]
    unwrapped = [f"None if {t} is None else unwrap({t})" if t in optional else f"unwrap({t})" for t in names[:inputs]]
    source = _TEMPLATE.format(
        args=", ".join(names),
        inputs=", ".join(names[:inputs]),
        rest=", ".join([*names[inputs:], ""]),
        wants_gradient=" or ".join(wants),
        unwrapped=", ".join(unwrapped),
        needed=", ".join(needed),
    )
    made: dict[str, Any] = {
        "pair": pair,
        "is_grad_enabled": torch.is_grad_enabled,
        "unwrap": unwrap,
        "needs_double_backward": needs_double_backward,
    }
    exec(compile(source, f"<fastlayers {pair.__name__}>", "exec"), made)
    forward = made["forward" if materialize else "forward_without_materialized_grads"]
    methods = {"__doc__": pair.__doc__, "forward": staticmethod(forward), "backward": staticmethod(made["backward"])}
    pair.node = type(pair.__name__, (torch.autograd.Function,), methods)
    made["record"] = record_of(pair.node)
    pair.run = staticmethod(made["run"])
