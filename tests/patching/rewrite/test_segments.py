"""Forwards that cannot be recorded as a whole: parts of them are fused, and everything else of them stays."""

from __future__ import annotations

import copy
import inspect
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import Reason, patch_model, plan_patch, unpatch_model
from tests.patching.harness import fused, same, tensors, written


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.drop = nn.Dropout(0.5)
        self.seen = 0


class Layer(Base):
    """A layer of a language model."""

    def forward(self, x, mask=None, *, cache=None, **kwargs):
        residual = x
        h = self.attend(x, mask=mask, cache=cache, **kwargs)
        h = residual + h
        residual = h
        h = self.norm(h)
        return residual + self.fc(h)

    def attend(self, x, mask=None, cache=None, **kwargs):
        if cache is not None:
            cache.append(x)
        return self.fc(x) * kwargs.get("scale", 1.0)


class SumsOfCalls(Base):
    """A layer of a vision transformer in transformers."""

    def forward(self, x, y, **kwargs):
        x = x + self.attend(self.norm(x), **kwargs)
        x = x + self.fc(self.norm(x))
        y = self.attend(x, **kwargs) + y
        y = self.norm(y)
        return x + y

    def attend(self, x, *, scale=1.0):
        return self.fc(x) * scale


class Guards(Base):
    def forward(self, x, y):
        with torch.no_grad():
            y = y * 2
        z = F.relu(x) + y
        try:
            z = self.fc(z)
        finally:
            self.seen += 1
        residual = x + z
        return self.norm(residual)


class MayBeUnbound(Base):
    def forward(self, x, y, *rest):
        for z in rest:
            y = y + z
        if rest:
            w = y
        else:
            w = F.relu(x) + y
        v = F.relu(w) + x
        if rest:
            return v + z
        return v


class OneOfMany(Base):
    """Some results are read later and some are not."""

    def forward(self, x, y, *rest):
        a = F.relu(x)
        b = a + y
        c = self.fc(b)
        a = F.relu(c) + b
        print(end="")
        return a, b


class SelfByAnotherName(Base):
    def forward(this, x, y, *rest):  # noqa: N805
        return this.norm(x + y)


class Generator(Base):
    def forward(self, x, y):
        z = F.relu(x) + y
        yield z
        yield F.relu(z) + y


def spelled(body):
    return written(Base, body, globals(), "x, y, *rest")


