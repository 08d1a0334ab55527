"""Plots of a result file: bandwidth over the row length, shares of the copy bandwidth, whole models, losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from benchmarks import losses, model_report
from benchmarks.implementations import TITLES
from benchmarks.networks import MODES
from benchmarks.networks.modes import OURS
from benchmarks.report import caption, number

#: Okabe and Ito's palette, which colour-blind readers can tell apart. fastlayers has the saturated colours.
COLOURS = {
    "naive": "#999999",
    "eager": "#56B4E9",
    "compile": "#E69F00",
    "chunked": "#0072B2",
    "liger": "#CC79A7",
    "trl": "#999999",
    "fastlayers": "#D55E00",
    "triton": "#009E73",
    "cuda": "#D55E00",
    "cpu": "#D55E00",
    "fastlayers_compile": "#009E73",
    "reduce_overhead": "#7A5C00",
    "fastlayers_graph": "#7F0000",
    "backend": "#0072B2",
}
#: Colours of the kinds of kernels: grey and blue for those that fusion cannot change, warm for the others.
KIND_COLOURS = {
    "matrix products": "#4D4D4D",
    "convolutions": "#808080",
    "attention": "#0072B2",
    "optimizer": "#56B4E9",
    "fused layers": "#D55E00",
    "compiled by torch": "#E69F00",
    "other torch kernels": "#F0E442",
    "copies": "#CC79A7",
    "idle": "#E4E4E4",
}
MARKERS = {"naive": "v", "eager": "o", "compile": "s", "triton": "^", "cuda": "D"}
#: Open markers are stock torch's and Liger's.
MODE_MARKERS = {
    "compile": "s",
    "reduce_overhead": "D",
    "liger": "v",
    "fastlayers": "o",
    "fastlayers_graph": "D",
    "backend": "^",
    "fastlayers_compile": "s",
}
DIRECTIONS = ("forward", "backward")
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
}

Row = dict[str, Any]


def draw_all(results: dict[str, Any], out: Path, name: str) -> list[Path]:
    """Draw every plot that the results have rows for, as ``out/NAME-*.png``."""
    if results.get("kind") == "models":
        return draw_models(results, out, name)
    if results.get("kind") == "losses":
        return draw_losses(results, out, name)
    rows = [row for row in results["rows"] if row["status"] == "ok" and "fraction" in row.get("forward", {})]
    drawn = []
    with plt.rc_context(STYLE):
        for op in dict.fromkeys(row["op"] for row in rows if row["suite"] == "sweep"):
            chosen = [row for row in rows if row["suite"] == "sweep" and row["op"] == op]
            drawn.append(save(sweep(chosen, results, op), out / f"{name}-{op}-sweep.png"))
        large = [row for row in rows if row["suite"] == "bars" and row["dtype"] == "bf16" and worth_a_bar(row)]
        for family in dict.fromkeys(row["family"] for row in large):
            chosen = [row for row in large if row["family"] == family]
            drawn.append(save(bars(chosen, results, family), out / f"{name}-{family}-bars.png"))
    return drawn


def worth_a_bar(row: Row) -> bool:
    """Whether the case is limited by memory bandwidth, and the contestant is not shown under another name."""
    return math.prod(row["shape"]) >= 2**22 and row["implementation"] not in ("naive", "cuda", "cpu")


def save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return path


def in_order(rows: list[Row]) -> list[str]:
    present = {row["implementation"] for row in rows}
    return [name for name in TITLES if name in present]


def footnote(figure: Figure, *lines: str) -> None:
    figure.text(
        0.01, 0.05 / figure.get_figheight(), "\n".join(lines), fontsize=8.5, color="#666666", va="bottom", ha="left"
    )


# ------------------------------------------------------------------------------------------------ the sweep


def sweep(rows: list[Row], results: dict[str, Any], op: str) -> Figure:
    """GB/s against the row length, one line per contestant, forward beside backward."""
    figure, panels = plt.subplots(
        1, 2, figsize=(11, 5), sharey=True, layout=ConstrainedLayoutEngine(rect=(0, 0.08, 1, 0.84))
    )
    copy = results["copy_gbps"][rows[0]["device"]]
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        for name in in_order(rows):
            mine = [row for row in rows if row["implementation"] == name]
            points = sorted((row["shape"][-1], row[direction]["fraction"] * copy) for row in mine)
            axes.plot(*zip(*points, strict=True), color=COLOURS[name], marker=MARKERS[name], label=TITLES[name], **LINE)
        axes.axhline(copy, color="#333333", linewidth=1.2, linestyle=(0, (5, 3)), label=f"copy ({copy:,.0f} GB/s)")
        axes.set_title(f"{direction} ({rows[0]['bytes'][direction]})", pad=8, fontsize=11.5)
        row_length_axis(axes, [row["shape"][-1] for row in rows])
    panels[0].set_ylabel("GB/s (bytes that must move / GPU time)")
    panels[0].set_ylim(0, max(copy * 1.08, 1))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="upper center", ncols=len(labels), bbox_to_anchor=(0.5, 0.935), columnspacing=1.5
    )
    most = max(rows, key=lambda row: row["shape"][0])["shape"][0]
    figure.suptitle(f"{op} over rows of N, {rows[0]['dtype']}", x=0.01, ha="left", fontweight="bold", fontsize=13)
    few = " (fewer where input and output would exceed 1 GiB)" if any(row["shape"][0] < most for row in rows) else ""
    footnote(
        figure, f"{most} rows{few}; b: bytes of the input; {results['clock'][rows[0]['device']]}", caption(results)
    )
    return figure


LINE: dict[str, Any] = {"linewidth": 1.8, "markersize": 4.5, "markeredgewidth": 0}


def row_length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    powers = range(min(lengths).bit_length() - 1, max(lengths).bit_length() + 1)
    ticks = [2**k for k in powers if min(lengths) <= 2**k <= max(lengths)]
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: max(1, round(len(ticks) / 7))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(int(value))))
    axes.set_xlabel("columns N (log scale)")


def short(count: int) -> str:
    """1024 → 1K, 2^20 → 1M."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{letter}"
    return str(count)


