"""A block of a transformer with its norms in front, under autocast, as one Function.

s = x + proj(attention(qkv(norm(x)))) and s + mlp(norm(s)), the stream in float32, the attention without mask or
dropout. The kernels are those of the steps, and the attention is the one that torch chooses. What is gained is the
host's time, as in :mod:`fastlayers.ops.autocast`: one node of autograd, and a raw op before the attention and one
behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from fastlayers.ops import autocast, dispatch
from fastlayers.ops.activations import ACTIVATIONS, Activation
from fastlayers.ops.dispatch import Gradients

_aten = torch.ops.aten
_choice: Callable[..., int] = torch._fused_sdp_choice  # type: ignore[attr-defined]

#: What an attention gives besides its result: tensors, of which there may be none, and sizes.
Extra: TypeAlias = tuple[tuple[Tensor, ...], tuple[int, ...]]


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Extra]:
    out, lse, _, _, *longest, seed, offset, _ = _aten._scaled_dot_product_flash_attention.default(q, k, v)
    return out, ((lse, seed, offset), tuple(longest))


def _flash_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Extra) -> tuple[Tensor, ...]:
    (lse, seed, offset), longest = extra
    return _aten._scaled_dot_product_flash_attention_backward.default(
        dy, q, k, v, out, lse, None, None, *longest, 0.0, False, seed, offset
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Extra]:
    out, lse, _, _, *longest, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True)
    return out, ((lse, seed, offset), tuple(longest))


def _cudnn_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Extra) -> tuple[Tensor, ...]:
    (lse, seed, offset), longest = extra
    return _aten._scaled_dot_product_cudnn_attention_backward.default(
        dy, q, k, v, out, lse, seed, offset, None, None, None, *longest, 0.0, False
    )


def _any(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Extra]:
    return F.scaled_dot_product_attention(q, k, v), ((), ())


def _any_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Extra) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
    return torch.autograd.grad(out, (q, k, v), dy)


class Attention(NamedTuple):
    """One of torch's: the result and what its backward needs; and the gradients of query, key and value."""

    forward: Callable[..., tuple[Tensor, Extra]]
    backward: Callable[..., tuple[Tensor, ...]]


#: By torch's number on a GPU. Of the others, which are rarely chosen there, the backward computes the forward anew.
ATTENTIONS = {1: Attention(_flash, _flash_backward), 3: Attention(_cudnn, _cudnn_backward)}
ANY = Attention(_any, _any_backward)


def _chosen(q: Tensor, k: Tensor, v: Tensor) -> Attention:
    """What torch would take for these, which it says of tensors in memory alone: in a graph, of some that are alike."""
    if not q.is_cuda:
        return ANY
    if isinstance(q, FakeTensor | FunctionalTensor):
        if not all(type(size) is int for size in (*q.shape, *q.stride())):
            return ANY
        with _disable_current_modes():
            alike = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
            return ATTENTIONS.get(_choice(alike, alike, alike), ANY)
    return ATTENTIONS.get(_choice(q, k, v), ANY)


def _computed(x: Tensor, parameters: list[Tensor], rest: Any) -> tuple[Tensor, list[Tensor], Attention, Any]:
    """The block; and what its backward needs besides x and both norms' weights, the attention, and what that says."""
    heads, eps, eps2, act, dtype, kernels = rest
    of_open = [*parameters[:6], *parameters[8:]]
    qkv, normed, stats, low_qkv, *low = kernels.transformer_block_autocast_open(
        x, of_open, heads, dtype, eps, kernels.apart
    )
    q, k, v = qkv.unbind(0)
    attention = _chosen(q, k, v)
    attended, (kept, sizes) = attention.forward(q, k, v)
    y, *of_close = kernels.transformer_block_autocast_close(
        x, attended, low, *parameters[6:8], eps2, act.code, *act.defaults, kernels.apart
    )
    return y, [q, k, v, normed, stats, low_qkv, attended, *low, *of_close, *kept], attention, sizes


