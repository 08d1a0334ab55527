"""Logits that are computed when something uses them: a loss was computed from chunks of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastlayers.ops.quantized import quantized
from fastlayers.patching.reasons import PatchWarning

__all__ = ["LATE", "Head", "LazyTensor", "Recipe", "can_be_lazy", "lazy"]

aten = torch.ops.aten
#: What a warning says, which Python shows once.
LATE = "a loss was computed without its logits, which are computed now that they are used"


def how_to_keep(head: str) -> str:
    return f"patch_model(model, exclude={head!r}) computes them first, and the loss from them"


class Head(NamedTuple):
    """The layer that computes logits, as the factors of its products that do not depend on the input.

    Attributes:
        weight: (C, H); it may be quantised, as :mod:`fastlayers.ops.quantized` knows it.
        bias: (C,) or None.
        thin: of each adapter the factor (C, R) of its product, which is added to the result.
        dtype: what the layer casts its input to; its result is cast back. None where it casts neither.
    """

    weight: Tensor
    bias: Tensor | None
    thin: tuple[Tensor, ...]
    dtype: torch.dtype | None

    @property
    def classes(self) -> int:
        weights = self.weight if self.dtype is None else quantized(self.weight) or self.weight
        return weights.shape[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd may keep: not a quantised weight, which hooks on saved tensors would part from its scales."""
        weight = self.weight if quantized(self.weight) is None else None
        return weight, self.bias, *self.thin

    def product(self, hidden: Tensor, adapted: Sequence[Tensor], *tensors: Tensor | None) -> Tensor:
        """The result of the layer, from :attr:`tensors` in the place of its own.

        ``adapted`` is the other factor of each adapter's product.
        """
        weight, bias, *thin = tensors
        rows = hidden if self.dtype is None else hidden.to(self.dtype)
        if weight is None:
            weight = quantized(self.weight).whole(rows.dtype)  # type: ignore[union-attr]
        bias = bias if bias is None or self.dtype is None else bias.to(self.dtype)
        logits = F.linear(rows, weight, bias)
        logits = logits if self.dtype is None else logits.to(hidden.dtype)
        for x, factor in zip(adapted, thin, strict=True):
            logits = (logits + F.linear(x, factor)).to(logits.dtype)  # type: ignore[arg-type]
        return logits


class Recipe(NamedTuple):
    """How the values are computed: by a layer, and by what the forward does with its result.

    Attributes:
        head: the layer.
        name: its name in the model.
        finish: computes the logits from the result of the layer, element by element.
        autocast: the dtype that autocast gave the layer; None without autocast.
    """

    head: Head
    name: str
    finish: Callable[[Tensor], Tensor]
    autocast: torch.dtype | None

    def run(self, *given: Any) -> Tensor:
        """``given``: the hidden states, what adapters make of them, and the tensors of the layer."""
        hidden, adapted, tensors = given[0], given[1 : len(self.head.thin) + 1], given[len(self.head.thin) + 1 :]
        dtype = self.autocast
        with torch.autocast(hidden.device.type, dtype, enabled=dtype is not None, cache_enabled=False):
            product = self.head.product(hidden, adapted, *tensors)
        return self.finish(product)

    def like(self, hidden: Tensor) -> Tensor:
        """The shape and the dtype of the logits."""
        cast = self.autocast is not None and self.head.dtype is None and hidden.dtype is not torch.float64
        shape = (*hidden.shape[:-1], self.head.classes)
        return self.finish(torch.empty(shape, dtype=self.autocast if cast else hidden.dtype, device="meta"))


