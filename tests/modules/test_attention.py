"""FusedMultiheadAttention against torch.nn.MultiheadAttention: values, gradients, and calls that stay torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fastlayers
from fastlayers.patching import patch_model, patch_report, unpatch_model, verify_patch
from tests.harness import DEVICES, assert_no_worse

N, L, E, H = 3, 7, 16, 4


def causal(device, dtype=torch.float32):
    return nn.Transformer.generate_square_subsequent_mask(L, device=device, dtype=dtype)


def masks(device):
    torch.manual_seed(1)
    hidden = (torch.rand(L, L, device=device) < 0.3) & ~torch.eye(L, dtype=torch.bool, device=device)
    return {
        "none": {},
        "boolean": {"attn_mask": hidden},
        "added": {"attn_mask": torch.randn(L, L, device=device)},
        "of each head": {"attn_mask": torch.randn(N * H, L, L, device=device)},
        "causal": {"attn_mask": causal(device), "is_causal": True},
    }


def pair(device="cpu", **options):
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(E, H, **{"batch_first": True, **options}, device=device)
    ours = fastlayers.FusedMultiheadAttention(E, H, **{"batch_first": True, **options}, device=device)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def tokens(device="cpu", batch_first=True, **options):
    torch.manual_seed(2)
    return torch.randn((N, L, E) if batch_first else (L, N, E), device=device, requires_grad=True, **options)


def outcome(module, x, **kwargs):
    torch.manual_seed(3)
    out, weights = module(x, x, x, need_weights=False, **kwargs)
    assert weights is None
    grads = torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out).cumsum(-1))
    return [out, *grads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", masks("cpu"))
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"dropout": 0.3}], ids=str)
def test_as_torch(options, batch_first, mask, device, monkeypatch):
    stock, ours = pair(device, batch_first=batch_first, **options)
    x, kwargs = tokens(device, batch_first), masks(device)[mask]

    def evaluated(module, x, kwargs):
        with torch.no_grad():
            return module.eval()(x, x, x, need_weights=False, **kwargs)[0]

    with monkeypatch.context() as patch:
        patch.setattr(F, "multi_head_attention_forward", None)  # Not torch's way.
        found, inferred = outcome(ours, x, **kwargs), evaluated(ours, x, kwargs)
    expected = assert_no_worse(found, lambda module, x, kwargs: outcome(module, x, **kwargs), stock, x, kwargs)
    assert found[0].stride() == expected[0].stride()  # A dropout draws in the order of memory.
    assert_no_worse(inferred, evaluated, stock, x, kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype, device):
    """As near to float64 as torch."""
    stock, ours = pair(device)
    x = tokens(device, dtype=dtype)
    with torch.autocast(device, torch.bfloat16):
        assert_no_worse(outcome(ours.to(dtype), x), outcome, stock.to(dtype), x)


def test_other_calls_are_torchs(monkeypatch):
    """Weights as a result, other keys, padding, parameters that this has no way for."""
    x, y = tokens(), torch.randn(N, 5, E)
    calls = []
    original = F.multi_head_attention_forward
    monkeypatch.setattr(F, "multi_head_attention_forward", lambda *a, **k: calls.append(1) or original(*a, **k))
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[:, -1] = True
    others = [
        ({}, (x, x, x), {}), ({}, (x, y, y), {"need_weights": False}), ({}, (x, x, x.clone()), {"need_weights": False}),
        ({}, (x, x, x), {"need_weights": False, "key_padding_mask": padding}),
        ({}, (x[0], x[0], x[0]), {"need_weights": False}),
        ({"kdim": E, "vdim": E + 1}, (x, x, torch.randn(N, L, E + 1)), {"need_weights": False}),
        ({"add_bias_kv": True}, (x, x, x), {"need_weights": False}),
        ({"add_zero_attn": True}, (x, x, x), {"need_weights": False}),
    ]  # fmt: skip
    for count, (options, args, kwargs) in enumerate(others, start=1):
        stock, ours = pair(**options)
        torch.testing.assert_close(ours(*args, **kwargs), stock(*args, **kwargs))
        assert len(calls) == 2 * count
    for kwargs in ({"attn_mask": torch.zeros(L, L + 1)}, {"is_causal": True}, {"attn_mask": torch.zeros(2, L, L)}):
        errors = []
        for module in pair():
            with pytest.raises(RuntimeError) as error:
                module(x, x, x, need_weights=False, **kwargs)
            errors.append(str(error.value))
        assert errors[0] == errors[1]


def test_second_derivatives():
    ours = pair()[1].double()
    x = tokens().double().detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(lambda x: ours(x, x, x, need_weights=False)[0], (x,))


def test_a_replaced_attention_is_called(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, *args, **kwargs: v * 0)
    x, (stock, ours) = tokens(), pair()
    assert torch.equal(*(m(x, x, x, need_weights=False)[0] for m in (stock, ours)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(E), nn.MultiheadAttention(E, H, 0.1, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Encoder, lambda: nn.TransformerEncoderLayer(E, H, 32, batch_first=True)])
def test_patching(kind, device):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).to(device)
    for training in (True, False):
        report = verify_patch(model.train(training), tokens(device))
        assert report, report
    patch_model(model)
    assert patch_report(model).counts()["MultiheadAttention"] == 2
    unpatch_model(model)
    assert {type(m) for m in model.modules()} & {fastlayers.FusedMultiheadAttention} == set()


class Copies(TorchDispatchMode):
    """Counts the copies of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_saved(device):
    """One is left, that of the result into torch's layout."""
    counts = []
    for module in pair(device):
        with torch.no_grad(), Copies() as copies:
            module.train()(x := tokens(device), x, x, need_weights=False)
        counts.append(copies.count)
    assert counts == [2 + (device == "cuda"), 1]
