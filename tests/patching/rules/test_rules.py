"""The graph rules: every spelling is found, what is not safe is left alone, and either way the answers stay."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers.patching import Reason, patch_model, plan_patch, unpatch_model
from fastlayers.patching.rewrite.generate import share_lookups
from fastlayers.patching.runtime.checks import untouched
from tests.patching.harness import fused, reasons, same, tensors

RELU_ADD = [
    "return F.relu(x) + y",
    "return y + F.relu(x)",
    "return torch.relu(x) + y",
    "return x.relu() + y",
    "return x.relu().add(y)",
    "return y.add(x.relu())",
    "return torch.add(F.relu(x), y)",
    "return torch.add(F.relu(x), y, alpha=1)",
    "return torch.add(input=F.relu(input=x), other=y)",
    "return operator.add(F.relu(x), y)",
    "r = F.relu(x)\nr += y\nreturn r",
    "r = F.relu(x)\nr.add_(y)\nreturn r",
    "r = F.relu(x)\nreturn r.add_(y)",
    "r = x * 2\nr.relu_()\nreturn r + y",
    "r = torch.relu_(x * 2)\nreturn r + y",
    "return F.relu_(x * 2) + y",
    "return F.relu(x * 2, inplace=True) + y",
    "return F.relu(x * 2, True) + y",
    "z = y * 2\nz += F.relu(x)\nreturn z",
    "return self.act(x) + y",
    "return self.inner(x * 2) + y",
    "a, b = x, y\nout = F.relu(a)\nout = out + b\nreturn out",
    "return F.relu(x).add(other=y)",
]
ADD_RELU = [
    "return F.relu(x + y)",
    "return torch.relu(x + y)",
    "return (x + y).relu()",
    "return (x + y).relu_()",
    "return torch.relu_(x + y)",
    "return F.relu(x + y, inplace=True)",
    "return F.relu(torch.add(x, y))",
    "return F.relu(torch.add(x, y, alpha=1), inplace=True)",
    "return F.relu(x.add(y))",
    "return self.act(x + y)",
    "return self.inner(x + y)",
    "out = x * 2\nout += y\nout = self.inner(out)\nreturn out",
    "out = x * 2\nout += y\nreturn F.relu(out)",
    "out = self.fc(x)\nout += y\nout = self.inner(out)\nreturn out",
    "out = self.fc(x)\nout.add_(y)\nreturn out.relu_()",
    "out = self.stack(x)\nout += y\nreturn out.relu_()",
    "out: torch.Tensor = x + y\nreturn F.relu(out)",
    "if (z := x + y) is not None:\n    return F.relu(z)",
    "return {'out': F.relu(x + y)}['out']",
    "return [F.relu(a + b) for a, b in [(x, y)]][0]",
]
LAYERS = """self.act = nn.ReLU()
self.inner = nn.ReLU(inplace=True)
self.fc = nn.Linear(4, 4)
self.stack = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))"""


@pytest.mark.parametrize("body", RELU_ADD)
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 4), (2, 3, 4)), ((1, 4), (3, 1))])
def test_relu_add_in_every_spelling(build, body, shapes):
    block = build(LAYERS, "x, y", body)
    assert fused(block) == {"relu_add": 1}
    same(block, *tensors(*shapes))


@pytest.mark.parametrize("body", ADD_RELU)
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 4), (4,)), ((3, 4), (2, 3, 4)), ((1, 4), (3, 1))])
def test_add_relu_in_every_spelling(build, body, shapes):
    block = build(LAYERS, "x, y", body)
    assert fused(block) == {"add_relu": 1}
    same(block, *tensors(*shapes))


@pytest.mark.parametrize(
    "body",
    [
        "return F.relu(x) + y + 0.5",
        "return 0.5 + (F.relu(x) + y)",
        "return F.relu(x) + y + self.bias",
        "return self.bias + (y + F.relu(x))",
        "return torch.add(F.relu(x) + y, self.scale)",
        "return (F.relu(x) + y).add(1)",
    ],
)
def test_relu_add_bias(build, body):
    block = build("self.bias = nn.Parameter(torch.randn(4))\nself.scale = 0.25", "x, y", body)
    assert fused(block) == {"relu_add_bias": 1}
    same(block, *tensors((3, 4), (3, 4)))


SOFTMAX_INIT = """self.scale = 0.125
self.n = 2
self.soft = nn.Softmax(dim=-1)
self.logsoft = nn.LogSoftmax(dim=1)
self.bias = nn.Parameter(torch.randn(5))
self.register_buffer("keep", torch.ones(5, 5, dtype=torch.bool).tril())"""
SOFTMAX = [
    "return F.softmax(x, dim=-1)",
    "return F.softmax(x, 1)",
    "return x.softmax(-1)",
    "return x.softmax(dim=-1, dtype=torch.float64)",
    "return torch.softmax(x, -1)",
    "return torch.softmax(input=x, dim=0)",
    "return torch.special.softmax(x, -1)",
    "return F.log_softmax(x, dim=-1)",
    "return x.log_softmax(1)",
    "return F.softmax(x / math.sqrt(x.size(-1)), dim=-1)",
    "return F.softmax(x / math.sqrt(x.shape[-1]), dim=-1)",
    "return F.softmax(x / (x.shape[-1] ** 0.5), dim=-1)",
    "return F.softmax(x * x.shape[-1] ** -0.5, dim=-1)",
    "return F.softmax(x / math.sqrt(5), dim=-1)",
    "return (x * self.scale).softmax(-1)",
    "return (self.scale * x).softmax(-1)",
    "return torch.mul(x, self.scale).softmax(-1)",
    "return x.div(self.n).softmax(-1)",
    "x = x * 1\nx *= self.scale\nreturn x.softmax(-1)",
    "x = x * 1\nx /= 3\nreturn x.softmax(-1)",
    "return x.mul(2).softmax(-1, dtype=torch.float64)",
    "return self.soft(x * self.scale)",
    "return self.logsoft(x * self.scale)",
    "return self.soft(x + self.bias)",
    "return F.softmax(x + self.bias, -1)",
    "return F.softmax(self.bias + x * 2, -1)",
    "return F.softmax(x * 0.5 + self.keep, -1)",
    "return F.softmax(x * 0.5 + self.bias, -1, dtype=torch.float64)",
    "return F.softmax(x.masked_fill(self.keep == 0, float('-inf')), -1)",
    "return F.softmax(x.masked_fill(~self.keep, -torch.inf), -1)",
    "return F.softmax((x * 2).masked_fill(torch.logical_not(self.keep), -math.inf), -1)",
    "return torch.masked_fill(x / 2, ~self.keep, float('-inf')).log_softmax(-1)",
    "s = x * 2\ns.masked_fill_(~self.keep, float('-inf'))\nreturn s.softmax(-1)",
    "s = x / 2\ns += self.bias\nreturn s.softmax(-1)",
    "return torch.where(self.keep, x * 2, float('-inf')).softmax(-1)",
    "return torch.where(self.keep, float('-inf'), x).softmax(0)",
    "return torch.where(~self.keep, float('-inf'), x).softmax(-1)",
]


@pytest.mark.parametrize("body", SOFTMAX)
def test_softmax_in_every_spelling(build, body):
    block = build(SOFTMAX_INIT, "x", body)
    assert fused(block) == {"softmax": 1}
    patch_model(block)
    assert repr(block).startswith("FusedBlock(")
    unpatch_model(block)
    same(block, *tensors((5, 5)))


def test_the_largest_softmax_wins(build):
    block = build(SOFTMAX_INIT, "x", "return (x / 3).masked_fill(~self.keep, float('-inf')).softmax(-1)")
    patch_model(block)
    source = type(block).__fastlayers_source__
    assert "softmax_masked" in source
    assert "0.333" in source
    assert "masked_fill(" not in source.replace("softmax_masked", "")


@pytest.mark.parametrize(
    "body",
    [
        "return F.softmax(x * self.tensor, -1)",
        "return F.softmax(x * x, -1)",
        "return F.softmax(x.masked_fill(~self.keep, -1e9), -1)",
        "return F.softmax(x.masked_fill(~self.keep, torch.finfo(x.dtype).min), -1)",
        "return torch.where(self.keep, x, -1e4).softmax(-1)",
        "return F.softmax(torch.add(x, self.bias, alpha=2), -1)",
        "return F.softmax(x.masked_fill(~self.keep, float('-inf')) * 2, -1)",
        "return F.softmax(x // 2, -1)",
        "return F.softmax(torch.div(x, 2, rounding_mode='floor'), -1)",
        "s = x * 2\nreturn F.softmax(s, -1), s",
        "s = x + self.bias\nreturn F.softmax(s, -1) + s",
    ],
)
def test_softmax_alone_is_fused_where_the_rest_is_not(build, body):
    init = SOFTMAX_INIT + "\nself.tensor = nn.Parameter(torch.tensor(2.0))\nself.soft = self.logsoft = None"
    block = build(init, "x", body)
    assert fused(block) == {"softmax": 1}
    same(block, *tensors((5, 5)))


def test_a_fully_masked_row_is_nan_as_torch_has_it(build):
    block = build("", "x, m", "return (x * 2).masked_fill(m, float('-inf')).softmax(-1)")
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    same(block, *tensors((5, 5)), mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "body",
    [
        "return (x + m).softmax(-1)",
        "return x.masked_fill(m, float('-inf')).softmax(-1)",
        "return x.masked_fill(~m, float('-inf')).softmax(-1)",
        "return x.masked_fill(m == 0, float('-inf')).softmax(-1)",
        "return torch.where(m, x, float('-inf')).softmax(-1)",
        "return torch.where(m, float('-inf'), x).softmax(-1)",
        "x = x * 1\nx += m\nreturn x.softmax(-1)",
        "x = x * 1\nx.masked_fill_(m, float('-inf'))\nreturn x.softmax(-1)",
    ],
)
@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_masks_of_any_dtype_mean_what_they_meant(build, body, dtype):
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]).to(dtype)
    same(build("", "x, m", body), *tensors((3, 4)), mask)
    same(build("", "x, m", body), *tensors((4,)), mask)


@pytest.mark.parametrize("x", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("y", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize(
    "body",
    [
        "return F.relu(x) + y",
        "return F.relu(x + y)",
        "x = x.clone()\nx += y\nreturn F.relu(x)",
        "x = F.relu(x)\nx += y\nreturn x",
        "y = y.clone()\ny += F.relu(x)\nreturn y",
        "return F.relu(x) + y + 0.5",
    ],
)
def test_dtypes_promote_as_before(build, body, x, y):
    same(build("", "x, y", body), torch.arange(-4, 4).to(x), torch.arange(-3, 5).to(y))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("r = F.relu(x)\nreturn r + y, r", Reason.USED_ELSEWHERE),
        ("s = x + y\nreturn F.relu(s) - s", Reason.USED_ELSEWHERE),
        ("s = x + y\nreturn F.relu(s), s.sum()", Reason.USED_ELSEWHERE),
        ("return torch.add(F.relu(x), y, alpha=2)", Reason.ALPHA),
        ("return F.relu(x.add(y, alpha=0.5))", Reason.ALPHA),
        ("x += y\nreturn F.relu(x)", Reason.VISIBLE_MUTATION),
        ("x.relu_()\nreturn x + y", Reason.VISIBLE_MUTATION),
        ("return F.relu(x, inplace=True) + y", Reason.VISIBLE_MUTATION),
        ("return self.inner(x) + y", Reason.VISIBLE_MUTATION),
        ("v = x.view(-1)\nv += 1\nreturn F.relu_(v) + y.view(-1)", Reason.VISIBLE_MUTATION),
        ("y += F.relu(x)\nreturn y", Reason.VISIBLE_MUTATION),
        ("self.buf += F.relu(x)\nreturn x", Reason.CHANGES_STATE),
        ("b = self.buf\nb += F.relu(x)\nreturn b", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nv = a[0]\na += y\nreturn F.relu(a), v", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nv = a.view(-1)\nb = a.relu_() + y\nreturn b, v", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nb = a.relu_() + a\nreturn b", Reason.NOTHING_TO_FUSE),
        ("a = x * 2\nb = a.relu_() + a.view(3, 4)\nreturn b", Reason.USED_ELSEWHERE),
        ("a = x * 2\nv = a.t()\nreturn a.relu_() + v.t()", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nr = F.relu(a)\na.add_(1)\nreturn r + y", Reason.WRITTEN_BETWEEN),
        ("a = x * 2\nr = F.relu(a)\na.mul_(0)\nreturn r + a", Reason.WRITTEN_BETWEEN),
        ("a = cached(x)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nkeep(a)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nself.keeper(a)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = x * 2\nh = self.fc(a)\na += h\nreturn F.relu(a)", None),
        ("r = F.relu(x)\ntorch._C._set_grad_enabled(True)\nreturn r + y", Reason.WRITTEN_BETWEEN),
        ("s = x + y\ntorch.set_default_dtype(torch.float32)\nreturn F.relu(s)", Reason.WRITTEN_BETWEEN),
        ("a = x * 2\nr = F.relu(a)\nself.inner(a)\nreturn r + y", None),
        ("a = x * 2\ns = a + y\na.zero_()\nreturn F.relu(s)", Reason.WRITTEN_BETWEEN),
        ("a = x * 2\nv = a.view(-1)\ns = a + y\nv.zero_()\nreturn F.relu(s)", Reason.WRITTEN_BETWEEN),
        ("a = x * 2\nr = F.relu(self.maybe(a))\nself.writer(a)\nreturn r + y", Reason.WRITTEN_BETWEEN),
        ("a = x * 2\nm = self.maybe(a)\nself.writer(a)\nreturn F.relu(m) + y", None),
        ("a = self.maybe(x)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = self.drop(x)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = self.keeper(x)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = x * 2\ns = a + y\nself.writer(a)\nreturn F.relu(s)", Reason.WRITTEN_BETWEEN),
        ("a = torch.einsum('ij->ji', x)\na += 1\nreturn a.relu_() + y", Reason.VISIBLE_MUTATION),
        ("a = x.to(torch.float32)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = x.contiguous()\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = F.dropout(x, 0.0, False)\na += y\nreturn F.relu(a)", Reason.VISIBLE_MUTATION),
        ("a = x.expand(3, 4)\na = a.reshape(3, 4)\nreturn a.relu_() + y", Reason.VISIBLE_MUTATION),
    ],
)
def test_what_is_not_safe_is_left_alone(build, body, reason, tmp_path):
    init = """self.inner = nn.ReLU(inplace=True)
