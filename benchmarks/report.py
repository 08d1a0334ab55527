"""Tables of a result file, for the terminal and for Markdown. They have every row, also those that lose.

A line of a table is one case and one metric, with a cell for each contestant. The verdict is about ``fastlayers``, the
default choice of backend: whether it reaches its bar, and whether eager, torch.compile or, in GPU time, Liger is
faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.implementations import GPU_RIVALS, RIVALS, TITLES
from fastlayers.tables import Table

#: Two times within this factor count as equal: the same kernel differs by about that much from run to run.
NOISE = 1.03

#: The titles of the first columns.
HEADS = ("case", "dtype", "what")

Row = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """One number of a row. ``bar`` is the name of its bar in the case, ``limits`` says how the bar limits it."""

    title: str
    value: Callable[[Row], float | None]
    unit: str
    bar: str
    limits: str = "ratio"  # smallest "fraction" of the copy bandwidth; largest "ratio" to eager; largest "value"
    fraction: Callable[[Row], float | None] = lambda row: None


def direction(name: str) -> Metric:
    def value(row: Row) -> float | None:
        return row[name]["us"] if name in row else None

    def fraction(row: Row) -> float | None:
        return row[name].get("fraction") if name in row else None

    return Metric(name, value, "us", name, "fraction", fraction)


def plain(title: str, key: str, unit: str, bar: str = "") -> Metric:
    return Metric(title, lambda row: row.get(key), unit, bar)


def mebibytes(key: str) -> Callable[[Row], float | None]:
    return lambda row: row[key] / 2**20 if row.get(key) else None


STEP = Metric("forward + backward", lambda row: row["step"]["us"] if "step" in row else None, "us", "step")
DEVICE_METRICS = (direction("forward"), direction("backward"), STEP)
HOST_METRICS = (
    plain("host, forward", "host_forward_us", "us", "host_forward"),
    plain("host, forward + backward", "host_training_us", "us", "host_training"),
    plain("wall, forward", "wall_forward_us", "us"),
    plain("wall, forward + backward", "wall_training_us", "us"),
    Metric("peak memory", mebibytes("peak_bytes"), "MiB", ""),
    Metric("peak memory beyond the gradients", mebibytes("beyond_bytes"), "MiB", "beyond", "value"),
)


@dataclass(frozen=True)
class Line:
    """One line of a table; ``cells`` has a text for each contestant."""

    labels: tuple[str, ...]
    cells: dict[str, str]
    verdicts: tuple[tuple[str, str], ...]  # (text, "good" | "bad" | "note")

    @property
    def loses(self) -> bool:
        return any(kind == "bad" for _, kind in self.verdicts)


def by_case(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """The contestants of each case, by name."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["implementation"]] = row
    return list(found.values())


def lines(rows: Iterable[Row], metrics: Iterable[Metric]) -> list[Line]:
    metrics = tuple(metrics)
    return [
        line(contestants, metric)
        for contestants in by_case(rows)
        for metric in metrics
        if any(metric.value(row) is not None for row in contestants.values())
    ]


def line(contestants: dict[str, Row], metric: Metric) -> Line:
    first = next(iter(contestants.values()))
    spelled = first["bytes"].get(metric.title)
    counted = f" ({spelled})" if spelled else f", {metric.unit}"
    labels = (f"{first['op']} {first['title']}", first["dtype"], metric.title + counted)
    cells = {name: cell(row, metric) for name, row in contestants.items()}
    return Line(labels, cells, tuple(verdicts(contestants, metric)))


def cell(row: Row, metric: Metric) -> str:
    value = metric.value(row)
    if value is None:
        return "FAILED" if row["status"] == "failed" else "-"
    fraction = metric.fraction(row)
    return number(value) if fraction is None else f"{number(value)} ({fraction:.2f})"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def verdicts(contestants: dict[str, Row], metric: Metric) -> Iterable[tuple[str, str]]:
    for name, row in contestants.items():
        if row["status"] == "failed":
            yield f"{TITLES[name]} failed", "bad"
    ours = contestants.get("fastlayers")
    mine = metric.value(ours) if ours else None
    if ours is None or mine is None:
        return
    against = GPU_RIVALS if metric in DEVICE_METRICS else RIVALS
    times = {name: metric.value(contestants[name]) for name in against if name in contestants}
    rivals = {name: value for name, value in times.items() if value is not None}
    yield from bar_verdicts(ours, metric, mine, rivals.get("eager"))
    yield from rival_verdicts(ours, metric, mine, contestants)
    if rivals:
        best = min(rivals, key=lambda name: rivals[name])
        if mine > rivals[best] * NOISE:
            yield f"loses to {TITLES[best]} by {mine / rivals[best]:.2f}x", "bad"
    if ours.get(metric.title, {}).get("torch_kernels"):
        yield "runs torch's kernel", "note"