# ------------------------------------------------------------------------------------------- bars per case


def bars(rows: list[Row], results: dict[str, Any], family: str) -> Figure:
    """Fraction of the copy bandwidth, one group per case, forward beside backward."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    names = in_order(rows)
    height = 0.8 / len(names)
    inches = 1.7 + len(cases) * (0.16 * len(names) + 0.12)
    figure, panels = plt.subplots(
        1,
        2,
        figsize=(11, inches),
        sharey=True,
        layout=ConstrainedLayoutEngine(rect=(0, 0.4 / inches, 1, 1 - 1.05 / inches)),
    )
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        for place, name in enumerate(names):
            mine = [row for row in rows if row["implementation"] == name and direction in row]
            at = [cases.index(row["case"]) + (place - (len(names) - 1) / 2) * height for row in mine]
            length = [row[direction]["fraction"] for row in mine]
            axes.barh(at, length, height * 0.92, color=COLOURS[name], label=TITLES[name])
        bar_ticks(axes, rows, cases, direction)
        axes.axvline(1, color="#333333", linewidth=1.2, linestyle=(0, (5, 3)), label="copy bandwidth")
        axes.set_title(direction, pad=8, fontsize=11.5)
        axes.set_xlim(0, 1.1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    titles = {row["case"]: f"{row['op']}\n{row['title']}" for row in rows}
    panels[0].set_yticks(range(len(cases)), [titles[case] for case in cases], fontsize=9)
    panels[0].set_ylim(len(cases) - 0.45, -0.55)
    line, *others = zip(*panels[0].get_legend_handles_labels(), strict=True)
    handles, labels = zip(*others, line, strict=True)
    title = f"{family}: share of the copy bandwidth reached, {rows[0]['dtype']}"
    legend_and_title(figure, list(handles), list(labels), title, inches)
    device = rows[0]["device"]
    note = f"black tick: what the case has to reach; copy {results['copy_gbps'][device]:,.0f} GB/s"
    footnote(figure, f"{note}; {results['clock'][device]}", caption(results))
    return figure


def bar_ticks(axes: Axes, rows: list[Row], cases: list[str], direction: str) -> None:
    """Draw the bar of each case."""
    limits = {row["case"]: row["bars"][direction] for row in rows if direction in row["bars"]}
    for case, limit in limits.items():
        middle = cases.index(case)
        axes.plot([limit, limit], [middle - 0.42, middle + 0.42], color="black", linewidth=1.6, solid_capstyle="butt")


# -------------------------------------------------------------------------------------------------- whole models


#: The modes in the plots of the README's networks.
MAIN_MODES = ("eager", "compile", "reduce_overhead", "liger", "fastlayers", "fastlayers_graph")


def draw_models(results: dict[str, Any], out: Path, name: str) -> list[Path]:
    """Draw time and memory of the README's networks and the kinds of their kernels, and the steps of all networks."""
    drawn = []
    main = model_report.main_rows(results, MAIN_MODES)
    with plt.rc_context(STYLE):
        if metrics := shares(main):
            drawn.append(save(time_and_memory(main, metrics), out / f"{name}.png"))
        if any("kinds" in row.get("training", {}) for row in main["rows"]):
            drawn.append(save(kinds(main), out / f"{name}-kinds.png"))
        if any(row["model"] not in model_report.MAIN_NAMES for row in results["rows"]) and shares(results):
            drawn.append(save(all_networks(results), out / f"{name}-all.png"))
    return drawn


