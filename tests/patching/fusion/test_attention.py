"""Attention takes and gives tokens in the order that products have them, and the factor of its queries."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fastlayers.patching.program.program import plain_name
from tests.patching.fusion.programs import INTERPRETED, check, launches

pytestmark = pytest.mark.cpu_kernels


@pytest.mark.parametrize("place", ["query", "key", "both"])
def test_a_factor_of_queries_is_that_of_attention(device, place):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(2, 16, 3, 64, device=device, dtype=dtype, requires_grad=True)

    def function(x):
        q, k, v = ((x * n).transpose(1, 2) for n in (2, 3, 4))
        q, k = q + 1 if place == "key" else (q + 1) * 0.25, k + 1 if place == "query" else (k + 1) / 2
        return F.scaled_dot_product_attention(q, k, v, scale=None if place == "both" else 0.5)

    _, other = check(function, x, tolerance=1e-5 if device == "cpu" else 5e-2, noise=16)
    (attention,) = (o for o in other.forward if "attention" in plain_name(o.function))
    (backward,) = (o for o in other.backward if "attention" in plain_name(o.function))
    factor = {"query": 0.25 * 0.5, "key": 0.5 * 0.5, "both": 0.25 / 2 / 8}[place]
    assert attention.kwargs["scale"] == backward.kwargs["scale"] == factor


def test_a_factor_that_others_see_stays(device):
    x = torch.randn(2, 3, 16, 64, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)

    def function(x):
        q = (x + 1) * 0.25
        return F.scaled_dot_product_attention(q, x, x), q.transpose(1, 2) + 1

    _, other = check(function, x.requires_grad_(), tolerance=5e-2, noise=16)
    (attention,) = (o for o in other.forward if "attention" in plain_name(o.function))
    assert attention.kwargs.get("scale") is None


def heads(x, w, scale=1.0):
    y = x @ w if scale == 1 else x @ w * scale
    return y.view(*x.shape[:2], 2, -1).transpose(1, 2).contiguous()


def attends(x, y, wq, wk, wv, wo):
    """As BART, Whisper and others write it."""
    q, k, v = heads(x, wq, 0.25), heads(y, wk), heads(y, wv)
    out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return out.transpose(1, 2).reshape(x.shape) @ wo


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_takes_and_gives_tokens_in_order(device, dtype):
    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    tensors = [torch.randn(2, n, 32, device=device, dtype=dtype, requires_grad=True) for n in (24, 40)]
    tensors += [(torch.randn(32, 32, device=device, dtype=dtype) / 6).requires_grad_() for _ in range(4)]
    program, other = check(attends, *tensors)
    copies = [[o for o in part if plain_name(o.function) == "clone"] for part in (program.forward, program.backward)]
    assert len(copies[0]) >= 3
    left = [plain_name(o.function) for part in (other.forward, other.backward) for o in part if not o.view]
    assert "clone" not in left
    assert launches(other.forward) == 5  # Four projections and the attention, with the factor of q.
