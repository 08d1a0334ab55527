"""Tables of whole models: every row, the rows that lose, and which bars are met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.model_worker import FUSED, OTHER, PATTERNS
from benchmarks.networks import MAIN, MODES
from benchmarks.report import Line, caption, folded_away, markdown_table, number, print_table

#: Two numbers whose ratio is below this count as equal.
NOISE = 1.01
#: Largest distance of a loss from eager's, as a share of the first loss: bfloat16 has eight bits, and ten steps of
#: AdamW amplify a rounding. If it is larger, twice the distance between two runs of eager with other dropouts and with
#: weights that differ by a rounding counts instead.
LOSS_TOLERANCE = 0.01
#: Largest relative distance of outputs of inference from eager's, with all layers in bfloat16. If it is larger, twice
#: the distance between two runs of eager with weights that differ by a rounding counts instead.
OUTPUT_TOLERANCE = 0.05
#: How many of the networks that miss a bar are named.
SHOWN = 6
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
    #: With whom fastlayers is compared, besides Liger.
    stock: tuple[str, ...] = ("eager", "compile")
    #: Its name among the numbers that were taken in turn with eager torch's.
    in_turn: str = ""

    def of(self, rows: Rows, mode: str) -> float | None:
        return self.value(rows[mode]) if mode in rows and rows[mode]["status"] == "ok" else None

    def of_rival(self, rows: Rows, ours: str, rival: str) -> float | None:
        """The number of a rival beside ours.

        Eager torch's is what ours, or fastlayers', was taken in turn with: times how many times ours it was.
        """
        for mode in (ours, "fastlayers") if rival == "eager" else ():
            pair, timed = rows.get(mode, {}).get("in_turn", {}).get(self.in_turn), self.of(rows, mode)
            if pair is not None and timed is not None:
                return timed * pair[0] / pair[1]
        return self.of(rows, rival)

    def ratio(self, rows: Rows, ours: str, *rivals: str) -> tuple[float, str] | None:
        """Our number divided by that of the best rival, and its mode; None if one of the numbers is missing."""
        mine, theirs = self.of(rows, ours), {name: self.of_rival(rows, ours, name) for name in rivals}
        known = {name: value for name, value in theirs.items() if value}
        if mine is None or not known:
            return None
        best = min(known, key=lambda name: known[name])
        return mine / known[best], best


def part_of(part: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(part, {}).get(name)


def gibibytes(part: str) -> Callable[[Row], float | None]:
    return lambda row: row[part]["peak_bytes"] / 2**30 if "peak_bytes" in row[part] else None


STEP = Metric("training step, ms", part_of("training", "ms"), in_turn="training")
STEP_PEAK = Metric("training, peak GiB", gibibytes("training"))
STEP_GPU = Metric("training step, GPU ms", part_of("training", "gpu_ms"))
INFERENCE = Metric("inference, ms", part_of("inference", "ms"), in_turn="inference")
INFERENCE_GPU = Metric("inference, GPU ms", part_of("inference", "gpu_ms"))
INFERENCE_PEAK = Metric("inference, peak GiB", gibibytes("inference"))
#: Only Python without torch.compile is compared: what is compiled is measured with the whole batch.
HOST = Metric("host, forward + backward, ms", part_of("training", "host_ms"), ("eager",), "host")
HOST_INFERENCE = Metric("host, inference, ms", part_of("inference", "host_ms"), ("eager",), "host_inference")
DECODE = Metric("next token, ms", part_of("decode", "ms"), in_turn="decode")
READY = Metric("first training steps, s", part_of("training", "ready_s"), ())
METRICS = (STEP, STEP_PEAK, INFERENCE, INFERENCE_PEAK, HOST, HOST_INFERENCE, DECODE, READY)


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
    """Compare ours with the best of stock torch, with Liger, and what is captured or compiled with torch.compile."""
    if not metric.stock:
        return
    compiled = ("compile", "reduce_overhead") if metric in (STEP, INFERENCE) else ()
    against = (("", "fastlayers", metric.stock), ("", "fastlayers", ("liger",)))
    for label, ours, rivals in (
        *against,
        ("graph ", "fastlayers_graph", compiled),
        ("compiled ", "fastlayers_compile", ("compile",)),
    ):
        found = metric.ratio(rows, ours, *rivals)
        if found is not None:
            ratio, best = found
            loses = ratio > NOISE
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
    expected = rows["eager"]["inference"]["outputs"]
    found = rows[mode]["inference"]
    ours = found.get("outputs_apart", expected) if mode == "eager" else found["outputs"]  # older files have none
    return math.dist(ours, expected) / (math.hypot(*expected) or math.nan)


def disagreements(rows: Rows) -> Iterator[tuple[str, str]]:
    """The modes that do not compute what eager computes. Their times mean nothing."""
    own = losses_apart(rows, "eager")
    if own is None:
        return
    allowed = max(LOSS_TOLERANCE, 2 * own)
    allowed_outputs = max(OUTPUT_TOLERANCE, 2 * outputs_apart(rows, "eager"))
    for mode in rows:
        apart = losses_apart(rows, mode)
        if mode == "eager" or apart is None:
            continue
        if not apart <= allowed:  # also if it is NaN
            yield f"{MODES[mode]}: losses {apart:.1e} from torch's; expected {allowed:.0e}", "bad"
        far = outputs_apart(rows, mode)
        if not far <= allowed_outputs:
            yield f"{MODES[mode]}: outputs {far:.1e} from torch's; expected {allowed_outputs:.0e}", "bad"


# -- bars -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """A number of one mode, divided by the best of its rivals' numbers.

    Args:
        rivals: without any, the number itself.
        against: which numbers of the rivals; by default the same.
    """

    metric: Metric
    ours: str
    rivals: tuple[str, ...] = ("eager",)
    against: Metric | None = None

    def of(self, rows: Rows) -> float | None:
        """None if one of the numbers is missing, infinite if ours failed. A rival that failed does not count."""
        if rows.get(self.ours, {}).get("status") == "failed":
            return math.inf
        mine = self.metric.of(rows, self.ours)
        if mine is None or not self.rivals:
            return mine
        numbers = {rival: (self.against or self.metric).of_rival(rows, self.ours, rival) for rival in self.rivals}
        if any(rival not in rows and number is None for rival, number in numbers.items()):
            return None
        known = [number for number in numbers.values() if number]
        return mine / min(known) if known else None


@dataclass(frozen=True)
class Bar:
    """A ratio to reach on all networks that have the numbers, or on a part of them.

    Args:
        least: how many networks of a number of them have to reach it.
        mean: the geometric mean is what has to reach it.
        main: it is about the networks of the README only.
    """

    text: str
    ratio: Ratio
    limit: float
    least: Callable[[int], int] = lambda count: count
    mean: bool = False
    main: bool = False

    def judge(self, results: dict[str, Any]) -> str | None:
        """The verdict; None if no network has all the numbers."""
        ratios = {}
        for name, rows in by_model(results).items():
            found = self.ratio.of(rows)
            if found is not None and (name in MAIN_NAMES or not self.main):
                ratios[next(iter(rows.values()))["title"]] = found
        if not ratios:
            return None
        if self.mean:
            mean = statistics.geometric_mean(ratios.values())
            return f"{self.text}: {mean:.2f} of {len(ratios)}, " + ("bar met" if mean <= self.limit else "bar MISSED")
        missed = {title: ratio for title, ratio in ratios.items() if not ratio <= self.limit}
        hold, least = len(ratios) - len(missed), self.least(len(ratios))
        verdict = f"{self.text}: {hold} of {len(ratios)}, bar {least}"
        if hold >= least:
            return f"{verdict} met"
        worst = sorted(missed.items(), key=lambda item: -item[1])
        more = f" and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
        return f"{verdict} MISSED: {', '.join(f'{title} {ratio:.2f}' for title, ratio in worst[:SHOWN])}{more}"


def but(spare: int) -> Callable[[int], int]:
    return lambda count: max(0, count - spare)


def portion(share: float) -> Callable[[int], int]:
    return lambda count: math.ceil(share * count)


def at_least(least: int) -> Callable[[int], int]:
    return lambda count: least


MAIN_NAMES = frozenset(network.name for network in MAIN)
STOCK = ("eager", "compile")
GRAPH, COMPILED_STOCK = "fastlayers_graph", ("compile", "reduce_overhead")

STEP_BAR = Bar("training step at most 1.02x torch's", Ratio(STEP, "fastlayers"), 1.02)
INFERENCE_BAR = Bar("inference at most 1.02x torch's", Ratio(INFERENCE, "fastlayers"), 1.02)
#: To two digits.
HOST_BAR = Bar("host time of forward and backward at most 1.00x torch's", Ratio(HOST, "fastlayers"), 1.005)
DECODE_BAR = Bar("a token with a cache of those before no slower than torch's", Ratio(DECODE, "fastlayers"), NOISE)
GRAPH_BAR = Bar(
    "graph_model: training step no slower than the better of torch.compile and reduce-overhead, on 60 %",
    Ratio(STEP, GRAPH, COMPILED_STOCK),
    NOISE,
    portion(0.6),
)
GRAPH_GPU_BAR = Bar(
    "graph_model: training step at most 1.05x its GPU time, on all but two",
    Ratio(STEP, GRAPH, (GRAPH,), STEP_GPU),
    1.05,
    but(2),
)
#: reduce-overhead replays those kernels, so its step cannot be shorter than they take.
GRAPH_COMPILED_BAR = Bar(
    "graph_model: training step no longer than the GPU time of torch.compile's, on 60 %",
    Ratio(STEP, GRAPH, ("compile",), STEP_GPU),
    1.0,
    portion(0.6),
)
GRAPH_PEAK_BAR = Bar(
    "graph_model: peak memory of a training step at most 1.15x that without it",
    Ratio(STEP_PEAK, GRAPH, ("fastlayers",)),
    1.15,
)
COMPILED_BAR = Bar(
    "compiled, a training step no slower than torch.compile's", Ratio(STEP, "fastlayers_compile", ("compile",)), NOISE
)
GPU_BAR = Bar(
    "GPU time of a training step at most 1.00x torch.compile's", Ratio(STEP_GPU, "fastlayers", ("compile",)), 1.0
)
INFERENCE_GPU_BAR = Bar(
    "GPU time of inference at most 1.00x torch.compile's, on 90 %",
    Ratio(INFERENCE_GPU, "fastlayers", ("compile",)),
    1.0,
    portion(0.9),
)
BARS = (
    STEP_BAR,
    Bar("in the geometric mean at most 0.80x", Ratio(STEP, "fastlayers"), 0.80, mean=True),
    INFERENCE_BAR,
    HOST_BAR,
    DECODE_BAR,
    GRAPH_GPU_BAR,
    GRAPH_BAR,
    GRAPH_COMPILED_BAR,
    Bar("graph_model: ready 5 s after the first training step began", Ratio(READY, GRAPH, ()), 5.0),
    GRAPH_PEAK_BAR,
    GPU_BAR,
    Bar("at most 0.90x of it, on half", GPU_BAR.ratio, 0.9, portion(0.5)),
    INFERENCE_GPU_BAR,
    COMPILED_BAR,
    Bar("training step at most 0.90x of Liger's", Ratio(STEP, "fastlayers", ("liger",)), 0.90),
    Bar("no more peak memory than Liger", Ratio(STEP_PEAK, "fastlayers", ("liger",)), NOISE),
    Bar(
        "of the README's, training step no slower than the better of torch and torch.compile",
        Ratio(STEP, "fastlayers", STOCK),
        NOISE,
        main=True,
    ),
    Bar("of the README's, at most 0.90x of it", Ratio(STEP, "fastlayers", STOCK), 0.90, at_least(4), main=True),
    Bar(
        "of the README's, peak memory of a training step no more than the lower of theirs",
        Ratio(STEP_PEAK, "fastlayers", STOCK),
        NOISE,
        main=True,
    ),
    Bar(
        "of the README's, compiled, a training step at most 0.95x of torch.compile's",
        Ratio(STEP, "fastlayers_compile", ("compile",)),
        0.95,
        at_least(4),
        main=True,
    ),
    Bar(
        "of the README's, inference no slower than torch.compile's",
        Ratio(INFERENCE, "fastlayers", ("compile",)),
        NOISE,
        at_least(4),
        main=True,
    ),
)


def judged(results: dict[str, Any]) -> list[str]:
    bars = () if results["settings"]["tiny"] else BARS
    found = [text for text in (bar.judge(results) for bar in bars) if text is not None]
    wrong = [line.labels[0] for line in lines(results) if line.labels[1] == LOSSES and line.loses]
    found.append("losses and outputs agree with torch's: " + (f"MISSED by {', '.join(wrong)}" if wrong else "met"))
    if results["skipped"]:
        found.append(f"{len(results['skipped'])} not run: {', '.join(results['skipped'])}")
    return found


# -- ratios to torch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the table of ratios. A cell loses if it misses the bar."""

    title: str
    ratio: Ratio
    bar: Bar | None = None
    note: str = ""


