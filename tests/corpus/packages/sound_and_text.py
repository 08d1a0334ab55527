"""Models of packages for sound, text, detection, graphs and tables, small and with random weights: see
:mod:`corpus.models`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample, images

__all__ = ["MODELS"]


def load(path: str) -> Any:
    """What ``module:name`` refers to, whose package is imported no earlier than here."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def sample(path: str, *args: Any, **options: Any) -> Sample:
    """What ``path`` refers to, made with the options, and called with the arguments."""
    return Sample(load(path)(**options), args)


def drawn(found: Sample, name: str) -> Sample:
    """With random values in a parameter that the package leaves uninitialised."""
    nn.init.normal_(found.model.get_parameter(name))
    return found


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def tokens(*shape: int) -> torch.Tensor:
    """Numbers of words out of 30. The first three, for padding and the like, do not occur."""
    return torch.randint(3, 30, shape)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# -- sound ------------------------------------------------------------------------------------------------------------


#: The options that the functions for wav2vec 2.0 and WavLM have in common.
WAVES: dict[str, Any] = {
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 3, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.1,
    "encoder_pos_conv_kernel": 8,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 2,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.1,
    "encoder_ff_interm_features": 64,
    "encoder_ff_interm_dropout": 0.1,
    "encoder_dropout": 0.1,
    "encoder_layer_drop": 0.0,
}
TRANSFORMER: dict[str, Any] = {"input_dim": 32, "num_heads": 4, "ffn_dim": 64, "num_layers": 2}
CONFORMER: dict[str, Any] = {**TRANSFORMER, "depthwise_conv_kernel_size": 7}
#: A transducer of Emformers.
TRANSDUCER: dict[str, Any] = {
    "input_dim": 16,
    "encoding_dim": 32,
    "num_symbols": 30,
    "segment_length": 8,
    "right_context_length": 4,
    "time_reduction_input_dim": 16,
    "time_reduction_stride": 4,
    "transformer_num_heads": 4,
    "transformer_ffn_dim": 64,
    "transformer_num_layers": 2,
    "transformer_dropout": 0.1,
    "transformer_activation": "gelu",
    "transformer_left_context_length": 4,
    "transformer_max_memory_size": 0,
    "transformer_weight_init_scale_strategy": "depthwise",
    "transformer_tanh_on_mem": True,
    "symbol_embedding_dim": 24,
    "num_lstm_layers": 2,
    "lstm_layer_norm": True,
    "lstm_layer_norm_epsilon": 1e-3,
    "lstm_dropout": 0.1,
}
TORCHAUDIO: dict[str, Callable[[], Sample]] = {
    "Wav2Vec2Model": lambda: sample(
        "torchaudio.models:wav2vec2_model",
        noise(2, 800),
        extractor_mode="group_norm",
        encoder_layer_norm_first=False,
        aux_num_out=10,
        **WAVES,
    ),
    "Wav2Vec2Model/layer_norm_first": lambda: sample(
        "torchaudio.models:wav2vec2_model",
        noise(2, 800),
        lengths(800, 600),
        extractor_mode="layer_norm",
        encoder_layer_norm_first=True,
        aux_num_out=None,
        **WAVES,
    ),
    "Wav2Vec2Model/wavlm": lambda: sample(
        "torchaudio.models:wavlm_model",
        noise(2, 800),
        extractor_mode="group_norm",
        encoder_layer_norm_first=False,
        encoder_num_buckets=16,
        encoder_max_distance=32,
        aux_num_out=None,
        **WAVES,
    ),
    "Conformer": lambda: sample(
        "torchaudio.models:Conformer", noise(2, 32, 32), lengths(32, 20), dropout=0.1, **CONFORMER
    ),
    "Conformer/convolution_first": lambda: sample(
        "torchaudio.models:Conformer",
        noise(2, 32, 32),
        lengths(32, 20),
        use_group_norm=True,
        convolution_first=True,
        **CONFORMER,
    ),
    "Emformer": lambda: sample(
        "torchaudio.models:Emformer",
        noise(2, 36, 32),
        lengths(36, 24),
        segment_length=8,
        left_context_length=4,
        right_context_length=4,
        max_memory_size=2,
        dropout=0.1,
        **TRANSFORMER,
    ),
    "RNNT": lambda: sample(
        "torchaudio.models:emformer_rnnt_model",
        noise(2, 36, 16),
        lengths(36, 24),
        tokens(2, 8).int(),
        lengths(8, 5).int(),
        **TRANSDUCER,
    ),
    "ConvTasNet": lambda: sample(
        "torchaudio.models:ConvTasNet",
        noise(2, 1, 400),
        enc_num_feats=32,
        msk_num_feats=16,
        msk_num_hidden_feats=32,
        msk_num_layers=3,
        msk_num_stacks=2,
    ),
    "DeepSpeech": lambda: sample(
        "torchaudio.models:DeepSpeech", noise(2, 1, 30, 16), n_feature=16, n_hidden=32, n_class=10, dropout=0.1
    ),
    "Wav2Letter": lambda: sample("torchaudio.models:Wav2Letter", noise(2, 1, 1600), num_classes=10),
    "Tacotron2": lambda: sample(
        "torchaudio.models:Tacotron2",
        tokens(2, 12),
        lengths(12, 9),
        noise(2, 16, 10),
        lengths(10, 8),
        n_mels=16,
        n_symbol=30,
        symbol_embedding_dim=32,
        encoder_embedding_dim=32,
        decoder_rnn_dim=32,
        attention_rnn_dim=32,
        attention_hidden_dim=16,
        attention_location_n_filter=8,
        attention_location_kernel_size=5,
        prenet_dim=16,
        postnet_embedding_dim=32,
    ),
    "WaveRNN": lambda: sample(
        "torchaudio.models:WaveRNN",
        noise(2, 1, 96),
        noise(2, 1, 16, 10),
        upsample_scales=[4, 4],
        n_classes=16,
        hop_length=16,
        n_res_block=2,
        n_rnn=32,
        n_fc=32,
        n_freq=16,
        n_hidden=16,
        n_output=16,
    ),
    "HDemucs": lambda: sample(
        "torchaudio.models:HDemucs",
        noise(2, 2, 4096),
        sources=["drums", "voice"],
        channels=8,
        nfft=1024,
        depth=5,
        norm_starts=3,
        norm_groups=2,
    ),
    "SquimObjective": lambda: sample(
        "torchaudio.models:squim_objective_model",
        noise(2, 1600),
        feat_dim=32,
        win_len=32,
        d_model=16,
        nhead=4,
        hidden_dim=32,
        num_blocks=2,
        rnn_type="LSTM",
        chunk_size=15,
    ),
}