self.maybe = nn.Identity()
self.drop = nn.Dropout(0.5)
self.keeper = Keeper()
self.writer = Writer()
self.fc = nn.Linear(4, 4)
self.register_buffer("buf", torch.zeros(3, 4))"""
    helpers = """
class Keeper(nn.Module):
    def forward(self, x):
        self.kept = x * 2
        return self.kept
class Writer(nn.Module):
    def forward(self, x):
        x.zero_()
"""
    block = build(helper_init(helpers, init), "x, y", body)
    if reason is not None:
        assert reason in reasons(block), plan_patch(block)
        assert not fused(block), plan_patch(block)
    same(block, *tensors((3, 4), (3, 4)))


def helper_init(helpers, init):
    """Classes that the block's constructor needs, made inside of it."""
    return f"scope = dict(nn=nn)\nexec({helpers!r}, scope)\nKeeper, Writer = scope['Keeper'], scope['Writer']\n{init}"


@pytest.mark.parametrize(
    "body",
    [
        "return F.relu(x) + 1",
        "return F.relu(x) + x.shape[0]",
        "return F.relu(x) + x.dim() + self.training",
        "return F.relu(x + 2)",
        "return F.relu(x) - y",
        "return F.relu6(x) + y",
        "return F.leaky_relu(x) + y",
        "return x.clamp(min=0) + y",
        "return torch.stack([F.relu(x), y]).sum(0)",
        "return F.relu6(x) * y",
    ],
)
def test_what_is_something_else_is_left_alone(build, body):
    block = build("", "x, y", body)
    assert not fused(block)
    assert reasons(block) == {Reason.NOTHING_TO_FUSE}
    same(block, *tensors((3, 4), (3, 4)))


