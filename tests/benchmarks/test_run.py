"""The benchmark harness: what it counts, what it reports, and a run of tiny cases on the CPU. No timing is judged."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval
from torch.profiler import ProfilerActivity, profile

from benchmarks import plots, report, startup
from benchmarks.__main__ import RESULTS, main
from benchmarks.case import Case, Input, Op, count_bytes
from benchmarks.cases import all_cases, batch_norm, group_norm, heads, layer_norm
from benchmarks.cases.elementwise import ADD_RELU, MUL, broadcast_mul, pair
from benchmarks.cases.softmax import MASKED_SOFTMAX, SOFTMAX, causal_mask, padding_mask, row
from benchmarks.implementations import contestants
from benchmarks.precompile import compile_case
from benchmarks.result_file import text_of
from benchmarks.run import DeviceLostError, Entrant, Settings, mark_torch_kernels, run
from benchmarks.timing import CpuClock, DeviceEvent, Task, between_markers, copy_bandwidth, device_events, summarize

SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
CPU = torch.device("cpu")


def on_cpu(_: str) -> torch.device:
    return CPU


# ------------------------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize(
    ("spelled", "expected"), [("2b", 2 * 64 * 2), ("b", 64 * 2), ("2b+1bit", 2 * 64 * 2 + 8), ("2.5b", 320)]
)
def test_bytes_as_spelled(spelled, expected):
    assert count_bytes(spelled, elements=64, itemsize=2) == expected


def test_bytes_spelled_wrongly():
    with pytest.raises(ValueError, match=r"'3x'; expected terms like 2b"):
        count_bytes("3x", 1, 2)


def test_cases_have_ids_of_their_own():
    ids = [case.id for case in all_cases()]
    assert len(set(ids)) == len(ids)


def test_the_lengths_of_the_sweep():
    sweep = [case for case in all_cases() if case.suite == "sweep" and case.op is SOFTMAX]
    assert {case.shape[-1] for case in sweep} == {128 * i for i in range(1, 101)} | {2**k for k in range(14, 21)}
    assert all(case.shape[0] == 4096 for case in sweep if case.shape[-1] <= 12800)
    assert all(case.bytes_moved("forward") <= 2**30 for case in sweep)


def test_inputs_are_laid_out_as_the_case_says():
    x, factor = broadcast_mul(2, 8, 4, 4, by=(2, 8, 1, 1), nhwc=True).tensors(CPU)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.requires_grad
    assert factor.shape == (2, 8, 1, 1)
    assert x.dtype == factor.dtype == torch.bfloat16


def test_parameters_do_not_define_the_shape():
    case = batch_norm.train(batch_norm.BATCH_NORM_ADD_RELU, 2, 8, 4, 3)
    assert case.shape == (2, 8, 4, 3)
    assert case.bytes_moved("forward") == 4 * 192 * 2
    x, mean, var, weight, bias, residual = case.tensors(CPU)
    assert x.shape == residual.shape == (2, 8, 4, 3)
    assert not torch.equal(x, residual)
    assert mean.dtype == var.dtype == weight.dtype == bias.dtype == torch.float32
    assert (var > 0).all()
    assert [t.requires_grad for t in (mean, var, weight, bias)] == [False, False, True, True]


def test_masks_leave_something_in_every_row():
    assert padding_mask((8, 1, 1, 16), torch.bfloat16, CPU).any(-1).all()
    assert causal_mask((16, 16), torch.float32, CPU).isfinite().any(-1).all()


def test_only_bfloat16_is_compiled_unless_all_is_asked_for():
    case = row(SOFTMAX, 4, 8, dtype=torch.float32)
    assert "compile" not in contestants(case)
    assert "compile" in contestants(case, everything=True)
    assert "compile" in contestants(replace(case, dtype=torch.bfloat16))


# ---------------------------------------------------------------------------------------- summing profiler events


def recorded(*calls: list[tuple[str, float]]) -> list[DeviceEvent]:
    """A stream in the profiler. Between calls there is a forward that is not timed, and the write that flushes L2."""
    events, now = [], 0.0
    for call in calls:
        for name, duration in [("forward", 7.0), ("fill", 90.0), (SPIN, 1.0), *call, (SPIN, 1.0)]:
            events.append(DeviceEvent(name, now, duration))
            now += duration + 2.0
    return events


def test_events_between_the_markers_are_a_call():
    calls = [[("softmax", 5.0)], [("Memset (Device)", 1.0), ("reduce", 2.0), ("Memcpy DtoD", 3.0)], []]
    found = between_markers(reversed(recorded(*calls)), calls=3)
    assert [[(event.name, event.duration_us) for event in call] for call in found] == calls


def test_lost_markers_are_an_error():
    events = recorded([("softmax", 5.0)], [("softmax", 5.0)])
    with pytest.raises(RuntimeError, match="3 marker kernels; expected 4"):
        between_markers(events[:-1], calls=2)


def test_only_the_device_time_line_is_read():
    def event(name, device_type, annotation=False):
        interval = Interval(10.0, 14.0)
        return SimpleNamespace(name=name, device_type=device_type, is_user_annotation=annotation, time_range=interval)

    kernel, launch = event("softmax", DeviceType.CUDA), event("cudaLaunchKernel", DeviceType.CPU)
    compiled_region = event("Torch-Compiled Region: 0/0", DeviceType.CUDA, annotation=True)
    prof = SimpleNamespace(events=lambda: [launch, compiled_region, kernel])
    assert device_events(prof) == [DeviceEvent("softmax", 10.0, 4.0)]


def test_a_profile_of_this_torch_can_be_read():
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(3).sum()
    assert device_events(prof) == []


def test_summary_is_the_median_and_lists_kernels_once():
    timing = summarize([3.0, 1.0, 100.0, 2.0, 4.0], ["a", "b", "a"])
    assert timing.us == 3.0
    assert timing.kernels == ("a", "b")


def test_cpu_clock_times_the_call_but_not_its_preparation():
    log = []
    task = Task(call=lambda state: log.append(("call", state)), prepare=lambda: log.append("prepare") or 7)
    [timing] = CpuClock().time([task], samples=3)
    assert log == ["prepare", ("call", 7)] * 5  # two more calls than samples: the first ones are not counted
    assert timing.us > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_time_of_a_copy():
    from benchmarks.timing import CudaClock

    device = torch.device("cuda")
    clock = CudaClock(device)
    x = torch.randn(2**20, device=device)
    forward = Task(lambda _: torch.relu(x) + 1)
    nothing = Task(lambda _: None, prepare=lambda: x * 2)
    two, none = clock.time([forward, nothing], samples=5)
    assert len(two.kernels) == 2
    assert none.us == 0
    assert none.kernels == ()
    assert copy_bandwidth(clock, device, samples=5) > 0


# -------------------------------------------------------------------------------------------------- a run on the CPU


def wrong_mul(x, y):
    return x * y * 1.5


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Tiny cases. One of the contestants cannot run here, and one gives wrong results."""
    no_compile = ("naive", "eager", "fastlayers", "triton", "cuda")
    masked_inputs = (Input((2, 3, 8, 8)), Input((8, 8), causal_mask, grad=False))
    cases = [
        row(SOFTMAX, 4, 128, host=True, contestants=no_compile, bars={"forward": 0.0, "host_forward": 1e9}),
        Case(MASKED_SOFTMAX, masked_inputs, torch.float32, "2b", "3b", {"scale": 0.5}, contestants=no_compile),
        pair(Op("mul", "elementwise", wrong_mul, torch.mul), "5b", 8, 4, contestants=no_compile, bars={"forward": 2.0}),
        *(row(SOFTMAX, 4, 128 * i, suite="sweep", contestants=no_compile[:2]) for i in (1, 2, 3)),
        row(SOFTMAX, 4, 8, contestants=("eager",)),
    ]
    out = tmp_path_factory.mktemp("results")
    reports = []
    run(cases, out / "tiny.json", Settings(samples=3), on_cpu, reports.append)
    assert len(reports) == len(cases)
    return json.loads((out / "tiny.json").read_text()), out / "tiny.json"


