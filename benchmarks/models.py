"""Whole models: training step and inference of seven networks, in every mode.

Each model and mode runs in a process of its own, one at a time. These processes are forks of one that has imported the
libraries and done nothing else, so that nothing is imported while something is measured. Before, other processes fill
the caches of torch.compile in parallel. Rows that were CPU-bound are measured once more at the end, the most CPU-bound
first, and the faster time counts.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import model_worker
from benchmarks.environment import environment
from benchmarks.networks import MODES, NETWORKS, Network
from benchmarks.networks.modes import COMPILED
from benchmarks.result_file import write

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.preload"])
PARTS = ("inference", "training")
#: Share of the GPU's memory for processes that compile in parallel.
SHARE = 0.8
#: A time is CPU-bound if it is longer than the GPU's time by this factor. Other tenants slow a CPU for ten seconds at a
#: time: GPT-2's step took 40 ms in one run and 53 ms in another, and the GPU's time was 34 ms.
CPU_BOUND = 1.05
#: What has to be equal if rows of an earlier run are kept.
SAME = ("device", "driver", "torch", "triton", "commit")


@dataclass(frozen=True)
class Job:
    network: Network
    mode: str

    @property
    def id(self) -> str:
        return f"{self.network.name}/{self.mode}"


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Args:
        device: ``cuda``, or ``cpu`` for the tiny configurations.
        seconds: about how long each timed loop takes.
        run_limit: seconds after which a process is ended.
        time_limit: seconds after which no further process is started.
    """

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 2.0
    run_limit: float = 240.0
    time_limit: float | None = None


@dataclass
class Results:
    """The results of a run, written to ``path`` after every process, so that an interrupted run keeps its rows."""

    path: Path
    environment: dict[str, object]
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    compile_s: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    kind: str = "models"

    def save(self) -> None:
        write(self.path, {name: value for name, value in asdict(self).items() if name != "path"})

    def keep(self, earlier: dict[str, Any]) -> None:
        """Keep the rows of an earlier run.

        Raises:
            ValueError: the earlier run has another machine, other versions or settings, or another commit.
        """
        there = {name: earlier["environment"][name] for name in SAME} | earlier["settings"]
        here = {name: self.environment[name] for name in SAME} | self.settings
        for name, value in here.items():
            if there.get(name) != value:
                raise ValueError(f"{self.path} is of a run with {name} {there.get(name)!r}; expected {value!r}")
        self.rows = [row for row in earlier["rows"] if row["status"] != "failed"]
        self.compile_s = earlier["compile_s"]

    def row(self, job: Job) -> dict[str, Any] | None:
        return next((row for row in self.rows if (row["model"], row["mode"]) == (job.network.name, job.mode)), None)

    def put(self, job: Job, row: dict[str, Any]) -> None:
        earlier = self.row(job)
        self.rows = [other for other in self.rows if other is not earlier] + [row]
        self.save()