def test_an_implicit_dim_stays_torch_s(build):
    block = build("", "x", "return F.softmax(x)")
    assert reasons(block) == {Reason.IMPLICIT_DIM}


def test_a_tensor_argument_that_is_a_number_takes_the_original_way(build):
    block = patch_model(build("", "x, y", "return F.relu(x) + y"))
    x = torch.randn(3)
    assert torch.equal(block(x, 2.5), F.relu(x) + 2.5)
    assert torch.equal(block(x, y=2), F.relu(x) + 2)


def test_several_places_in_one_forward(build):
    body = """a = F.relu(x + y)
b = F.relu(a) + y + 1.0
c = F.relu(b) + a
return (c * 2).softmax(-1)"""
    block = build("", "x, y", body)
    assert fused(block) == {"relu_add_bias": 1, "add_relu": 1, "relu_add": 1, "softmax": 1}
    same(block, *tensors((3, 4), (3, 4)))


def test_chained_relu_adds(build):
    block = build("", "x, y", "for _ in range(5):\n    x = F.relu(x) + y\nreturn x")
    assert fused(block) == {"add_relu": 4}
    same(block, *tensors((3, 4), (3, 4)))


def test_double_backward(build):
    block = build(
        "self.bias = nn.Parameter(torch.randn(4))", "x, y", "return (F.relu(x + y) * 0.5 + self.bias).softmax(-1)"
    )
    patch_model(block.double())
    x, y = (t.double().detach().requires_grad_() for t in tensors((3, 4), (3, 4)))
    assert torch.autograd.gradcheck(block, (x, y))
    assert torch.autograd.gradgradcheck(block, (x, y))


