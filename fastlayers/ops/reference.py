"""The oracle: every fused op as the plain-PyTorch composition that it stands for.

These functions are the definition. They are called where no kernel applies, the tests compare against them in float64,
and under ``torch.compile`` Inductor fuses them with their neighbours. They contain no choice of backend, no autograd
Function and no in-place operation except on running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers.ops.activations import activation

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
#: Types of devices that have no autocast: torch raises when it is asked.
WITHOUT_AUTOCAST = frozenset({"meta", "fpga", "hip", "ideep", "lazy", "mkldnn", "opencl", "opengl", "ve", "vulkan"})


def autocasts(device_type: str) -> bool:
    """Whether autocast is on for a type of device."""
    return device_type not in WITHOUT_AUTOCAST and torch.is_autocast_enabled(device_type)


def scores(x: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """x·scale + mask, where a boolean mask puts minus infinity at its False positions."""
    if scale is not None:
        x = x * scale
    if mask is not None:
        x = torch.where(mask, x, float("-inf")) if mask.dtype == torch.bool else x + mask
    return x


def softmax(x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    return F.softmax(scores(x, scale, mask), dim, dtype=dtype)


def log_softmax(x: Tensor, dim: int, scale: float | None, mask: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    return F.log_softmax(scores(x, scale, mask), dim, dtype=dtype)


def relu_add(x: Tensor, y: Tensor, bias: float | Tensor) -> Tensor:
    out = torch.relu(x) + y
    # A bias of exactly 0.0 is "no bias": adding it would promote integer tensors to float.
    return out if isinstance(bias, float | int) and bias == 0 else out + bias


def add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def mul(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def max_pool2d(
    x: Tensor, kernel_size: int | Sequence[int], stride: int | Sequence[int] | None, padding: int | Sequence[int],
    dilation: int | Sequence[int], ceil_mode: bool,
) -> Tensor:  # fmt: skip
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)  # type: ignore[arg-type]


def spatial_mean(x: Tensor) -> Tensor:
    return torch.mean(x, (2, 3), keepdim=True)


def squeeze_excite(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    return x * gate(spatial_mean(x))


def bias_act(x: Tensor, bias: Tensor | None, act: str | None, parameters: tuple[float, ...]) -> Tensor:
    return activation(act).function(x if bias is None else x + bias, *parameters)


def gated(gate: Tensor, up: Tensor, act: str | None) -> Tensor:
    return activation(act).function(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, act: str | None) -> Tensor:
    return F.linear(gated(gate, up, act), weight, bias)


def glu(x: Tensor, dim: int, act: str | None, gate_first: bool) -> Tensor:
    if act == "sigmoid" and not gate_first:
        return F.glu(x, dim)
    if x.size(dim) % 2:  # as F.glu has it; the chunks of 3 would broadcast
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {x.size(dim)}")
    first, second = x.chunk(2, dim)
    return gated(first, second, act) if gate_first else gated(second, first, act)


# ---- norms -----------------------------------------------------------------------------------------------------------

Shape = Sequence[int]

_WITH_AUTOCAST = (
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "softplus"),
    "linalg_vector_norm",
)
#: The norms and activations that autocast runs in float32, by device; they are the same in no two versions of torch.
#: CUDA: layer_norm, group_norm, softplus and linalg_vector_norm, since 2.13 rms_norm as well. CPU: none.
FLOAT32_UNDER_AUTOCAST: dict[str, frozenset[str]] = {
    device: frozenset(op for op in _WITH_AUTOCAST if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key))
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA"))
}


def norm_dtype(op: str, x: Tensor) -> torch.dtype:
    """dtype in which torch's norm or activation ``op`` computes and answers, autocast included."""
    if x.dtype in LOW_PRECISION:
        device = x.device.type
        if op in FLOAT32_UNDER_AUTOCAST.get(device, ()) and autocasts(device):
            return torch.float32
    return x.dtype


