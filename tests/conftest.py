from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fastlayers import backends

# Tests are small and run side by side. OpenMP's threads wait by spinning: on shared cores a test is ten times slower.
torch.set_num_threads(1)


NO_GPU = not torch.cuda.is_available()
CACHED = 2**30


def pytest_report_header() -> str | None:
    return (
        "torch sees no GPU: tests marked gpu are left out; `make test-gpu` runs them where there is one"
        if NO_GPU
        else None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are left out: thousands of skips would hide the ones that mean something."""
    left_out = [item for item in items if NO_GPU and item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    # Some of these take minutes: begun last, one would be waited for with the other cores idle.
    items.sort(key=lambda item: item.path.name != "test_triton.py")


@pytest.fixture(autouse=True)
def _leave_backend_alone() -> Iterator[None]:
    """A test that fails inside of a forced backend forces nothing on the next one."""
    before = backends.get_backend()
    yield
    backends.set_backend(before)


@pytest.fixture(autouse=True)
def _leave_gpu_memory() -> Iterator[None]:
    """What torch has cached of it by the gigabyte, a test in another process may need."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > CACHED:
        torch.cuda.empty_cache()


@pytest.fixture
def gpu_memory() -> Iterator[Callable[[float], None]]:
    """What a test calls that takes much of the GPU's memory, with the bytes that it takes.

    One such test runs at a time, whatever runs beside it, and what it took does not stay with torch afterwards: tests
    in other processes would find none.
    """
    with (Path(tempfile.gettempdir()) / "fastlayers-gpu-memory.lock").open("w") as lock:

        def take(needed: float) -> None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            torch.cuda.empty_cache()
            patience = time.monotonic() + 60
            while torch.cuda.mem_get_info()[0] < needed:
                if time.monotonic() > patience:
                    pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory free")
                time.sleep(0.5)

        yield take
        torch.cuda.empty_cache()