def rows_of(results, case_part):
    return {row["implementation"]: row for row in results[0]["rows"] if case_part in row["case"]}


def test_a_row_has_every_number(results):
    found = rows_of(results, "bars/softmax/4x128/bf16")["eager"]
    assert found["status"] == "ok"
    assert found["error"] < 1e-2
    for direction in ("forward", "backward"):
        assert found[direction]["us"] > 0
        assert found[direction]["fraction"] > 0
    for key in ("wall_forward_us", "wall_training_us", "host_forward_us", "host_training_us", "first_call_s"):
        assert found[key] > 0


def test_a_result_file_has_a_line_for_each_row(results):
    content, path = results
    text = path.read_text()
    assert text == text_of(content)
    assert sum(line.startswith('{"case"') for line in text.splitlines()) == len(content["rows"])
    assert (
        len(text.splitlines()) == len(content["rows"]) + len(content) + 3
    )  # one line for each entry and for each bracket
    assert json.loads(text_of({"rows": []})) == {"rows": []}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.name)
def test_committed_results_are_written_as_a_run_writes_them(file):
    content = json.loads(file.read_text())
    assert file.read_text() == text_of(content)


def test_environment_is_recorded(results):
    environment = results[0]["environment"]
    assert environment["torch"] == torch.__version__
    assert set(environment["backends"]) == {"eager", "compile", "triton", "cuda", "cpu"}
    assert results[0]["copy_gbps"]["cpu"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cuda backend serves here")
def test_a_contestant_that_cannot_run_says_why(results):
    found = rows_of(results, "bars/softmax/4x128/bf16")["cuda"]
    assert found["status"] == "unavailable"
    assert found["reason"]


def test_a_wrong_answer_fails_loudly_and_is_not_timed(results):
    found = rows_of(results, "mul")["fastlayers"]
    assert found["status"] == "failed"
    assert "relative error 5.0e-01 against float64" in found["reason"]
    assert "forward" not in found
    assert rows_of(results, "mul")["eager"]["status"] == "ok"


def test_a_wrong_memory_format_fails(tmp_path):
    def contiguous(x, y):
        return torch.relu(x + y).contiguous()

    case = pair(replace(ADD_RELU, fused=contiguous), "2b+1bit", 2, 8, 4, 4, nhwc=True, contestants=("fastlayers",))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert "with strides (128, 16, 4, 1); expected" in found.rows[0]["reason"]


def test_nan_is_a_wrong_answer(tmp_path):
    case = pair(replace(MUL, fused=lambda x, y: x * y * float("nan")), "5b", 8, contestants=("fastlayers",))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert found.rows[0]["status"] == "failed"


NORMS = [
    layer_norm.row(layer_norm.LAYER_NORM, 6, 8),
    layer_norm.row(layer_norm.RMS_NORM, 6, 8),
    layer_norm.added(layer_norm.ADD_LAYER_NORM, 6, 8),
    layer_norm.added(layer_norm.ADD_RMS_NORM, 6, 8),
    *(layer_norm.over_channels(2, 8, 4, 3, nhwc=nhwc) for nhwc in (True, False)),
    batch_norm.train(batch_norm.BATCH_NORM, 4, 8, 4, 3),
    batch_norm.train(batch_norm.BATCH_NORM_RELU, 4, 8, 4, 3),
    batch_norm.train(batch_norm.BATCH_NORM_RELU, 4, 8, 4, 3, nhwc=False),
    batch_norm.train(batch_norm.BATCH_NORM_ADD_RELU, 4, 8, 4, 3),
    batch_norm.evaluate(4, 8, 4, 3, dtype=torch.bfloat16),
    *(group_norm.row(group_norm.GROUP_NORM_SILU, 2, 64, 4, 3, nhwc=nhwc) for nhwc in (True, False)),
    group_norm.row(group_norm.GROUP_NORM, 2, 64, 4, 3),
    group_norm.instances(2, 8, 4, 3),
]


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.id)
def test_norms_run(case, tmp_path):
    found = run([replace(case, contestants=("eager", "fastlayers"))], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert [(row["status"], row["reason"]) for row in found.rows] == [("ok", None)] * 2


@pytest.mark.parametrize("case", [heads.row(6, 8, 13), heads.log_prob_row(6, 8, 13), heads.divergence_row(6, 8, 9, 13)])
def test_a_step_is_timed_as_one(case, tmp_path):
    case = replace(case, contestants=("eager", "fastlayers"))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert [(row["status"], row["reason"]) for row in found.rows] == [("ok", None)] * 2
    assert all(
        row["step"]["us"] > 0 and "backward" not in row and "fraction" not in row["forward"] for row in found.rows
    )
    shown = [line.labels[2] for line in report.lines(found.rows, report.DEVICE_METRICS)]
    assert shown == ["forward, us", "forward + backward, us"]


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="torch 2.13 has it")
def test_the_chunked_loss_of_torch_is_a_contestant(tmp_path):
    case = heads.row(6, 8, 13)
    assert "chunked" in case.contestants
    found = run([replace(case, contestants=("eager", "chunked"))], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert [(row["implementation"], row["status"], row["reason"]) for row in found.rows] == [
        ("eager", "ok", None),
        ("chunked", "ok", None),
    ]


def test_bars_may_name_a_rival():
    bars = {"step/liger": 0.8, "beyond": 2.0, "beyond/liger": 1.0}
    rows = [
        entry("liger", 1.0, step={"us": 10.0}, beyond_bytes=2**20),
        entry("fastlayers", 1.0, step={"us": 7.0}, beyond_bytes=3 * 2**19, bars=bars),
    ]
    lines = report.lines(rows, (report.STEP, *report.HOST_METRICS))
    assert [[text for text, _ in line.verdicts] for line in lines] == [
        ["bar 0.80x Liger, is 0.70x met"],
        ["bar 1.00x Liger, is 1.50x MISSED", "bar 2.0 MiB met"],
    ]


def test_a_case_without_gradients_is_forward_only(tmp_path):
    case = batch_norm.evaluate(4, 8, 4, 3, dtype=torch.float32)
    found = run([replace(case, contestants=("eager", "fastlayers"))], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert len(found.rows) == 2
    assert all("forward" in answer for answer in found.rows)
    assert not any("backward" in answer or "wall_training_us" in answer for answer in found.rows)
    assert [line.labels[2] for line in report.lines(found.rows, report.DEVICE_METRICS)] == ["forward (2b)"]


def test_gradients_of_both_outputs_are_checked(tmp_path):
    def cut(x, residual, weight):
        y, s = layer_norm.eager_add_rms_norm(x, residual, weight)
        return y, s.detach() + 0 * s

    op = replace(layer_norm.ADD_RMS_NORM, fused=cut)
    case = replace(layer_norm.added(layer_norm.ADD_RMS_NORM, 6, 8), op=op, contestants=("fastlayers",))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert "against float64" in found.rows[0]["reason"]


def test_a_rival_may_overwrite_the_gradient(tmp_path):
    seen = []

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dim):
            out = torch.softmax(x, dim)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, dy):
            (out,) = ctx.saved_tensors
            seen.append(dy.clone())
            return dy.copy_(out * (dy - (out * dy).sum(-1, keepdim=True))), None

    op = replace(SOFTMAX, liger=lambda x, dim: InPlace.apply(x, dim))
    case = row(op, 4, 8, suite="sweep", dtype=torch.float32, contestants=("liger", "fastlayers"))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert [row["status"] for row in found.rows] == ["ok", "ok"]
    assert len(seen) > 2
    assert all(torch.equal(dy, seen[0]) for dy in seen)


