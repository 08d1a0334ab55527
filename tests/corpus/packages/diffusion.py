"""Models of diffusers, small and with random weights: see :mod:`tests.corpus.models`."""

from __future__ import annotations

from typing import Any

import torch

from tests.corpus.models import images
from tests.corpus.packages.recipes import Recipe, steps, tokens


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


#: Of transformers with layers for both streams and for one.
SINGLES: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
SINGLES |= {"joint_attention_dim": 32}
ENCODED: dict[str, Any] = {"down_block_types": ("DownEncoderBlock2D",) * 2}
CODED: dict[str, Any] = ENCODED | {"up_block_types": ("UpDecoderBlock2D",) * 2}


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
    "AutoencoderKL": (WIDTHS | CODED, lambda: images(32)),
    "AsymmetricAutoencoderKL": (
        CODED | {"down_block_out_channels": (32, 64), "up_block_out_channels": (32, 64), "norm_num_groups": 8},
        lambda: (images(32), torch.ones(2, 1, 32, 32)),
    ),
    "VQModel": (WIDTHS | CODED | {"norm_type": "spatial", "num_vq_embeddings": 16}, lambda: images(32)),
    "ConsistencyDecoderVAE": (
        {"encoder_block_out_channels": (32, 64), "encoder_down_block_types": ("DownEncoderBlock2D",) * 2}
        | {"encoder_layers_per_block": 1, "decoder_block_out_channels": (32, 64), "decoder_layers_per_block": 1}
        | {"decoder_down_block_types": ("ResnetDownsampleBlock2D",) * 2, "sample_size": 32}
        | {"decoder_up_block_types": ("ResnetUpsampleBlock2D",) * 2},
        lambda: images(32),
    ),
    "AutoencoderKLTemporalDecoder": (
        ENCODED | {"block_out_channels": (32, 64)},
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
        SINGLES | {"in_channels": 4, "axes_dims_rope": (4, 4, 8), "pooled_projection_dim": 24, "guidance_embeds": True},
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
        SINGLES
        | {"in_channels": 4, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8, "approximator_hidden_dim": 32}
        | {"approximator_layers": 1},
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
