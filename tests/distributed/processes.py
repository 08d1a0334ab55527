"""Functions run by several processes at once, with gloo on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run_in_processes(function: Callable[[int], None], world: int, tmp_path: Path) -> None:
    """``function(rank)`` in ``world`` processes, which take longer to start than most checks to run."""
    torch.multiprocessing.spawn(_enter, (str(tmp_path / "store"), world, function), nprocs=world)


def _enter(rank: int, store: str, world: int, function: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    function(rank)
    dist.barrier()  # threads of gloo let go of the last tensors; one that does so when Python ends aborts the process
    dist.destroy_process_group()
