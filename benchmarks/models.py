"""Whole models: training step, inference and host time of each network in every mode.

Each network and mode runs in a process of its own, one at a time. These processes are forks of one that has imported
the libraries and done nothing else, so that nothing is imported while something is measured. Before code is compiled in
them, other processes fill the caches of torch.compile and of Triton in parallel, for a group of networks at a time.

A run may be cut short and resumed: the rows that say most come first.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import model_worker
from benchmarks.environment import environment, version
from benchmarks.networks import MODES, NETWORKS, Network
from benchmarks.networks.modes import AHEAD, OURS, STAGES, exists
from benchmarks.result_file import write

ROOT = Path(__file__).parents[1]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["benchmarks.preload"])
#: Share of the GPU's memory for processes that compile in parallel, by their peaks, which do not coincide: 8 networks
#: took 142 s beside each other on 16 cores and an H100, 4 of them 117 s.
SHARE = 1.1
#: Jobs that compile in parallel before they are measured. If the run is cut short, the work on one group is lost.
GROUP = 8
LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "monai", "liger_kernel")
#: What has to be equal if rows of an earlier run are kept.
SAME = ("device", "driver", "torch", "triton", "libraries")


#: A share of the fastest products of a file, below which a GPU counts as throttled. One had .3 to .8 of its speed for
#: 30 minutes, and the rows of 38 networks were useless.
THROTTLED = 0.85


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
    seconds: float = 1.0
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
        """Keep the rows of an earlier run, but for those that failed, were measured on a throttled GPU, or that another
        commit may change.

        Raises:
            ValueError: the earlier run has another machine, other versions or settings, or the commit is not known.
        """
        if self.environment["commit"] is None:
            raise ValueError("the commit is not known, so that rows of another one cannot be told; set GIT_COMMIT")
        there = {name: earlier["environment"].get(name) for name in SAME} | earlier["settings"]
        here = {name: self.environment[name] for name in SAME} | self.settings
        for name, value in here.items():
            if there.get(name) != value:
                raise ValueError(f"{self.path} is of a run with {name} {there.get(name)!r}; expected {value!r}")
        prints = {network.name: fingerprint(network) for network in NETWORKS}
        of_earlier = replace(self, rows=earlier["rows"])
        self.rows = [
            row
            for row in earlier["rows"]
            if row["status"] != "failed"
            and not of_earlier.throttled(row)
            and row["network"] == prints.get(row["model"])
            and (row["mode"] not in OURS or row["commit"] == self.environment["commit"])
        ]
        self.compile_s = earlier["compile_s"]

    def row(self, job: Job) -> dict[str, Any] | None:
        return next((row for row in self.rows if (row["model"], row["mode"]) == (job.network.name, job.mode)), None)

    def throttled(self, row: dict[str, Any]) -> bool:
        """Whether a row was measured while the GPU was slower than for another one."""
        speed = tflops(row)
        return speed is not None and speed < THROTTLED * max(tflops(other) or 0.0 for other in (row, *self.rows))

    def put(self, job: Job, row: dict[str, Any]) -> None:
        earlier = self.row(job)
        self.rows = sorted([other for other in self.rows if other is not earlier] + [row], key=place_in_tables)
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


def all_jobs(networks: Iterable[Network], modes: Iterable[str]) -> list[Job]:
    """Jobs in the order of a run: stage by stage, the first networks first."""
    networks, modes = tuple(networks), tuple(modes)
    return [
        Job(network, mode)
        for stage in STAGES
        for network in networks
        for mode in stage
        if mode in modes and exists(network, mode)
    ]


def run(
    jobs: list[Job], path: Path, settings: Settings, resume: bool = False, report: Callable[[str], None] = print
) -> Results:
    """Measure the jobs in order and write the JSON file ``path``; ``report`` gets a line after each job.

    Args:
        resume: keep the rows of the file and measure the rest. Failed rows are measured again, and those of fastlayers
            if the commit is another one.

    Raises:
        ValueError: ``resume`` is True, and the file is of another machine, other versions or other settings.
    """
    started = time.monotonic()

    def measured(job: Job) -> dict[str, Any]:
        row = labels(job, settings, results.environment) | Process(job, settings).finish(settings.run_limit)
        failed = f", {row['status']}: {row['reason']}" if row["reason"] else ""
        reached, slow = tflops(row), " (throttled)" if results.throttled(row) else ""
        speed = "" if reached is None else f", {reached:.0f} TFLOPS{slow}"
        report(f"{job.id}: {row['took_s']:.0f} s{speed}{failed}")
        return row

    def late() -> bool:
        return settings.time_limit is not None and time.monotonic() - started > settings.time_limit

    measured_how = {name: getattr(settings, name) for name in ("device", "tiny", "seconds")}
    here = environment(torch.device(settings.device)) | {"libraries": {name: version(name) for name in LIBRARIES}}
    results = Results(path, here, measured_how)
    if resume and path.exists():
        results.keep(json.loads(path.read_text()))
    new = [job for job in jobs if results.row(job) is None]
    results.skipped = [job.id for job in new]
    results.save()
    for group in grouped(new):
        to_compile = [job for job in group if job.mode in AHEAD]
        if settings.device == "cuda" and len(to_compile) > 1:
            results.compile_s |= compile_ahead(to_compile, settings, late, report)
        for job in group:
            if not late():
                results.skipped.remove(job.id)
                results.put(job, measured(job))
    return results


def grouped(jobs: list[Job]) -> Iterator[list[Job]]:
    """The jobs in order: those that compile in groups, the others one by one."""
    group: list[Job] = []
    for job in jobs:
        if group and (job.mode not in AHEAD or group[-1].mode not in AHEAD or len(group) == GROUP):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def sized(job: Job, settings: Settings) -> Network:
    return job.network.tiny() if settings.tiny else job.network


def labels(job: Job, settings: Settings, environment: dict[str, object]) -> dict[str, Any]:
    network = sized(job, settings)
    return {
        "model": network.name,
        "title": network.title,
        "what": network.describe(settings.device),
        "mode": job.mode,
        "commit": environment["commit"],
        "network": fingerprint(job.network),
    }


def fingerprint(network: Network) -> str:
    """Tells whether a network was changed since it was measured."""
    measured = replace(network, title="", gib=0)
    return hashlib.sha1(repr(measured).encode()).hexdigest()[:10]


def tflops(row: dict[str, Any]) -> float | None:
    """The speed of the GPU when a row was measured, None where that is not known."""
    return min(
        (row[part]["tflops"] for part in ("training", "inference") if "tflops" in row.get(part, {})), default=None
    )


def place_in_tables(row: dict[str, Any]) -> tuple[int, int]:
    return [network.name for network in NETWORKS].index(row["model"]), list(MODES).index(row["mode"])


def compile_ahead(
    jobs: list[Job], settings: Settings, late: Callable[[], bool], report: Callable[[str], None]
) -> dict[str, float]:
    """Fill the caches of compiled code with processes in parallel, as many as fit in the GPU's memory.

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
