"""batch_norm in training, with the statistics of all processes of a group, a residual and an activation.

Each process has a mean and an unbiased variance a channel, and how many values they are of. One all-gather of
these gives every process the statistics of all of them; the backward needs one all-reduce of two numbers a channel.

Both collectives are the same whatever computes the rest: one process may have a batch that the kernels do not take, an
empty one for example, while others run them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fastlayers import backends
from fastlayers.ops import batch_norm, bias_act, elementwise, graph_ops, guard, layouts, pairs, raw_ops
from fastlayers.ops.activations import ACTIVATIONS, BY_CODE, NORM_CODES, activation
from fastlayers.ops.pairs import Gradients, Needs

aten = torch.ops.aten


class Kernels(raw_ops.Kernels):
    @staticmethod
    def sync_batch_norm_statistics(x: Tensor) -> Tensor:
        return x.new_empty(2 * x.shape[1] + 1, dtype=layouts.accumulator(x))

    @staticmethod
    def sync_batch_norm_merge(gathered: Tensor) -> tuple[Tensor, Tensor]:
        return gathered.new_empty(3, gathered.shape[1] // 2), gathered.new_empty(())

    @staticmethod
    def sync_batch_norm_update_(
        running_mean: Tensor, running_var: Tensor, moments: Tensor, count: Tensor, momentum: float
    ) -> None:
        return None

    @staticmethod
    def sync_batch_norm_normalize(
        x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        residual: Tensor | None, act: int, bits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(x), _empty_stats(x), _empty_bits(x, bits)

    @staticmethod
    def sync_batch_norm_sums(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, residual: Tensor | None,
        bits: Tensor | None, act: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        like = stats if weight is None else weight
        return torch.empty_like(stats), like.new_empty(x.shape[1]), like.new_empty(x.shape[1])

    @staticmethod
    def sync_batch_norm_gradient(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, means: Tensor,
        residual: Tensor | None, bits: Tensor | None, act: int, dresidual: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return torch.empty_like(x), torch.empty_like(x) if dresidual else x.new_empty(0)


def _empty_stats(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=layouts.accumulator(x))


def _empty_bits(x: Tensor, packed: bool) -> Tensor:
    return x.new_empty((x.numel() + 7) // 8 if packed else 0, dtype=torch.uint8)


FAMILY = raw_ops.Family(
    "sync_batch_norm",
    Kernels,
    triton_only=(
        "sync_batch_norm_statistics",
        "sync_batch_norm_merge",
        "sync_batch_norm_update_",
        "sync_batch_norm_normalize",
        "sync_batch_norm_sums",
        "sync_batch_norm_gradient",
    ),
)


#: Gradients of activations by their codes. Autograd, which knows them all, does not record inside of an opaque op.
BACKWARD: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    ACTIVATIONS["relu"].code: lambda dy, z: aten.threshold_backward(dy, z, 0.0),
    ACTIVATIONS["silu"].code: aten.silu_backward,
    ACTIVATIONS["gelu"].code: aten.gelu_backward,
    ACTIVATIONS["gelu_tanh"].code: lambda dy, z: aten.gelu_backward(dy, z, approximate="tanh"),
    ACTIVATIONS["hardswish"].code: aten.hardswish_backward,
    ACTIVATIONS["relu6"].code: lambda dy, z: aten.hardtanh_backward(dy, z, 0.0, 6.0),
    ACTIVATIONS["leaky_relu"].code: lambda dy, z: aten.leaky_relu_backward(dy, z, 0.01, False),
}


# ---- the same in torch ops -------------------------------------------------------------------------------------------


class InTorch(Kernels):
    """The raw ops in torch ops, for what no kernel takes: empty batches and layouts of all kinds. They pack no bits."""

    @staticmethod
    def sync_batch_norm_statistics(x: Tensor) -> Tensor:
        channels, wide = x.shape[1], layouts.accumulator(x)
        if x.numel() == 0:
            return x.new_zeros(2 * channels + 1, dtype=wide)
        count = x.numel() // channels
        var, mean = torch.var_mean(x.to(wide), _reduced(x), correction=min(count - 1, 1))
        return torch.cat((mean, var, mean.new_full((1,), count)))

    @staticmethod
    def sync_batch_norm_merge(gathered: Tensor) -> tuple[Tensor, Tensor]:
        channels = gathered.shape[1] // 2
        means, variances, counts = gathered.split((channels, channels, 1), 1)
        squares = variances * (counts - 1.0).clamp(min=1.0)
        count = counts.sum()
        divisor = count.clamp(min=1.0)
        # The mean of all is computed as the difference from one of them: a large one would lose digits.
        some = means.index_select(0, counts.argmax(0))
        mean = some[0] + (counts * (means - some)).sum(0) / divisor
        squares = (squares + counts * (means - mean).square()).sum(0)
        return torch.stack((mean, squares / divisor, squares / (count - 1.0).clamp(min=1.0))), count

    @staticmethod
    def sync_batch_norm_update_(
        running_mean: Tensor, running_var: Tensor, moments: Tensor, count: Tensor, momentum: float
    ) -> None:
        share = momentum * count.clamp(max=1.0)  # Batches that are all empty say nothing.
        for running, moment in ((running_mean, moments[0]), (running_var, moments[2])):
            running.lerp_(moment.to(running.dtype), share.to(running.dtype))

    @staticmethod
    def sync_batch_norm_normalize(
        x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        residual: Tensor | None, act: int, bits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        stats = torch.stack((mean, torch.rsqrt(var + eps)))
        y = BY_CODE[act].function(_argument(x, weight, bias, stats, residual))
        return torch.empty_like(x).copy_(y), stats, _empty_bits(x, False)

    @staticmethod
    def sync_batch_norm_sums(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, residual: Tensor | None,
        bits: Tensor | None, act: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dz = _gradient_of_argument(dy, x, weight, bias, stats, residual, bits, act)
        mean, rstd = stats
        deviation = x.to(stats.dtype) - _by_channel(mean, x)
        dbias, dweight = dz.sum(_reduced(x)), (dz * deviation).sum(_reduced(x)) * rstd
        scale = rstd / max(x.numel() // x.shape[1], 1)
        if weight is None:
            return torch.stack((scale * dbias, scale * rstd * dweight)), dweight, dbias
        means = torch.stack((scale * dbias, scale * rstd * dweight)) * weight
        return means, dweight.to(weight.dtype), dbias.to(weight.dtype)

    @staticmethod
    def sync_batch_norm_gradient(
        dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, means: Tensor,
        residual: Tensor | None, bits: Tensor | None, act: int, dresidual: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dz = _gradient_of_argument(dy, x, weight, bias, stats, residual, bits, act)
        mean, rstd = stats
        scale = rstd if weight is None else rstd * weight
        deviation = x.to(stats.dtype) - _by_channel(mean, x)
        dx = dz * _by_channel(scale, x) - _by_channel(means[0], x) - deviation * _by_channel(means[1], x)
        return torch.empty_like(x).copy_(dx), dz.to(x.dtype) if dresidual else x.new_empty(0)


def _reduced(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _by_channel(t: Tensor, x: Tensor) -> Tensor:
    """``t``, of shape (C,), to be broadcast with x."""
    return t.view([-1 if d == 1 else 1 for d in range(x.dim())])


def _argument(x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, residual: Tensor | None) -> Tensor:
    """What the activation is applied to, in the dtype of the statistics."""
    mean, scale = stats
    if weight is not None:
        scale = scale * weight
    z = (x.to(stats.dtype) - _by_channel(mean, x)) * _by_channel(scale, x)
    if bias is not None:
        z = z + _by_channel(bias, x)
    return z if residual is None else z + residual


def _gradient_of_argument(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, residual: Tensor | None,
    bits: Tensor | None, act: int,
) -> Tensor:  # fmt: skip
    dy = dy.to(stats.dtype)
    if bits is not None:
        return torch.where(elementwise.unpack_bits(bits, x.shape, x.stride()), dy, 0.0)
    return BACKWARD[act](dy, _argument(x, weight, bias, stats, residual)) if act else dy


# ---- with the collectives --------------------------------------------------------------------------------------------


def _all_gather(gathered: Tensor, local: Tensor, group: Any) -> None:
    # torch 2.13 renamed it.
    (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(gathered, local, group)


def _processes(group: str) -> Any:
    """The process group of this name: an op in a graph takes no other argument for it."""
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


def _dense(x: Tensor) -> Tensor:
    """x in the layout that torch's batch_norm gives its result."""
    if layouts.is_image(x):
        return x
    if not layouts.suggests_channels_last(x):
        return x.contiguous()
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _kernels_for(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None) -> Any:
    """The raw ops that serve this process."""
    kernels = FAMILY.triton_kernels_for(x)
    if kernels is None or kernels.unasked:
        return InTorch
    reason = batch_norm.unsupported(x, None, None, weight, bias, True, eps, residual)
    if reason is None:
        return kernels
    if x.numel() > x.shape[1]:  # No backend has to serve less, as the others wait.
        backends.refuse(reason)
    return InTorch


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, act: int, bits: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, stats, bits, moments, count).

    The moments are means, biased and unbiased variances as (3, C); the count is how many values of all processes each
    of them is of.
    """
    x = _dense(x)
    kernels = _kernels_for(x, weight, bias, eps, residual)
    local = kernels.sync_batch_norm_statistics(x)
    processes = _processes(group)
    gathered = local.new_empty(processes.size() * local.numel())
    _all_gather(gathered, local, processes)
    moments, count = kernels.sync_batch_norm_merge(gathered.view(processes.size(), -1))
    mean, var, _ = moments
    y, stats, packed = kernels.sync_batch_norm_normalize(x, mean, var, weight, bias, eps, residual, act, bits)
    return y, stats, packed, moments, count


def _fake_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, act: int, bits: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, stats = _dense(x), _empty_stats(x)
    return torch.empty_like(x), stats, _empty_bits(x, bits), stats.new_empty(3, x.shape[1]), stats.new_empty(())


def _backward(
    dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, count: Tensor, eps: float, act: int, dresidual: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual, dweight, dbias), the last two of this process alone, as DDP expects them."""
    x = _dense(x)
    kernels = _kernels_for(x, weight, bias, eps, residual)
    means, dweight, dbias = kernels.sync_batch_norm_sums(dy, x, weight, bias, stats, residual, bits, act)
    means.mul_(x.numel() // x.shape[1])
    dist.all_reduce(means, dist.ReduceOp.SUM, _processes(group))
    means.div_(count)  # It is 0 only where no process has anything to compute.
    dx, for_residual = kernels.sync_batch_norm_gradient(
        dy, x, weight, bias, stats, means, residual, bits, act, dresidual
    )
    return dx, for_residual, dweight, dbias


def _fake_backward(
    dy: Tensor, x: Tensor, residual: Tensor | None, bits: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    stats: Tensor, count: Tensor, eps: float, act: int, dresidual: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x, like = _dense(x), stats if weight is None else weight
    dweight, dbias = (like.new_empty(x.shape[1]) for _ in range(2))
    return torch.empty_like(x), torch.empty_like(x) if dresidual else x.new_empty(0), dweight, dbias


class SyncBatchNorm(pairs.Pair, inputs=4):
    """Keeps x, the weight, the mean and rstd of each channel and how many values they are of; for an activation the
    bias and the residual, from which backward recomputes its argument, or for relu after a residual, where kernels
    serve, one bit an element."""

    @staticmethod
    def raw_forward(
        kernels: Any, needs: Needs, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        eps: float, act: int, group: str,
    ) -> Any:  # fmt: skip
        packs = kernels.packs and bool(needs) and batch_norm.is_packed(residual, act)
        y, stats, bits, moments, count = kernels.forward(x, residual, weight, bias, eps, act, packs, group)
        packed = packs and bits.numel() > 0
        recomputes = act != 0 and not packed
        kept = (
            *(x, residual if recomputes else None, bits if packed else None),
            *(weight, bias if recomputes else None, stats, count),
        )
        return (y, moments, count), kept, (eps, act, group)

    @staticmethod
    def constant(needs: Needs, results: Any) -> tuple[Tensor, ...]:
        return results[1:]  # type: ignore[no-any-return]

    @staticmethod
    def raw_backward(
        kernels: Any, needs: Needs, dy: Tensor, _: None, __: None, x: Tensor, residual: Tensor | None,
        bits: Tensor | None, weight: Tensor | None, bias: Tensor | None, stats: Tensor, count: Tensor, eps: float,
        act: int, group: str,
    ) -> Gradients:  # fmt: skip
        for_residual = act != 0 and needs[1]  # without an activation it is dy itself
        dx, dresidual, dweight, dbias = kernels.backward(
            dy, x, residual, bits, weight, bias, stats, count, eps, act, for_residual, group
        )
        return dx, dresidual if act else dy, dweight, dbias

    @staticmethod
    def differentiable_backward(needs: Needs, dy: Tensor, *args: Any) -> NoReturn:
        raise RuntimeError(
            "a synchronised batch_norm has no second derivative, which create_graph=True asks for: it would need the"
            " batches of the other processes"
        )


_EAGER = SimpleNamespace(forward=_forward, backward=_backward, packs=True)
_OPAQUE = SimpleNamespace(
    forward=graph_ops.opaque("fastlayers_distributed::sync_batch_norm_forward", _forward, _fake_forward),
    backward=graph_ops.opaque("fastlayers_distributed::sync_batch_norm_backward", _backward, _fake_backward),
    packs=False,  # A graph does not know whether kernels will serve.
)
_in_graph = graph_ops.graph_op_of(SyncBatchNorm, "sync_batch_norm", tuple[Tensor, Tensor, Tensor], lambda: _OPAQUE)


def sync_batch_norm(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    momentum: float, eps: float, residual: Tensor | None, act: str | None, group: str,
) -> Tensor:  # fmt: skip
    """act(batch_norm(x) + residual) in training, by the statistics of x in all processes of the group of this name.

    Every process of the group has to call it, and its backward; x may be empty in some of them. The running statistics
    take ``momentum`` of the moments of all.

    Raises:
        TypeError: x is not of a floating-point dtype.
        RuntimeError: a transform of torch.func, forward-mode AD or a jit trace is active; or, in backward, a second
            derivative is asked for.
    """
    if not x.is_floating_point():
        raise TypeError(f"expected a floating-point input, got {x.dtype}")
    compiling = torch.compiler.is_compiling()
    if not compiling and guard.must_decompose():
        raise RuntimeError(
            "a synchronised batch_norm communicates, and is not supported under transforms of torch.func, forward-mode"
            " AD and torch.jit.trace; call eval() first, or use torch.nn.BatchNorm2d"
        )
    code = activation(act).code
    # Of another dtype or shape, it is added in the way of torch.
    fits = residual is None or (residual.dtype, residual.shape, residual.device) == (x.dtype, x.shape, x.device)
    fused = fits and code < NORM_CODES
    arguments = (x, residual if fits else None, weight, bias, eps, code if fused else 0, group)
    y, moments, count = _in_graph(*arguments) if compiling else SyncBatchNorm.run(_EAGER, *arguments)
    if running_mean is not None and running_var is not None:
        contiguous = running_mean.is_contiguous() and running_var.is_contiguous()
        kernels = FAMILY.triton_kernels_for(moments) if contiguous and not compiling else None
        with torch.no_grad():
            (kernels or InTorch).sync_batch_norm_update_(running_mean, running_var, moments, count, momentum)
    if fused:
        return y
    return bias_act.bias_act(y if fits or residual is None else y + residual, None, act, {})
