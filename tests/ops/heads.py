"""Calls of the losses of a head, and what watches their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastlayers import functional
from fastlayers.ops import head
from fastlayers.ops.linear_divergence import DIVERGENCES
from tests.harness import outputs
from tests.table.divergences import LINEAR_DIVERGENCE
from tests.table.losses import LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROB

REDUCTIONS = ("mean", "sum", "none")


def inputs(rows: int, columns: int, features: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """Hidden states, a weight, and classes."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, features, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(columns, features, generator=generator).mul(0.2).to(device, dtype).requires_grad_()
    target = torch.randint(columns, (rows,), generator=generator).to(device)
    return hidden, weight, target


def heads(
    rows: int, columns: int, features: int = 8, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Hidden states and weights of a student, and of a teacher that is half as wide again."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    wide = features * 3 // 2
    student = normal(rows, features), normal(columns, features) * 0.5
    return *(t.requires_grad_() for t in student), normal(rows, wide), normal(columns, wide) * 0.5


def labels_of(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Of some of the rows."""
    generator = torch.Generator().manual_seed(1)
    return torch.where(torch.rand(rows, generator=generator) < 0.6, -100, 3).to(device)


def given_logits(*args: Any) -> tuple[Tensor, ...]:
    """Hidden states and weight of a student, and logits of a teacher."""
    *student, hidden, weight = heads(*args)
    return *student, F.linear(hidden, weight)


def adapter(rows: int, columns: int, rank: int, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    generator = torch.Generator().manual_seed(1)
    shapes = ((rows, rank), (columns, rank))
    return tuple(torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes)


class Loss(NamedTuple):
    """A function of a head with some options, the composition that it stands for, and what makes its arguments.

    The first two arguments are hidden states and a weight.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[..., tuple[Tensor, ...]]
    options: dict[str, Any]

    def results(self, *given: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return outputs(self.function(*given, **self.options, **options))

    def gradients(self, given: Sequence[Tensor], leaves: Sequence[Tensor] = (), **options: Any) -> tuple[Tensor, ...]:
        """Results, and the gradients of the leaves, by default of hidden states and weight."""
        return gradients_of(self.results(*given, **options), leaves or given[:2])

    @property
    def stock(self) -> Loss:
        return self._replace(function=self.reference)

    def unlabelled(self, given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]:
        """The arguments with a label for some of the rows, options for that, and which rows these are."""
        labels = labels_of(len(given[0]), given[0].device)
        kept = labels != -100
        if self.reference is LINEAR_DIVERGENCE.reference:
            return tuple(given), {"target": labels}, kept
        return (*given[:2], given[2].where(kept, -100)), {}, kept


def gradients_of(
    outs: Sequence[Tensor], leaves: Sequence[Tensor], dys: Sequence[Tensor] | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Results, and the gradients of the leaves by all of them."""
    if dys is None:
        dys = [torch.linspace(0.5, 2, out.numel()).to(out).view(out.shape) for out in outs]
    return *outs, *torch.autograd.grad(outs, leaves, dys, **options)


LOSSES = {
    **{
        f"cross_entropy {reduction}": Loss(
            functional.linear_cross_entropy, LINEAR_CROSS_ENTROPY.reference, inputs, {"reduction": reduction}
        )
        for reduction in REDUCTIONS
    },
    "log_prob": Loss(functional.linear_log_prob, LINEAR_LOG_PROB.reference, inputs, {}),
    "log_prob and entropy": Loss(functional.linear_log_prob, LINEAR_LOG_PROB.reference, inputs, {"entropy": True}),
    **{
        f"{kind}{of} {reduction}": Loss(
            functional.linear_divergence,
            LINEAR_DIVERGENCE.reference,
            make,
            {"divergence": kind, "reduction": reduction},
        )
        for of, make in (("", heads), (" of logits", given_logits))
        for kind in DIVERGENCES
        for reduction in ("batchmean", "none")
    },
}
OF_WEIGHTS = [name for name in LOSSES if "of logits" not in name]
#: The slope of the total variation distance jumps where two probabilities meet.
SMOOTH = [name for name in OF_WEIGHTS if not name.startswith("tv")]
#: A loss of each function, of which the gradients are computed with it.
AT_ONCE = ["cross_entropy mean", "kl batchmean"]
#: And one of each that keeps what the backward needs.
PLAINEST = ["cross_entropy mean", "log_prob", "kl batchmean"]


class Watching(TorchDispatchMode):
    """Lets ``see`` have the results of operations."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.see(function, result)
        return result


class Largest(Watching):
    """The number of elements of the largest tensor that an operation gives, but for those of one shape."""

    def __init__(self, *besides: torch.Size) -> None:
        super().__init__()
        self.besides = (*besides, *(shape[::-1] for shape in besides))
        self.elements = 0

    def see(self, function, result):
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.shape not in self.besides:
                self.elements = max(self.elements, t.numel())


class Products(Watching):
    """The shapes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def see(self, function, result):
        if "mm" in str(function):
            self.shapes.append(tuple(result.shape))


def planned(monkeypatch) -> list[int]:
    """The numbers of rows for which chunks are planned from now on."""
    monkeypatch.setattr(head, "GPU_LEAST_WAITED", 0)
    rows: list[int] = []
    plan = head.plan
    monkeypatch.setattr(head, "plan", lambda *args: rows.append(args[0]) or plan(*args))
    return rows


def traced(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """``function`` compiled to one graph that runs op by op, and the code of that."""
    torch._dynamo.reset()
    graphs: list[str] = []

    def look(graph, example):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph.code)
        return aot_eager(graph, example)

    return torch.compile(function, fullgraph=True, backend=look), graphs
