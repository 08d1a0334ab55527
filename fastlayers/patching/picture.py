"""The picture of a profile. Imported where one is drawn: it needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from fastlayers.patching.profile import ProfileReport

__all__ = ["draw"]

#: Okabe and Ito's palette, distinguishable without colour vision.
COLOURS = {
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


def draw(report: ProfileReport, path: Path) -> Path:
    """Step time, device time by kind and peak memory as bars, unpatched and patched."""
    sides = (report.before, report.after)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    step, device, memory = figure.subplots(1, 3, width_ratios=(1, 1.6, 1))
    bars(step, [side.step_ms for side in sides], "step, ms")
    bars(memory, [side.peak_bytes / 2**20 for side in sides], "peak memory, MiB")
    bottom = [0.0, 0.0]
    for kind in report.kinds:
        heights = [side.kinds.get(kind, 0.0) for side in sides]
        device.bar(STATES, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    device.set_title("GPU time, ms" if report.on_gpu else "operators, ms", loc="left")
    handles, labels = device.get_legend_handles_labels()
    device.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (step, device, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(report.summary(), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=160)
    return path


def bars(axes: Axes, heights: list[float], title: str) -> None:
    drawn = axes.bar(STATES, heights, color=PLAIN, width=0.6)
    axes.bar_label(drawn, fmt="%.4g")
    axes.set_title(title, loc="left")