LOBES = "speechbrain.lobes.models"


def relative(encoder: str, **options: Any) -> Sample:
    """An encoder of speechbrain, which is given embeddings of the relative positions."""
    inputs = noise(2, 24, 32)
    positions = load("speechbrain.nnet.attention:RelPosEncXL")(32)(inputs)
    found = sample(
        f"{LOBES}.transformer.{encoder}", inputs, num_layers=2, d_model=32, nhead=4, kernel_size=7, **options
    )
    found.kwargs["pos_embs"] = positions
    return found


def recogniser(**options: Any) -> Sample:
    shape = {"d_model": 32, "nhead": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "d_ffn": 64, "kernel_size": 7}
    return sample(
        f"{LOBES}.transformer.TransformerASR:TransformerASR",
        noise(2, 24, 20),
        tokens(2, 8),
        torch.tensor([1.0, 0.75]),
        tgt_vocab=30,
        input_size=20,
        **shape,
        **options,
    )


def dual_path() -> Sample:
    block = load(f"{LOBES}.dual_path:SBRNNBlock")
    parts = [block(input_size=16, hidden_channels=16, num_layers=1) for _ in range(2)]
    return sample(
        f"{LOBES}.dual_path:Dual_Path_Model",
        noise(2, 32, 60),
        in_channels=32,
        out_channels=16,
        intra_model=parts[0],
        inter_model=parts[1],
        num_layers=2,
        K=10,
        norm="gln",
    )


def separator() -> Sample:
    block = load(f"{LOBES}.resepformer:SBTransformerBlock_wnormandskip")
    parts = [block(num_layers=1, d_model=32, nhead=4, d_ffn=64) for _ in range(2)]
    return sample(
        f"{LOBES}.resepformer:ResourceEfficientSeparator",
        noise(2, 32, 48),
        input_dim=32,
        layer=2,
        unit=32,
        segment_size=8,
        mem_type="av",
        seg_model=parts[0],
        mem_model=parts[1],
    )


def masks(**options: Any) -> Sample:
    shape = {"N": 32, "B": 16, "H": 32, "P": 3, "X": 3, "R": 2, "C": 2}
    return sample(f"{LOBES}.conv_tasnet:MaskNet", noise(2, 32, 40), **shape, **options)


