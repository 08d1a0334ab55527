"""Patched models under DDP, FSDP2 and tensor parallelism, in four processes and in pairs of them."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fastlayers import patch_model, patch_report, patched, unpatch_model, unpatched
from fastlayers.patching import PatchWarning
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.distributed.processes import losses_of, run_in_processes

WORLD, STEPS = 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.norm, self.head = nn.ModuleList([Block(), Block()]), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net():
    return Net().to(torch.float64)


def train(model, x, group=None, optimizer=None):
    """The losses of some steps, averaged over the processes of a group."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = losses_of(model, optimizer, [x] * STEPS)
    dist.all_reduce(losses, group=group)
    return losses / dist.get_world_size(group)


def ddp(model, mesh):
    return DistributedDataParallel(model, process_group=mesh["data"].get_group())


def fsdp(model, mesh, apart=True):
    for block in model.blocks if apart else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_data(model, mesh):
    return fsdp(model, mesh["data"])


def of_the_root(model, mesh):
    return fsdp(model, mesh["data"], apart=False)


def hybrid(model, mesh):
    return fsdp(model, mesh)


def tensor_parallel(model, mesh):
    for block in model.blocks:
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["other"], plan)
    return model


def two_dimensional(model, mesh):
    return fsdp(tensor_parallel(model, mesh), mesh["data"])


def of_all(model, mesh):
    return fsdp(model, dist.init_device_mesh("cpu", (WORLD,)))


def batch_of(wrap, mesh):
    """This process's share of the batch, and the processes that have the others."""
    batch = torch.randn(8, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if wrap in (of_all, hybrid):
        return batch.chunk(WORLD)[dist.get_rank()], None
    if wrap is tensor_parallel:
        return batch, None
    return batch.chunk(2)[mesh["data"].get_local_rank()], mesh["data"].get_group()


def hooks_of(model):
    return {
        name: [len(getattr(module, kind)) for kind in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")]
        for name, module in model.named_modules()
    }


def kinds(model):
    return {name: type(module) for name, module in model.named_modules()}


def check_training(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for wrap in (ddp, of_data, of_the_root, of_all, hybrid, tensor_parallel, two_dimensional):
        x, group = batch_of(wrap, mesh)
        stock = wrap(net(), mesh)
        expected, further = train(stock, x, group), train(stock, x, group)
        for before in (True, False):
            case = f"{wrap.__name__}, patched before: {before}"
            model = wrap(patch_model(net()), mesh) if before else patch_model(wrap(net(), mesh))
            assert "FusedBlock" in {row.became for row in patch_report(model).patched}, case
            close(train(model, x, group), expected, msg=case)
            hooks, names = hooks_of(model), list(model.state_dict())
            assert names == list(stock.state_dict())
            with unpatched(model):
                assert kinds(model) == kinds(stock), case
            assert "FusedBlock" in {row.became for row in patch_report(model).patched}, case
            unpatch_model(model)
            assert not patch_report(model).patched
            assert kinds(model) == kinds(stock), case
            assert hooks_of(model) == hooks == hooks_of(stock), case
            ours, theirs = ([isinstance(p, DTensor) for p in m.parameters()] for m in (model, stock))
            assert ours == theirs
            close(train(model, x, group), further, msg=case)
        with patched(model):
            assert patch_report(model).patched
        assert kinds(model) == kinds(stock)


def check_patched_meanwhile(rank):
    """What is sharded inside of a context stays sharded when it ends."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    model, stock = net(), of_data(net(), mesh)
    with patched(model):
        of_data(model, mesh)
        assert patch_report(model)["blocks.0"].became == "FusedBlock"
    assert kinds(model) == kinds(stock)
    x, group = batch_of(of_data, mesh)
    torch.testing.assert_close(train(model, x, group), train(stock, x, group))


def check_all(rank):
    warnings.simplefilter("ignore", PatchWarning)
    with rewritten_everywhere():
        check_training(rank)
        check_patched_meanwhile(rank)


@pytest.mark.slow
def test_patched_models_in_parallel(tmp_path):
    run_in_processes(check_all, WORLD, tmp_path)
