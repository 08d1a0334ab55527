"""The chunk of linear_cross_entropy in torch ops: it stands here until the family cross_entropy brings its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlayers.ops import reference


def cross_entropy_chunk_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    grad_scale: Tensor | None,
    want_grad: bool,
    columns: int,
) -> Tensor:
    """The losses of the rows of a matrix of logits and, in the place of these, their gradient. No autograd."""
    classes = logits[:, :columns]
    wide = classes.detach().to(torch.promote_types(logits.dtype, torch.float32))
    weight = None if weight is None else weight.to(wide.dtype)
    with torch.set_grad_enabled(want_grad):
        wide.requires_grad_(want_grad)
        losses = reference.cross_entropy(wide, target, weight, 0, ignore_index, label_smoothing, softcap or 0.0, z_loss)
        if want_grad:
            scale = torch.ones_like(losses) if grad_scale is None else grad_scale.reshape(-1).expand(losses.shape)
            (gradient,) = torch.autograd.grad(losses, wide, scale)
            classes.copy_(gradient)
            logits[:, columns:].zero_()
    return losses.detach()
