"""Models of packages for images: diffusion, segmentation, medicine; small, random weights: see :mod:`corpus.models`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample, images

__all__ = ["MODELS"]

#: The options to build a model with, and what gives the arguments, positional or by name, to call it with.
Recipe = tuple[dict[str, Any], Callable[[], Any]]


def filled(model: nn.Module) -> nn.Module:
    """The model with random weights where initialisation leaves only zeros: these hide all that comes before them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.numel() and not parameter.any():
                parameter.normal_(0, (parameter.numel() / len(parameter)) ** -0.5)
    return model


def sample(model: nn.Module, inputs: Any) -> Sample:
    if isinstance(inputs, dict):
        return Sample(filled(model), kwargs=inputs)
    return Sample(filled(model), inputs if isinstance(inputs, tuple) else (inputs,))


def load(module: str) -> Any:
    """A module, the random numbers as they were: to import some packages draws a few."""
    with torch.random.fork_rng(devices=[]):
        return import_module(module)


def build(module: str, kind: str, options: dict[str, Any], inputs: Callable[[], Any]) -> Sample:
    """A model by the class or function ``kind`` of a module."""
    return sample(getattr(load(module), kind)(**options), inputs())


def models(package: str, module: str, recipes: dict[str, Recipe]) -> dict[str, Callable[[], Sample]]:
    """The builders of a package's models by name, where ``Kind/variant`` is of the class ``Kind``."""
    made = dict[str, Callable[[], Sample]]()
    for name, (options, inputs) in recipes.items():
        path, slash, variant = name.partition("/")
        path, _, kind = f"{module}.{path}".rpartition(".")
        made[f"{package}:{kind}{slash}{variant}"] = partial(build, path, kind, options, inputs)
    return made


def steps() -> torch.Tensor:
    return torch.tensor([3, 500])


def tokens(*size: int, high: int = 10) -> torch.Tensor:
    return torch.randint(high, size)


def volumes(size: int) -> torch.Tensor:
    return torch.randn(2, 1, size, size, size)


# -- diffusers --------------------------------------------------------------------------------------------------------


def denoised(*size: int, text: int = 32, **more: Any) -> dict[str, Any]:
    """Arguments of a UNet: two noisy inputs of that size, their steps, and two texts."""
    return {
        "sample": torch.randn(2, *size),
        "timestep": steps(),
        "encoder_hidden_states": torch.randn(2, 7, text),
    } | more


def diffused(*size: int, text: int = 32, length: int = 8, **more: Any) -> dict[str, Any]:
    """The same arguments by the names that transformers have for them."""
    words = torch.randn(2, length, text)
    return {"hidden_states": torch.randn(2, *size), "timestep": steps(), "encoder_hidden_states": words} | more