def _mixed(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether x is in low precision and a parameter float32. torch's CUDA kernels refuse that without autocast."""
    if any(p is not None and p.dtype == torch.float32 for p in (weight, bias)):
        return x.dtype in LOW_PRECISION and norm_dtype(op, x) != torch.float32
    return False


def layer_norm(x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if _mixed("layer_norm", x, weight, bias):
        return F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)  # type: ignore[arg-type]
    return F.layer_norm(x, shape, weight, bias, eps)  # type: ignore[arg-type]


def ada_layer_norm(x: Tensor, shape: Shape, scale: Tensor, shift: Tensor | None, eps: float) -> Tensor:
    y = F.layer_norm(x, shape, None, None, eps) * (1 + scale)  # type: ignore[arg-type]
    return y if shift is None else y + shift


def global_response_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, channels_last: bool) -> Tensor:
    space, channel = (tuple(range(1, x.dim() - 1)), -1) if channels_last else (tuple(range(2, x.dim())), 1)
    shape = (-1,) if channels_last else (-1, *[1] * (x.dim() - 2))
    norm = torch.linalg.vector_norm(x, 2, space, keepdim=True)
    relative = norm / (norm.mean(channel, keepdim=True) + eps)
    return x + torch.addcmul(bias.view(shape), weight.view(shape), x * relative)


def rms_norm(x: Tensor, shape: Shape, weight: Tensor | None, eps: float | None, casting: str) -> Tensor:
    if casting == "torch":
        if _mixed("rms_norm", x, weight, None):  # torch takes it too, with a warning
            return F.rms_norm(x.float(), shape, weight, eps).to(x.dtype)  # type: ignore[arg-type]
        return F.rms_norm(x, shape, weight, eps)  # type: ignore[arg-type]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is None:
        eps = torch.finfo(wide.dtype).eps
    normalized = wide * torch.rsqrt(wide.pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    if casting == "llama":
        normalized = normalized.to(x.dtype)
        return normalized if weight is None else weight * normalized
    return (normalized if weight is None else normalized * (1.0 + weight.to(wide.dtype))).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    s = x if residual is None else x + residual
    y = layer_norm(s, shape, weight, bias, eps)
    return y if dtype is None else y.to(dtype), s


def add_rms_norm(
    x: Tensor, residual: Tensor | None, shape: Shape, weight: Tensor | None, eps: float | None, casting: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    s = x if residual is None else x + residual
    y = rms_norm(s, shape, weight, eps, casting)
    return y if dtype is None else y.to(dtype), s


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: str | None
) -> Tensor:
    if _mixed("group_norm", x, weight, bias):
        return activation(act).function(F.group_norm(x.float(), groups, weight, bias, eps)).to(x.dtype)
    return activation(act).function(F.group_norm(x, groups, weight, bias, eps))


def instance_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    use_input_stats: bool, momentum: float, eps: float, act: str | None,
) -> Tensor:  # fmt: skip
    z = F.instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return activation(act).function(z)


def batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float, residual: Tensor | None, act: str | None,
) -> Tensor:  # fmt: skip
    if weight is None and bias is not None:  # torch's backward on CUDA takes no bias without a weight
        weight = torch.ones_like(bias)
    z = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return activation(act).function(z if residual is None else z + residual)


# ---- rotary embedding ------------------------------------------------------------------------------------------------


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """A quarter turn of every pair: (a, b) becomes (-b, a). A pair is (x[i], x[i + n/2]), or two neighbours."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)  # older vmaps do not flatten
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def full_table(table: Tensor, interleaved: bool) -> Tensor:
    """A column for each element, of a table that has one for each pair."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim] if rotary_dim < x.shape[-1] else x
    turned = part * cos + rotate(part, interleaved) * sin
    if part is not x:
        turned = torch.cat((turned, x[..., rotary_dim:]), -1)
    return turned if dtype is None else turned.to(dtype)


def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, rotary_dim: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None]:
    if rotary_dim != cos.shape[-1]:
        cos, sin = full_table(cos, interleaved), full_table(sin, interleaved)
    rotated_q = _rotated(q, cos, sin, interleaved, dtype)
    return rotated_q, None if k is None else _rotated(k, cos, sin, interleaved, dtype)


# ---- residuals -------------------------------------------------------------------------------------------------------