COLUMNS = (
    *(Column(MODES[mode], Ratio(STEP, mode)) for mode in ("compile", "reduce_overhead", "liger")),
    Column(MODES["fastlayers"], Ratio(STEP, "fastlayers"), STEP_BAR),
    Column("+ graph_model", Ratio(STEP, GRAPH), GRAPH_BAR),
    Column(MODES["backend"], Ratio(STEP, "backend")),
    Column("+ torch.compile", Ratio(STEP, "fastlayers_compile"), COMPILED_BAR),
    Column("host", Ratio(HOST, "fastlayers"), HOST_BAR, "forward and backward of a tiny batch"),
    Column("next token", Ratio(DECODE, "fastlayers"), DECODE_BAR),
    Column("inference", Ratio(INFERENCE, "fastlayers"), INFERENCE_BAR),
    Column("compiled", Ratio(INFERENCE, "compile"), note="inference with torch.compile"),
    Column(
        "peak",
        Ratio(STEP_PEAK, "fastlayers"),
        Bar("", Ratio(STEP_PEAK, "fastlayers"), NOISE),
        "memory of a training step",
    ),
    Column("GPU / compiled", GPU_BAR.ratio, GPU_BAR, "GPU time of a training step by torch.compile's"),
    Column("inference: GPU / compiled", INFERENCE_GPU_BAR.ratio, INFERENCE_GPU_BAR, "the same of inference"),
    Column(
        "graph: step / GPU",
        Ratio(STEP, GRAPH, (GRAPH,), STEP_GPU),
        GRAPH_GPU_BAR,
        "training step with graph_model by its GPU time",
    ),
    Column(
        "graph: peak",
        Ratio(STEP_PEAK, GRAPH, ("fastlayers",)),
        GRAPH_PEAK_BAR,
        "memory with graph_model by that without",
    ),
)
RATIO_HEADS = ("network", "torch, ms")


