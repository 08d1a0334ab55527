"""Patched models on a CPU with the kernels that serve there unasked, against stock torch and float64."""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlayers import patch_model

pytestmark = pytest.mark.cpu_kernels

WIDTH = 32
#: Models and inputs of which the median counts: errors of a handful of numbers differ by 2x with luck, torch's too.
DRAWS = 5


class Decoder(nn.Module):
    """A block as language models have it: RMSNorm, a residual, a gate, a loss."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.mix, self.gate, self.up = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.down, self.head, self.act = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 50), act

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        y = self.second(x)
        x = x + self.down(self.act(self.gate(y)) * self.up(y))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Encoder(nn.Module):
    """A block of BERT: norms after the sums, dropout, GELU, and scores with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / WIDTH**0.5 + mask
        x = self.first(self.dropout(self.out(F.softmax(scores, -1) @ self.v(x))) + x)
        return self.second(self.dropout(self.down(F.gelu(self.up(x)))) + x)


class Images(nn.Module):
    """Blocks of convolutional networks: norms over batches and groups, residuals, gates of channels, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.conv1, self.norm1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH)
        self.reduce, self.expand = nn.Conv2d(WIDTH, 8, 1), nn.Conv2d(8, WIDTH, 1)
        self.depthwise, self.norm3 = nn.Conv2d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False), nn.BatchNorm2d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = F.relu(self.norm1(self.conv1(x)) + x)
        x = F.hardswish(self.norm3(self.depthwise(x)))
        x = F.silu(self.norm2(self.conv2(x)))
        # Last: a batch norm after it would leave next to nothing of the gradients of a gate, which scales channels.
        return x * torch.sigmoid(self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))))


def decoder_inputs(rows: int) -> tuple[Tensor, ...]:
    return torch.randn(2, rows, WIDTH), torch.randint(50, (2, rows))


def encoder_inputs(rows: int) -> tuple[Tensor, ...]:
    return torch.randn(2, rows, WIDTH), torch.zeros(rows, rows).masked_fill(torch.rand(rows, rows) > 0.8, -1e4)


def images(layout: Any) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: (torch.randn(4, 3, 2 * rows, 2 * rows).to(memory_format=layout),)


CASES = {
    "swiglu": (Decoder, decoder_inputs),
    "geglu": (lambda: Decoder(F.gelu), decoder_inputs),
    "encoder": (Encoder, encoder_inputs),
    "images": (Images, images(torch.contiguous_format)),
    "images, channels_last": (Images, images(torch.channels_last)),
}


def answers(model: nn.Module, inputs: tuple[Tensor, ...], training: bool) -> dict[str, Tensor]:
    """The result, the gradients of inputs and parameters, and the buffers."""
    with torch.set_grad_enabled(training):
        given = [t.detach().clone().requires_grad_(training) if t.is_floating_point() else t for t in inputs]
        y = model(*given)
    found = {"result": y.detach()}
    if training:
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        found |= {f"gradient of input {i}": t.grad for i, t in enumerate(given) if t.grad is not None}
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}


@pytest.mark.parametrize("rows", [5, 24])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_answers(case: str, dtype: torch.dtype, training: bool, rows: int) -> None:
    make, inputs_of = CASES[case]
    found = defaultdict[str, list[tuple[float, float]]](list)
    for _ in range(DRAWS):
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model = model.to(dtype).train(training)
        inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs_of(rows))
        patched = copy.deepcopy(model)
        assert patch_model(patched).modules
        exact = answers(
            copy.deepcopy(model).double(), tuple(t.double() if t.is_floating_point() else t for t in inputs), training
        )
        stock, ours = answers(model, inputs, training), answers(patched, inputs, training)
        assert ours.keys() == stock.keys() == exact.keys()
        for name, value in ours.items():
            assert value.dtype == stock[name].dtype
            assert value.stride() == stock[name].stride(), name
            # A mean of values around 0 is off by a rounding of these, not of its own.
            scale = max(exact[name].norm().item(), 0.1 if name.endswith("running_mean") else 0.0)
            own, torchs = ((t[name].double() - exact[name]).norm().item() / scale for t in (ours, stock))
            found[name].append((own, torchs))
    for name, errors in found.items():
        own, torchs = map(statistics.median, zip(*errors, strict=True))
        assert own <= 1.5 * torchs + torch.finfo(dtype).eps, (name, own, torchs)
