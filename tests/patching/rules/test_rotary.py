"""The rotary function of an attention: what is found, and what is left."""

from __future__ import annotations

import inspect

import pytest
import torch

from fastlayers.patching import patch_model
from tests.patching.harness import fused, undone

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_rotary_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name.title()}Config")(**SIZES, num_key_value_heads=2, head_dim=8)
    model = getattr(transformers, f"{name.title()}ForCausalLM")(config)
    attention = model.model.layers[0].self_attn
    scope = inspect.unwrap(type(attention).forward).__globals__
    names, rotate = set(scope), scope["apply_rotary_pos_emb"]
    assert fused(attention) == {"rotary": 1}
    undone(model, torch.randint(0, 60, (2, 7)))
    assert set(scope) == names
    assert scope["apply_rotary_pos_emb"] is rotate
    patch_model(model)
    assert type(attention) is type(model.model.layers[1].self_attn)
    calls_seen = []
    try:
        scope["apply_rotary_pos_emb"] = lambda *args: calls_seen.append(1) or rotate(*args)
        model(torch.randint(0, 60, (2, 7)))
    finally:
        scope["apply_rotary_pos_emb"] = rotate
    assert calls_seen == [1, 1]


def test_no_rotary_of_another_casting():
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo2Config(**SIZES)
    model = transformers.Olmo2ForCausalLM(config)
    assert not fused(model.model.layers[0].self_attn)
