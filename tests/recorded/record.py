"""Record the programs of the benchmarks' networks on a GPU: python3 -m tests.recorded.record DIRECTORY [NETWORK ...].

Each network has a file. In it are the programs of a training step and of inference, under autocast to bfloat16 and with
weights in bfloat16, as the passes are given them.
"""

from __future__ import annotations

import difflib
import gc
import itertools
import multiprocessing
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

import fastlayers
from benchmarks.networks import NETWORKS as ALL
from fastlayers.patching.fusion import kernels as fusion
from fastlayers.patching.fusion import passes
from tests.recorded.programs import decode, encode, text_of, write

NETWORKS = {network.name: network for network in ALL}
CALLS = 3  # the second one is recorded
PROCESSES = 7


def programs_of(name):
    """The encoded programs of a network, each once, and what failed."""
    found, failed, fused = [], set(), passes.fused
    fusion.compile_together = lambda kernels: None

    def note(program, *given):
        try:
            data = encode(program)
            if data not in found:
                found.append(data)
                mine, theirs = decode(data), replace(program, values=dict(program.values))
                ours, real = (text_of(fused(each)).splitlines() for each in (mine, theirs))
                if ours != real:
                    failed.add("\n".join(itertools.islice(difflib.unified_diff(real, ours, lineterm="", n=0), 20)))
        except Exception:
            failed.add(traceback.format_exc(limit=-2))
        return program

    passes.fused = note
    device = torch.device("cuda")
    for amp in (True, False):
        network = replace(NETWORKS[name], amp=amp)
        torch.manual_seed(0)
        model = network.build(device)
        batch = network.example(device)
        fastlayers.patch_model(model)
        try:
            run(network, model, batch, device)
        except RuntimeError as error:  # Some networks take float32 alone.
            failed.add(f"amp={amp}: {error}".splitlines()[0])
        del model, batch
        gc.collect()
        torch.cuda.empty_cache()
    return found, failed


def run(network, model, batch, device):
    """Training steps, and inference."""
    for _ in range(CALLS):
        with network.autocast(device):
            loss = network.loss(model, batch)
        loss.backward()
    model.zero_grad()
    model.eval()
    for _ in range(CALLS):
        with torch.no_grad(), network.autocast(device):
            network.predict(model, batch)


def record(directory, name):
    begin = time.time()
    try:
        programs, failed = programs_of(name)
    except Exception:
        return (f"{name}: {traceback.format_exc(limit=-3)}",)
    path = Path(directory, f"{name}.jsonl.gz")
    write(path, programs)
    return (
        f"{name}: {len(programs)} programs, {path.stat().st_size / 1024:.0f} KiB, {time.time() - begin:.0f} s",
        *failed,
    )


if __name__ == "__main__":
    directory, *chosen = sys.argv[1:]
    with multiprocessing.get_context("spawn").Pool(PROCESSES, maxtasksperchild=1) as pool:
        jobs = [pool.apply_async(record, (directory, name)) for name in chosen or NETWORKS]
        for job in jobs:
            print(*job.get(), sep="\n", flush=True)
