"""Models of torchvision, timm and transformers: what is found in them, and that they stay equal."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastlayers import functional
from fastlayers.patching import (
    fold_batch_norm,
    patch_model,
    patch_report,
    plan_fold,
    plan_patch,
    unfold_batch_norm,
    unpatch_model,
    verify_patch,
)
from fastlayers.patching.ir.known_functions import fused_rotary, is_rotary
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from tests.patching.libraries import losses
from tests.patching.networks import Parts


def images(size=32):
    torch.manual_seed(1)
    return torch.randn(2, 3, size, size)


def check(model, counts, *inputs, **kwargs):
    """Patched and unpatched agree in training and eval; undoing, copying, saving are exact; these things are found."""
    found = plan_patch(model).counts()
    assert {rule: found.get(rule, 0) for rule in counts} == counts, plan_patch(model)
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    patch_model(model)
    assert list(model.state_dict()) == keys
    for training in (True, False):
        report = verify_patch(model.train(training), *inputs, **kwargs)
        assert report, report
    loaded = pickle.loads(pickle.dumps(model))
    assert [type(module) for module in loaded.modules()] == types
    assert [type(m) for m in copy.deepcopy(model).modules()] == [type(m) for m in model.modules()]
    unpatch_model(model)
    assert [type(module) for module in model.modules()] == types


def check_fold(model, x):
    """Folded in eval, patched or not."""
    with torch.no_grad():
        model.train()(x), model(x * 2)  # statistics
        expected = model.eval()(x)
        for prepare in (lambda model: model, patch_model):
            folded = fold_batch_norm(prepare(copy.deepcopy(model)))
            scale = float(expected.abs().max())
            torch.testing.assert_close(folded(x), expected, rtol=1e-3, atol=1e-4 * scale)
            assert list(folded.state_dict()) == list(model.state_dict())
            torch.testing.assert_close(unfold_batch_norm(folded)(x), expected, rtol=1e-3, atol=1e-4 * scale)


TORCHVISION = {
    "resnet18": {"conv_batch_norm_act": 9, "conv_batch_norm_add_act": 8, "conv_batch_norm": 3},
    "mobilenet_v3_small": {"conv_batch_norm_act": 23, "conv_batch_norm_add": 6},
    "mnasnet0_5": {"conv_batch_norm_act": 45, "batch_norm_act": 10, "conv_batch_norm_add": 10},
    "regnet_x_400mf": {"conv_batch_norm_act": 45, "conv_batch_norm_add_act": 18, "batch_norm_add_act": 4},
    "efficientnet_b0": {"conv_batch_norm_act": 33, "conv_batch_norm": 16},
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name):
    models = pytest.importorskip("torchvision.models")
    model = models.get_model(name, weights=None, num_classes=4)
    check(model, TORCHVISION[name], images())
    check_fold(model, images())


def test_torchvision_convnext():
    convnext = pytest.importorskip("torchvision.models.convnext")
    stages = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    model = convnext.ConvNeXt(stages, stochastic_depth_prob=0.1, num_classes=4)
    check(model, {"channel_layer_norm": 3}, images())


TIMM = {
    "resnet10t": ({}, {"conv_batch_norm_act": 6, "batch_norm_act": 1, "conv_batch_norm_add_act": 4}),
    "convnext_atto": ({"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}, {"channel_layer_norm": 9}),
    "vit_tiny_patch16_224": ({"img_size": 32, "depth": 2}, {"add_layer_norm": 2, "layer_norm": 1}),
    "regnetx_002": ({}, {"conv_batch_norm_act": 27, "conv_batch_norm": 17}),
    "efficientnet_b0": ({}, {"conv_batch_norm_act": 24, "conv_batch_norm": 16, "batch_norm_act": 9}),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    timm = pytest.importorskip("timm")
    options, counts = TIMM[name]
    check(timm.create_model(name, pretrained=False, num_classes=4, **options), counts, images())


@pytest.mark.parametrize(("name", "count"), [("regnetx_002", 44), ("efficientnet_b0", 49)])
def test_timm_fold(name, count):
    """Their BatchNormAct2d folds into the convolution, and its activation stays."""
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False, num_classes=4)
    assert plan_fold(model.eval()).counts() == {"fold_batch_norm": count}
    check_fold(model, images())


def test_timm_layers():
    layers = pytest.importorskip("timm.layers")
    x = torch.randn(2, 8, 5, 4)
    check(layers.BatchNormAct2d(8), {"batch_norm_act": 1}, x)
    check(layers.BatchNormAct2d(8, act_layer="silu", momentum=None), {"batch_norm_act": 1}, x)
    check(layers.BatchNormAct2d(8, apply_act=False), {"batch_norm": 1}, x)
    check(layers.BatchNormAct2d(8, track_running_stats=False), {"batch_norm_act": 1}, x)
    check(layers.GroupNormAct(8, 2, act_layer="hard_swish"), {"group_norm_act": 1}, x)
    check(layers.GroupNorm1Act(8), {"group_norm_act": 1}, x)
    check(layers.LayerNorm2d(8), {"channel_layer_norm": 1}, x)
    check(layers.LayerNorm2dFp32(8), {"layer_norm": 1}, x)
    check(layers.LayerNormAct2d(8), {"channel_layer_norm": 1}, x)
    check(layers.LayerNorm(8), {"layer_norm": 1}, torch.randn(2, 3, 8))
    check(layers.RmsNorm(8), {"rms_norm": 1}, torch.randn(2, 3, 8))
    check(layers.RmsNormFp32(8), {"rms_norm": 1}, torch.randn(2, 3, 8))


SMALL = {**losses.SMALL, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "head_dim": 8}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
TRANSFORMERS = {
    "Llama": (SMALL, "ForCausalLM", {"rms_norm (llama)": 3}),
    "Mistral": (SMALL, "ForCausalLM", {"rms_norm (llama)": 3}),
    "Qwen2": (SMALL, "ForCausalLM", {"rms_norm (llama)": 3}),
    "Qwen3": (SMALL, "ForCausalLM", {"rms_norm (llama)": 7}),
    "Gemma2": (SMALL, "ForCausalLM", {"rms_norm (gemma)": 7}),
    "Olmo2": (SMALL, "ForCausalLM", {"rms_norm (olmo)": 9}),
    "Cohere": (SMALL, "ForCausalLM", {"forked_layer_norm": 2, "layer_norm (cohere)": 1}),
    "T5": (T5, "EncoderModel", {"rms_norm (t5)": 3}),
    "Bert": ({k: v for k, v in SMALL.items() if "key" not in k}, "Model", {"add_layer_norm": 5}),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    transformers = pytest.importorskip("transformers")
    options, head, counts = TRANSFORMERS[name]
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}{head}")(config)
    check(model, counts, input_ids=torch.randint(3, 60, (2, 7)))


def test_no_library_is_imported():
    """Nor what only printing, drawing and an adapter need."""
    code = (
        "import sys, torch; from torch import nn; import fastlayers; "
        "model = fastlayers.patch_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())); "
        "str(fastlayers.patch_report(model)); "
        "assert not {'rich', 'matplotlib', 'timm', 'torchvision', 'transformers', 'diffusers'} & set(sys.modules); "
        "assert not [m for m in sys.modules if m.startswith('fastlayers.patching.libraries.transformers')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arguments_by_their_former_names(monkeypatch):
    """transformers lets some arguments be given by the names that they had; so do a rewritten forward and a region."""
    deprecation = pytest.importorskip("transformers.utils.deprecation")
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)

        @deprecation.deprecate_kwarg("scale", "99.0", new_name="gain")
        def forward(self, x, gain=1.0, **kwargs):
            return (torch.relu(self.proj(x)) + x) * gain

    class Block(Parts):
        def forward(self, x, **kwargs):
            return self.scaled(x, **kwargs).tanh()

    stock, x = Block(scaled=Scaled()), torch.randn(3, 4)
    model = patch_model(copy.deepcopy(stock))
    assert type(model.scaled) is not Scaled
    for _ in range(3):
        for given in ({}, {"gain": 2.0}, {"scale": 3.0}, {"gain": 4.0, "other": 1}):
            with pytest.warns(FutureWarning, match="gain") if "scale" in given else nullcontext():
                expected = stock(x, **given)
            with pytest.warns(FutureWarning, match="gain") if "scale" in given else nullcontext():
                actual = model(x, **given)
            torch.testing.assert_close(actual, expected)
    unpatch_model(model)
    assert type(model.scaled) is Scaled


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """Before transformers 5 it has position ids that it does not use."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def rotate_both(q, k, cos, sin, position_ids=None, dim=1):
    cos = cos.unsqueeze(dim)
    sin = sin.unsqueeze(dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


@pytest.mark.parametrize(
    ("args", "named"), [((), {}), ((None, 2), {}), ((None,), {"dim": 2}), ((), {"position_ids": None, "dim": 2})]
)
def test_a_rotary_function_with_names_of_its_own(args, named):
    assert is_rotary(rotate_both)
    fused = fused_rotary(globals(), "rotate_both", rotate_both)
    q, k = torch.randn(2, 5, 5, 8), torch.randn(2, 5, 5, 8)
    tables = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(fused(q, k, *tables, *args, **named), rotate_both(q, k, *tables, *args, **named))
    for wrong in ({"unsqueeze_dim": 2}, {"k": k}):
        with pytest.raises(TypeError):
            fused(q, k, *tables, **wrong)


@pytest.mark.parametrize(("width", "runs"), [(4, True), (2, True), (8, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotary_function_of_a_part_of_each_head(width, runs, dtype, monkeypatch):
    modeling = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    rotate_part = modeling.apply_rotary_pos_emb  # the rest of a head passes through
    assert is_rotary(rotate_part)
    calls = []
    monkeypatch.setattr(functional, "rotary", lambda *args, plain=functional.rotary: calls.append(1) or plain(*args))
    fused = fused_rotary(vars(modeling), "apply_rotary_pos_emb", rotate_part)
    q = torch.randn(2, 5, 3, 8, dtype=dtype, requires_grad=True)
    k = torch.randn(2, 5, 1, 8, dtype=dtype, requires_grad=True)
    tables = torch.randn(2, 5, width), torch.randn(2, 5, width)
    found = []
    for function in (rotate_part, fused):
        out = function(q.transpose(1, 2), k.transpose(1, 2), *tables)
        grads = torch.autograd.grad([t.float().square().sum() for t in out], (q, k))
        found.append([*out, *grads])
    torch.testing.assert_close(*found, check_stride=True)
    assert bool(calls) is runs


def test_the_attention_of_gpt_neox():
    """Its rotary function has a kernel for a token with a cache, too."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.GPTNeoXForCausalLM(config)
    patched = patch_model(copy.deepcopy(model))
    rows = [row for row in patch_report(patched).patched if row.was == "GPTNeoXAttention"]
    assert [dict(row.fused)["rotary"] for row in rows] == [1, 1]
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(patched(ids, labels=ids).loss, model(ids, labels=ids).loss)


#: A registry of transformers, in a test that has one.
ATTENTIONS = None


def eager_attention(module, q, k, v, **kwargs):
    return torch.softmax(q @ k.mT, -1) @ v


def plain_attention(module, q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v)


def other_attention(module, q, k, v, **kwargs):
    return v * 2


def test_an_attention_of_transformers_4(monkeypatch):
    """Its forward takes arguments by former names, and subscripts the registry of attentions."""
    pytest.importorskip("transformers")
    from transformers.modeling_utils import AttentionInterface
    from transformers.utils.deprecation import deprecate_kwarg

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
            self.config = types.SimpleNamespace(attention="plain")

        @deprecate_kwarg("past_key_value", "99.0", new_name="past_key_values")
        def forward(self, x, position_embeddings, past_key_values=None, **kwargs):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
            cos, sin = position_embeddings
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            attend = eager_attention
            if self.config.attention != "eager":
                attend = ATTENTIONS[self.config.attention]
            return self.proj(attend(self, q, k, v, **kwargs).transpose(1, 2).flatten(2))

    class Block(Parts):
        def forward(self, x, position_embeddings):
            return x + self.attention(self.norm(x), position_embeddings)

    registry = AttentionInterface()
    registry["plain"] = plain_attention
    monkeypatch.setitem(globals(), "ATTENTIONS", registry)
    monkeypatch.setattr(regions, "LEAST", dict.fromkeys(regions.LEAST, (1, 1)))
    monkeypatch.setattr(demand, "CALLS", 1)
    stock, x = Block(norm=nn.LayerNorm(16), attention=Attention()), torch.randn(2, 5, 16)
    tables = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    model = patch_model(copy.deepcopy(stock))
    assert dict(patch_report(model)["attention"].fused)["rotary"] == 1
    for _ in range(2):
        torch.testing.assert_close(model(x, tables), stock(x, tables))
    (entries,) = type(model).__fastlayers_region__.entries.values()
    assert [entry.refusal for entry in entries] == [None]
    registry["plain"] = other_attention
    torch.testing.assert_close(model(x, tables), stock(x, tables))
    monkeypatch.setattr(AttentionInterface, "__getitem__", lambda self, key: eager_attention)
    torch.testing.assert_close(model(x, tables), stock(x, tables))


def test_a_decorator_that_returns_no_function():
    pytest.importorskip("transformers")
    from fastlayers.patching.libraries.transformers.adapter import TransformersAdapter

    adapter, cached = TransformersAdapter(), functools.cache(torch.relu)
    assert adapter.plain_forward(cached) is cached
    assert adapter.former_names(cached) == frozenset()
    assert adapter.decorated(cached, torch.relu) is torch.relu


def never(input, weight, offs):
    return False


def test_a_layer_with_experts_is_a_region(monkeypatch):
    """They are looked up in a registry, like attentions. torch's grouped product has no fake for float32."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    moe = pytest.importorskip("transformers.integrations.moe")
    monkeypatch.setattr(moe, "_can_use_grouped_mm", never)
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=4, num_experts_per_tok=2, vocab_size=50, norm_topk_prob=True, use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    twin = copy.deepcopy(model)
    patch_model(model)
    tokens = torch.arange(12).view(2, 6)
    for _ in range(4):
        losses = [each(tokens, labels=tokens).loss for each in (model, twin)]
        torch.testing.assert_close(*losses)
        for each, loss in zip((model, twin), losses, strict=True):
            each.zero_grad()
            loss.backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    entries = type(model.model.layers[0]).__fastlayers_region__.entries.values()
    assert [entry.refusal for found in entries for entry in found] == [None]
    model.set_experts_implementation("eager")  # has to be seen
    twin.set_experts_implementation("eager")
    torch.testing.assert_close(model(tokens).logits, twin(tokens).logits)
