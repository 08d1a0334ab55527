"""Tables of whole models: every row, the rows that lose, and which bars are met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.model_worker import FUSED, OTHER, PATTERNS
from benchmarks.networks import MODES
from benchmarks.report import Line, caption, folded_away, markdown_table, number, print_table

#: Two numbers whose ratio is below this count as equal.
NOISE = 1.01
#: Largest distance of a loss from eager's, as a share of the first loss: bfloat16 has eight bits, and ten steps of
#: AdamW amplify a rounding. If it is larger, twice the distance between two runs of eager with other dropouts and with
#: weights that differ by a rounding counts instead.
LOSS_TOLERANCE = 0.01
#: Largest relative distance between outputs of inference, with all layers in bfloat16.
OUTPUT_TOLERANCE = 0.05
HEADS = ("model", "what")
LOSSES = "losses, distance from torch's"  # of torch itself: between two runs with other roundings and dropouts
KINDS = (*(name for name in PATTERNS if name not in ("compiled by torch", "copies")), FUSED, "compiled by torch", OTHER)
KIND_TITLES = {name: name for name in (*KINDS, "copies", "idle", "kernels")}

Row = dict[str, Any]
Rows = dict[str, Row]  # of one model, by mode


@dataclass(frozen=True)
class Metric:
    """One number of a row. Less is better."""

    title: str
    value: Callable[[Row], float | None]
    noise: float = NOISE

    def of(self, rows: Rows, mode: str) -> float | None:
        return self.value(rows[mode]) if mode in rows and rows[mode]["status"] == "ok" else None

    def ratio(self, rows: Rows, ours: str, *rivals: str) -> tuple[float, str] | None:
        """Our number divided by that of the best rival, and its mode; None if one of the numbers is missing."""
        mine, theirs = self.of(rows, ours), {name: self.of(rows, name) for name in rivals}
        known = {name: value for name, value in theirs.items() if value}
        if mine is None or not known:
            return None
        best = min(known, key=lambda name: known[name])
        return mine / known[best], best


def milliseconds(part: str) -> Callable[[Row], float | None]:
    return lambda row: row[part]["ms"]


def gibibytes(part: str) -> Callable[[Row], float | None]:
    return lambda row: row[part]["peak_bytes"] / 2**30 if "peak_bytes" in row[part] else None


STEP = Metric("training step, ms", milliseconds("training"))
STEP_PEAK = Metric("training, peak GiB", gibibytes("training"))
INFERENCE = Metric("inference, ms", milliseconds("inference"))
INFERENCE_PEAK = Metric("inference, peak GiB", gibibytes("inference"))
METRICS = (STEP, STEP_PEAK, INFERENCE, INFERENCE_PEAK)


def by_model(results: dict[str, Any]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in results["rows"]:
        found.setdefault(row["model"], {})[row["mode"]] = row
    return found


# -- verdicts ---------------------------------------------------------------------------------------------------------


def lines(results: dict[str, Any]) -> list[Line]:
    return [line for rows in by_model(results).values() for line in lines_of(rows)]


def lines_of(rows: Rows) -> Iterator[Line]:
    first = next(iter(rows.values()))
    name = f"{first['title']} ({first['what']})"
    for metric in METRICS:
        if any(metric.of(rows, mode) is not None for mode in rows) or metric is STEP:
            cells = {mode: cell(row, metric.of(rows, mode)) for mode, row in rows.items()}
            failures = failed(rows) if metric is STEP else ()
            yield Line((name, metric.title), cells, (*failures, *verdicts(rows, metric)))
    apart = {mode: losses_apart(rows, mode) for mode in rows}
    wrong = tuple(disagreements(rows))
    if any(value is not None for value in apart.values()):
        cells = {mode: "" if value is None else f"{value:.1e}" for mode, value in apart.items()}
        yield Line((name, LOSSES), cells, wrong)


def cell(row: Row, value: float | None) -> str:
    if value is None:
        return "FAILED" if row["status"] == "failed" else "-"
    return number(value) if value >= 10 else f"{value:.2f}"


def failed(rows: Rows) -> Iterator[tuple[str, str]]:
    for mode, row in rows.items():
        if row["status"] == "failed":
            yield f"{MODES[mode]} failed: {row['reason'].partition(chr(10))[0][:120]}", "bad"


def verdicts(rows: Rows, metric: Metric) -> Iterator[tuple[str, str]]:
    """Compare ours with the better of torch and torch.compile, with Liger, and compiled with torch.compile."""
    against = (("", "fastlayers", ("eager", "compile")), ("", "fastlayers", ("liger",)))
    for label, ours, rivals in (*against, ("compiled ", "fastlayers_compile", ("compile",))):
        found = metric.ratio(rows, ours, *rivals)
        if found is not None:
            ratio, best = found
            loses = ratio > metric.noise
            yield f"{label}{ratio:.2f}x {MODES[best]}" + (", loses" if loses else ""), "bad" if loses else "good"


def losses_apart(rows: Rows, mode: str) -> float | None:
    """The largest distance of the losses from eager's; for eager, from those of its second run."""
    if any(name not in rows or rows[name]["status"] != "ok" for name in (mode, "eager")):
        return None
    expected = rows["eager"]["training"]["losses"]
    return distance(rows[mode]["training"]["losses_apart" if mode == "eager" else "losses"], expected)


