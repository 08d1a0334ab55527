"""Runs a part of the selection on this GPU, in the process that compute-sanitizer watches.

Prints the name of each case before it runs, so that what is reported next to it is its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fastlayers.ops import head
from tests.sanitizer.kernels import cuda_kernel_of
from tests.sanitizer.selection import Case, cases

#: A process whose context is lost fails in every case.
MOST_FAILURES = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.sanitizer.worker", description=__doc__)
    parser.add_argument("--ops", default="", help="rows of the selection, with commas; default: all")
    parser.add_argument("--part", default="1/1", help="of the cases: 2/4 is the second of four parts")
    parser.add_argument("--allocator", help="the library that gives each tensor an allocation of its own")
    parser.add_argument("--no-16-bit-products", action="store_true", help="without cases that read a 16-bit product")
    parser.add_argument("--record", type=Path, help="where to write the kernels that each row launches")
    options = parser.parse_args()
    which, parts = map(int, options.part.split("/"))
    library = None
    if options.allocator:  # before CUDA is initialised
        torch.cuda.memory.change_current_allocator(
            torch.cuda.memory.CUDAPluggableAllocator(options.allocator, "sanitizer_allocate", "sanitizer_free")
        )
        library = ctypes.CDLL(options.allocator)
        # torch counts no memory of such an allocator.
        head._free_bytes = lambda device: None
    chosen = cases(filter(None, options.ops.split(",")))[which - 1 :: parts]
    if options.no_16_bit_products:
        chosen = [case for case in chosen if not case.has_16_bit_product]
    if options.record:
        launched, failures = recorded(chosen)
        options.record.write_text(json.dumps({row: sorted(names) for row, names in launched.items()}))
    else:
        failures = run(chosen)
    # Tensors are looked at when they are freed: the workspaces of cuBLAS would be at the end of the process.
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    overwritten = library.sanitizer_overwritten() if library else 0
    print(f"{len(chosen)} cases, {failures} failed, {overwritten} tensors written past their end", flush=True)
    return bool(failures or overwritten)


def run(chosen: Iterable[Case]) -> int:
    """Runs the cases, and says how many failed."""
    failures = 0
    for case in chosen:
        print(case, flush=True)
        try:
            case()
            torch.cuda.synchronize()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failures += 1
            if failures == MOST_FAILURES:
                print("too many failures: the cases that follow do not run")
                break
    return failures


def recorded(chosen: list[Case]) -> tuple[dict[str, set[str]], int]:
    """The kernels that the cases of each row launch, those of Triton as module.function, and the cases that failed."""
    from fastlayers.kernels.launch import Launch  # needs Triton

    launched: dict[str, set[str]] = {}
    failures, call, row = 0, Launch.__call__, ""

    def noted(self: Launch, *tensors: torch.Tensor | None) -> None:
        launched[row].add(triton_name(self))
        call(self, *tensors)

    Launch.__call__ = noted  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CUDA]):  # the first session starts CUPTI and may miss kernels
        torch.zeros(1, device="cuda")
    for row in dict.fromkeys(case.row for case in chosen):
        launched[row] = set()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            failures += run(case for case in chosen if case.row == row)
        launched[row].update(filter(None, (cuda_kernel_of(event.key) for event in profiler.key_averages())))
    return launched, failures


def triton_name(launch: object) -> str:
    function = launch.function.fn  # type: ignore[attr-defined]
    return f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.exit(main())
