"""Cross-entropy of logits whose classes are spread over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlayers.ops import vocab_parallel as _vocab_parallel


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: Any = None,
    *,
    vocab_start: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    r"""Cross-entropy of logits whose classes are sharded over the ranks of a process group, with two all-reduces.

    .. math:: l_i = \log \sum_c \exp(s_c) - s_t, \qquad c \text{ in the shards of all ranks}

    Stands for ``cross_entropy(torch.cat(shards, -1), target)``. Every rank of the group calls it with its shard of the
    logits, the result of a linear layer whose weight is sharded over the vocabulary, and with the same target. Every
    rank gets the same loss. The ranks reduce three numbers a row, five with label smoothing.

    Args:
        logits: (..., V of this rank), the classes from ``vocab_start`` on.
        target: (...), classes of the whole vocabulary as int64.
        group: a :class:`torch.distributed.ProcessGroup`; default, as there, all ranks.
        vocab_start: the first class of this shard. Default, for shards of equal width: rank in the group times V of
            this rank.
        ignore_index, reduction, label_smoothing, softcap, z_loss: as for :func:`linear_cross_entropy`.

    Returns:
        A scalar, or for "none" the losses in target's shape. In logits' dtype; float32 under autocast.

    The gradient is that of this rank's loss by its own logits, without communication. Code that computes the loss on
    each rank, as tensor parallelism does, does not sum it over the ranks. A second derivative raises.

    Keeps: logits, target, and the log-sum-exp of each row.

    Raises:
        ValueError: target is not of int64 in logits' shape without the classes, an option is not valid, or shards of
            unequal width come without vocab_start (on a GPU a device-side assert).
        IndexError: a class is in no shard, or in several; on a GPU a device-side assert.
    """
    return _vocab_parallel.vocab_parallel_cross_entropy(
        logits, target, group, vocab_start, ignore_index, reduction, label_smoothing, softcap, z_loss
    )