def test_time_limit_keeps_what_was_measured(tmp_path):
    cases = [row(SOFTMAX, 4, 8, contestants=("eager",))]
    found = run(cases, tmp_path / "r.json", Settings(time_limit=0.0), on_cpu)
    assert found.skipped == [cases[0].id]
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == []


def test_a_lost_device_ends_the_run_but_not_the_results(tmp_path):
    def broken(x, dim):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    good = row(SOFTMAX, 4, 8, contestants=("eager",))
    bad = row(replace(SOFTMAX, fused=broken), 4, 16, contestants=("fastlayers",))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        run([good, bad], tmp_path / "r.json", Settings(samples=2), on_cpu)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert [row["case"] for row in kept["rows"]] == [good.id]
    assert kept["skipped"] == [bad.id]


def test_gradients_of_every_op_are_checked(tmp_path):
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.softmax(x, -1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, dy):
            (out,) = ctx.saved_tensors
            return 0.5 * out * (dy - (out * dy).sum(-1, keepdim=True))

    case = row(replace(SOFTMAX, fused=lambda x, dim: Halved.apply(x)), 4, 8, contestants=("fastlayers",))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert "relative error 5.0e-01" in found.rows[0]["reason"]


@pytest.mark.slow
def test_compiled_contestant(tmp_path):
    assert compile_case("bars/mul/2^12/bf16", "cpu") > 0
    case = row(SOFTMAX, 4, 8, contestants=("eager", "compile"))
    found = run([case], tmp_path / "r.json", Settings(samples=2), on_cpu)
    assert [row["status"] for row in found.rows] == ["ok", "ok"]