class BasicBlock(nn.Module):
    """torchvision's, to the letter where it matters."""

    def __init__(self, planes, downsample=None, inplace=True):
        super().__init__()
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x

        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)

        out = self.conv2(out)
        out = self.bn2(out)

        if self.downsample is not None:
            identity = self.downsample(x)

        out += identity
        out = self.relu(out)

        return out


class Attention(nn.Module):
    """timm's and nanoGPT's in one: optional mask, dropout by function and by layer."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.drop = nn.Dropout(0.1)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None, *, need_weights=False):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(mask == 0, float("-inf"))
        attn = attn.softmax(dim=-1)
        attn = F.dropout(attn, 0.1, training=self.training)
        out = self.proj(self.drop((attn @ v).transpose(1, 2).reshape(B, N, C)))
        if need_weights:
            return out, attn
        return out


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("downsample", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_basic_block(inplace, downsample, dtype):
    down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) if downsample else None
    block = BasicBlock(4, down, inplace).to(dtype)
    assert fused(block) == {"conv_batch_norm_add_act": 1, "conv_batch_norm_act": 1}
    same(block, torch.randn(2, 4, 6, 6, dtype=dtype, requires_grad=True))


def test_attention_with_and_without_a_mask():
    block = Attention()
    x, mask = torch.randn(2, 5, 8, requires_grad=True), torch.ones(5, 5).tril()
    same(block, x)
    same(block, x, mask)
    patch_model(block)
    calls = []
    block.eval().qkv.register_forward_hook(lambda *args: calls.append(1))
    out, weights = block(x, need_weights=True)  # not recorded: the original forward
    torch.testing.assert_close(out, block(x))
    assert weights.shape == (2, 2, 5, 5)
    assert torch.equal(block(x, mask=None), block(x))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_attention_compiles_in_one_graph(dynamic):
    block = patch_model(Attention().eval())
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (5, 7):
        x, mask = torch.randn(2, length, 8, requires_grad=True), torch.ones(length, length).tril()
        torch.testing.assert_close(compiled(x, mask), block(x, mask))
        torch.testing.assert_close(compiled(x), block(x))
        compiled(x, mask).sum().backward()
    program = torch.export.export(block, (x, mask))
    torch.testing.assert_close(program.module()(x, mask), block(x, mask))


class SqueezeExcite(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(planes, 2, 1), nn.Conv2d(2, planes, 1)
        self.gate = nn.Sigmoid()
        self.skip = False

    def forward(self, x):
        if self.skip:
            return x
        return x * self.gate(self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))))


class ConvNorm(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.conv = nn.Conv2d(planes, planes, 3, padding=1)
        self.norm = nn.BatchNorm2d(planes)

    def forward(self, x):
        return self.norm(self.conv(x))


class Passes(ConvNorm):
    def forward(self, x):
        return x.view_as(x)


class Keeps(ConvNorm):
    def forward(self, x):
        out = super().forward(x)
        self.kept = out
        return out


class Residual(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.last = last
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.last(self.conv(x))
        out += x
        return self.act(out)


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (lambda: SqueezeExcite(4), None),
        (lambda: ConvNorm(4), None),
        (lambda: nn.Sequential(ConvNorm(4), SqueezeExcite(4)), None),
        (lambda: Passes(4), Reason.VISIBLE_MUTATION),
        (lambda: Keeps(4), Reason.VISIBLE_MUTATION),
        (lambda: nn.Sequential(SqueezeExcite(4), nn.Identity()), Reason.VISIBLE_MUTATION),
    ],
)
def test_children_of_unknown_classes_are_looked_at(last, reason):
    """What ``out += x`` writes must be the child's own tensor, which the child does not keep."""
    block = Residual(last())
    row = plan_patch(block)[""]
    assert row.reason is reason, row
    same(block, torch.randn(2, 4, 5, 5, requires_grad=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block.last, "skip", True),
        lambda block: setattr(block, "last", nn.Identity()),
        lambda block: setattr(block, "last", Passes(4)),
        lambda block: setattr(block.last, "gate", nn.Identity()),
        lambda block: block.last.register_forward_hook(lambda module, args, out: block.seen.append(out)),
        lambda block: setattr(block.last, "forward", lambda x: x),
    ],
)
def test_a_child_that_was_looked_at_and_changes(change):
    block = patch_model(Residual(SqueezeExcite(4)).eval())
    block.conv = nn.Identity()  # so that what the child passes on is the caller's tensor
    block.seen = []
    change(block)
    outcomes = []
    for patched in (True, False):
        if not patched:
            unpatch_model(block)
        block.seen.clear()
        torch.manual_seed(1)
        x = torch.randn(2, 4, 5, 5)
        with torch.no_grad():
            out = block(x)
        outcomes.append((out, x, *(t.clone() for t in block.seen)))
    torch.testing.assert_close(*outcomes)


