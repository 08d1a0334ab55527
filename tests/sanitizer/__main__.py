"""compute-sanitizer over every kernel: ``python -m tests.sanitizer [--tools TOOLS] [--ops OPS]``.

First the cases run without it, each row under torch's profiler: Triton compiles its kernels, and no kernel of csrc or
fastlayers/kernels may be left out. Then they run once more under each of the tools, in several processes at a time.
Ends with 1 where a tool reports a kernel of fastlayers, where a case fails, or where a kernel was not launched.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fastlayers.build import BuildError, find_nvcc
from tests.sanitizer.kernels import MANGLED, ROOT, cuda_kernels, is_ours, triton_kernels
from tests.sanitizer.selection import CLAIMED, WHOLE_BLOCKS, cases

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: These tools judge accesses to the memory of tensors. The others look at shared memory, and at barriers.
OF_TENSORS = ("memcheck", "initcheck")
#: These tools cannot follow cuBLAS where it multiplies 16-bit matrices on Hopper, with the tensor memory accelerator:
#: initcheck takes the products for uninitialised (2025.3), and racecheck ends with an internal error.
NOT_OF_16_BIT_PRODUCTS = ("racecheck", "initcheck")
#: racecheck (2025.3) takes a write after __syncthreads() for a race with what was read before it, if some groups of
#: threads wait there while others pass a barrier of their own. A program of 20 lines shows it, whatever its barriers
#: are. This kernel is such a one where a group has no row: its reports count where all have one. (To leave it to the
#: tool uninstrumented ends in a hardware exception.)
OF_GROUPS = "layer_norm_backward_rows"
#: initcheck has to see what the kernels of others write. It reports each thread that reads what nothing wrote.
OPTIONS = {"initcheck": ("--print-limit", "20000")}
SHOWN = 20


# ---- what this machine has -------------------------------------------------------------------------------------------


def find_sanitizer() -> str:
    """compute-sanitizer of the CUDA toolkit, or of the package nvidia-cuda-sanitizer-api.

    Raises:
        BuildError: there is none.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [f"{home}/bin" for home in homes] + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    packages = [Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages(), *sys.path)]
    folders += [str(path) for package in packages for path in package.glob("nvidia/cu*/bin")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None:
        raise BuildError(
            "no compute-sanitizer: it is not in $CUDA_HOME/bin, on PATH or in /usr/local/cuda/bin. It is part of the "
            "CUDA toolkit; without that, pip install nvidia-cuda-sanitizer-api for the CUDA of your torch"
        )
    return found


def build_allocator(folder: Path) -> Path:
    """Compiles the allocator that gives each tensor an allocation of its own.

    Raises:
        BuildError: it does not compile.
    """
    source, library = Path(__file__).with_name("allocator.cu"), folder / "allocator.so"
    command = [find_nvcc(), "-shared", "-O1", "-Xcompiler", "-fPIC", "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"exit status {done.returncode} from\n{' '.join(command)}\n{done.stdout}{done.stderr}")
    return library


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A process that runs a part of the cases: under a tool, or under the profiler where ``tool`` is None."""

    tool: str | None
    part: str
    command: list[str]
    log: Path
    seconds: float = 0.0
    #: What went wrong besides the reports; None where nothing did.
    problem: str | None = None

    def run(self, limit: float, environment: dict[str, str]) -> None:
        started = time.monotonic()
        with self.log.open("w") as log:
            process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env=environment | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            try:
                status = process.wait(limit)
                self.problem = f"exit status {status}" if status else None
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the tool, and the process that it watches
                process.wait()
                self.problem = f"stopped after {limit:.0f} s"
        self.seconds = time.monotonic() - started

    def tail(self) -> str:
        """The end of the log, for a process that failed."""
        return "".join(f"    {line}\n" for line in self.log.read_text(errors="replace").splitlines()[-15:])


def sanitizer_command(sanitizer: str, tool: str, port: int, allocator: Path, checks_groups: bool = False) -> list[str]:
    """compute-sanitizer and its options, in front of the worker that it watches. ``checks_groups`` says whether
    racecheck looks at :data:`OF_GROUPS`."""
    command = [
        sanitizer, "--tool", tool, "--target-processes", "application-only", "--launch-timeout", "120",
        "--ignore-getprocaddress-notfound",
        "--destroy-on-device-error", "kernel", "--show-backtrace", "no", "--port", str(port), "--max-connections",
        "100",
    ]  # fmt: skip
    if tool != "initcheck":
        command += [word for pattern in MANGLED for word in ("--kernel-name", f"regex={pattern}")]
    worker = [sys.executable, "-m", "tests.sanitizer.worker"]
    if tool in OF_TENSORS:
        worker += ["--allocator", str(allocator)]
    if tool in NOT_OF_16_BIT_PRODUCTS:
        worker += ["--no-16-bit-products"]
    return [*command, *OPTIONS.get(tool, ()), *worker]


# ---- reports ---------------------------------------------------------------------------------------------------------


@dataclass
class Reports:
    """What a tool said: (what, kernel) and how often, of kernels of fastlayers and of others."""

    ours: Counter[tuple[str, str]] = field(default_factory=Counter)
    others: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: The tool's own count, -1 where it did not get so far.
    total: int = -1


#: Lines of the tool that are no report.
_REMARK = re.compile(
    r"COMPUTE-SANITIZER|(?:ERROR|RACECHECK|LEAK) SUMMARY|Target application|Error: process didn't|No attachable|"
    r"Report|The application|Process|Use --print-limit|.* were not printed"
)
_TOTAL = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_KERNEL = re.compile(r"\bat (.+?)(?:\+0x[0-9a-f]+|$)")


def read_reports(log: str, misjudged: str = "") -> Reports:
    """Sorts the reports of a log by what they say and by the kernel that they name. Those of a kernel that the tool has
    ``misjudged`` are as those of others.

    A report begins with a line that has one space after the prefix, and goes on with lines that are indented further.
    """
    reports = Reports()
    what, kernel, place, replicated = "", "", "", False

    def note() -> None:
        if what:
            # What names no kernel is a call of CUDA: of the worker, or of torch.
            false = replicated or (misjudged and misjudged in kernel)
            kept = reports.ours if (not kernel or is_ours(kernel)) and not false else reports.others
            kept[what, kernel.split("(")[0] if "(anonymous" not in kernel else kernel[:120]] += 1

    for line in log.splitlines():
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if found := _TOTAL.search(text):
            reports.total = int(found[1])
        if text.startswith("  ") and what:
            if not kernel and (found := _KERNEL.search(text)):
                kernel = found[1].strip()
            # Threads to which Triton gives the same element write the same value, by one instruction.
            replicated = bool(place) and text.strip().startswith(f"and Write access at {place}")
        else:
            note()
            text = text.strip()
            what, kernel, place, replicated = "" if not text or _REMARK.match(text) else text, "", "", False
            if what and " at " in what and (found := _KERNEL.search(what)):  # racecheck has both in one line
                kernel = found[1].strip()
                what, place = what.split(" at ", 1)
                place = place if what.endswith("Write access") and ".py:" in place else ""
    note()
    return reports


def show(reports: Counter[tuple[str, str]]) -> None:
    for (what, kernel), count in reports.most_common(SHOWN):
        print(f"    {count} x {what}: {kernel or 'a call of CUDA'}")
    if len(reports) > SHOWN:
        print(f"    and {len(reports) - SHOWN} other kinds")


# ---- the command -----------------------------------------------------------------------------------------------------


def missing_kernels(launched: dict[str, set[str]], rows: list[str]) -> list[str]:
    """Kernels that were not launched: of all, or of those that csrc has for the chosen rows."""
    every = set().union(*launched.values())
    if not rows:
        return sorted((cuda_kernels() | triton_kernels()) - every)
    return sorted({kernel for row in rows for kernel in CLAIMED.get(row, ())} - every)


def unclaimed(launched: dict[str, set[str]]) -> list[str]:
    """Rows that do not launch what ``CLAIMED`` says of them."""
    return [
        f"{row}: {', '.join(sorted(set(names) - launched[row]))}"
        for row, names in CLAIMED.items()
        if row in launched and not set(names) <= launched[row]
    ]


def record(parts: list[Part], options: argparse.Namespace, folder: Path) -> bool:
    """Runs the cases under the profiler, and says whether no kernel is left out."""
    launched: dict[str, set[str]] = {}
    for i in range(1, len(parts) + 1):
        file = folder / f"launched-{i}.json"
        for row, names in (json.loads(file.read_text()) if file.exists() else {}).items():
            launched.setdefault(row, set()).update(names)
    left_out = missing_kernels(launched, options.ops)
    if options.list:
        for row, names in launched.items():
            print(f"{row}: {' '.join(sorted(names))}")
    failed = [part for part in parts if part.problem]
    seconds = max(part.seconds for part in parts)
    count = len(set().union(*launched.values()))
    print(f"without a tool: {count} kernels launched, {len(left_out)} left out, {seconds:.0f} s")
    for name in left_out:
        print(f"    never launched: {name}")
    for line in unclaimed(launched):
        print(f"    not launched by the row that claims it: {line}")
    for part in failed:
        print(f"    part {part.part}: {part.problem}; {part.log}\n{part.tail()}", end="")
    return not left_out and not failed


def judge(tool: str, parts: list[Part]) -> bool:
    """Prints the row of a tool, and says whether it reports nothing of fastlayers."""
    reports = [
        read_reports(
            part.log.read_text(errors="replace"),
            OF_GROUPS if part.tool == "racecheck" and part.part != WHOLE_BLOCKS else "",
        )
        for part in parts
    ]
    ours, others = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in reports:
        ours.update(each.ours)
        others.update(each.others)
    problems = [
        (part, part.problem or "it ended without a summary" if found.total < 0 else part.problem)
        for part, found in zip(parts, reports, strict=True)
        if part.problem or found.total < 0 or found.total > sum(found.ours.values()) + sum(found.others.values())
    ]
    print(
        f"{tool:<12}{sum(ours.values()):>8}{sum(others.values()):>18}{len(problems):>17}"
        f"{max(part.seconds for part in parts):>9.0f}"
    )
    show(ours)
    for part, problem in problems:
        print(f"    part {part.part}: {problem or 'more reports than it printed'}; {part.log}\n{part.tail()}", end="")
    return not ours and not problems


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.sanitizer", description=__doc__)
    parser.add_argument("--tools", type=names, default=list(TOOLS), help=f"some of {','.join(TOOLS)}")
    parser.add_argument("--ops", type=names, default=[], help="rows of tests/table, and 'more'; default: all")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--parts", type=int, default=2, help="processes among which a tool's cases are shared")
    parser.add_argument("--limit", type=float, default=480, help="seconds after which a process is stopped")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/sanitizer", help="folder of the logs")
    parser.add_argument("--list", action="store_true", help="only print the kernels that each row launches")
    parser.add_argument("--no-record", action="store_true", help="do not run the cases under the profiler first")
    options = parser.parse_args(arguments)
    if unknown := [tool for tool in options.tools if tool not in TOOLS]:
        parser.error(f"no tool is called {', '.join(unknown)}; expected some of {', '.join(TOOLS)}")
    try:
        cases(options.ops)
    except ValueError as error:
        parser.error(str(error))
    if options.jobs < 1 or options.parts < 1:
        parser.error("expected one job and one part or more")
    return options


def main() -> int:
    options = parsed()
    folder = options.logs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        sanitizer, allocator = ("", folder) if options.list else (find_sanitizer(), build_allocator(folder))
    except BuildError as error:
        print(error)
        return 1
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    of_rows = ["--ops", ",".join(options.ops)] if options.ops else []

    def run(parts: list[Part]) -> None:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda part: part.run(options.limit, environment), parts))

    well = True
    if options.list or not options.no_record:
        profiled = []
        for i in range(1, options.jobs + 1):
            written = folder / f"launched-{i}.json"
            written.unlink(missing_ok=True)
            command = [sys.executable, "-m", "tests.sanitizer.worker", *of_rows, "--record", str(written)]
            part = f"{i}/{options.jobs}"
            profiled.append(Part(None, part, [*command, "--part", part], folder / f"launched-{i}.log"))
        run(profiled)
        well = record(profiled, options, folder)
    if options.list:
        return not well
    watched = [
        Part(
            tool,
            f"{i}/{options.parts}",
            [
                *sanitizer_command(sanitizer, tool, 49152 + 200 * (TOOLS.index(tool) * options.parts + i), allocator),
                *of_rows, "--part", f"{i}/{options.parts}",
            ],
            folder / f"{tool}-{i}.log",
        )
        for i in range(1, options.parts + 1)
        for tool in options.tools
    ]  # fmt: skip
    if "racecheck" in options.tools and (not options.ops or WHOLE_BLOCKS in options.ops):
        port = 49152 + 200 * len(TOOLS) * (options.parts + 1)
        command = [*sanitizer_command(sanitizer, "racecheck", port, allocator), "--ops", WHOLE_BLOCKS]
        watched.append(Part("racecheck", WHOLE_BLOCKS, command, folder / "racecheck-whole-blocks.log"))
    run(watched)
    print("tool         reports  of other kernels  parts that fail  seconds")
    judged = [judge(tool, [part for part in watched if part.tool == tool]) for tool in options.tools]
    return not (well and all(judged))


if __name__ == "__main__":
    sys.exit(main())