# --------------------------------------------------------------------------------------------------------- reports


def entry(name: str, us: float, fraction: float = 0.5, **fields):
    timing = {"us": us, "fraction": fraction}
    base = {"case": "c", "suite": "bars", "op": "op", "title": "8x8", "dtype": "bf16", "device": "cuda", "status": "ok"}
    base |= {"bytes": {"forward": "2b", "backward": "3b"}, "bars": {}, "implementation": name, "reason": None}
    return base | {"forward": timing} | fields


def verdicts(*rows):
    [line] = report.lines(rows, report.DEVICE_METRICS)
    return [text for text, _ in line.verdicts]


def test_the_verdict_names_the_rival_that_is_faster():
    assert verdicts(entry("eager", 10.0), entry("fastlayers", 12.0)) == ["loses to torch by 1.20x"]
    fast_compile = entry("compile", 8.0)
    assert verdicts(entry("eager", 10.0), fast_compile, entry("fastlayers", 9.0)) == ["loses to torch.compile by 1.12x"]
    assert verdicts(entry("eager", 10.0), entry("fastlayers", 9.0)) == []
    assert verdicts(entry("eager", 10.0), entry("liger", 8.0), entry("fastlayers", 9.0)) == ["loses to Liger by 1.12x"]


def test_bars_are_judged():
    bars = {"forward": 0.97, "forward_ratio": 0.7}
    met = verdicts(entry("eager", 10.0), entry("fastlayers", 6.0, 0.97, bars=bars))
    assert met == ["bar 0.97 met", "bar 0.70x torch, is 0.60x met"]
    # A bar is not reached by rounding.
    assert verdicts(entry("fastlayers", 6.0, 0.9696, bars=bars)) == ["bar 0.97 MISSED at 0.970"]
    missed = verdicts(entry("eager", 10.0), entry("fastlayers", 8.0, 0.9, bars=bars))
    assert missed == ["bar 0.97 MISSED at 0.900", "bar 0.70x torch, is 0.80x MISSED"]