def can_be_lazy() -> bool:
    """Whether a :class:`LazyTensor` may be returned: transforms and compilers would look into it."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def lazy(recipe: Recipe, sources: Sequence[Tensor]) -> Tensor:
    """The logits of a layer, which are differentiable as if they had been computed.

    ``sources`` are the tensors of this call: the inputs of the layer, and what its adapters make of them.
    """
    given = (*sources, *recipe.head.tensors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given if t is not None):
        return Lazily.apply(recipe, *given)  # type: ignore[no-any-return]
    return of_layer(recipe, *given)


def of_layer(recipe: Recipe, *given: Tensor | None) -> LazyTensor:
    def compute() -> Tensor:
        warnings.warn(f"{LATE}; if most steps use them, {how_to_keep(recipe.name)}", PatchWarning, stacklevel=2)
        return recipe.run(*(None if t is None else t.detach() for t in given))

    sources: Any = given[: len(recipe.head.thin) + 1]
    present = [t for t in (*given, recipe.head.weight) if t is not None]
    made = LazyTensor(Values(compute, present, recipe.name), recipe.like(sources[0]))
    made.recipe, made.sources = recipe, sources
    return made


class Lazily(torch.autograd.Function):
    """The logits of a layer, whose backward computes the layer again."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *given: Any) -> LazyTensor:
        ctx.recipe = recipe
        ctx.save_for_backward(*given)
        return of_layer(recipe, *given)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        needed, differentiable = ctx.needs_input_grad[1:], torch.is_grad_enabled()
        with torch.enable_grad():
            aliases: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors]
            wanted = [t for t, needs in zip(aliases, needed, strict=True) if needs]
            out = ctx.recipe.run(*aliases)
            found = iter(torch.autograd.grad(out, wanted, dy, create_graph=differentiable))
        return None, *(next(found) if needs else None for needs in needed)


class Values:
    """Values that are computed when they are first asked for, from tensors that must not have changed by then."""

    def __init__(self, compute: Callable[[], Tensor], tensors: Sequence[Tensor], head: str) -> None:
        self.compute: Callable[[], Tensor] | None = compute
        self.head = head
        self.before = [(t, version(t)) for t in tensors]
        self.device = tensors[0].device

    def get(self) -> Tensor:
        if self.compute is not None:
            if any(version(t) != before for t, before in self.before):
                raise RuntimeError(
                    "these logits were not computed for the loss, and cannot be any more: a tensor that they are"
                    " computed from has changed since the forward. Use them before the optimizer's step;"
                    f" {how_to_keep(self.head)}"
                )
            with torch.no_grad():
                self.values = self.compute()
            self.compute, self.before = None, []
        return self.values


def version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


class LazyTensor(Tensor):
    """A tensor whose values are computed when something uses them; its shape, dtype and device are known before.

    A cast to another dtype and ``detach()`` give lazy tensors, too: accelerate casts every output to float32. Anything
    else gives plain tensors.
    """

    _lazy_values: Values
    recipe: Recipe | None
    sources: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls, values: Values, like: Tensor) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=values.device)
        made._lazy_values, made.recipe = values, None
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # Results are plain.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return cls(args[0]._lazy_values, args[0])
        if func is aten._to_copy.default and [*kwargs] == ["dtype"] and not args[0].is_inference():
            source: LazyTensor = args[0]
            like = torch.empty(source.shape, dtype=kwargs["dtype"], device="meta")
            values = source._lazy_values
            return cls(Values(lambda: values.get().to(like.dtype), [source], values.head), like)
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(f"{func} changes the shape of logits that are computed when they are used; clone() them")
        lazy_ones: dict[int, LazyTensor] = {}

        def computed(t: LazyTensor) -> Tensor:
            values = t._lazy_values.get()
            lazy_ones[id(values)] = t
            return values

        args, kwargs = tree_map_only(LazyTensor, computed, (args, kwargs))
        result = func(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: lazy_ones.get(id(t), t), result)  # what is changed in place

    def computed(self) -> Tensor:
        """The same tensor as a plain one."""
        return self.view(self.shape)

    # What does not go through the dispatcher.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.computed())

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.computed(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.computed().numpy(force=force)

    def tolist(self) -> Any:
        return self.computed().tolist()

    def data_ptr(self) -> int:
        return self.computed().data_ptr()

    def untyped_storage(self) -> Any:
        return self.computed().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed().__dlpack__(*args, **kwargs)
