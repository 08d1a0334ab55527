"""Logits that are computed when something uses them: a loss was computed from chunks of them."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fastlayers.ops.quantized import quantized
from fastlayers.patching.reasons import PatchWarning

__all__ = ["LATE", "Head", "LazyTensor", "Link", "Recipe", "can_be_lazy", "lazy"]

aten = torch.ops.aten
_grad: Any = Tensor.grad
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


def lazy(recipe: Recipe, sources: Sequence[Tensor]) -> LazyTensor:
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
    """Values that are computed when they are first asked for, from tensors that must not have changed by then.

    torch counts what is written into a tensor, but not through its ``.data``, as optimizers, weight averages and
    adapters do. So a hash of each is taken too, on the stream, which reads it once.
    """

    def __init__(self, compute: Callable[[], Tensor], tensors: Sequence[Tensor], head: str) -> None:
        self.compute: Callable[[], Tensor] | None = compute
        self.head = head
        self.before = [(t, version(t), bits(t)) for t in tensors]
        self.device = tensors[0].device

    def get(self) -> Tensor:
        if self.compute is not None:
            if not all(version(t) == number and same_bits(bits(t), before) for t, number, before in self.before):
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


def bits(t: Any) -> Tensor | None:
    """A hash of the values of a tensor; None for one that is computed later itself, or is made of others."""
    if isinstance(t, LazyTensor) or is_traceable_wrapper_subclass(t):
        return None
    with torch.no_grad():
        t = t.detach().as_subclass(Tensor)
        # By words of 8 bytes it is as fast as the memory; by elements of 2 it takes ten times as long on a CPU.
        words = t.is_contiguous() and t.dim() > 0 and t.shape[-1] * t.itemsize % 8 == 0 and t.data_ptr() % 8 == 0
        return torch.hash_tensor(t.view(torch.int64) if words else t)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


class Link:
    """Connects logits that were not computed with the loss that was computed from their layer.

    In torch the gradient of the loss passes through the logits: hooks see and change it, ``retain_grad`` keeps it, and
    ``torch.autograd.grad`` gives it. Where one of these is asked for, the backward of the loss computes the logits.

    Attributes:
        recipe, given: of the logits, and what :meth:`Recipe.run` takes.
        hooks: on the logits.
        anchor: what the node of the loss looks at; the link itself from the moment that the gradient is asked for.
        gradient: of the logits, once it was computed.
    """

    def __init__(self, recipe: Recipe, sources: Sequence[Tensor]) -> None:
        self.recipe = recipe
        self.given: tuple[Tensor | None, ...] = (*sources, *recipe.head.tensors)
        self.hooks: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self.anchor: list[Link] = []
        self.gradient: Tensor | None = None

    def ask(self) -> None:
        """Let the backward of the loss compute the logits."""
        self.anchor[:] = [self]

    def loss(self, loss: Tensor, of_logits: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss with a backward that passes through the logits where that is asked for. ``of_logits`` computes it
        from them."""
        return Linked.apply(loss, self.anchor, of_logits, *self.given)  # type: ignore[no-any-return]

    def gradients(self, of_logits: Callable[[Tensor], Tensor], dloss: Tensor, needs: Sequence[bool]) -> list[Any]:
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            aliases: list[Any] = [None if t is None else t.view_as(t) for t in self.given]
            logits = self.recipe.run(*aliases)
            for hook in self.hooks.values():
                logits.register_hook(hook)
            logits.register_hook(self.keep)
            wanted = [t for t, needed in zip(aliases, needs, strict=True) if needed]
            found = iter(torch.autograd.grad(of_logits(logits), wanted, dloss, create_graph=differentiable))
        return [next(found) if needed else None for needed in needs]

    def keep(self, gradient: Tensor) -> None:
        gradient = gradient if torch.is_grad_enabled() else gradient.detach()
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class Linked(torch.autograd.Function):
    """A loss whose gradient takes the way through the logits if somebody asked for theirs, else that without them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: list[Link], of_logits: Any, *given: Tensor | None) -> Tensor:
        ctx.anchor, ctx.of_logits = anchor, of_logits
        return loss.clone()  # A view could not be written in place: loss += aux_loss.

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:  # type: ignore[override]
        needs = ctx.needs_input_grad[3:]
        if not ctx.anchor:
            return dloss, None, None, *(None for _ in needs)
        (link,) = ctx.anchor
        return None, None, None, *link.gradients(ctx.of_logits, dloss, needs)


class LazyTensor(Tensor):
    """A tensor whose values are computed when something uses them; its shape, dtype and device are known before.

    A cast to another dtype and ``detach()`` give lazy tensors, too: accelerate casts every output to float32. Anything
    else gives plain tensors.
    """

    _lazy_values: Values
    recipe: Recipe | None
    sources: tuple[Tensor, ...]
    link: Link | None

    @staticmethod
    def __new__(cls, values: Values, like: Tensor) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=values.device)
        made._lazy_values, made.recipe, made.link = values, None, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.autograd.grad:
            return grad_of_lazy(args, kwargs or {})
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})  # Results are plain.

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

    # What asks for the gradient of the loss.

    def retain_grad(self) -> None:
        if self.link is None:
            super().retain_grad()  # type: ignore[no-untyped-call]
        else:
            self.link.ask()

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        return _grad.__get__(self) if self.link is None else self.link.gradient  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.link is None:
            _grad.__set__(self, value)
        else:
            self.link.gradient = value

    def register_hook(self, hook: Any) -> Any:
        function = inspect.unwrap(getattr(hook, "func", hook))
        # Those of FSDP say that a backward begins, whatever the gradient is.
        if self.link is None or (getattr(function, "__module__", None) or "").startswith("torch.distributed."):
            return super().register_hook(hook)  # type: ignore[no-untyped-call]
        self.link.ask()
        handle = RemovableHandle(self.link.hooks)
        self.link.hooks[handle.id] = hook
        return handle

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        how = how_to_keep(self._lazy_values.head)
        raise RuntimeError(f"logits that are computed when they are used have no data to replace: clone() them; {how}")

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


def grad_of_lazy(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch.autograd.grad with respect to lazy tensors, among others: what they are computed from takes their place,
    and their links keep their gradients."""
    given = inspect.signature(torch.autograd.grad).bind(*args, **kwargs)
    inputs = given.arguments["inputs"]
    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    links = [t.link if isinstance(t, LazyTensor) else None for t in inputs]
    for link in filter(None, links):
        link.ask()
        link.gradient = None
    sources = [next(s for s in link.given if s is not None and s.requires_grad) for link in filter(None, links)]
    unused = given.arguments.get("allow_unused") or bool(given.arguments.get("materialize_grads"))
    given.arguments["inputs"] = (*(t for t, link in zip(inputs, links, strict=True) if link is None), *sources)
    if sources:
        given.arguments["allow_unused"] = True
    with torch._C.DisableTorchFunctionSubclass():
        others = iter(torch.autograd.grad(*given.args, **given.kwargs))
    found = tuple(next(others) if link is None else link.gradient for link in links)
    if sources and not unused and any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return found