def test_a_maker_that_is_replaced():
    block = patch_model(BasicBlock(4).eval())
    block.bn2 = nn.Identity()
    block.conv2 = nn.Identity()
    block.relu = nn.ReLU(inplace=True)
    x = torch.randn(2, 4, 5, 5)
    with torch.no_grad():
        actual = block(x.clone())
        unpatch_model(block)
        torch.testing.assert_close(actual, block(x.clone()))


# -- activations that a library wrote out -----------------------------------------------------------------------------

WRITTEN_OUT = {
    "0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))": "gelu_tanh",
    "0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))": "gelu_tanh",
    "x * torch.sigmoid(1.702 * x)": "quick_gelu",
}


@pytest.mark.parametrize("code", WRITTEN_OUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_activation_that_is_written_out(build, code, dtype, autocast):
    module = build("", "x", f"return {code}")
    assert fused(module) == {WRITTEN_OUT[code]: 1}
    x = torch.linspace(-4, 4, 15).to(dtype)
    with torch.autocast("cpu", enabled=autocast):
        same(module, x.requires_grad_(dtype.is_floating_point))


TESTS = [
    "self._modules['a'].p",
    "(self._modules['b']._modules['c'].p or self._modules['a'].p)",
    "self._modules['b']._modules['c'].p and self._modules['d-1'].p",
    "any((self._modules['d-1'].p for _ in range(1)))",
    "(self._modules['b'].p if self._modules['a'].p else self._modules['d-1'].p)",
    "all([self._modules['b'].p, self._modules['b']._modules['c'].p])",
    "self._modules['d-1'].p",
]


def test_tests_share_what_they_look_up():
    """Each child is looked up once, but where that depends on another test; the answer is the same."""
    shared = " and ".join(share_lookups(TESTS))
    assert shared.count("self._modules['a']") == 1
    assert shared.count("self._modules['b']") == 2  # after an or
    assert "self._modules" not in shared.rpartition(" and ")[2]
    for truths in itertools.product((False, True), repeat=4):
        a, b, c, d = (SimpleNamespace(p=p, _modules={}) for p in truths)
        b._modules["c"] = c
        model = SimpleNamespace(_modules={"a": a, "b": b, "d-1": d})
        assert bool(eval(shared, {"self": model})) == all(eval(test, {"self": model}) for test in TESTS)


def test_a_hook_or_another_class_is_seen_in_a_nested_child():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    inner = model[1]
    assert untouched((inner, nn.Sequential), (inner[0], nn.Linear), (inner[1], nn.GELU))
    assert not untouched((inner, nn.Sequential), (inner[0], nn.Linear), (inner[1], nn.ReLU))
    assert untouched((patch_model(inner[0]), nn.Linear))
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(inner[1], f"register_{register}")(lambda *args: None)
        assert not untouched((inner[0], nn.Linear), (inner[1], nn.GELU))
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert not untouched((inner[1], nn.GELU))
    handle.remove()
    inner[1].forward = lambda x: x
    assert not untouched((inner[1], nn.GELU))


class _Transition(nn.Module):
    """Its name begins with an underscore, as one of torchvision's DenseNet does."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(8), _Act()

    def forward(self, x):
        return self.norm(self.act(x) + x)


class _Act(nn.Module):
    def forward(self, x):
        return F.relu(x)


def test_private_classes(op_by_op):
    stock, x = _Transition(), torch.randn(2, 8)
    model = patch_model(nn.Sequential(_Transition()))
    model[0].load_state_dict(stock.state_dict())
    assert model[0].__class__ is not _Transition
    torch.testing.assert_close(model(x), stock(x))