def dropout_add(x: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + F.dropout(x, p, training)


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    if not training or p == 0.0:
        return x
    keep = 1.0 - p
    # In place on what is new: the draw that timm and torchvision make, to drop the same samples.
    factor = x.new_empty((x.shape[0], *[1] * (x.dim() - 1))).bernoulli_(keep)
    return x * (factor / keep if keep > 0.0 else factor)


def scale_add(x: Tensor, gamma: Tensor | None, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + drop_path(x if gamma is None else x * gamma, p, training)


# ---- losses ----------------------------------------------------------------------------------------------------------

REDUCTIONS = ("none", "mean", "sum")  # by torch's codes


def capped(scores: Tensor, softcap: float) -> Tensor:
    """softcap·tanh(scores/softcap); the scores themselves where the softcap is 0."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def loss_dtype(x: Tensor) -> torch.dtype:
    """dtype of a loss: autocast runs torch's in float32."""
    return torch.float32 if x.dtype in LOW_PRECISION and autocasts(x.device.type) else x.dtype


def cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, label_smoothing: float,
    softcap: float, z_loss: float,
) -> Tensor:  # fmt: skip
    x = capped(x, softcap)
    loss = F.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction], label_smoothing=label_smoothing
    )
    if not z_loss:
        return loss
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    z = z_loss * torch.logsumexp(wide, 0 if x.dim() == 1 else 1).square()
    if target.shape == x.shape:  # probabilities: no row is ignored
        share = torch.ones_like(z)
    else:
        kept = target != ignore_index
        z = torch.where(kept, z, 0.0)
        share = kept.to(z.dtype)
        if weight is not None:
            share = share * weight.to(z.dtype)[torch.where(kept, target, 0)]
    if reduction == 1:
        z = z.sum() / share.sum()
    elif reduction == 2:
        z = z.sum()
    return loss + z.to(loss.dtype)


def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, weight: Tensor | None,
    ignore_index: int, reduction: int, label_smoothing: float, softcap: float, z_loss: float, logit_scale: float,
    low_rank: tuple[Tensor, Tensor] | None = None, loss_of: Callable[..., Tensor] = cross_entropy,
) -> Tensor:  # fmt: skip
    _check_linear_shapes(input, linear_weight, linear_bias)
    positions = linear_weight.shape[1:-1]  # d1, ..., dK of a K-dimensional loss
    if positions and low_rank is None:
        logits = F.linear(input, linear_weight.flatten(0, -2), None if linear_bias is None else linear_bias.flatten())
        logits = logits.unflatten(-1, linear_weight.shape[:-1])
    else:
        logits = head_logits(input, linear_weight, linear_bias, low_rank)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    options = (weight, ignore_index, reduction, label_smoothing, softcap, z_loss)
    if positions or logits.dim() <= 2:
        return loss_of(logits, target, *options)
    # One row a token, whichever dimensions they come in.
    rows = logits.reshape(-1, logits.shape[-1])
    if target.shape == logits.shape:
        loss = loss_of(rows, target.reshape(rows.shape), *options)
    elif target.shape == logits.shape[:-1]:
        loss = loss_of(rows, target.reshape(-1), *options)
    else:
        raise RuntimeError(
            f"expected input with dimensionality 1 or 2, got {input.dim()}, or a target of its shape without the last"
            f" dimension, {tuple(logits.shape[:-1])}, but got {tuple(target.shape)}"
        )
    return loss if reduction else loss.reshape(logits.shape[:-1])


def head_logits(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank: tuple[Tensor, Tensor] | None
) -> Tensor:
    """input·weightᵀ + bias, and the product of ``low_rank`` added in the wider dtype, in the dtype of the former."""
    if low_rank is None:
        return F.linear(input, linear_weight, linear_bias)
    problem = low_rank_problem(input.shape, linear_weight.shape, low_rank)
    if problem is not None:
        raise RuntimeError(problem)
    logits = F.linear(input, linear_weight, linear_bias)
    return (logits + F.linear(*low_rank)).to(logits.dtype)


def low_rank_problem(rows: torch.Size, classes: torch.Size, low_rank: tuple[Tensor, Tensor]) -> str | None:
    """What is wrong with the shapes of ``low_rank``, which a sum might broadcast; None if nothing is.

    ``rows`` and ``classes`` are the shapes of input and linear_weight.
    """
    x, weight = low_rank
    if len(classes) == weight.dim() == 2 and (x.shape, weight.shape) == (
        (*rows[:-1], weight.shape[1]),
        (classes[0], weight.shape[1]),
    ):
        return None
    return (
        f"expected low_rank of (..., R) and (C, R) beside input (..., H) and linear_weight (C, H), but got"
        f" {tuple(x.shape)} and {tuple(weight.shape)} beside {tuple(rows)} and {tuple(classes)}"
    )