def bar_verdicts(ours: Row, metric: Metric, mine: float, eager: float | None) -> Iterable[tuple[str, str]]:
    bars = ours["bars"]
    fraction = metric.fraction(ours)
    if metric.bar in bars and metric.limits == "fraction" and fraction is not None:
        met = fraction >= bars[metric.bar]
        yield f"bar {bars[metric.bar]:.2f} " + ("met" if met else f"MISSED at {fraction:.3f}"), "good" if met else "bad"
    named = {"fraction": f"{metric.title}_ratio", "ratio": metric.bar}
    ratio_bar = bars.get(named.get(metric.limits, ""))
    if ratio_bar is not None and eager:
        met = mine / eager <= ratio_bar
        text = f"bar {ratio_bar:.2f}x torch, is {mine / eager:.2f}x"
        yield f"{text} met" if met else f"{text} MISSED", "good" if met else "bad"


def rival_verdicts(ours: Row, metric: Metric, mine: float, contestants: dict[str, Row]) -> Iterable[tuple[str, str]]:
    """The verdicts of bars that name a contestant, and of bars on the value itself."""
    limits = {name: (ours["bars"].get(f"{metric.bar}/{name}"), metric.value(row)) for name, row in contestants.items()}
    for name, (bar, theirs) in limits.items():
        if bar is not None and theirs:
            met = mine / theirs <= bar
            text = f"bar {bar:.2f}x {TITLES[name]}, is {mine / theirs:.2f}x"
            yield f"{text} met" if met else f"{text} MISSED", "good" if met else "bad"
    if metric.limits == "value" and metric.bar in ours["bars"]:
        bar = ours["bars"][metric.bar]
        text = f"bar {number(bar)} {metric.unit}"
        yield f"{text} met" if mine <= bar else f"{text} MISSED", "good" if mine <= bar else "bad"


def sections(results: dict[str, Any]) -> list[tuple[str, list[Line]]]:
    """Groups of lines with their titles, for the terminal and for Markdown."""
    found = []
    for device, copy in results["copy_gbps"].items():
        rows = [row for row in results["rows"] if row["device"] == device]
        unit = f"{results['clock'][device]}; us, and fraction of the copy bandwidth of {copy:.0f} GB/s"
        for suite in dict.fromkeys(row["suite"] for row in rows):
            found.append((f"{suite}: {unit}", lines((r for r in rows if r["suite"] == suite), DEVICE_METRICS)))
        found.append(("What an eager user waits for, and holds in memory", lines(rows, HOST_METRICS)))
    found.append(("What a process pays once", [startup_line(entry) for entry in results.get("startup", ())]))
    return [(title, content) for title, content in found if content]


def startup_line(entry: dict[str, Any]) -> Line:
    labels, bar, took = (entry["what"], "", "s"), entry["bar"], entry["seconds"]
    if took is None:
        return Line(labels, {"fastlayers": "FAILED"}, ((entry["reason"], "bad"),))
    verdict = (f"bar {bar} s met", "good") if bar is None or took <= bar else (f"bar {bar} s MISSED", "bad")
    return Line(labels, {"fastlayers": f"{took:.3f}"}, () if bar is None else (verdict,))


def columns(content: list[Line], titles: Mapping[str, str]) -> list[str]:
    return [name for name in titles if any(name in line.cells for line in content)]


def summary(results: dict[str, Any]) -> str:
    every = [line for _, content in sections(results) for line in content]
    marks = [text for line in every for text, _ in line.verdicts]
    met = sum(text.startswith("bar") and text.endswith(" met") for text in marks)
    missed = sum("MISSED" in text for text in marks)
    losing = sum("loses to" in text for text in marks)
    failed = sum(row["status"] == "failed" for row in results["rows"])
    skipped = f", {len(results['skipped'])} cases not run" if results["skipped"] else ""
    lose = f"{losing} lines lose to torch, torch.compile or Liger"
    return f"{met} bars met, {missed} missed; {lose}; {failed} failures{skipped}"


def caption(results: dict[str, Any]) -> str:
    env = results["environment"]
    parts = [env["device"], f"driver {env['driver']}" if env["driver"] else "", f"torch {env['torch']}"]
    parts += [
        f"Triton {env['triton']}" if env["triton"] else "",
        f"commit {env['commit']}" if env["commit"] else "",
        env["date"][:10],
    ]
    return ", ".join(part for part in parts if part)


def print_tables(results: dict[str, Any], console: Console) -> None:
    for title, content in sections(results):
        print_table(title, content, console)
    console.print(caption(results), style="dim")
    console.print(summary(results), style="bold")


