"""Compile all cases for torch.compile in parallel, before anything is timed.

Compiling one case after the other takes longer than all measurements. Here several processes compile, and the process
that measures finds the code in Inductor's cache on disk. The cache does not keep the best launch configuration, which
Inductor finds by timing, because here the GPU is busy.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from benchmarks.case import Case
from benchmarks.cases import all_cases
from benchmarks.implementations import as_tuple, function

MAX_PROCESSES = 12  # each holds the tensors of one case: up to 4 GiB


def share_compiled_code(threads: int | None = None) -> None:
    """Use the same cache settings of Inductor in every process, because they are part of the cache key."""
    from torch._inductor import config

    config.fx_graph_cache = True
    config.autotune_local_cache = False
    if threads is not None:
        config.compile_threads = threads


def compile_case(case_id: str, device_type: str) -> float:
    """Compile the inference and the training graph of a case. Returns the seconds that their first calls took."""
    share_compiled_code(threads=1)
    case = next(case for case in all_cases() if case.id == case_id)
    inputs = case.tensors(torch.device(device_type))
    compiled = function("compile", case)
    started = time.perf_counter()
    with torch.no_grad():
        compiled(*inputs, **case.options)
    wanted = [x for x in inputs if x.requires_grad]
    if wanted:
        outputs = as_tuple(compiled(*inputs, **case.options))
        torch.autograd.grad(outputs, wanted, [torch.randn_like(out) for out in outputs])
    if device_type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return time.perf_counter() - started


def precompile(cases: Iterable[Case], report: Callable[[str], None]) -> dict[str, float]:
    """Fill Inductor's cache for the cases. Returns the seconds of each; a case that fails here fails again later."""
    ids = [(case.id, case.device_type) for case in cases]
    processes = min(MAX_PROCESSES, os.cpu_count() or 1, len(ids))
    seconds: dict[str, float] = {}
    started = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_case, *key): key[0] for key in ids}
        for future in as_completed(futures):
            error = future.exception()
            if error is None:
                seconds[futures[future]] = round(future.result(), 3)
            else:
                report(f"precompiling {futures[future]} failed: {error}")
    report(f"compiled {len(seconds)} cases in {time.monotonic() - started:.0f} s, {processes} at a time")
    return seconds