class _TransformerBlock(torch.autograd.Function):
    """Keeps x, s, the results of the norms and their statistics, query, key and value, the result of the attention with
    what that keeps, the first product of the MLP, and the weights as halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *parameters, numbers = rest
        y, kept, attention, sizes = _computed(x, parameters, numbers)
        ctx.save_for_backward(x, parameters[0], parameters[6], *kept)
        ctx.given, ctx.rest = autocast.Given(*parameters), (*numbers, attention, sizes)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        heads, eps, eps2, act, dtype, kernels, attention, sizes = ctx.rest
        for_x = ctx.needs_input_grad[0]
        x, norm_weight, norm_weight2, q, k, v, normed, stats, low_qkv, attended, *rest = ctx.saved_tensors
        if dispatch.needs_double_backward(dy):
            function = partial(composed, heads, eps, eps2, act, dtype)
            found = autocast.differentiate(function, ctx.given, ctx.needs_input_grad[:-1], x, dy)
            return *found, None
        apart, low, of_close, kept = kernels.apart, rest[:6], rest[6:10], tuple(rest[10:])
        ds, dattended, dproj, dproj_bias, *of_rest = kernels.transformer_block_autocast_close_backward(
            dy, attended, low, of_close, norm_weight2, act.code, *act.defaults, apart
        )
        dqkv = list(attention.backward(dattended, q, k, v, attended, (kept, sizes)))
        del dattended
        dx, dnorm, dnorm_bias, dweight, dbias = kernels.transformer_block_autocast_open_backward(
            dqkv, ds, x, normed, stats, low_qkv, norm_weight, apart
        )
        return dx if for_x else None, dnorm, dnorm_bias, dweight, dbias, dproj, dproj_bias, *of_rest, None


_record = dispatch.record_of(_TransformerBlock)


@autocast.FAMILY.graph_op("transformer_block")
def _in_graph(
    kernels: Any, x: Tensor, parameters: Sequence[Tensor], heads: int, eps: float, eps2: float, act: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    rest = heads, eps, eps2, ACTIVATIONS[act], dtype, kernels
    return _TransformerBlock.apply(x, *parameters, rest)


def composed(
    heads: int, eps: float, eps2: float, act: Activation, low: torch.dtype, x: Tensor, norm_weight: Tensor,
    norm_bias: Tensor, qkv: Tensor, qkv_bias: Tensor, proj: Tensor, proj_bias: Tensor, norm_weight2: Tensor,
    norm_bias2: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor,
) -> Tensor:  # fmt: skip
    """The block in torch's operations, its products in ``low``."""
    normed = F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, eps).to(low)
    parts = F.linear(normed, qkv.to(low), qkv_bias.to(low)).unflatten(-1, (3, heads, -1))
    q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    s = x + F.linear(attended, proj.to(low), proj_bias.to(low))
    normed2 = F.layer_norm(s, norm_weight2.shape, norm_weight2, norm_bias2, eps2).to(low)
    return s + autocast.mlp_of(act, normed2, first, first_bias, second, second_bias)


