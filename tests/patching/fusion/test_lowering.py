"""Kernels of ours in simple operations, and with their neighbours in one generated kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.harness import needs_gpu

pytest.importorskip("triton")

from fastlayers import functional as FL
from fastlayers.kernels.generated import Kernel
from fastlayers.ops import reference
from fastlayers.ops.activations import BY_CODE
from fastlayers.ops.layer_norm import LAYER, RMS
from fastlayers.patching.fusion.lowering import DERIVATIVES, LOWERINGS
from tests.patching.fusion.programs import TOLERANCE, check, launches, names

pytestmark = pytest.mark.cpu_kernels


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kernels_in_simple_operations(dtype):
    """Against the references, with the statistics that the kernels keep."""
    limit = {"rtol": 0, "atol": TOLERANCE[dtype]}
    x, residual, y = (torch.randn(3, 4, 8).to(dtype) for _ in range(3))
    weight, bias = (torch.randn(4, 8).to(dtype) for _ in range(2))

    def same(actual, expected):
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
        torch.testing.assert_close(actual, expected, **limit)

    norm = LOWERINGS["layer_norm_forward"]
    found, stats = norm(x, 2, weight, bias, 1e-5, LAYER, dtype, True)
    same(found, F.layer_norm(x, (4, 8), weight, bias))
    rows = x.to(wide(dtype)).flatten(1)
    mean, rstd = rows.mean(1), (rows.var(1, correction=0) + 1e-5).rsqrt()
    same(stats, torch.stack((mean, rstd)))
    same(norm(x.transpose(0, 1), 1, None, None, 1e-5, LAYER, dtype, False)[0],
         F.layer_norm(x.transpose(0, 1).contiguous(), (8,)))  # fmt: skip
    for casting, kind in RMS.items():
        found, stats = norm(x, 2, weight, None, 1e-5, kind, dtype, True)
        same(found, reference.rms_norm(x, (4, 8), weight, 1e-5, casting))
        same(stats, (rows.square().mean(1) + 1e-5).rsqrt()[None])
    found, total, _ = LOWERINGS["add_layer_norm_forward"](x, residual, 2, weight, bias, 1e-5, LAYER, dtype, False)
    same(total, x + residual)
    same(found, F.layer_norm(x + residual, (4, 8), weight, bias))
    same(LOWERINGS["native_layer_norm"](x, (4, 8), weight, bias, 1e-5)[0], F.layer_norm(x, (4, 8), weight, bias))
    of_norm = LOWERINGS["layer_norm_backward"]
    rows = x.to(wide(dtype)).requires_grad_()
    for kind, stats in (
        (LAYER, torch.stack((mean, rstd))),
        (RMS["torch"], (x.to(wide(dtype)).flatten(1).square().mean(1) + 1e-5).rsqrt()[None]),
    ):
        normed = F.layer_norm(rows, (4, 8)) if kind == LAYER else reference.rms_norm(rows, (4, 8), None, 1e-5, "torch")
        (expected,) = torch.autograd.grad(normed, rows, y.to(wide(dtype)))
        same(of_norm(y, None, x, 2, None, stats, kind, False, False)[0], expected.to(dtype))
        twice = of_norm(y, residual, x, 2, None, stats, kind, False, False, torch.bfloat16)
        same(twice[0], (expected + residual).to(dtype))
        same(twice[3], twice[0].bfloat16())
    image, moments = torch.randn(3, 4, 8, 2).to(dtype), (torch.randn(4), torch.rand(4) + 0.5)
    affine = torch.randn(4), torch.randn(4)
    for act in BY_CODE.values():
        found, *_ = LOWERINGS["batch_norm_eval"](image, *moments, *affine, 1e-3, image * 2, act.code, False, False)
        normed = F.batch_norm(image.to(wide(dtype)), *(t.to(wide(dtype)) for t in (*moments, *affine)), eps=1e-3)
        same(found, act.function(normed + 2 * image).to(dtype))
    found, *_ = LOWERINGS["batch_norm_eval"](image, *moments, None, None, 1e-3, None, 0, False, False)
    same(found, F.batch_norm(image.to(wide(dtype)), *(t.to(wide(dtype)) for t in moments), eps=1e-3).to(dtype))
    found = LOWERINGS["channel_bias_act_"](image, affine[0], image * 2, BY_CODE[1].code)
    same(found, F.relu(3 * image.to(wide(dtype)) + affine[0].to(wide(dtype)).view(-1, 1, 1)).to(dtype))
    softmax, backward = LOWERINGS["softmax_forward"], LOWERINGS["softmax_backward"]
    mask = torch.randn(4, 1).to(dtype)
    same(softmax(x, 2, 0.5, mask, dtype, False), F.softmax((x * 0.5 + mask), 2))
    scores = x.detach().requires_grad_()
    share = F.softmax(scores * 0.5, 2)
    same(backward(y, share.detach(), 2, 0.5, None, dtype, False), torch.autograd.grad(share, scores, y)[0])
    keep = torch.tensor([1.0, 0.0, 1.0], dtype=wide(dtype))
    scaled = x.to(wide(dtype)) * weight * keep.view(-1, 1, 1) * 1.25
    same(LOWERINGS["scale_add"](x, weight, residual, keep, 1.25, dtype), (residual + scaled).to(dtype))
    same(LOWERINGS["scale_add"](x, None, None, None, 2.0, dtype), x * 2)
    for act in BY_CODE.values():
        parameters = tuple(act.parameters.values())
        biased = act.function(x.to(wide(dtype)) + bias.to(wide(dtype)), *parameters).to(dtype)
        same(LOWERINGS["bias_act_forward"](x, bias, act.code, *(*parameters, 0.0, 0.0)[:2]), biased)
        same(LOWERINGS["bias_act_forward"](x, None, 1, 0.0, 0.0), F.relu(x))
        if act.code in DERIVATIVES:
            z = F.relu(x) if act.code == 1 else x.to(wide(dtype)) + bias.to(wide(dtype))
            expected = act.backward(y.to(wide(dtype)), z.to(wide(dtype)))
            call = (y, z.to(dtype), None) if act.code == 1 else (y, x, bias)
            found, summed = LOWERINGS["bias_act_backward"](*call, act.code, 0.0, 0.0, True, wide(dtype))
            same(found, expected.to(dtype))
            same(summed, found.to(wide(dtype)).sum((0, 1)))
        gated = (act.function(x.to(wide(dtype))) * y).to(dtype)
        same(LOWERINGS["gated_forward"](x, y, act.code), gated)
    for name, function in (("var", torch.var), ("std", torch.std)):
        for options in ({}, {"correction": 0, "keepdim": True}, {"correction": 1.5}):
            same(LOWERINGS[f"{name}.correction"](x, (0, 2), **options), function(x, (0, 2), **options))
    for actual, expected in zip(LOWERINGS["var_mean.correction"](x, (1,)), torch.var_mean(x, (1,)), strict=True):
        same(actual, expected)
    for refused in (
        lambda: softmax(x, 2, 1.0, None, dtype, True),
        lambda: softmax(x, 2, 1.0, mask > 0, dtype, False),
        lambda: backward(y, x, 2, 1.0, mask, dtype, False),
        lambda: of_norm(y, None, x, 2, weight, stats, LAYER, True, False),
        lambda: LOWERINGS["bias_act_backward"](y, x, None, BY_CODE[10].code, 0.0, 0.0, False),
        lambda: LOWERINGS["var.correction"](x, (2,), correction=8),
    ):
        with pytest.raises(NotImplementedError):
            refused()


def scaled_add_norm(x, residual, gamma, weight):
    y, s = FL.add_layer_norm(x * gamma, residual, (64,), weight, weight)
    return y * 2, s


#: Kernels with neighbours, the shapes of the arguments, and how many launches are left of the forward. Of a modulation
#: 1 + scale is kept.
NEIGHBOURS = {
    "scale, sum, norm": (scaled_add_norm, [(4, 6, 64), (4, 6, 64), (64,), (64,)], 1),
    "sum, norm": (lambda x, y, w: (lambda s: (FL.rms_norm(s, (64,), w), s))(x * y), [(4, 6, 64), (4, 6, 64), (64,)], 1),
    "norm, turned": (
        lambda x, w: FL.layer_norm(x, (64,), w).view(2, 2, 3, 2, 64).transpose(1, 2).reshape(4, 6, 64),
        [(4, 6, 64), (64,)], 1,
    ),
    "norm, modulation": (
        lambda x, s, t: FL.layer_norm(x, (64,)) * (1 + s[:, None]) + t[:, None], [(4, 6, 64), (4, 64), (4, 64)], 2,
    ),
    "norm alone": (lambda x, w: FL.layer_norm(x, (64,), w), [(4, 6, 64), (64,)], 1),
    "softmax": (lambda x, m: FL.softmax(x * 3, -1, scale=0.5, mask=m) * 2, [(4, 300, 64), (300, 64)], 1),
    "gate, norm": (lambda x, y, w: FL.rms_norm(FL.swiglu(x, y), (64,), w), [(4, 6, 64), (4, 6, 64), (64,)], 1),
    "cat, batch norm": (
        lambda x, y, w: FL.batch_norm(
            torch.cat((x.detach(), y.detach()), 1), torch.zeros_like(w), torch.ones_like(w), w.detach(), w.detach(),
            act="relu",
        ) * 2,
        [(4, 6, 9, 9), (4, 10, 9, 9), (16,)], 1,
    ),
    "activation, norm of columns": (
        lambda x, b: (lambda h: h * torch.linalg.vector_norm(h, 2, (1, 2), keepdim=True))(FL.bias_act(x, b, "gelu")),
        [(2, 8, 8, 64), (64,)], 2,
    ),
    "scale_add": (lambda x, y, g: FL.scale_add(x * 2, g, y) + 1, [(4, 6, 64), (4, 6, 64), (64,)], 1),
}  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_kernels_and_their_neighbours(name, dtype):
    function, shapes, launched = NEIGHBOURS[name]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    _, other = check(function, *inputs, tolerance=4 * TOLERANCE[dtype])
    assert launches(other.forward) == launched, names(other.forward)
    assert any(type(o.function) is Kernel for o in other.forward) == (name != "norm alone")
