"""Raw ops: declared once, the same in csrc and in Triton, and held by graphs that torch.compile makes."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pkgutil

import pytest
import torch
from functorch.compile import aot_function
from torch import nn

from fastlayers import ops, patch_model
from fastlayers.ops import graph_ops, raw_ops
from tests.harness import DRAWS, excess, greatest_error, needs_gpu

FAMILIES = {
    family.name: family
    for module in pkgutil.iter_modules(ops.__path__)
    if isinstance(
        family := getattr(importlib.import_module(f"fastlayers.ops.{module.name}"), "FAMILY", None), raw_ops.Family
    )
}
RAW = [(name, op) for name, family in FAMILIES.items() for op in family.ops]
needs_csrc = pytest.mark.skipif(not hasattr(torch.ops.fastlayers, "layer_norm_forward"), reason="csrc is not built")


def test_families_are_found():
    assert {"softmax", "layer_norm", "batch_norm", "elementwise", "autocast"} <= FAMILIES.keys()
    assert len(RAW) > 40


@needs_csrc
@pytest.mark.parametrize(("family", "op"), RAW)
def test_csrc_has_the_schema_that_is_declared(family, op):
    """Names, types and order of the arguments, and the types of the results."""
    if op in FAMILIES[family].triton_only:
        assert not hasattr(torch.ops.fastlayers, op)
        return
    declared = torch._C.parse_schema(op + torch.library.infer_schema(FAMILIES[family].ops[op], mutates_args=()))
    raw = getattr(torch.ops.fastlayers, op).default._schema
    assert [(a.name, str(a.type)) for a in raw.arguments] == [(a.name, str(a.type)) for a in declared.arguments]
    assert [str(r.type) for r in raw.returns] == [str(r.type) for r in declared.returns]


@needs_csrc
def test_all_ops_of_csrc_are_declared():
    declared = {
        f"fastlayers::{op}" for family in FAMILIES.values() for op in family.ops.keys() - set(family.triton_only)
    }
    in_csrc = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastlayers::")}
    in_python = {
        name for name in in_csrc if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    }
    heads = ("linear_cross_entropy", "linear_divergence", "linear_log_prob")
    opaque = {f"fastlayers::{head}_{direction}" for head in heads for direction in ("forward", "backward")}
    opaque |= {"fastlayers::linear_topk", "fastlayers::linear_accuracy"}  # without a backward
    assert in_csrc - in_python - opaque == declared


@pytest.mark.parametrize(("family", "op"), RAW)
def test_triton_has_the_parameters_that_are_declared(family, op):
    pytest.importorskip("triton")
    if FAMILIES[family].ops.keys() == set(FAMILIES[family].csrc_only):
        assert importlib.util.find_spec(f"fastlayers.kernels.{family}") is None
        return
    module = importlib.import_module(f"fastlayers.kernels.{family}")
    if op in FAMILIES[family].csrc_only:
        assert not hasattr(module, op)
    else:
        declared = inspect.signature(FAMILIES[family].ops[op]).parameters
        assert list(inspect.signature(getattr(module, op)).parameters) == list(declared)


class CapturedError(Exception):
    """The joint graph is all that is wanted."""


@needs_csrc
@pytest.mark.parametrize("csrc", [True, False])
def test_a_graph_holds_raw_ops_of_both_directions(monkeypatch, csrc):
    monkeypatch.setattr(graph_ops, "graph_holds_csrc", lambda: csrc)
    held = []

    def look(joint, *args, **options):
        held.extend(str(node.target) for node in joint.graph.nodes if str(node.target).startswith("fastlayers"))
        raise CapturedError

    def both(x, weight, bias):
        y = torch.ops.fastlayers.layer_norm(x, weight, bias, 1, 1e-5, 0, torch.float32)
        return torch.ops.fastlayers.batch_norm(y, None, weight, bias, 1e-5, 0)[0]

    leaves = [torch.ones(shape, requires_grad=True) for shape in ((4, 8), (8,), (8,))]
    with pytest.raises(CapturedError):
        aot_function(both, fw_compiler=None, partition_fn=look)(*leaves)
    expected = ["layer_norm_forward", "batch_norm_moments", "batch_norm_backward", "layer_norm_backward"]
    assert held == [f"{'fastlayers' if csrc else 'fastlayers_triton'}.{op}.default" for op in expected]


@needs_csrc
def test_inductor_is_shown_the_ops_that_graphs_hold(monkeypatch):
    """Before torch 2.13. It refuses a composite op, which it never meets."""
    from torch._inductor import lowering

    shown = []
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(lowering, "make_fallback", lambda op, layout_constraint: shown.append(op))
    graph_ops.show_to_inductor.__wrapped__()
    names = {op.name() for op in shown}
    assert "fastlayers::layer_norm_forward" in names
    assert "fastlayers::layer_norm" not in names


@needs_gpu
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # torch's own tests forbid to set the flag itself
def test_a_compiled_network_runs_raw_ops_and_keeps_its_statistics():
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(49)
    stock = nn.Sequential(*layers).cuda()
    exact, model = copy.deepcopy(stock).double(), patch_model(copy.deepcopy(stock))
    compiled, compiled_stock = torch.compile(model), torch.compile(stock)

    def step(network, x):
        for _ in range(2):
            out = network(x)
        network.zero_grad()
        out.sin().sum().backward()
        counted = (b.to(x.dtype, copy=True) for b in network.buffers())
        return [out.detach(), *(p.grad for p in network.parameters()), *counted]

    def stacked(runs):
        return [torch.stack(results) for results in zip(*runs, strict=True)]

    draws = [torch.randn(4, 3, 9, 9, device="cuda") for _ in range(DRAWS)]
    first, code = run_and_get_code(step, compiled, draws[0])
    text = "".join(code)
    for raw in ("batch_norm_moments", "batch_norm_update_", "batch_norm_backward", "layer_norm_forward"):
        assert f"fastlayers.{raw}.default" in text
    for whole in ("batch_norm", "layer_norm"):
        assert f"fastlayers.{whole}.default" not in text
    ours = stacked([first, *(step(compiled, x) for x in draws[1:])])
    theirs = stacked(step(compiled_stock, x) for x in draws)
    true = stacked(step(exact, x.double()) for x in draws)
    for mine, its, right in zip(ours, theirs, true, strict=True):
        assert not (found := excess(mine, right, greatest_error(its, right))), found
