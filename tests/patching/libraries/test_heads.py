"""Losses of language models whose head has peft's adapters or a weight in few bits: no logits either."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import patch_model
from fastlayers.patching.libraries.transformers import deferred_logits
from fastlayers.patching.libraries.transformers.loss_functions import check_head
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.regions.results import Taken, put_together, take_apart
from tests.harness import assert_no_worse, judge
from tests.patching.libraries.losses import assert_same_step, batch, causal_model, is_lazy, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:a loss was computed"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]


@pytest.fixture
def none_fit(monkeypatch):
    """Evaluation does without logits too."""
    monkeypatch.setattr(deferred_logits, "MOST_ON_A_CPU", 0)


def adapted(model, *names, seed=3, **options):
    """With an adapter of each name on the head and one more layer, whose second factor is not 0."""
    peft = pytest.importorskip("peft")
    config = {"target_modules": ["q_proj", "lm_head"], "r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
    torch.manual_seed(seed)
    made = peft.get_peft_model(model, peft.LoraConfig(**config), adapter_name=(names or ("default",))[0])
    for name in names[1:]:
        made.add_adapter(name, peft.LoraConfig(**{**config, "r": 3}))
    return made


def pair(when="after", dtype=torch.float32, names=(), quantize=None, model=None, **options):
    """A patched model with adapters, and an unpatched one."""
    stock = (causal_model() if model is None else model).to(dtype)
    if quantize is not None:
        quantize(stock)
    ours = copy.deepcopy(stock)
    if when == "before":
        patch_model(ours)
    ours, twin = adapted(ours, *names, **options), adapted(stock, *names, **options)
    return patch_model(ours) if when == "after" else ours, twin


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def assert_deferred(chunked, ours, twin, **kwargs):
    output = assert_same_step(ours, twin, **kwargs)
    assert len(chunked) == 1
    assert is_lazy(output.logits)
    assert_no_worse(output.logits.computed(), lambda twin: step(twin, **kwargs)[0].logits, twin)
    return output


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "options",
    [{}, {"lora_dropout": 0.5}, {"use_rslora": True}, {"names": ("first", "second")}],
    ids=["plain", "dropout", "rslora", "another that is not active"],
)
def test_lora(options, when, chunked):
    """The head's weight is frozen, and the adapter's gradients are those of stock peft."""
    ours, twin = pair(when, **options)
    assert_deferred(chunked, ours, twin)
    _, gradients = step(ours)
    assert sum("lm_head" in name for name in gradients) == 2


@pytest.mark.parametrize("when", ["before", "after"])
def test_several_active_adapters(when, chunked):
    ours, twin = pair(when, names=("first", "second"))
    for model in (ours, twin):
        model.base_model.set_adapter(["first", "second"])
    assert_deferred(chunked, ours, twin)
    assert sum("lm_head" in name for name in step(ours)[1]) == 4


def test_gradients_of_logits_that_are_used_after_the_loss(chunked):
    """Of the very draw of the dropout that the loss had."""
    ours, twin = pair(lora_dropout=0.5)

    def answer(model):
        torch.manual_seed(2)
        output = model(**batch())
        loss = output.loss + output.logits.square().mean()
        return loss, torch.autograd.grad(loss, trained(model))

    assert_no_worse(answer(ours), answer, twin)
    assert len(chunked) == 1


def test_logits_in_a_result_that_is_taken_apart():
    """As graph_model does: what the adapter makes of the hidden states is one of the tensors of the result."""
    ours, twin = pair()
    output, expected = ours(**batch()), twin(**batch())
    tensors = Taken()
    parts = take_apart(output, tensors)
    assert [tuple(t.shape) for t in tensors][:3] == [(), (2, 9, 32), (2, 9, 4)]
    again = put_together(parts, [t.detach().clone().requires_grad_() for t in tensors])
    torch.testing.assert_close(again.logits.computed(), expected.logits)
    assert again.logits.requires_grad


def test_a_head_that_is_tied_or_trained(chunked):
    ours, twin = pair(model=causal_model(tie_word_embeddings=True))
    for model in (ours, twin):
        weight = model.base_model.model.model.embed_tokens.weight
        assert weight is model.base_model.model.lm_head.base_layer.weight
        weight.requires_grad_()
    assert_deferred(chunked, ours, twin)
    assert any("embed_tokens" in name for name in step(ours)[1])


@pytest.mark.usefixtures("none_fit")
@pytest.mark.parametrize("state", ["disabled", "merged", "unloaded"])
def test_adapters_that_are_switched_off(state, chunked):
    ours, twin = pair()
    contexts = []
    for model in (ours, twin):
        if state == "merged":
            model.merge_adapter()
        contexts.append(model.disable_adapter() if state == "disabled" else nullcontext())
    if state == "unloaded":
        ours, twin = ours.merge_and_unload(), twin.merge_and_unload()

    def answer(model):
        output = model(**batch())
        return output.loss, output.logits if model is not ours else output.logits.computed()

    with contexts[0], contexts[1], torch.no_grad():
        assert_no_worse(answer(ours), answer, twin)
    assert len(chunked) == 1


@pytest.mark.usefixtures("none_fit")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("disabled", [False, True])
def test_a_copy_of_the_head_that_is_trained(when, disabled, chunked):
    ours, twin = pair(when, target_modules=["q_proj"], modules_to_save=["lm_head"])
    if disabled:
        with ours.disable_adapter(), twin.disable_adapter(), torch.no_grad():
            torch.testing.assert_close(ours(**batch()).loss, twin(**batch()).loss)
    else:
        assert_deferred(chunked, ours, twin)
        assert any("modules_to_save" in name for name in step(ours)[1])
    assert chunked


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_adapters_beside_16_bits(autocast, chunked):
    """As peft makes them. The loss and the gradients err as little as stock peft's, measured by float64's."""
    ours, twin = pair(dtype=torch.float32 if autocast else torch.bfloat16)
    exact = copy.deepcopy(twin).double()
    assert ours.base_model.model.lm_head.lora_B["default"].weight.dtype is torch.float32
    steps = []
    for model in (ours, twin):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            steps.append(step(model))
    true, right = step(exact)
    for output, _ in steps:
        assert output.loss.dtype is torch.float32
    errors = [float((output.loss - true.loss).abs().detach()) for output, _ in steps]
    assert errors[0] <= 1.5 * errors[1] + 1e-3 * float(true.loss.detach())
    for name, wanted in right.items():
        (mine, theirs) = (float((gradients[name] - wanted).norm() / wanted.norm()) for _, gradients in steps)
        assert steps[0][1][name].dtype is steps[1][1][name].dtype
        assert mine <= 1.5 * theirs, name
    assert len(chunked) == 1
    assert steps[0][0].logits.dtype is steps[1][0].logits.dtype


def hook(*args):
    return None


@pytest.mark.parametrize("part", ["", ".lora_B.default", ".base_layer", ".lora_A.default"])
def test_a_hook_sees_what_it_would(part):
    """The head is called, unless the hook is on what is called anyway."""
    ours, twin = pair()
    seen = []
    for model in (ours, twin):
        layer = model.base_model.model.get_submodule(f"lm_head{part}")
        layer.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    output = assert_same_step(ours, twin)
    assert not is_lazy(output.logits)
    assert len(seen) == 2
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}], ids=["DoRA", "an adapter with a bias"])
def test_other_adapters_keep_their_logits(options, chunked):
    model = causal_model(family="Phi") if "lora_bias" in options else causal_model()
    options = {"target_modules": ["lm_head"], **options}
    ours, twin = pair(model=model, **options)
    output = assert_same_step(ours, twin)
    assert not is_lazy(output.logits)
    assert not chunked


def test_a_batch_of_several_adapters(chunked):
    ours, twin = pair(names=("first", "second"))
    found = []
    for model in (ours.eval(), twin.eval()):
        with torch.no_grad():
            output = model(**batch(), adapter_names=["first", "second"])
        found.append((output.loss, output.logits))
    torch.testing.assert_close(*found)
    assert not chunked


@pytest.mark.parametrize("names", [(), ("first", "second")], ids=["one", "two"])
def test_compiled(names, chunked):
    torch.compiler.reset()
    ours, twin = pair(names=names)
    if names:
        for model in (ours, twin):
            model.base_model.set_adapter([*names])
    compiled = torch.compile(ours.base_model.model, backend="aot_eager", fullgraph=True)

    def gradients(model):
        output = model(**batch())
        assert (output.logits is None) == (model is compiled)
        return torch.autograd.grad(output.loss, trained(model))

    assert_no_worse(gradients(compiled), gradients, twin)
    torch.compiler.reset()


# -- weights in few bits ----------------------------------------------------------------------------------------------


def of_bits(bits, bias=False, dtype=None):
    """Replaces the head of a model by bitsandbytes' layer."""

    def quantize(model):
        pytest.importorskip("bitsandbytes", reason="it is not installed")
        layers, head = sys.modules["bitsandbytes"].nn, model.lm_head
        size = (head.in_features, head.out_features)
        if bits == 4:
            layer = layers.Linear4bit(*size, bias=bias, compute_dtype=dtype, quant_type="nf4")
        else:
            layer = layers.Linear8bitLt(*size, bias=bias, has_fp16_weights=False)
        layer.weight.data = head.weight.data.clone().float()
        model.lm_head = layer.to("cpu")
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8
        if bias:
            layer.bias.data = torch.linspace(-1, 1, size[1]).to(head.weight.dtype)

    return quantize