def ratio_lines(results: dict[str, Any]) -> list[Line]:
    """One line for each network that torch has run, if only in turn: numbers as shares of torch's."""
    found = []
    for rows in by_model(results).values():
        ms = STEP.of_rival(rows, "fastlayers", "eager")
        if ms is not None:
            first = next(iter(rows.values()))
            cells = {column.title: ratio_cell(rows, column) for column in COLUMNS}
            shown = {title: text for title, text in cells.items() if text}
            found.append(Line((f"{first['title']} ({first['what']})", number(ms)), shown, ()))
    return found


def ratio_legend(results: dict[str, Any]) -> str:
    shown = {title for line in ratio_lines(results) for title in line.cells}
    notes = (f"**{column.title}**: {column.note}." for column in COLUMNS if column.note and column.title in shown)
    return " ".join(
        ["Shares of torch's numbers, of a training step unless the title says otherwise.", *notes, "Bold cells lose."]
    )


def ratio_cell(rows: Rows, column: Column) -> str:
    value = column.ratio.of(rows)
    if value is None:
        return ""
    if value == math.inf:
        return "**FAILED**"
    judged = column.bar.ratio.of(rows) if column.bar else None
    return f"**{value:.2f}**" if column.bar and judged is not None and judged > column.bar.limit else f"{value:.2f}"


