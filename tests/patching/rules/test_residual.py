"""Residuals with dropout, stochastic depth and layer scale: what is found, what is left, the answers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import Reason, patch_model, plan_patch, verify_patch
from fastlayers.patching.runtime import calls
from tests.harness import needs_gpu
from tests.patching.harness import fused, reasons, same, tensors, undone

DROP_INIT = """self.drop, self.other, self.flat = nn.Dropout(0.3), nn.Dropout(0.2), nn.Dropout(0.3, inplace=True)
self.linear, self.seq = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.4))
self.p, self.skip, self.gamma = 0.25, nn.Identity(), nn.Parameter(torch.randn(4))"""


@pytest.mark.parametrize(
    "body",
    [
        "return x + self.drop(self.linear(x))",
        "return self.drop(self.linear(x)) + x",
        "return x + F.dropout(self.linear(x), p=self.p, training=self.training)",
        "return F.dropout(self.linear(x), self.p) + x",
        "return F.dropout(self.linear(x)) + x",
        "y = self.drop(self.linear(x))\ny += x\nreturn y",
        "y = self.linear(x)\ny += self.drop(x)\nreturn y",
        "y = self.flat(self.linear(x))\nreturn x + y",
        "return x + self.seq(x)",
        "y = self.drop(x)\nz = self.linear(x)\nreturn z + y",
        "return self.other(self.linear(x)) + self.drop(x)",
        "return x + self.skip(self.drop(x))",
    ],
)
def test_dropout_add(build, body):
    block = build(DROP_INIT, "x", body)
    assert fused(block) == {"dropout_add": 1}
    same(block, *tensors((3, 4)))
    undone(block, torch.randn(3, 4))
    undone(block.eval(), torch.randn(3, 4))


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 3, 4), (2, 4)])
@pytest.mark.parametrize("body", ["return y + self.drop(x)", "x = self.linear(x)\nx += self.drop(y)\nreturn x"])
def test_dropout_add_of_other_shapes(build, shape, body):
    block = build(DROP_INIT, "x, y", body)
    assert fused(block) == {"dropout_add": 1}
    same(block, *tensors((3, 4), shape))
    same(block, *tensors((3, 4)), torch.randn(shape).bfloat16())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = self.drop(x)\nz = self.other(x)\nreturn y + self.linear(z) ** 2 + x", None),
        ("y = self.drop(self.linear(x))\nz = self.seq(x)\nreturn y + z.exp()", Reason.DRAWN_BETWEEN),
        ("y = self.drop(x)\nreturn x + y, y", Reason.USED_ELSEWHERE),
        ("y = self.drop(x)\nreturn torch.add(x, y, alpha=2)", Reason.ALPHA),
        ("y = self.drop(x)\nreturn y + y", None),
        ("y = self.drop(x)\nreturn y + 1", None),
    ],
)
def test_no_dropout_add(build, body, reason):
    block = build(DROP_INIT, "x", body)
    assert reason is None or not fused(block)
    assert reason is None or reason in reasons(block)
    same(block, *tensors((3, 4)))


@needs_gpu
def test_verify_compares_with_torchs_masks(build):
    """A kernel draws another mask from a seed than torch does: large enough, verify would see nothing else."""
    block = patch_model(build(DROP_INIT, "x", "return x + self.drop(self.linear(x))").cuda())
    assert verify_patch(block, torch.randn(2**15, 4, device="cuda"))


def test_dropout_add_follows_its_layer(build):
    block = build(DROP_INIT, "x", "return x + self.drop(self.linear(x))")
    plain, x = copy.deepcopy(block), torch.randn(50, 4)
    patch_model(block)
    for module in (block, plain):
        module.drop.p = 0.9
        module.drop.eval()
    torch.testing.assert_close(block(x), plain(x), rtol=0, atol=0)
    block.drop.train(), plain.drop.train()
    outs = [torch.manual_seed(1) and module(x) for module in (block, plain)]
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    seen = []
    block.drop.register_forward_hook(lambda *args: seen.append(1))
    block(x)
    assert seen == [1]


@pytest.mark.parametrize(
    "body",
    [
        "return x + self.gamma * self.linear(x)",
        "return self.linear(x) * self.gamma + x",
        "y = self.linear(x)\ny *= self.gamma\ny += x\nreturn y",
        "y = self.linear(x)\nreturn x + self.skip(y * self.gamma.view(1, -1))",
    ],
)
def test_layer_scale(build, body):
    block = build(DROP_INIT, "x", body)
    assert fused(block) == {"scale_add": 1}
    same(block, *tensors((3, 4)))
    same(block.bfloat16(), torch.randn(3, 4).bfloat16())
    block.gamma = nn.Parameter(torch.randn(4))
    same(block, torch.randn(3, 4).bfloat16())
    undone(block.float(), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("body", "fused_call"),
    [
        ("return self.drop(self.linear(x)) + x", "dropout_add"),
        ("return x + self.drop(self.linear(x))", "dropout_add"),
        ("return self.linear(x) * self.gamma + x", "scale_add"),
        ("return x + self.linear(x) * self.gamma", "scale_add"),
        ("y = self.linear(x)\ny *= self.gamma\nreturn y + x", None),
        ("y = self.drop(self.linear(x))\ny += x\nreturn y", None),
        ("x = x * 1\nx += self.linear(x) * self.gamma\nreturn x", None),
    ],
)
def test_residuals_under_autocast(build, monkeypatch, op_by_op, body, fused_call):
    """A half goes to a float32 residual as torch promotes it, unless an in-place operation says what comes out."""
    called = []
    for name in ("dropout_add", "scale_add"):
        given = getattr(calls.functional, name)

        def noted(*args, name=name, given=given):
            called.append(name)
            return given(*args)

        monkeypatch.setattr(calls.functional, name, noted)
    block = build(DROP_INIT, "x", body).eval()
    plain, x = copy.deepcopy(block), torch.randn(3, 4)
    patch_model(block)
    with torch.autocast("cpu"):
        ours, theirs = block(x), plain(x)
    torch.testing.assert_close(ours, theirs)
    assert called == ([fused_call] if fused_call else [])


@pytest.mark.parametrize(
    "body",
    [
        "return x + (self.gamma * y).permute(0, 3, 1, 2)",
        "return x + self.skip((y * self.gamma).permute((0, -1, 1, 2)))",
        "return (y * self.gamma).permute(0, 3, 1, 2) + x",
        "return torch.permute(y * self.gamma.view(1, -1), (0, 3, 1, 2)) + x",
        "return x[:, :, :1] + (y * self.gamma).permute(0, 3, 1, 2)",
        "return x + self.path((y * self.gamma).permute(0, 3, 1, 2))",
        "return x.permute(2, 3, 0, 1) + self.path((y * self.gamma).permute(1, 2, 0, 3))",
    ],
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_layer_scale_before_a_permute(build, body, channels_last):
    pytest.importorskip("torchvision")
    path = "self.path = __import__('torchvision').ops.StochasticDepth(0.5, 'row')"
    block = build(f"{DROP_INIT}\n{path}", "x", f"y = self.linear(x.permute(0, 2, 3, 1))\n{body}")
    assert fused(block) == {"scale_add": 1}
    (x,) = tensors((3, 4, 5, 5))
    if channels_last:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    same(block, x)
    undone(block, x.detach())


@pytest.mark.parametrize(
    "body", ["x += (y * self.gamma).permute(0, 3, 1, 2)\nreturn x", "y *= self.gamma\nreturn x + y.permute(0, 3, 1, 2)"]
)
def test_a_layer_scale_in_place_before_a_permute(build, body):
    block = build(DROP_INIT, "x", f"x = x * 1\ny = self.linear(x.permute(0, 2, 3, 1))\n{body}")
    same(block, *tensors((3, 4, 5, 5)))


class Unknown(nn.Module):
    def forward(self, x):
        return F.avg_pool1d(x, 3, 1, 1) - x


def test_layer_scale_of_a_residual_that_goes_through_an_identity(build):
    """timm's MetaFormer: the layers in between may write x, which the identity passes on all the same."""
    block = build(DROP_INIT, "x", "return self.skip(x) + self.linear(self.mixer(x)) * self.gamma")
    block.mixer = Unknown()
    assert fused(block) == {"scale_add": 1}, plan_patch(block)
    same(block, *tensors((3, 4)))


