"""linear_cross_entropy and vocab_parallel_cross_entropy beyond test_head.py: plans of chunks, training, processes."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers import functional
from fastlayers.ops import head
from fastlayers.patching.libraries.transformers.deferred_logits import DeferredLogits
from fastlayers.patching.runtime.lazy import Head, Recipe
from tests.distributed.processes import run_in_processes
from tests.harness import DEVICES, assert_close, same_bits
from tests.ops.heads import Largest, Products, adapter, inputs
from tests.table.losses import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY

reference = LINEAR_CROSS_ENTROPY.reference


# ---- chunks ----------------------------------------------------------------------------------------------------------

BF16 = 2


@pytest.mark.parametrize("features", [2048, 4096])
@pytest.mark.parametrize("columns", [128256, 50257, 151936])
@pytest.mark.parametrize("rows", [8192, 16384, 65536])
def test_a_chunk_is_less_than_an_eighth_of_the_logits(rows, columns, features):
    chunks = head.plan(rows, columns, features, BF16, None, None)
    padded = -(-columns // head.COLUMN_TILE) * head.COLUMN_TILE
    held = chunks.most * padded * BF16 + chunks.wide * 4 * columns * features
    # Small tensors besides: the losses, the ones that divide, what is ignored.
    assert held + 16 * rows <= rows * columns * BF16 / 8
    assert chunks.edges[0] == 0
    assert chunks.edges[-1] == rows
    assert all(start < end and start % head.ROW_TILE == 0 for start, end in pairwise(chunks.edges))
    assert len(chunks.edges) - 1 == head.CHUNKS or chunks.wide
    assert chunks.wide == (4 * features * 8 < rows * BF16 - 2 * 8 * head.LEAST_ROWS)
    # Another tile of rows would not fit.
    assert held + head.ROW_TILE * padded * BF16 + 16 * rows > rows * columns * BF16 / 8


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 895, 896, 1791, 1792, 3000, 8191, 8193])
def test_chunks_cover_the_rows_once(rows):
    chunks = head.plan(rows, 50257, 2048, BF16, None, None)
    assert chunks.edges[0] == 0
    assert chunks.edges[-1] == rows
    assert all(start < end for start, end in pairwise(chunks.edges))
    assert all(end - start >= min(rows, head.LEAST_ROWS) for start, end in list(pairwise(chunks.edges))[:-1])


def test_short_of_memory_chunks_are_smaller():
    free = 50 * 2**20
    chunks = head.plan(8192, 128256, 4096, BF16, None, free)
    assert head.ROW_TILE <= chunks.most < 300
    assert not chunks.wide
    assert head.plan(8192, 128256, 4096, BF16, None, 0).most == head.ROW_TILE


def test_float32_sum_where_it_fits_or_chunks_are_many():
    assert head.plan(65536, 128256, 1024, BF16, None, None).wide
    assert not head.plan(8192, 128256, 1024, BF16, None, None).wide
    assert head.plan(8192, 128256, 1024, BF16, 256, None).wide
    assert not head.plan(8192, 128256, 1024, BF16, 1024, None).wide
    for chunk_size, free in ((None, None), (1024, None), (None, 50 * 2**20)):
        given = head.plan(8192, 128256, 1024, BF16, chunk_size, free)
        assert head.plan(8192, 128256, 1024, BF16, chunk_size, free, True) == given._replace(wide=True)


def log_prob_loss(hidden, weight, target, **options):
    return functional.linear_log_prob(hidden, weight, target, **options).mean()


def divergence_of(hidden, weight, target, **options):
    return functional.linear_divergence(hidden, weight, hidden.detach(), weight.detach().roll(1, 0), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("function", [functional.linear_cross_entropy, log_prob_loss, divergence_of])
def test_float32_sum_on_request(function, compiled, dtype, device):
    """Its gradient is rounded once, as that of a single chunk, and not once for each chunk."""
    hidden, weight, target = inputs(513, 1000, 8, dtype, device)
    whole, wide, rounded = (
        torch.autograd.grad(
            (torch.compile(function, backend="aot_eager") if compiled else function)(
                hidden, weight, target, chunk_size=size, acc_dtype=acc_dtype
            ),
            weight,
        )[0].float()
        for size, acc_dtype in ((513, None), (64, torch.float32), (64, None))
    )
    scale = whole.abs().mean()
    eps = torch.finfo(dtype).eps
    # Logits in chunks of other sizes may round differently, each term of a gradient by itself.
    assert (wide - whole).abs().mean() < eps / 4 * scale
    assert (rounded - whole).abs().mean() > 2 * (wide - whole).abs().mean()


def test_which_dtypes_sum():
    hidden, weight, target = inputs(8, 10, 4, torch.float32)
    with pytest.raises(ValueError, match=r"expected acc_dtype to be torch.float32 or None, but got torch.float64"):
        functional.linear_cross_entropy(hidden, weight, target, acc_dtype=torch.float64)
    layer = fastlayers.FusedLinearCrossEntropyLoss(4, 10, acc_dtype=torch.float32)
    assert "acc_dtype=torch.float32" in repr(layer)
    layer(hidden, target).backward()


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch 2.13 has it")
def test_torch_s_options_say_so_too(monkeypatch):
    plans = []
    plan = head.plan
    monkeypatch.setattr(head, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    hidden, weight, target = inputs(64, 100, 8, torch.bfloat16)
    for acc_dtype in (None, torch.float32):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=32, chunking_method=None, acc_dtype=acc_dtype)
        functional.linear_cross_entropy(hidden, weight, target, options=options)
    assert [p.wide for p in plans] == [False, True]


# ---- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_tied_weights_and_accumulation(device, dtype):
    """A step of two micro-batches with an embedding that is the head as well."""

    def step(function, **options):
        torch.manual_seed(0)
        embedding = nn.Embedding(65, 16).to(device, dtype)
        tokens = torch.randint(65, (4, 3, 9), generator=torch.Generator().manual_seed(1)).to(device)
        for part in tokens.chunk(2):
            hidden = embedding(part[..., :-1]).sin()
            (function(hidden, embedding.weight, part[..., 1:], **options) / 2).backward()
        return embedding.weight.grad

    tolerance = 4 * torch.finfo(dtype).eps
    ours, stock = step(functional.linear_cross_entropy, chunk_size=5), step(reference)
    assert ours.dtype == dtype
    assert float((ours - stock).norm() / stock.norm()) < tolerance


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_checkpoint_of_head_and_loss(device, use_reentrant):
    torch.manual_seed(0)
    body = nn.Linear(8, 8, device=device)
    x, _, target = inputs(40, 33, 8, device=device)
    criterion = fastlayers.FusedLinearCrossEntropyLoss(8, 33, bias=True, device=device, chunk_size=16)

    def loss(x):
        return criterion(body(x), target)

    leaves = (x, *body.parameters(), *criterion.parameters())
    expected = torch.autograd.grad(loss(x), leaves)
    checkpoint(loss, x, use_reentrant=use_reentrant).backward()
    assert all(map(same_bits, [leaf.grad for leaf in leaves], expected))


# ---- low rank --------------------------------------------------------------------------------------------------------


def test_a_frozen_weight_has_no_product_for_a_gradient():
    hidden, weight, target = inputs(500, 1000, 8)
    weight.requires_grad_(False)
    low_rank = adapter(500, 1000, 4)
    with Products() as products, Largest(weight.shape) as largest:
        functional.linear_cross_entropy(hidden, weight, target, low_rank=low_rank, chunk_size=100).backward()
    logits, thin_gradients, shapes = (100, 1000), [(100, 4), (1000, 4)], products.shapes
    assert [s for s in shapes if s[1] >= 100] == [logits] * 10
    assert [s for s in shapes if s[1] == 4] == thin_gradients * 5
    assert [s for s in shapes if s[1] == 8] == [(100, 8)] * 5
    assert largest.elements < 100 * 1024 + 1
    assert weight.grad is None


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_adapter_under_autocast(low):
    hidden, weight, target = inputs(100, 65, 16)
    low_rank = adapter(100, 65, 4)
    leaves = (hidden, weight, *low_rank)
    found = []
    for function, options in ((functional.linear_cross_entropy, {"chunk_size": 30}), (reference, {})):
        with torch.autocast("cpu", low):
            given = (low_rank[0].to(low), low_rank[1])  # as lora_A gives the one, and lora_B has the other
            loss = function(hidden, weight, target, low_rank=given, **options)
        found.append((loss, *torch.autograd.grad(loss, leaves)))
    for ours, stock in zip(*found, strict=True):
        assert ours.dtype == stock.dtype == torch.float32
        assert float((ours - stock).detach().norm() / stock.detach().norm()) < 4 * torch.finfo(low).eps


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_layer_says_what_differs():
    assert repr(fastlayers.FusedLinearCrossEntropyLoss(3, 4, softcap=30.0, chunk_size=64, reduction="sum")) == (
        "FusedLinearCrossEntropyLoss(\n  in_features=3, num_classes=4, out_features=(), bias=False, reduction=sum,"
        " ignore_index=None, label_smoothing=0.0, options=None, softcap=30.0, chunk_size=64\n"
        "  (linear): Linear(in_features=3, out_features=4, bias=False)\n)"
    )
    copied = copy.deepcopy(fastlayers.FusedLinearCrossEntropyLoss(3, 5, weight=torch.ones(5), z_loss=0.5))
    assert copied.z_loss == 0.5
    assert list(copied.state_dict()) == ["weight", "linear.weight"]


def test_deferred_logits_take_probabilities():
    """A patched loss passes its ignore_index, which linear_cross_entropy refuses with probabilities."""
    layer, hidden = nn.Linear(8, 5), torch.randn(6, 8)
    recipe = Recipe(Head(layer.weight, layer.bias, (), None), "head", lambda logits: logits, None)
    target = torch.rand(6, 5).softmax(1)
    loss = DeferredLogits(recipe, (hidden,), 1.0, None, None).cross_entropy(target, ignore_index=-100)
    assert_close(loss, F.cross_entropy(layer(hidden), target))


# ---- process groups --------------------------------------------------------------------------------------------------

WORLD = 2
VOCAB_OPTIONS = (
    {},
    {"reduction": "sum", "z_loss": 0.1},
    {"reduction": "none", "label_smoothing": 0.2},
    {"softcap": 2.0, "label_smoothing": 0.1, "z_loss": 0.05},
    {"ignore_index": 3},
)


def check_vocab_parallel(rank: int) -> None:
    whole_op = CROSS_ENTROPY.reference
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.randn(3, 4, 11, generator=generator).mul(3).to(dtype)
        target = torch.randint(11, (3, 4), generator=generator)
        target[0, 1] = -100
        for options in VOCAB_OPTIONS:
            for shards in ((4, 7), (7, 4), (1, 10)):
                whole = values.clone().requires_grad_()
                rows = whole.double().view(-1, 11) if dtype == torch.bfloat16 else whole.view(-1, 11)
                classes = target.clone()
                if "ignore_index" in options:
                    classes[0, 1] = 3
                expected = whole_op(rows, classes.view(-1), **options)
                dy = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(dtype)
                start = sum(shards[:rank])
                mine = values[..., start : start + shards[rank]].clone().requires_grad_()
                loss = functional.vocab_parallel_cross_entropy(mine, classes, vocab_start=start, **options)
                assert loss.dtype == dtype
                assert loss.shape == (classes.shape if loss.dim() else ())
                (g,) = torch.autograd.grad(loss, mine, dy.view(loss.shape))
                (stock,) = torch.autograd.grad(expected, whole, dy.to(expected.dtype))
                tolerance = {"atol": 1e-2, "rtol": 1e-2} if dtype == torch.bfloat16 else {}
                torch.testing.assert_close(loss.flatten(), expected.flatten().to(dtype), **tolerance)
                torch.testing.assert_close(g, stock[..., start : start + shards[rank]], **tolerance)
    # Equal shards need no start; a row of minus infinities, one of NaN, rows all ignored.
    values = torch.randn(4, 8, generator=generator)
    values[0], values[1, 2] = -torch.inf, torch.nan
    values[2, ::4] = values[3, :4] = -torch.inf  # the first class of each shard; all of the first one
    mine = values[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    target = torch.tensor([1, 5, 7, 6])
    found = functional.vocab_parallel_cross_entropy(mine, target, reduction="none")
    torch.testing.assert_close(found, F.cross_entropy(values, target, reduction="none"), equal_nan=True)
    assert found[2:].isfinite().all()
    compiled = torch.compile(functional.vocab_parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    for options in ({}, {"label_smoothing": 0.1, "softcap": 2.0}):
        both = [f(mine[2:], target[2:], **options) for f in (compiled, functional.vocab_parallel_cross_entropy)]
        assert_close(*both)
        assert_close(*(torch.autograd.grad(loss, mine) for loss in both))
    ignored = functional.vocab_parallel_cross_entropy(mine, torch.full((4,), -100))
    assert ignored.isnan()
    assert torch.equal(torch.autograd.grad(ignored, mine)[0], torch.zeros_like(mine))
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.vocab_parallel_cross_entropy(mine.bfloat16(), target).dtype == torch.float32
    # A second derivative raises, and so does a class that is in no shard, or in two: on all ranks.
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found[2], mine, create_graph=True)
    with pytest.raises(ValueError, match="shards of 2 to 3 classes need vocab_start"):
        functional.vocab_parallel_cross_entropy(mine.detach()[:, : 2 + rank], target)
    nothing = torch.empty(0, 4, requires_grad=True)
    loss = functional.vocab_parallel_cross_entropy(nothing, target[:0], reduction="sum", label_smoothing=0.1)
    assert torch.autograd.grad(loss, nothing)[0].shape == (0, 4)
    for wrong in ({"target": target + 1}, {"target": target, "vocab_start": 0}):
        with pytest.raises(IndexError, match="of the shards; expected one"):
            functional.vocab_parallel_cross_entropy(mine, **wrong)
    with pytest.raises(ValueError, match="expected a target of int64"):
        functional.vocab_parallel_cross_entropy(mine, target[:2])
    # A group of one rank has the whole vocabulary.
    alone = [dist.new_group([r]) for r in range(WORLD)][rank]
    one = functional.vocab_parallel_cross_entropy(mine.detach()[2:3], torch.tensor([2]), alone)
    torch.testing.assert_close(one, F.cross_entropy(mine.detach()[2:3], torch.tensor([2])))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 33)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(
            self.body(x), self.head.weight, target, linear_bias=self.head.bias, chunk_size=16
        )


def check_fsdp(rank: int) -> None:
    torch.manual_seed(0)
    model = Model()
    stock = copy.deepcopy(model)
    x, target = torch.randn(WORLD, 40, 8), torch.randint(33, (WORLD, 40))
    torch.stack([stock(x[r], target[r]) for r in range(WORLD)]).mean().backward()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    for _ in range(2):  # the second step finds parameters that were resharded after the first
        model.zero_grad()
        model(x[rank], target[rank]).backward()
        for ours, expected in zip(model.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)
    with pytest.raises(TypeError, match="whole tensor, but got a DTensor"):
        functional.linear_cross_entropy(x[rank], model.head.weight, target[rank])


def check_ranks(rank: int) -> None:
    check_vocab_parallel(rank)
    check_fsdp(rank)


def test_vocab_parallel_and_fsdp(tmp_path):
    """In the same processes, which take longer to start than to run."""
    run_in_processes(check_ranks, WORLD, tmp_path)
