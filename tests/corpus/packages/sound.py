"""Models of packages for sound, small and with random weights: see :mod:`tests.corpus.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample
from tests.corpus.packages.recipes import Recipe, build, drawn, load, models, noise, numbers, words

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
TORCHAUDIO: dict[str, Recipe] = {
    "wav2vec2_model as Wav2Vec2Model": (
        WAVES | {"extractor_mode": "group_norm", "encoder_layer_norm_first": False, "aux_num_out": 10},
        lambda: noise(2, 800),
    ),
    "wav2vec2_model as Wav2Vec2Model/layer_norm_first": (
        WAVES | {"extractor_mode": "layer_norm", "encoder_layer_norm_first": True, "aux_num_out": None},
        lambda: (noise(2, 800), numbers(800, 600)),
    ),
    "wavlm_model as Wav2Vec2Model/wavlm": (
        WAVES
        | {"extractor_mode": "group_norm", "encoder_layer_norm_first": False, "encoder_num_buckets": 16}
        | {"encoder_max_distance": 32, "aux_num_out": None},
        lambda: noise(2, 800),
    ),
    "Conformer": (CONFORMER | {"dropout": 0.1}, lambda: (noise(2, 32, 32), numbers(32, 20))),
    "Conformer/convolution_first": (
        CONFORMER | {"use_group_norm": True, "convolution_first": True},
        lambda: (noise(2, 32, 32), numbers(32, 20)),
    ),
    "Emformer": (
        TRANSFORMER
        | {"segment_length": 8, "left_context_length": 4, "right_context_length": 4, "max_memory_size": 2}
        | {"dropout": 0.1},
        lambda: (noise(2, 36, 32), numbers(36, 24)),
    ),
    "emformer_rnnt_model as RNNT": (
        TRANSDUCER,
        lambda: (noise(2, 36, 16), numbers(36, 24), words(2, 8).int(), numbers(8, 5).int()),
    ),
    "ConvTasNet": (
        {"enc_num_feats": 32, "msk_num_feats": 16, "msk_num_hidden_feats": 32, "msk_num_layers": 3}
        | {"msk_num_stacks": 2},
        lambda: noise(2, 1, 400),
    ),
    "DeepSpeech": ({"n_feature": 16, "n_hidden": 32, "n_class": 10, "dropout": 0.1}, lambda: noise(2, 1, 30, 16)),
    "Wav2Letter": ({"num_classes": 10}, lambda: noise(2, 1, 1600)),
    "Tacotron2": (
        {"n_mels": 16, "n_symbol": 30, "symbol_embedding_dim": 32, "encoder_embedding_dim": 32, "decoder_rnn_dim": 32}
        | {"attention_rnn_dim": 32, "attention_hidden_dim": 16, "attention_location_n_filter": 8}
        | {"attention_location_kernel_size": 5, "prenet_dim": 16, "postnet_embedding_dim": 32},
        lambda: (words(2, 12), numbers(12, 9), noise(2, 16, 10), numbers(10, 8)),
    ),
    "WaveRNN": (
        {"upsample_scales": [4, 4], "n_classes": 16, "hop_length": 16, "n_res_block": 2, "n_rnn": 32, "n_fc": 32}
        | {"n_freq": 16, "n_hidden": 16, "n_output": 16},
        lambda: (noise(2, 1, 96), noise(2, 1, 16, 10)),
    ),
    "HDemucs": (
        {"sources": ["drums", "voice"], "channels": 8, "nfft": 1024, "depth": 5, "norm_starts": 3, "norm_groups": 2},
        lambda: noise(2, 2, 4096),
    ),
    "squim_objective_model as SquimObjective": (
        {"feat_dim": 32, "win_len": 32, "d_model": 16, "nhead": 4, "hidden_dim": 32, "num_blocks": 2}
        | {"rnn_type": "LSTM", "chunk_size": 15},
        lambda: noise(2, 1600),
    ),
}

LOBES = "speechbrain.lobes.models"


def pair(path: str, **options: Any) -> list[nn.Module]:
    """Two blocks of speechbrain with these options."""
    return [load(f"{LOBES}.{path}")(**options) for _ in range(2)]


def relative(encoder: str, **options: Any) -> Sample:
    """An encoder of speechbrain, which is given embeddings of the relative positions."""
    inputs = noise(2, 24, 32)
    positions = load("speechbrain.nnet.attention:RelPosEncXL")(32)(inputs)
    model = load(f"{LOBES}.transformer.{encoder}")(num_layers=2, d_model=32, nhead=4, kernel_size=7, **options)
    return Sample(model, (inputs,), {"pos_embs": positions})


def dual_path() -> Sample:
    intra, inter = pair("dual_path:SBRNNBlock", input_size=16, hidden_channels=16, num_layers=1)
    shape = {"in_channels": 32, "out_channels": 16, "num_layers": 2, "K": 10, "norm": "gln"}
    options = {"intra_model": intra, "inter_model": inter, **shape}
    return build(f"{LOBES}.dual_path:Dual_Path_Model", options, lambda: noise(2, 32, 60), fill=False)


def separator() -> Sample:
    block = "resepformer:SBTransformerBlock_wnormandskip"
    segments, memory = pair(block, num_layers=1, d_model=32, nhead=4, d_ffn=64)
    shape = {"input_dim": 32, "layer": 2, "unit": 32, "segment_size": 8, "mem_type": "av"}
    options = {"seg_model": segments, "mem_model": memory, **shape}
    return build(f"{LOBES}.resepformer:ResourceEfficientSeparator", options, lambda: noise(2, 32, 48), fill=False)


CRDNN: dict[str, Any] = {"input_shape": [None, None, 20], "cnn_channels": [8, 16], "rnn_layers": 2, "rnn_neurons": 16}
CRDNN |= {"dnn_neurons": 16}


def crdnn_of_lstm() -> Sample:
    options = {"time_pooling": True, "using_2d_pooling": True, "projection_dim": 12}
    options |= {"rnn_class": load("speechbrain.nnet.RNN:LSTM")}
    return build(f"{LOBES}.CRDNN:CRDNN", CRDNN | options, lambda: noise(2, 24, 20), fill=False)


MASKS = {"N": 32, "B": 16, "H": 32, "P": 3, "X": 3, "R": 2, "C": 2}
RECOGNISER: dict[str, Any] = {
    "d_model": 32,
    "nhead": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "d_ffn": 64,
    "kernel_size": 7,
} | {"tgt_vocab": 30, "input_size": 20}


def spoken() -> tuple[torch.Tensor, ...]:
    """Features of speech, the words, and the share of each sample that is no padding."""
    return noise(2, 24, 20), words(2, 8), torch.tensor([1.0, 0.75])


#: Of the encoder and of the decoder of FastSpeech 2.
SPEAKING = {"num_layers": 2, "num_head": 2, "d_model": 32, "ffn_dim": 64, "k_dim": 32, "v_dim": 32, "dropout": 0.1}
SPEECHBRAIN: dict[str, Recipe] = {
    "ECAPA_TDNN.ECAPA_TDNN": (
        {"input_size": 40, "channels": [32, 32, 32, 32, 96], "attention_channels": 16, "res2net_scale": 4}
        | {"se_channels": 16, "lin_neurons": 24},
        lambda: (noise(2, 50, 40), torch.tensor([1.0, 0.8])),
    ),
    "Xvector.Xvector": (
        {"in_channels": 40, "tdnn_channels": [32, 32, 32, 32, 64], "lin_neurons": 32},
        lambda: noise(2, 50, 40),
    ),
    "CRDNN.CRDNN": (CRDNN, lambda: noise(2, 24, 20)),
    "ContextNet.ContextNet": (
        {"input_shape": [None, None, 20], "out_channels": 24, "conv_channels": [16, 16, 32], "strides": [1, 2, 1]}
        | {"num_blocks": 3, "num_layers": 2, "inner_dim": 8, "residuals": [True, True, True]},
        lambda: noise(2, 32, 20),
    ),
    "ResNet.ResNet": (
        {"input_size": 32, "channels": [8, 8, 16, 16], "block_sizes": [1, 2, 1, 1], "lin_neurons": 16},
        lambda: noise(2, 32, 32),
    ),
    "HifiGAN.HifiganGenerator": (
        {"in_channels": 20, "out_channels": 1, "resblock_type": "1", "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]]}
        | {"resblock_kernel_sizes": [3, 5], "upsample_kernel_sizes": [8, 8], "upsample_initial_channel": 32}
        | {"upsample_factors": [4, 4]},
        lambda: noise(2, 20, 12),
    ),
    "MetricGAN.EnhancementGenerator": ({}, lambda: (noise(2, 20, 257), torch.ones(2))),
    "MetricGAN.MetricDiscriminator": ({"base_channels": 8}, lambda: noise(2, 2, 40, 40)),
    "conv_tasnet.MaskNet": (MASKS, lambda: noise(2, 32, 40)),
    "conv_tasnet.MaskNet/causal": (
        MASKS | {"norm_type": "cLN", "causal": True, "mask_nonlinear": "softmax"},
        lambda: noise(2, 32, 40),
    ),
    "transformer.TransformerASR.TransformerASR": (RECOGNISER | {"causal": True}, spoken),
    "transformer.TransformerASR.TransformerASR/conformer": (
        RECOGNISER
        | {"encoder_module": "conformer", "causal": False, "attention_type": "RelPosMHAXL", "normalize_before": True},
        spoken,
    ),
    "dual_path.SepformerWrapper": (
        {"encoder_out_nchannels": 32, "masknet_chunksize": 16, "masknet_numlayers": 1, "intra_numlayers": 2}
        | {"inter_numlayers": 2, "intra_nhead": 4, "inter_nhead": 4, "intra_dffn": 64, "inter_dffn": 64},
        lambda: noise(2, 400),
    ),
    "transformer.TransformerLM.TransformerLM": (
        {"vocab": 30, "d_model": 32, "nhead": 4, "num_encoder_layers": 2, "d_ffn": 64, "d_embedding": 24},
        lambda: words(2, 16),
    ),
    "transformer.TransformerSE.CNNTransformerSE": (
        {"d_model": 33, "output_size": 33, "nhead": 3, "num_layers": 2, "d_ffn": 64},
        lambda: noise(2, 20, 33),
    ),
    "DiffWave.DiffWave": (
        {"input_channels": 80, "residual_layers": 4, "residual_channels": 16, "dilation_cycle_length": 2}
        | {"total_steps": 50},
        lambda: (noise(2, 1, 512), numbers(3, 40), noise(2, 80, 2)),
    ),
    "EnhanceResnet.EnhanceResnet": (
        {"n_fft": 64, "win_length": 4, "hop_length": 2, "channel_counts": [8, 8, 16], "dense_nodes": 32},
        lambda: noise(2, 2000),
    ),
    "RNNLM.RNNLM": (
        {"output_neurons": 30, "embedding_dim": 16, "rnn_neurons": 16, "dnn_neurons": 16},
        lambda: words(2, 12),
    ),
    "VanillaNN.VanillaNN": ({"input_shape": [None, None, 20], "dnn_neurons": 32}, lambda: noise(2, 12, 20)),
    "FastSpeech2.FastSpeech2": (
        {f"{part}_{name}": value for part in ("enc", "dec") for name, value in SPEAKING.items()}
        | {f"{part}_pred_kernel_size": 3 for part in ("dur", "pitch", "energy")}
        | {"normalize_before": False, "ffn_type": "1dcnn", "ffn_cnn_kernel_size_list": [5, 1], "n_char": 30}
        | {"n_mels": 16, "postnet_embedding_dim": 32, "postnet_kernel_size": 5, "postnet_n_convolutions": 3}
        | {"postnet_dropout": 0.1, "padding_idx": 0, "variance_predictor_dropout": 0.1},
        lambda: (words(2, 8), torch.full((2, 8), 2), noise(2, 16), noise(2, 16)),
    ),
    "Tacotron2.Tacotron2": (
        {"n_mel_channels": 16, "n_symbols": 30, "symbols_embedding_dim": 32, "encoder_embedding_dim": 32}
        | {"attention_rnn_dim": 32, "attention_dim": 16, "attention_location_n_filters": 8}
        | {"attention_location_kernel_size": 5, "decoder_rnn_dim": 32, "prenet_dim": 16, "postnet_embedding_dim": 32},
        lambda: ((words(2, 12), numbers(12, 9), noise(2, 16, 10), 10, numbers(10, 8)),),
    ),
}


def whisper() -> Sample:
    names = ("state", "head", "layer")
    sides = {f"n_{side}_{name}": n for side in ("audio", "text") for name, n in zip(names, (32, 4, 2), strict=True)}
    contexts = {"n_mels": 20, "n_audio_ctx": 24, "n_vocab": 30, "n_text_ctx": 16}
    sizes = load("whisper.model:ModelDimensions")(**sides, **contexts)
    found = build("whisper.model:Whisper", {"dims": sizes}, lambda: (noise(2, 20, 48), words(2, 12)), fill=False)
    return drawn(found, "decoder.positional_embedding")


WHISPER = {"n_state": 32, "n_head": 4, "n_layer": 2}


def whispered() -> Sample:
    options, inputs = WHISPER | {"n_vocab": 30, "n_ctx": 16}, lambda: (words(2, 12), noise(2, 24, 32))
    return drawn(build("whisper.model:TextDecoder", options, inputs, fill=False), "positional_embedding")


def encodec_ends(**options: Any) -> list[nn.Module]:
    """The encoder and the decoder of Encodec."""
    shape = {"dimension": 32, "n_filters": 8, "ratios": [4, 2], "norm": "time_group_norm", **options}
    return [load(f"encodec.modules:SEANet{end}")(**shape) for end in ("Encoder", "Decoder")]


def encodec(**options: Any) -> Sample:
    """One behind the other."""
    return Sample(nn.Sequential(*encodec_ends(**options)), (noise(2, 1, 320),))


def encodec_model() -> Sample:
    encoder, decoder = encodec_ends()
    quantizer = load("encodec.quantization:ResidualVectorQuantizer")(dimension=32, n_q=2, bins=16, kmeans_init=False)
    parts = {"encoder": encoder, "decoder": decoder, "quantizer": quantizer}
    options = {"target_bandwidths": [24.0], "sample_rate": 24000, "channels": 1}
    return build("encodec:EncodecModel", parts | options, lambda: noise(2, 1, 320), fill=False)


def called(found: Sample) -> Sample:
    """After a call without gradients, weights that were normalized the old way are tensors that can be copied."""
    with torch.no_grad():
        found.model(*found.args, **found.kwargs)
    return found


def vocos() -> Sample:
    backbone = load("vocos.models:VocosBackbone")(input_channels=20, dim=32, intermediate_dim=64, num_layers=2)
    return Sample(nn.Sequential(backbone, load("vocos.heads:ISTFTHead")(32, 32, 8)), (noise(2, 20, 16),))


def vocos_of_bandwidths() -> Sample:
    backbone = load("vocos.models:VocosBackbone")(20, 32, 64, 2, adanorm_num_embeddings=4)
    return Sample(backbone, (noise(2, 20, 16),), {"bandwidth_id": numbers(1)})


def vocos_of_convolutions() -> Sample:
    options = {"input_channels": 20, "dim": 32, "num_blocks": 2}
    return called(build("vocos.models:VocosResNetBackbone", options, lambda: noise(2, 20, 16), fill=False))


def codec() -> Sample:
    sides = {"encoder_dim": 8, "encoder_rates": [2, 4], "decoder_dim": 32, "decoder_rates": [4, 2]}
    options = {"n_codebooks": 2, "codebook_size": 16, "codebook_dim": 4, "sample_rate": 8000, **sides}
    return called(build("dac:DAC", options, lambda: noise(2, 1, 512), fill=False))


DEMUCS: dict[str, Any] = {"sources": ["drums", "voice"], "channels": 8, "norm_groups": 2, "samplerate": 8000}
HYBRID: dict[str, Any] = {"nfft": 512, "depth": 3, "t_heads": 4, "segment": 0.256, **DEMUCS}
#: By package and module.
PACKAGES: dict[tuple[str, str], dict[str, Recipe]] = {
    ("torchaudio", "torchaudio.models"): TORCHAUDIO,
    ("speechbrain", LOBES): SPEECHBRAIN,
    ("openai-whisper", "whisper.model"): {
        "AudioEncoder": (WHISPER | {"n_mels": 20, "n_ctx": 24}, lambda: noise(2, 20, 48)),
    },
    ("encodec", "encodec.model"): {
        "LMModel": ({"n_q": 2, "card": 30, "dim": 32, "num_heads": 4, "num_layers": 2}, lambda: words(2, 2, 16)),
    },
    ("demucs", "demucs"): {
        "htdemucs.HTDemucs": (HYBRID | {"t_layers": 3}, lambda: noise(2, 2, 2048)),
        "hdemucs.HDemucs": (DEMUCS | {"nfft": 1024, "depth": 5, "norm_starts": 3}, lambda: noise(2, 2, 4096)),
        "demucs.Demucs": (DEMUCS | {"depth": 4, "lstm_layers": 1, "norm_starts": 2}, lambda: noise(2, 2, 2048)),
    },
    ("torchcrepe", "torchcrepe"): {"Crepe": ({"model": "tiny"}, lambda: noise(2, 1024))},
    ("soundstream", "soundstream"): {
        "SoundStream": (
            {"n_q": 2, "codebook_size": 16, "D": 32, "C": 4, "strides": (2, 2, 2, 4)},
            lambda: noise(2, 1, 512),
        ),
    },
}

MODELS: dict[str, Callable[[], Sample]] = {
    name: builder
    for (package, module), recipes in PACKAGES.items()
    for name, builder in models(package, module, recipes, fill=False).items()
}
MODELS |= {
    "speechbrain:CRDNN/LSTM": crdnn_of_lstm,
    "speechbrain:Dual_Path_Model": dual_path,
    "speechbrain:ResourceEfficientSeparator": separator,
    "speechbrain:ConformerEncoder": lambda: relative("Conformer:ConformerEncoder", d_ffn=64, dropout=0.1),
    "speechbrain:BranchformerEncoder": lambda: relative(
        "Branchformer:BranchformerEncoder", csgu_linear_units=64, dropout=0.1
    ),
    "openai-whisper:Whisper": whisper,
    "openai-whisper:TextDecoder": whispered,
    "encodec:EncodecModel": encodec_model,
    "encodec:SEANet": encodec,
    "encodec:SEANet/causal": lambda: encodec(causal=True, norm="none", true_skip=True, n_residual_layers=2),
    "encodec:SEANet/weight_norm": lambda: called(encodec(norm="weight_norm", lstm=0)),
    "vocos:VocosBackbone/ISTFTHead": vocos,
    "vocos:VocosBackbone/adanorm": vocos_of_bandwidths,
    "vocos:VocosResNetBackbone": vocos_of_convolutions,
    "descript-audio-codec:DAC": codec,
}
