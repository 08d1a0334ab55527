"""torch.compile of patched models under DDP, FSDP2 and tensor parallelism, in two processes."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fastlayers import patch_model, patch_report
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.distributed.processes import losses_of, run_in_processes
from tests.distributed.test_wrappers import ddp, net, of_data, of_the_root, tensor_parallel

WORLD, STEPS = 2, 3


def sequence_parallel(model, mesh):
    """Each process has half of the tokens, outside of the products."""
    columns, rows = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = {"norm": SequenceParallel(), "gate": columns, "up": columns, "down": rows}
    for block in model.blocks:
        parallelize_module(block, mesh["other"], plan)
    return model


def train(model, call, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return losses_of(call, optimizer, [x] * STEPS)


def check_compiled(rank):
    """The losses are those of eager mode."""
    warnings.simplefilter("ignore")
    batch = torch.randn(2 * WORLD, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    by_rows, by_columns = ((2, 1), batch.chunk(WORLD)[rank]), ((1, 2), batch)
    by_tokens = (1, 2), batch.chunk(WORLD, 1)[rank].contiguous()
    cases = {
        ddp: by_rows,
        of_data: by_rows,
        of_the_root: by_rows,
        tensor_parallel: by_columns,
        sequence_parallel: by_tokens,
    }
    for wrap, (shape, x) in cases.items():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("data", "other"))
        stock = wrap(net(), mesh)
        expected = train(stock, stock, x)
        for before in (True, False):
            torch._dynamo.reset()
            model = wrap(patch_model(net()), mesh) if before else patch_model(wrap(net(), mesh))
            assert patch_report(model).patched
            losses = train(model, torch.compile(model, backend="aot_eager"), x)
            case = f"{wrap.__name__}, patched before: {before}"
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12, msg=case)


def check_all(rank):
    with rewritten_everywhere():
        check_compiled(rank)


@pytest.mark.slow
def test_compiled_models_in_parallel(tmp_path):
    run_in_processes(check_all, WORLD, tmp_path)
