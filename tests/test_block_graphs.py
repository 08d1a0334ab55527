"""Whole blocks in graphs of torch.compile: raw ops, forward and backward, in one graph without a break.

On a CPU the stand-ins of test_blocks are registered as the raw ops' kernels while a test runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from harness import DRAWS, excess, greatest_error, needs_gpu, same_bits
from test_autocast import ConvNeXtBlock
from test_blocks import BLOCKS, Blocks, given_to, made, results
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastlayers import patch_model
from fastlayers.ops import autocast, dispatch

#: What graphs do not hold: it writes statistics and gives tensors.
NOT_FUNCTIONAL = "convolution_chain_autocast"
pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.fastlayers, "convolution_chain_moments"), reason="csrc is not built"
)


class Held(Blocks):
    """The stand-ins, and those of ops that graphs alone hold."""

    def convolution_chain_moments(self, x, weights, of_gate, ints, floats, about):
        fresh: list[Tensor] = []
        for gain in weights[1::3]:
            fresh += torch.zeros_like(gain), torch.zeros_like(gain), torch.tensor(0)
        eps = [number for step in floats[1::2] for number in (1.0, step)]
        found = self.convolution_chain_autocast(x, weights, of_gate, fresh, ints, eps, about)
        self.called[-1] = "convolution_chain_moments"
        return [*found, *map(torch.stack, zip(fresh[::3], fresh[1::3], strict=True))]

    def batch_norm_update_(self, mean, var, batches, moments, momentum):
        self.called.append("batch_norm_update_")
        batches.add_(1)
        for running, moment in ((mean, moments[0]), (var, moments[1])):
            running.mul_(1 - momentum).add_(momentum * moment)


def owned(stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """What a stand-in gives in memory of its own, as an op has to."""

    def call(*args: Any) -> Any:
        found = stand_in(*args)
        return found if found is None else type(found)(t.clone() for t in found)

    return call


@pytest.fixture
def kernels(monkeypatch) -> Iterator[Blocks]:
    found = Held()
    monkeypatch.setattr(dispatch, "graph_keeps_kernel", lambda x: True)
    monkeypatch.setattr(dispatch, "graph_holds_csrc", lambda: True)
    library = torch.library.Library("fastlayers", "IMPL", "CPU")
    for name in dir(found):
        if "_autocast" in name and name != NOT_FUNCTIONAL:
            library.impl(name, owned(getattr(found, name)))
    library.impl("convolution_chain_moments", owned(found.convolution_chain_moments))
    library.impl("batch_norm_update_", found.batch_norm_update_)
    torch._dynamo.reset()
    yield found
    library._destroy()
    torch._dynamo.reset()


def compiled(model: nn.Module, graphs: list[Any], backend: Any = None, dynamic: bool | None = None) -> nn.Module:
    """It as one graph, which is run as it is; the graphs of forward and backward are put into the list."""

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    backend = backend or aot_autograd(fw_compiler=keep)
    return torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)  # type: ignore[return-value]


EACH_BLOCK = pytest.mark.parametrize("name", [*BLOCKS, "convnext"])
#: One for each op.
EACH_KIND = ("bottleneck", "transformer", "convnext")
#: The ops that Dynamo puts into its graphs for a block.
WHOLE = ("convolution_chain", "transformer_block", "convnext_block")
OPS = {
    "transformer": ("transformer_block_autocast_open", "transformer_block_autocast_close"),
    "convnext": ("convnext_block_autocast",),
}


def block(name: str, device: str = "cpu") -> nn.Module:
    if name in BLOCKS:
        return made(name, device)
    torch.manual_seed(0)
    return ConvNeXtBlock().to(device)


def held(graph: list[Any]) -> list[str]:
    """The ops of ours in a graph."""
    names = [str(target) for target in graph]
    return [name.removeprefix("fastlayers.").partition(".")[0] for name in names if name.startswith("fastlayers.")]


@EACH_BLOCK
def test_a_graph_holds_the_raw_ops_of_a_block(kernels, monkeypatch, name):
    """To the bit what eager mode computes, but for running statistics, which are updated in another order."""
    stock, graphs = block(name), []
    floating = sum(t.is_floating_point() for t in stock.buffers())

    def twice(network: nn.Module) -> list[list[Tensor]]:
        found = [results(network, given_to(name, draw=draw), torch.bfloat16) for draw in range(2)]
        return [run[: len(run) - floating] for run in found]

    model = compiled(patch_model(copy.deepcopy(stock)), graphs)
    found = twice(model)
    forward, backward = graphs
    ops = OPS.get(name, ("convolution_chain_moments",))
    assert held(forward) == [*ops]
    assert held(backward) == [f"{op.replace('moments', 'autocast')}_backward" for op in reversed(ops)]
    apart = (torch.ops.aten.convolution.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    assert not set(apart) & {*forward, *backward}
    monkeypatch.setattr(autocast.FAMILY, "kernels_for", lambda x: kernels)
    eager = patch_model(copy.deepcopy(stock))
    kernels.called.clear()
    for mine, theirs in zip(found, twice(eager), strict=True):
        assert all(map(same_bits, mine, theirs))
    assert [op for op in kernels.called if op in (*ops, NOT_FUNCTIONAL)]
    for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", EACH_KIND)
def test_one_graph_for_every_batch(kernels, name):
    stock, graphs = block(name), []
    model = compiled(patch_model(stock), graphs, dynamic=True)
    for images in (4, 3, 5):
        x = torch.cat([given_to(name, draw=draw) for draw in range(3)])[:images]
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        found = results(model, x, torch.bfloat16)
        assert found[0].shape[0] == images
    assert len(graphs) == 2


class CapturedError(Exception):
    """What Dynamo captured is all that is wanted."""


@pytest.mark.parametrize("name", EACH_KIND)
@pytest.mark.parametrize(
    "kept_out_by", [None, "no kernels", "no autocast", "no gradient", "eval", "a frozen parameter", "a hook"]
)
def test_calls_that_blocks_are_not_for(kernels, monkeypatch, name, kept_out_by):
    stock = block(name)
    if kept_out_by == "no kernels":
        monkeypatch.setattr(dispatch, "graph_holds_csrc", lambda: False)
    elif kept_out_by == "eval":
        stock.eval()
    elif kept_out_by == "a frozen parameter":
        next(stock.parameters()).requires_grad_(False)
    model = patch_model(stock)
    if kept_out_by == "a hook":
        leaf = next(module for module in model.modules() if not len(list(module.children())))
        leaf.register_forward_hook(lambda module, args, out: out * 2)
    captured: list[Any] = []

    def capture(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        captured.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        raise CapturedError

    autocasts = kept_out_by != "no autocast"
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocasts),
        torch.set_grad_enabled(kept_out_by != "no gradient"),
        pytest.raises(Exception, match="CapturedError"),
    ):
        compiled(model, [], capture)(given_to(name) if autocasts else given_to(name).float())
    assert captured
    # In others than chains there is nothing that eval changes, and they may be trained in it.
    expected = kept_out_by is None or (kept_out_by == "eval" and name in OPS)
    whole = {getattr(torch.ops.fastlayers, op).default for op in WHOLE}
    assert bool(set(captured) & whole) == expected


def shares_memory(args: Any, found: Any) -> bool:
    """Whether a result lies in the memory of another one, or of what was given."""
    given = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, Tensor)}
    memories = [t.untyped_storage().data_ptr() for t in found if t.numel()]
    return len(set(memories)) < len(memories) or not given.isdisjoint(memories)


@needs_gpu
@EACH_BLOCK
def test_fakes_tell_what_the_kernels_give(monkeypatch, name):
    """Shapes, dtypes and strides, by which Inductor writes its code; and no tensor in the memory of another."""
    x, model = given_to(name, device="cuda"), patch_model(block(name, "cuda"))
    real, called = autocast.FAMILY.kernels_for(x), {}

    def spy(op: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called[op] = args, (found := getattr(real, op)(*args))
            return found

        return call

    spied = SimpleNamespace(**vars(real) | {op: spy(op) for op, kernel in vars(real).items() if callable(kernel)})
    spied.apart = True
    monkeypatch.setattr(autocast.FAMILY, "kernels_for", lambda x: spied)
    results(model, x, torch.bfloat16)
    if NOT_FUNCTIONAL in called:
        ((*before, _, ints, floats, about), _) = called[NOT_FUNCTIONAL]
        args = (*before, ints, floats, about)
        called["convolution_chain_moments"] = args, torch.ops.fastlayers.convolution_chain_moments(*args)
    assert len(called) == {"convnext": 2, "transformer": 4}.get(name, 3)
    for op, (args, found) in called.items():
        if op != NOT_FUNCTIONAL:
            assert not shares_memory(args, found), op
        with FakeTensorMode() as mode:
            given_fakes = tree_map_only(Tensor, mode.from_tensor, args)
            fakes = getattr(torch.ops.fastlayers, op).default(*given_fakes)
        assert len(fakes) == len(found)
        for place, (fake, true) in enumerate(zip(fakes, found, strict=True)):
            assert (fake.dtype, fake.shape) == (true.dtype, true.shape), (op, place)
            assert fake.squeeze().stride() == true.squeeze().stride(), (op, place)


@needs_gpu
@EACH_BLOCK
def test_compiled_by_inductor(monkeypatch, name):
    """As near to float64 as the model as it was, compiled or not: eager mode sums halves where a graph sums floats."""
    from torch._inductor.exc import OperatorIssue
    from torch._inductor.utils import run_and_get_code

    # What it computes for an op of ours that it did not know: in torch 2.11 the time doubles with every block.
    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(lambda *args: pytest.fail("an op was not known")))
    torch._dynamo.reset()
    stock = block(name, "cuda")
    exact, model = copy.deepcopy(stock).double(), patch_model(copy.deepcopy(stock))
    theirs = torch.compile(copy.deepcopy(stock), fullgraph=True)
    mine = torch.compile(model, fullgraph=True)
    errors = []
    for draw in range(4 * DRAWS):
        x = given_to(name, draw=draw, device="cuda")
        true = results(exact, x.double(), None)
        for stock_results in (results(stock, x, torch.bfloat16), results(theirs, x, torch.bfloat16)):
            errors.append([greatest_error(*pair) for pair in zip(stock_results, true, strict=True)])
        found, code = run_and_get_code(results, mine, x, torch.bfloat16)
        if draw == 0:
            text = "".join(code)
            for op in OPS.get(name, ("convolution_chain_moments", "batch_norm_update_")):
                assert f"fastlayers.{op}.default" in text
    for ours, right, *allowed in zip(found, true, *errors, strict=True):
        assert excess(ours, right, max(allowed)) is None
    assert all(int(t) == 4 * DRAWS for t in model.buffers() if not t.is_floating_point())
