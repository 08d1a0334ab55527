"""Patched models take what stock ones take: nested tensors, those of other devices, modules without weights yet."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers.patching.reasons import PatchWarning, Reason


class Block(nn.Module):
    """Functional code that rules and regions serve."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "linear, relu": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
    "linear, gelu": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    "linear without bias, silu": lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.SiLU()),
    "layer norm": lambda: nn.LayerNorm(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "leaky relu": nn.LeakyReLU,
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "dropout": lambda: nn.Dropout(0.0),
    "block": Block,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
}


def results(model, x):
    """The result of a call, and the gradients; the error where it raises one."""
    model.zero_grad()
    try:
        out = model(x)
        if out.requires_grad and out.is_nested and out.layout is torch.strided:
            torch.cat([t.flatten() for t in out.unbind()]).sum().backward()
        elif out.requires_grad:
            (out.values() if out.layout is torch.jagged else out).sum().backward()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return error
    parts = out.unbind() if out.is_nested else [out]
    return [*parts, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors(name, trains, layout):
    stock = LAYERS[name]().train(trains)
    model = fastlayers.patch_model(nn.Sequential(copy.deepcopy(stock)))
    for _ in range(3):
        tensors = [torch.randn(3, 8), torch.randn(5, 8)]
        with nullcontext() if trains else torch.no_grad():
            expected, found = (results(m, torch.nested.nested_tensor(tensors, layout=layout)) for m in (stock, model))
        if isinstance(expected, Exception):
            assert isinstance(found, Exception)
            continue
        assert not isinstance(found, Exception), found
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_meta_tensors(name, autocast):
    stock = LAYERS[name]().to("meta")
    model = fastlayers.patch_model(nn.Sequential(copy.deepcopy(stock)))
    x = torch.empty(2, 4, 8, device="meta", requires_grad=True)
    fastlayers.plan_patch(nn.Sequential(stock), example_inputs=x)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected, out = stock(x), model(x)
        assert (out.shape, out.dtype, out.device, out.stride()) == (
            expected.shape, expected.dtype, expected.device, expected.stride(),
        )  # fmt: skip
        out.sum().backward()


def lazy():
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))


def test_lazy_layers():
    """They are left alone until a call has given them parameters, and says what to do."""
    assert {row.reason for row in fastlayers.plan_patch(lazy()) if row.was.startswith("Lazy")} == {Reason.UNINITIALIZED}
    with pytest.warns(PatchWarning, match="uninitialised .LazyConv2d, LazyBatchNorm2d, LazyLinear.: call it once"):
        model = fastlayers.patch_model(lazy())
    stock, x = lazy(), torch.randn(2, 3, 8, 8)
    for _ in range(2):
        torch.manual_seed(0)
        expected = stock(x)
        torch.manual_seed(0)
        torch.testing.assert_close(model(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastlayers.patch_model(model)
    for _ in range(4):
        torch.testing.assert_close(model(x), stock(x))
    assert sum(row.became is not None for row in fastlayers.patch_report(model)) >= 2
    fastlayers.unpatch_model(model)
    assert [type(layer) for layer in model] == [type(layer) for layer in stock]


def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=4))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)), Block, llama],
    ids=["Sequential", "Block", "llama"],
)
def test_equal_models_have_equal_classes(make):
    """Models that were patched one by one are an ensemble for torch.func.stack_module_state, as stock ones are."""
    models = [fastlayers.patch_model(make()) for _ in range(3)]
    torch.func.stack_module_state(models)
    for modules in zip(*(model.modules() for model in models), strict=True):
        assert len({*map(type, modules)}) == 1


def test_a_forward_that_was_replaced_has_a_class_of_its_own(monkeypatch):
    def other(self, x, *, scale):
        return self.norm(x) * scale

    x, first = torch.randn(2, 8), fastlayers.patch_model(Block())
    first(x)
    monkeypatch.setattr(Block, "forward", other)
    second = fastlayers.patch_model(Block())
    assert type(second) is not type(first)
    torch.testing.assert_close(second(x, scale=2), second.norm(x) * 2)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def language_model():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


def step_of(model):
    """A training step."""
    if isinstance(model, nn.Sequential):
        out = model(torch.randn(2, 3, 8, 8))
    elif isinstance(model, Block):
        out = model(torch.randn(2, 8))
    else:
        ids = torch.randint(300, (2, 8))
        out = model(input_ids=ids, labels=ids).loss
    out.sum().backward()


@pytest.mark.parametrize("calls", [0, 1, 4])
@pytest.mark.parametrize("make", [convolutions, Block, language_model])
@pytest.mark.parametrize("unpatch", [False, True])
def test_a_model_is_freed_at_once(make, calls, unpatch):
    """Without the collector, which training loops switch off: neither patching nor recording leaves it in a cycle."""
    if make is language_model:  # What the first call of all imports is garbage in a cycle.
        step_of(make())
    found = []
    for patch in (lambda model: model, fastlayers.patch_model):
        model = make()
        gc.disable()
        try:
            patch(model)
            for _ in range(calls):
                step_of(model)
            if unpatch:
                fastlayers.unpatch_model(model)
            gone = [weakref.ref(model), *map(weakref.ref, model.parameters())]
            model.zero_grad()
            del model
            found.append(sum(each() is not None for each in gone))
        finally:
            gc.enable()
    assert found == [0, 0]


@pytest.mark.parametrize("make", [convolutions, Block, language_model])
def test_parameters_have_no_weak_references(make):
    """torch.utils.swap_tensors, by which ``model.to`` moves tensor subclasses, refuses a tensor that has some."""
    model = fastlayers.patch_model(make())
    gc.disable()
    try:
        for _ in range(4):
            step_of(model)
        for p in model.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(torch.zeros_like(p)))
    finally:
        gc.enable()