def all_networks(results: dict[str, Any]) -> Figure:
    """One line of dots for each network, the training steps of the modes as shares of eager torch's step."""
    steps = {
        next(iter(rows.values()))["title"]: {
            mode: ratio
            for mode in MODE_MARKERS
            if math.isfinite(ratio := model_report.Ratio(model_report.STEP, mode).of(rows) or math.inf)
        }
        for rows in model_report.by_model(results).values()
    }
    known = [(title, ratios) for title, ratios in steps.items() if ratios]
    known.sort(key=lambda one: one[1].get("fastlayers", math.inf))
    present = [mode for mode in MODE_MARKERS if any(mode in ratios for _, ratios in known)]
    inches = 1.6 + 0.235 * len(known)
    figure, axes = plt.subplots(
        figsize=(9, inches), layout=ConstrainedLayoutEngine(rect=(0, 0.3 / inches, 1, 1 - 1.15 / inches))
    )
    for mode in present:
        points = [(ratios[mode], place) for place, (_, ratios) in enumerate(known) if mode in ratios]
        filled = mode in OURS
        axes.plot(
            *zip(*points, strict=True), MODE_MARKERS[mode], color=COLOURS[mode], label=MODES[mode], markersize=5.5,
            markerfacecolor=COLOURS[mode] if filled else "white", markeredgewidth=1.3, zorder=3 if filled else 2,
        )  # fmt: skip
    axes.axvline(1, color="#333333", linewidth=1.2, linestyle=(0, (5, 3)))
    axes.set_yticks(range(len(known)), [title for title, _ in known], fontsize=9.5)
    axes.set_ylim(len(known) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(axis="y", length=0)
    handles, labels = axes.get_legend_handles_labels()
    title = "Training step, as a share of torch's (less is better)"
    legend_and_title(figure, handles, labels, title, inches, columns=(len(labels) + 1) // 2)
    footnote(figure, caption(results))
    return figure


#: Style of the number beside a bar, readable on top of a line.
LABEL: dict[str, Any] = {"color": "#444444", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}


def shares(results: dict[str, Any]) -> list[model_report.Metric]:
    """The metrics that eager torch has: the plot shows all others as shares of its numbers."""
    models = model_report.by_model(results).values()
    metrics = (model_report.STEP, model_report.STEP_PEAK, model_report.INFERENCE)
    return [metric for metric in metrics if any(metric.of(rows, "eager") for rows in models)]


def shares_of(metric: model_report.Metric, rows: model_report.Rows) -> list[tuple[str, float, float]]:
    """The modes with a number, their shares of eager torch's number, and the numbers."""
    known = []
    for mode in MODES:
        ratio, value = metric.ratio(rows, mode, "eager"), metric.of_rival(rows, "fastlayers", mode)
        if ratio and value:
            known.append((mode, 1.0 if mode == "eager" else ratio[0], value))
    return known


def time_and_memory(results: dict[str, Any], metrics: list[model_report.Metric]) -> Figure:
    """One group of bars for each model, as shares of eager torch's, with the numbers beside them."""
    models = model_report.by_model(results)
    present = [mode for mode in MODES if any(mode in rows and rows[mode]["status"] == "ok" for rows in models.values())]
    inches = 1.7 + len(models) * (0.2 * len(present) + 0.14)
    figure, grid = plt.subplots(
        1, len(metrics), figsize=(12, inches), sharey=True, squeeze=False,
        layout=ConstrainedLayoutEngine(rect=(0, 0.35 / inches, 1, 1 - 1.0 / inches)),
    )  # fmt: skip
    height = 0.82 / len(present)
    for axes, metric in zip(grid[0], metrics, strict=True):
        for group, rows in enumerate(models.values()):
            known = shares_of(metric, rows)
            for place, (mode, length, value) in enumerate(known):
                at = group + (place - (len(known) - 1) / 2) * height
                axes.barh(at, length, height * 0.9, color=COLOURS[mode])
                shown = number(value) if value >= 10 else f"{value:.2f}"
                axes.annotate(
                    shown, (length, at), (4, 0), textcoords="offset points", va="center", fontsize=7.5, **LABEL
                )
        axes.axvline(1, color="#333333", linewidth=1.2, linestyle=(0, (5, 3)))
        axes.set_title(metric.title, pad=8, fontsize=11.5)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
    titles = [f"{row['title']}\n{row['what']}" for row in (next(iter(rows.values())) for rows in models.values())]
    grid[0][0].set_yticks(range(len(models)), titles, fontsize=9)
    grid[0][0].set_ylim(len(models) - 0.45, -0.55)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[mode]) for mode in present]
    title = "Whole models: time and memory, as shares of torch's (less is better)"
    legend_and_title(figure, handles, [MODES[mode] for mode in present], title, inches)
    footnote(figure, caption(results))
    return figure


