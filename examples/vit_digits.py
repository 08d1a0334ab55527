"""A vision transformer of stock layers, patched before it is trained.

    python examples/vit_digits.py [--epochs N] [--stock] [--resume] [--device cpu|cuda] [--out DIR]

The blocks have a norm first, LayerScale and stochastic depth, as in timm. The images of handwritten digits are cut into
patches with einops. ``patch_model`` fuses what is between the matrix products: scale, drop and sum of each branch, the
biases with the GELU, the norms. The weights load into an unpatched network, because their names are the same.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from einops import rearrange
from torch import Tensor, nn

from digits import PANELS, Digits, accuracy, set_up, train
from fastlayers import load_model, patch_model, patch_report, save_model, verify_patch
from fastlayers.backends import choose
from training import DEVICE, OUT, RESUME, console, draw_curves


def drop_path(x: Tensor, drop_prob: float = 0.0, training: bool = False, scale_by_keep: bool = True) -> Tensor:
    """Stochastic depth as in timm: in training, drops the branch of a sample with probability ``p``."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0 and scale_by_keep:
        random_tensor.div_(keep_prob)
    return x * random_tensor


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.drop_prob, self.training)


class LayerScale(nn.Module):
    def __init__(self, dim: int, start: float = 0.1) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (three h d) -> three b h t d", three=3, h=self.heads)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(rearrange(attended, "b h t d -> b t (h d)"))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.scale1, self.scale2 = LayerScale(dim), LayerScale(dim)
        self.drop1, self.drop2 = DropPath(drop), DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop1(self.scale1(self.attention(self.norm1(x))))
        return x + self.drop2(self.scale2(self.mlp(self.norm2(x))))


class DigitsViT(nn.Module):
    """A transformer on sixteen patches of 2x2 pixels. Returns logits."""

    def __init__(self, dim: int = 64, depth: int = 4, heads: int = 4, drop: float = 0.1, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.position = nn.Parameter(torch.randn(16, dim))
        self.blocks = nn.Sequential(*[Block(dim, heads, drop * i / max(1, depth - 1)) for i in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2)
        x = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(x).mean(1))


@click.command()
@click.option("--epochs", default=30, show_default=True, type=click.IntRange(min=1))
@click.option("--stop-at", default=None, type=click.IntRange(min=1), help="Stop after this epoch; --resume continues.")
@click.option("--stock", is_flag=True, help="Leave the network unpatched.")
@RESUME
@DEVICE
@OUT
def main(epochs: int, stop_at: int | None, stock: bool, resume: bool, device: str | None, out: Path) -> None:
    """Train a patched vision transformer on handwritten digits."""
    where = set_up(device)
    digits = Digits.load(where)
    model = DigitsViT().to(where)

    if not stock:
        console.rule(f"Patch and verify, on {where}", align="left")
        console.print(patch_report(patch_model(model)))
        console.print(verify_patch(model, digits.test_images[:64]))
        console.print(f"backend: {choose(where)}, and plain PyTorch where it has no kernel or is not faster")

    console.rule("Train", align="left")
    checkpoint = out / "vit_digits.checkpoint.safetensors"
    history = train(model, digits, epochs, 5e-3, "training", stop_at=stop_at, checkpoint=checkpoint, resume=resume)
    save_model(model, out / "vit_digits.safetensors")
    draw_curves({"stock" if stock else "patched": history}, PANELS, out / "vit_digits.png")
    console.print(f"weights and curves in {out / 'vit_digits'}.safetensors and .png; to go on: {checkpoint}")

    console.rule("The weights in an unpatched network", align="left")
    unpatched = DigitsViT().to(where)
    load_model(unpatched, out / "vit_digits.safetensors")
    console.print(f"test accuracy: trained {accuracy(model, digits):.2%}, unpatched {accuracy(unpatched, digits):.2%}")


if __name__ == "__main__":
    main()