#: Of the encoder and of the decoder of FastSpeech 2.
SPEAKING: dict[str, Any] = {
    "num_layers": 2,
    "num_head": 2,
    "d_model": 32,
    "ffn_dim": 64,
    "k_dim": 32,
    "v_dim": 32,
    "dropout": 0.1,
}
SPEECHBRAIN: dict[str, Callable[[], Sample]] = {
    "ECAPA_TDNN": lambda: sample(
        f"{LOBES}.ECAPA_TDNN:ECAPA_TDNN",
        noise(2, 50, 40),
        torch.tensor([1.0, 0.8]),
        input_size=40,
        channels=[32, 32, 32, 32, 96],
        attention_channels=16,
        res2net_scale=4,
        se_channels=16,
        lin_neurons=24,
    ),
    "Xvector": lambda: sample(
        f"{LOBES}.Xvector:Xvector",
        noise(2, 50, 40),
        in_channels=40,
        tdnn_channels=[32, 32, 32, 32, 64],
        lin_neurons=32,
    ),
    "CRDNN": lambda: sample(
        f"{LOBES}.CRDNN:CRDNN",
        noise(2, 24, 20),
        input_shape=[None, None, 20],
        cnn_channels=[8, 16],
        rnn_layers=2,
        rnn_neurons=16,
        dnn_neurons=16,
    ),
    "CRDNN/LSTM": lambda: sample(
        f"{LOBES}.CRDNN:CRDNN",
        noise(2, 24, 20),
        input_shape=[None, None, 20],
        cnn_channels=[8, 16],
        time_pooling=True,
        using_2d_pooling=True,
        rnn_class=load("speechbrain.nnet.RNN:LSTM"),
        rnn_layers=2,
        rnn_neurons=16,
        dnn_neurons=16,
        projection_dim=12,
    ),
    "ContextNet": lambda: sample(
        f"{LOBES}.ContextNet:ContextNet",
        noise(2, 32, 20),
        input_shape=[None, None, 20],
        out_channels=24,
        conv_channels=[16, 16, 32],
        strides=[1, 2, 1],
        num_blocks=3,
        num_layers=2,
        inner_dim=8,
        residuals=[True, True, True],
    ),
    "ResNet": lambda: sample(
        f"{LOBES}.ResNet:ResNet",
        noise(2, 32, 32),
        input_size=32,
        channels=[8, 8, 16, 16],
        block_sizes=[1, 2, 1, 1],
        lin_neurons=16,
    ),
    "HifiganGenerator": lambda: sample(
        f"{LOBES}.HifiGAN:HifiganGenerator",
        noise(2, 20, 12),
        in_channels=20,
        out_channels=1,
        resblock_type="1",
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        resblock_kernel_sizes=[3, 5],
        upsample_kernel_sizes=[8, 8],
        upsample_initial_channel=32,
        upsample_factors=[4, 4],
    ),
    "EnhancementGenerator": lambda: sample(f"{LOBES}.MetricGAN:EnhancementGenerator", noise(2, 20, 257), torch.ones(2)),
    "MetricDiscriminator": lambda: sample(
        f"{LOBES}.MetricGAN:MetricDiscriminator", noise(2, 2, 40, 40), base_channels=8
    ),
    "MaskNet": lambda: masks(),
    "MaskNet/causal": lambda: masks(norm_type="cLN", causal=True, mask_nonlinear="softmax"),
    "Dual_Path_Model": dual_path,
    "SepformerWrapper": lambda: sample(
        f"{LOBES}.dual_path:SepformerWrapper",
        noise(2, 400),
        encoder_out_nchannels=32,
        masknet_chunksize=16,
        masknet_numlayers=1,
        intra_numlayers=2,
        inter_numlayers=2,
        intra_nhead=4,
        inter_nhead=4,
        intra_dffn=64,
        inter_dffn=64,
    ),
    "ResourceEfficientSeparator": separator,
    "ConformerEncoder": lambda: relative("Conformer:ConformerEncoder", d_ffn=64, dropout=0.1),
    "BranchformerEncoder": lambda: relative("Branchformer:BranchformerEncoder", csgu_linear_units=64, dropout=0.1),
    "TransformerASR": lambda: recogniser(causal=True),
    "TransformerASR/conformer": lambda: recogniser(
        encoder_module="conformer", causal=False, attention_type="RelPosMHAXL", normalize_before=True
    ),
    "TransformerLM": lambda: sample(
        f"{LOBES}.transformer.TransformerLM:TransformerLM",
        tokens(2, 16),
        vocab=30,
        d_model=32,
        nhead=4,
        num_encoder_layers=2,
        d_ffn=64,
        d_embedding=24,
    ),
    "CNNTransformerSE": lambda: sample(
        f"{LOBES}.transformer.TransformerSE:CNNTransformerSE",
        noise(2, 20, 33),
        d_model=33,
        output_size=33,
        nhead=3,
        num_layers=2,
        d_ffn=64,
    ),
    "DiffWave": lambda: sample(
        f"{LOBES}.DiffWave:DiffWave",
        noise(2, 1, 512),
        lengths(3, 40),
        noise(2, 80, 2),
        input_channels=80,
        residual_layers=4,
        residual_channels=16,
        dilation_cycle_length=2,
        total_steps=50,
    ),
    "EnhanceResnet": lambda: sample(
        f"{LOBES}.EnhanceResnet:EnhanceResnet",
        noise(2, 2000),
        n_fft=64,
        win_length=4,
        hop_length=2,
        channel_counts=[8, 8, 16],
        dense_nodes=32,
    ),
    "RNNLM": lambda: sample(
        f"{LOBES}.RNNLM:RNNLM", tokens(2, 12), output_neurons=30, embedding_dim=16, rnn_neurons=16, dnn_neurons=16
    ),
    "VanillaNN": lambda: sample(
        f"{LOBES}.VanillaNN:VanillaNN", noise(2, 12, 20), input_shape=[None, None, 20], dnn_neurons=32
    ),
    "FastSpeech2": lambda: sample(
        f"{LOBES}.FastSpeech2:FastSpeech2",
        tokens(2, 8),
        torch.full((2, 8), 2),
        noise(2, 16),
        noise(2, 16),
        **{f"{part}_{name}": value for part in ("enc", "dec") for name, value in SPEAKING.items()},
        normalize_before=False,
        ffn_type="1dcnn",
        ffn_cnn_kernel_size_list=[5, 1],
        n_char=30,
        n_mels=16,
        postnet_embedding_dim=32,
        postnet_kernel_size=5,
        postnet_n_convolutions=3,
        postnet_dropout=0.1,
        padding_idx=0,
        dur_pred_kernel_size=3,
        pitch_pred_kernel_size=3,
        energy_pred_kernel_size=3,
        variance_predictor_dropout=0.1,
    ),
    "Tacotron2": lambda: sample(
        f"{LOBES}.Tacotron2:Tacotron2",
        (tokens(2, 12), lengths(12, 9), noise(2, 16, 10), 10, lengths(10, 8)),
        n_mel_channels=16,
        n_symbols=30,
        symbols_embedding_dim=32,
        encoder_embedding_dim=32,
        attention_rnn_dim=32,
        attention_dim=16,
        attention_location_n_filters=8,
        attention_location_kernel_size=5,
        decoder_rnn_dim=32,
        prenet_dim=16,
        postnet_embedding_dim=32,
    ),
}


