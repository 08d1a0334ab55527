"""Networks whose calls are replayed, and steps of them."""

from __future__ import annotations

import copy
import itertools
import random
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import fastlayers
from fastlayers.patching.regions.entries import no_regions
from tests.harness import needs_gpu

gpu = needs_gpu


class Block(nn.Module):
    def __init__(self, width=32, p=0.0):
        super().__init__()
        self.norm1, self.norm2, self.p = nn.LayerNorm(width), nn.LayerNorm(width), p
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, width))

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) / 4
        if mask is not None:
            scores = scores + mask
        x = x + self.proj(F.dropout(scores.softmax(-1), self.p, self.training) @ v)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    """Blocks, and convolutions with BatchNorm between their tokens."""

    def __init__(self, p=0.0, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p=p) for _ in range(depth))
        self.conv, self.bn, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.scale, self.spare = 1.0, nn.Linear(2, 2)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask)
        x = x + self.bn(self.conv(x.transpose(1, 2))).relu().transpose(1, 2)
        return self.head(x * self.scale)


def pair(make=Net, patch=False, **options):
    """A stock or a patched model on the GPU, and a graphed copy."""
    torch.manual_seed(0)
    model = make().cuda()
    if patch:
        fastlayers.patch_model(model)
    return model, fastlayers.graph_model(copy.deepcopy(model), **options)


def tokens(batch=4, **options):
    return torch.randn(batch, 8, 32, device="cuda", **options)


def inputs(count, batch=4):
    torch.manual_seed(1)
    return [tokens(batch) for _ in range(count)]


def step_of(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def train(model, xs, step=step_of):
    """Losses of steps of SGD, and the parameters and buffers after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    random.seed(2)
    losses = []
    for x in xs:
        losses.append(step(model, x).detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *model.parameters(), *model.buffers(), torch.rand(1, device="cuda")]


def assert_equal(actual, expected):
    actual, expected = (pytree.tree_leaves(value) for value in (actual, expected))
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
            assert torch.equal(a, b)
        else:
            assert a == b


def same_training(make=Net, xs=None, step=step_of, patch=False, **options):
    stock, graphed = pair(make, patch, **options)
    xs = inputs(8) if xs is None else xs
    calls, watched = itertools.count(1), options.get("warmup", 3)

    def stock_step(model, x):
        """A graphed model watches the operations of its last call before the capture, and regions leave it alone."""
        with no_regions() if next(calls) == watched else nullcontext():
            return step(model, x)

    # Regions are recorded before: calls that run op by op add up in another order than generated kernels. The classes
    # of the two models differ, so that each has regions of its own.
    for model in (stock, graphed) if patch else ():
        train(copy.deepcopy(model), xs[:3], step)
    assert_equal(train(graphed, xs, step), train(stock, xs, stock_step))
    return graphed


def replays(model):
    return sum(row.replays for row in fastlayers.graph_report(model))


def reasons(model):
    return [row.reason for row in fastlayers.graph_report(model) if row.state == "uncaptured"]


def backward(loss):
    loss.backward()
    return loss


class Waits(Net):
    def forward(self, x):
        x = super().forward(x)
        return x if x.sum().item() > 0 else -x