def test_host_bars_are_ratios_to_eager():
    rows = (
        entry("eager", 1.0, host_forward_us=8.0),
        entry("fastlayers", 1.0, host_forward_us=16.0, bars={"host_forward": 1.5}),
    )
    [line] = report.lines(rows, report.HOST_METRICS)
    assert line.verdicts[0] == ("bar 1.50x torch, is 2.00x MISSED", "bad")


def test_the_verdict_names_calls_of_torchs_kernels():
    same = entry("fastlayers", 10.0)
    same["forward"]["torch_kernels"] = True
    assert verdicts(entry("eager", 10.0), same) == ["runs torch's kernel"]


def test_launching_the_kernels_of_torch_is_noted():
    def launched(name, **kernels):
        return Entrant(name, lambda: None, (), (), kernels=kernels)

    def marked(*entrants):
        rows = {one.name: {direction: {} for direction in one.kernels} for one in entrants}
        mark_torch_kernels(list(entrants), rows)
        return rows["fastlayers"]

    ours = launched("fastlayers", forward=("a", "b"), backward=("c",))
    assert marked(ours, launched("eager", forward=("a", "b"), backward=("d",))) == {
        "forward": {"torch_kernels": True},
        "backward": {},
    }
    assert marked(launched("fastlayers", forward=()), launched("eager", forward=())) == {"forward": {}}
    assert marked(ours) == {"forward": {}, "backward": {}}


