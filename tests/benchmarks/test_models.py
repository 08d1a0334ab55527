"""The benchmark of whole models: what a process measures, and the run over them. No timing is judged."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import fastlayers
from benchmarks import model_report, model_worker, models
from benchmarks.__main__ import main
from benchmarks.model_worker import kind, measure
from benchmarks.networks import MODES, NETWORKS, Network
from benchmarks.networks.modes import AHEAD, COMPILED, STAGES, UnavailableError, prepare
from benchmarks.networks.network import used

pytestmark = pytest.mark.usefixtures("few_calls")


CPU = torch.device("cpu")
FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
KERNELS = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": "matrix products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64>": "matrix products",
    "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc": "convolutions",
    "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel_generic": "convolutions",
    FLASH: "attention",
    "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "triton_poi_fused__scaled_dot_product_flash_attention_convolution_2": "compiled by torch",
    "triton_tem_fused_mm_0": "matrix products",
    "void fastlayers::(anonymous namespace)::layer_norm_forward<c10::BFloat16>": "fused layers",
    "_rms_norm_forward_kernel": "fused layers",
    "fused_add_gelu__block_py_88": "fused layers",
    "Memcpy DtoD (Device -> Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "other torch kernels",
}


@pytest.mark.parametrize(("name", "expected"), KERNELS.items(), ids=lambda text: text[:30])
def test_kinds_of_kernels(name, expected):
    assert kind(name, frozenset({"_rms_norm_forward_kernel"})) == expected


def test_fused_kernels_are_those_of_fastlayers():
    pytest.importorskip("triton")
    from fastlayers.kernels import softmax  # noqa: F401

    assert {"_whole_forward", "_whole_backward"} <= model_worker.fused_kernels()


# ----------------------------------------------------------------------------------------------------- one process


class Residual(nn.Module):
    def __init__(self, channels, p):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(p) if p else nn.Identity()

    def forward(self, x):
        return torch.relu(self.drop(self.norm(self.conv(x))) + x)


@dataclass(frozen=True)
class Toy(Network):
    p: float = 0.0

    def build(self, device):
        return used(nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8, self.p), Residual(8, self.p)))

    def example(self, device):
        return {"images": torch.randn(4, 3, 8, 8), "labels": torch.randint(8, (4,))}

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["images"]).mean((2, 3)), batch["labels"])

    def predict(self, model, batch):
        return model(batch["images"]).mean((2, 3))


def toy(mode, p=0.0):
    return measure(Toy("toy", "Toy", "", 4, 8, p=p), mode, CPU, seconds=0.0, compile_only=False)


def test_a_process_measures_training_and_inference():
    eager, ours = toy("eager"), toy("fastlayers")
    assert "2 batch_norm" in ours["patched"]
    assert ours["inference"]["folded"]
    assert not eager["inference"]["folded"]
    for row in (eager, ours):
        assert row["training"]["ms"] > 0
        assert row["inference"]["calls"] == model_worker.LEAST
        assert row["training"]["host_ms"] > 0
        assert row["training"]["ready_s"] >= 0
        assert row["training"]["losses"][-1] < row["training"]["losses"][0]
    assert ours["in_turn"].keys() == {"training", "host", "inference", "host_inference"}
    assert all(len(pair) == 2 and min(pair) > 0 for pair in ours["in_turn"].values())
    rows = {"eager": eager, "fastlayers": ours}
    for mode, row in rows.items():
        row["mode"] = mode
    assert model_report.losses_apart(rows, "fastlayers") < 1e-4
    assert model_report.outputs_apart(rows, "fastlayers") < 1e-4
    assert list(model_report.disagreements(rows)) == []


def test_graphs_of_inference_are_gone_in_training():
    model = nn.Sequential(nn.Linear(2, 2))
    with model_worker.evaluating(model, "fastlayers_graph"):
        assert type(model) is not nn.Sequential
    assert type(model) is nn.Sequential
    assert "calls captured" in toy("fastlayers_graph")["graphs"]
    assert toy("fastlayers")["graphs"] == ""


GPU = SimpleNamespace(type="cuda")  # all that the tested code asks for


def test_nothing_is_timed_after_the_profiler_ran(monkeypatch):
    """The first session of the profiler attaches CUPTI, which slows every launch after it."""
    order = []

    def timed(call, *args):
        order.append("timed")
        call()
        return {}

    def several(calls, *args, **kwargs):
        order.append("timed")
        for call in calls:
            call()
        return [1.0] * len(calls)

    def kinds_of(call, device):
        order.append("profiled")
        call()
        return {"gpu_ms": float(len(order))}

    monkeypatch.setattr(model_worker, "timed", timed)
    monkeypatch.setattr(model_worker, "host_ms", several)
    monkeypatch.setattr(model_worker, "loops_in_turn", several)
    monkeypatch.setattr(model_worker, "kinds_of", kinds_of)
    row = measure(Toy("toy", "Toy", "", 4, 8), "fastlayers", GPU, seconds=0.0, compile_only=False)
    assert order == ["timed"] * 8 + ["profiled"] * 2
    assert (row["training"]["gpu_ms"], row["inference"]["gpu_ms"]) == (9.0, 10.0)


def takes(monkeypatch, *milliseconds):
    """A call that takes this long each time, the last for ever."""
    left = list(milliseconds)

    def call():
        clock[0] += 1e-3 * (left.pop(0) if len(left) > 1 else left[0])

    clock = [0.0]
    monkeypatch.setattr(model_worker.time, "perf_counter", lambda: clock[0])
    return call


def test_the_time_is_the_median_of_a_plain_loop(monkeypatch):
    monkeypatch.setattr(model_worker, "LEAST", 5)
    call = takes(monkeypatch, 7, 7, 90, 7, 7, 8, 50, 9, 8, 8)
    found = model_worker.timed(call, CPU, warm=5, seconds=0.0, compile_only=False)
    assert (found["ms"], found["calls"]) == (8.0, 5)  # of 50, 9, 8, 8, 8, after five to warm up and one to count


@pytest.mark.parametrize(
    ("first", "ready"), [((7, 7, 7), 0.0), ((9, 7, 7), 0.0), ((3000, 7, 7), 3.0), ((9, 9, 2000), 2.018)]
)
def test_a_model_is_ready_after_its_last_slow_call(monkeypatch, first, ready):
    found = model_worker.timed(takes(monkeypatch, *first, 7), CPU, warm=3, seconds=0.0, compile_only=False)
    assert found["ready_s"] == pytest.approx(ready)


def test_host_time_does_not_count_what_follows_a_call(monkeypatch):
    call = takes(monkeypatch, *[50] * (2 * model_worker.WARM), 3, 20, 3)
    assert model_worker.host_ms([call], CPU, after=call) == [3.0]


def test_calls_in_turn_meet_the_same_slow_phase(monkeypatch):
    monkeypatch.setattr(model_worker, "WARM", 1)
    one = takes(monkeypatch, 9, 5, 5, 5, 5, 50, 50, 50, 5)
    found = model_worker.loops_in_turn([one, one], CPU, seconds=0.0)
    assert len(found) == 2
    assert found[0] == found[1] == 5.0


def test_host_times_of_compiled_modes_are_those_of_few_kernels(monkeypatch):
    """A compiled model is not compiled once more for a small batch. With many kernels its queue may be full."""
    kernels = {"training": model_worker.QUEUE + 1, "inference": model_worker.QUEUE}
    waiting = list(kernels.values())
    monkeypatch.setattr(model_worker, "compiled", lambda model, mode: model)
    monkeypatch.setattr(model_worker, "timed", lambda call, *args: {"ms": 1.0})
    monkeypatch.setattr(model_worker, "kinds_of", lambda call, device: {"kernels": waiting.pop(0)})
    monkeypatch.setattr(model_worker, "synchronize", lambda device: None)
    row = measure(Toy("toy", "Toy", "", 4, 8), "compile", GPU, seconds=0.0, compile_only=False)
    assert ("host_ms" in row["training"], "host_ms" in row["inference"]) == (False, True)


def test_eager_shows_how_far_equal_runs_may_be_apart(monkeypatch):
    """Its second run has weights that differ by a rounding, and other dropouts."""
    seeds, weights, trainer = [], [], model_worker.trainer

    def remembered(chosen, model, *args, seed):
        seeds.append(seed)
        weights.append([p.detach().clone() for p in model.parameters()])
        return trainer(chosen, model, *args, seed=seed)

    monkeypatch.setattr(model_worker, "trainer", remembered)
    plain = toy("eager")["training"]
    assert seeds[0] != seeds[1]
    assert any(not torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert all(((a - b).abs() <= torch.finfo(a.dtype).eps * a.abs()).all() for a, b in zip(*weights, strict=True))
    assert model_report.distance(plain["losses_apart"], plain["losses"]) < 1e-4
    dropping = toy("eager", p=0.5)["training"]
    assert model_report.distance(dropping["losses_apart"], dropping["losses"]) > 1e-3
    assert "losses_apart" not in toy("fastlayers", p=0.5)["training"]


def test_the_backend_is_not_looked_up_by_name():
    """A GPU machine has a copy of this tree, and no installed package whose entry point names the backend."""
    assert callable(COMPILED["backend"]["backend"])


def test_compiling_ahead_times_nothing():
    row = measure(Toy("toy", "Toy", "", 4, 8), "eager", CPU, seconds=0.0, compile_only=True)
    assert row["training"].keys() == {"first_s", "losses"}


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_liger_is_no_dependency():
    with pytest.raises(UnavailableError, match="Liger is not there"):
        prepare(nn.Linear(2, 2), "liger")


# ------------------------------------------------------------------------------------------------ a forked process

PRELOADING = """
import os, sys, threading, torch
for name in {"_cuda_getDeviceCount", "_cuda_init"} & set(dir(torch._C)):
    setattr(torch._C, name, lambda: os._exit(3))
