"""The memory of graphs: one segment, that grows while they are captured."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import fastlayers
from fastlayers.graphs import module as graphs_module
from fastlayers.graphs import pool as graphs_pool
from fastlayers.graphs import words
from fastlayers.graphs.pool import in_one_segment
from fastlayers.graphs.state import Counter
from fastlayers.graphs.words import InWords, concatenated
from fastlayers.ops.modes import needs_operations
from tests.graphs.networks import assert_equal, gpu, inputs, pair, tokens

pytestmark = pytest.mark.usefixtures("deterministic")


GPU = torch.device("cuda", 0)


@pytest.fixture
def allocator(monkeypatch):
    """The settings of torch's allocator, which this test may change, with a device that has virtual memory."""
    if torch.version.cuda is None and not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("torch 2.11 without CUDA does not tell its settings")
    before = graphs_pool.settings()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(graphs_pool, "has_virtual_memory", lambda device: True)
    yield graphs_pool.set_settings
    graphs_pool.set_settings("expandable_segments:False")
    graphs_pool.set_settings(before)


@pytest.mark.parametrize("before", ["", "garbage_collection_threshold:0.8"])
def test_segments_grow_while_graphs_are_captured(allocator, before):
    allocator(before)
    with in_one_segment(GPU):
        assert graphs_pool.settings().split(",") == [*filter(None, [before]), "expandable_segments:True"]
    assert graphs_pool.settings() == before


def test_segments_are_fixed_after_a_capture_that_failed(allocator):
    allocator("")
    with pytest.raises(RuntimeError, match="not permitted"), in_one_segment(GPU):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert graphs_pool.settings() == ""


@pytest.mark.parametrize("value", ["True", "False"])
def test_what_the_user_chose_for_segments_holds(allocator, value):
    allocator(f"expandable_segments:{value}")
    with in_one_segment(GPU):
        assert graphs_pool.settings() == f"expandable_segments:{value}"
    assert graphs_pool.settings() == f"expandable_segments:{value}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_concatenation_in_words(dtype, monkeypatch):
    """Of parts with gaps, as a reduce-scatter along the second dimension has them: with torch's bits and layout."""
    seen, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, dim: seen.append(tensors[0].dtype) or cat(tensors, dim))
    x, odd = torch.randn(4, 6, 16, dtype=dtype), torch.randn(4, 6, 9, dtype=dtype)
    cases = {
        "chunks": (x.chunk(3, 1), 0, True),
        "rows": (x[:, 0].chunk(2), -2, True),
        "the last dimension": (x.chunk(3, 1), -1, False),
        "no gaps": ((x, x), 1, False),
        "odd sizes": (odd.chunk(3, 1), 0, False),
        "unaligned": ((x[:, :, 1:9], x[:, :, 1:9]), 0, False),
        "columns": ((x[:, :, ::2], x[:, :, ::2]), 0, False),
        "other dtypes": ((x[:, :2], x[:, 2:4].double()), 0, False),
        "four dimensions": (x.view(2, 2, 6, 16).chunk(3, 2), 0, False),
        "one dimension": ((torch.randn(0, dtype=dtype), x[:, 0]), 0, False),
    }
    for name, (tensors, dim, in_words) in cases.items():
        seen.clear()
        found, expected = concatenated(tensors, dim), cat(tensors, dim)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride()), name
        assert torch.equal(found, expected), name
        assert (seen == [torch.complex128]) is in_words, name


def test_the_mode_of_a_captured_parallel_model(monkeypatch):
    """It sees the concatenations of a forward and of a backward, and leaves regions as they are."""
    seen = []
    monkeypatch.setattr(words, "concatenated", lambda *args: seen.append(args) or concatenated(*args))
    x = torch.randn(2, 4, 8, requires_grad=True)
    with InWords():
        assert not needs_operations()
        torch.cat(x.detach().chunk(2, 1))
        assert len(seen) == 1
        Concatenates.apply(x).sum().backward()
        assert len(seen) == 2
    assert torch.equal(x.grad, torch.ones_like(x))
    with Counter():
        assert needs_operations()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [Counter, InWords])
def test_modes_that_torch_compiles_in(mode):
    """A function that was compiled as a whole before, and one that is then; and a higher-order operator."""
    from torch.nn.attention.flex_attention import flex_attention

    before, then = (torch.compile(lambda t: (t.sin() * 2).cos(), fullgraph=True, backend="eager") for _ in range(2))
    x, q = torch.randn(4), torch.randn(1, 2, 16, 8)
    expected = before(x)
    with mode() as active:
        found = before(x), then(x)
        attended = flex_attention(q, q, q)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], expected)
    assert torch.equal(then(x), expected)
    torch.testing.assert_close(attended, F.scaled_dot_product_attention(q, q, q))
    assert mode is InWords or active.count > 6


class Concatenates(torch.autograd.Function):
    """The identity, whose backward is a concatenation, as that of an all-gather is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.cat([part.clone() for part in dy.chunk(2, 1)], 1)


def test_a_device_without_virtual_memory_has_fixed_segments(allocator, monkeypatch):
    allocator("")
    monkeypatch.setattr(graphs_pool, "has_virtual_memory", lambda device: False)
    with in_one_segment(GPU):
        assert graphs_pool.settings() == ""


@gpu
def test_graphs_are_in_one_segment():
    _, graphed = pair()
    for _ in range(6):
        graphed(tokens()).sum().backward()
    ((capture,),) = (signature.captures for signature in graphs_module.graphs_of(graphed).signatures.values())
    x = torch.empty(2**26, device="cuda")
    found = torch.cuda.memory_snapshot()
    of_graphs = [s["is_expandable"] for s in found if tuple(s["segment_pool_id"]) == capture.pool.handle]
    assert of_graphs
    assert all(of_graphs)
    assert not any(s["is_expandable"] for s in found if s["address"] == x.data_ptr())


@gpu
@pytest.mark.parametrize("end", [fastlayers.ungraph_model, lambda model: model.zero_grad()])
def test_memory_that_is_in_use_is_not_given_back(end):
    """A graph may still run when it is deleted, and its gradients be in use."""
    stock, graphed = pair()
    for x in inputs(6):
        for model in (stock, graphed):
            model.zero_grad()
            model(x).square().mean().backward()
    torch.cuda._sleep(50_000_000)  # some 25 ms
    x = tokens()
    for model in (stock, graphed):
        model.zero_grad()
        model(x).square().mean().backward()
    grads = [p.grad for p in graphed.parameters()]
    expected = [p.grad for p in stock.parameters()]
    end(graphed)
    del graphed, model
    gc.collect()
    torch.cuda.empty_cache()
    other = torch.ones(2**22, device="cuda")
    assert_equal(grads, expected)
    assert other.sum() == 2**22