def test_tables_of_a_run(results):
    text = report.markdown(results[0])
    assert "**fastlayers failed**" in text
    assert "| softmax 4x128 | bf16 | forward (2b) |" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in table)
    assert report.summary(results[0]).startswith("2 bars met, 0 missed;")


def test_startup_is_measured_and_judged(monkeypatch):
    monkeypatch.setattr(startup, "PROCESSES", 1)
    [imported, *_] = startup.startup()
    assert imported["seconds"] > 0
    assert report.startup_line(imported | {"seconds": 0.1}).verdicts == (("bar 0.2 s met", "good"),)
    assert report.startup_line(imported | {"seconds": 0.3}).verdicts == (("bar 0.2 s MISSED", "bad"),)
    assert startup.median_seconds("raise ValueError('why')") == {"seconds": None, "reason": "ValueError: why"}


def test_command_line_prints_and_draws(results, tmp_path):
    _, path = results
    printed = CliRunner().invoke(main, ["table", str(path)])
    assert printed.exit_code == 0, printed.output
    assert "softmax 4x128" in printed.output
    drawn = CliRunner().invoke(main, ["plot", str(path), "--out", str(tmp_path)])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "tiny-softmax-sweep.png").stat().st_size > 10_000


def test_bar_plot_of_a_case_that_is_forward_only(results, tmp_path):
    rows = [entry("eager", 10.0), entry("fastlayers", 5.0, bars={"forward": 0.9})]
    rows = [row | {"shape": [2**22], "family": "batch_norm"} for row in rows]
    content = results[0] | {"rows": rows, "copy_gbps": {"cuda": 3000.0}, "clock": {"cuda": "GPU time"}}
    assert plots.draw_all(content, tmp_path, "r") == [tmp_path / "r-batch_norm-bars.png"]


def test_bar_plot_has_the_large_cases(results, tmp_path):
    large = [entry("eager", 10.0), entry("fastlayers", 5.0, bars={"forward": 0.9})]
    large = [row | {"shape": [2**22], "family": "softmax", "backward": row["forward"]} for row in large]
    content = results[0] | {"rows": large, "copy_gbps": {"cuda": 3000.0}, "clock": {"cuda": "GPU time"}}
    assert plots.draw_all(content, tmp_path, "r") == [tmp_path / "r-softmax-bars.png"]


def test_command_line_refuses_what_it_cannot_do(tmp_path):
    nothing = CliRunner().invoke(main, ["run", "--only", "nonsense"])
    assert nothing.exit_code == 2
    assert "no case matches --only 'nonsense'" in nothing.output
    other = tmp_path / "other.json"
    other.write_text("{}")
    refused = CliRunner().invoke(main, ["table", str(other)])
    assert refused.exit_code == 1
    assert "no result of this benchmark: it has no copy_gbps, environment, rows" in refused.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they run")
def test_gpu_suites_need_a_gpu():
    refused = CliRunner().invoke(main, ["run", "--suite", "bars"])
    assert refused.exit_code == 2
    assert "need a GPU" in refused.output


def test_listing_takes_patterns():
    listed = CliRunner().invoke(main, ["list", "--only", "relu_add/2^*fp32"])
    assert listed.output.split() == ["cpu/relu_add/2^24/fp32", "bars/relu_add/2^26/fp32"]


def test_results_go_into_pages(results, tmp_path):
    _, path = results
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results:begin -->\nSTALE\n<!-- results:end -->\nafter\n")
    arguments = ("table", str(path), "--into", str(page))
    for _ in range(2):  # the second run replaces the first one's
        assert CliRunner().invoke(main, arguments).exit_code == 0
        text = page.read_text()
        assert "STALE" not in text
        assert text.startswith("before\n<!-- results:begin -->\n")
        assert text.endswith("</details>\n<!-- results:end -->\nafter\n")
        losing = text.partition("<details>")[0]
        assert "**fastlayers failed**" in losing  # in sight
    for nothing in ("no markers", "<!-- results:end --><!-- results:begin -->"):
        page.write_text(nothing)
        refused = CliRunner().invoke(main, arguments)
        assert refused.exit_code == 1
        assert "expected a line <!-- results:begin --> and after it <!-- results:end -->" in refused.output
        assert page.read_text() == nothing


