"""Programs without operations that say nothing, and products in the dtype of their factors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness import needs_gpu

pytest.importorskip("triton")

from fastlayers.patching.fusion import specialised
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from tests.patching.fusion.programs import check, names, parts, recorded

pytestmark = pytest.mark.cpu_kernels


def summed(dy, index, columns):
    return dy.new_zeros((*dy.shape[:-1], columns)).scatter_add(-1, index, dy)


def product(a, b, dtype):
    return a.to(dtype) @ b.to(dtype)


#: What stands on a CPU for what specialised programs call on a GPU.
EMULATED = {torch.ops.aten.bmm.dtype: product, torch.ops.aten.mm.dtype: product}


def attended(q, k, v, mask):
    """As scaled_dot_product_attention computes it where it has no kernel, of parts of one product."""
    s = q.shape[-1] ** -0.25
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2).float() for t in (q * 2, k * 2, v * 2))
    scores = torch.bmm((q * s).flatten(0, 1), (k.transpose(-1, -2) * s).flatten(0, 1)) + mask
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).to(torch.bfloat16)


def relative(x, index):
    return torch.gather(x * 2, -1, index) * torch.gather(x.sin(), -1, (index + 1) % x.shape[-1]).transpose(0, 1)


def gathers(device):
    x = torch.randn(5, 5, 9, device=device, requires_grad=True)
    return x, torch.randint(9, (1, 5, 7), device=device).expand(5, 5, 7)


@pytest.mark.skipif(not hasattr(torch.ops.fastlayers, "gather_backward"), reason="csrc is not built")
@pytest.mark.parametrize(("function", "make"), [(relative, gathers), (attended, parts)])
def test_specialised(function, make, monkeypatch):
    """What such programs compute is the same; q kᵀ and dy vᵀ are products of what is exact in 16 bits."""
    monkeypatch.setattr(specialised, "is_served", lambda t: True)
    inputs = make("cpu")
    program, tape, results, dys, gradients = recorded(function, inputs)
    other = specialised.specialised(replace(program, fake=FakeTensorMode()))
    emulated = EMULATED | {torch.ops.fastlayers.gather_backward.default: summed}
    forward, backward = (
        [replace(o, function=emulated.get(o.function, o.function)) for o in part]
        for part in (other.forward, other.backward)
    )
    run = PythonExecutor(replace(other, forward=forward, backward=backward), Facts())
    with torch.no_grad(), excluding(KEYS):
        actual, kept = run.forward(*inputs, *tape.constants)
        found = run.backward(tuple(dys), list(kept))
    for a, b in zip((*actual, *found), (*results, *gradients), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride()
            assert torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)
    if function is relative:
        assert names(other.backward).count("gather_backward") == 2
        assert not {"scatter_add", "new_zeros", "zeros"} & set(names(other.backward))
    else:
        exact = [sum(o.function is product for o in part) for part in (forward, backward)]
        assert exact == [1, 1]
        assert names(other.forward).count("bmm") + names(other.backward).count("bmm") == 6


@needs_gpu
@pytest.mark.parametrize(("function", "make"), [(relative, gathers), (attended, parts)])
def test_specialised_on_a_gpu(function, make):
    _, other = check(function, *make("cuda"), noise=4)
    called = [o.function for o in (*other.forward, *other.backward)]
    wanted = torch.ops.fastlayers.gather_backward.default if function is relative else torch.ops.aten.bmm.dtype
    assert called.count(wanted) == 2