def print_table(
    title: str,
    content: list[Line],
    console: Console,
    heads: tuple[str, ...] = HEADS,
    titles: Mapping[str, str] = TITLES,
) -> None:
    shown = columns(content, titles)
    numbers = [titles[name] for name in shown]
    judged = any(line.verdicts for line in content)
    rows = []
    for line in content:
        verdict = "; ".join(text for text, _ in line.verdicts)
        cells = (line.cells.get(name, "") for name in shown)
        rows.append([*line.labels, *cells, *([verdict] if judged else [])])
    header = [*heads, *numbers, *(["verdict"] if judged else [])]
    styles = ["red" if line.loses else "" for line in content]
    console.print(Table(header, rows, title, right=numbers, style="bold", styles=styles), "")


def markdown(results: dict[str, Any]) -> str:
    blocks = [f"### {title}\n\n{markdown_table(content)}" for title, content in sections(results)]
    return "\n\n".join([*blocks, f"{caption(results)}. {summary(results)}."]) + "\n"


def markdown_table(content: list[Line], heads: tuple[str, ...] = HEADS, titles: Mapping[str, str] = TITLES) -> str:
    shown = columns(content, titles)
    judged = any(line.verdicts for line in content)
    names = [*heads, *(titles[name] for name in shown), *(["verdict"] if judged else [])]
    block = ["| " + " | ".join(names) + " |", "|" + "---|" * len(heads) + "---:|" * len(shown) + "---|" * judged]
    for line in content:
        verdict = "; ".join(f"**{text}**" if kind == "bad" else text for text, kind in line.verdicts)
        cells = (line.cells.get(name, "") for name in shown)
        block.append("| " + " | ".join([*line.labels, *cells, *([verdict] if judged else [])]) + " |")
    return "\n".join(block)


def page(results: dict[str, Any]) -> str:
    """For benchmarks/results/README.md: the rows that lose, and all rows folded."""
    found = sections(results)
    losing = [line for _, content in found for line in content if line.loses]
    blocks = [f"{caption(results)}: {summary(results)}."]
    if losing:
        blocks += ["Where fastlayers misses its bar, or torch or torch.compile is faster:", markdown_table(losing)]
    for title, content in found:
        heading, _, rest = title.partition(": ")
        opened = f"{heading}, {len(content)} rows{f': {rest}' if rest else ''}"
        blocks.append(folded_away(opened, markdown_table(content)))
    return "\n\n".join(blocks) + "\n"


#: Columns of the overview: the median fraction of the copy bandwidth, and the geometric mean of the time of a call as a
#: share of another contestant's time.
FRACTION = "fraction"
SHARES = {FRACTION: "of a copy's bandwidth"} | {name: f"of {TITLES[name]}'s time" for name in GPU_RIVALS}


def overview(results: dict[str, Any]) -> str:
    """For docs/benchmarks.md: one line for each family of ops and direction."""
    rows = [row for row in results["rows"] if row["suite"] != "sweep" and row["status"] == "ok"]
    families: dict[str, list[dict[str, Row]]] = {}
    for case in by_case(rows):
        if "fastlayers" in case:
            families.setdefault(case["fastlayers"]["family"], []).append(case)
    content = []
    for family, cases in families.items():
        for metric in DEVICE_METRICS:
            measured = [case for case in cases if metric.value(case["fastlayers"]) is not None]
            if measured:
                content.append(Line((family, metric.title, str(len(measured))), dict(shares(measured, metric)), ()))
    table = markdown_table(content, ("family", "what", "cases"), SHARES)
    return f"{caption(results)}: {summary(results)}.\n\n{table}\n"


def shares(cases: list[dict[str, Row]], metric: Metric) -> Iterable[tuple[str, str]]:
    """Cells of the overview for cases that have a value for fastlayers."""
    fractions = [metric.fraction(case["fastlayers"]) for case in cases]
    known = [fraction for fraction in fractions if fraction is not None]
    if known:
        yield FRACTION, f"{statistics.median(known):.2f}"
    for name in GPU_RIVALS:
        pairs = [(metric.value(case["fastlayers"]), metric.value(case[name])) for case in cases if name in case]
        ratios = [mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None]
        if ratios:
            yield name, f"{statistics.geometric_mean(ratios):.2f}"


#: The functions that write the text between the lines <!-- NAME:begin --> and <!-- NAME:end --> of a page.
PAGES = {"results": page, "overview": overview}


def folded_away(summary_line: str, block: str) -> str:
    """A block that a page shows after a click on its summary."""
    return f"<details><summary>{summary_line}</summary>\n\n{block}\n\n</details>"


def put_into(text: str, results: dict[str, Any], pages: Mapping[str, Callable[[dict[str, Any]], str]] = PAGES) -> str:
    """Replace the text between markers.

    Raises:
        ValueError: ``text`` has no begin marker with an end marker after it.
    """
    written = False
    for name, content in pages.items():
        before, begin, rest = text.partition(f"<!-- {name}:begin -->")
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if begin and end:
            text = f"{before}{begin}\n{content(results)}{end}{after}"
            written = True
    if not written:
        expected = ", or ".join(f"a line <!-- {name}:begin --> and after it <!-- {name}:end -->" for name in pages)
        raise ValueError(f"expected {expected}")
    return text
