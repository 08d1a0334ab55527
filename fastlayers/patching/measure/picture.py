"""The picture of a profile. Imported where one is drawn: it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

#: Okabe and Ito's palette, distinguishable without colour vision.
COLOURS = {
    "generated": "#8C510A",
    "attention": "#CC79A7",
    "convolution": "#0072B2",
    "matmul": "#56B4E9",
    "norm": "#D55E00",
    "copy": "#F0E442",
    "reduction": "#009E73",
    "elementwise": "#E69F00",
    "other": "#999999",
}
PLAIN = ("#BBBBBB", "#444444")
STATES = ("unpatched", "patched")


def draw(
    path: Path, title: str, times: str, step_ms: Sequence[float], kinds: Mapping[str, Sequence[float]],
    peak_mib: Sequence[float],
) -> Path:  # fmt: skip
    """Draw a step of the unpatched and of the patched model as bars: its time, its time by kind, its peak memory.

    Args:
        path: the file.
        title, times: the titles of the picture and of the bars by kind.
        step_ms, peak_mib: the values of the unpatched and of the patched model.
        kinds: such a pair of values in ms for each kind.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    step, device, memory = figure.subplots(1, 3, width_ratios=(1, 1.6, 1))
    bars(step, step_ms, "step, ms")
    bars(memory, peak_mib, "peak memory, MiB")
    bottom = [0.0, 0.0]
    for kind, heights in kinds.items():
        device.bar(STATES, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    device.set_title(times, loc="left")
    handles, labels = device.get_legend_handles_labels()
    device.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (step, device, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=160)
    return path


def bars(axes: Axes, heights: Sequence[float], title: str) -> None:
    drawn = axes.bar(STATES, heights, color=PLAIN, width=0.6)
    axes.bar_label(drawn, fmt="%.4g")
    axes.set_title(title, loc="left")
