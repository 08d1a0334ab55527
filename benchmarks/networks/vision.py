"""Image classifiers of timm, torchvision and transformers, and a network that segments volumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks.network import Batch, Network, used


@dataclass(frozen=True)
class VisionModel(Network):
    """A classifier of timm, on random images."""

    channels_last: bool = True

    def shape(self) -> str:
        return f"{self.batch}x{self.size}x{self.size}{', NHWC' if self.channels_last else ''}"

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def create(self) -> nn.Module:
        import timm

        return timm.create_model(self.config, **self.options)

    def build(self, device: torch.device) -> nn.Module:
        with device:
            return used(self.create()).to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def example(self, device: torch.device) -> Batch:
        images = torch.randn(self.batch, 3, self.size, self.size, device=device)
        labels = torch.randint(self.options["num_classes"], (self.batch,), device=device)
        return {"images": images.to(memory_format=self.memory_format), "labels": labels}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.predict(model, batch), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"])


@dataclass(frozen=True)
class TorchvisionModel(VisionModel):
    """A classifier of torchvision; ``config`` is a function or a class."""

    def create(self) -> nn.Module:
        import torchvision

        return getattr(torchvision.models, self.config)(**self.options)


@dataclass(frozen=True)
class TransformersVisionModel(VisionModel):
    """A classifier of transformers."""

    def create(self) -> nn.Module:
        import transformers

        options = {**self.options, "num_labels": self.options["num_classes"]}
        config = getattr(transformers, self.config)(**options)
        return transformers.AutoModelForImageClassification.from_config(config)

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"]).logits


@dataclass(frozen=True)
class VolumeSegmentation(Network):
    """A network of MONAI that gives each voxel of an MR image one of four classes, as for brain tumours."""

    channels: int = 4
    host_size: int | None = 32

    def shape(self) -> str:
        return f"{self.batch}x{self.size}x{self.size}x{self.size}"

    def build(self, device: torch.device) -> nn.Module:
        from monai.networks import nets

        with device:
            return used(getattr(nets, self.config)(**self.options))

    def example(self, device: torch.device) -> Batch:
        size = (self.size,) * 3
        images = torch.randn(self.batch, self.channels, *size, device=device)
        return {"images": images, "labels": torch.randint(self.channels, (self.batch, *size), device=device)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of the Dice loss and the cross entropy, as nnU-Net is trained."""
        logits = self.predict(model, batch).float()
        wanted = F.one_hot(batch["labels"], self.channels).movedim(-1, 1)
        shares = logits.softmax(1)
        space = (0, 2, 3, 4)
        dice = 2 * (shares * wanted).sum(space) / (shares + wanted).sum(space)
        return F.cross_entropy(logits, batch["labels"]) + 1 - dice.mean()

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"])


CLASSES: dict[str, Any] = {"num_classes": 1000}
TINY_VIT = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 4}
TINY_CONVNEXT = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}

RESNET = VisionModel("resnet50", "ResNet-50", "resnet50", 128, 224, CLASSES, {"layers": (1, 1, 1, 1)}, 64)
VIT = VisionModel("vit", "ViT-B/16", "vit_base_patch16_224", 64, 224, CLASSES, TINY_VIT, 32, channels_last=False)
CONVNEXT = VisionModel("convnext", "ConvNeXt-T", "convnext_tiny", 64, 224, CLASSES, TINY_CONVNEXT, 64)
EFFICIENTNET = VisionModel(
    "efficientnet", "EfficientNet-B0", "efficientnet_b0", 128, 224, CLASSES, {"num_classes": 10}, 64
)

