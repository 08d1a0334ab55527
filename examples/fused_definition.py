"""A network defined with fused layers, and trained: a gated convolution, then attention, on handwritten digits.

    python examples/fused_definition.py [--epochs N] [--device cpu|cuda] [--out DIR]

Each fused layer replaces stock code: ``FusedSoftmax(dim=-1)`` for ``nn.Softmax(dim=-1)``, ``FusedAddReLU()`` for
``relu(x + y)``, ``FusedReLUAdd()`` for ``relu(x) + y``, ``FusedMul()`` for ``x * y``. These layers have no parameters,
so this network and one of stock layers can load each other's weights.
"""

from __future__ import annotations

from pathlib import Path

import click
from einops import rearrange, reduce
from torch import Tensor, nn

from digits import PANELS, Digits, set_up, train
from fastlayers import FusedAddReLU, FusedMul, FusedReLUAdd, FusedSoftmax
from fastlayers.backends import choose
from training import DEVICE, OUT, console, draw_curves


class GatedConvBlock(nn.Module):
    """relu(value(x) · sigmoid(gate(x)) + x)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.value = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.gate = nn.Conv2d(channels, channels, 3, padding=1)
        self.multiply = FusedMul()
        self.join = FusedAddReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.multiply(self.value(x), self.gate(x).sigmoid()), x)


class AttentionBlock(nn.Module):
    """Self-attention between the pixels: relu(attention(x)) + x."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.softmax = FusedSoftmax(dim=-1)
        self.project = nn.Linear(channels, channels)
        self.join = FusedReLUAdd()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(self.norm(x)), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        weights = self.softmax(q @ k.mT * q.shape[-1] ** -0.5)
        return self.join(self.project(rearrange(weights @ v, "b h t d -> b t (h d)")), x)


class GatedAttentionNet(nn.Module):
    """Gated convolutions, then attention. Returns logits."""

    def __init__(self, channels: int = 48, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(GatedConvBlock(channels), GatedConvBlock(channels))
        self.attention = nn.Sequential(AttentionBlock(channels, heads), AttentionBlock(channels, heads))
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        pixels = rearrange(self.blocks(self.stem(x)), "b c h w -> b (h w) c")
        return self.head(reduce(self.attention(pixels), "b t c -> b c", "mean"))


@click.command()
@click.option("--epochs", default=10, show_default=True, type=click.IntRange(min=1))
@DEVICE
@OUT
def main(epochs: int, device: str | None, out: Path) -> None:
    """Train a network of fused layers on handwritten digits."""
    where = set_up(device)
    digits = Digits.load(where)
    model = GatedAttentionNet().to(where)

    console.rule(f"A network of fused layers, on {where}", align="left")
    for name, module in model.named_modules():
        if type(module).__name__.startswith("Fused"):
            console.print(f"{name:24}{module}")
    console.print(f"backend: {choose(where)}, and plain PyTorch where it has no kernel or is not faster")

    console.rule("Training", align="left")
    history = train(model, digits, epochs, 3e-3, "training")
    picture = out / "fused_definition.png"
    draw_curves({"fused layers": history}, PANELS, picture)
    console.print(f"test accuracy {history[-1]['accuracy']:.2%}; training curves in {picture}")


if __name__ == "__main__":
    main()