def whisper() -> Sample:
    sizes = load("whisper.model:ModelDimensions")(
        n_mels=20,
        n_audio_ctx=24,
        n_audio_state=32,
        n_audio_head=4,
        n_audio_layer=2,
        n_vocab=30,
        n_text_ctx=16,
        n_text_state=32,
        n_text_head=4,
        n_text_layer=2,
    )
    found = sample("whisper.model:Whisper", noise(2, 20, 48), tokens(2, 12), dims=sizes)
    return drawn(found, "decoder.positional_embedding")


def encodec(**options: Any) -> Sample:
    """The encoder and the decoder of Encodec, one behind the other."""
    shape = {"dimension": 32, "n_filters": 8, "ratios": [4, 2], "norm": "time_group_norm", **options}
    ends = [load(f"encodec.modules:SEANet{end}")(**shape) for end in ("Encoder", "Decoder")]
    return Sample(nn.Sequential(*ends), (noise(2, 1, 320),))


def encodec_model() -> Sample:
    shape = {"dimension": 32, "n_filters": 8, "ratios": [4, 2], "norm": "time_group_norm"}
    ends = [load(f"encodec.modules:SEANet{end}")(**shape) for end in ("Encoder", "Decoder")]
    quantizer = load("encodec.quantization:ResidualVectorQuantizer")(dimension=32, n_q=2, bins=16, kmeans_init=False)
    return sample(
        "encodec:EncodecModel",
        noise(2, 1, 320),
        encoder=ends[0],
        decoder=ends[1],
        quantizer=quantizer,
        target_bandwidths=[24.0],
        sample_rate=24000,
        channels=1,
    )


def called(found: Sample) -> Sample:
    """After a call without gradients, weights that were normalized the old way are tensors that can be copied."""
    with torch.no_grad():
        found.model(*found.args, **found.kwargs)
    return found


def vocos() -> Sample:
    backbone = load("vocos.models:VocosBackbone")(input_channels=20, dim=32, intermediate_dim=64, num_layers=2)
    return Sample(nn.Sequential(backbone, load("vocos.heads:ISTFTHead")(32, 32, 8)), (noise(2, 20, 16),))


DEMUCS: dict[str, Any] = {"sources": ["drums", "voice"], "channels": 8, "norm_groups": 2, "samplerate": 8000}
HYBRID: dict[str, Any] = {"nfft": 512, "depth": 3, "t_heads": 4, "segment": 0.256, **DEMUCS}
SOUND: dict[str, Callable[[], Sample]] = {
    "openai-whisper:Whisper": whisper,
    "openai-whisper:AudioEncoder": lambda: sample(
        "whisper.model:AudioEncoder", noise(2, 20, 48), n_mels=20, n_ctx=24, n_state=32, n_head=4, n_layer=2
    ),
    "openai-whisper:TextDecoder": lambda: drawn(
        sample(
            "whisper.model:TextDecoder",
            tokens(2, 12),
            noise(2, 24, 32),
            n_vocab=30,
            n_ctx=16,
            n_state=32,
            n_head=4,
            n_layer=2,
        ),
        "positional_embedding",
    ),
    "encodec:EncodecModel": encodec_model,
    "encodec:SEANet": lambda: encodec(),
    "encodec:SEANet/causal": lambda: encodec(causal=True, norm="none", true_skip=True, n_residual_layers=2),
    "encodec:SEANet/weight_norm": lambda: called(encodec(norm="weight_norm", lstm=0)),
    "encodec:LMModel": lambda: sample(
        "encodec.model:LMModel", tokens(2, 2, 16), n_q=2, card=30, dim=32, num_heads=4, num_layers=2
    ),
    "vocos:VocosBackbone/ISTFTHead": vocos,
    "vocos:VocosBackbone/adanorm": lambda: Sample(
        load("vocos.models:VocosBackbone")(20, 32, 64, 2, adanorm_num_embeddings=4),
        (noise(2, 20, 16),),
        {"bandwidth_id": lengths(1)},
    ),
    "vocos:VocosResNetBackbone": lambda: called(
        sample("vocos.models:VocosResNetBackbone", noise(2, 20, 16), input_channels=20, dim=32, num_blocks=2)
    ),
    "descript-audio-codec:DAC": lambda: called(
        sample(
            "dac:DAC",
            noise(2, 1, 512),
            encoder_dim=8,
            encoder_rates=[2, 4],
            decoder_dim=32,
            decoder_rates=[4, 2],
            n_codebooks=2,
            codebook_size=16,
            codebook_dim=4,
            sample_rate=8000,
        )
    ),
    "demucs:HTDemucs": lambda: sample("demucs.htdemucs:HTDemucs", noise(2, 2, 2048), t_layers=3, **HYBRID),
    "demucs:HDemucs": lambda: sample(
        "demucs.hdemucs:HDemucs", noise(2, 2, 4096), nfft=1024, depth=5, norm_starts=3, **DEMUCS
    ),
    "demucs:Demucs": lambda: sample(
        "demucs.demucs:Demucs", noise(2, 2, 2048), depth=4, lstm_layers=1, norm_starts=2, **DEMUCS
    ),
    "torchcrepe:Crepe": lambda: sample("torchcrepe:Crepe", noise(2, 1024), model="tiny"),
    "soundstream:SoundStream": lambda: sample(
        "soundstream:SoundStream", noise(2, 1, 512), n_q=2, codebook_size=16, D=32, C=4, strides=(2, 2, 2, 4)
    ),
}


