"""The models of the corpus by name, small and with random weights: ``torchvision:resnet18``, ``vit-pytorch:CaiT``.

No name is special to what is checked: a model is built, called, and that is all that is known of it here.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["LISTS", "PACKAGES", "Sample", "build", "images", "names"]

#: All packages whose models are listed by hand.
PACKAGES = "packages"


@dataclass
class Sample:
    """A model and what to call it with."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def names(library: str) -> list[str]:
    """The models of ``torchvision``, ``timm``, ``transformers`` or other ``packages``, with the library in front."""
    if library == PACKAGES:
        return list(package_models())
    return [f"{library}:{name}" for name in LISTS[library]()]


def build(name: str) -> Sample:
    """A model by such a name, the same one every time."""
    library, _, rest = name.partition(":")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = BUILDERS[library](rest) if library in BUILDERS else package_models()[name]()
        scatter(sample.model, redraw=library == "transformers")
    return sample


@functools.cache
def package_models() -> dict[str, Callable[[], Sample]]:
    """The models of other packages, by their whole names."""
    from tests.corpus.packages import images, sound, text, transformers_by_hand

    return {**transformers_by_hand.MODELS, **images.MODELS, **sound.MODELS, **text.MODELS}


def scatter(model: nn.Module, redraw: bool) -> None:
    """Random values where initialisation leaves zeros and ones, or next to nothing: a lost operand must show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.dim() < 2:
                parameter.add_(torch.rand_like(parameter).mul_(0.2).sub_(0.1))
            elif redraw:
                parameter.normal_(0, (parameter.numel() / len(parameter)) ** -0.5)


def images(size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


# -- torchvision ------------------------------------------------------------------------------------------------------


def torchvision_names() -> list[str]:
    from torchvision import models

    return models.list_models(module=models)


def torchvision_model(name: str) -> Sample:
    """The model; of the large relatives of others one with fewer or narrower layers, whose code is what it was."""
    import torchvision.models as tv

    size, options = 64, dict[str, Any]()
    model: nn.Module | None = None
    if name.startswith("vit"):
        patch = int(name.rpartition("_")[2])
        size = patch * 4
        model = tv.VisionTransformer(size, patch, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=96, num_classes=4)
    elif name == "maxvit_t":
        widths = {"stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 2], "head_dim": 8}
        model = tv.MaxVit((64, 64), partition_size=4, stochastic_depth_prob=0.2, num_classes=4, **widths)
    elif name in ("convnext_base", "convnext_large"):
        blocks = [tv.convnext.CNBlockConfig(16 * 2**i, 32 * 2**i if i < 3 else None, 2) for i in range(4)]
        model = tv.ConvNeXt(blocks, stochastic_depth_prob=0.5, num_classes=4)
    elif name in ("swin_s", "swin_b"):
        model = tv.SwinTransformer([4, 4], 32, [2, 2, 2, 2], [2, 4, 8, 16], [7, 7], num_classes=4)
    elif name in ("swin_v2_s", "swin_v2_b"):
        swin = tv.swin_transformer
        kinds = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        model = tv.SwinTransformer([4, 4], 32, [2, 2, 2, 2], [2, 4, 8, 16], [8, 8], num_classes=4, **kinds)
    elif name.startswith("regnet") and name.endswith(("_8gf", "16gf", "32gf", "128gf")):
        squeeze = 0.25 if name.startswith("regnet_y") else 0.0
        blocks = tv.regnet.BlockParams.from_init_params(6, 48, 27.89, 2.09, 8, 1.0, squeeze)
        model = tv.RegNet(blocks, num_classes=4)
    elif name.startswith(("resnet1", "resnext", "wide")):
        depth = {"groups": 32 if name.startswith("resnext") else 1, "width_per_group": 8}
        model = tv.ResNet(tv.resnet.Bottleneck, [1, 2, 2, 1], num_classes=4, **depth)
    elif name.startswith(("efficientnet_b5", "efficientnet_b6", "efficientnet_b7", "efficientnet_v2")):
        scale = {} if name.startswith("efficientnet_v2") else {"width_mult": 1.0, "depth_mult": 1.0}
        blocks, last = tv.efficientnet._efficientnet_conf(name, **scale)
        for block in blocks:
            block.num_layers = min(block.num_layers, 2)
        model = tv.EfficientNet(blocks, dropout=0.3, last_channel=last, num_classes=4)
    elif name in ("inception_v3", "googlenet"):
        size, options = 299 if name == "inception_v3" else 96, {"init_weights": False}
    if model is None:
        model = tv.get_model(name, weights=None, num_classes=4, **options)
    if name.startswith(("vgg", "alexnet")):
        wide = [layer for layer in model.classifier if isinstance(layer, nn.Linear)]
        narrow = [nn.Linear(wide[0].in_features, 64), nn.Linear(64, 64), nn.Linear(64, 4)]
        swaps = dict(zip(wide, narrow, strict=True))
        model.classifier = nn.Sequential(*(swaps.get(layer, layer) for layer in model.classifier))
    return Sample(model, (images(size),))


# -- timm -------------------------------------------------------------------------------------------------------------


#: A small model of each family, that is of each of timm's files, in the order of their names.
TIMM = (
    "beit_base_patch16_224", "eca_botnext26ts_256", "test_byobnet", "cait_xxs24_224", "coat_tiny", "convit_tiny",
    "convmixer_1024_20_ks9_p14", "test_convnext", "cpubone_nano", "crossvit_tiny_240", "csatv2",
    "cs3darknet_focus_s", "cspnext_tiny", "davit_tiny", "deepseek_vit_412m", "deit_tiny_patch16_224", "densenet121",
    "dla46x_c", "dpn48b", "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "test_efficientnet",
    "efficientvim_m1", "efficientvit_b0", "efficientvit_m0", "vit_tiny_patch16_dinov3_qkvb", "fasternet_t0",
    "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny", "gemma4_vit_167m_enc", "ghostnet_050", "hardcorenas_b",
    "hgnetv2_b0", "hiera_tiny_224", "sam2_hiera_tiny", "hrnet_w18_small", "iformer_t", "inception_next_atto",
    "inception_resnet_v2", "inception_v3", "inception_v4", "lcnetv2_small", "levit_128s", "lowformer_b0",
    "test_mambaout", "test_coatnet", "poolformerv2_s12", "gmlp_ti16_224", "lcnet_035", "mobilenetv5_base",
    "mobilevit_xxs", "mvitv2_tiny", "naflexvit_base_patch16_siglip", "nasnetalarge", "nest_tiny", "nextvit_small",
    "test_nfnet", "pit_ti_224", "pnasnet5large", "pvt_v2_b0", "qwen3_vit_88m", "rdnet_tiny", "regnetx_002",
    "repghostnet_050", "repvit_m0_9", "res2next50", "resnest26d", "test_resnet", "resnetv2_18", "rexnet_100",
    "selecsls42", "legacy_seresnet18", "sequencer2d_s", "shvit_s1", "skresnet18", "starnet_s050", "swiftformer_xs",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "tiny_vit_5m_224",
    "tnt_s_legacy_patch16_224", "tresnet_m", "twins_svt_small", "vgg11", "visformer_tiny", "test_vit",
    "vit_tiny_r_s16_p8_224", "test_vit_relpos", "samvit_base_patch16_224", "vitamin_small_224", "volo_d1_224",
    "ese_vovnet19b_slim_dw", "legacy_xception", "xception41p", "xcit_nano_12_p8_224",
)  # fmt: skip
#: Depth is cut where the smallest of a family is large.
SHALLOW = {
    "beit_base_patch16_224": 2, "deepseek_vit_412m": 2, "gemma4_vit_167m_enc": 2, "naflexvit_base_patch16_siglip": 2,
    "qwen3_vit_88m": 2, "samvit_base_patch16_224": 3,
}  # fmt: skip
#: Sizes of images, where a model does not take 64 x 64.
SIZES = {
    "crossvit_tiny_240": 240,
    "deepseek_vit_412m": 224,
    "efficientformer_l1": 224,
    "gemma4_vit_167m_enc": 96,
    "inception_resnet_v2": 96,
    "inception_v3": 96,
    "inception_v4": 96,
}


def timm_names() -> list[str]:
    return list(TIMM)


def timm_model(name: str) -> Sample:
    import timm

    options = {"depth": SHALLOW[name]} if name in SHALLOW else {}
    size = SIZES.get(name, 64)
    try:
        model = timm.create_model(name, num_classes=4, img_size=size, **options)
    except TypeError:  # a network of convolutions takes any size and has no such option
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=4, **options)
    return Sample(model, (images(size, model.pretrained_cfg["input_size"][0]),))


# -- transformers -----------------------------------------------------------------------------------------------------


def transformers_names() -> list[str]:
    return list(TRANSFORMERS)


#: What a configuration's numbers become, by their names.
TINY: dict[str, int] = {
    **dict.fromkeys(
        (
            "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "model_dim", "embedding_size",
            "text_hidden_size", "decoder_hidden_size", "encoder_hidden_size", "d_embed", "emb_dim", "n_embed",
            "projection_dim", "word_embed_proj_dim", "lru_width", "output_hidden_size", "lstm_dim", "out_hidden_size",
            "attention_hidden_size", "encoder_embed_dim", "decoder_embed_dim", "conv_dim_out", "bottleneck_size",
            "prediction_hidden_size", "mask_feature_size", "feature_size", "fpn_hidden_size", "qk_channels_",
            "d_latents_", "hidden_channels", "backbone_embed_dim",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
            "decoder_attention_heads", "attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
            "encoder_num_attention_heads", "decoder_num_attention_heads", "mlp_heads", "num_attn_heads",
            "encoder_num_key_value_heads", "decoder_num_key_value_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "d_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_head_dim",
         "global_head_dim", "swa_head_dim", "qk_head_dim", "mamba_d_state", "state_size", "rotary_dim", "mamba_d_head",
         "kv_channels", "mamba_head_dim", "linear_key_head_dim", "linear_value_head_dim"),
        8,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size",
            "feed_forward_proj_dim", "dim_feedforward", "d_inner", "hidden_dim_ffn", "inner_dim", "d_mlp",
            "decoder_intermediate_size", "encoder_intermediate_size", "mlp_dim", "feedforward_hidden_size",
            "encoder_feed_forward_dim", "shared_expert_intermediate_size", "shared_intermediate_size",
            "intermediate_size_mlp", "num_ff_", "dense_intermediate_size", "feed_forward_dim", "classifier_proj_size",
        ),
        48,
    ),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 16),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
            "num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
            "num_encoder_blocks_", "decoder_num_layers", "encoder_num_layers", "num_blocks_", "num_layer", "depth",
            "num_conv_pos_embeddings_", "num_adapter_layers_",
        ),
        2,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_global_experts"), 4
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts", "experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "text_vocab_size", "decoder_vocab_size", "src_vocab_size"), 96
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
            "max_target_positions", "max_source_positions", "max_seq_length", "seq_length", "max_length_",
        ),
        64,
    ),
    "image_size": 32,
    "patch_size": 8,
    "vision_feature_layer_": 1,
}  # fmt: skip

#: Whose losses want an image besides the tokens.
UNLABELLED = {"git"}
MROPE = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0}
#: What names do not say. None leaves a value as it is; a name with a dot is that of a configuration inside.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "glm4v_text": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "xmod": {"default_language": "en_XX"},
    **{name: {"head_dim": 8} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{name: {"text_config.": {"rope_parameters": MROPE}} for name in ("qwen2_vl", "qwen2_5_vl")},
    "efficientnet": {"width_coefficient": 0.3, "depth_coefficient": 0.5, "hidden_dim": 384, "image_size": 64},
    **{
        name: {"embed_dim": 24, "image_size": 64, "window_size": 2}
        for name in ("donut-swin", "swin", "swin2sr", "swinv2")
    },
}


def tiny(cls: Any, special: dict[str, Any]) -> Any:
    """A small configuration of a class of transformers."""
    default = cls()
    values = default.to_dict()
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        if name in special:
            if special[name] is not None:
                chosen[name] = special[name]
            continue
        inner = getattr(default, name, None)
        if hasattr(inner, "to_dict") and hasattr(type(inner), "model_type"):
            chosen[name] = tiny(type(inner), special.get(f"{name}.", {}))
        elif name in TINY and isinstance(value, int) and not isinstance(value, bool):
            chosen[name] = min(value, TINY[name])
        elif name == "num_key_value_heads" and value is not None:
            chosen[name] = 2
        elif name.endswith("_token_id") and isinstance(value, int) and value >= 90:
            chosen[name] = {"pad": 0, "bos": 1, "eos": 2}.get(name.split("_")[0], 3 + len(name) % 7)
        elif name in ("depths", "num_blocks", "encoder_depths", "block_repeats") and isinstance(value, list):
            chosen[name] = [min(2, depth) for depth in value]
        elif name in ("hidden_sizes", "embed_dims", "dims", "channels") and isinstance(value, list):
            chosen[name] = [16 * 2**i for i in range(len(value))]
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if heads == groups and chosen.get("num_attention_heads") and chosen.get("num_key_value_heads"):
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    return cls(**chosen)


def transformers_class(family: str) -> tuple[Any, Any, str]:
    """Configuration and model class of a family, the one with a head that most use, and what its labels are like.

    Labels are like one of its inputs, or a "class" for each sample.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    config = CONFIG_MAPPING[family]
    for mapping, labels in (
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING, "input_ids"),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "decoder_input_ids"),
        (auto.MODEL_FOR_MASKED_LM_MAPPING, "input_ids"),
        (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, "class"),
        (auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING, "class"),
        (auto.MODEL_MAPPING, ""),
    ):
        if config in mapping:
            model = mapping[config]
            return config, model[0] if isinstance(model, tuple) else model, labels
    raise LookupError(family)


