"""Networks of transformers for speech, and for images with texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.networks.network import Batch, Network, Transformer


@dataclass(frozen=True)
class SpeechToText(Transformer):
    """Whisper: an encoder of ``size`` frames of a spectrogram, and a decoder of ``target`` tokens."""

    auto: str = "AutoModelForSpeechSeq2Seq"
    target: int = 128

    def shape(self) -> str:
        return f"{self.batch}x({self.size} + {self.target})"

    def example(self, device: torch.device) -> Batch:
        frames = torch.randn(self.batch, self.options["num_mel_bins"], self.size, device=device)
        return {"input_features": frames, "labels": self.ids(min(self.target, self.size), device)}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(input_features=batch["input_features"], decoder_input_ids=batch["labels"]).logits


@dataclass(frozen=True)
class SpeechRecognition(Transformer):
    """wav2vec 2.0: ``size`` samples of sound, and the letters that are spoken."""

    auto: str = "AutoModelForCTC"

    def example(self, device: torch.device) -> Batch:
        letters = torch.randint(1, self.options["vocab_size"], (self.batch, self.size // 2000), device=device)
        return {"input_values": torch.randn(self.batch, self.size, device=device), "labels": letters}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(input_values=batch["input_values"]).logits


@dataclass(frozen=True)
class ImageText(Transformer):
    """A network that says how well images and texts match. It is trained to tell the pairs of a batch."""

    length: int = 64

    def shape(self) -> str:
        return f"{self.batch}x({self.size}x{self.size} + {self.length})"

    def example(self, device: torch.device) -> Batch:
        images = torch.randn(self.batch, 3, self.size, self.size, device=device)
        text = self.options["text_config"]
        length = min(self.length, text["max_position_embeddings"])
        ids = torch.randint(text["vocab_size"], (self.batch, length), device=device)
        return {"pixel_values": images, "input_ids": ids}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch, return_loss=True).loss

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).logits_per_image


TINY_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

MULTIMODAL: tuple[Network, ...] = (
    SpeechToText(
        "whisper",
        "Whisper small",
        "WhisperConfig",
        16,
        3000,
        {
            "vocab_size": 51865,
            "num_mel_bins": 80,
            "d_model": 768,
            "encoder_layers": 12,
            "decoder_layers": 12,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
        {
            "vocab_size": 97,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 16,
            "max_target_positions": 32,
            # Which tokens begin, end and pad is not among what is measured.
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        32,
        gib=25,
    ),
    SpeechRecognition(
        "wav2vec2",
        "wav2vec 2.0 base",
        "Wav2Vec2Config",
        8,
        160_000,
        # Layers that are left out, and masks, are drawn on the CPU: that is a loop of its own.
        {"vocab_size": 32, "layerdrop": 0.0, "apply_spec_augment": False, "ctc_loss_reduction": "mean"},
        {
            **TINY_TOWER,
            "conv_dim": [16] * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "hidden_dropout": 0.0,
        },
        8000,
        gib=20,
        host_size=16_000,
    ),
    ImageText(
        "clip",
        "CLIP ViT-B/32",
        "CLIPConfig",
        256,
        224,
        {
            "projection_dim": 512,
            "text_config": {"vocab_size": 49408, "max_position_embeddings": 77, "hidden_size": 512},
            "vision_config": {"image_size": 224, "patch_size": 32},
        },
        {
            "projection_dim": 16,
            "text_config": {**TINY_TOWER, "vocab_size": 97, "max_position_embeddings": 16, "eos_token_id": 96},
            "vision_config": {**TINY_TOWER, "image_size": 64, "patch_size": 32},
        },
        64,
        gib=25,
        length=77,
    ),
    ImageText(
        "siglip",
        "SigLIP-B/16",
        "SiglipConfig",
        64,
        224,
        {
            "text_config": {"vocab_size": 32000, "max_position_embeddings": 64},
            "vision_config": {"image_size": 224, "patch_size": 16},
        },
        {
            "text_config": {**TINY_TOWER, "vocab_size": 97, "max_position_embeddings": 16, "projection_size": 32},
            "vision_config": {**TINY_TOWER, "image_size": 32, "patch_size": 16},
        },
        32,
        gib=20,
    ),
)
