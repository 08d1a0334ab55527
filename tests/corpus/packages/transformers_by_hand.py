"""Models of small packages of transformers, small and with random weights: see :mod:`tests.corpus.models`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.corpus.models import Sample, images

__all__ = ["MODELS"]

#: Makes the positional arguments of one forward.
Inputs = Callable[[], tuple[Any, ...]]


def made(path: str, inputs: Inputs, **options: Any) -> Sample:
    """What a class or a function, by its path, makes of the options."""
    module, _, name = path.rpartition(".")
    return Sample(getattr(import_module(module), name)(**options), inputs())


def table(
    package: str, inputs: Inputs, shared: dict[str, Any], entries: dict[str, Any], place: str = ""
) -> dict[str, Any]:
    """Builders by name, of entries ``Class/variant: options`` or ``Class/variant: (path of the class, options)``.

    The place of the classes is the module that the package's name says, unless another one is given.
    """
    builders, place = dict[str, Any](), place or package.replace("-", "_")
    for name, entry in entries.items():
        path, options = entry if isinstance(entry, tuple) else (name.partition("/")[0], entry)
        builders[f"{package}:{name}"] = partial(made, f"{place}.{path}", inputs, **shared | options)
    return builders


def tokens(length: int = 32) -> tuple[Any, ...]:
    return (torch.randint(1, 64, (2, length)),)


def vectors(*shape: int) -> tuple[Any, ...]:
    return (torch.randn(2, *shape),)


def pictures(size: int = 32) -> tuple[Any, ...]:
    return (images(size),)


def pairs(length: int = 32, shorter: int = 24) -> tuple[Any, ...]:
    return tokens(length) + tokens(shorter)


# -- vit-pytorch ------------------------------------------------------------------------------------------------------

FLAT = {"num_classes": 4, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
FLAT_WIDE = FLAT | {"image_size": 32, "patch_size": 8}
FLAT_HEADS = FLAT_WIDE | {"dim_head": 16}
VIDEO = FLAT | {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "dim_head": 16}

VISION = {
    "ViT": ("vit.ViT", {}),
    "ViT/mean": ("vit.ViT", {"pool": "mean", "dropout": 0.1, "emb_dropout": 0.1}),
    "SimpleViT": ("simple_vit.SimpleViT", {}),
    "SimpleViT/flash": ("simple_flash_attn_vit.SimpleViT", {"use_flash": True}),
    "SimpleViT/registers": ("simple_vit_with_register_tokens.SimpleViT", {}),
    "SimpleViT/qk_norm": ("simple_vit_with_qk_norm.SimpleViT", {}),
    "SimpleViT/fft": ("simple_vit_with_fft.SimpleViT", {"freq_patch_size": 8}),
    "SimpleViT/patch_dropout": ("simple_vit_with_patch_dropout.SimpleViT", {}),
    "SimpleViT/value_residual": ("simple_vit_with_value_residual.SimpleViT", {}),
    "SimpleViT/hyper_connections": ("simple_vit_with_hyper_connections.SimpleViT", {"num_residual_streams": 2}),
    "SimpleViT/orthogonal_residual": ("simple_vit_orthog_residual_update.SimpleViT", {}),
    "SimpleViT/relative_bias": ("simple_vit_with_relative_proj_pos_bias.SimpleViT", {}),
    "SimpleViT/specialized_cls": ("simple_vit_with_specialized_cls.SimpleViT", {}),
    "SimpleViTAttnResidual": ("simple_vit_attn_residual.SimpleViTAttnResidual", {}),
    "SimpleViTWithSparseGating": ("simple_vit_with_sparse_gating.SimpleViTWithSparseGating", {}),
    "SimpleUViT": ("simple_uvit.SimpleUViT", {}),
    "DeepViT": ("deepvit.DeepViT", {}),
    "CaiT": ("cait.CaiT", {"cls_depth": 2}),
    "XCiT": ("xcit.XCiT", {"cls_depth": 1}),
    "ViT/parallel": ("parallel_vit.ViT", {"num_parallel_branches": 2}),
    "ViT/patch_merger": ("vit_with_patch_merger.ViT", {"patch_merge_layer": 1, "patch_merge_num_tokens": 6}),
    "ViT/token_sampling": ("ats_vit.ViT", {"max_tokens_per_depth": (12, 8)}),
    "ViT/small_dataset": ("vit_for_small_dataset.ViT", {}),
    "ViT/five": ("vit_5.ViT", {}),
    "ViT/decorrelation": ("vit_with_decorr.ViT", {}),
    "ViT/keel": ("vit_with_keel_post_ln.ViT", {}),
    "ViTDetPool": ("vit_detpool.ViTDetPool", {}),
    "JumboViT": ("jumbo_vit.JumboViT", {"jumbo_cls_k": 2}),
    "nViT": ("normalized_vit.nViT", {}),
    "RvT": ("rvt.RvT", {}),
    "PiT": ("pit.PiT", {"depth": (1, 1, 1)}),
    "DistillableViT": ("distill.DistillableViT", {}),
}

MAX_VIT = {"dim": 32, "dim_conv_stem": 16, "dim_head": 16, "depth": (1, 1), "window_size": 4}
MAX_VIT |= {"mbconv_expansion_rate": 2}
STAGES: dict[str, Any] = {
    "T2TViT": (
        "t2t.T2TViT",
        {"image_size": 64, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48, "t2t_layers": ((7, 4), (3, 2))},
    ),
    "CCT": (
        "cct.CCT",
        {"img_size": 64, "embedding_dim": 32, "n_conv_layers": 2, "num_layers": 2, "num_heads": 2, "mlp_ratio": 2.0},
    ),
    "CrossViT": (
        "cross_vit.CrossViT",
        {"image_size": 64, "sm_dim": 24, "lg_dim": 32, "sm_patch_size": 8, "lg_patch_size": 16, "depth": 1}
        | {"sm_enc_heads": 2, "sm_enc_mlp_dim": 32, "sm_enc_dim_head": 16, "lg_enc_depth": 2, "lg_enc_heads": 2}
        | {"lg_enc_mlp_dim": 48, "lg_enc_dim_head": 16, "cross_attn_heads": 2, "cross_attn_dim_head": 16},
    ),
    "LeViT": (
        "levit.LeViT",
        {"image_size": 64, "dim": (32, 48, 64), "depth": 1, "heads": (2, 3, 4), "mlp_mult": 2, "dim_key": 16}
        | {"num_distill_classes": 4},
    ),
    "CvT": (
        "cvt.CvT",
        {"s1_emb_dim": 16, "s1_mlp_mult": 2, "s2_emb_dim": 32, "s2_heads": 2, "s2_depth": 1, "s2_mlp_mult": 2}
        | {"s3_emb_dim": 48, "s3_heads": 3, "s3_depth": 2, "s3_mlp_mult": 2},
    ),
    "TwinsSVT": (
        "twins_svt.TwinsSVT",
        {"s1_emb_dim": 16, "s2_emb_dim": 24, "s3_emb_dim": 32, "s4_emb_dim": 48, "s3_depth": 1, "s4_depth": 1}
        | {"s1_local_patch_size": 8, "s2_local_patch_size": 4, "s3_local_patch_size": 2, "s4_local_patch_size": 1}
        | {"s1_global_k": 4, "s2_global_k": 4, "s3_global_k": 2, "s4_global_k": 2},
    ),
    "RegionViT": (
        "regionvit.RegionViT",
        {"dim": (16, 32, 32, 48), "depth": (1, 1, 1, 1), "window_size": 2, "use_peg": True},
    ),
    "CrossFormer": (
        "crossformer.CrossFormer",
        {"dim": (32, 32, 64, 64), "depth": 1, "global_window_size": (4, 2, 2, 1), "local_window_size": (4, 2, 2, 1)},
    ),
    "ScalableViT": (
        "scalable_vit.ScalableViT",
        {"dim": 16, "heads": (1, 2), "depth": (1, 2), "ssa_dim_key": 16, "reduction_factor": (4, 2)}
        | {"window_size": (8, None), "ff_expansion_factor": 2},
    ),
    "MaxViT": ("max_vit.MaxViT", MAX_VIT),
    "MaxViT/registers": ("max_vit_with_registers.MaxViT", MAX_VIT),
    "NesT": (
        "nest.NesT",
        {"image_size": 64, "patch_size": 8, "dim": 16, "heads": 2, "dim_head": 16, "num_hierarchies": 3}
        | {"block_repeats": (1, 1, 1), "mlp_mult": 2},
    ),
    "MobileViT": (
        "mobile_vit.MobileViT",
        {"image_size": (64, 64), "dims": [24, 32, 40], "depths": (1, 2, 1), "expansion": 2}
        | {"channels": [8, 16, 16, 16, 24, 24, 32, 32, 40, 40, 64]},
    ),
    "LookViT": (
        "look_vit.LookViT",
        {"image_size": 64, "dim": 32, "depth": 2, "patch_size": 16, "highres_patch_size": 8, "heads": 2}
        | {"dim_head": 16, "cross_attn_heads": 2, "cross_attn_dim_head": 16, "mlp_factor": 2, "highres_mlp_factor": 2},
    ),
}


def clip() -> tuple[Any, ...]:
    return (torch.randn(2, 3, 4, 32, 32),)


def differing_sizes() -> tuple[Any, ...]:
    return ([torch.randn(3, height, width) for height, width in ((32, 32), (16, 24), (8, 32))],)


def masked(path: str, **options: Any) -> Sample:
    """A masked autoencoder, of an encoder whose positions have an axis for the batch as both of them expect."""
    from vit_pytorch.deepvit import DeepViT

    return made(path, pictures, encoder=DeepViT(**FLAT_HEADS), **options)


def learned_memories() -> Sample:
    from vit_pytorch.learnable_memory_vit import Adapter, ViT

    return Sample(Adapter(vit=ViT(**FLAT_HEADS), num_memories_per_layer=3, num_classes=2), pictures())


def positions_of_patches() -> Sample:
    from vit_pytorch.mp3 import MP3, ViT

    return Sample(MP3(vit=ViT(**FLAT_HEADS), masking_ratio=0.5), pictures())


VIT_PYTORCH: dict[str, Callable[[], Sample]] = {
    **table("vit-pytorch", pictures, FLAT_HEADS, VISION),
    **table("vit-pytorch", partial(pictures, 64), {"num_classes": 4}, STAGES),
    **table(
        "vit-pytorch",
        clip,
        VIDEO,
        {
            "ViT/3d": ("vit_3d.ViT", {}),
            "SimpleViT/3d": ("simple_vit_3d.SimpleViT", {}),
        },
    ),
    **table(
        "vit-pytorch",
        clip,
        {key: value for key, value in VIDEO.items() if key != "depth"} | {"spatial_depth": 2, "temporal_depth": 2},
        {
            "ViViT/encoder": ("vivit.ViViT", {"variant": "factorized_encoder"}),
            "ViViT/attention": ("vivit.ViViT", {"variant": "factorized_self_attention", "use_flash_attn": False}),
        },
    ),
    **table(
        "vit-pytorch",
        partial(vectors, 3, 64),
        FLAT | {"seq_len": 64, "patch_size": 8, "dim_head": 16},
        {"ViT/1d": ("vit_1d.ViT", {}), "SimpleViT/1d": ("simple_vit_1d.SimpleViT", {})},
    ),
    **table(
        "vit-pytorch",
        partial(pictures, 56),
        {"num_classes": 4},
        {"SepViT": ("sep_vit.SepViT", {"dim": 16, "depth": (1, 2), "heads": (1, 2), "dim_head": 16})},
    ),
    **table(
        "vit-pytorch",
        differing_sizes,
        FLAT_HEADS,
        {
            "NaViT": ("na_vit.NaViT", {}),
            "NaViT/nested": ("na_vit_nested_tensor.NaViT", {"token_dropout_prob": 0.1}),
        },
    ),
    "vit-pytorch:MAE": partial(masked, "vit_pytorch.mae.MAE", decoder_dim=24, decoder_heads=2, decoder_dim_head=16),
    "vit-pytorch:SimMIM": partial(masked, "vit_pytorch.simmim.SimMIM"),
    "vit-pytorch:Adapter": learned_memories,
    "vit-pytorch:MP3": positions_of_patches,
}


# -- x-transformers ---------------------------------------------------------------------------------------------------

LAYERS = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8, "ff_mult": 2, "verbose": False}


def words(layers: str, wrapper: dict[str, Any], **options: Any) -> Sample:
    """A language model of an encoder or a decoder."""
    import x_transformers as x

    stack = getattr(x, layers)(**LAYERS | options)
    return Sample(x.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=stack, **wrapper), tokens())


def numbers(wrapper: dict[str, Any], **options: Any) -> Sample:
    import x_transformers as x

    stack = x.Encoder(**LAYERS | options)
    model = x.ContinuousTransformerWrapper(dim_in=12, dim_out=10, max_seq_len=32, attn_layers=stack, **wrapper)
    return Sample(model, vectors(32, 12))


def vision(wrapper: dict[str, Any], **options: Any) -> Sample:
    import x_transformers as x

    stack = x.Encoder(**LAYERS | options)
    model = x.ViTransformerWrapper(image_size=32, patch_size=8, num_classes=4, attn_layers=stack, **wrapper)
    return Sample(model, pictures())


def both_sides(**options: Any) -> dict[str, Any]:
    """The options of the two sides of a sequence-to-sequence model."""
    shared = {"num_tokens": 64, "max_seq_len": 32, "depth": 2, "heads": 4, **options}
    return {f"{side}_{key}": value for side in ("enc", "dec") for key, value in shared.items()} | {"dim": 32}


def translation(**options: Any) -> Sample:
    return made("x_transformers.XTransformer", pairs, tie_token_emb=True, **both_sides(**options))


def number_tokens() -> Sample:
    import x_transformers as x

    stack = x.Encoder(**LAYERS)
    model = x.XValTransformerWrapper(num_tokens=64, max_seq_len=32, numerical_token_id=3, attn_layers=stack)
    return Sample(model, (*tokens(), *vectors(32)))


def several_inputs() -> Sample:
    import x_transformers as x

    stack = x.Decoder(**LAYERS, rotary_pos_emb=True)
    sizes = {"note": 64, "pitch": 70}
    model = x.MultiInputTransformerWrapper(num_tokens=sizes, max_seq_len=32, attn_layers=stack)
    return Sample(model, ({name: tokens()[0] for name in sizes},))


def pooled() -> Sample:
    import x_transformers as x

    pool = x.AttentionPool(dim=32, num_pooled_tokens=3, depth=2, heads=4, dim_head=8)
    return Sample(pool, vectors(32, 32))


def conditioned(**options: Any) -> Sample:
    """An encoder of vectors whose norms or scales follow a condition."""
    import x_transformers as x

    return Sample(x.Encoder(**LAYERS, dim_condition=16, **options), vectors(32, 32), {"condition": torch.randn(2, 16)})


DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"attn_flash": True},
    "rmsnorm_rotary": {"use_rmsnorm": True, "rotary_pos_emb": True, "attn_flash": True},
    "llama": {"use_rmsnorm": True, "rotary_pos_emb": True, "ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "simple_rmsnorm": {"use_simple_rmsnorm": True, "ff_relu_squared": True},
    "scalenorm": {"use_scalenorm": True, "shift_tokens": 1},
    "xpos": {"rotary_pos_emb": True, "rotary_xpos": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "alibi_flash": {"alibi_pos_bias": True, "attn_flash": True},
    "relative_bias": {"rel_pos_bias": True},
    "dynamic_bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True},
    "qk_norm": {"attn_qk_norm": True, "attn_qk_norm_groups": 2, "attn_qk_norm_dim_scale": True},
    "qk_rmsnorm": {"attn_qk_rmsnorm": True, "attn_flash": True},
    "sandwich": {"sandwich_norm": True, "ff_glu": True},
    "post_norm": {"pre_norm": False, "attn_dropout": 0.1, "ff_dropout": 0.1},
    "residual_attention": {"residual_attn": True},
    "gate_residual": {"gate_residual": True},
    "gate_values": {"attn_gate_values": True, "attn_head_scale": True, "ff_glu": True, "ff_post_act_ln": True},
    "talking_heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "one_key_head": {"attn_one_kv_head": True, "attn_flash": True},
    "grouped_queries": {"attn_kv_heads": 2},
    "memory_keys": {"attn_num_mem_kv": 3, "attn_sparse_topk": 8},
    "value_residual": {"add_value_residual": True},
    "dynamic_tanh": {"use_dynamic_tanh": True},
    "hyper_connections": {"num_residual_streams": 2},
    "selective": {"attn_selective": True},
    "differentiable_depth": {"integrate_layers": True},
    "sublayer_dropout": {"attn_sublayer_dropout": 0.1, "ff_sublayer_dropout": 0.1},
    "softclamp": {"attn_softclamp_logits": True, "softclamp_output": True},
    "layerscale": {"use_layerscale": True, "scale_residual": True, "ff_solu": True},
    "latent": {"attn_use_latent_q": True, "attn_use_latent_kv": True, "attn_dim_latent_q": 9, "attn_dim_latent_kv": 9},
    "laser": {"attn_laser": True, "attn_head_learned_sink": True},
    "polar": {"polar_pos_emb": True},
    "contextual_positions": {"attn_use_cope": True},
    "forgetting": {"attn_data_dependent_alibi": True},
}

ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "macaron": ({"num_memory_tokens": 3}, {"macaron": True, "use_rmsnorm": True}),
    "unet": ({"use_cls_token": True}, {"unet_skips": True, "depth": 3}),
    "flash": ({"post_emb_norm": True, "scaled_sinu_pos_emb": True, "emb_dropout": 0.1}, {"attn_flash": True}),
    "tied": ({"tie_embedding": True, "l2norm_embed": True}, {"weight_tie_layers": True}),
    "pooled": ({"attn_pool": True}, {"rotary_pos_emb": True}),
    "average": ({"average_pool_embed": True, "use_abs_pos_emb": False}, {"sandwich_coef": 1}),
    "softmaxes": ({"mixture_of_softmax": True}, {"reinject_input": True}),
}

X_TRANSFORMERS: dict[str, Callable[[], Sample]] = {
    **{f"Decoder/{name}": partial(words, "Decoder", {}, **options) for name, options in DECODERS.items()},
    **{
        f"Encoder/{name}": partial(words, "Encoder", wrapper, **options)
        for name, (wrapper, options) in ENCODERS.items()
    },
    "Continuous": partial(numbers, {}),
    "Continuous/probabilistic": partial(numbers, {"probabilistic": True, "post_emb_norm": True}, attn_flash=True),
    "ViT": partial(vision, {}),
    "ViT/registers": partial(vision, {"num_register_tokens": 4, "post_emb_norm": True}, attn_flash=True, ff_glu=True),
    "XTransformer": translation,
    "XTransformer/flash": partial(translation, attn_flash=True, use_rmsnorm=True, ff_glu=True, rotary_pos_emb=True),
    "XVal": number_tokens,
    "MultiInput": several_inputs,
    "AttentionPool": pooled,
    "Encoder/adaptive_layernorm": partial(conditioned, use_adaptive_layernorm=True, use_adaptive_layerscale=True),
    "Encoder/adaptive_rmsnorm": partial(conditioned, use_adaptive_rmsnorm=True, adaptive_condition_mlp=True),
}


# -- Other attention --------------------------------------------------------------------------------------------------

SMALL = {"dim": 32, "depth": 2, "heads": 4}
LANGUAGE = SMALL | {"num_tokens": 64, "max_seq_len": 32, "dim_head": 8}
PERCEIVER = {"latent_heads": 2, "cross_dim_head": 16, "latent_dim_head": 16, "num_latents": 8, "latent_dim": 32}
#: The Reformer's. A reversible network of any of these packages cannot run backward in eval, not even by itself.
LOCALITY = {"bucket_size": 8, "n_hashes": 2, "ff_chunks": 2, "reverse_thres": 64}
PERCEIVER_IMAGE = PERCEIVER | {"num_freq_bands": 4, "max_freq": 10.0, "depth": 2, "num_classes": 4}


def channels_last(size: int) -> tuple[Any, ...]:
    return (torch.randn(2, size, size, 3),)


def queried() -> Sample:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(dim=24, queries_dim=20, logits_dim=10, depth=2, decoder_ff=True, **PERCEIVER)
    return Sample(model, vectors(16, 24), {"queries": torch.randn(12, 20)})


def tabular(name: str, **options: Any) -> Sample:
    import tab_transformer_pytorch

    if name == "TabTransformer":  # whose default is called though it is None
        options["mlp_act"] = torch.nn.ReLU()
    kind = getattr(tab_transformer_pytorch, name)
    model = kind(categories=(6, 4, 8), num_continuous=5, dim_head=8, **SMALL, **options)
    return Sample(model, (torch.randint(0, 4, (4, 3)), torch.randn(4, 5)))


def vision_around(path: str, **options: Any) -> Sample:
    """The vision transformer that takes any transformer of vectors."""
    from vit_pytorch.efficient import ViT

    transformer = made(path, tuple, **options).model
    return Sample(ViT(image_size=32, patch_size=8, num_classes=4, dim=32, transformer=transformer), pictures())


ATTENTION: dict[str, Callable[[], Sample]] = {
    **table(
        "linear-attention-transformer",
        tokens,
        LANGUAGE | {"local_attn_window_size": 16},
        {
            "LinearAttentionTransformerLM": {"causal": True, "ff_glu": True},
            "LinearAttentionTransformerLM/rotary": {"use_rotary_emb": True, "shift_tokens": True, "ff_chunks": 2},
            "LinearAttentionTransformerLM/local": {"n_local_attn_heads": 2, "ff_dropout": 0.1},
        },
    ),
    **table(
        "linear-attention-transformer",
        partial(vectors, 16, 8, 8),
        {},
        {"ImageLinearAttention": {"chan": 16, "key_dim": 8, "value_dim": 8, "heads": 2}},
        "linear_attention_transformer.images",
    ),
    **table(
        "performer-pytorch",
        tokens,
        LANGUAGE | {"ff_mult": 2},
        {
            "PerformerLM": {},
            "PerformerLM/generalized": {"generalized_attention": True, "use_scalenorm": True, "tie_embed": True},
            "PerformerLM/rezero": {"use_rezero": True, "ff_glu": True, "shift_tokens": True, "no_projection": True},
            "PerformerLM/local": {"local_attn_heads": 2, "local_window_size": 16},
        },
    ),
    **table(
        "performer-pytorch",
        partial(vectors, 32, 32),
        SMALL | {"dim_head": 8},
        {"Performer": {}, "Performer/dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1, "qkv_bias": False}},
    ),
    "performer-pytorch:PerformerEncDec": partial(
        made, "performer_pytorch.PerformerEncDec", pairs, tie_token_embeds=True, **both_sides(dim_head=8)
    ),
    "reformer-pytorch:ReformerEncDec": partial(
        made, "reformer_pytorch.ReformerEncDec", pairs, **both_sides(**LOCALITY)
    ),
    **table(
        "perceiver-pytorch",
        partial(channels_last, 16),
        PERCEIVER_IMAGE,
        {
            "Perceiver": ("Perceiver", {}),
            "Perceiver/tied": ("Perceiver", {"weight_tie_layers": True, "self_per_cross_attn": 2, "attn_dropout": 0.1}),
            "Perceiver/gated": ("gated.Perceiver", {}),
            "Perceiver/mixed": ("mixed_latents.Perceiver", {}),
            "Perceiver/linear": ("experimental.Perceiver", {"fourier_encode_data": False}),
        },
    ),
    "perceiver-pytorch:PerceiverIO": queried,
    **table(
        "perceiver-pytorch",
        tokens,
        PERCEIVER,
        {"PerceiverLM": {"dim": 24, "num_tokens": 64, "max_seq_len": 32, "depth": 2}},
    ),
    **table(
        "conformer",
        partial(vectors, 32, 32),
        {"dim_head": 8, "conv_kernel_size": 7},
        {
            "Conformer": {**SMALL, "attn_dropout": 0.1, "ff_dropout": 0.1, "conv_dropout": 0.1},
            "Conformer/causal": {**SMALL, "conv_causal": True},
            "ConformerBlock": {"dim": 32, "heads": 4},
        },
    ),
    **table(
        "local-attention",
        tokens,
        LANGUAGE | {"local_attn_window_size": 16},
        {
            "LocalTransformer": {},
            "LocalTransformer/xpos": {"use_xpos": True, "qk_rmsnorm": True, "num_residual_streams": 1},
            "LocalTransformer/bias": {"use_dynamic_pos_bias": True, "gate_values_per_head": True},
        },
    ),
    **table(
        "g-mlp-pytorch",
        tokens,
        {"dim": 32, "depth": 2, "seq_len": 32, "ff_mult": 2},
        {
            "gMLP": {"num_tokens": 64},
            "gMLP/causal": {"num_tokens": 64, "causal": True, "heads": 2, "attn_dim": 8, "circulant_matrix": True},
        },
    ),
    **table(
        "g-mlp-pytorch",
        pictures,
        {},
        {"gMLPVision": {"image_size": 32, "patch_size": 8, "num_classes": 4, "dim": 32, "depth": 2, "attn_dim": 8}},
    ),
    **table(
        "mlp-mixer-pytorch",
        pictures,
        {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "num_classes": 4},
        {"MLPMixer": {"channels": 3, "dropout": 0.1}, "Permutator": {"segments": 4}},
    ),
    **table(
        "mlp-mixer-pytorch",
        clip,
        {"dim": 32, "depth": 2, "num_classes": 4},
        {"MLPMixer3D": {"image_size": 32, "time_size": 4, "channels": 3, "patch_size": 8, "time_patch_size": 2}},
    ),
    **table(
        "reformer-pytorch",
        tokens,
        LANGUAGE | LOCALITY,
        {
            "ReformerLM": {"causal": True},
            "ReformerLM/axial": {"axial_position_emb": True, "axial_position_shape": (4, 8), "use_scale_norm": True},
            "ReformerLM/full": {"use_full_attn": True, "ff_glu": True, "weight_tie": True, "use_rezero": True},
            "ReformerLM/local": {"n_local_attn_heads": 2, "absolute_position_emb": True},
        },
    ),
    **table(
        "nystrom-attention",
        partial(vectors, 32, 32),
        {"dim_head": 8, "num_landmarks": 8},
        {"Nystromformer": {**SMALL, "attn_dropout": 0.1}, "NystromAttention": {"dim": 32, "heads": 4}},
    ),
    "nystrom-attention:Nystromformer/vision": partial(
        vision_around, "nystrom_attention.Nystromformer", **SMALL, dim_head=8, num_landmarks=8
    ),
    "tab-transformer-pytorch:TabTransformer": partial(tabular, "TabTransformer", num_residual_streams=1),
    "tab-transformer-pytorch:TabTransformer/streams": partial(tabular, "TabTransformer", attn_dropout=0.1),
    "tab-transformer-pytorch:FTTransformer": partial(tabular, "FTTransformer", num_residual_streams=1),
    "tab-transformer-pytorch:FTTransformer/streams": partial(tabular, "FTTransformer", ff_dropout=0.1),
    **table(
        "axial-attention",
        partial(vectors, 32, 8, 8),
        {"dim": 32, "heads": 4},
        {
            "AxialImageTransformer": {"depth": 2, "reversible": False, "axial_pos_emb_shape": (8, 8)},
            "AxialAttention": {"dim_index": 1},
            "AxialAttention/in_turn": {"dim_index": 1, "sum_axial_out": False},
        },
    ),
    **table(
        "swin-transformer-pytorch",
        pictures,
        {
            "hidden_dim": 16,
            "layers": (2, 2, 2, 2),
            "heads": (1, 2, 2, 4),
            "head_dim": 16,
            "window_size": 2,
            "downscaling_factors": (2, 2, 2, 2),
            "num_classes": 4,
        },
        {"SwinTransformer": {}, "SwinTransformer/absolute": {"relative_pos_embedding": False}},
    ),
    **table(
        "point-transformer-pytorch",
        lambda: vectors(16, 24) + vectors(16, 3),
        {"dim": 24, "attn_mlp_hidden_mult": 2},
        {
            "PointTransformerLayer": {"pos_mlp_hidden_dim": 16},
            "PointTransformerLayer/neighbours": {"num_neighbors": 6},
            "MultiheadPointTransformerLayer": {"heads": 2, "dim_head": 8},
        },
    ),
    **table(
        "memory-efficient-attention-pytorch",
        partial(vectors, 32, 32),
        {"dim": 32, "heads": 4, "dim_head": 8},
        {
            "Attention": {"causal": True},
            "CosineSimAttention": {"seq_len": 32},
        },
    ),
}


# -- Quantizers -------------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, dict[str, Any]] = {
    "FSQ": {"levels": [8, 5, 5, 5]},
    "FSQ/symmetric": {"levels": [4, 4, 4], "preserve_symmetry": True, "num_codebooks": 2},
    "LFQ": {"codebook_size": 64, "entropy_loss_weight": 0.1, "commitment_loss_weight": 0.2},
    "ResidualFSQ": {"levels": [5, 5, 5], "num_quantizers": 2},
    "ResidualLFQ": {"codebook_size": 64, "num_quantizers": 2},
    "SimVQ": {"codebook_size": 64},
    "ResidualSimVQ": {"codebook_size": 64, "num_quantizers": 2},
    "VectorQuantize/learned": {"codebook_size": 64, "codebook_dim": 8, "learnable_codebook": True, "ema_update": False},
    "VectorQuantize/frozen": {"codebook_size": 64, "codebook_dim": 8, "freeze_codebook": True, "use_cosine_sim": True},
}


# -- Diffusion --------------------------------------------------------------------------------------------------------


def noisy(*shape: int) -> tuple[Any, ...]:
    """What is noisy, and the times of it."""
    return torch.randn(2, *shape), torch.tensor([3.0, 20.0])


def noisy_classes() -> tuple[Any, ...]:
    return (*noisy(3, 16, 16), torch.tensor([1, 2]))


UNET = {"dim": 16, "dim_mults": (1, 2)}

DIFFUSION: dict[str, Callable[[], Sample]] = {
    **table(
        "denoising-diffusion-pytorch",
        partial(noisy, 3, 16, 16),
        UNET,
        {
            "Unet": ("Unet", {"attn_heads": 2, "attn_dim_head": 8}),
            "Unet/flash": ("Unet", {"flash_attn": True, "full_attn": (True, True), "learned_sinusoidal_cond": True}),
            "Unet/dropout": ("Unet", {"self_condition": True, "random_fourier_features": True, "dropout": 0.1}),
            "Unet/guided": ("guided_diffusion.Unet", {"learned_variance": True}),
            "UViT": ("simple_diffusion.UViT", {"vit_depth": 2, "attn_heads": 2, "attn_dim_head": 16}),
        },
    ),
    **table(
        "denoising-diffusion-pytorch",
        noisy_classes,
        UNET,
        {"Unet/classes": ("classifier_free_guidance.Unet", {"num_classes": 4, "cond_drop_prob": 0.5})},
    ),
    **table(
        "denoising-diffusion-pytorch",
        partial(noisy, 3, 32),
        UNET,
        {"Unet1D": {"attn_heads": 2, "attn_dim_head": 8, "dropout": 0.1}},
    ),
}


MODELS: dict[str, Callable[[], Sample]] = {
    **VIT_PYTORCH,
    **{f"x-transformers:{name}": builder for name, builder in X_TRANSFORMERS.items()},
    **ATTENTION,
    **table("vector-quantize-pytorch", partial(vectors, 16, 32), {"dim": 32}, QUANTIZERS),
    **table(
        "vector-quantize-pytorch",
        partial(vectors, 32, 8, 8),
        {"dim": 32},
        {
            "LatentQuantize": {"levels": [5, 5, 8]},
            "VectorQuantize/image": {"codebook_size": 64, "codebook_dim": 8, "accept_image_fmap": True, "decay": 1.0},
        },
    ),
    **DIFFUSION,
}