class Process:
    """A process that measures one job. It starts at once."""

    def __init__(self, job: Job, settings: Settings, compile_only: bool = False, threads: int | None = None) -> None:
        self.job = job
        self.folder = tempfile.TemporaryDirectory(prefix="fastlayers-models-")
        self.result = Path(self.folder.name, "row.json")
        self.output = Path(self.folder.name, "output")
        arguments = (sized(job, settings), job.mode, settings.device, settings.seconds, compile_only, threads)
        self.process = FORKS.Process(target=model_worker.work, args=(self.result, self.output, *arguments))
        with working_directory(ROOT):  # the first one starts the fork server, which imports from here
            self.process.start()
        self.started = time.monotonic()

    def running(self, limit: float) -> bool:
        """Whether it is still running and within its limit."""
        return self.process.is_alive() and time.monotonic() - self.started < limit

    def finish(self, limit: float) -> dict[str, Any]:
        """Wait until it ends or the limit is reached; returns its row."""
        try:
            self.process.join(max(0.0, limit - (time.monotonic() - self.started)))
            row = self.row(limit) | {"took_s": round(time.monotonic() - self.started, 1)}
        finally:
            self.end()
        return row

    def row(self, limit: float) -> dict[str, Any]:
        if self.process.exitcode is None:
            return {"status": "failed", "reason": f"ended after {limit:.0f} s"}
        if self.result.exists():
            return json.loads(self.result.read_text())
        last = self.output.read_text(errors="replace").strip().rpartition("\n")[2] if self.output.exists() else ""
        return {"status": "failed", "reason": f"exit status {self.process.exitcode}: {last}"[:500]}

    def end(self) -> None:
        """End it and the processes that it started, such as those of torch.compile."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # in case it has no group of its own yet
        self.process.join()
        self.folder.cleanup()


@contextmanager
def working_directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def run(
    jobs: list[Job], path: Path, settings: Settings, resume: bool = False, report: Callable[[str], None] = print
) -> Results:
    """Measure the jobs in order and write the JSON file ``path``; ``report`` gets a line after each job.

    Args:
        resume: keep the rows of the file and measure the rest. Failed rows are measured again.

    Raises:
        ValueError: ``resume`` is True, and the file is of another machine, other settings or another commit.
    """
    started = time.monotonic()

    def measured(job: Job) -> dict[str, Any]:
        row = labels(job, settings) | Process(job, settings).finish(settings.run_limit)
        report(f"{job.id}: {row['took_s']:.0f} s" + (f", {row['status']}: {row['reason']}" if row["reason"] else ""))
        return row

    def late() -> bool:
        return settings.time_limit is not None and time.monotonic() - started > settings.time_limit

    measured_how = {name: getattr(settings, name) for name in ("device", "tiny", "seconds")}
    results = Results(path, environment(torch.device(settings.device)), measured_how)
    if resume and path.exists():
        results.keep(json.loads(path.read_text()))
    new = [job for job in jobs if results.row(job) is None]
    to_compile = [job for job in new if job.mode in COMPILED and job.id not in results.compile_s]
    if settings.device == "cuda" and len(to_compile) > 1:
        results.compile_s |= compile_ahead(to_compile, settings, late, report)
    results.save()
    for place, job in enumerate(new):
        if late():
            results.skipped += [left.id for left in new[place:]]
            break
        results.put(job, measured(job))
    again = [(row, job) for job in jobs if (row := results.row(job)) is not None and slowed_by_cpu(row) > CPU_BOUND]
    for row, job in sorted(again, key=lambda one: -slowed_by_cpu(one[0])):
        if not late():
            results.put(job, faster(row, measured(job)))
    results.rows.sort(key=place_in_tables)
    results.save()
    return results


def slowed_by_cpu(row: dict[str, Any]) -> float:
    """The larger ratio of time to GPU time in a row; 0 if the row failed or was measured twice already."""
    if row["status"] != "ok" or row.get("again"):
        return 0.0
    return max(row[part]["ms"] / row[part].get("gpu_ms", math.inf) for part in PARTS)


def faster(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Combine two rows of one job: each part from the row in which it was faster."""
    if second["status"] != "ok":
        return second
    best = {part: min(first[part], second[part], key=lambda found: found["ms"]) for part in PARTS}
    return second | best | {"again": True}


def sized(job: Job, settings: Settings) -> Network:
    return job.network.tiny() if settings.tiny else job.network


def labels(job: Job, settings: Settings) -> dict[str, Any]:
    network = sized(job, settings)
    return {"model": network.name, "title": network.title, "what": network.describe(settings.device), "mode": job.mode}


def place_in_tables(row: dict[str, Any]) -> tuple[int, int]:
    return [network.name for network in NETWORKS].index(row["model"]), list(MODES).index(row["mode"])


def compile_ahead(
    jobs: list[Job], settings: Settings, late: Callable[[], bool], report: Callable[[str], None]
) -> dict[str, float]:
    """Fill the caches of torch.compile with processes in parallel, as many as fit in the GPU's memory.

    Returns the seconds that each process took. A job that fails here fails again when it is measured.
    """
    room = torch.cuda.get_device_properties(0).total_memory / 2**30 * SHARE
    threads = max(1, (os.cpu_count() or 1) // 3)
    started = time.monotonic()
    pending = list(jobs)
    running: list[Process] = []
    seconds: dict[str, float] = {}
    try:
        while running or (pending and not late()):
            used = sum(process.job.network.gib for process in running)
            fitting = [job for job in pending if not running or used + job.network.gib <= room]
            for job in fitting[:1] if not late() else ():
                pending.remove(job)
                running.append(Process(job, settings, compile_only=True, threads=threads))
            time.sleep(0.2)
            for process in [p for p in running if not p.running(settings.run_limit)]:
                running.remove(process)
                seconds[process.job.id] = process.finish(settings.run_limit)["took_s"]
    finally:
        for process in running:
            process.end()
    if jobs:
        report(f"compiled {len(seconds)} of {len(jobs)} models in {time.monotonic() - started:.0f} s")
    return seconds
