"""Scripting, tracing, exporting and compiling of patched models, transforms and checkpoints."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastlayers.patching import (
    PatchError,
    patch_model,
    patch_report,
    unpatch_model,
)
from tests.patching.networks import Parts
from tests.patching.world import cells, images, mlp, rows, same, undone

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


@pytest.mark.parametrize(("make", "x"), [(mlp, rows()), (cells, images())])
def test_scripting_is_refused_with_what_to_do(make, x):
    model = patch_model(make())
    before = [*model.modules()]
    with pytest.raises(PatchError, match=r"is a patched module.*unpatch_model\(model\)"):
        torch.jit.script(model)
    assert [*model.modules()] == before
    scripted = torch.jit.script(unpatch_model(model))
    torch.testing.assert_close(scripted(x), model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("make", "x"), [(mlp, rows()), (cells, images())])
def test_tracing_and_exporting(make, x):
    model = patch_model(make())
    expected = undone(model)(x)
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


class Scores(nn.Module):
    """A scale that is computed from a size, which is a tensor in a trace."""

    def __init__(self, by_power):
        super().__init__()
        self.norm, self.by_power = nn.LayerNorm(8), by_power

    def forward(self, x):
        x = self.norm(x)
        _, D = x.shape
        scores = (x @ x.mT) * D**-0.5 if self.by_power else x @ x.mT / x.size(-1) ** 0.5
        return F.softmax(scores, -1) @ x


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).split(4, -1)
        return q + k * v


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.proj, self.fc, self.out = (nn.Linear(*shape) for shape in ((8, 24), (8, 8), (8, 32), (32, 8)))

    def forward(self, x):
        T, C = x.size()
        q, k, v = (t.view(T, 2, C // 2).transpose(0, 1) for t in self.attn(self.ln_1(x)).split(C, dim=1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(T, C))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("make", [partial(Scores, True), partial(Scores, False), Packed, GPTBlock])
def test_a_trace_is_that_of_the_stock_model(make, trains, recorded):
    """With torch's own check, which traces a second time."""
    stock = make().train(trains)
    model = patch_model(copy.deepcopy(stock))
    for _ in range(3 * recorded):
        model(rows())
    expected, found = (torch.jit.trace(m, (rows(),)) for m in (stock, model))
    kinds = [[node.kind() for node in traced.inlined_graph.nodes()] for traced in (expected, found)]
    assert kinds[1] == kinds[0]
    torch.testing.assert_close(found(rows()), stock(rows()))


class Branching(Parts):
    """Cannot be recorded as a whole, but torch.fx follows it."""

    def forward(self, x, **options):
        h = torch.softmax(self.linear(x) * 2, dim=-1)
        return h + options.get("more", 0)


def test_symbolic_trace_of_stretches():
    model = Branching(linear=nn.Linear(8, 8))
    traced = torch.fx.symbolic_trace(patch_model(model))
    assert patch_report(model)[""].fused
    assert torch.softmax in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(rows()), undone(model)(rows()))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["patched, compiled", "compiled, patched"])
def test_the_compile_method(order):
    model, stock = mlp(), mlp()
    torch._dynamo.reset()
    for action in order.split(", "):
        if action == "patched":
            patch_model(model)
        else:
            model.compile(backend="aot_eager")
            same(model, stock, rows())
    same(model, stock, rows())
    unpatch_model(model)
    same(model, stock, rows())
    patch_model(model)
    model[0].act = stock[0].act = nn.ReLU()
    same(model, stock, rows())


def test_functional_calls_and_transforms():
    model, stock = patch_model(mlp()), mlp()
    parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}

    def call(either, parameters, x):
        return torch.func.functional_call(either, parameters, (x,))

    torch.testing.assert_close(call(model, parameters, rows()), call(stock, parameters, rows()))
    torch.testing.assert_close(torch.func.vmap(model)(rows()), torch.func.vmap(stock)(rows()))
    torch.testing.assert_close(torch.func.jacrev(model)(rows()), torch.func.jacrev(stock)(rows()))
    torch.testing.assert_close(torch.func.jvp(model, (rows(),), (rows(),)), torch.func.jvp(stock, (rows(),), (rows(),)))
    clones = [model, copy.deepcopy(model)]
    stacked, buffers = torch.func.stack_module_state(clones)
    base, x = copy.deepcopy(model).to("meta"), rows()
    both = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(stacked, buffers)
    torch.testing.assert_close(both, torch.stack([stock(x)] * 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_patched_blocks(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model, stock = Checkpointed(*mlp(True)), Checkpointed(*mlp(True))
    same(patch_model(model), stock, rows())
