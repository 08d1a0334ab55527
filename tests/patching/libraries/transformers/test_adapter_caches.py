"""Layers that are given a cache, in training, which makes one, and in generation."""

from __future__ import annotations

import copy

import pytest
import torch

import fastlayers
from fastlayers.patching.libraries.transformers.adapter import CACHES

transformers = pytest.importorskip("transformers")
caches = pytest.importorskip(CACHES)
if not hasattr(caches, "DynamicLayer"):
    pytest.skip("caches of this version have other attributes", allow_module_level=True)

MODELS = {"Llama": {}, "Mistral": {"sliding_window": 6}, "Gemma2": {"sliding_window": 6}, "GPTNeoX": {}}


def pair(name, **options):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, eos_token_id=None, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.AutoModelForCausalLM.from_config(config)
    return stock, fastlayers.patch_model(copy.deepcopy(stock))


def region_of_layers(model):
    return next(type(m).__fastlayers_region__ for name, m in model.named_modules() if name.endswith("layers.0"))


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_a_training_step(name):
    models = pair(name, **MODELS[name])
    for step in range(4):
        ids = torch.randint(61, (2, 9))
        outputs = [model(input_ids=ids, labels=ids) for model in models]
        for model, out in zip(models, outputs, strict=True):
            model.zero_grad()
            (out.loss + (out.past_key_values.layers[1].values.sum() if step == 3 else 0)).backward()
        torch.testing.assert_close(*[[p.grad for p in model.parameters()] for model in models])
        held = [[vars(layer) for layer in out.past_key_values.layers] for out in outputs]
        torch.testing.assert_close(*[[(each["keys"], each["values"]) for each in layers] for layers in held])
        assert [[*each] for each in held[0]] == [[*each] for each in held[1]]
    assert sum(entry.calls for entry in region_of_layers(models[1]).made()) >= 4


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name, cache):
    stock, patched = (model.eval() for model in pair(name, **MODELS[name]))
    for _ in range(2):
        ids = torch.randint(1, 61, (2, 5))
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 10, "pad_token_id": 0}
        found = [m.generate(ids, cache_implementation=cache, disable_compile=True, **options) for m in (stock, patched)]
        assert torch.equal(*found)
    # One of the first call and one of a token, or two where layers differ; none of a token that an attribute counts.
    assert len(region_of_layers(patched).entries) <= 3