def positions(length: int) -> torch.Tensor:
    """A sine and a cosine for each of the 3 axes of a position: the ids of the tokens of a picture."""
    return torch.stack([torch.zeros(length), torch.arange(length) // 4, torch.arange(length) % 4], dim=1)


def xl() -> dict[str, torch.Tensor]:
    return {"text_embeds": torch.randn(2, 32), "time_ids": torch.rand(2, 6) * 64}


def turns(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of a rotary embedding."""
    angles = torch.rand(length, width) * 6
    return angles.cos(), angles.sin()


WIDTHS: dict[str, Any] = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def blocks(down: str, up: str, suffix: str = "2D", plain: str = "") -> dict[str, Any]:
    """The options for one block with attention and one without it, down and up."""
    downs = (f"{down}DownBlock{suffix}", f"{plain}DownBlock{suffix}")
    ups = (f"{plain}UpBlock{suffix}", f"{up}UpBlock{suffix}")
    return {"down_block_types": downs, "up_block_types": ups}


UNETS: dict[str, Recipe] = {
    "UNet2DModel": (
        WIDTHS | {"sample_size": 32} | blocks("Attn", "Attn"),
        lambda: {"sample": images(32), "timestep": steps()},
    ),
    "UNet2DModel/resnet": (
        WIDTHS
        | {"down_block_types": ("ResnetDownsampleBlock2D",) * 2, "up_block_types": ("ResnetUpsampleBlock2D",) * 2}
        | {"resnet_time_scale_shift": "scale_shift", "num_class_embeds": 5, "attn_norm_num_groups": 4},
        lambda: {"sample": images(32), "timestep": steps(), "class_labels": tokens(2, high=5)},
    ),
    "UNet2DModel/skip": (
        WIDTHS | {"time_embedding_type": "fourier"} | blocks("AttnSkip", "AttnSkip", plain="Skip"),
        lambda: {"sample": images(32), "timestep": steps()},
    ),
    "UNet2DConditionModel": (
        WIDTHS | {"cross_attention_dim": 32, "attention_head_dim": 4} | blocks("CrossAttn", "CrossAttn"),
        lambda: denoised(4, 16, 16),
    ),
    "UNet2DConditionModel/xl": (
        WIDTHS
        | blocks("CrossAttn", "CrossAttn")
        | {"cross_attention_dim": 32, "attention_head_dim": (2, 4), "transformer_layers_per_block": (1, 2)}
        | {"use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8}
        | {"projection_class_embeddings_input_dim": 80},
        lambda: denoised(4, 16, 16, added_cond_kwargs=xl()),
    ),
    "UNet2DConditionModel/simple": (
        WIDTHS
        | {"down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D")}
        | {"up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D")}
        | {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "cross_attention_dim": 32, "attention_head_dim": 8}
        | {"class_embed_type": "timestep", "act_fn": "gelu", "resnet_time_scale_shift": "scale_shift"}
        | {"cross_attention_norm": "group_norm", "addition_embed_type": "text", "encoder_hid_dim": 24}
        | {"addition_embed_type_num_heads": 4, "only_cross_attention": True},
        lambda: denoised(4, 16, 16, text=24, class_labels=steps()),
    ),
    "UNet2DConditionModel/attention": (
        WIDTHS
        | blocks("Attn", "Attn")
        | {"cross_attention_dim": 32, "attention_head_dim": 8}
        | {"class_embed_type": "simple_projection", "projection_class_embeddings_input_dim": 12}
        | {"class_embeddings_concat": True},
        lambda: denoised(4, 16, 16, class_labels=torch.randn(2, 12)),
    ),
    "UNet1DModel": (
        {"sample_size": 128, "extra_in_channels": 64},
        lambda: {"sample": torch.randn(2, 2, 128), "timestep": steps()},
    ),
    "UNet1DModel/planning": (
        {"in_channels": 6, "out_channels": 6, "time_embedding_type": "positional", "use_timestep_embedding": True}
        | {"down_block_types": ("DownResnetBlock1D",) * 2, "up_block_types": ("UpResnetBlock1D",)}
        | {"mid_block_type": "MidResTemporalBlock1D", "out_block_type": "OutConv1DBlock", "act_fn": "mish"}
        | {"block_out_channels": (16, 32), "freq_shift": 1.0, "flip_sin_to_cos": False},
        lambda: {"sample": torch.randn(2, 6, 16), "timestep": steps()},
    ),
    "UNet3DConditionModel": (
        WIDTHS | {"cross_attention_dim": 32, "attention_head_dim": 8} | blocks("CrossAttn", "CrossAttn", "3D"),
        lambda: denoised(4, 3, 16, 16),
    ),
    "UNetSpatioTemporalConditionModel": (
        {"block_out_channels": (32, 64), "layers_per_block": 1, "num_attention_heads": (2, 4), "num_frames": 3}
        | {"cross_attention_dim": 32, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24}
        | blocks("CrossAttn", "CrossAttn", "SpatioTemporal"),
        lambda: {
            "sample": torch.randn(2, 3, 8, 16, 16),
            "timestep": torch.tensor(3),
            "encoder_hidden_states": torch.randn(2, 1, 32),
            "added_time_ids": torch.rand(2, 3),
        },
    ),
    "UNetMotionModel": (
        WIDTHS
        | blocks("CrossAttn", "CrossAttn", "Motion")
        | {"cross_attention_dim": 32, "num_attention_heads": 2, "motion_num_attention_heads": 2},
        lambda: denoised(4, 3, 16, 16, encoder_hidden_states=torch.randn(6, 7, 32)),
    ),
    "I2VGenXLUNet": (
        WIDTHS | {"cross_attention_dim": 32, "attention_head_dim": 8} | blocks("CrossAttn", "CrossAttn", "3D"),
        lambda: denoised(
            *(4, 3, 16, 16),
            fps=torch.tensor([8, 16]),
            image_latents=torch.randn(2, 4, 3, 16, 16),
            image_embeddings=torch.randn(2, 32),
        ),
    ),
    "StableCascadeUNet": (
        {"in_channels": 4, "out_channels": 4, "conditioning_dim": 32, "block_out_channels": (32, 64)}
        | {"num_attention_heads": (2, 4), "down_num_layers_per_block": (1, 2), "up_num_layers_per_block": (2, 1)}
        | {"clip_text_in_channels": 16, "clip_text_pooled_in_channels": 16, "clip_image_in_channels": 16}
        | {"timestep_ratio_embedding_dim": 16, "switch_level": (False,)},
        lambda: {
            "sample": images(16, 4),
            "timestep_ratio": torch.rand(2),
            "clip_text_pooled": torch.randn(2, 1, 16),
            "clip_text": torch.randn(2, 7, 16),
            "clip_img": torch.randn(2, 1, 16),
        },
    ),
    "ControlNetModel": (
        WIDTHS
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 4}
        | {"cross_attention_dim": 32, "conditioning_embedding_out_channels": (16, 32)},
        lambda: denoised(4, 16, 16, controlnet_cond=images(32)),
    ),
    "T2IAdapter": ({"channels": [16, 32], "num_res_blocks": 1, "downscale_factor": 4}, lambda: images(32)),
}

AUTOENCODERS: dict[str, Recipe] = {
    "AutoencoderKL": (
        WIDTHS | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        lambda: images(32),
    ),
    "AsymmetricAutoencoderKL": (
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "down_block_out_channels": (32, 64)}
        | {"up_block_types": ("UpDecoderBlock2D",) * 2, "up_block_out_channels": (32, 64), "norm_num_groups": 8},
        lambda: (images(32), torch.ones(2, 1, 32, 32)),
    ),
    "VQModel": (
        WIDTHS
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        | {"norm_type": "spatial", "num_vq_embeddings": 16},
        lambda: images(32),
    ),
    "ConsistencyDecoderVAE": (
        {"encoder_block_out_channels": (32, 64), "encoder_down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"encoder_layers_per_block": 1, "decoder_block_out_channels": (32, 64), "decoder_layers_per_block": 1}
        | {"decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2, "sample_size": 32}
        | {"decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2},
        lambda: images(32),
    ),
    "AutoencoderKLTemporalDecoder": (
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 64)},
        lambda: {"sample": images(32), "num_frames": 2},
    ),
    "AutoencoderDC": (
        {"latent_channels": 8, "attention_head_dim": 8, "encoder_block_types": ("ResBlock", "EfficientViTBlock")}
        | {"decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (16, 32)}
        | {"decoder_block_out_channels": (16, 32), "encoder_layers_per_block": (1, 2)}
        | {"decoder_layers_per_block": (1, 2), "encoder_qkv_multiscales": ((), (5,))}
        | {"decoder_qkv_multiscales": ((), (5,)), "decoder_norm_types": ["batch_norm", "rms_norm"]}
        | {"decoder_act_fns": ["relu", "silu"], "upsample_block_type": "interpolate", "downsample_block_type": "Conv"},
        lambda: images(32),
    ),
    "AutoencoderKLCogVideoX": (
        {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
        | {"block_out_channels": (8, 8, 16, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        lambda: torch.randn(1, 3, 5, 16, 16),
    ),
    "AutoencoderKLWan": (
        {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]},
        lambda: torch.randn(1, 3, 5, 16, 16),
    ),
    "AutoencoderKLLTXVideo": (
        {"latent_channels": 8, "block_out_channels": (8, 8, 16, 16), "decoder_block_out_channels": (8, 8, 16, 16)}
        | {"layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5, "patch_size": 1},
        lambda: torch.randn(1, 3, 9, 16, 16),
    ),
    "AutoencoderKLMochi": (
        {"encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4}
        | {"layers_per_block": (1,) * 5, "latent_channels": 12},
        lambda: torch.randn(1, 3, 7, 16, 16),
    ),
}

TRANSFORMERS: dict[str, Recipe] = {
    "DiTTransformer2DModel": (
        HEADS | {"sample_size": 8, "num_embeds_ada_norm": 20, "out_channels": 8},
        lambda: {"hidden_states": images(8, 4), "timestep": steps(), "class_labels": tokens(2)},
    ),
    "Transformer2DModel": (
        HEADS | {"in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        lambda: {"hidden_states": images(8, 32), "encoder_hidden_states": torch.randn(2, 7, 32)},
    ),
    "Transformer2DModel/ada_norm": (
        HEADS
        | {"in_channels": 32, "norm_num_groups": 8, "norm_type": "ada_norm", "num_embeds_ada_norm": 1000}
        | {"use_linear_projection": True, "double_self_attention": True, "activation_fn": "geglu-approximate"},
        lambda: {"hidden_states": images(8, 32), "timestep": torch.tensor(3)},
    ),
    "Transformer2DModel/vectors": (
        HEADS
        | {"num_vector_embeds": 12, "sample_size": 4, "norm_type": "ada_norm", "num_embeds_ada_norm": 1000}
        | {"cross_attention_dim": 32, "attention_bias": True},
        lambda: {
            "hidden_states": tokens(2, 16),
            "encoder_hidden_states": torch.randn(2, 7, 32),
            "timestep": torch.tensor(3),
        },
    ),
    "PixArtTransformer2DModel": (
        HEADS | {"sample_size": 8, "caption_channels": 24, "cross_attention_dim": 32, "num_embeds_ada_norm": 1000},
        lambda: diffused(
            *(4, 8, 8),
            text=24,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            encoder_attention_mask=torch.ones(2, 8),
        ),
    ),
    "SD3Transformer2DModel": (
        HEADS
        | {"sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32, "qk_norm": "rms_norm"}
        | {"caption_projection_dim": 32, "pooled_projection_dim": 24, "dual_attention_layers": (0,)},
        lambda: diffused(4, 8, 8, pooled_projections=torch.randn(2, 24)),
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        }
        | {"num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 24, "guidance_embeds": True},
        lambda: diffused(
            *(16, 4),
            timestep=torch.rand(2),
            guidance=torch.rand(2),
            pooled_projections=torch.randn(2, 24),
            img_ids=positions(16),
            txt_ids=torch.zeros(8, 3),
        ),
    ),
    "ChromaTransformer2DModel": (
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        }
        | {"num_attention_heads": 2, "joint_attention_dim": 32, "approximator_num_channels": 8}
        | {"approximator_hidden_dim": 32, "approximator_layers": 1},
        lambda: diffused(16, 4, timestep=torch.rand(2), img_ids=positions(16), txt_ids=torch.zeros(8, 3)),
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 16}
        | {"num_attention_heads": 2, "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64},
        lambda: diffused(4, 8, 8),
    ),
    "HunyuanDiT2DModel": (
        HEADS
        | {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "cross_attention_dim": 32}
        | {"cross_attention_dim_t5": 24, "pooled_projection_dim": 16, "text_len": 8, "text_len_t5": 12},
        lambda: diffused(
            *(4, 8, 8),
            timestep=steps().float(),
            text_embedding_mask=torch.ones(2, 8),
            encoder_hidden_states_t5=torch.randn(2, 12, 24),
            text_embedding_mask_t5=torch.ones(2, 12),
            image_meta_size=torch.rand(2, 6) * 64,
            style=torch.zeros(2, dtype=torch.long),
            image_rotary_emb=turns(16, 16),
        ),
    ),
    "SanaTransformer2DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 16}
        | {"cross_attention_dim": 32, "caption_channels": 24, "sample_size": 8},
        lambda: diffused(4, 8, 8, text=24),
    ),
    "CogVideoXTransformer3DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 16, "text_embed_dim": 32, "sample_width": 8}
        | {"sample_height": 8, "sample_frames": 9, "max_text_seq_length": 8},
        lambda: diffused(3, 4, 8, 8),
    ),
    "LTXVideoTransformer3DModel": (
        HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "caption_channels": 24},
        lambda: diffused(
            *(32, 4), text=24, encoder_attention_mask=torch.ones(2, 8).bool(), num_frames=2, height=4, width=4
        ),
    ),
    "MochiTransformer3DModel": (
        HEADS | {"in_channels": 4, "pooled_projection_dim": 16, "text_embed_dim": 32, "time_embed_dim": 8},
        lambda: diffused(4, 2, 8, 8, encoder_attention_mask=torch.ones(2, 8).bool()),
    ),
    "LatteTransformer3DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 8, "patch_size": 2, "sample_size": 8, "num_embeds_ada_norm": 1000}
        | {"caption_channels": 24, "cross_attention_dim": 32, "norm_type": "ada_norm_single", "video_length": 3}
        | {"activation_fn": "gelu-approximate", "norm_elementwise_affine": False},
        lambda: diffused(4, 3, 8, 8, text=24),
    ),
    "StableAudioDiTModel": (
        HEADS
        | {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_key_value_attention_heads": 1}
        | {"cross_attention_dim": 32, "cross_attention_input_dim": 24, "time_proj_dim": 16}
        | {"global_states_input_dim": 12},
        lambda: diffused(
            *(4, 16),
            text=24,
            timestep=torch.rand(2),
            global_hidden_states=torch.randn(2, 1, 12),
            rotary_embedding=turns(17, 8),
        ),
    ),
    "UVit2DModel": (
        {"hidden_size": 32, "cond_embed_dim": 24, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40}
        | {"encoder_hidden_size": 16, "vocab_size": 12, "codebook_size": 10, "in_channels": 32, "num_res_blocks": 1}
        | {"block_out_channels": 32, "block_num_heads": 4, "num_hidden_layers": 1, "num_attention_heads": 4}
        | {"intermediate_size": 48, "sample_size": 8, "downsample": True, "upsample": True},
        lambda: (tokens(2, 8, 8), torch.randn(2, 7, 16), torch.randn(2, 24), torch.rand(2, 5)),
    ),
    "PriorTransformer": (
        HEADS | {"embedding_dim": 24, "num_embeddings": 7, "additional_embeddings": 4},
        lambda: diffused(24, text=24, proj_embedding=torch.randn(2, 24), encoder_hidden_states=torch.randn(2, 7, 24)),
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1}
        | {"num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16, "axes_dim_rope": (4, 4, 8)}
        | {"axes_lens": (32, 16, 16), "cap_feat_dim": 24},
        lambda: diffused(4, 8, 8, text=24, timestep=torch.rand(2), encoder_attention_mask=torch.ones(2, 8).bool()),
    ),
    "WanTransformer3DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 48, "image_dim": 20}
        | {"added_kv_proj_dim": 32, "rope_max_seq_len": 32},
        lambda: diffused(4, 2, 8, 8, text=24, length=512, encoder_hidden_states_image=torch.randn(2, 5, 20)),
    ),
    "CogView4Transformer2DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 4, "text_embed_dim": 24, "time_embed_dim": 8, "condition_dim": 4}
        | {"rope_axes_dim": (8, 8)},
        lambda: diffused(
            *(4, 8, 8),
            text=24,
            original_size=torch.full((2, 2), 8.0),
            target_size=torch.full((2, 2), 8.0),
            crop_coords=torch.zeros(2, 2),
        ),
    ),
    "AllegroTransformer3DModel": (
        HEADS
        | {"cross_attention_dim": 48, "caption_channels": 24, "sample_height": 8, "sample_width": 8}
        | {"sample_frames": 2, "attention_head_dim": 24},
        lambda: diffused(
            *(4, 2, 8, 8),
            text=24,
            image_rotary_emb=allegro_turns(),
            attention_mask=torch.ones(2, 2, 8, 8),
            encoder_attention_mask=torch.ones(2, 8),
        ),
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
        | {"num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 24, "pooled_projection_dim": 12}
        | {"rope_axes_dim": (4, 4, 8)},
        lambda: diffused(
            *(4, 2, 8, 8),
            text=24,
            encoder_attention_mask=torch.ones(2, 8, dtype=torch.long),
            pooled_projections=torch.randn(2, 12),
            guidance=torch.tensor([1000.0, 6000.0]),
        ),
    ),
    "QwenImageTransformer2DModel": (
        HEADS | {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8)},
        lambda: diffused(
            *(16, 16),
            text=24,
            timestep=torch.rand(2),
            encoder_hidden_states_mask=torch.ones(2, 8),
            img_shapes=[[(1, 4, 4)]] * 2,
        ),
    ),
    "CosmosTransformer3DModel": (
        HEADS
        | {"in_channels": 4, "out_channels": 4, "text_embed_dim": 24, "adaln_lora_dim": 8, "max_size": (4, 16, 16)},
        lambda: diffused(4, 2, 8, 8, text=24, fps=16, padding_mask=torch.zeros(1, 1, 8, 8)),
    ),
    "PRXTransformer2DModel": (
        {"in_channels": 4, "context_in_dim": 24, "hidden_size": 32, "num_heads": 2, "depth": 2, "axes_dim": [8, 8]},
        lambda: diffused(4, 8, 8, text=24, timestep=torch.rand(2)),
    ),
    "OmniGenTransformer2DModel": (
        {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
        | {"num_layers": 2, "vocab_size": 20, "pad_token_id": 0, "pos_embed_max_size": 16, "time_step_dim": 8}
        | {"rope_scaling": {"long_factor": [1.0] * 8, "short_factor": [1.0] * 8}},
        lambda: {
            "hidden_states": images(8, 4),
            "timestep": steps(),
            "input_ids": tokens(2, 6),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": torch.ones(2, 23, 23),
            "position_ids": torch.arange(23).expand(2, 23),
        },
    ),
}


def allegro_turns() -> tuple[Any, Any]:
    """Rotary embeddings and positions of the three axes, for 2 frames of 4 by 4 patches."""
    grid = torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(4))
    return tuple(turns(4, 8) for _ in range(3)), tuple(axis[None] for axis in grid.unbind(1))


# -- monai ------------------------------------------------------------------------------------------------------------

STAGES: dict[str, Any] = {"channels": (8, 16, 32), "strides": (2, 2)}
NORMED: dict[str, Any] = {"channels": (16, 32), "num_res_blocks": (1, 1), "norm_num_groups": 8}
ATTENTIVE: dict[str, Any] = NORMED | {"attention_levels": (False, True)}
CHANNELS: dict[str, Any] = {"in_channels": 1, "out_channels": 2}
PLANES: dict[str, Any] = CHANNELS | {"spatial_dims": 2}
SPACES: dict[str, Any] = CHANNELS | {"spatial_dims": 3}
WINDOWS: dict[str, Any] = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 4, 4), "window_size": 4}
PATCHES: dict[str, Any] = {"hidden_size": 32, "mlp_dim": 48, "num_heads": 2}


def gray(size: int = 32) -> torch.Tensor:
    return images(size, 1)


def cubes() -> torch.Tensor:
    return volumes(16)


MONAI: dict[str, Recipe] = {
    "UNet": (PLANES | STAGES | {"num_res_units": 2}, gray),
    "UNet/batch": (SPACES | STAGES | {"num_res_units": 0, "norm": "BATCH", "act": "relu", "dropout": 0.1}, cubes),
    "BasicUNet": (PLANES | {"features": (8, 8, 16, 16, 32, 8)}, gray),
    "BasicUNet/group": (
        SPACES | {"features": (8, 8, 16, 16, 32, 8), "norm": ("group", {"num_groups": 4}), "upsample": "pixelshuffle"},
        cubes,
    ),
    "BasicUNetPlusPlus": (PLANES | {"features": (8, 8, 16, 16, 32, 8), "deep_supervision": True}, gray),
    "DynUNet": (
        SPACES
        | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 16, 32]}
        | {"res_block": True, "deep_supervision": True},
        cubes,
    ),
    "AttentionUnet": (PLANES | STAGES, gray),
    "SegResNet": (PLANES | {"blocks_down": (1, 1, 2), "blocks_up": (1, 1), "dropout_prob": 0.1}, gray),
    "SegResNetVAE": (
        SPACES
        | {"input_image_size": (16, 16, 16), "vae_nz": 16, "blocks_down": (1, 1, 1), "blocks_up": (1, 1)}
        | {"upsample_mode": "deconv"},
        cubes,
    ),
    "SegResNetDS": (PLANES | {"init_filters": 8, "blocks_down": (1, 1, 2), "dsdepth": 2, "norm": "instance"}, gray),
    "VNet": (CHANNELS | {"spatial_dims": 2, "dropout_dim": 2}, gray),
    "UNETR": (CHANNELS | PATCHES | {"img_size": 32, "feature_size": 8, "spatial_dims": 2}, gray),
    "SwinUNETR": (PLANES | WINDOWS | {"drop_rate": 0.1, "dropout_path_rate": 0.1}, lambda: gray(64)),
    "SwinUNETR/v2": (
        SPACES | WINDOWS | {"use_v2": True, "downsample": "mergingv2", "norm_name": ("group", {"num_groups": 4})},
        lambda: volumes(32)[:1],
    ),
    "ViT": (
        PATCHES
        | {"in_channels": 1, "img_size": 32, "patch_size": 8, "num_layers": 2, "classification": True}
        | {"spatial_dims": 2, "qkv_bias": True},
        gray,
    ),
    "ViTAutoEnc": (
        PATCHES | {"in_channels": 1, "img_size": 16, "patch_size": 4, "num_layers": 2, "proj_type": "perceptron"},
        cubes,
    ),
    "MaskedAutoEncoderViT": (
        PATCHES
        | {"in_channels": 1, "img_size": 32, "patch_size": 8, "num_layers": 2, "decoder_hidden_size": 24}
        | {"decoder_mlp_dim": 40, "decoder_num_layers": 1, "decoder_num_heads": 2, "spatial_dims": 2},
        gray,
    ),
    "NaViT": (
        PATCHES
        | {"image_size": 32, "patch_size": 8, "num_classes": 4, "num_layers": 2, "in_channels": 1, "spatial_dims": 2},
        lambda: ([[torch.randn(1, 32, 32), torch.randn(1, 16, 24)], [torch.randn(1, 24, 24)]],),
    ),
    "DenseNet": (
        PLANES | {"init_features": 16, "growth_rate": 8, "block_config": (2, 2, 2), "dropout_prob": 0.1},
        gray,
    ),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "pretrained": False, "in_channels": 1, "num_classes": 4},
        lambda: gray(64),
    ),
    "SEResNet50": (
        {"layers": (1, 1, 1, 1), "inplanes": 16, "spatial_dims": 2, "in_channels": 1, "num_classes": 4},
        lambda: gray(64),
    ),
    "ResNet": (
        {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [8, 16, 32, 64], "n_input_channels": 1}
        | {"num_classes": 4, "shortcut_type": "A", "conv1_t_stride": 2},
        cubes,
    ),
    "ResNet/bottleneck": (
        {"block": "bottleneck", "layers": [1, 2, 1, 1], "block_inplanes": [8, 16, 32, 64], "spatial_dims": 2}
        | {"n_input_channels": 1, "num_classes": 4, "norm": ("group", {"num_groups": 4})},
        gray,
    ),
    "HighResNet": (SPACES, lambda: volumes(8)),
    "AHNet": (PLANES | {"layers": (1, 1, 1, 1), "psp_block_num": 2, "upsample_mode": "bilinear"}, lambda: gray(64)),
    "RegUNet": ({"spatial_dims": 3, "in_channels": 1, "num_channel_initial": 8, "depth": 2}, cubes),
    "LocalNet": (
        {"spatial_dims": 2, "in_channels": 1, "num_channel_initial": 8, "extract_levels": (0, 1, 2), "mode": "bilinear"}
        | {"out_channels": 2, "align_corners": False},
        gray,
    ),
    "VoxelMorphUNet": (
        {"spatial_dims": 2, "in_channels": 2, "unet_out_channels": 8, "channels": (8, 8, 16, 16)}
        | {"final_conv_channels": (8,)},
        lambda: images(32, 2),
    ),
    "Regressor": (STAGES | {"in_shape": (1, 32, 32), "out_shape": (2, 3)}, gray),
    "Discriminator": (STAGES | {"in_shape": (1, 32, 32), "norm": "BATCH"}, gray),
    "Generator": (
        {"latent_shape": (12,), "start_shape": (16, 4, 4), "channels": (16, 8, 1), "strides": (2, 2, 1)},
        lambda: torch.randn(2, 12),
    ),
    "AutoEncoder": (
        PLANES
        | STAGES
        | {"strides": (1, 2, 2), "num_res_units": 2, "inter_channels": (16, 16), "inter_dilations": (1, 2)},
        gray,
    ),
    "FlexibleUNet": (
        CHANNELS | {"backbone": "resnet18", "decoder_channels": (32, 16, 16, 8, 8), "upsample": "deconv"},
        lambda: gray(64),
    ),
    "DiffusionModelUNet": (
        PLANES
        | ATTENTIVE
        | {"with_conditioning": True, "cross_attention_dim": 24, "num_class_embeds": 5, "resblock_updown": True},
        lambda: (gray(16), steps(), torch.randn(2, 7, 24), tokens(2, high=5)),
    ),
    "DiffusionModelUNet/volume": (
        SPACES | ATTENTIVE | {"use_combined_linear": True, "use_flash_attention": True},
        lambda: (volumes(8), steps()),
    ),
    "ControlNet": (
        ATTENTIVE | {"spatial_dims": 2, "in_channels": 1, "conditioning_embedding_num_channels": (8, 16)},
        lambda: (gray(16), steps(), gray()),
    ),
    "AutoencoderKL": (PLANES | ATTENTIVE | {"use_convtranspose": True}, gray),
    "PatchDiscriminator": (PLANES | {"channels": 8, "num_layers_d": 2}, gray),
    "SPADEAutoencoderKL": (
        PLANES | ATTENTIVE | {"label_nc": 4, "spade_intermediate_channels": 8},
        lambda: (gray(), images(32, 4)),
    ),
    "Quicknat": ({"num_classes": 4, "num_filters": 8, "kernel_size": 3}, gray),
    "MedNeXt": (
        PLANES
        | {"init_filters": 8, "kernel_size": 3, "blocks_down": (1, 1), "blocks_bottleneck": 1, "blocks_up": (1, 1)}
        | {"deep_supervision": True, "use_residual_connection": True, "global_resp_norm": True},
        gray,
    ),
    "restormer.Restormer": (
        PLANES | {"dim": 8, "num_blocks": (1, 1, 1), "heads": (1, 2, 2), "num_refinement_blocks": 1},
        gray,
    ),
    "DecoderOnlyTransformer": (
        {"num_tokens": 20, "max_seq_len": 16, "attn_layers_dim": 32, "attn_layers_depth": 2, "attn_layers_heads": 2}
        | {"with_cross_attention": True},
        lambda: (tokens(2, 16), torch.randn(2, 7, 32)),
    ),
}

# -- segmentation-models-pytorch ------------------------------------------------------------------------------------


def segmenting(encoder: str, size: int = 64, **options: Any) -> Recipe:
    return {"encoder_name": encoder, "encoder_weights": None, "classes": 3} | options, partial(images, size)


NARROW: dict[str, Any] = {"decoder_channels": (64, 32, 16, 16, 8)}

SEGMENTERS: dict[str, Recipe] = {
    "Unet": segmenting("resnet18", **NARROW),
    "Unet/scse": segmenting(
        "efficientnet-b0",
        decoder_attention_type="scse",
        decoder_interpolation="bilinear",
        decoder_channels=(64, 32, 32, 16, 16),
    ),
    "Unet/norm": segmenting("resnet18", decoder_use_norm={"type": "instancenorm", "affine": True}, **NARROW),
    "Unet/mobileone": segmenting("mobileone_s0", aux_params={"classes": 4, "dropout": 0.2}, **NARROW),
    "UnetPlusPlus": segmenting("mobilenet_v2", **NARROW),
    "Unet/densenet": segmenting("densenet121", decoder_use_norm="identity", **NARROW),
    "MAnet": segmenting("timm-tf_efficientnet_lite0", decoder_pab_channels=16, **NARROW),
    "Linknet": segmenting("resnet18"),
    "Linknet/sk": segmenting("timm-skresnet18", decoder_use_norm=False),
    "FPN": segmenting("dpn68", decoder_pyramid_channels=32, decoder_segmentation_channels=32),
    "FPN/cat": segmenting("mobilenet_v2", decoder_merge_policy="cat", decoder_pyramid_channels=32),
    "PSPNet": segmenting("timm-regnetx_002", psp_out_channels=32),
    "PAN": segmenting("timm-mobilenetv3_small_100", 128, decoder_channels=16),
    "DeepLabV3": segmenting("resnet18", decoder_channels=16, decoder_atrous_rates=(2, 4, 6)),
    "DeepLabV3Plus": segmenting("timm-regnety_002", decoder_channels=16, encoder_output_stride=8),
    "UPerNet": segmenting("mit_b0", decoder_channels=32),
    "UPerNet/convnext": segmenting("tu-convnext_atto", decoder_channels=32),
    "Segformer": segmenting("mit_b0", decoder_segmentation_channels=32),
    "DPT": segmenting(
        "tu-vit_tiny_patch16_224",
        dynamic_img_size=True,
        decoder_intermediate_channels=(16, 16, 32, 32),
        decoder_fusion_channels=16,
    ),
}

# -- the others -------------------------------------------------------------------------------------------------------

SAM: dict[str, Recipe] = {
    "modeling.ImageEncoderViT": (
        {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "out_chans": 16}
        | {"use_rel_pos": True, "window_size": 3, "global_attn_indexes": (1,)},
        lambda: images(64),
    ),
    "modeling.TwoWayTransformer": (
        {"depth": 2, "embedding_dim": 32, "num_heads": 2, "mlp_dim": 48},
        lambda: (images(8, 32), images(8, 32), torch.randn(2, 5, 32)),
    ),
}


def mask_decoder() -> Sample:
    from segment_anything.modeling import MaskDecoder, TwoWayTransformer

    transformer = TwoWayTransformer(depth=2, embedding_dim=32, num_heads=2, mlp_dim=48)
    model = MaskDecoder(transformer_dim=32, transformer=transformer, iou_head_hidden_dim=32)
    grid, prompts = torch.randn(1, 32, 8, 8), torch.randn(1, 5, 32)
    return sample(model, (grid, torch.randn(1, 32, 8, 8), prompts, torch.randn(1, 32, 8, 8), True))


def squeezed() -> Sample:
    senet = load("pretrainedmodels.models.senet")
    stem = {"inplanes": 64, "input_3x3": False, "downsample_kernel_size": 1, "downsample_padding": 0}
    options = stem | {"groups": 32, "reduction": 16, "dropout_p": None, "num_classes": 4}
    model = senet.SENet(senet.SEResNeXtBottleneck, [1, 1, 1, 1], **options)
    return sample(model, images(224))


def short(module: str, kind: str) -> Sample:
    """One of the networks of Facebook and of Caffe, with one block in each of its four stages."""
    source = load(f"pretrainedmodels.models.{module}")
    return sample(getattr(source, kind)(source.Bottleneck, [1, 1, 1, 1], num_classes=4), images(224))


PRETRAINED: dict[str, Recipe] = {
    "dpn.DPN": (
        {"small": True, "num_init_features": 10, "k_r": 64, "groups": 16, "k_sec": (1, 2, 2, 1), "num_classes": 4}
        | {"inc_sec": (16, 16, 32, 32)},
        lambda: images(64),
    ),
    "dpn.DPN/b": (
        {"num_init_features": 16, "k_r": 48, "groups": 16, "k_sec": (1, 1, 2, 1), "num_classes": 4, "b": True}
        | {"inc_sec": (16, 16, 32, 32)},
        lambda: images(64),
    ),
    "xception.xception": ({"pretrained": None}, lambda: images(64)),
    "nasnet_mobile.NASNetAMobile": (
        {"num_classes": 4, "stem_filters": 16, "penultimate_filters": 384},
        lambda: images(224),
    ),
    "bninception.BNInception": ({"num_classes": 4}, lambda: images(224)),
}


def efficientnet(name: str) -> Sample:
    from efficientnet_pytorch import EfficientNet

    return sample(EfficientNet.from_name(name, num_classes=4), images(64))


def masked_timm() -> Sample:
    from lightly.models.modules import MaskedVisionTransformerTIMM
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4)
    return sample(
        MaskedVisionTransformerTIMM(vit=vit), {"images": images(32), "idx_mask": torch.arange(3, 9).expand(2, 6)}
    )


def masked_torchvision() -> Sample:
    from lightly.models.modules import MaskedVisionTransformerTorchvision
    from torchvision.models import VisionTransformer

    vit = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=48, num_classes=4)
    return sample(
        MaskedVisionTransformerTorchvision(vit=vit), {"images": images(32), "idx_keep": torch.arange(9).expand(2, 9)}
    )


LIGHTLY: dict[str, Recipe] = {
    "ResNetGenerator": ({"name": "resnet-9", "width": 0.25, "num_classes": 4}, lambda: images(32)),
    "ResNetGenerator/splits": (
        {"name": "resnet-50", "width": 0.125, "num_splits": 2},
        lambda: torch.randn(4, 3, 32, 32),
    ),
    "modules.MAEDecoderTIMM": (
        {"num_patches": 16, "patch_size": 8, "embed_dim": 32, "decoder_embed_dim": 24, "decoder_depth": 2}
        | {"decoder_num_heads": 2},
        lambda: torch.randn(2, 17, 32),
    ),
    "modules.AIMPredictionHead": (
        {"input_dim": 32, "output_dim": 24, "hidden_dim": 48, "num_blocks": 2},
        lambda: torch.randn(2, 16, 32),
    ),
    "modules.IJEPAPredictorTIMM": (
        {"num_patches": 16, "depth": 2, "mlp_dim": 32, "predictor_embed_dim": 24, "num_heads": 2},
        lambda: (torch.randn(2, 9, 32), [torch.arange(9).expand(2, 9)], [torch.arange(10, 14).expand(2, 4)]),
    ),
    "modules.SimCLRProjectionHead": (
        {"input_dim": 32, "hidden_dim": 48, "output_dim": 16, "num_layers": 3},
        lambda: torch.randn(4, 32),
    ),
}


def clip(frames: int, size: int) -> torch.Tensor:
    return torch.randn(2, 3, frames, size, size)


VIDEO: dict[str, Recipe] = {
    "resnet.create_resnet": (
        {"stem_dim_out": 8, "model_num_class": 4, "head_pool_kernel_size": (4, 2, 2)},
        lambda: clip(4, 64),
    ),
    "resnet.create_acoustic_resnet": (
        {"stem_dim_out": 8, "model_num_class": 4, "head_pool_kernel_size": (1, 1, 1)},
        lambda: torch.randn(2, 1, 32, 1, 48),
    ),
    "csn.create_csn": (
        {"stem_dim_out": 8, "model_num_class": 4, "head_pool_kernel_size": (1, 2, 2)},
        lambda: clip(8, 32),
    ),
    "r2plus1d.create_r2plus1d": (
        {"stem_dim_out": 8, "model_num_class": 4, "head_pool_kernel_size": (1, 1, 1), "head_activation": None},
        lambda: clip(4, 32),
    ),
    "x3d.create_x3d": (
        {"input_clip_length": 4, "input_crop_size": 64, "model_num_class": 4, "width_factor": 1.0, "depth_factor": 1.0}
        | {"head_dim_out": 64, "head_activation": None},
        lambda: clip(4, 64),
    ),
    "slowfast.create_slowfast": (
        {"stem_dim_outs": (16, 2), "model_num_class": 4, "head_pool_kernel_sizes": ((2, 1, 1), (8, 1, 1))},
        lambda: ([clip(2, 32), clip(8, 32)],),
    ),
    "vision_transformers.create_multiscale_vision_transformers": (
        {"spatial_size": 32, "temporal_size": 4, "depth": 3, "patch_embed_dim": 16, "num_heads": 2}
        | {"embed_dim_mul": [[1, 2.0]], "atten_head_mul": [[1, 2.0]], "pool_q_stride_size": [[1, 1, 2, 2]]}
        | {"pool_kv_stride_adaptive": [1, 2, 2], "pool_kvq_kernel": [3, 3, 3], "head_num_classes": 4}
        | {"droppath_rate_block": 0.1},
        lambda: clip(4, 32),
    ),
    "vision_transformers.create_multiscale_vision_transformers/flat": (
        {"spatial_size": 32, "temporal_size": 1, "depth": 3, "patch_embed_dim": 16, "num_heads": 2}
        | {"use_2d_patch": True, "conv_patch_embed_kernel": (7, 7), "conv_patch_embed_stride": (4, 4)}
        | {"conv_patch_embed_padding": (3, 3), "cls_embed_on": False, "sep_pos_embed": False, "pooling_mode": "avg"}
        | {"pool_q_stride_size": [[1, 1, 2, 2]], "pool_kvq_kernel": [1, 3, 3], "pool_first": True}
        | {"head_num_classes": 4},
        lambda: images(32),
    ),
    "accelerator.mobile_cpu.efficient_x3d.EfficientX3d": ({"num_classes": 4}, lambda: clip(4, 160)),
}

UNTRAINED: dict[str, Any] = {"pretrained": False}

KORNIA: dict[str, Recipe] = {
    "feature.HardNet": (UNTRAINED, gray),
    "feature.HardNet8": (UNTRAINED, gray),
    "feature.SOSNet": (UNTRAINED, gray),
    "feature.TFeat": (UNTRAINED, gray),
    "feature.HyNet": (UNTRAINED, gray),
    "feature.OriNet": (UNTRAINED, gray),
    "feature.KeyNet": (UNTRAINED, gray),
    "models.vit.VisionTransformer": (
        {"image_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "dropout_rate": 0.1},
        lambda: images(32),
    ),
    "models.tiny_vit.TinyViT": (
        {"img_size": 64, "num_classes": 4, "embed_dims": (16, 32, 32, 64), "depths": (1, 2, 2, 1)}
        | {"num_heads": (1, 2, 2, 4), "window_sizes": (4, 4, 4, 2), "drop_path_rate": 0.1},
        lambda: images(64),
    ),
    "models.vit_mobile.MobileViT": ({"mode": "xxs"}, lambda: images(64)),
    "models.efficient_vit.backbone.EfficientViTBackbone": (
        {"width_list": [8, 16, 16, 32, 32], "depth_list": [1, 1, 1, 1, 1], "dim": 8},
        lambda: images(64),
    ),
    "models.efficient_vit.backbone.EfficientViTLargeBackbone": (
        {"width_list": [8, 16, 16, 32, 32], "depth_list": [1, 1, 1, 1, 1], "qkv_dim": 8},
        lambda: images(64),
    ),
    "models.rrdbnet.RRDBNet": (
        {"num_in_ch": 3, "num_out_ch": 3, "num_feat": 16, "num_block": 2, "num_grow_ch": 8},
        lambda: images(16),
    ),
    "models.small_sr.SmallSRNet": ({"upscale_factor": 2, "pretrained": False}, lambda: images(16, 1)),
}


def detector() -> Sample:
    from kornia.models.rt_detr import RTDETR, RTDETRConfig

    widths = {"neck_hidden_dim": 32, "neck_dim_feedforward": 48, "head_hidden_dim": 32}
    config = RTDETRConfig("resnet18d", 4, head_num_queries=8, head_num_decoder_layers=2, **widths)
    return sample(RTDETR.from_config(config), images(64))


MODELS: dict[str, Callable[[], Sample]] = {
    **models("diffusers", "diffusers", UNETS | AUTOENCODERS | TRANSFORMERS),
    **models("monai", "monai.networks.nets", MONAI),
    **models("segmentation-models-pytorch", "segmentation_models_pytorch", SEGMENTERS),
    **models("segment-anything", "segment_anything", SAM),
    "segment-anything:MaskDecoder": mask_decoder,
    **models("pretrainedmodels", "pretrainedmodels.models", PRETRAINED),
    "pretrainedmodels:SENet": squeezed,
    "pretrainedmodels:FBResNet": partial(short, "fbresnet", "FBResNet"),
    "pretrainedmodels:ResNet/caffe": partial(short, "cafferesnet", "ResNet"),
    "efficientnet-pytorch:EfficientNet/b0": partial(efficientnet, "efficientnet-b0"),
    **models(
        "facenet-pytorch",
        "facenet_pytorch",
        {"InceptionResnetV1": ({"classify": True, "num_classes": 4}, partial(images, 96))},
    ),
    **models("lightly", "lightly.models", LIGHTLY),
    "lightly:MaskedVisionTransformerTIMM": masked_timm,
    "lightly:MaskedVisionTransformerTorchvision": masked_torchvision,
    **models("pytorchvideo", "pytorchvideo.models", VIDEO),
    **models("kornia", "kornia", KORNIA),
    "kornia:RTDETR": detector,
}