import benchmarks.preload
assert {"fastlayers", "torch._dynamo"} <= sys.modules.keys()
assert not [name for name in sys.modules if name.startswith("liger_kernel")]
assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child")
"""


def test_the_fork_server_has_no_thread_no_process_and_no_cuda():
    # OpenBLAS starts threads when it is loaded, and handles forks itself.
    environment = os.environ | {"PYTHONPATH": str(models.ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PRELOADING], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "no child\n"), done.stderr


@dataclass(frozen=True)
class Odd(Toy):
    """Its worker does ``what``."""

    what: str = ""
    note: Path = Path()

    def build(self, device):
        getattr(self, self.what)()
        return super().build(device)

    def fails(self):
        raise ValueError("wrong")

    def lacks(self):
        raise UnavailableError("not there")

    def leaves(self):
        print("some words\nlast words", flush=True)
        sys.exit(3)

    def crashes(self):
        os.kill(os.getpid(), signal.SIGSEGV)

    def waits(self):
        with subprocess.Popen(["sleep", "600"]) as process:
            self.write(process.pid)

    def tells(self):
        threads = torch._inductor.config.compile_threads
        self.write([fastlayers.__file__, "benchmarks.preload" in sys.modules, torch.cuda._is_in_bad_fork(), threads])

    def write(self, value):
        self.note.with_suffix(".part").write_text(json.dumps(value))
        self.note.with_suffix(".part").rename(self.note)


def odd(what, note=Path(), threads=None):
    network = Odd("toy", "Toy", "", 4, 8, what=what, note=note)
    return models.Process(models.Job(network, "eager"), models.Settings("cpu", seconds=0.0), threads=threads)


ENDS = {
    "fails": ("failed", "ValueError: wrong"),
    "lacks": ("unavailable", "not there"),
    "leaves": ("failed", "exit status 3: last words"),
    "crashes": ("failed", "exit status -11: "),
}


@pytest.mark.parametrize(("what", "expected"), ENDS.items())
def test_how_a_worker_ends(what, expected):
    row = odd(what).finish(120.0)
    assert (row["status"], row["reason"]) == expected


def test_a_worker_is_ended_with_what_it_started(tmp_path):
    process = odd("waits", tmp_path / "pid")
    until((tmp_path / "pid").exists)
    assert process.running(120.0)
    assert process.finish(0.0)["reason"] == "ended after 0 s"
    status = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    until(lambda: not status.exists() or ") Z " in status.read_text())  # a zombie where nobody collects orphans


def until(condition):
    end = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_worker_finds_this_checkout_imported(tmp_path):
    assert odd("tells", tmp_path / "facts", threads=3).finish(120.0)["status"] == "ok"
    assert json.loads((tmp_path / "facts").read_text()) == [fastlayers.__file__, True, False, 3]


# --------------------------------------------------------------------------------------------------------- the run


def jobs(*ids):
    return [models.Job(network(name), mode) for name, mode in (text.split("/") for text in ids)]


def network(name):
    return next(network for network in NETWORKS if network.name == name)


TINY = models.Settings("cpu", tiny=True, seconds=0.0)


@pytest.mark.slow
def test_smoke(tmp_path):
    """The command on tiny models, each mode in a fresh process."""
    pytest.importorskip("transformers")
    arguments = ["models", "--smoke", "--only", "bert", "--mode", "eager", "--mode", "fastlayers"]
    done = CliRunner().invoke(main, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "models-smoke.json").read_text())["rows"]
    assert [(row["mode"], row["status"], row["reason"]) for row in rows] == [
        ("eager", "ok", None),
        ("fastlayers", "ok", None),
    ]
    assert "losses and outputs agree with torch's: met" in done.output
    assert (tmp_path / "models-smoke.png").stat().st_size > 10_000


class Measured:
    """In the place of a process: what a job gave."""

    done: ClassVar[list[str]]

    def __init__(self, job, settings):
        self.done.append(job.id)

    def finish(self, limit):
        return {"status": "ok", "reason": None, "took_s": 1.0}


@pytest.fixture
def measured(monkeypatch):
    """The ids of the jobs for which a process would have been started."""
    Measured.done = []
    monkeypatch.setattr(models, "Process", Measured)
    monkeypatch.setenv("GIT_COMMIT", "first")
    return Measured.done


STOPPED = jobs("vit/eager", "vit/fastlayers", "vit/compile", "vit/backend", "bert/eager")


def test_a_run_is_resumed(tmp_path, measured, monkeypatch):
    path = tmp_path / "r.json"
    found = models.run(STOPPED, path, replace(TINY, time_limit=-1.0), report=str)
    assert (found.rows, found.skipped) == ([], [job.id for job in STOPPED])
    models.run(STOPPED[:4], path, TINY, resume=True, report=str)
    assert measured == [job.id for job in STOPPED[:4]]
    measured.clear()
    found = models.run(STOPPED, path, TINY, resume=True, report=str)
    assert (measured, found.skipped) == (["bert/eager"], [])
    assert [row["model"] for row in found.rows] == ["bert", *["vit"] * 4]
    with pytest.raises(ValueError, match=r"r.json is of a run with seconds 0.0; expected 3.0"):
        models.run([], path, replace(TINY, seconds=3.0), resume=True)


def test_what_a_commit_cannot_change_is_kept_over_commits(tmp_path, measured, monkeypatch):
    path = tmp_path / "r.json"
    models.run(STOPPED, path, TINY, report=str)
    measured.clear()
    monkeypatch.setenv("GIT_COMMIT", "second")
    found = models.run(STOPPED, path, TINY, resume=True, report=str)
    assert measured == ["vit/fastlayers", "vit/backend"]
    commits = {(row["model"], row["mode"]): row["commit"] for row in found.rows}
    assert (commits["vit", "eager"], commits["vit", "fastlayers"]) == ("first", "second")


def test_rows_of_a_throttled_gpu_are_measured_again(tmp_path, measured, monkeypatch):
    path, speeds, lines = tmp_path / "r.json", iter((650.0, 640.0, 300.0, 650.0, 650.0)), []

    def finish(self, limit):
        return {"status": "ok", "reason": None, "took_s": 1.0, "training": {"tflops": next(speeds)}, "inference": {}}

    monkeypatch.setattr(Measured, "finish", finish)
    models.run(STOPPED, path, TINY, report=lines.append)
    assert [line for line in lines if "throttled" in line] == ["vit/compile: 1 s, 300 TFLOPS (throttled)"]
    measured.clear()
    speeds = iter([645.0])
    models.run(STOPPED, path, TINY, resume=True, report=str)
    assert measured == ["vit/compile"]
    measured.clear()
    models.run(STOPPED, path, TINY, resume=True, report=str)
    assert measured == []


def test_other_networks_and_failures_are_measured_again(tmp_path, measured):
    path = tmp_path / "r.json"
    models.run(STOPPED, path, TINY, report=str)
    content = json.loads(path.read_text())
    content["rows"][0]["network"] = "another"
    content["rows"][1]["status"] = "failed"
    path.write_text(json.dumps(content))
    measured.clear()
    models.run(STOPPED, path, TINY, resume=True, report=str)
    assert set(measured) == {f"{row['model']}/{row['mode']}" for row in content["rows"][:2]}


def test_without_a_commit_nothing_is_kept(tmp_path, measured, monkeypatch):
    path = tmp_path / "r.json"
    models.run(STOPPED, path, TINY, report=str)
    known = json.loads(path.read_text())["environment"]
    monkeypatch.setattr(models, "environment", lambda device: known | {"commit": None})
    with pytest.raises(ValueError, match="set GIT_COMMIT"):
        models.run(STOPPED, path, TINY, resume=True, report=str)


def test_a_network_is_told_by_what_is_measured():
    bert = network("bert")
    assert models.fingerprint(replace(bert, title="BERT", gib=1)) == models.fingerprint(bert)
    assert models.fingerprint(replace(bert, batch=1)) != models.fingerprint(bert)
    assert models.fingerprint(replace(bert, options={})) != models.fingerprint(bert)


def test_the_most_useful_rows_come_first():
    found = [job.id for job in models.all_jobs(NETWORKS[:4], MODES)]
    assert found[:5] == [*(f"{n.name}/fastlayers" for n in NETWORKS[:4]), "llama/eager"]
    assert found[8] == "llama/fastlayers_graph"
    assert "llama/liger" in found
    assert "resnet50/liger" not in found
    assert len(found) == len(set(found)) == 4 * len(MODES) - 2  # BERT is masked: no Liger either
    assert {mode for stage in STAGES for mode in stage} == set(MODES)


def test_groups_compile_before_they_are_measured():
    wanted = models.all_jobs(NETWORKS[:6], MODES)
    groups = list(models.grouped(wanted))
    assert [job for group in groups for job in group] == wanted
    assert [len(group) for group in groups[:8]] == [6, *6 * [1], models.GROUP]
    assert all(len(group) <= models.GROUP for group in groups)
    compiling = [group for group in groups if group[0].mode in AHEAD]
    assert [len(group) for group in compiling] == [6, models.GROUP, models.GROUP, 2, models.GROUP, 4]
    assert not any(job.mode == "liger" for group in compiling for job in group)


def test_jobs_that_compile_in_parallel_fit_into_the_gpu(monkeypatch):
    alive, most = [], []

    class Fake:
        def __init__(self, job, settings, compile_only, threads):
            self.job, self.polls = job, 0
            alive.append(self)
            most.append(sum(process.job.network.gib for process in alive))

        def running(self, limit):
            self.polls += 1
            return self.polls < 4

        def finish(self, limit):
            alive.remove(self)
            return {"took_s": 1.0}

    monkeypatch.setattr(models, "Process", Fake)
    monkeypatch.setattr(models.time, "sleep", lambda seconds: None)
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    wanted = [models.Job(network, "compile") for network in NETWORKS]
    reports = []
    found = models.compile_ahead(wanted, models.Settings(), lambda: False, reports.append)
    assert set(found) == {job.id for job in wanted}
    assert max(network.gib for network in NETWORKS) < max(most) <= models.SHARE * 80
    assert len(alive) == 0
    assert f"compiled {len(NETWORKS)} of {len(NETWORKS)} models" in reports[0]
    assert models.compile_ahead(wanted, models.Settings(), lambda: True, reports.append) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_whole_models_need_a_gpu():
    refused = CliRunner().invoke(main, ["models"])
    assert refused.exit_code == 2
    assert "--smoke runs tiny ones" in refused.output
