"""Functions run by several processes at once, with gloo on the CPU or with NCCL on a GPU each."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

_folder = ""
#: Seconds after which a process prints what its threads do.
HANGS = 240
#: Python has one server to fork from, which the benchmark of models uses too: its module is here for that.
PRELOADED = [
    "benchmarks.preload", "fastlayers", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
]  # fmt: skip


def run_in_processes(
    function: Callable[[int], None], world: int, tmp_path: Path, start_method: str = "forkserver", backend: str = "gloo"
) -> None:
    """``function(rank)`` in ``world`` processes, forked from one that has imported what takes longer than most checks.

    What a test changes, such as an environment variable, only processes of their own see: "spawn".
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    given = (str(tmp_path), world, backend, function)
    torch.multiprocessing.start_processes(_enter, given, nprocs=world, start_method=start_method)


def losses_of(call: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Tensor:
    """The losses of steps on batches: the mean square of what is called."""
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(batch).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def shared_path(name: str) -> str:
    """A path in the temporary directory of the test, in one of its processes."""
    return os.path.join(_folder, name)


def _enter(rank: int, folder: str, world: int, backend: str, function: Callable[[int], None]) -> None:
    global _folder
    _folder = folder
    store = shared_path("store")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    # A hang shows where. Most tests take seconds; on a busy machine some take minutes.
    faulthandler.dump_traceback_later(HANGS)
    try:
        function(rank)
    except pytest.fail.Exception as failed:  # Not an Exception: torch would only say that the process has ended.
        raise AssertionError(str(failed)) from failed
    gc.collect()  # graphs with collectives inside, which destroy_process_group would wait for
    dist.barrier()  # threads of gloo let go of the last tensors; one that does so when Python ends aborts the process
    dist.destroy_process_group()
