"""Logits that are not computed for their loss, and the losses that take them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers import functional
from fastlayers.modules import FusedCrossEntropyLoss
from fastlayers.ops.guard import is_dtensor
from fastlayers.ops.head import autocast_dtype, is_large
from fastlayers.ops.quantized import quantized
from fastlayers.ops.reference import LOW_PRECISION, autocasts
from fastlayers.patching.libraries.heads import find
from fastlayers.patching.runtime import checks
from fastlayers.patching.runtime.checks import original_class
from fastlayers.patching.runtime.lazy import Link, Recipe, can_be_lazy, lazy

#: Logits of an evaluation, in float32, that are computed at once: bytes on a CPU, and the part of a GPU's memory.
MOST_ON_A_CPU, SMALL_PART = 2**31, 1 / 16
#: Devices whose autocast computes losses in float32.
DEVICES = ("cuda", "cpu")


class DeferredLogits(NamedTuple):
    """The logits of a layer, not computed for the loss: softcap·tanh(scale·head(hidden)/softcap).

    ``recipe`` computes them from ``sources`` as the forward does, ``link`` connects the logits of the output with the
    loss.
    """

    recipe: Recipe
    sources: tuple[Tensor, ...]
    scale: float
    softcap: float | None
    link: Link | None

    @property
    def hidden(self) -> Tensor:
        return self.sources[0]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def rows(self) -> Tensor:
        """The hidden states in the dtype that the layer computes in."""
        rows = self.hidden.reshape(-1, self.hidden.shape[-1])
        return rows if self.recipe.head.dtype is None else rows.to(self.recipe.head.dtype)

    def view(self, rows: int, columns: int) -> DeferredLogits | Tensor:
        """The logits as rows, as a loss takes them."""
        if columns == self.recipe.head.classes:
            return self
        return self.recipe.run(*self.sources, *self.recipe.head.tensors).view(rows, columns)

    def cross_entropy(self, target: Tensor, **options: Any) -> Tensor:
        rows, bias = self.rows, self.recipe.head.bias
        if target.is_floating_point():  # probabilities, of which none is ignored
            options.pop("ignore_index", None)
        of_logits = functools.partial(self.of_logits, target, **options)
        options |= {"softcap": self.softcap, "logit_scale": self.scale, "low_rank": self.low_rank(rows)}
        if bias is not None and self.recipe.head.dtype is not None:
            bias = bias.to(self.recipe.head.dtype)
        loss = functional.linear_cross_entropy(rows, self.recipe.head.weight, target, linear_bias=bias, **options)
        return loss if self.link is None or not loss.requires_grad else self.link.loss(loss, of_logits)

    @staticmethod
    def of_logits(target: Tensor, logits: Tensor, **options: Any) -> Tensor:
        """:meth:`cross_entropy` of logits that were computed."""
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), target, **options)

    def low_rank(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The products of all adapters as one. Adapters in 16 bits beside a layer in another dtype are cast to that."""
        pairs = list(zip(self.sources[1:], self.recipe.head.thin, strict=True))
        if not pairs:
            return None
        x, thin = pairs[0] if len(pairs) == 1 else (torch.cat(factors, -1) for factors in zip(*pairs, strict=True))
        x = x.reshape(-1, x.shape[-1])
        if autocasts(rows.device.type) or thin.dtype is torch.float32:
            return x, thin
        return x.to(rows.dtype), thin.to(rows.dtype)


Logits: TypeAlias = Tensor | DeferredLogits


class DeferringCrossEntropyLoss(FusedCrossEntropyLoss):
    """Replaces ``CrossEntropyLoss()`` in a forward; it takes deferred logits too."""

    def forward(self, input: Logits, target: Tensor) -> Tensor:
        if not isinstance(input, DeferredLogits):
            return super().forward(input, target)
        loss = input.cross_entropy(target, ignore_index=self.ignore_index)
        # As of logits in the dtype of the hidden states, also if the layer computes in another one.
        return loss if autocasts(input.device.type) else loss.to(input.hidden.dtype)


@dataclass(frozen=True)
class Split:
    """A head that ends with a child: the name of the child, and the function that computes its argument."""

    child: str
    argument: Callable[[nn.Module, Tensor], Tensor]


