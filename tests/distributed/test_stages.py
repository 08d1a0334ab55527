"""Patched models whose activations are recomputed, in one process and sharded, and as stages of a pipeline."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fastlayers import patch_model, patch_report, unpatch_model
from fastlayers.patching import PatchWarning
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.distributed.processes import run_in_processes
from tests.distributed.test_wrappers import WORLD, Block, batch_of, kinds, net, of_all, of_data, train

close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def rows(seed=1):
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Keeping:
    """A policy that keeps the products of linear layers, and counts them."""

    def __init__(self) -> None:
        self.kept = Counter()

    def __call__(self, context, op, *args, **kwargs):
        if op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.kept[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def gradients(blocks, x, **options):
    blocks.zero_grad()
    x = x.clone().requires_grad_()
    y = x
    for block in blocks:
        y = checkpoint(block, y, **options)
    y.square().sum().backward()
    return y.detach(), x.grad, [p.grad.clone() for p in blocks.parameters()]


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}, {"early_stop": False}], ids=str)
def test_recomputed_activations(options):
    torch.manual_seed(0)
    stock = nn.Sequential(Block(), Block()).double()
    model = patch_model(copy.deepcopy(stock))
    calls = []
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    options = {"use_reentrant": False} | options
    for i in range(3):  # the third is a region
        close(gradients(model, rows(i), **options), gradients(stock, rows(i), **options))
    assert len(calls) == 6
    assert patch_report(model)["0"].became == "FusedBlock"


def test_selective_checkpoints_keep_what_their_policy_says():
    torch.manual_seed(0)
    stock = nn.Sequential(Block(), Block()).double()
    model = patch_model(copy.deepcopy(stock))
    for i in range(3):
        kept = []
        for either in (model, stock):
            policy = Keeping()
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            kept.append((gradients(either, rows(i), use_reentrant=False, context_fn=contexts), policy.kept))
        close(kept[0][0], kept[1][0])
        assert kept[0][1] == kept[1][1] != Counter()


def check_sharded(rank):
    """FSDP2 around checkpoints, which wrap the blocks before or after patching."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    contexts = functools.partial(create_selective_checkpoint_contexts, Keeping())
    for wrap, options in ((of_all, {}), (of_data, {"context_fn": contexts})):
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **options)
        recompute = functools.partial(
            apply_activation_checkpointing,
            checkpoint_wrapper_fn=wrapper,
            check_fn=lambda module: isinstance(module, Block),
        )
        x, group = batch_of(wrap, mesh)
        stock = net()
        recompute(stock)
        wrap(stock, mesh)
        expected, further = train(stock, x, group), train(stock, x, group)
        for order in ("patch recompute shard", "recompute patch shard", "recompute shard patch"):
            model = net()
            for step in order.split():
                if step == "recompute":
                    recompute(model)
                else:
                    patch_model(model) if step == "patch" else wrap(model, mesh)
            close(train(model, x, group), expected, msg=order)
            assert kinds(unpatch_model(model)) == kinds(stock), order
            close(train(model, x, group), further, msg=order)


def loss_of(y, target):
    return (y - target).square().mean()


def pipelined(schedule, x, target, first, last):
    """The loss of the last stage, None elsewhere."""
    losses = []
    if first:
        schedule.step(x)
    elif last:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    return torch.stack(losses).mean() if losses else None


def check_pipelines(rank):
    """The gradients of the whole model, with a stage in each process, and with two."""
    x, target = rows(3).repeat(2, 1), rows(4).repeat(2, 1)
    for schedule_class, stages_each in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)):
        count = WORLD * stages_each
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Block() for _ in range(count)]).double()
        loss_of(blocks(x), target).backward()
        own = range(rank, count, WORLD)
        modules = [patch_model(copy.deepcopy(blocks[i])) for i in own]
        stages = [PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, own, strict=True)]
        schedule = schedule_class(stages if stages_each > 1 else stages[0], WORLD, loss_fn=loss_of)
        for _ in range(3):
            for module in modules:
                module.zero_grad()
            loss = pipelined(schedule, x, target, rank == 0, rank == WORLD - 1)
        if loss is not None:
            close(loss.detach(), loss_of(blocks(x), target).detach())
        for module, i in zip(modules, own, strict=True):
            assert patch_report(module)[""].became == "FusedBlock"
            close([p.grad for p in module.parameters()], [p.grad for p in blocks[i].parameters()])


def check_split(rank):
    """torch splits a patched model into stages by its own trace."""
    x, target = rows(3).repeat(2, 1), rows(4).repeat(2, 1)
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(WORLD)]).double()
    loss_of(blocks(x), target).backward()
    spec = {str(i): SplitPoint.BEGINNING for i in range(1, WORLD)}
    split = pipeline(patch_model(copy.deepcopy(blocks)), mb_args=(x[:2],), split_spec=spec)
    stage = split.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, WORLD, loss_fn=loss_of)
    pipelined(schedule, x, target, rank == 0, rank == WORLD - 1)
    found = dict(stage.submod.named_parameters())
    expected = {name: p.grad for name, p in blocks.named_parameters() if name in found}
    assert len(expected) == len(found) > 0
    close({name: p.grad for name, p in found.items()}, expected)


def check_all(rank):
    warnings.simplefilter("ignore", PatchWarning)
    with rewritten_everywhere():
        check_sharded(rank)
        check_pipelines(rank)
        check_split(rank)


@pytest.mark.slow
def test_recomputed_shards_and_pipelines(tmp_path):
    run_in_processes(check_all, WORLD, tmp_path)
