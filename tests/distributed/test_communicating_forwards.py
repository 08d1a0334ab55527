"""Patched forwards that communicate, in two processes: collectives, context parallelism, loss parallelism."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_in_processes
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from fastlayers import patch_model
from fastlayers.patching.rewrite.regions import Region
from fastlayers.patching.runtime.checks import rewritten_everywhere

WORLD, WIDTH, CLASSES = 2, 16, 1100


class Sum(torch.autograd.Function):
    """The sum over processes, in place, in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    backward = forward


COLLECTIVES = {
    "all_reduce": Sum.apply,
    "without a gradient": lambda x: Sum.apply(x.detach()),
    "functional": lambda x: functional_collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD).mean(0),
}


class Reduces(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.norm1, self.norm2 = how, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.down(F.gelu(self.up(self.norm1(x))))
        x = x + h * COLLECTIVES[self.how](h.mean(1)).mean()
        return x + F.silu(self.out(self.norm2(x)))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifies(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.loss = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), nn.CrossEntropyLoss()

    def forward(self, x, target, layer):
        logits = self.head(self.norm(x)).view(-1, CLASSES)
        return self.loss(logits, target) if layer else F.cross_entropy(logits, target, ignore_index=3)


def pair(make):
    torch.manual_seed(0)
    stock = make().to(torch.float64)
    return stock, patch_model(copy.deepcopy(stock))


def tokens(length, seed=0):
    return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(model, *args):
    """The result of a call, and the gradients."""
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(actual, expected, case):
    assert len(actual) == len(expected), case
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text: f"{case}: {text}")


def check_collectives(rank):
    """One process sees a length again and again, the other one new lengths: each records at calls of its own."""
    for how in COLLECTIVES:
        stock, model = pair(lambda how=how: Reduces(how))
        for call in range(6):
            x = tokens(3 + call * rank, seed=2 * call + rank)
            assert_equal(step(model, x), step(stock, x), f"{how}, call {call}")


@contextmanager
def sequences_in_parts(rank):
    """As torch's context_parallel replaces attention, which has no implementation for a CPU: keys and values are those
    of all processes."""
    attention = F.scaled_dot_product_attention

    def attend(q, k, v, is_causal):
        assert is_causal
        k, v = (functional_collectives.all_gather_tensor_autograd(t, 2, dist.group.WORLD) for t in (k, v))
        first = rank * q.shape[2]
        rows, columns = torch.arange(first, first + q.shape[2])[:, None], torch.arange(k.shape[2])
        return attention(q, k.contiguous(), v.contiguous(), attn_mask=rows >= columns)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention


def check_context_parallel(rank):
    """A region that was recorded outside has the same shapes inside, and the other way round."""
    stock, model = pair(Attends)
    whole = tokens(12)
    part = whole.chunk(WORLD, 1)[rank].contiguous()
    alone, (out, *grads) = step(stock, part), step(stock, whole)
    together = [out.chunk(WORLD, 1)[rank], *grads]
    for turn in range(2):
        for call in range(3):
            assert_equal(step(model, part), alone, f"outside, turn {turn}, call {call}")
        for call in range(3):
            with sequences_in_parts(rank):
                out, *grads = step(model, part)
            for grad in grads:
                dist.all_reduce(grad)
            assert_equal([out, *grads], together, f"inside, turn {turn}, call {call}")
    region: Region = type(model).__fastlayers_region__
    found = {str(e.refusal) for entries in region.entries.values() for e in entries}
    assert any("communicates with other processes" in reason for reason in found)
    assert "None" in found  # outside


def check_loss_parallel(rank):
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    x, target = tokens(5), torch.arange(10) * 37 % CLASSES
    for layer in (False, True):
        stock, before = pair(Classifies)
        after = copy.deepcopy(stock)
        stock, before = (parallelize_module(model, mesh, plan) for model in (stock, before))
        after = patch_model(parallelize_module(after, mesh, plan))
        for call in range(3):
            with loss_parallel():
                expected, *found = [local(step(model, x, target, layer)) for model in (stock, before, after)]
            for name, actual in zip(("before", "after"), found, strict=True):
                assert_equal(actual, expected, f"patched {name}, call {call}, by a layer: {layer}")


def local(tensors):
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def check_all(rank):
    with rewritten_everywhere():
        check_collectives(rank)
        check_context_parallel(rank)
        check_loss_parallel(rank)


@pytest.mark.slow
def test_forwards_that_communicate(tmp_path):
    run_in_processes(check_all, WORLD, tmp_path)
