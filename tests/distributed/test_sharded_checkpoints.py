"""Checkpoints of sharded models, patched or not, loaded by other numbers of processes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fastlayers import load_model, patch_model, patch_report, save_model, unpatch_model
from fastlayers.checkpoint import CheckpointError
from fastlayers.patching import PatchWarning
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.distributed.processes import run_in_processes, shared_path
from tests.distributed.test_wrappers import (
    WORLD,
    Block,
    batch_of,
    net,
    of_all,
    of_data,
    tensor_parallel,
    train,
    two_dimensional,
)


def patched_before(model, wrap, mesh):
    return wrap(patch_model(model), mesh)


def patched_after(model, wrap, mesh):
    return patch_model(wrap(model, mesh))


def stock(model, wrap, mesh):
    return wrap(model, mesh)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def whole(model):
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in model.state_dict().items()}


def check_distributed_checkpoints(rank):
    """Saved and loaded with the optimizer, which goes on as if nothing had happened."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    for i, (saves, saved, loads, loaded) in enumerate(
        (
            (patched_before, of_all, stock, of_data),
            (patched_after, of_all, stock, of_data),
            (stock, of_all, patched_before, of_data),
            (stock, of_data, patched_after, of_all),
            (patched_before, of_data, stock, of_all),
            (patched_before, two_dimensional, stock, of_all),
            (stock, of_data, patched_before, two_dimensional),
        )
    ):
        model = saves(net(), saved, mesh)
        x, group = batch_of(saved, mesh)
        optimizer = sgd(model)
        train(model, x, group, optimizer)
        state, moments = get_state_dict(model, optimizer)
        path = shared_path(f"distributed {i}")
        pair = mesh["data"].get_group() if saved is of_data else None
        if saved is not of_data or mesh["other"].get_local_rank() == 0:  # The other pair has the same.
            dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path, process_group=pair)
        dist.barrier()
        expected = whole(model)
        further = train(model, x, group, optimizer)

        other = loads(net(), loaded, mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        optimizer = sgd(other)
        state, moments = get_state_dict(other, optimizer)
        group = mesh["data"].get_group() if loaded is of_data else None
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=path, process_group=group)
        set_state_dict(other, optimizer, model_state_dict=state, optim_state_dict=moments)
        torch.testing.assert_close(whole(other), expected, rtol=0, atol=0)
        x, group = batch_of(loaded, mesh)
        torch.testing.assert_close(train(other, x, group, optimizer), further)
        assert bool(patch_report(other).patched) == (loads is not stock)


def check_safetensors(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    for i, wrap in enumerate((of_all, of_data, tensor_parallel, two_dimensional)):
        model = patched_before(net(), wrap, mesh)
        train(model, *batch_of(wrap, mesh))
        path = shared_path(f"{i}.safetensors")
        save_model(model, path)
        dist.barrier()
        expected = whole(model)
        alone = net()
        load_model(alone, path)
        torch.testing.assert_close(dict(alone.state_dict()), expected, rtol=0, atol=0)
        for other in (of_all, of_data, tensor_parallel, two_dimensional):
            loaded = stock(net(), other, mesh)
            load_model(loaded, path)
            torch.testing.assert_close(whole(loaded), expected, rtol=0, atol=0)
            placements = [getattr(p, "placements", None) for p in loaded.parameters()]
            assert placements == [getattr(p, "placements", None) for p in stock(net(), other, mesh).parameters()]
        save_model(unpatch_model(model), path)  # over the file that is there
        dist.barrier()


class Tied(nn.Module):
    """Three rows in four processes: the last one has nothing of the weight that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(3, 8), Block(), nn.Linear(8, 3, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2))


def check_tied(rank):
    torch.manual_seed(0)
    model = fully_shard(Tied(), mesh=dist.init_device_mesh("cpu", (WORLD,)))
    expected, path = whole(model), shared_path("tied.safetensors")
    save_model(model, path)
    dist.barrier()
    single = Tied()
    load_model(single, path)
    assert single.head.weight is single.embedding.weight
    torch.testing.assert_close(dict(single.state_dict()), expected)
    with torch.no_grad():
        model.head.weight.zero_()
    load_model(model, path)
    torch.testing.assert_close(whole(model), expected)
    if rank == 0:
        with pytest.raises(FileNotFoundError, match="there is no directory"):
            save_model(model, "/nowhere/at/all")
    else:
        save_model(model, "/nowhere/at/all")
    with pytest.raises(CheckpointError, match="does not fit FSDPBlock"):
        load_model(fully_shard(Block(), mesh=dist.init_device_mesh("cpu", (WORLD,))), path)


def check_all(rank):
    warnings.simplefilter("ignore", PatchWarning)
    with rewritten_everywhere():
        check_distributed_checkpoints(rank)
        check_safetensors(rank)
        check_tied(rank)


@pytest.mark.slow
def test_checkpoints_of_sharded_models(tmp_path):
    run_in_processes(check_all, WORLD, tmp_path)
