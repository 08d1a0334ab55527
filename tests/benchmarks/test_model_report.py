"""What is reported of the benchmark of whole models: verdicts, tables, pages and plots."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import model_report, model_worker, plots, timing
from benchmarks.__main__ import main
from benchmarks.networks import MODES
from tests.benchmarks.test_models import network

pytestmark = pytest.mark.usefixtures("few_calls")


def test_what_was_measured_in_turn_is_compared():
    eager, ours = row("vit", "eager", 100.0), row("vit", "fastlayers", 103.0)
    assert model_report.STEP_BAR.ratio.of({"eager": eager, "fastlayers": ours}) == 1.03
    ours["in_turn"] = {"training": [110.0, 99.0]}
    rows = {"eager": eager, "fastlayers": ours}
    assert model_report.STEP_BAR.ratio.of(rows) == pytest.approx(0.9)
    assert model_report.STEP.ratio(rows, "fastlayers", "eager", "compile") == (pytest.approx(0.9), "eager")
    assert model_report.INFERENCE_BAR.ratio.of(rows) == 1.03
    # A process of its own for eager torch is not needed for that.
    assert model_report.STEP_BAR.ratio.of({"fastlayers": ours}) == pytest.approx(0.9)
    assert model_report.INFERENCE_BAR.ratio.of({"fastlayers": ours}) is None
    (line,) = model_report.ratio_lines({"rows": [ours]})
    assert line.cells["fastlayers"] == "0.90"
    # Nor for the other modes, which have no turns of their own.
    graphs = row("vit", "fastlayers_graph", 93.0)
    ratio, rival = model_report.STEP.ratio(
        {"fastlayers": ours, "fastlayers_graph": graphs}, "fastlayers_graph", "eager"
    )
    assert (round(ratio, 3), rival) == (round(93 / (103 / 0.9), 3), "eager")


def test_memory_of_graphs_counts_between_replays():
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 10},
        {"segment_pool_id": (0, 1), "total_size": 70, "allocated_size": 30},
    ]
    assert timing.idle_in_graphs(segments) == 40


# ------------------------------------------------------------------------------------------------ tables and plots


def part(ms, peak, losses=(11.0, 10.0), apart=0.0):
    kinds = {"matrix products": ms / 2, "fused layers": ms / 4}
    return {
        "ms": ms,
        "peak_bytes": peak * 2**30,
        "gpu_ms": 0.75 * ms,
        "kinds": kinds,
        "kernels": 100,
        "losses": list(losses),
        "losses_apart": [loss * (1 + apart) for loss in losses],
        "outputs": [1.0, 2.0],
        "outputs_apart": [1.0, 2.0],
    }


def row(model, mode, ms, peak=10.0, **more):
    chosen = network(model)
    labels = {"model": model, "title": chosen.title, "what": chosen.describe("cuda"), "mode": mode}
    measured = {"training": part(ms, peak, **more), "inference": part(ms / 3, peak / 2)}
    return labels | {"status": "ok", "reason": None} | measured


def results(*rows, skipped=()):
    environment = {
        "device": "H100",
        "driver": "1",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "commit": "abc",
        "date": "2026",
    }
    settings = {"device": "cuda", "tiny": False, "seconds": 2.0}
    return {
        "kind": "models",
        "environment": environment,
        "settings": settings,
        "rows": list(rows),
        "skipped": list(skipped),
    }


FAILED = {"model": "vit", "title": "ViT-B/16", "what": "64x224x224, AMP bf16", "mode": "liger"}
FAILED = FAILED | {"status": "failed", "reason": "ended after 240 s"}
SAMPLE = results(
    row("llama", "eager", 200.0, 40.0),
    row("llama", "compile", 180.0, 42.0),
    row("llama", "liger", 150.0, 20.0),
    row("llama", "fastlayers", 144.0, 25.0),
    row("llama", "fastlayers_compile", 175.0, 40.0),
    row("vit", "eager", 50.0),
    row("vit", "compile", 40.0),
    FAILED,
    row("vit", "fastlayers", 44.0, losses=(11.0, 10.5)),
    skipped=["bert/eager"],
)


def lines():
    return {line.labels: [text for text, _ in line.verdicts] for line in model_report.lines(SAMPLE)}


def test_verdicts_name_the_better_rival():
    found = lines()
    llama, vit = "Llama 1.2B (4x2048, bf16)", "ViT-B/16 (64x224x224, AMP bf16)"
    assert found[llama, "training step, ms"] == ["0.80x torch.compile", "0.96x Liger", "compiled 0.97x torch.compile"]
    assert found[llama, "training, peak GiB"] == ["0.62x torch", "1.25x Liger, loses", "compiled 0.95x torch.compile"]
    assert found[vit, "training step, ms"] == ["Liger failed: ended after 240 s", "1.10x torch.compile, loses"]


def test_losses_that_differ_are_reported():
    assert lines()["ViT-B/16 (64x224x224, AMP bf16)", "losses, distance from torch's"] == [
        "fastlayers: losses 4.5e-02 from torch's; expected 1e-02"
    ]
    excused = row("vit", "eager", 50.0, apart=0.03)
    assert list(model_report.disagreements({"eager": excused, "fastlayers": SAMPLE["rows"][-1]})) == []
    far = row("vit", "fastlayers", 44.0)
    far["inference"]["outputs"], excused["inference"]["outputs_apart"] = [1.0, 2.115], [1.0, 2.06]
    assert list(model_report.disagreements({"eager": excused, "fastlayers": far})) == []
    exact = row("vit", "eager", 50.0)
    assert [kind for _, kind in model_report.disagreements({"eager": exact, "fastlayers": far})] == ["bad"]
    broken = row("vit", "fastlayers", 44.0, losses=(11.0, float("nan")))
    assert [kind for _, kind in model_report.disagreements({"eager": excused, "fastlayers": broken})] == ["bad"]


def test_bars_count_models():
    assert model_report.judged(SAMPLE) == [
        "training step at most 1.02x torch's: 2 of 2, bar 2 met",
        "in the geometric mean at most 0.80x: 0.80 of 2, bar met",
        "inference at most 1.02x torch's: 2 of 2, bar 2 met",
        "GPU time of a training step at most 1.00x torch.compile's: 1 of 2, bar 2 MISSED: ViT-B/16 1.10",
        "at most 0.90x of it, on half: 1 of 2, bar 1 met",
        "GPU time of inference at most 1.00x torch.compile's, on 90 %: 1 of 2, bar 2 MISSED: ViT-B/16 1.10",
        "compiled, a training step no slower than torch.compile's: 1 of 1, bar 1 met",
        "training step at most 0.90x of Liger's: 0 of 1, bar 1 MISSED: Llama 1.2B 0.96",
        "no more peak memory than Liger: 0 of 1, bar 1 MISSED: Llama 1.2B 1.25",
        "of the README's, training step no slower than the better of torch and torch.compile: 1 of 2, bar 2 MISSED: "
        "ViT-B/16 1.10",
        "of the README's, at most 0.90x of it: 1 of 2, bar 4 MISSED: ViT-B/16 1.10",
        "of the README's, peak memory of a training step no more than the lower of theirs: 2 of 2, bar 2 met",
        "of the README's, compiled, a training step at most 0.95x of torch.compile's: 0 of 1, bar 4 MISSED: "
        "Llama 1.2B 0.97",
        "of the README's, inference no slower than torch.compile's: 1 of 2, bar 4 MISSED: ViT-B/16 1.10",
        "losses and outputs agree with torch's: MISSED by ViT-B/16 (64x224x224, AMP bf16)",
        "1 not run: bert/eager",
    ]


def graphs(model, ms, rival, broken=False, **training):
    """The rows of a network whose graphs take ``ms`` a step, in the time of its best rival ``rival``."""
    ours = row(model, "fastlayers_graph", ms, 11.0)
    ours["training"] |= {"gpu_ms": 100.0, "ready_s": 2.0} | training
    if broken:
        ours = {**row(model, "fastlayers_graph", 1.0), "status": "failed", "reason": "why"}
    rivals = (row(model, "compile", rival), row(model, "reduce_overhead", 2 * rival))
    rivals[0]["training"]["gpu_ms"] = rival
    return [row(model, "eager", 200.0), row(model, "fastlayers", 104.0), *rivals, ours]


def judged(*rows):
    found = (text.rpartition(": ") for text in model_report.judged(results(*rows)) if text.startswith("graph_model"))
    return [f"{head}: {tail}".removeprefix("graph_model: ").split(": ", 1)[1] for head, _, tail in found]


def test_graphs_have_bars_of_their_own():
    fast, slow = graphs("llama", 104.0, 105.0), graphs("vit", 110.0, 100.0, ready_s=6.0, peak_bytes=12 * 2**30)
    assert judged(*fast) == ["1 of 1, bar 0 met", *["1 of 1, bar 1 met"] * 4]
    assert judged(*fast, *slow) == [
        "1 of 2, bar 0 met",
        "1 of 2, bar 2 MISSED: ViT-B/16 1.10",
        "1 of 2, bar 2 MISSED: ViT-B/16 1.10",
        "1 of 2, bar 2 MISSED: ViT-B/16 6.00",
        "1 of 2, bar 2 MISSED: ViT-B/16 1.20",
    ]


def test_what_failed_misses_its_bars():
    assert judged(*graphs("vit", 1.0, 100.0, broken=True))[1:] == ["0 of 1, bar 1 MISSED: ViT-B/16 inf"] * 4


def test_a_verdict_names_the_worst_six():
    names = ("vit", "bert", "gpt2", "llama", "resnet50", "convnext", "swin", "clip")
    rows = (one for name in names for one in graphs(name, 110.0, 100.0, peak_bytes=12 * 2**30))
    peak = judged(*rows)[-1]
    assert peak.startswith("0 of 8, bar 8 MISSED: ")
    assert peak.endswith(" and 2 more")
    assert peak.count("1.20") == 6


def test_a_verdict_waits_for_all_rivals_but_those_that_failed():
    whole = graphs("vit", 104.0, 105.0)
    without = [one for one in whole if one["mode"] != "reduce_overhead"]
    failing = [*without, {**row("vit", "reduce_overhead", 1.0), "status": "failed", "reason": "why"}]
    ratio = model_report.GRAPH_BAR.ratio
    by_mode = [{one["mode"]: one for one in rows} for rows in (whole, without, failing)]
    assert [ratio.of(rows) for rows in by_mode] == [104 / 105, None, 104 / 105]


def test_cells_that_lose_are_marked():
    eager, ours = row("vit", "eager", 100.0), row("vit", "fastlayers", 103.0)
    for one, host in ((eager, 20.0), (ours, 20.05)):
        one["training"]["host_ms"] = host
    [line] = model_report.ratio_lines(results(eager, row("vit", "compile", 80.0), ours))
    assert line.labels == ("ViT-B/16 (64x224x224, AMP bf16)", "100")
    assert line.cells == {
        "torch.compile": "0.80",
        "fastlayers": "**1.03**",
        "host": "1.00",
        "inference": "**1.03**",
        "compiled": "0.80",
        "peak": "1.00",
        "GPU / compiled": "**1.29**",
        "inference: GPU / compiled": "**1.29**",
    }
    [line] = model_report.ratio_lines(results(*graphs("vit", 1.0, 100.0, broken=True)))
    assert line.cells["+ graph_model"] == line.cells["graph: peak"] == "**FAILED**"


def test_idle_time_of_the_gpu_is_a_kind():
    first = model_report.kind_lines(SAMPLE)[0]
    assert first.labels == ("Llama 1.2B", "torch")
    assert first.cells == {"matrix products": "100.0", "fused layers": "50.0", "idle": "50.0", "kernels": "100"}


def test_results_go_into_a_page(tmp_path):
    file, page = tmp_path / "models.json", tmp_path / "page.md"
    file.write_text(json.dumps(SAMPLE))
    page.write_text("before\n<!-- models:begin -->\nSTALE\n<!-- models:end -->\nafter\n")
    done = CliRunner().invoke(main, ["table", str(file), "--into", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "STALE" not in text
    assert text.endswith("<!-- models:end -->\nafter\n")
    in_sight = text.partition("<details>")[0]
    assert "**1.10x torch.compile, loses**" in in_sight
    assert "models-all.png" not in in_sight
    assert "bar 2 met" in in_sight
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))
    for arguments in (["table", str(file)], ["table", str(file), "--markdown"]):
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == 0, shown.output
        assert "Llama 1.2B" in shown.output


def test_the_readme_has_a_row_for_each_model():
    """Torch's time is the one in turn with fastlayers': those of two processes may be of a slow and of a fast host."""
    beside = {**row("vit", "fastlayers", 44.0), "in_turn": {"training": [60.0, 40.0]}}
    found = results(*SAMPLE["rows"][:7], beside, row("llama", "fastlayers_graph", 140.0, 26.0))
    assert [line for line in model_report.steps(found).splitlines() if line.startswith("|")] == [
        "| training step, peak memory | torch | torch.compile | fastlayers | fastlayers + graph_model |",
        "|---|---:|---:|---:|---:|",
        "| Llama 1.2B (4x2048, bf16) | 200 ms, 40.0 GiB | 180 ms, 42.0 GiB | 144 ms, 25.0 GiB | 140 ms, 26.0 GiB |",
        "| ViT-B/16 (64x224x224, AMP bf16) | 66.0 ms, 10.0 GiB | 40.0 ms, 10.0 GiB | 44.0 ms, 10.0 GiB |  |",
    ]
    (metric, *_) = plots.shares(found)
    shares = {mode: share for mode, share, _ in plots.shares_of(metric, model_report.by_model(found)["vit"])}
    assert shares == {"eager": 1.0, "compile": pytest.approx(40 / 66), "fastlayers": pytest.approx(44 / 66)}


def test_plots_of_models(tmp_path):
    assert plots.draw_all(SAMPLE, tmp_path, "models") == [tmp_path / "models.png", tmp_path / "models-kinds.png"]
    assert plots.draw_all(results(FAILED), tmp_path, "none") == []
    without_torch = {**SAMPLE, "rows": [row for row in SAMPLE["rows"] if row["mode"] != "eager"]}
    assert plots.draw_all(without_torch, tmp_path, "part") == [tmp_path / "part-kinds.png"]


def test_networks_beyond_the_readme_have_a_plot_of_their_own(tmp_path):
    more = results(*SAMPLE["rows"], *graphs("swin", 104.0, 105.0), *graphs("clip", 1.0, 100.0, broken=True))
    assert plots.draw_all(more, tmp_path, "models")[2:] == [tmp_path / "models-all.png"]
    assert "models-all.png" in model_report.page(more)
    assert "Swin" not in model_report.steps(more)


def test_every_mode_has_a_colour():
    assert set(MODES) <= set(plots.COLOURS)
    assert set(MODES) == {*plots.MODE_MARKERS, "eager"}
    assert {*model_worker.PATTERNS, model_worker.FUSED, model_worker.OTHER, "idle"} == set(plots.KIND_COLOURS)