def families() -> list[str]:
    """The model types of transformers that the corpus has."""
    return list(dict.fromkeys(name.partition("/")[0] for name in TRANSFORMERS))


def families_left_out() -> tuple[list[str], list[str]]:
    """Those that it has not: without a model class in the mappings that it looks into, and others."""
    from transformers import CONFIG_MAPPING

    headless, other = list[str](), list[str]()
    for family in sorted(set(CONFIG_MAPPING) - set(families())):
        try:
            transformers_class(family)
        except LookupError:
            headless.append(family)
            continue
        except ValueError:  # a class in the mapping that transformers has not
            pass
        other.append(family)
    return headless, other


def transformers_model(name: str) -> Sample:
    """``bert``; ``bert/eager`` with the attention that is written out."""
    family, _, attention = name.partition("/")
    config_class, model_class, labels = transformers_class(family)
    config = tiny(config_class, SPECIAL.get(family, {}))
    if attention:
        config._attn_implementation = attention
    model = model_class(config)
    if hasattr(
        model, "freeze_feature_encoder"
    ):  # else it wants its input to be a leaf, which verify_patch gives no view
        model.freeze_feature_encoder()
    inputs = dict(example_inputs(model, config))
    known = inspect.signature(model.forward).parameters
    if "labels" in known and family not in UNLABELLED and (labels == "class" or labels in inputs):
        inputs["labels"] = torch.tensor([1, 0]) if labels == "class" else some_ignored(inputs[labels])
    if "use_cache" in known:
        inputs["use_cache"] = False
    return Sample(model, (), inputs)


