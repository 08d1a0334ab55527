"""Random sequences of what people do with a model under DDP in two processes, stock and patched side by side."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.region import Region
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.distributed.processes import run_in_processes
from tests.patching.test_sequences import PARTS, PARTS_OF_ALL, WIDTH, Model

SEQUENCES, STEPS = 10 if PARTS_OF_ALL == 1 else 200, 12
WHAT = ["train", "train", "train", "accumulate", "checkpoint", "no_grad", "flip", "write", "step"]


def do(what, model, optimizer, rows, some):
    if what == "flip":
        model.train(not model.training)
    elif what == "write":
        model.module.last.weight.data.mul_(1.1)
    elif what == "step":
        optimizer.step()
        optimizer.zero_grad()
    else:
        x = torch.randn(rows, WIDTH, dtype=torch.double)
        with torch.no_grad() if what == "no_grad" else model.no_sync() if what == "accumulate" else nullcontext():
            out = checkpoint(model, x, use_reentrant=False) if what == "checkpoint" else model(x)
            if what != "no_grad":
                sum(t.square().mean() for t in (out[:1] if some else out)).backward()
        return out
    return ()


def sequences(rank):
    regions.LEAST, demand.CALLS, regions.RAISE_ERRORS = dict.fromkeys(regions.LEAST, (1, 1)), 1, True
    ran, run = [], Region.run
    Region.run = lambda *args: ran.append(1) or run(*args)
    for number in range(SEQUENCES):
        choose = random.Random(number)
        torch.manual_seed(number)
        stock = Model(choose.choices(sorted(PARTS), k=2)).double()
        models = [stock, fastlayers.patch_model(copy.deepcopy(stock))]
        models = [DistributedDataParallel(m, find_unused_parameters=True) for m in models]
        optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in models]
        for step in range(STEPS):
            found, chosen = [], (choose.choice(WHAT), choose.choice([3, 5]), choose.random() < 0.3)
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.manual_seed(step % 4 + 100 * rank)
                out = do(chosen[0], model, optimizer, *chosen[1:])
                found.append([*out, *model.state_dict().values(), *(p.grad for p in model.parameters())])
            torch.testing.assert_close(found[1], found[0], msg=f"sequence {number}, step {step}: {chosen}")
    assert len(ran) > SEQUENCES * STEPS / 2, len(ran)


def test_sequences_under_ddp(tmp_path):
    with rewritten_everywhere():
        run_in_processes(sequences, 2, tmp_path)
