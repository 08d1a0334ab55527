"""Whole models: training step and inference of seven networks, in every way to run them.

Each (model, mode) runs in a fresh process, one at a time; the next one imports its libraries meanwhile. What
torch.compile has to compile is compiled before that, by processes side by side, and found in its caches again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.networks import COMPILED, MODES, NETWORKS, Network

ROOT = Path(__file__).parents[1]
#: Of the GPU's memory, for processes that compile side by side.
SHARE = 0.8
#: What has to agree for the rows of an earlier run to stand beside new ones.
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
    """How a run is made.

    Args:
        device: ``cuda``, or ``cpu`` for the tiny configurations.
        seconds: about how long each timed loop takes.
        run_limit: seconds after which a process is ended.
        time_limit: seconds after which none is started.
    """

    device: str = "cuda"
    tiny: bool = False
    seconds: float = 2.0
    run_limit: float = 240.0
    time_limit: float | None = None


@dataclass
class Results:
    """What a run found, written to ``path`` after every process so that a run cut short keeps what it has."""

    path: Path
    environment: dict[str, object]
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    compile_s: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    kind: str = "models"

    def save(self) -> None:
        content = {name: value for name, value in asdict(self).items() if name != "path"}
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(self.path)

    def keep(self, earlier: dict[str, Any]) -> None:
        """Take over what an earlier run measured.

        Raises:
            ValueError: on another machine, with other versions or settings, or of another commit.
        """
        there = {name: earlier["environment"][name] for name in SAME} | earlier["settings"]
        here = {name: self.environment[name] for name in SAME} | self.settings
        for name, value in here.items():
            if there.get(name) != value:
                raise ValueError(f"{self.path} is of a run with {name} {there.get(name)!r}; expected {value!r}")
        self.rows = [row for row in earlier["rows"] if row["status"] != "failed"]
        self.compile_s = earlier["compile_s"]

    def has(self, job: Job) -> bool:
        return any((row["model"], row["mode"]) == (job.network.name, job.mode) for row in self.rows)


class Process:
    """A worker: it imports at once and measures from :meth:`begin` on."""

    def __init__(self, job: Job, settings: Settings, compile_only: bool = False, threads: int | None = None) -> None:
        self.job = job
        self.folder = tempfile.TemporaryDirectory(prefix="fastlayers-models-")
        self.result = Path(self.folder.name, "row.json")
        self.errors = Path(self.folder.name, "stderr")
        command = [sys.executable, "-m", "benchmarks.model_worker", job.network.name, job.mode, str(self.result)]
        command += ["--device", settings.device, "--seconds", str(settings.seconds)]
        command += ["--tiny"] * settings.tiny + ["--compile-only"] * compile_only
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONPATH": paths} | ({"TORCHINDUCTOR_COMPILE_THREADS": str(threads)} if threads else {})
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, cwd=ROOT, env=os.environ | variables
            )

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.started = time.monotonic()
        try:
            self.process.stdin.write(b"\n")
            self.process.stdin.close()
        except BrokenPipeError:  # it ended while it imported: finish() says how
            pass

    def running(self, limit: float) -> bool:
        """Whether it still is, within its limit."""
        return self.process.poll() is None and time.monotonic() - self.started < limit

    def finish(self, limit: float) -> dict[str, Any]:
        """Its row, once it ends or the limit is reached."""
        try:
            self.process.wait(max(0.0, limit - (time.monotonic() - self.started)))
            row = self.row()
        except subprocess.TimeoutExpired:
            row = {"status": "failed", "reason": f"ended after {limit:.0f} s"}
        row["took_s"] = round(time.monotonic() - self.started, 1)
        self.end()
        return row

    def row(self) -> dict[str, Any]:
        if self.result.exists():
            return json.loads(self.result.read_text())
        last = self.errors.read_text(errors="replace").strip().rpartition("\n")[2]
        return {"status": "failed", "reason": f"exit status {self.process.returncode}: {last}"[:500]}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def run(
    jobs: list[Job], path: Path, settings: Settings, resume: bool = False, report: Callable[[str], None] = print
) -> Results:
    """Measure the jobs in order into the JSON file ``path``; ``report`` is told of each one when it is done.

    Args:
        resume: keep what the file has and measure the rest, failed ones again.

    Raises:
        ValueError: ``resume``, and the file is of another machine, other settings or another commit.
    """
    started = time.monotonic()

    def late() -> bool:
        return settings.time_limit is not None and time.monotonic() - started > settings.time_limit

    measured_how = {name: getattr(settings, name) for name in ("device", "tiny", "seconds")}
    results = Results(path, environment(torch.device(settings.device)), measured_how)
    if resume and path.exists():
        results.keep(json.loads(path.read_text()))
    jobs = [job for job in jobs if not results.has(job)]
    to_compile = [job for job in jobs if job.mode in COMPILED and job.id not in results.compile_s]
    if settings.device == "cuda" and len(to_compile) > 1:
        results.compile_s |= compile_ahead(to_compile, settings, late, report)
    results.save()
    waiting: Process | None = None
    try:
        for place, job in enumerate(jobs):
            if late():
                results.skipped += [left.id for left in jobs[place:]]
                break
            process = waiting or Process(job, settings)
            process.begin()
            waiting = Process(jobs[place + 1], settings) if place + 1 < len(jobs) else None
            row = process.finish(settings.run_limit)
            results.rows.append(labels(job, settings) | row)
            results.save()
            report(
                f"{job.id}: {row['took_s']:.0f} s" + (f", {row['status']}: {row['reason']}" if row["reason"] else "")
            )
    finally:
        if waiting is not None:
            waiting.end()
    results.rows.sort(key=place_in_tables)
    results.save()
    return results


def labels(job: Job, settings: Settings) -> dict[str, Any]:
    network = job.network.tiny() if settings.tiny else job.network
    return {"model": network.name, "title": network.title, "what": network.describe(settings.device), "mode": job.mode}


def place_in_tables(row: dict[str, Any]) -> tuple[int, int]:
    return [network.name for network in NETWORKS].index(row["model"]), list(MODES).index(row["mode"])


def compile_ahead(
    jobs: list[Job], settings: Settings, late: Callable[[], bool], report: Callable[[str], None]
) -> dict[str, float]:
    """Fill torch.compile's caches by processes side by side, as many as the GPU's memory takes, until it is late.

    Returns the seconds that each took. What fails here, or does not end, fails again when it is measured.
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
                running[-1].begin()
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
