"""Shared by the examples on scikit-learn's handwritten digits: the data, and training by epochs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from training import Checkpoint, History, Panel, cosine, find_device, fit, seed_all, set_rate

PANELS = (Panel("training loss", ("loss",), log=True), Panel("test accuracy", ("accuracy",), percent=True))


@dataclass(frozen=True)
class Digits:
    """1797 grey images of 8x8 pixels with their labels. A fifth of them is for testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 1, 8, 8) / 16 - 0.3) / 0.4  # mean about 0, variance about 1
        parts = train_test_split(images.astype(np.float32), labels, test_size=0.2, stratify=labels, random_state=0)
        train_images, test_images, train_labels, test_labels = (torch.from_numpy(part).to(device) for part in parts)
        return cls(train_images, train_labels, test_images, test_labels)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The training set in a new order, each image moved by up to one pixel."""
        order = torch.randperm(len(self.train_labels), device=self.train_labels.device)
        for chosen in order.split(size):
            shift = (random.randint(-1, 1), random.randint(-1, 1))
            yield self.train_images[chosen].roll(shift, dims=(2, 3)), self.train_labels[chosen]


def set_up(device_name: str | None, seed: int = 0) -> torch.device:
    """Select the device and seed the random numbers."""
    seed_all(seed)
    # On images of 8x8, a second thread costs more time than it saves.
    torch.set_num_threads(1)
    return find_device(device_name)


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
    model: nn.Module,
    digits: Digits,
    epochs: int,
    learning_rate: float,
    title: str,
    *,
    batch_size: int = 64,
    stop_at: int | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
) -> History:
    """AdamW with a cosine schedule; a progress bar under ``title``, a checkpoint after each epoch if given its path."""
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01)

    def epoch(index: int) -> dict[str, float]:
        set_rate(optimizer, learning_rate * cosine(index / epochs))
        model.train()
        losses = [train_step(model, optimizer, *batch) for batch in digits.batches(batch_size)]
        return {"loss": torch.stack(losses).mean().item(), "accuracy": accuracy(model, digits)}

    saved = Checkpoint(checkpoint, model, optimizer) if checkpoint is not None else None
    return fit(title, epochs, epoch, stop_at=stop_at, checkpoint=saved, resume=resume)