def test_the_overview_has_a_line_for_each_family_and_direction():
    def rows(case, suite="bars", family="softmax", **us):
        for name, (forward, fraction, backward) in us.items():
            row = {"case": case, "suite": suite, "op": "softmax", "family": family, "title": case, "dtype": "bf16"}
            row |= {"device": "cuda", "implementation": name, "status": "ok", "bars": {}, "bytes": {}}
            row["forward"] = {"us": forward, "fraction": fraction}
            if backward is not None:
                row["backward"] = {"us": backward, "fraction": None}
            yield row

    content = [
        *rows("a", eager=(10.0, 0.4, 20.0), compile=(5.0, 0.8, None), fastlayers=(4.0, 0.9, 5.0)),
        *rows("b", eager=(10.0, 0.4, 20.0), fastlayers=(10.0, 0.7, 20.0), triton=(1.0, 1.0, 1.0)),
        *rows("c", suite="sweep", eager=(10.0, 0.4, 20.0), fastlayers=(1.0, 0.7, 1.0)),
        *rows("d", eager=(10.0, 0.4, 20.0)),
        *rows("e", family="glu", fastlayers=(1.0, 0.5, None)),
    ]
    environment = {"device": "G", "driver": "", "torch": "2", "triton": "", "commit": "", "date": "2026-01-02"}
    results = {"environment": environment, "rows": content, "copy_gbps": {}, "skipped": []}
    table = [line for line in report.overview(results).splitlines() if line.startswith("|")]
    assert table == [
        "| family | what | cases | of a copy's bandwidth | of torch's time | of torch.compile's time |",
        "|---|---|---|---:|---:|---:|",
        "| softmax | forward | 2 | 0.80 | 0.63 | 0.80 |",
        "| softmax | backward | 2 |  | 0.50 |  |",
        "| glu | forward | 1 | 0.50 |  |  |",
    ]


# losses --------------------------------------------------------------------------------------------------------------


def test_losses_farther_apart_than_those_of_two_seeds_are_reported(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import losses, plots

    courses = {"torch": 1.0, "torch, another seed": 1.1, "patched": 1.01, "fused layers": 1.2}
    courses["fused layers, DDP on two"] = float("nan")
    rows = [
        {"model": "char_gpt", "run": name, "status": "ok", "losses": [value] * 3} for name, value in courses.items()
    ]
    rows.append({"model": "char_gpt", "run": "fused layers, FSDP2 on two", "status": "left out: one GPU"})
    environment = {
        "device": "a GPU",
        "driver": None,
        "torch": "2",
        "triton": None,
        "commit": None,
        "date": "2026-11-21",
    }
    results = {"kind": "losses", "steps": 3, "environment": environment, "rows": rows}
    verdicts = {line.labels[1]: line.verdicts[0][1] for line in losses.lines(results)}
    assert verdicts == {
        "patched": "good",
        "fused layers": "bad",
        "fused layers, DDP on two": "bad",
        "fused layers, FSDP2 on two": "note",
    }
    assert "0.01" in losses.markdown(results)
    failed = [row | {"status": "failed"} if row["run"] == "fused layers" else row for row in rows]
    marks = {line.labels[1]: line.verdicts[0] for line in losses.lines(results | {"rows": failed})}
    assert marks["patched"][1] == "good"
    assert marks["fused layers"] == marks["fused layers, DDP on two"] == ("fused layers: failed", "bad")
    (picture,) = plots.draw_all(results, tmp_path, "losses")
    assert picture.stat().st_size > 10_000


def test_losses_of_the_digits_network_are_the_same_patched():
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    from benchmarks import losses

    torch_run, patched = (
        losses.digits(one, 2, torch.device("cpu"))
        for one in losses.RUNS
        if one.model == "digits ResNet" and one.seed == 0
    )
    assert patched == pytest.approx(torch_run, rel=1e-5)
