"""Networks of diffusers: the U-Net and the autoencoder of Stable Diffusion, and a diffusion transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.network import Batch, Network, used

STEPS = 1000  # of the process that adds noise


@dataclass(frozen=True)
class Diffuser(Network):
    """A network of diffusers."""

    def shape(self) -> str:
        return f"{self.batch}x{self.size}x{self.size}"

    def build(self, device: torch.device) -> nn.Module:
        import diffusers

        with device:
            return used(getattr(diffusers, self.config)(**self.options))

    def images(self, channels: int, device: torch.device) -> Tensor:
        return torch.randn(self.batch, channels, self.size, self.size, device=device)


@dataclass(frozen=True)
class Denoiser(Diffuser):
    """A network that predicts the noise in latents."""

    def example(self, device: torch.device) -> Batch:
        return {
            "sample": self.images(4, device),
            "timestep": torch.randint(STEPS, (self.batch,), device=device),
            **self.condition(device),
            "noise": self.images(4, device),
        }

    def condition(self, device: torch.device) -> Batch:
        """What the image is to show."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(self.predict(model, batch).float(), batch["noise"])


@dataclass(frozen=True)
class TextDenoiser(Denoiser):
    """A U-Net that sees a text through cross attention."""

    def condition(self, device: torch.device) -> Batch:
        return {"text": torch.randn(self.batch, 77, self.options["cross_attention_dim"], device=device)}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["sample"], batch["timestep"], batch["text"]).sample


@dataclass(frozen=True)
class ClassDenoiser(Denoiser):
    """A transformer whose norms are modulated by the time and a class."""

    def condition(self, device: torch.device) -> Batch:
        return {"classes": torch.randint(self.options["num_embeds_ada_norm"], (self.batch,), device=device)}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["sample"], batch["timestep"], batch["classes"]).sample


@dataclass(frozen=True)
class Autoencoder(Diffuser):
    """A network that restores images from latents, which are drawn in training and the most likely in inference."""

    def example(self, device: torch.device) -> Batch:
        return {"images": self.images(3, device)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        restored = model(batch["images"], sample_posterior=True).sample
        return F.mse_loss(restored.float(), batch["images"])

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"]).sample


TINY_WIDTHS: dict[str, Any] = {"block_out_channels": (8, 16, 16, 16), "norm_num_groups": 4, "layers_per_block": 1}

DIFFUSION: tuple[Network, ...] = (
    TextDenoiser(
        "unet",
        "U-Net of Stable Diffusion 1.5",
        "UNet2DConditionModel",
        4,
        64,
        {"cross_attention_dim": 768, "attention_head_dim": 8},
        {**TINY_WIDTHS, "cross_attention_dim": 16, "attention_head_dim": 2},
        16,
        gib=35,
        host_size=16,
    ),
    Autoencoder(
        "vae",
        "VAE of Stable Diffusion 1.5",
        "AutoencoderKL",
        4,
        256,
        {
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "block_out_channels": (128, 256, 512, 512),
            "layers_per_block": 2,
        },
        TINY_WIDTHS,
        32,
        gib=30,
        host_size=64,
    ),
    ClassDenoiser(
        "dit",
        "DiT-B/2 (AdaLN)",
        "DiTTransformer2DModel",
        64,
        32,
        {"num_layers": 12, "num_attention_heads": 12, "attention_head_dim": 64, "num_embeds_ada_norm": 1000},
        {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "num_embeds_ada_norm": 10},
        8,
        gib=20,
    ),
)