def kinds(results: dict[str, Any]) -> Figure:
    """One bar for each model and mode: GPU time of a training step by kind of kernel, as shares of eager's step."""
    rows = [row for row in results["rows"] if "kinds" in row.get("training", {})]
    models = list(dict.fromkeys(row["model"] for row in rows))
    eager = {row["model"]: row["training"]["ms"] for row in rows if row["mode"] == "eager"}
    places, at = [], 0.0
    for before, row in zip([None, *rows], rows, strict=False):
        at += 1.6 if before is not None and before["model"] != row["model"] else 1.0
        places.append(at)
    inches = 1.5 + 0.25 * (len(rows) + 0.6 * len(models))
    figure, axes = plt.subplots(
        figsize=(11, inches), layout=ConstrainedLayoutEngine(rect=(0, 0.3 / inches, 1, 1 - 1.15 / inches))
    )
    shown = [kind for kind in KIND_COLOURS if any(share(row, kind) for row in rows)]
    for row, place in zip(rows, places, strict=True):
        whole, left = eager.get(row["model"], row["training"]["ms"]), 0.0
        for kind in shown:
            length = share(row, kind) / whole
            axes.barh(place, length, 0.85, left=left, color=KIND_COLOURS[kind])
            left += length
        axes.text(left + 0.01, place, f"{row['training']['ms']:.1f} ms", va="center", fontsize=8, color="#444444")
    axes.set_yticks(places, [f"{row['title']}, {MODES[row['mode']]}" for row in rows], fontsize=8.5)
    axes.set_ylim(places[-1] + 0.7, places[0] - 0.7)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=KIND_COLOURS[kind]) for kind in shown]
    title = "GPU time of a training step by kind of kernel, as shares of torch's step"
    legend_and_title(figure, handles, shown, title, inches, columns=(len(shown) + 1) // 2)
    footnote(figure, caption(results))
    return figure


def share(row: Row, kind: str) -> float:
    """Milliseconds of one kind of kernel in a training step."""
    training = row["training"]
    return model_report.idle_ms(training) if kind == "idle" else training["kinds"].get(kind, 0.0)


# ------------------------------------------------------------------------------------------------ losses


def draw_losses(results: dict[str, Any], out: Path, name: str) -> list[Path]:
    """Draw the losses of each model's runs, and below their distance from torch's."""
    rows = [row for row in results["rows"] if row["status"] == "ok"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            2, len(models), figsize=(6 * len(models), 6), sharex=True, squeeze=False,
            layout=ConstrainedLayoutEngine(rect=(0, 0.06, 1, 0.94)),
        )  # fmt: skip
        for model, (upper, lower) in zip(models, grid.T, strict=True):
            runs = {row["run"]: row["losses"] for row in rows if row["model"] == model}
            colours = ("#333333", "#BBBBBB", "#D55E00", "#009E73", "#0072B2", "#CC79A7")
            for (run, values), colour in zip(runs.items(), colours, strict=False):
                steps = range(1, len(values) + 1)
                # Curves that agree cover each other, so each one is dashed.
                style = "-" if run.startswith("torch") else (0, (4, 4))
                upper.plot(steps, values, color=colour, linewidth=1.4, linestyle=style, label=run)
                if run != "torch":
                    lower.plot(steps, losses.distances(values, runs["torch"]), color=colour, linewidth=1)
            upper.set_title(model)
            upper.set_ylabel("loss")
            upper.legend(frameon=False, fontsize=8.5)
            lower.set_yscale("log")
            lower.set_ylabel("distance from torch's")
            lower.set_xlabel("step")
        figure.suptitle("Losses of training with fastlayers and without", x=0.01, ha="left", fontweight="bold")
        footnote(figure, caption(results))
        return [save(figure, out / f"{name}.png")]


def legend_and_title(
    figure: Figure, handles: list[Any], labels: list[str], title: str, inches: float, columns: int | None = None
) -> None:
    figure.legend(
        handles, labels, loc="upper center", ncols=columns or len(labels),
        bbox_to_anchor=(0.5, 1 - 0.33 / inches), columnspacing=1.5,
    )  # fmt: skip
    figure.suptitle(title, x=0.01, y=1 - 0.06 / inches, va="top", ha="left", fontweight="bold", fontsize=13)
