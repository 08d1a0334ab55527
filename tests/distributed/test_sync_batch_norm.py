"""FusedSyncBatchNormAct against one BatchNorm of the whole batch, in four processes and in groups of two."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastlayers
from fastlayers import backends
from fastlayers.ops.activations import ACTIVATIONS
from fastlayers.patching import PatchWarning
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests import ROOT
from tests.distributed.processes import run_in_processes

WORLD = 4
SHAPES = ((6, 3, 4), (3, 5, 2, 3, 2), (5, 8), (4, 3, 1, 1), (6, 8, 5, 4))
#: Samples of each process: as many, uneven ones, none in some.
SPLITS = ((2, 2, 2, 2), (3, 1, 1, 2), (0, 3, 0, 1), (1, 1, 1, 1))


class Whole(nn.Module):
    """The oracle: BatchNorm of the whole batch, the residual and the activation."""

    def __init__(self, layer: fastlayers.FusedSyncBatchNormAct) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(
            layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        )
        self.norm.to(torch.float64).train(layer.training)
        self.norm.load_state_dict(layer.state_dict())
        self.act = layer.act

    def forward(self, x, residual=None):
        n, training = self.norm, self.norm.training or not self.norm.track_running_stats
        if n.training and n.track_running_stats:
            n.num_batches_tracked += 1
        momentum = 1 / float(n.num_batches_tracked) if n.momentum is None else n.momentum
        z = nn.functional.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, training, momentum, n.eps)
        return ACTIVATIONS[self.act].function(z if residual is None else z + residual)


def layer_for(channels, **options):
    torch.manual_seed(5)
    layer = fastlayers.FusedSyncBatchNormAct(channels, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer


def shard(whole, split, rank):
    return whole.split(split)[rank].detach().clone(memory_format=torch.preserve_format).requires_grad_()


def summed(tensor, group=None):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, group=group)
    return tensor


def check_step(layer, whole, x, residual, split, rank, group=None, **context):
    """One step of a layer on a share of the batch, and of the oracle on all of it."""
    xs, rs = shard(x, split, rank), None if residual is None else shard(residual, split, rank)
    y = layer(xs, rs)
    x64, r64 = (None if t is None else t.detach().double().requires_grad_() for t in (x, residual))
    expected = whole(x64, r64)
    assert y.dtype == x.dtype
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(x.dtype)
    expected.backward(dy.double())
    y.backward(dy.split(split)[rank])

    def check(ours, theirs):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), msg=lambda m: f"{context}: {m}")

    check(y, expected.split(split)[rank])
    check(xs.grad, x64.grad.split(split)[rank])
    if rs is not None:
        check(rs.grad, r64.grad.split(split)[rank])
    for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        check(summed(ours.grad, group), theirs.grad)
    for ours, theirs in zip(layer.buffers(), whole.buffers(), strict=True):
        check(ours, theirs)
    layer.zero_grad()
    whole.zero_grad()


def check_float64(rank):
    cases = [(shape, SPLITS[i % 4]) for i, shape in enumerate(SHAPES)] + [(SHAPES[0], split) for split in SPLITS[1:]]
    for (shape, split), act in itertools.product(cases, (None, "relu")):
        torch.manual_seed(0)
        shape = (sum(split), *shape[1:])
        x, residual = (torch.randn(shape, dtype=torch.float64) * 2 + 1 for _ in range(2))
        layer = layer_for(shape[1], act=act, dtype=torch.float64)
        whole = Whole(layer)
        for _ in range(2):
            check_step(layer, whole, x, residual if act else None, split, rank, case=(shape, split, act))


def check_activations(rank):
    split = (1, 2, 0, 3)
    x, residual = (torch.randn(6, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),) * 2
    for act, added in itertools.product(ACTIVATIONS, (None, residual)):
        layer = layer_for(3, act=act, dtype=torch.float64)
        check_step(layer, Whole(layer), 4 * x, added, split, rank, act=act)


def check_options(rank):
    split, shape = (2, 0, 3, 1), (6, 4, 3, 5)
    for options in (
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False},
        {"eps": 0.1, "momentum": 1.0},
        {"act": "silu", "affine": False, "track_running_stats": False},
    ):
        torch.manual_seed(0)
        x, residual = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
        layer = layer_for(4, dtype=torch.float64, **options)
        whole = Whole(layer)
        for _ in range(3):
            check_step(layer, whole, x, residual, split, rank, **options)
    layer.eval()
    whole.eval()
    assert layer.track_running_stats is False  # evaluation is local, by the statistics of the own batch too
    layer, split = layer_for(4, dtype=torch.float64), (2, 2, 1, 1)
    whole = Whole(layer)
    check_step(layer, whole, x, residual, split, rank)
    check_step(layer.eval(), whole.eval(), x, residual, split, rank, mode="eval")


def check_layouts(rank):
    split = (2, 1, 2, 1)
    torch.manual_seed(0)
    layer = layer_for(8, dtype=torch.float64)
    whole = Whole(layer)
    image = torch.randn(6, 8, 4, 6, dtype=torch.float64)
    for x in (
        image.to(memory_format=torch.channels_last),
        image.transpose(2, 3),
        torch.randn(6, 8, 9, 6, dtype=torch.float64)[:, :, ::2],
        image[:, :, :1].expand(-1, -1, 4, -1),
    ):
        mine = x.split(split)[rank].detach().requires_grad_()
        y = layer(mine, mine)
        leaf = x.detach().requires_grad_()
        expected = whole(leaf, leaf)
        torch.testing.assert_close(y, expected.split(split)[rank])
        assert y.stride() == nn.functional.batch_norm(mine.detach(), None, None, training=True).stride()
        y.sum().backward()  # an expanded gradient
        (dx,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(mine.grad, dx.split(split)[rank])


def check_low_precision(rank):
    """No worse than torch's own operations in the same dtype."""
    split = (2, 3, 1, 2)
    for dtype, act in itertools.product((torch.bfloat16, torch.float16, torch.float32), ("relu", "gelu")):
        torch.manual_seed(0)
        x, residual = (torch.randn(8, 6, 5, 7).to(dtype) for _ in range(2))
        x = x + 100 if dtype == torch.float32 else x
        layer = layer_for(6, act=act)
        whole, stock = Whole(layer), Whole(layer).float()
        ours = layer(shard(x, split, rank), shard(residual, split, rank))
        exact = whole(x.double(), residual.double()).split(split)[rank]
        torchs = stock(x, residual).split(split)[rank]
        assert ours.dtype == dtype
        error, theirs = ((t.double() - exact).abs().max() for t in (ours, torchs))
        assert error <= 1.5 * theirs, (dtype, act, error, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(shard(x, split, rank).bfloat16(), shard(residual, split, rank))
    assert mixed.dtype == torch.float32  # of a sum with a residual in float32
    mixed.sum().backward()


def check_kernels(rank):
    """Triton's kernels, beside processes that have no kernel for their batch."""
    if not backends.triton_interprets():
        return
    split = (2, 0, 1, 3)
    # Every shape with and without a residual, and each pair of an activation, a residual and who is forced.
    for i, (shape, kept) in enumerate(itertools.product(((6, 3, 4), (6, 40, 1, 1), (6, 8, 3, 5)), (False, True))):
        act, forced = ("relu", "gelu")[i // 2 % 2], ((0, 1, 2, 3), (0, 3))[(i + i // 2) % 2]
        dtype = torch.float64 if kept else torch.float32
        torch.manual_seed(0)
        x, residual = (torch.randn(shape, dtype=dtype) + 3 for _ in range(2))
        if len(shape) == 4 and kept:
            x = x.to(memory_format=torch.channels_last)
        layer = layer_for(shape[1], act=act, dtype=dtype)
        with backends.backend("triton" if rank in forced else None):
            check_step(layer, Whole(layer), x, residual if kept else None, split, rank, case=(shape, dtype, act, kept))
    layer = layer_for(8)
    x = torch.randn(2, 8, 3, 5, requires_grad=True)
    with backends.backend("triton"):
        out = layer(x, torch.randn(2, 8, 3, 5))
    kept = [t for t in out.grad_fn.saved_tensors if t is not None]
    assert sum(t.nbytes for t in kept) == x.nbytes + x.numel() // 8 + 3 * 8 * 4 + 4  # bits in place of the residual
    out.sum().backward()


def check_groups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place, split = groups[rank // 2], rank % 2, (3, 1)
    torch.manual_seed(rank // 2)
    x, residual = (torch.randn(4, 3, 5, dtype=torch.float64) for _ in range(2))
    layer = layer_for(3, process_group=group, dtype=torch.float64)
    check_step(layer, Whole(layer), x, residual, split, place, group)
    alone = [dist.new_group([r]) for r in range(WORLD)]
    layer = layer_for(3, process_group=alone[rank], dtype=torch.float64)
    check_step(layer, Whole(layer), x, residual, (4,), 0, alone[rank])


def check_refusals(rank):
    layer = layer_for(3)
    x = torch.randn(2, 3, requires_grad=True)
    out = layer(x).sum()
    (again,) = torch.autograd.grad(out, x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, x)[0], again)  # a second backward of a retained graph
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not supported under transforms of torch\.func"):
        torch.func.vmap(layer)(x[None])
    with pytest.raises(TypeError, match="floating-point"):
        layer(x.long())
    with pytest.raises(ValueError, match="at least 2D"):
        layer(x[0])


def check_empty_everywhere(rank):
    layer = layer_for(3)
    before = copy.deepcopy(layer.state_dict())
    out = layer(torch.empty(0, 3, 2, requires_grad=True))
    out.sum().backward()
    before["num_batches_tracked"] += 1
    torch.testing.assert_close(layer.state_dict(), before)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x)) + x)


