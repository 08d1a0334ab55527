"""Models of packages for sound, small and with random weights: see :mod:`tests.corpus.models`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.corpus.models import Sample
from tests.corpus.packages.calls import drawn, lengths, load, noise, sample, tokens

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

MODELS: dict[str, Callable[[], Sample]] = {
    **{f"torchaudio:{name}": builder for name, builder in TORCHAUDIO.items()},
    **{f"speechbrain:{name}": builder for name, builder in SPEECHBRAIN.items()},
    **SOUND,
}
