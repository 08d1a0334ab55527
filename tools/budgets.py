"""Compare the size of the project, and the time that it takes, with budgets.toml.

    python tools/budgets.py           # what can be counted at once: lines, words, the library that is here
    python tools/budgets.py --all     # and what has to be built and run: minutes

Exit status 1 where a budget is exceeded or a floor is not reached. The tests count their cases (tests/test_draw.py).
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fastlayers import build as builder  # noqa: E402

#: The architectures of the wheel, and the one for which the time of a build counts.
WHEEL, ONE = "80;86;89;90;100;120+PTX", "90"
IMPORTS = 7
#: Lines of a file, and of a function without its docstring, above which it is counted as too long.
FILE, FUNCTION = 600, 60
CONSOLE = Console(width=80)


@dataclass(frozen=True)
class Row:
    name: str
    budget: float
    measured: float

    @property
    def missed(self) -> bool:
        return self.measured < self.budget if self.name.startswith("floors.") else self.measured > self.budget


def _lines(folder: str, pattern: str) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in (ROOT / folder).rglob(pattern) if file.is_file())


def _words(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().split()) for file in files)


def _functions() -> Iterator[int]:
    """The lines of every function of fastlayers, without those of its docstring."""
    for file in (ROOT / "fastlayers").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = range(node.lineno, (node.end_lineno or 0) + 1)
                documented = range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
                yield len(lines) - (len(documented) if ast.get_docstring(node) is not None else 0)


def _megabytes(file: Path) -> float:
    return file.stat().st_size / 1e6


def counted() -> Iterator[tuple[str, float]]:
    """What a look at the files gives."""
    yield "lines.fastlayers", _lines("fastlayers", "*.py")
    yield "lines.csrc", _lines("csrc", "*.*")
    yield "lines.tests", _lines("tests", "*.py")
    yield "above.files", sum(len(file.read_text().splitlines()) > FILE for file in (ROOT / "fastlayers").rglob("*.py"))
    yield "above.functions", sum(lines > FUNCTION for lines in _functions())
    yield "words.readme", _words([ROOT / "README.md"])
    yield "words.docs", _words((ROOT / "docs").glob("*.md"))
    tests = [re.findall(r"^\s*def test_", file.read_text(), re.MULTILINE) for file in (ROOT / "tests").rglob("*.py")]
    yield "floors.test_functions", sum(map(len, tests))
    info = builder.BuildInfo.read(builder.LIBRARY)
    if info is not None and builder.LIBRARY.exists() and not any("virtual" in arch for arch in info.cuda_archs):
        yield ("library.cuda_mb" if info.cuda_archs else "library.cpu_mb"), _megabytes(builder.LIBRARY)


# What has to be built and run ----------------------------------------------------------------------------------------


def _cost(step: builder.Step) -> tuple[str, float]:
    """Runs a step of the build in a process that does nothing else. Returns its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    step.run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return step.output.name, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def built() -> Iterator[tuple[str, float]]:
    """Compiles everything for one architecture, in a folder of its own."""
    os.environ["FASTLAYERS_CUDA_ARCHS"] = ONE
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(builder.jobs()) as pool:
        steps, _ = builder.plan(Path(folder, "_C.so"), Path(folder))
        *compiles, link = steps
        costs = dict(pool.map(_cost, [*compiles, builder.regions_step(Path(folder))]))
        costs.update([_cost(link)])
        size = _megabytes(link.output)
    cuda = {name: seconds for name, seconds in costs.items() if name.endswith(".cu.o")}
    table = Table("file", "CPU s", box=None, header_style="bold")
    for name, seconds in sorted(costs.items(), key=lambda cost: -cost[1]):
        table.add_row(name, f"{seconds:.0f}")
    CONSOLE.print(table)
    yield "build.cuda_cpu_minutes", sum(cuda.values()) / 60
    yield "build.cpu_cpu_minutes", (sum(costs.values()) - sum(cuda.values())) / 60
    yield "build.slowest_file_seconds", max(costs.values())
    yield "library.cuda_mb", size


def _minutes(*command: str, **variables: str) -> float:
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | variables)
    return (time.monotonic() - began) / 60


def ran() -> Iterator[tuple[str, float]]:
    """Runs the two commands of the README on the build that is there, and imports the package."""
    yield "minutes.test", _minutes("make", "test")
    yield "minutes.demo", _minutes("make", "demo")
    code = (
        "import time; import torch; began = time.perf_counter(); import fastlayers; print(time.perf_counter() - began)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) for _ in range(IMPORTS)]
    yield "import.ms", 1000 * statistics.median(times)


def packed() -> Iterator[tuple[str, float]]:
    """Builds the wheel for all architectures."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ".")
        _minutes(*command, FASTLAYERS_BUILD_EXT="1", FASTLAYERS_CUDA_ARCHS=WHEEL)
        yield "library.wheel_mb", _megabytes(next(Path(folder).glob("*.whl")))


def rows_of(measured: Iterable[tuple[str, float]], budgets: dict[str, dict[str, float]]) -> Iterator[Row]:
    """Each figure beside its budget. A figure without one is a mistake of this file or of budgets.toml."""
    for name, value in measured:
        section, key = name.split(".")
        yield Row(name, budgets[section][key], value)


def table_of(rows: Iterable[Row]) -> Table:
    table = Table("", "budget", "measured", "of it", box=None, header_style="bold")
    for row in rows:
        figures = (f"{row.budget:,g}", f"{row.measured:,.4g}", f"{row.measured / row.budget:.0%}" if row.budget else "")
        table.add_row(row.name, *figures, style="red" if row.missed else None)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the size of the project, and its times, with budgets.toml.")
    parser.add_argument("--all", action="store_true", help="also what has to be built and run: half an hour")
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text())
    measures: list[Callable[[], Iterable[tuple[str, float]]]] = [counted]
    if parser.parse_args().all:
        measures += [built, ran, packed]
    rows: list[Row] = []
    for measure in measures:
        rows += rows_of(measure(), budgets)
    CONSOLE.print(table_of(rows))
    exceeded = [row.name for row in rows if row.missed]
    if exceeded:
        sys.exit(
            f"over the budget: {', '.join(exceeded)}. A number is raised with its reason in the commit, or not at all."
        )


if __name__ == "__main__":
    main()
