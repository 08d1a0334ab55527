"""torch.compile(backend="fastlayers") of whole models: what is fused in them, and the steps that they take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from fastlayers.patching import compile_report, dynamo_backend
from tests.harness import assert_no_worse
from tests.patching.test_dynamo import tensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}
IDS = {"input_ids": torch.arange(1, 13).view(2, 6)}
PIXELS = {"pixel_values": tensor(2, 3, 32, 32, grad=False)}
DECODED = {"decoder_input_ids": IDS["input_ids"]}
LLAMA = {"add_rms_norm": 4, "forked_rms_norm": 1, "rotary": 2, "softmax": 2, "gated_linear": 2}
GEMMA = {"add_rms_norm": 4, "forked_rms_norm": 1, "rotary": 2, "softmax": 2, "gated_linear": 2}

#: Model, the sizes in its configuration, its inputs, and what is fused in training.
TRANSFORMERS = {
    "bert": ("BertModel", SIZES, IDS, {"add_layer_norm": 5, "softmax": 2, "mlp": 2, "linear": 9}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50},
        IDS,
        {"add_layer_norm": 4, "forked_layer_norm": 1, "softmax": 2, "gelu_tanh": 2, "linear": 8, "split": 2},
    ),
    "llama": ("LlamaForCausalLM", GROUPED, {**IDS, "labels": IDS["input_ids"]}, {**LLAMA, "cross_entropy": 1}),
    "mistral": ("MistralForCausalLM", GROUPED, IDS, LLAMA),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, IDS, {**LLAMA, "linear": 6}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED, IDS, {**LLAMA, "rms_norm": 4}),
    "gemma": ("GemmaForCausalLM", GROUPED, IDS, GEMMA),
    "gemma2": ("Gemma2ForCausalLM", GROUPED, IDS, {**GEMMA, "rms_norm": 4}),
    "olmo2": (
        "Olmo2ForCausalLM",
        {**SIZES, "num_key_value_heads": 2},
        IDS,
        {"add_rms_norm": 1, "rms_norm": 8, "rotary": 2, "softmax": 2, "gated_linear": 2},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50},
        {**IDS, **DECODED},
        {"add_rms_norm": 10, "forked_rms_norm": 2, "softmax": 6},
    ),
    "opt": (
        "OPTForCausalLM",
        {
            **{"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50},
            "word_embed_proj_dim": 32,
        },
        IDS,
        {
            "add_layer_norm": 1,
            "forked_layer_norm": 3,
            "layer_norm": 1,
            "softmax": 2,
            "dropout_add": 4,
            "mlp": 2,
            "linear": 8,
        },
    ),
    "phi": (
        "PhiForCausalLM",
        SIZES,
        IDS,
        {
            "add_layer_norm": 2,
            "forked_layer_norm": 1,
            "rotary": 2,
            "softmax": 2,
            "mlp": 2,
            "linear": 9,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50},
        IDS,
        {"add_layer_norm": 4, "forked_layer_norm": 1, "layer_norm": 1, "softmax": 2, "linear": 8},
    ),
    "vit": (
        "ViTForImageClassification",
        IMAGES,
        PIXELS,
        {"add_layer_norm": 4, "forked_layer_norm": 1, "softmax": 2, "mlp": 2, "linear": 9},
    ),
    "clip": (
        "CLIPVisionModel",
        IMAGES,
        PIXELS,
        {"add_layer_norm": 4, "forked_layer_norm": 1, "layer_norm": 1, "softmax": 2, "mlp": 2, "linear": 8},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 50, "num_mel_bins": 8},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
            **{"decoder_ffn_dim": 64, "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
        {"input_features": tensor(2, 8, 40, grad=False), **DECODED},
        {"add_layer_norm": 10, "forked_layer_norm": 2, "softmax": 6, "mlp": 4, "gelu": 2, "linear": 18},
    ),
}


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple | list) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def check_model(model, kwargs, counts, seed=0, modes=(True, False)):
    """Outputs, gradients and buffers, in training with the same random numbers and in eval."""
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=dynamo_backend)
    breaks = counters["graph_break"]
    breaks.clear()

    def answer(model, kwargs):
        model.zero_grad()
        torch.manual_seed(seed)
        outputs = [y for y in tensors_of(model(**kwargs)) if y.is_floating_point()]
        sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs).backward()
        return outputs, [p.grad for p in model.parameters()], list(model.buffers())

    for training in modes:
        model.train(training), twin.train(training)
        found = answer(compiled, kwargs)
        if training:
            # OPT of transformers before 5.23 asks a number that it draws whether to drop a layer. There the graph
            # breaks, and what follows is compiled once for all layers.
            counted = compile_report().counts()
            assert set(counted) <= set(counts) if breaks else counted == counts
        assert_no_worse(found, answer, twin, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_transformers(family):
    transformers = pytest.importorskip("transformers")
    name, sizes, kwargs, counts = TRANSFORMERS[family]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**sizes, attn_implementation="eager", use_cache=False))
    with torch.no_grad():
        for parameter in model.parameters():  # norms start as ones, biases as zeros: no test of them
            parameter.add_(torch.randn_like(parameter) * 0.1)
    # Eval takes as long again, and what it changes in a graph, the dropouts, is alike in these models.
    modes = (True, False) if list(TRANSFORMERS).index(family) % 2 == 0 else (True,)
    check_model(model, kwargs, counts, modes=modes)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers(reentrant):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager", use_cache=False, attention_dropout=0.2)
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    counts = {"add_rms_norm": 2, "forked_rms_norm": 2, "rms_norm": 1, "rotary": 2, "softmax": 2, "gated_linear": 2}
    check_model(model, IDS, counts)


TIMM = {
    "resnet18": ({}, {"batch_norm_act": 9, "batch_norm_add_act": 8, "batch_norm": 3, "linear": 1}),
    "convnext_atto": ({"drop_path_rate": 0.2}, {"channel_layer_norm": 17, "gelu": 12, "scale_add": 12, "linear": 1}),
    "vit_tiny_patch16_224": (
        {"img_size": 32, "drop_path_rate": 0.2},
        {"add_layer_norm": 24, "forked_layer_norm": 1, "mlp": 12, "linear": 25, "split": 12},
    ),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    timm = pytest.importorskip("timm")
    options, counts = TIMM[name]
    check_model(timm.create_model(name, pretrained=False, **options), {"x": tensor(4, 3, 32, 32, grad=False)}, counts)