# -- images and text --------------------------------------------------------------------------------------------------


SEEN: dict[str, Any] = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
READ: dict[str, Any] = {"context_length": 16, "vocab_size": 30, "width": 32, "heads": 4, "layers": 2}


def clip(
    path: str, seen: dict[str, Any], read: dict[str, Any], size: int = 32, length: int = 16, **options: Any
) -> Sample:
    return sample(
        f"open_clip.{path}",
        images(size),
        tokens(2, length),
        embed_dim=32,
        vision_cfg=load("open_clip.model:CLIPVisionCfg")(**{**SEEN, **seen}),
        text_cfg=load("open_clip.model:CLIPTextCfg")(**{**READ, **read}),
        **options,
    )


def coca() -> Sample:
    writing = load("open_clip.coca_model:MultimodalCfg")(
        context_length=16, vocab_size=30, width=32, heads=4, layers=2, attn_pooler_heads=4
    )
    seen = {"attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 4, "output_tokens": True}
    read = {"embed_cls": True, "output_tokens": True}
    found = clip("coca_model:CoCa", seen, read, length=15, multimodal_cfg=writing)
    return drawn(found, "text_decoder.text_projection")


#: Blocks of another class.
SCALED: dict[str, Any] = {"qk_norm": True, "scale_heads": True, "scale_attn": True, "scale_fc": True}
CLIPS: dict[str, Callable[[], Sample]] = {
    "CLIP": lambda: clip("model:CLIP", {}, {}),
    "CLIP/quick_gelu": lambda: clip("model:CLIP", {"ls_init_value": 0.1}, {"ls_init_value": 0.1}, quick_gelu=True),
    "CLIP/ModifiedResNet": lambda: clip("model:CLIP", {"layers": (1, 2, 1, 1), "width": 16, "image_size": 64}, {}, 64),
    "CLIP/attentional_pool": lambda: clip(
        "model:CLIP",
        {"attentional_pool": True, "attn_pooler_queries": 8, "attn_pooler_heads": 4, "no_ln_pre": True},
        {},
        init_logit_bias=-10.0,
    ),
    "CLIP/scaled": lambda: clip("model:CLIP", SCALED, SCALED),
    "CustomTextCLIP": lambda: clip(
        "model:CustomTextCLIP",
        {"pool_type": "avg", "final_ln_after_pool": True, "pos_embed_type": "sin_cos_2d", "patch_dropout": 0.5},
        {"no_causal_mask": True, "pool_type": "last", "proj_bias": True},
    ),
    "CustomTextCLIP/timm": lambda: clip(
        "model:CustomTextCLIP",
        {"timm_model_name": "test_vit", "timm_proj": "mlp"},
        {"embed_cls": True},
        160,
        15,
    ),
    "CoCa": coca,
}


def yolo(kind: str, configuration: str) -> Sample:
    model = load(f"ultralytics.nn.tasks:{kind}")(configuration, verbose=False)
    return Sample(model, (images(64),))


#: The class and the file with the layers.
YOLO = {
    "yolov3-tiny": "DetectionModel", "yolov5n": "DetectionModel", "yolov6n": "DetectionModel",
    "yolov8n": "DetectionModel", "yolov8n-ghost": "DetectionModel", "yolov9t": "DetectionModel",
    "yolov10n": "DetectionModel", "yolo11n": "DetectionModel", "yolo12n": "DetectionModel",
    "yolo26n": "DetectionModel", "yolov8n-cls": "ClassificationModel", "yolov8n-seg": "SegmentationModel",
    "yolov8n-pose": "PoseModel", "yolo11n-obb": "OBBModel", "yolov8n-rtdetr": "RTDETRDetectionModel",
}  # fmt: skip


T5 = {"vocab_size": 30, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"use_cache": False, "decoder_start_token_id": 0}


def tuned(kind: str, base: str = "Llama", **options: Any) -> Sample:
    """A small language model of transformers with what a method of peft adds to it."""
    import transformers

    if base == "Llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        configuration = transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, use_cache=False, **sizes)
        model = transformers.LlamaForCausalLM(configuration)
    elif base == "Bert":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=30, **sizes))
    else:
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    words = tokens(2, 12)
    labels = lengths(0, 1) if base == "Bert" else words
    adapted = load("peft:get_peft_model")(model, load(f"peft:{kind}Config")(**options))
    return Sample(adapted, (), {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels})


