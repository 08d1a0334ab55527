"""A quick part of the corpus; ``make test-corpus`` has the whole. These places are there, and all are fused."""

from __future__ import annotations

import pytest

from tests.corpus.check import check
from tests.corpus.models import build, families, names

QUICK = {
    "torchvision:shufflenet_v2_x0_5": {"conv_batch_norm_act": 37},
    "torchvision:vit_b_16": {"add_layer_norm": 4, "mlp": 4},
    "timm:test_convnext": {},
    "timm:test_efficientnet": {},
    "timm:test_resnet": {},
    "timm:test_vit": {},
    "transformers:bert": {"add_layer_norm": 5, "linear_act": 3},
    "transformers:bert/eager": {"add_layer_norm": 5, "softmax": 2},
    "transformers:convnext": {"mlp": 8, "scale_add": 8},
    "transformers:gemma2": {"add_rms_norm": 2, "gated_linear": 2, "rotary": 2, "softmax": 2},
    "transformers:gpt2": {"add_layer_norm": 2, "gelu_tanh": 2},
    "transformers:gpt2/eager": {"softmax": 2},
    "transformers:mt5": {"geglu": 4},
    "transformers:llama": {"add_rms_norm": 2, "gated_linear": 2, "rotary": 2},
    "transformers:llama/eager": {"softmax": 2},
    "transformers:qwen3": {"add_rms_norm": 2, "gated_linear": 2, "rotary": 2},
    "transformers:swin": {"add_layer_norm": 8, "mlp": 8},
    "transformers:t5/eager": {"dropout_add": 10, "rms_norm (t5)": 8, "softmax": 6},
    "transformers:vit": {"add_layer_norm": 2, "mlp": 2},
}


#: Those that take seconds.
SLOW = ("transformers:swin", "transformers:t5/eager", "transformers:mt5")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in QUICK])
def test_a_model(name):
    pytest.importorskip(name.partition(":")[0])
    entry = check(name, build(name))
    assert not entry.problems, entry.line()
    assert {rule: entry.fused.get(rule, 0) for rule in QUICK[name]} == QUICK[name], entry.line()
    assert entry.fused


def test_every_family_of_timm_is_there():
    """timm has a file for each."""
    timm = pytest.importorskip("timm")
    families = timm.models._registry._model_to_module
    have = {families[name.partition(":")[2]] for name in names("timm")}
    assert have == {families[name] for name in timm.list_models()}


def test_enough_families_of_transformers_are_there():
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING

    assert len(families()) >= 60
    assert set(families()) <= set(CONFIG_MAPPING)