def distance(losses: list[float], expected: list[float]) -> float:
    """The largest distance as a share of the first loss, because later losses may be close to zero; NaN if one is."""
    found = [abs(a - b) / abs(expected[0]) for a, b in zip(losses, expected, strict=True)]
    return math.nan if any(math.isnan(value) for value in found) else max(found)


def outputs_apart(rows: Rows, mode: str) -> float:
    ours, expected = rows[mode]["inference"]["outputs"], rows["eager"]["inference"]["outputs"]
    return math.dist(ours, expected) / (math.hypot(*expected) or math.nan)


def disagreements(rows: Rows) -> Iterator[tuple[str, str]]:
    """The modes that do not compute what eager computes. Their times mean nothing."""
    own = losses_apart(rows, "eager")
    if own is None:
        return
    allowed = max(LOSS_TOLERANCE, 2 * own)
    for mode in rows:
        apart = losses_apart(rows, mode)
        if mode == "eager" or apart is None:
            continue
        if not apart <= allowed:  # also if it is NaN
            yield f"{MODES[mode]}: losses {apart:.1e} from torch's; expected {allowed:.0e}", "bad"
        far = outputs_apart(rows, mode)
        if not far <= OUTPUT_TOLERANCE:
            yield f"{MODES[mode]}: outputs {far:.1e} from torch's; expected {OUTPUT_TOLERANCE:.0e}", "bad"


# -- bars -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A ratio to reach on at least ``least`` models; by default on all that have the numbers."""

    text: str
    metric: Metric
    ours: str
    rivals: tuple[str, ...]
    limit: float
    least: int | None = None

    def judge(self, results: dict[str, Any]) -> str | None:
        """The verdict; None if no model has all the numbers."""
        whole = [
            rows
            for rows in by_model(results).values()
            if all(self.metric.of(rows, mode) is not None for mode in (self.ours, *self.rivals))
        ]
        pairs = (self.metric.ratio(rows, self.ours, *self.rivals) for rows in whole)
        ratios = [found[0] for found in pairs if found is not None]
        if not ratios:
            return None
        hold, least = sum(ratio <= self.limit for ratio in ratios), self.least or len(ratios)
        return f"{self.text}: {hold} of {len(ratios)}, bar {least} " + ("met" if hold >= least else "MISSED")


STOCK = ("eager", "compile")
BARS = (
    Bar("training step no slower than the better of torch and torch.compile", STEP, "fastlayers", STOCK, NOISE),
    Bar("at most 0.90x of it", STEP, "fastlayers", STOCK, 0.90, 4),
    Bar("peak memory of a training step no more than the lower of theirs", STEP_PEAK, "fastlayers", STOCK, NOISE),
    Bar("training step at most 0.90x of Liger's", STEP, "fastlayers", ("liger",), 0.90),
    Bar("no more peak memory than Liger", STEP_PEAK, "fastlayers", ("liger",), NOISE),
    Bar("compiled, a training step no slower than torch.compile's", STEP, "fastlayers_compile", ("compile",), NOISE),
    Bar("compiled, at most 0.95x of torch.compile's", STEP, "fastlayers_compile", ("compile",), 0.95, 4),
    Bar("inference no slower than torch.compile's", INFERENCE, "fastlayers", ("compile",), NOISE, 4),
)