LLAMA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj", "up_proj"]}
PEFT: dict[str, Callable[[], Sample]] = {
    "LoRA": lambda: tuned("Lora", r=4, lora_dropout=0.1, init_lora_weights=False, **LLAMA),
    "DoRA": lambda: tuned("Lora", r=4, use_dora=True, init_lora_weights=False, **LLAMA),
    "LoRA/rslora": lambda: tuned(
        "Lora",
        "Bert",
        r=4,
        use_rslora=True,
        init_lora_weights=False,
        task_type="SEQ_CLS",
        target_modules=["query", "dense", "word_embeddings"],
    ),
    "IA3": lambda: tuned("IA3", "T5", task_type="SEQ_2_SEQ_LM"),
    "PrefixTuning": lambda: tuned("PrefixTuning", num_virtual_tokens=4, prefix_projection=True, task_type="CAUSAL_LM"),
    "PromptEncoder": lambda: tuned(
        "PromptEncoder", "Bert", num_virtual_tokens=4, encoder_hidden_size=16, task_type="SEQ_CLS"
    ),
    "LoHa": lambda: tuned("LoHa", r=4, init_weights=False, **LLAMA),
    "OFT": lambda: tuned("OFT", oft_block_size=8, init_weights=False, **LLAMA),
}


def sentences(*names: str, **options: Any) -> Sample:
    """A pipeline of sentence-transformers behind embeddings of words, which are given as numbers already."""
    modules = "sentence_transformers.sentence_transformer.modules"
    words = [f"w{number}" for number in range(30)]
    tokenizer = load(f"{modules}.tokenizer:WhitespaceTokenizer")(words, do_lower_case=False)
    table = noise(len(words), 16).numpy()
    pipeline = [load(f"{modules}:WordEmbeddings")(tokenizer, table, update_embeddings=True)]
    width = 16
    for name in names:
        pipeline.append(load(f"{modules}:{name}")(width, **options))
        width = pipeline[-1].embeddings_dimension
    pipeline.append(load(f"{modules}:Pooling")(width, pooling_mode=("mean", "max")))
    pipeline.append(load("sentence_transformers.base.modules:Dense")(2 * width, 12))
    model = load("sentence_transformers:SentenceTransformer")(modules=pipeline, device="cpu")
    words_given = {
        "input_ids": tokens(2, 12),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "sentence_lengths": lengths(12, 12),
    }
    return Sample(model, (words_given,))


TEXT: dict[str, Callable[[], Sample]] = {
    "sentence-transformers:CNN": lambda: sentences("CNN", out_channels=8),
    "sentence-transformers:LSTM": lambda: sentences("LSTM", hidden_dim=8),
}


# -- tables -----------------------------------------------------------------------------------------------------------


def tabnet(**options: Any) -> Sample:
    """A table with columns of numbers, of which two may be categories."""
    columns = noise(16, 10)
    columns[:, [1, 3]] = torch.randint(0, 5, (16, 2)).float()
    return sample(
        "pytorch_tabnet.tab_network:TabNet",
        columns,
        input_dim=10,
        output_dim=4,
        virtual_batch_size=8,
        group_attention_matrix=torch.eye(10),
        **options,
    )


TABLES: dict[str, Callable[[], Sample]] = {
    "pytorch-tabnet:TabNet": tabnet,
    "pytorch-tabnet:TabNet/entmax": lambda: tabnet(
        mask_type="entmax", cat_idxs=[1, 3], cat_dims=[5, 7], cat_emb_dim=[3, 3]
    ),
    "pytorch-tabnet:TabNetPretraining": lambda: sample(
        "pytorch_tabnet.tab_network:TabNetPretraining",
        noise(16, 10),
        input_dim=10,
        pretraining_ratio=0.3,
        virtual_batch_size=8,
        group_attention_matrix=torch.eye(10),
    ),
}


#: The columns of the series: what is forecast, and two that are known in advance.
SERIES = ["y", "a", "b"]
COLUMNS: dict[str, Any] = {
    "x_categoricals": [],
    "static_categoricals": [],
    "static_reals": [],
    "time_varying_categoricals_encoder": [],
    "time_varying_categoricals_decoder": [],
    "categorical_groups": {},
    "embedding_sizes": {},
    "embedding_paddings": [],
    "embedding_labels": {},
    "x_reals": SERIES,
    "time_varying_reals_encoder": SERIES,
    "time_varying_reals_decoder": SERIES[1:],
    "dataset_parameters": {"target": "y"},
}


