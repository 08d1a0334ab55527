"""Models of packages for images: segmentation, medicine, video; see :mod:`tests.corpus.models`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.corpus.models import Sample, images
from tests.corpus.packages.diffusion import AUTOENCODERS, TRANSFORMERS, UNETS
from tests.corpus.packages.recipes import Recipe, load, models, sample, steps, tokens, volumes

__all__ = ["MODELS"]


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


def convolutions(pool: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    return {"stem_dim_out": 8, "model_num_class": 4, "head_pool_kernel_size": pool} | options


VIDEO: dict[str, Recipe] = {
    "resnet.create_resnet": (convolutions((4, 2, 2)), lambda: clip(4, 64)),
    "resnet.create_acoustic_resnet": (convolutions((1, 1, 1)), lambda: torch.randn(2, 1, 32, 1, 48)),
    "csn.create_csn": (convolutions((1, 2, 2)), lambda: clip(8, 32)),
    "r2plus1d.create_r2plus1d": (convolutions((1, 1, 1), head_activation=None), lambda: clip(4, 32)),
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

DESCRIPTORS = ("HardNet", "HardNet8", "SOSNet", "TFeat", "HyNet", "OriNet", "KeyNet")

KORNIA: dict[str, Recipe] = {
    **{f"feature.{name}": ({"pretrained": False}, gray) for name in DESCRIPTORS},
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