def judged(results: dict[str, Any]) -> list[str]:
    bars = () if results["settings"]["tiny"] else BARS
    found = [text for text in (bar.judge(results) for bar in bars) if text is not None]
    wrong = [line.labels[0] for line in lines(results) if line.labels[1] == LOSSES and line.loses]
    found.append("losses and outputs agree with torch's: " + (f"MISSED by {', '.join(wrong)}" if wrong else "met"))
    if results["skipped"]:
        found.append(f"{len(results['skipped'])} not run: {', '.join(results['skipped'])}")
    return found


# -- where GPU time goes ----------------------------------------------------------------------------------------------


def kind_lines(results: dict[str, Any], part: str = "training") -> list[Line]:
    """GPU time of a step by kind of kernel, and the time in which the GPU is idle."""
    found = []
    for row in results["rows"]:
        if row["status"] == "ok" and "kinds" in row[part]:
            cells = {name: f"{ms:.1f}" for name, ms in row[part]["kinds"].items() if ms}
            cells |= {"idle": f"{idle_ms(row[part]):.1f}", "kernels": str(row[part]["kernels"])}
            found.append(Line((row["title"], MODES[row["mode"]]), cells, ()))
    return found


def idle_ms(part: Row) -> float:
    return max(0.0, part["ms"] - part["gpu_ms"])


# -- renderings -------------------------------------------------------------------------------------------------------


def print_tables(results: dict[str, Any], console: Console) -> None:
    print_table("Whole models", lines(results), console, HEADS, MODES)
    for part in ("training", "inference"):
        if content := kind_lines(results, part):
            print_table(f"GPU time by kind, {part}, ms", content, console, ("model", "mode"), KIND_TITLES)
    console.print(caption(results), style="dim")
    for text in judged(results):
        console.print(text, style="bold red" if "MISSED" in text or "not run" in text else "bold", markup=False)


def markdown(results: dict[str, Any]) -> str:
    blocks = [f"### Whole models\n\n{markdown_table(lines(results), HEADS, MODES)}"]
    blocks += [f"### GPU time by kind, {part}, ms\n\n{table}" for part, table in kind_tables(results)]
    return "\n\n".join([*blocks, bars_block(results)]) + "\n"


def kind_tables(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for part in ("training", "inference"):
        if content := kind_lines(results, part):
            yield part, markdown_table(content, ("model", "mode"), KIND_TITLES)


def bars_block(results: dict[str, Any]) -> str:
    bars = (f"- **{text}**" if "MISSED" in text else f"- {text}" for text in judged(results))
    return "\n".join([f"{caption(results)}:", "", *bars])


def steps(results: dict[str, Any]) -> str:
    """For the README: one row for each model, with time and peak memory of its training step."""
    shown = [name for name in MODES if name != "liger"]
    content = []
    for rows in by_model(results).values():
        pairs = {mode: (STEP.of(rows, mode), STEP_PEAK.of(rows, mode)) for mode in shown}
        cells = {
            mode: f"{cell(rows[mode], ms)} ms, {cell(rows[mode], peak)} GiB" for mode, (ms, peak) in pairs.items() if ms
        }
        first = next(iter(rows.values()))
        content.append(Line((f"{first['title']} ({first['what']})",), cells, ()))
    return f"{markdown_table(content, ('training step, peak memory',), MODES)}\n\n{caption(results)}.\n"


def page(results: dict[str, Any]) -> str:
    """For docs/benchmarks.md: the bars and the rows that lose, and all rows folded."""
    every = lines(results)
    losing = [line for line in every if line.loses]
    blocks = [bars_block(results)]
    if losing:
        blocks += ["Where it loses:", markdown_table(losing, HEADS, MODES)]
    blocks.append(folded_away("Every number", markdown_table(every, HEADS, MODES)))
    blocks += [folded_away(f"GPU time by kind, {part}, ms", table) for part, table in kind_tables(results)]
    return "\n\n".join(blocks) + "\n"


#: As :data:`benchmarks.report.PAGES`.
PAGES = {"models": page, "steps": steps}