def forecaster(kind: str, loss: str = "MAE", **options: Any) -> Sample:
    """A model of 6 steps after 12 steps of the series."""
    steps = {
        **{f"{part}_cont": noise(2, length, 3) for part, length in (("encoder", 12), ("decoder", 6))},
        **{f"{part}_cat": tokens(2, length, 0) for part, length in (("encoder", 12), ("decoder", 6))},
        **{f"{part}_target": noise(2, length) for part, length in (("encoder", 12), ("decoder", 6))},
        "encoder_lengths": lengths(12, 12),
        "decoder_lengths": lengths(6, 6),
        "target_scale": torch.ones(2, 2),
    }
    transform = load("pytorch_forecasting.data.encoders:TorchNormalizer")(method="identity", center=False)
    return sample(
        f"pytorch_forecasting.models:{kind}",
        steps,
        loss=load(f"pytorch_forecasting.metrics:{loss}")(),
        output_transformer=transform,
        **options,
    )


WINDOW = {"context_length": 12, "prediction_length": 6}
FORECASTERS: dict[str, Callable[[], Sample]] = {
    "NBeats": lambda: forecaster("NBeats", widths=[16, 32], backcast_loss_ratio=0.1, **WINDOW),
    "NHiTS": lambda: forecaster("NHiTS", hidden_size=32, n_blocks=[1, 1, 1], **WINDOW, **COLUMNS),
    "TemporalFusionTransformer": lambda: forecaster(
        "TemporalFusionTransformer", "QuantileLoss", attention_head_size=2, max_encoder_length=12, **COLUMNS
    ),
    "DecoderMLP": lambda: forecaster("DecoderMLP", hidden_size=32, **COLUMNS),
    "TiDEModel": lambda: forecaster(
        "TiDEModel", output_chunk_length=6, input_chunk_length=12, hidden_size=32, use_layer_norm=True, **COLUMNS
    ),
    "TimeXer": lambda: forecaster(
        "TimeXer", hidden_size=32, e_layers=2, d_ff=64, patch_length=4, enc_in=3, **WINDOW, **COLUMNS
    ),
    "xLSTMTime": lambda: forecaster("xLSTMTime", input_size=3, hidden_size=16, output_size=6, num_layers=2),
    "xLSTMTime/mlstm": lambda: forecaster("xLSTMTime", input_size=3, hidden_size=16, output_size=6, xlstm_type="mlstm"),
}


# -- graphs -----------------------------------------------------------------------------------------------------------

NODES = 24