CASES = {
    "a layer": (Layer, {"add_layer_norm": 1}),
    "sums of calls": (SumsOfCalls, {"add_layer_norm": 2}),
    "branches": (spelled("if x.sum() > 0:\n    y = y * 2\nreturn F.relu(x) + y"), {"relu_add": 1}),
    "counts": (spelled("self.seen += 1\nz = F.relu(x) + y\nself.seen += 1\nreturn z * self.seen"), {"relu_add": 1}),
    "guards": (Guards, {"relu_add": 1, "add_layer_norm": 1}),
    "deletes": (spelled("z = F.relu(x)\nz = z + y\ndel x\nx = F.relu(z) + y\nreturn x"), {"relu_add": 2}),
    "may be unbound": (MayBeUnbound, {"relu_add": 1}),
    "one of many": (OneOfMany, {"relu_add": 1, "linear_act": 1}),
    "self by another name": (SelfByAnotherName, {"add_layer_norm": 1}),
    "writes an argument": (
        spelled("x += y\nz = F.relu(x) + y\nz += x\nreturn self.norm(z)"), {"relu_add": 1, "add_layer_norm": 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("cls", "counts"), CASES.values(), ids=CASES)
def test_parts_of_a_forward(cls, counts):
    module = cls()
    assert fused(module) == counts
    same(module, *tensors((3, 4), (3, 4)))


@pytest.mark.parametrize("name", CASES)
def test_with_what_no_stretch_was_recorded_for(name):
    module = CASES[name][0]()
    x, y = tensors((3, 4), (3, 4))
    same(module, x, 2.5)
    same(module, x, y[:, :1])
    same(module, x.detach().int(), y)
    if name in ("may be unbound", "deletes"):
        same(module, x, y, y * 3)


def test_a_generator():
    module = Generator()
    x, y = tensors((3, 4), (3, 4))
    expected = list(module(x, y))
    patch_model(module)
    torch.testing.assert_close(list(module(x, y)), expected)


def test_the_signature_stays():
    module, cache = Layer(), []
    before = inspect.signature(module.forward)
    x, y = tensors((3, 4), (3, 4))
    expected = module(x, scale=3.0)
    patch_model(module)
    assert inspect.signature(module.forward) == before
    torch.testing.assert_close(module(x, y, cache=cache, scale=3.0), expected)
    assert cache[0] is x
    with pytest.raises(TypeError, match="positional argument"):
        module(x, y, y)


def test_what_changes_after_patching():
    module = Layer()
    patch_model(module)
    x, y = tensors((3, 4), (3, 4))
    fused_calls = []
    module.norm.register_forward_hook(lambda *args: fused_calls.append(1))
    torch.testing.assert_close(module(x, y), copy.deepcopy(unpatch_model(module))(x, y))
    assert len(fused_calls) == 2
    patch_model(module)
    module.norm = nn.Identity()
    torch.testing.assert_close(module(x, y), unpatch_model(copy.deepcopy(module))(x, y))


def test_an_excluded_child_is_not_absorbed():
    assert plan_patch(Layer(), exclude=["norm"])[""].reason is Reason.EXCLUDED_CHILD


def test_it_compiles():
    torch._dynamo.reset()
    module = Layer()
    x, y = tensors((3, 4), (3, 4))
    expected = module(x, y)
    patch_model(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), expected)
    torch._dynamo.reset()


class Cached(Base):
    """A layer with a cache, which is no tensor, and a number of its own."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, cache=None, **kwargs):
        a, b = self.fc(x).chunk(2, dim=-1)
        if cache is not None:
            a, b = cache.update(a, b, self.number)
        kwargs["a"] = a
        return self.norm(x + x.sin()) + torch.cat((a, b), dim=-1)


def test_an_argument_is_no_tensor_if_a_method_says_so():
    model = patch_model(nn.ModuleList(map(Cached, range(3))))
    assert len(set(map(type, model))) == 1
    assert "add_layer_norm" in fused(Cached(0))


# -- functions --------------------------------------------------------------------------------------------------------


def attention(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    weights = torch.matmul(query, key.transpose(-1, -2)) * scaling
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value), weights


class Attention(Base):
    def forward(self, x, mask=None, scaling=0.5, **kwargs):
        out, weights = attention(self, x, self.fc(x), x, mask, scaling, **kwargs)
        kwargs["weights"] = weights
        return self.drop(out)


@pytest.mark.parametrize("mask", [None, "added", "boolean"])
@pytest.mark.parametrize("scaling", [0.5, 2, "tensor"])
def test_a_function_that_a_forward_calls(mask, scaling):
    module = Attention()
    assert fused(module) == {"softmax": 1}
    (x,) = tensors((2, 3, 4))
    mask = {None: None, "added": torch.randn(3, 3), "boolean": torch.ones(3, 3).triu().bool()}[mask]
    same(module, x, mask, torch.tensor(0.7) if scaling == "tensor" else scaling)


def test_a_function_that_is_replaced(monkeypatch):
    module = Attention()
    patch_model(module)
    (x,) = tensors((2, 3, 4))
    monkeypatch.setattr(sys.modules[__name__], "attention", lambda *args, **kwargs: (x * 7, None))
    torch.testing.assert_close(module.eval()(x), x * 7)


def shaped(x, shape):
    y = x * shape[0]
    if shape[0] > 2:  # not to be followed
        y = y + 1
    return y


class AttributeOfAValue(Base):
    """Following the function and giving up on it erased the node of ``x.shape``, which the recorded call then used."""

    def forward(self, x, y):
        return F.relu(shaped(x, x.shape)) + y


def test_an_attribute_that_is_first_used_in_a_function_that_is_not_followed():
    module = AttributeOfAValue()
    assert fused(module) == {"relu_add": 1}
    same(module, *tensors((3, 4), (3, 4)))


def test_hasattr():
    module = spelled('if hasattr(self, "extra"):\n    y = self.extra(y)\nreturn F.relu(x) + y')()
    x, y = tensors((3, 4), (3, 4))
    same(module, x, y)
    patch_model(module)
    module.extra = nn.Tanh()
    torch.testing.assert_close(module(x, y), F.relu(x) + torch.tanh(y))