def test_no_layer_scale(build):
    for body in ("return x * self.gamma + self.linear.bias", "return x + x * self.linear(x)", "return x + x * 0.5"):
        assert not fused(build(DROP_INIT, "x", body))


@pytest.mark.parametrize("path", [0.0, 0.4])
@pytest.mark.parametrize("inplace", [False, True])
def test_blocks_of_timm(path, inplace):
    layers = pytest.importorskip("timm.layers")
    drop = layers.DropPath(path) if path else nn.Identity()

    class Block(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.f, self.ls, self.drop_path = nn.Conv2d(6, 6, 1), scale, drop

        def forward(self, x):
            return x + self.drop_path(self.ls(self.f(x)))

    x = torch.randn(8, 6, 3, 6)
    for scale in (layers.LayerScale(6, 0.5, inplace), layers.LayerScale2d(6, 0.5, inplace)):
        block = Block(scale)
        assert fused(block) == {"scale_add": 1}
        same(block, x)
        undone(block, x)
    block.drop_path = layers.DropPath(0.5, scale_by_keep=False)
    assert not fused(block)


def test_models_with_stochastic_depth():
    models, timm = pytest.importorskip("torchvision.models.convnext"), pytest.importorskip("timm")
    block = models.CNBlock(8, 0.5, 0.3)
    assert fused(block) == {"scale_add": 1}
    same(block, torch.randn(6, 8, 5, 5))
    undone(block, torch.randn(6, 8, 5, 5))
    options = {"depths": (1, 2, 1, 1), "dims": (8, 16, 16, 16), "drop_path_rate": 0.3, "num_classes": 3}
    model = timm.models.convnext.ConvNeXt(**options)
    undone(model, torch.randn(4, 3, 32, 32))
    patch_model(model)
    found = type(model.stages[1].blocks[1]).__fastlayers_rules__
    assert found == (("forked_convolution", 1), ("cast_layer_norm", 1), ("scale_add", 1))