def check_converted(rank):
    """A patched block does not go on with the batches of its own process either."""
    split = (1, 2, 2, 1)
    torch.manual_seed(0)
    act = fastlayers.FusedBatchNormAct2d(4, act="silu")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), act, Residual(), Residual(), nn.Conv2d(4, 2, 1)).to(torch.float64)
    x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
    expected = copy.deepcopy(model)(x).split(split)[rank]
    convert = fastlayers.FusedSyncBatchNormAct.convert_sync_batchnorm
    patched, late = fastlayers.patch_model(copy.deepcopy(model)), fastlayers.patch_model(convert(copy.deepcopy(model)))
    for synced in (convert(copy.deepcopy(model)), convert(patched), late):
        assert type(synced[1]) is type(synced[2].norm) is fastlayers.FusedSyncBatchNormAct
        for _ in range(3):
            ours = synced(x.split(split)[rank])
            torch.testing.assert_close(ours, expected)
            ours.sum().backward()
    with pytest.raises(ValueError, match="to be on GPU"):  # of torch's layer
        nn.SyncBatchNorm.convert_sync_batchnorm(fastlayers.patch_model(Residual().double()))(
            x[:, :1].expand(-1, 4, 4, 4)
        )


def check_compiled(rank):
    """In two of the processes, beside two in which it is not: a compilation takes as long as all other checks."""
    split = (1, 2, 2, 1)
    torch.manual_seed(0)
    layer = layer_for(4, dtype=torch.float64)
    whole = Whole(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager") if rank < 2 else layer
    x, residual = (torch.randn(6, 4, 3, 3, dtype=torch.float64) for _ in range(2))
    for _ in range(2):
        check_step(compiled, whole, x, residual, split, rank, mode="compiled")


def check_all(rank):
    warnings.simplefilter("ignore", PatchWarning)
    check_float64(rank)
    check_activations(rank)
    check_options(rank)
    check_layouts(rank)
    check_low_precision(rank)
    check_kernels(rank)
    check_groups(rank)
    check_refusals(rank)
    check_empty_everywhere(rank)
    with rewritten_everywhere():
        check_converted(rank)
    check_compiled(rank)


@pytest.mark.slow
def test_sync_batch_norm(tmp_path):
    """In forks of one process in which Triton interprets: it decides that when it is imported, which takes seconds."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.distributed.test_sync_batch_norm", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


if __name__ == "__main__":
    import torch._dynamo  # here once, and not in each fork

    run_in_processes(check_all, WORLD, Path(sys.argv[1]), "fork")