def edges() -> torch.Tensor:
    """A circle, which leaves no node alone, and some more edges, in both directions."""
    circle = torch.arange(NODES)
    pairs = torch.cat([torch.stack([circle, circle.roll(1)]), torch.randint(0, NODES, (2, NODES))], dim=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    return torch.cat([pairs, pairs.flip(0)], dim=1)


def graph(path: str, *more: Any, **options: Any) -> Sample:
    return sample(f"torch_geometric.nn:{path}", noise(NODES, 16), edges(), *more, **options)


def stack(arguments: str, layer: Callable[[], nn.Module], *more: Any) -> Sample:
    """Two layers with a normalization and an activation between them."""
    between = [(load("torch_geometric.nn:BatchNorm")(32), "x -> x"), nn.ReLU()]
    layers = [(layer(), f"{arguments} -> x"), *between, (layer(), f"{arguments} -> x"), nn.Linear(32, 4)]
    model = load("torch_geometric.nn:Sequential")(arguments, layers)
    return Sample(model, (noise(NODES, 32), *more))


def convolution(kind: str, *args: Any, **options: Any) -> Sample:
    return stack("x, edge_index", lambda: load(f"torch_geometric.nn:{kind}")(*args, **options), edges())


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def with_attributes(layer: Callable[[], nn.Module]) -> Sample:
    ends = edges()
    return stack("x, edge_index, edge_attr", layer, ends, noise(ends.shape[1], 8))


def all_pairs(positions: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of atoms of the same molecule, and their distances."""
    near = (batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)
    row, column = near.nonzero().t()
    return torch.stack([row, column]), (positions[row] - positions[column]).norm(dim=-1)


def attentive() -> Sample:
    ends = edges()
    return graph(
        "AttentiveFP",
        noise(ends.shape[1], 8),
        torch.arange(NODES) // 12,
        in_channels=16,
        hidden_channels=32,
        out_channels=4,
        edge_dim=8,
        num_layers=2,
        num_timesteps=2,
        dropout=0.1,
    )


#: The models of one scheme by their names here: the class and its options.
BASIC: dict[str, tuple[str, dict[str, Any]]] = {
    "GCN": ("GCN", {"norm": "batch_norm", "dropout": 0.1}),
    "GCN/jk": ("GCN", {"jk": "cat", "act": "gelu", "norm": "layer_norm", "act_first": True}),
    "GraphSAGE": ("GraphSAGE", {"norm": "graph_norm", "aggr": "mean"}),
    "GraphSAGE/jk": ("GraphSAGE", {"jk": "lstm", "project": True, "aggr": "max"}),
    "GIN": ("GIN", {"norm": "pair_norm", "train_eps": True}),
    "GAT": ("GAT", {"heads": 4, "dropout": 0.1, "act": "elu"}),
    "GAT/v2": ("GAT", {"heads": 4, "v2": True, "norm": "instance_norm"}),
    "PNA": ("PNA", {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"], "deg": None}),
    "EdgeCNN": ("EdgeCNN", {"norm": "layer_norm", "act": "leaky_relu"}),
}


def basic(name: str) -> Sample:
    kind, options = BASIC[name]
    if "deg" in options:
        options = {**options, "deg": lengths(0, 2, 6, 8, 6, 2)}
    return graph(kind, in_channels=16, hidden_channels=32, num_layers=3, out_channels=4, **options)


def deep() -> Sample:
    def layer() -> nn.Module:
        parts = [load(f"torch_geometric.nn:{name}") for name in ("GENConv", "LayerNorm")]
        return load("torch_geometric.nn:DeepGCNLayer")(
            parts[0](32, 32, aggr="softmax", t=1.0, learn_t=True), parts[1](32), nn.ReLU(), block="res+", dropout=0.1
        )

    return stack("x, edge_index", layer, edges())


GRAPHS: dict[str, Callable[[], Sample]] = {
    **{name: partial(basic, name) for name in BASIC},
    "GPSConv": lambda: stack(
        "x, edge_index",
        lambda: load("torch_geometric.nn:GPSConv")(
            32, load("torch_geometric.nn:GINConv")(perceptron(32, 32, 32)), heads=4, dropout=0.1
        ),
        edges(),
    ),
    "GPSConv/performer": lambda: stack(
        "x, edge_index",
        lambda: load("torch_geometric.nn:GPSConv")(
            32, load("torch_geometric.nn:GCNConv")(32, 32), heads=4, attn_type="performer", norm="layer_norm"
        ),
        edges(),
    ),
    "TransformerConv": lambda: with_attributes(
        lambda: load("torch_geometric.nn:TransformerConv")(32, 8, heads=4, beta=True, edge_dim=8, dropout=0.1)
    ),
    "GINEConv": lambda: with_attributes(
        lambda: load("torch_geometric.nn:GINEConv")(perceptron(32, 48, 32), train_eps=True, edge_dim=8)
    ),
    "NNConv": lambda: with_attributes(
        lambda: load("torch_geometric.nn:NNConv")(32, 32, perceptron(8, 16, 1024), aggr="mean")
    ),
    "ChebConv": lambda: convolution("ChebConv", 32, 32, K=3),
    "ResGatedGraphConv": lambda: convolution("ResGatedGraphConv", 32, 32),
    "GatedGraphConv": lambda: convolution("GatedGraphConv", 32, num_layers=3),
    "PointNetConv": lambda: stack(
        "x, pos, edge_index",
        lambda: load("torch_geometric.nn:PointNetConv")(perceptron(35, 48, 32), perceptron(32, 32)),
        noise(NODES, 3),
        edges(),
    ),
    "DeepGCNLayer": deep,
    "GraphUNet": lambda: graph("GraphUNet", in_channels=16, hidden_channels=32, out_channels=4, depth=3),
    "AttentiveFP": attentive,
    "LINKX": lambda: graph(
        "LINKX", num_nodes=NODES, in_channels=16, hidden_channels=32, out_channels=4, num_layers=2, dropout=0.1
    ),
    "SGFormer": lambda: graph(
        "SGFormer", torch.arange(NODES) // 12, in_channels=16, hidden_channels=32, out_channels=4, trans_num_heads=2
    ),
    "Polynormer": lambda: graph(
        "Polynormer",
        torch.arange(NODES) // 12,
        in_channels=16,
        hidden_channels=16,
        out_channels=4,
        local_layers=2,
        heads=2,
        pre_ln=True,
    ),
    "SchNet": lambda: sample(
        "torch_geometric.nn:SchNet",
        torch.randint(1, 10, (NODES,)),
        noise(NODES, 3),
        torch.arange(NODES) // 12,
        hidden_channels=32,
        num_filters=32,
        num_interactions=2,
        num_gaussians=16,
        interaction_graph=all_pairs,
    ),
}

MODELS: dict[str, Callable[[], Sample]] = {
    **{f"torchaudio:{name}": builder for name, builder in TORCHAUDIO.items()},
    **{f"speechbrain:{name}": builder for name, builder in SPEECHBRAIN.items()},
    **SOUND,
    **{f"open_clip_torch:{name}": builder for name, builder in CLIPS.items()},
    **{f"ultralytics:{kind}/{name}": partial(yolo, kind, f"{name}.yaml") for name, kind in YOLO.items()},
    "rtdetr:RTDETRNet": lambda: sample(
        "rtdetr.nn:RTDETRNet",
        images(64),
        variant="r18",
        num_classes=4,
        num_queries=20,
        hidden_dim=64,
        pretrained_backbone=False,
    ),
    **{f"peft:{name}": builder for name, builder in PEFT.items()},
    **TEXT,
    **TABLES,
    **{f"pytorch-forecasting:{name}": builder for name, builder in FORECASTERS.items()},
    **{f"torch_geometric:{name}": builder for name, builder in GRAPHS.items()},
}
