"""fastlayers in Lightning: a callback that patches the module before a strategy wraps it.

    python examples/lightning_callback.py [--epochs N] [--stock] [--resume] [--device cpu|cuda] [--out DIR]

``Trainer(callbacks=[FastLayers()])`` is all that a run needs. Lightning's checkpoints have the names of the stock
network, so a run can resume them with or without the callback. The final weights are a safetensors file.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import click
import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from digits import PANELS, Digits, accuracy, set_up
from digits_resnet import DigitsResNet
from fastlayers import patch_model, save_model, unpatch_model
from training import DEVICE, OUT, RESUME, History, console, draw_curves


class FastLayers(lightning.Callback):
    """Patches the module during a run. ``options`` are those of :func:`fastlayers.patch_model`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        patch_model(pl_module, **self.options)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        unpatch_model(pl_module)


class Classifier(lightning.LightningModule):
    """A network of stock layers, which does not know fastlayers."""

    def __init__(self, network: nn.Module, digits: Digits, epochs: int) -> None:
        super().__init__()
        self.network = network
        self.digits = digits
        self.epochs = epochs
        self.history: History = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"].item()
        self.history.append({"loss": loss, "accuracy": accuracy(self.network, self.digits)})
        self.network.train()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = checkpoint["history"]


@click.command()
@click.option("--epochs", default=12, show_default=True, type=click.IntRange(min=1))
@click.option("--stock", is_flag=True, help="Train without the callback.")
@RESUME
@DEVICE
@OUT
def main(epochs: int, stock: bool, resume: bool, device: str | None, out: Path) -> None:
    """Train a ResNet on handwritten digits with Lightning."""
    where = set_up(device)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tips and advertisements
    warnings.filterwarnings("ignore", message=".*LeafSpec")  # from Lightning's own code
    digits = Digits.load(where)
    folder = out / "lightning"
    if resume and not (folder / "last.ckpt").is_file():
        raise click.UsageError(f"--resume: there is no checkpoint {folder / 'last.ckpt'}")
    module = Classifier(DigitsResNet(), digits, epochs)
    callbacks: list[lightning.Callback] = [
        RichProgressBar(),
        ModelCheckpoint(folder, save_last=True, save_top_k=0, enable_version_counter=False),
    ]
    if not stock:
        callbacks.append(FastLayers())
    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=callbacks, accelerator="gpu" if where.type == "cuda" else "cpu", devices=1,
        logger=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    batches = DataLoader(TensorDataset(digits.train_images.cpu(), digits.train_labels.cpu()), 64, shuffle=True)
    trainer.fit(module, batches, ckpt_path=folder / "last.ckpt" if resume else None)
    save_model(module.network, folder / "network.safetensors")
    draw_curves({"stock" if stock else "patched": module.history}, PANELS, folder / "curves.png")
    console.print(
        f"test accuracy {module.history[-1]['accuracy']:.2%}, loss {module.history[-1]['loss']:.6f}; all in {folder}"
    )


if __name__ == "__main__":
    main()