def transformer_block(
    x: Any, norm: Any, norm2: Any, of_attention: tuple[Tensor | None, ...], of_mlp: tuple[Tensor | None, ...],
    heads: int, act: str,
) -> Tensor | None:  # fmt: skip
    """s + mlp(norm2(s)) for s = x + proj(attention(qkv(norm(x)))); None where this has no kernels for it.

    Graphs hold it in training alone: without a backward Inductor fuses the steps as well.

    Args:
        x: (B, N, C), the stream.
        norm: the first layer_norm, and ``norm2`` the second one.
        of_attention: weight and bias of qkv, whose product is (3, heads, size) for each token, and of proj.
        of_mlp: weight and bias of both layers.
        act: the activation of the MLP.
    """
    if not isinstance(x, Tensor) or x.dim() != 3 or x.dtype is not torch.float32:
        return None
    of_norm, of_norm2 = norm._parameters, norm2._parameters
    gain, shift = of_norm.get("weight"), of_norm.get("bias")
    gain2, shift2 = of_norm2.get("weight"), of_norm2.get("bias")
    parameters = (gain, shift, *of_attention, gain2, shift2, *of_mlp)
    records = dispatch.wants_gradient(x, *parameters)
    if act not in autocast.MLP_ACTIVATIONS or (torch.compiler.is_compiling() and not records):
        return None
    for t in parameters:  # a generator costs the host more than all that it asks here
        if t is None or (records and not t.requires_grad):
            return None
    kernels = autocast.block_kernels_for(x, *parameters)
    of_both: Any = (*of_attention, *of_mlp)
    qkv, qkv_bias, proj, proj_bias, first, first_bias, second, second_bias = of_both
    channels = x.shape[2:]
    inner, width = first.shape[:1], proj.shape[1:]
    if (
        kernels is None
        or not x.is_contiguous()
        or x.numel() == 0
        or not (gain.shape == shift.shape == gain2.shape == shift2.shape == channels)
        or not (proj_bias.shape == second_bias.shape == channels)
        or qkv.shape != (3 * width[0], *channels)
        or qkv_bias.shape != qkv.shape[:1]
        or proj.shape != (*channels, *width)
        or width[0] % (8 * heads) != 0  # torch pads others for the attention
        or first.shape != (*inner, *channels)
        or first_bias.shape != inner
        or second.shape != (*channels, *inner)
    ):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    if torch.compiler.is_compiling():
        return _in_graph(x, list(parameters), heads, norm.eps, norm2.eps, act, dtype)  # type: ignore[arg-type]
    rest = heads, norm.eps, norm2.eps, ACTIVATIONS[act], dtype, kernels
    given = [*map(dispatch.unwrap, parameters)]  # type: ignore[arg-type]
    if not records:
        return _computed(dispatch.unwrap(x), given, rest)[0]
    return _record(dispatch.unwrap(x), *given, rest)


def _fake_open(
    x: Tensor, parameters: list[Tensor], heads: int, dtype: torch.dtype, eps: float, apart: bool
) -> list[Tensor]:
    rows = x.numel() // x.shape[-1]
    low = [torch.empty_like(t, dtype=dtype) for t in (parameters[2], *parameters[4:])]
    size = len(parameters[2]) // (3 * heads)
    qkv = x.new_empty((*x.shape[:2], 3, heads, size), dtype=dtype).permute(2, 0, 3, 1, 4)
    return [qkv, x.new_empty((rows, x.shape[-1]), dtype=dtype), x.new_empty((2, rows)), *low]


def _fake_close(
    x: Tensor, attended: Tensor, low: list[Tensor], norm_weight: Tensor, norm_bias: Tensor, eps: float, *act: Any
) -> list[Tensor]:
    s = x.new_empty((x.shape[0] * x.shape[1], x.shape[2]))
    return [
        torch.empty_like(x), s, torch.empty_like(s, dtype=attended.dtype), x.new_empty((2, s.shape[0])),
        attended.new_empty((s.shape[0], len(low[2]))),
    ]  # fmt: skip


def _fake_close_backward(
    dy: Tensor, attended: Tensor, low: list[Tensor], kept: list[Tensor], norm_weight: Tensor, *act: Any
) -> list[Tensor]:
    proj, proj_bias, *of_mlp = (torch.empty_like(t, dtype=torch.float32) for t in low)
    norms = [torch.empty_like(norm_weight) for _ in range(2)]
    images, heads, tokens, size = attended.shape
    dattended = attended.new_empty((images, tokens, heads, size)).transpose(1, 2)
    return [torch.empty_like(kept[0]), dattended, proj, proj_bias, *norms, *of_mlp]


def _fake_open_backward(
    dqkv: list[Tensor], ds: Tensor, x: Tensor, normed: Tensor, stats: Tensor, low: Tensor, norm_weight: Tensor,
    apart: bool,
) -> list[Tensor]:  # fmt: skip
    wide = torch.empty_like(low, dtype=torch.float32)
    norms = [torch.empty_like(norm_weight) for _ in range(2)]
    return [torch.empty_like(x), *norms, wide, wide.new_empty(len(low))]


class Kernels(dispatch.Kernels):
    transformer_block_autocast_open = staticmethod(_fake_open)
    transformer_block_autocast_close = staticmethod(_fake_close)
    transformer_block_autocast_close_backward = staticmethod(_fake_close_backward)
    transformer_block_autocast_open_backward = staticmethod(_fake_open_backward)


autocast.FAMILY.declare(Kernels, csrc_only=tuple(vars(Kernels)))