def linear_log_prob(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, ignore_index: int, softcap: float,
    logit_scale: float, low_rank: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The log-probabilities of the classes and the entropies, 0 where the target is ignored."""
    if linear_weight.dim() != 2 or target.shape != input.shape[:-1]:
        raise RuntimeError(
            f"linear_log_prob(): expected input (..., H), linear_weight (C, H) and target (...), but got"
            f" {tuple(input.shape)}, {tuple(linear_weight.shape)} and {tuple(target.shape)}"
        )
    scores = head_scores(input, linear_weight, linear_bias, softcap, logit_scale, low_rank)
    return log_prob_of_scores(scores, target, ignore_index)


def head_scores(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, softcap: float, logit_scale: float,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The scaled and capped logits of a head, in float32 at least."""
    logits = head_logits(input, linear_weight, linear_bias, low_rank)
    return capped(logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale, softcap)


def log_prob_of_scores(scores: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the classes and the entropies, 0 where the target is ignored."""
    log_p = F.log_softmax(scores, -1)
    kept = target != ignore_index
    log_prob = log_p.gather(-1, torch.where(kept, target, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(kept, log_prob, 0.0), torch.where(kept, -times_exp(log_p).sum(-1), 0.0)


def linear_topk(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, k: int, softcap: float, logit_scale: float,
    log_prob: bool, low_rank: tuple[Tensor, Tensor] | None = None,
) -> torch.return_types.topk:  # fmt: skip
    _check_matrix("linear_topk", input, linear_weight)
    logits = head_logits(input, linear_weight, linear_bias, low_rank)
    if log_prob:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logit_scale != 1.0:
        logits = logits * logit_scale
    logits = capped(logits, softcap)
    return (F.log_softmax(logits, -1) if log_prob else logits).topk(k)


def linear_argmax(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, low_rank: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    _check_matrix("linear_argmax", input, linear_weight)
    return head_logits(input, linear_weight, linear_bias, low_rank).argmax(-1)


def linear_accuracy(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target: Tensor, ignore_index: int,
    low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    if target.shape != input.shape[:-1]:
        raise RuntimeError(
            f"linear_accuracy(): expected input (..., H) and target (...), but got {tuple(input.shape)} and"
            f" {tuple(target.shape)}"
        )
    _check_matrix("linear_accuracy", input, linear_weight)
    return accuracy(linear_argmax(input, linear_weight, linear_bias, low_rank), target, ignore_index)


def accuracy(found: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The share of the labels that were found, as float32."""
    kept = target != ignore_index
    return ((found == target) & kept).sum().to(torch.float32) / kept.sum()


def _check_matrix(name: str, input: Tensor, linear_weight: Tensor) -> None:
    if input.dim() == 0 or linear_weight.dim() != 2:
        raise RuntimeError(
            f"{name}(): expected input (..., H) and linear_weight (C, H), but got {tuple(input.shape)} and"
            f" {tuple(linear_weight.shape)}"
        )


def times_exp(log_p: Tensor) -> Tensor:
    """p·log p of a logarithm of p, which is 0 where p is."""
    p = log_p.exp()
    return p * torch.where(p > 0, log_p, 0.0)


def _check_linear_shapes(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise what torch.nn.functional.linear_cross_entropy raises, in its words."""
    if input.dim() == 0:
        raise RuntimeError("expected input with dimensionality 1 or 2, got 0")
    if weight.dim() < 2:
        raise RuntimeError(f"expected linear_weight with dimensionality at least 2, got {weight.dim()}")
    if input.shape[-1] != weight.shape[-1]:
        raise RuntimeError(
            "expected equal input and linear_weight last dimensions (in_features),"
            f" got {input.shape[-1]} and {weight.shape[-1]}, respectively"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise RuntimeError(f"expected linear_bias shape {tuple(weight.shape[:-1])}, got {tuple(bias.shape)}")
    if weight.dim() > 2 and input.dim() != 2:
        raise RuntimeError(
            f"K-dimensional loss defined by linear_weight shape {tuple(weight.shape)} requires batched input,"
            f" (N, {input.shape[-1]}), got {'un' if input.dim() == 1 else ''}batched input with shape"
            f" {tuple(input.shape)}"
        )


# ---- divergences -----------------------------------------------------------------------------------------------------


def kl_div(input: Tensor, target: Tensor, reduction: str, log_target: bool) -> Tensor:
    return F.kl_div(input, target, reduction=reduction, log_target=log_target)


def divergence(
    student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, beta: float, temperature: float,
    square: bool, reduction: str,
) -> Tensor:  # fmt: skip
    """KL(teacher || student), or with 0 < beta < 1 the generalised Jensen-Shannon divergence; see functional."""
    if labels is not None:  # of what does not count not even NaN comes through, back and forth
        counts = (labels != ignore_index).unsqueeze(-1)
        student, teacher = torch.where(counts, student, 0.0), torch.where(counts, teacher, 0.0)
    log_q, log_p = (log_softmax_at(t, temperature) for t in (student, teacher))
    p = log_p.exp()
    if beta == 0.0:
        rows = (p * _where_positive(p, log_p - log_q)).sum(-1)
    else:
        q = log_q.exp()
        log_m = log_mixture(p, q, beta)
        rows = beta * (p * _where_positive(p, log_p - log_m)).sum(-1)
        rows = rows + (1.0 - beta) * (q * _where_positive(q, log_q - log_m)).sum(-1)
    dtype = torch.promote_types(student.dtype, teacher.dtype)
    if dtype in LOW_PRECISION and autocasts(student.device.type):
        dtype = torch.float32
    return reduced_rows(rows, labels, ignore_index, student.shape[-1], temperature, square, reduction, dtype)


def log_softmax_at(t: Tensor, temperature: float) -> Tensor:
    """In float32 at least, as the kernels compute it."""
    wide = t.float() if t.dtype in LOW_PRECISION else t
    return F.log_softmax(wide if temperature == 1.0 else wide / temperature, -1)


def log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * p + (1.0 - beta) * q
    return torch.where(m > 0, m, 1.0).log()


def _where_positive(p: Tensor, difference: Tensor) -> Tensor:
    """The difference of logarithms that p multiplies; 0 where p is, for p·log p counts as 0 there."""
    return torch.where(p > 0, difference, 0.0)


def reduced_rows(
    rows: Tensor, labels: Tensor | None, ignore_index: int, classes: int, temperature: float, square: bool,
    reduction: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The divergences of rows, times temperature² where they are to be, reduced."""
    factor = temperature**2 if square else 1.0
    if reduction == "none":
        out = rows
    elif reduction == "sum":
        out = rows.sum()
    elif labels is None:
        out = rows.mean()
    else:
        out = rows.sum() / (labels != ignore_index).sum()
    if reduction == "mean":
        factor /= classes
    return (out if factor == 1.0 else out * factor).to(dtype)


def linear_divergence(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, target_input: Tensor,
    target_weight: Tensor | None, target_bias: Tensor | None, target: Tensor | None, ignore_index: int, kind: str,
    reduction: str, softcap: float, logit_scale: float, target_softcap: float, target_logit_scale: float,
    temperature: float, beta: float, low_rank: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """A divergence of the scores of a head from those of another one, or from given ones; see functional."""
    student = head_logits(input, linear_weight, linear_bias, low_rank)
    teacher = target_input if target_weight is None else F.linear(target_input, target_weight, target_bias)
    if student.shape != teacher.shape:
        raise RuntimeError(
            f"linear_divergence(): expected a teacher's logits in the shape of the student's, {tuple(student.shape)},"
            f" but got {tuple(teacher.shape)}"
        )
    dtype = torch.promote_types(student.dtype, teacher.dtype)
    if dtype in LOW_PRECISION and autocasts(student.device.type):
        dtype = torch.float32
    wide = torch.promote_types(dtype, torch.float32)
    student = capped(student.to(wide) * logit_scale, softcap)
    teacher = capped(teacher.to(wide) * target_logit_scale, target_softcap)
    if kind in ("tv", "cosine"):
        return _distance(student, teacher, target, ignore_index, kind, temperature, reduction).to(dtype)
    if kind == "reverse_kl" or (kind == "js" and beta == 1.0):
        student, teacher = teacher, student
    beta = beta if kind == "js" and beta < 1.0 else 0.0
    return divergence(student, teacher, target, ignore_index, beta, temperature, kind != "js", reduction).to(dtype)


def _distance(
    student: Tensor, teacher: Tensor, labels: Tensor | None, ignore_index: int, kind: str, temperature: float,
    reduction: str,
) -> Tensor:  # fmt: skip
    """Total variation distance, or 1 less the cosine similarity, which no temperature changes."""
    counts = None if labels is None else labels != ignore_index
    if counts is not None:
        student, teacher = (torch.where(counts.unsqueeze(-1), t, 0.0) for t in (student, teacher))
    if kind == "tv":
        q, p = (log_softmax_at(t, temperature).exp() for t in (student, teacher))
        rows = 0.5 * (q - p).abs().sum(-1)
    else:
        rows = 1.0 - F.cosine_similarity(student, teacher, dim=-1)
    if counts is not None:
        rows = torch.where(counts, rows, 0.0)
    classes, dtype = student.shape[-1], student.dtype
    return reduced_rows(rows, labels, ignore_index, classes, temperature, False, reduction, dtype)
