"""Calls of the losses of preference and reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fastlayers import functional

B, T = 6, 9


def each(name: str, table: Iterable[str]) -> Any:
    return pytest.mark.parametrize(name, list(table))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def log_probs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (-normal(*shape, seed=seed).abs() - 0.05).to(dtype).requires_grad_()


def lengths(rows: int, longest: int) -> Tensor:
    """From 1 to the longest."""
    return torch.randint(1, longest + 1, (rows,), generator=torch.Generator().manual_seed(7))


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.sum(), leaves, materialize_grads=True)


class Case(NamedTuple):
    """A call: arguments in float64 with a gradient, then those without one."""

    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    others: tuple[Any, ...]
    options: dict[str, Any]

    def to(self, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().to(device, dtype if value.is_floating_point() else value.dtype)

        leaves = tuple(moved(t).requires_grad_() for t in self.leaves)
        options = {name: moved(value) for name, value in self.options.items()}
        return Case(self.function, leaves, tuple(map(moved, self.others)), options)

    def loss(self, *leaves: Tensor, **options: Any) -> Tensor:
        return self.function(*(leaves or self.leaves), *self.others, **{**self.options, **options})

    def gradients(self) -> tuple[Tensor, ...]:
        return gradients(self.loss(), *self.leaves)


def completions() -> tuple[Tensor, Tensor, Tensor]:
    """New log-probabilities, old ones, and a mask with a row of zeros."""
    log_prob = log_probs(B, T, seed=1)
    mask = torch.arange(T) < lengths(B, T)[:, None]
    mask[2] = False
    return log_prob, log_prob.detach() + 0.4 * normal(B, T, seed=2), mask


def grpo(loss_type: str, **options: Any) -> Case:
    log_prob, old, mask = completions()
    options = {"loss_type": loss_type, "max_length": 20, "ref_log_prob": log_probs(B, T, seed=3).detach(), **options}
    return Case(functional.grpo_loss, (log_prob,), (old, normal(B, seed=4), mask), options)