VISION: tuple[Network, ...] = (
    VisionModel(
        "swin",
        "Swin-T",
        "swin_tiny_patch4_window7_224",
        64,
        224,
        CLASSES,
        {"img_size": 64, "window_size": 4, "embed_dim": 8, "depths": (2, 2, 2, 2), "num_heads": (1, 2, 4, 8)},
        64,
        channels_last=False,
    ),
    TorchvisionModel("resnet50_torchvision", "ResNet-50 (torchvision)", "resnet50", 128, 224, CLASSES, {}, 64),
    TorchvisionModel(
        "vit_torchvision",
        "ViT-B/16 (torchvision)",
        "VisionTransformer",
        64,
        224,
        {
            **CLASSES,
            "image_size": 224,
            "patch_size": 16,
            "num_layers": 12,
            "num_heads": 12,
            "hidden_dim": 768,
            "mlp_dim": 3072,
        },
        {"image_size": 32, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64},
        32,
        channels_last=False,
    ),
    TorchvisionModel("convnext_torchvision", "ConvNeXt-T (torchvision)", "convnext_tiny", 64, 224, CLASSES, {}, 64),
    TorchvisionModel(
        "swin_torchvision", "Swin-T (torchvision)", "swin_t", 64, 224, CLASSES, {}, 64, channels_last=False
    ),
    TransformersVisionModel(
        "resnet50_transformers",
        "ResNet-50 (transformers)",
        "ResNetConfig",
        128,
        224,
        CLASSES,
        {"depths": [1, 1, 1, 1]},
        64,
    ),
    TransformersVisionModel(
        "vit_transformers",
        "ViT-B/16 (transformers)",
        "ViTConfig",
        64,
        224,
        CLASSES,
        {
            "image_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        },
        32,
        channels_last=False,
    ),
    TransformersVisionModel(
        "convnext_transformers",
        "ConvNeXt-T (transformers)",
        "ConvNextConfig",
        64,
        224,
        CLASSES,
        {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]},
        64,
    ),
    TransformersVisionModel(
        "swin_transformers",
        "Swin-T (transformers)",
        "SwinConfig",
        64,
        224,
        CLASSES,
        {"image_size": 64, "window_size": 2, "embed_dim": 8, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8]},
        64,
        channels_last=False,
    ),
    VisionModel(
        "deit3",
        "DeiT III-B/16 (LayerScale)",
        "deit3_base_patch16_224",
        64,
        224,
        CLASSES,
        TINY_VIT,
        32,
        channels_last=False,
    ),
    VisionModel(
        "eva02",
        "EVA-02-B/14 (SwiGLU, rotary)",
        "eva02_base_patch14_224",
        64,
        224,
        CLASSES,
        {**TINY_VIT, "img_size": 28},
        28,
        channels_last=False,
    ),
    VisionModel("resnext50", "ResNeXt-50 32x4d", "resnext50_32x4d", 64, 224, CLASSES, {"layers": (1, 1, 1, 1)}, 64),
    VisionModel("regnety", "RegNetY-3.2GF", "regnety_032", 64, 224, CLASSES, {}, 64),
    VisionModel("mobilenetv2", "MobileNetV2", "mobilenetv2_100", 128, 224, CLASSES, {}, 64),
    VisionModel("mobilenetv3", "MobileNetV3-L", "mobilenetv3_large_100", 256, 224, CLASSES, {}, 64),
    VisionModel(
        "densenet",
        "DenseNet-121",
        "densenet121",
        64,
        224,
        CLASSES,
        {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
        64,
    ),
    VisionModel(
        "coatnet",
        "CoAtNet-0",
        "coatnet_0_rw_224",
        64,
        224,
        CLASSES,
        {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)},
        64,
        gib=15,
    ),
    VisionModel("convnextv2", "ConvNeXt V2-T", "convnextv2_tiny", 64, 224, CLASSES, TINY_CONVNEXT, 64),
    VolumeSegmentation(
        "unet3d",
        "3-D U-Net (nnU-Net)",
        "DynUNet",
        2,
        96,
        {
            "spatial_dims": 3,
            "in_channels": 4,
            "out_channels": 4,
            "kernel_size": [3] * 5,
            "strides": [1, 2, 2, 2, 2],
            "upsample_kernel_size": [2] * 4,
            "filters": [32, 64, 128, 256, 320],
        },
        {"filters": [4, 8, 8, 8, 8]},
        32,
        gib=15,
    ),
)