RATIO_TITLES = {column.title: column.title for column in COLUMNS}


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
    print_table("As shares of torch's", ratio_lines(results), console, RATIO_HEADS, RATIO_TITLES)
    for part in ("training", "inference"):
        if content := kind_lines(results, part):
            print_table(f"GPU time by kind, {part}, ms", content, console, ("model", "mode"), KIND_TITLES)
    console.print(caption(results), style="dim")
    for text in judged(results):
        console.print(text, style="bold red" if "MISSED" in text or "not run" in text else "bold", markup=False)


def markdown(results: dict[str, Any]) -> str:
    blocks = [f"### Whole models\n\n{markdown_table(lines(results), HEADS, MODES)}"]
    blocks.append(f"### As shares of torch's\n\n{ratio_table(results)}")
    blocks += [f"### GPU time by kind, {part}, ms\n\n{table}" for part, table in kind_tables(results)]
    return "\n\n".join([*blocks, bars_block(results)]) + "\n"


def kind_tables(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for part in ("training", "inference"):
        if content := kind_lines(results, part):
            yield part, markdown_table(content, ("model", "mode"), KIND_TITLES)


def bars_block(results: dict[str, Any]) -> str:
    bars = (f"- **{text}**" if "MISSED" in text else f"- {text}" for text in judged(results))
    return "\n".join([f"{caption(results)}:", "", *bars])


def ratio_table(results: dict[str, Any]) -> str:
    return markdown_table(ratio_lines(results), RATIO_HEADS, RATIO_TITLES)


def main_rows(results: dict[str, Any], modes: tuple[str, ...]) -> dict[str, Any]:
    """The results of the README's networks in these modes."""
    rows = [row for row in results["rows"] if row["model"] in MAIN_NAMES and row["mode"] in modes]
    return {**results, "rows": rows}


def steps(results: dict[str, Any]) -> str:
    """For the README: one row for each of its networks, with time and peak memory of its training step."""
    content = []
    modes = "eager", "compile", "reduce_overhead", "fastlayers", "fastlayers_graph"
    for rows in by_model(main_rows(results, modes)).values():
        pairs = {mode: (STEP.of_rival(rows, "fastlayers", mode), STEP_PEAK.of(rows, mode)) for mode in rows}
        cells = {
            mode: f"{cell(rows[mode], ms)} ms, {cell(rows[mode], peak)} GiB" for mode, (ms, peak) in pairs.items() if ms
        }
        first = next(iter(rows.values()))
        content.append(Line((f"{first['title']} ({first['what']})",), cells, ()))
    return f"{markdown_table(content, ('training step, peak memory',), MODES)}\n\n{caption(results)}.\n"


def page(results: dict[str, Any]) -> str:
    """For docs/benchmarks.md: the bars, the ratios, the rows that lose, and all rows folded."""
    every = lines(results)
    losing = [line for line in every if line.loses]
    blocks = [bars_block(results)]
    if any(row["model"] not in MAIN_NAMES for row in results["rows"]):
        blocks.append("![Training step of each network, as a share of torch's](../benchmarks/results/models-all.png)")
    blocks += [ratio_legend(results), ratio_table(results)]
    if losing:
        blocks += ["Where it loses to torch, torch.compile or Liger:", markdown_table(losing, HEADS, MODES)]
    blocks.append(folded_away("Every number", markdown_table(every, HEADS, MODES)))
    blocks += [folded_away(f"GPU time by kind, {part}, ms", table) for part, table in kind_tables(results)]
    return "\n\n".join(blocks) + "\n"


#: As :data:`benchmarks.report.PAGES`.
PAGES = {"models": page, "steps": steps}
