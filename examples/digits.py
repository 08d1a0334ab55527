"""What the examples share: scikit-learn's handwritten digits, a training loop with a progress bar, and a picture."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

console = Console(highlight=False)


@dataclass(frozen=True)
class Digits:
    """1797 grey images of 8x8 pixels with their labels, a fifth of them kept for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 1, 8, 8) / 16 - 0.3) / 0.4  # about zero mean and unit variance
        parts = train_test_split(images.astype(np.float32), labels, test_size=0.2, stratify=labels, random_state=0)
        train_images, test_images, train_labels, test_labels = (torch.from_numpy(part).to(device) for part in parts)
        return cls(train_images, train_labels, test_images, test_labels)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The training set in a new order, each image moved by up to one pixel."""
        order = torch.randperm(len(self.train_labels), device=self.train_labels.device)
        for chosen in order.split(size):
            shift = (random.randint(-1, 1), random.randint(-1, 1))
            yield self.train_images[chosen].roll(shift, dims=(2, 3)), self.train_labels[chosen]


@dataclass(frozen=True)
class Epoch:
    loss: float
    accuracy: float


def set_up(device_name: str | None, seed: int = 0) -> torch.device:
    """The device of ``--device``, without it CUDA where there is one; and the same random numbers every time."""
    random.seed(seed)
    torch.manual_seed(seed)
    # On images of 8x8, waiting for a second thread costs more than it brings, and on a busy machine far more.
    torch.set_num_threads(1)
    if device_name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device_name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA was asked for it
        raise click.UsageError(f"--device {device_name}: {str(error).splitlines()[0]}") from None
    return device


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Fraction of the test set that the model gets right."""
    model.eval()
    return (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(
    model: nn.Module, digits: Digits, epochs: int, learning_rate: float, title: str, batch_size: int = 64
) -> list[Epoch]:
    """AdamW with a cosine schedule; a progress bar under ``title``."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    history: list[Epoch] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[state]}"), console=console) as progress:
        bar = progress.add_task(title, total=epochs, state="")
        for _ in range(epochs):
            model.train()
            losses = [train_step(model, optimizer, *batch) for batch in digits.batches(batch_size)]
            schedule.step()
            history.append(Epoch(torch.stack(losses).mean().item(), accuracy(model, digits)))
            state = f"loss {history[-1].loss:.3f}, test accuracy {history[-1].accuracy:.1%}"
            progress.update(bar, advance=1, state=state)
    return history


def draw_curves(phases: dict[str, list[Epoch]], path: Path) -> None:
    """Loss and test accuracy over the epochs, one colour for each phase of the training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    first = 1
    for (name, history), colour in zip(phases.items(), ("#0072B2", "#D55E00"), strict=False):
        epochs = range(first, first + len(history))
        left.plot(epochs, [epoch.loss for epoch in history], color=colour, marker="o", markersize=3.5, label=name)
        right.plot(epochs, [epoch.accuracy for epoch in history], color=colour, marker="o", markersize=3.5, label=name)
        first += len(history)
    left.set(title="training loss", yscale="log")
    right.set(title="test accuracy")
    left.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axes in (left, right):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="#E4E4E4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best" if axes is left else "lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