def defer(
    model: nn.Module,
    loss: Any,
    head: nn.Module,
    known: tuple[Any, dict[type[nn.Module], Split]],
    hidden: Tensor,
    scale: Any,
    softcap: Any,
    finish: Callable[[Tensor], Tensor],
    name: str,
) -> DeferredLogits | None:
    """The deferred logits of ``head`` if their loss can be computed without them; None if they must be computed.

    ``finish`` and ``name`` are those of a :class:`Recipe`, ``known`` is the loss function that takes deferred logits,
    besides torch's, and the heads that end with a child.
    """
    ours, splits = known
    trains = model.training and torch.is_grad_enabled()
    if not ((loss is ours or loss is nn.CrossEntropyLoss) and (trains or can_be_lazy())):
        return None
    arguments = []
    while (split := splits.get(original_class(head))) is not None:
        if not checks.plain(head, original_class(head)) or not checks.no_hooks(head):
            return None
        arguments.append((split.argument, head))
        head = head._modules[split.child]  # type: ignore[assignment]
    if type(hidden) is not Tensor or hidden.device.type not in DEVICES:
        return None
    found = find(head, hidden)
    if found is not None and not torch.is_grad_enabled() and fits(hidden, found.head.classes):
        return None  # Evaluation uses its logits, and keeps nothing for a backward.
    if (
        found is None
        or not isinstance(scale, int | float)
        or not is_large(hidden, quantized(found.head.weight) or found.head.weight)
    ):
        return None  # The loss of few logits computes them anyway.
    if not (softcap is None or (isinstance(softcap, int | float) and softcap > 0)):
        return None
    for argument, outer in arguments:
        hidden = argument(outer, hidden)
    sources = (hidden, *(adapter(hidden) for adapter in found.adapters))
    recipe = Recipe(found.head, name, finish, autocast_dtype(hidden))
    link = Link(recipe, sources) if torch.is_grad_enabled() and can_be_lazy() else None
    return DeferredLogits(recipe, sources, float(scale), softcap, link)


def fits(hidden: Tensor, classes: int) -> bool:
    """Whether logits in float32 take a small part of the memory of a device."""
    logits = 4 * classes * (hidden.numel() // max(hidden.shape[-1], 1))
    if not hidden.is_cuda:
        return logits <= MOST_ON_A_CPU
    return logits <= torch.cuda.get_device_properties(hidden.device).total_memory * SMALL_PART


def later(logits: DeferredLogits) -> Tensor | None:
    """The logits of an output whose loss was computed from deferred ones."""
    if not can_be_lazy():
        return None
    made = lazy(logits.recipe, logits.sources)
    made.link = logits.link
    return made


def float32_result(x: Tensor) -> Any:
    """A context in which a loss of 16-bit logits is float32: autocast to the dtype that they already have."""
    kind = x.device.type
    if x.dtype not in LOW_PRECISION or autocasts(kind):
        return nullcontext()
    return torch.autocast(kind, x.dtype)


def divided(loss: Tensor, count: Tensor | float | None) -> Tensor:
    """A sum divided by the number of items; a mean, which has no such number, as it is."""
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def fused_loss(present: Any) -> Any:
    """The fused function for a loss that a forward names; any other function itself."""
    if present is nn.CrossEntropyLoss:
        return DeferringCrossEntropyLoss
    return functional.cross_entropy if present is F.cross_entropy else present


def fixed_cross_entropy(
    source: Tensor,
    target: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """The function of that name in transformers, which the losses of classifiers call."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=reduction)
    return divided(loss, num_items_in_batch)


def token_loss(
    source: Logits,
    target: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """:func:`fixed_cross_entropy` of logits as if they were float32, without a copy of them in float32."""
    if isinstance(source, DeferredLogits):
        scores, cross_entropy = source.rows, source.cross_entropy
    else:
        kept = (type(source) is Tensor or is_dtensor(source)) and source.device.type in DEVICES
        scores = source if kept else source.float()
        cross_entropy = functools.partial(functional.cross_entropy, scores)
    reduction = "mean" if num_items_in_batch is None else "sum"
    with float32_result(scores):
        loss = cross_entropy(target, ignore_index=ignore_index, reduction=reduction)
    return divided(loss.float(), num_items_in_batch)


def with_logits_in_tuples(forward: types.FunctionType, fused: types.FunctionType) -> Any:
    """The fused forward; the original one for calls that return a tuple.

    A tuple would leave out logits that are None, and shift the other outputs.
    """

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("return_dict")
        chosen = fused if (self.config.return_dict if given is None else given) else forward
        return chosen(self, *args, **kwargs)

    return call
