"""The whole models: how each is built, its inputs, and the modes in which it runs.

Configurations of transformers and timm with random weights; nothing is downloaded. The language models have bfloat16
weights. The vision models have float32 weights and run under autocast to bfloat16. On a CPU everything is float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import fastlayers

Batch = dict[str, Tensor]

#: The modes, with their names in tables and plots, in the order of the tables.
MODES = {
    "eager": "torch",
    "compile": "torch.compile",
    "liger": "Liger",
    "fastlayers": "fastlayers",
    "fastlayers_compile": "fastlayers + torch.compile",
}
COMPILED = ("compile", "fastlayers_compile")
PATCHED = ("fastlayers", "fastlayers_compile")
#: Batch of the tiny models. With fewer values in the last layers, a BatchNorm would amplify every rounding.
TINY_BATCH = 8


class UnavailableError(Exception):
    """A mode that does not exist for this model, or a library that is not installed."""


@dataclass(frozen=True)
class Network:
    """One model and its inputs.

    Args:
        config: the class of a configuration of transformers, or the name of an architecture of timm.
        options: the arguments of ``config``.
        batch: sequences or images in a batch; ``size`` is the length of a sequence or the side of an image.
        tiny_options, tiny_size: options and size with which a CPU runs the model in a second.
        gib: the most GPU memory that the compiled model needs. It limits how many processes compile in parallel.
    """

    name: str
    title: str
    config: str
    batch: int
    size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    tiny_options: Mapping[str, Any] = field(default_factory=dict)
    tiny_size: int = 16
    gib: int = 10

    def describe(self, device: str) -> str:
        """Size and precision of a batch."""
        raise NotImplementedError

    def tiny(self) -> Network:
        """The same architecture, for a CPU."""
        options = {**self.options, **self.tiny_options}
        return replace(self, title=f"tiny {self.title}", batch=TINY_BATCH, size=self.tiny_size, options=options)

    def build(self, device: torch.device) -> nn.Module:
        raise NotImplementedError

    def example(self, device: torch.device) -> Batch:
        """Inputs and labels of a batch."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class LanguageModel(Network):
    """A model of transformers. Inference computes the logits of a prompt's last position, as ``generate`` does."""

    masked: bool = False

    def describe(self, device: str) -> str:
        return f"{self.batch}x{self.size}, {'bf16' if device == 'cuda' else 'fp32'}"

    def build(self, device: torch.device) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()  # it warns about token ids that a small vocabulary does not have
        config = getattr(transformers, self.config)(use_cache=False, **self.options)
        auto = transformers.AutoModelForMaskedLM if self.masked else transformers.AutoModelForCausalLM
        with device:
            return auto.from_config(config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)

    def example(self, device: torch.device) -> Batch:
        ids = torch.randint(self.options["vocab_size"], (self.batch, self.size), device=device)
        if not self.masked:
            return {"input_ids": ids, "labels": ids}
        chosen = torch.rand(ids.shape, device=device) < 0.15  # as BERT is trained
        return {"input_ids": ids, "labels": ids.where(chosen, -100)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).loss

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        wanted = {} if self.masked else {"logits_to_keep": 1}
        return model(input_ids=batch["input_ids"], **wanted).logits


@dataclass(frozen=True)
class VisionModel(Network):
    """A model of timm, on random images."""

    channels_last: bool = True

    def describe(self, device: str) -> str:
        precision = "AMP bf16" if device == "cuda" else "fp32"
        return f"{self.batch}x{self.size}x{self.size}, {'NHWC, ' if self.channels_last else ''}{precision}"

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def build(self, device: torch.device) -> nn.Module:
        import timm

        with device:
            model = timm.create_model(self.config, **self.options)
        return used(model).to(memory_format=self.memory_format)  # type: ignore[call-overload]

    def example(self, device: torch.device) -> Batch:
        images = torch.randn(self.batch, 3, self.size, self.size, device=device)
        labels = torch.randint(self.options["num_classes"], (self.batch,), device=device)
        return {"images": images.to(memory_format=self.memory_format), "labels": labels}

    def autocast(self, batch: Batch) -> AbstractContextManager:
        on_gpu = batch["images"].is_cuda
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.autocast(batch):
            return F.cross_entropy(model(batch["images"]), batch["labels"])

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        with self.autocast(batch):
            return model(batch["images"])


def used(model: nn.Module) -> nn.Module:
    """Give BatchNorms the values of a trained network.

    timm initialises the last BatchNorm of a block to zero. Whole branches would then be zero, which hides wrong results
    and, on a GPU, takes less power than data does.
    """
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, _BatchNorm):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(std=0.1)
                norm.running_mean.normal_(std=0.1)  # type: ignore[union-attr]
                norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
    return model


NETWORKS: tuple[Network, ...] = (
    LanguageModel(
        "llama",
        "Llama 1.2B",
        "LlamaConfig",
        4,
        2048,
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        gib=30,
    ),
    LanguageModel(
        "gpt2",
        "GPT-2",
        "GPT2Config",
        16,
        1024,
        {"vocab_size": 50257},
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
        gib=12,
    ),
    LanguageModel(
        "bert",
        "BERT-base",
        "BertConfig",
        64,
        512,
        {"vocab_size": 30522},
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 32,
        },
        gib=42,
        masked=True,
    ),
    VisionModel("resnet50", "ResNet-50", "resnet50", 128, 224, {"num_classes": 1000}, {"layers": (1, 1, 1, 1)}, 64),
    VisionModel(
        "vit",
        "ViT-B/16",
        "vit_base_patch16_224",
        64,
        224,
        {"num_classes": 1000},
        {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 4},
        32,
        channels_last=False,
    ),
    VisionModel(
        "convnext",
        "ConvNeXt-T",
        "convnext_tiny",
        64,
        224,
        {"num_classes": 1000},
        {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)},
        64,
    ),
    VisionModel(
        "efficientnet",
        "EfficientNet-B0",
        "efficientnet_b0",
        128,
        224,
        {"num_classes": 1000},
        {"num_classes": 10},
        64,
    ),
)


# -- the modes --------------------------------------------------------------------------------------------------------


def prepare(model: nn.Module, mode: str) -> str:
    """Prepare the model for the mode, in place. Returns a summary of what was changed.

    Raises:
        UnavailableError: the mode does not support this model.
    """
    if mode == "liger":
        return apply_liger(model)
    if mode in PATCHED:
        return fastlayers.patch_report(fastlayers.patch_model(model)).summary()
    return ""


def apply_liger(model: nn.Module) -> str:
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UnavailableError(f"Liger is not there: {error}") from error
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnavailableError(f"Liger has nothing for {kind}")
    monkey_patch._apply_liger_kernel_to_instance(model=model)
    return f"Liger's layers for {kind}"


def compiled(model: nn.Module, mode: str) -> nn.Module:
    """The model, or its compiled form if the mode compiles."""
    if mode not in COMPILED:
        return model
    torch._dynamo.reset()
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]


def folds(model: nn.Module, mode: str) -> bool:
    """Whether inference folds BatchNorms, as a user of fastlayers would."""
    return mode in PATCHED and any(isinstance(module, _BatchNorm) for module in model.modules())
