"""Language models of transformers, and steps of their training."""

from __future__ import annotations

import copy

import pytest
import torch

from fastlayers.patching import patch_model
from fastlayers.patching.runtime.lazy import LazyTensor
from tests.harness import assert_no_worse

VOCABULARY = 61
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = {
    "Llama": SMALL,
    "Mistral": SMALL,
    "Qwen2": SMALL,
    "Qwen3": SMALL,
    "Gemma": SMALL,
    "Gemma2": {**SMALL, "final_logit_softcapping": 0.5},
    "Phi": SMALL,
    "GPTNeoX": SMALL,
    "Cohere": {**SMALL, "logit_scale": 0.25},
    "Granite": {**SMALL, "logits_scaling": 3.0},
    "Olmo": SMALL,
    "Mixtral": {**SMALL, "output_router_logits": True, "experts_implementation": "eager"},
    "OPT": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "GPT2LMHead": GPT,
    "GPTJ": {**GPT, "rotary_dim": 8},
    "Bloom": SMALL,
}


def causal_model(family="Llama", **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family.removesuffix('LMHead')}Config")(**{**CAUSAL[family], **options})
    torch.manual_seed(0)
    name = f"{family}Model" if family.endswith("LMHead") else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def twins(stock):
    """A patched copy of a model, and the model."""
    return patch_model(copy.deepcopy(stock)), stock


def batch(seed=1):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, **kwargs):
    """The loss and the gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**{**batch(), **kwargs})
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def is_lazy(logits):
    return isinstance(logits, LazyTensor)


def assert_same_step(model, twin, **kwargs):
    output, gradients = step(model, **kwargs)

    def answer(model):
        output, gradients = step(model, **kwargs)
        return output.loss, gradients

    assert_no_worse((output.loss, gradients), answer, twin)
    return output


def hook(module, args, output):
    return output * 2
