from __future__ import annotations

import fcntl
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastlayers import backends
from fastlayers.patching.program import lint
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.rewrite.classes import Generated
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests import ROOT, draw

regions.RAISE_ERRORS = lint.ENABLED = True

# Tests are small and run in parallel. Waiting OpenMP threads spin: on shared cores that makes a test ten times slower.
torch.set_num_threads(1)

# Inductor's cache does not tell instruction sets apart: what it holds for AVX-512 crashes in a process with AVX2.
CAPABILITY = os.environ.get("ATEN_CPU_CAPABILITY")
if CAPABILITY is not None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor-{CAPABILITY}")))

NO_GPU = not torch.cuda.is_available()
if NO_GPU:  # torch would keep each seed for a GPU that may come, with a stack trace: 1 ms, and that 30 times in a test.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
CACHED = 2**30
#: Held by the one test that takes most of the GPU's memory.
LARGE_TEST = Path(tempfile.gettempdir()) / "fastlayers-gpu-memory.lock"
#: The tests of these files wait for processes of their own, some for minutes; the first one named takes longest.
LONGEST = (
    "test_triton_kernels[compiled]",
    "kernels/test_kernels.py",
    "contract/test_triton_interpreter.py",
    "examples/test_examples.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    draw.add_option(parser)


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = []
    if NO_GPU:
        lines.append("torch sees no GPU: tests marked gpu are left out; `make test-gpu` runs them where there is one")
    if config.getoption("draw"):
        seed = draw.seed_of(config)
        lines.append(
            f"a share of the cases, drawn by the seed {seed}: ARGS=--randomly-seed={seed} repeats it, and the order;"
        )
        lines.append("`make test-all` runs all")
    return lines


@pytest.hookimpl(trylast=True)  # after -k and -m, which choose what to draw from
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the GPU's tests where there is no GPU: thousands of skips would hide the ones that mean something."""
    kept = [item for item in items if not (NO_GPU and item.get_closest_marker("gpu"))]
    config.stash[draw.COUNTED] = len(kept)
    if config.getoption("draw"):
        kept = draw.drawn(kept, draw.seed_of(config), config.getoption("draw"))
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=set(items).difference(kept))
    items[:] = long_ones_first(kept, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def file_of(item: pytest.Item) -> str:
    """The file of a test and the folder that it is in."""
    return "/".join(item.path.parts[-2:])


def long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Gives every worker of xdist, which takes an equal part of the list, some of the longest tests to begin with.

    The rest of the order is random (pytest-randomly). A test of minutes that started last would leave a core idle.
    """

    def place(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(LONGEST) if name in (item.name, file_of(item))), len(LONGEST))

    first = sorted((item for item in items if place(item) < len(LONGEST)), key=place)
    # The examples share a process: one worker takes them all.
    shared = [item for item in first if file_of(item) == LONGEST[-1]]
    alone = first[: len(first) - len(shared)]
    others = iter([item for item in items if place(item) == len(LONGEST)])
    found: list[pytest.Item] = []
    for worker in range(workers):
        part = (len(items) - len(found)) // (workers - worker)
        mine = [*alone[worker::workers], *(shared if worker == workers - 1 else [])]
        found += [*mine, *itertools.islice(others, max(0, part - len(mine)))]
    return [*found, *others]


def pytest_collection_finish() -> None:
    """What is there now stays. The collector takes a second for torch and all cases, and leaves it out from now on."""
    gc.collect()
    gc.freeze()


def process_wide_state() -> dict[str, Any]:
    """What a test can change of torch for every test after it."""
    return {
        "torch.compile": torch.compile,
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.distributed.is_initialized()": torch.distributed.is_initialized(),
        "the logging of torch": torch._logging._internal._get_log_state().log_qname_to_level.copy(),
    }


@pytest.fixture(autouse=True, scope="session")
def _rewritten_everywhere() -> Iterator[None]:
    """Rewritten forwards run on the CPU, too: most of the tests of patching run there."""
    with rewritten_everywhere():
        yield


@pytest.fixture(autouse=True, scope="session")
def _a_launch_serves_one_dtype() -> Iterator[None]:
    """A launch of a Triton kernel is compiled for its first tensors: others would be read as if of their dtype."""
    if backends.problem("triton") is not None and not backends.triton_interprets():
        yield
        return
    from fastlayers.kernels.launch import Launch  # needs Triton

    call: Any = Launch.__call__
    known: dict[int, tuple[Launch, dict[int, torch.dtype]]] = {}

    def checked(self: Launch, *tensors: torch.Tensor | None) -> None:
        _, dtypes = known.setdefault(id(self), (self, {}))
        for i, t in enumerate(tensors):
            if t is not None and dtypes.setdefault(i, t.dtype) is not t.dtype:
                raise AssertionError(f"argument {i} of a launch of {self.function} is {t.dtype}, and was {dtypes[i]}")
        call(self, *tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", checked)
        yield


@pytest.fixture(autouse=True)
def _classes_of_its_own() -> None:
    """What other tests have generated and recorded serves no model of this one."""
    Generated.in_use.clear()
    Generated.functions.clear()


@pytest.fixture(autouse=True)
def _depends_on_no_other_test() -> Iterator[None]:
    """Every test draws the same random numbers in any order, and fails itself where it would change its neighbours."""
    backend, before = backends.get_backend(), process_wide_state()
    torch.manual_seed(0)
    yield
    backends.set_backend(backend)  # a test that failed inside a forced backend forces nothing on the next one
    after = process_wide_state()
    changed = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    assert not changed, f"this test changes process-wide state: {changed}"


@pytest.fixture
def op_by_op() -> Iterator[None]:
    """Forwards run op by op, for stand-ins of kernels that count their calls: a region would record them."""
    with no_regions():
        yield


@pytest.fixture
def inner_run(pytestconfig: pytest.Config) -> list[str]:
    """Options for a run of pytest in another process: its order and its draw come from the seed of this run."""
    # The plugin of hypothesis imports it for a summary, in two seconds. numpy warns of every NaN that Triton's
    # interpreter meets on purpose.
    options = ["-q", "-W", "ignore::RuntimeWarning"]
    options += [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "hypothesispytest")]
    seed = pytestconfig.getoption("randomly_seed", None)  # pytest-randomly may be missing
    options += [] if seed is None else [f"--randomly-seed={seed}"]
    return [*options, *draw.options(pytestconfig)]


@pytest.fixture
def run_tests(inner_run: list[str], pytestconfig: pytest.Config) -> Callable[..., None]:
    """Runs tests of these files in another process, which has these variables, and checks that they pass.

    If this run draws, so does that: of a parameter with more than ``many`` values some.
    """

    def run(files: Iterable[Path | str], *options: str, many: int | None = None, **variables: str) -> None:
        options = (*inner_run, *draw.options(pytestconfig, many), *options)
        command = [sys.executable, "-m", "pytest", *options, *(str(ROOT / "tests" / file) for file in files)]
        done = subprocess.run(command, env=os.environ | variables, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert " passed" in done.stdout.splitlines()[-1]

    return run


@pytest.fixture(autouse=True)
def _leave_gpu_memory() -> Iterator[None]:
    """Returns what torch has cached by the gigabyte: a test in another process may need it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > CACHED:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Runs a test once more that found no GPU memory because one with ``gpu_memory`` held it, after that one."""
    try:
        return (yield)
    except torch.OutOfMemoryError:
        if "gpu_memory" in getattr(item, "fixturenames", ()):
            raise
    with LARGE_TEST.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        item.runtest()


@pytest.fixture
def gpu_memory() -> Iterator[Callable[[float], None]]:
    """A function that a test calls with the bytes of GPU memory that it needs, where these are many.

    Only one such test runs at a time, in all processes. Its memory does not stay with torch afterwards: tests in other
    processes would find none.
    """
    with LARGE_TEST.open("w") as lock:

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


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Algorithms of cuDNN that give equal bits in every call."""
    with torch.backends.cudnn.flags(
        enabled=True, deterministic=True
    ):  # torch's own tests forbid to set the flag itself
        yield


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timing is judged: what this process measures runs a few times, and no garbage of other tests is collected."""
    from benchmarks import model_worker

    monkeypatch.setattr(model_worker, "LOSSES", 4)
    monkeypatch.setattr(model_worker, "LEAST", 2)
    monkeypatch.setattr(model_worker, "HOST_CALLS", 2)
    monkeypatch.setattr(model_worker, "gc", SimpleNamespace(collect=lambda: 0))