def some_ignored(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens as labels, some of them with the number that losses ignore."""
    labels = tokens.flip(0)
    labels[0, 2:4] = -100
    return labels


def example_inputs(model: Any, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    known = inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", config)
    main = model.main_input_name
    text = getattr(config, "text_config", config)
    tokens = torch.randint(3, min(90, getattr(text, "vocab_size", 90) or 90), (2, 7))
    if main == "pixel_values" or ("pixel_values" in known and "input_ids" not in known):
        size = getattr(vision, "image_size", None) or 64
        height, width = (size if isinstance(size, list | tuple) else (size, size))[:2]
        yield "pixel_values", torch.randn(2, getattr(vision, "num_channels", 3), height, width)
    elif main == "input_values":
        yield "input_values", torch.randn(2, 8000)
    elif main == "input_features":
        yield "input_features", torch.randn(2, getattr(config, "num_mel_bins", 80), 128)
    else:
        yield "input_ids", tokens
        if "attention_mask" in known:
            mask = torch.ones(2, 7, dtype=torch.long)
            mask[1, 5:] = 0
            yield "attention_mask", mask
    if "decoder_input_ids" in known and main != "input_values":
        yield "decoder_input_ids", torch.randint(3, 90, (2, 5))


#: Families of which a small configuration and its inputs can be made by the names of things alone; of those that join
#: models of images, sounds and texts a few.
TRANSFORMERS = (
    "afmoe", "aimv2_vision_model", "albert", "apertus", "arcee", "aria", "aria_text", "audioflamingo3", "axk1",
    "axk2", "aya_vision", "bamba", "bart", "beam", "beit", "bert", "bert-generation", "bert/eager", "big_bird",
    "bigbird_pegasus", "biogpt", "bitnet", "blenderbot", "blenderbot-small", "bloom", "camembert", "canine",
    "chinese_clip_vision_model", "clip", "clip_text_model", "clip_vision_model", "codegen", "cohere", "cohere2",
    "cohere2_moe", "cohere2_vision", "convbert", "convnext", "convnextv2", "cosmos3_omni", "cpmant", "ctrl", "cvt",
    "cwm", "data2vec-audio", "data2vec-text", "data2vec-vision", "deberta", "deberta-v2", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_vl", "deepseek_vl_hybrid", "deit", "diffllama",
    "dinov2", "dinov2_with_registers", "dinov3_convnext", "dinov3_vit", "distilbert", "doge", "donut-swin", "dpr",
    "dpt", "efficientnet", "electra", "encoder-decoder", "ernie", "ernie4_5", "ernie4_5_moe", "esm", "esmc",
    "eurobert", "exaone4", "exaone4_5", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flaubert", "flava",
    "flex_olmo", "flint", "fnet", "focalnet", "fsmt", "funnel", "fuyu", "gemma", "gemma2", "gemma2/eager", "gemma3",
    "gemma3_text", "gemma4_audio", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_text", "glm_moe_dsa",
    "glmasr", "glmasr_encoder", "got_ocr2", "gpt-sw3", "gpt2", "gpt2/eager", "gpt_bigcode", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_docling", "granite_docling_text",
    "granite_docling_vision", "granite_speech", "granite_speech_plus", "granite_swa", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "gte", "helium", "hiera", "higgs_audio_v2", "hrm_text", "hubert",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "hyperclovax_vision_v2", "ibert",
    "idefics2", "idefics3_vision", "ijepa", "imagegpt", "inkling2_text", "inkling_text", "internlm3",
    "internvl_vision", "iquestcoder", "jais2", "jamba", "jetmoe", "jina_embeddings_v3", "laguna", "lasr_ctc",
    "lasr_encoder", "layoutlm", "led", "lfm2", "lfm3", "llama", "llama/eager", "llama4_text", "llava", "longformer",
    "longt5", "luke", "m2m_100", "mamba", "mamba2", "marian", "markuplm", "mbart", "megatron-bert", "mellum",
    "mgp-str", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral",
    "ministral3", "mistral", "mistral_large4_text", "mixtral", "mlcd", "mlcd_vision_model", "mobilebert",
    "mobilenet_v1", "mobilenet_v2", "mobilevit", "modernbert", "modernbert-decoder", "molmo2_text", "mpnet", "mpt",
    "mra", "mt5", "muse_glimmer_text", "muse_spark_text", "mvp", "nanochat", "nemotron", "nemotron_h", "nllb-moe",
    "nomic_bert", "nystromformer", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt",
    "opt/eager", "paligemma", "pegasus", "pegasus_x", "persimmon", "phi", "phi3", "phimoe", "pixio", "plbart",
    "poolformer", "pp_lcnet", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec", "prophetnet", "qianfan_ocr_vision",
    "qwen2", "qwen2/eager", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_audio", "qwen2_audio_encoder", "qwen2_moe",
    "qwen2_vl", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_asr", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp_text", "radio", "recurrent_gemma", "regnet",
    "rembert", "resnet", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "rwkv", "sam3_vision_model",
    "sam3_vit_model", "sam_hq_vision_model", "sam_vision_model", "seed_oss", "segformer", "sew", "sew-d", "siglip",
    "siglip_vision_model", "smollm3", "smolvlm_vision", "solar_open", "splinter", "squeezebert", "stablelm",
    "starcoder2", "swiftformer", "swin", "swin2sr", "swinv2", "switch_transformers", "t5", "t5/eager", "t5gemma",
    "t5gemma2", "tapas", "tipsv2_text_model", "tipsv2_vision_model", "trocr", "ultrabert", "umt5", "unispeech",
    "unispeech-sat", "vaultgemma", "visual_bert", "vit", "vit/eager", "vit_mae", "vit_msn", "vitdet", "vits",
    "voxtral_encoder", "voxtral_realtime_encoder", "wav2vec2", "wav2vec2-conformer", "wavlm", "whisper",
    "whisper/eager", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "yolos", "yoso",
    "youtu", "zaya",
)  # fmt: skip

LISTS: dict[str, Callable[[], list[str]]] = {
    "torchvision": torchvision_names,
    "timm": timm_names,
    "transformers": transformers_names,
}
BUILDERS: dict[str, Callable[[str], Sample]] = {
    "torchvision": torchvision_model,
    "timm": timm_model,
    "transformers": transformers_model,
}
