"""A small ResNet: train, save, load, patch, verify, fine-tune, time.

    python examples/digits_resnet.py [--epochs N] [--device cpu|cuda] [--out DIR]

The network has stock torch layers and learns scikit-learn's handwritten digits. It does not know fastlayers.
``patch_model`` finds each BatchNorm with the ReLU after it, in the blocks and in the ``nn.Sequential`` of the stem, and
the ``relu(bn2(out) + identity)`` at the end of each block. For inference, ``fold_batch_norm`` makes the BatchNorms part
of the convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from digits import PANELS, Digits, accuracy, set_up, train, train_step
from fastlayers import fold_batch_norm, patch_model, patch_report, unfold_batch_norm, verify_patch
from fastlayers.backends import choose
from fastlayers.checkpoint import load_model, save_model
from fastlayers.tables import Table
from training import DEVICE, OUT, console, draw_curves, in_turns

#: Images in a timed batch: so many that a GPU is not CPU-bound.
TIMED_BATCH = {"cpu": 64, "cuda": 8192}


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, as in torchvision."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class DigitsResNet(nn.Module):
    """ResNet of three stages on 8x8 images; returns logits."""

    def __init__(self, channels: tuple[int, ...] = (16, 32, 64), classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, channels[0], 3, padding=1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        before = channels[0]
        for stage, width in enumerate(channels):
            blocks += [BasicBlock(before, width, stride=2 if stage else 1), BasicBlock(width, width)]
            before = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def compare_speed(stock: nn.Module, patched: nn.Module, digits: Digits) -> Table:
    device = digits.train_images.device
    chosen = torch.randint(len(digits.train_labels), (TIMED_BATCH[device.type],), device=device)
    images, labels = digits.train_images[chosen], digits.train_labels[chosen]

    def step(model: nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # a rate of 0, so that timing changes no weight
        return lambda: train_step(model, optimizer, images, labels)

    @torch.no_grad()
    def infer(model: nn.Module) -> None:
        model(images)

    header = ("ms, median of 20", "stock", "patched", "speed-up")
    stock.train(), patched.train()
    times = {"training step": in_turns(step(stock), step(patched), device)}
    stock.eval(), patched.eval()
    times["inference"] = in_turns(lambda: infer(stock), lambda: infer(patched), device)
    fold_batch_norm(patched)
    times["inference, folded"] = in_turns(lambda: infer(stock), lambda: infer(patched), device)
    unfold_batch_norm(patched)
    rows = [
        (f"{name}, {len(images)} images", f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}x")
        for name, (before, after) in times.items()
    ]
    return Table(header, rows, right=header[1:])


@click.command()
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(min=1), help="Epochs of training.")
@DEVICE
@OUT
def main(epochs: int, device: str | None, out: Path) -> None:
    """Train a ResNet on handwritten digits, then patch it like a pretrained network."""
    where = set_up(device)
    out.mkdir(parents=True, exist_ok=True)
    digits = Digits.load(where)

    console.rule(f"1. Train with stock layers, on {where}", align="left")
    trained = DigitsResNet().to(where)
    phases = {"stock": train(trained, digits, epochs, 3e-3, "training")}

    console.rule("2. Save, and load as one loads a pretrained network", align="left")
    path = out / "digits_resnet.safetensors"
    save_model(trained, path)
    stock, network = DigitsResNet().to(where), DigitsResNet().to(where)
    load_model(stock, path)
    load_model(network, path)
    console.print(f"{path}, {path.stat().st_size / 1e6:.1f} MB")

    console.rule("3. Patch", align="left")
    patch_model(network)
    console.print(patch_report(network))
    console.print(f"backend: {choose(where)}, and plain PyTorch where it has no kernel or is not faster")

    console.rule("4. Verify outputs and gradients", align="left")
    for training in (True, False):
        console.print(verify_patch(network.train(training), digits.test_images[:64]))
    before, after = accuracy(stock, digits), accuracy(network, digits)
    console.print(f"test accuracy: stock {before:.2%}, patched {after:.2%}")

    console.rule("5. Fine-tune the patched network", align="left")
    phases["fine-tuned, patched"] = train(network, digits, max(1, epochs // 4), 3e-4, "fine-tuning")
    picture = out / "digits_resnet.png"
    draw_curves(phases, PANELS, picture)
    console.print(f"training curves in {picture}")
    console.print(patch_report(network).summary())  # which also says what ran

    console.rule("6. Time both", align="left")
    console.print(compare_speed(stock, network, digits))


if __name__ == "__main__":
    main()