class Dense(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def dense(model):
    """A copy whose head has the numbers that its bits stand for: bitsandbytes has no float64."""
    model = copy.deepcopy(model)
    name, head = next((n, m) for n, m in model.named_modules() if type(m).__module__.startswith("bitsandbytes"))
    layer = Dense(head.in_features, head.out_features, bias=False).requires_grad_(False)
    layer.bias, head.bias = head.bias, None
    with torch.no_grad():
        layer.weight.copy_(head(torch.eye(head.in_features)).t())
    model.set_submodule(name, layer)
    return model


def wide_model(**options):
    """bitsandbytes 0.50 is wrong on a CPU where a row is shorter than a block of 64 values."""
    return causal_model(hidden_size=64, **options)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_quantized_heads(bits, with_adapter, when, chunked):
    quantize = of_bits(bits, bias=True)
    if with_adapter:
        ours, twin = pair(when, quantize=quantize, model=wide_model())
    else:
        twin = wide_model()
        quantize(twin)
        ours = patch_model(copy.deepcopy(twin))
    assert_deferred(chunked, ours, dense(twin))
    lm_head = [name for name in step(ours)[1] if "lm_head" in name]
    assert all("lora" in name or "bias" in name for name in lm_head)
    assert bool(lm_head)

    def gradients(model):
        return torch.autograd.grad(model(**batch()).logits.square().mean(), trained(model))

    assert_no_worse(gradients(ours), gradients, dense(twin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_that_computes_in_another_dtype(dtype, compute, autocast):
    ours, twin = pair(dtype=dtype, quantize=of_bits(4, dtype=compute), model=wide_model())

    def answer(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output, gradients = step(model)
        return output.loss, output.logits + 0, gradients

    judge(answer(ours), answer(twin), answer, (dense(twin),))


def test_a_head_that_an_inference_has_packed_is_called(chunked):
    """bitsandbytes packs weights for a CPU without gradients, if that has products of bfloat16."""
    twin = wide_model().eval()
    of_bits(4)(twin)
    with torch.no_grad():
        twin(**batch())
    if not getattr(twin.lm_head.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU needs no other packing")
    ours = patch_model(copy.deepcopy(twin))
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch()).loss, twin(**batch()).loss)
    assert not chunked


def test_heads_that_are_not_known():
    """Refused when the model is patched, with a name."""
    model = nn.Module()
    model.lm_head = nn.Bilinear(2, 2, 2)
    with pytest.raises(Refusal, match="lm_head is a Bilinear"):
        check_head(model, "lm_head", frozenset())
