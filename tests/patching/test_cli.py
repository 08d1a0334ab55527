"""python -m fastlayers scan and verify."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from fastlayers import backends, cli
from fastlayers.patching.libraries.targets import TargetError, default_inputs, load_target, random_inputs

TARGET = f"{__name__}:Block"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.fc(x) + x)


class Nested:
    block = Block()


def not_a_model():
    return 3


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(cli.console, "width", 200)

    def run(*arguments, status=0):
        """What a command prints that ends with this status."""
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == status, result.output
        return result.output

    return run


def test_scan(run):
    output = run("scan", TARGET)
    assert "FusedBlock" in output
    assert "add_relu" in output


def test_scan_as_json_and_markdown(run):
    data = json.loads(run("scan", TARGET, "--format", "json"))
    assert data["counts"] == {"add_relu": 1, "Linear": 1}
    assert "| (model) | Block | FusedBlock | add_relu |" in run("scan", TARGET, "--format", "markdown")


def test_verify(run):
    output = run("verify", TARGET, "--input", "3,4")
    assert "equal (2 modules patched, 4 tensors compared, training mode)" in output
    assert "eval mode" in output
    assert "| output |" in run("verify", TARGET, "--input", "3,4", "--format", "markdown")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("verify", TARGET, "--input", "3,5"), 1, "unpatched and in training mode, fails on random inputs of (3, 5)"),
        (("bench", TARGET, "--input", "3,5"), 1, "in training mode, fails on random inputs of (3, 5); see --input"),
        (("scan", TARGET, "--input", "256,5"), 1, "fails on random inputs of (256, 5); see --input"),
        (("verify", TARGET, "--input", "a,b"), 2, "expected sizes such as 2,3,224,224, got a,b"),
        (
            ("verify", f"{__name__}:Named", "--input", "2,3", "--input", "scores=2,3,5"), 2,
            "expected a name for every input or for none, got 2,3 scores=2,3,5",
        ),
        (("scan", TARGET, "--tiny"), 2, "only a model of transformers has a configuration to make tiny"),
    ],
)  # fmt: skip
def test_what_a_command_refuses(run, arguments, status, message):
    output = run(*arguments, status=status)
    assert message in " ".join(output.split())
    assert "Traceback" not in output


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_where_nothing_is_patched_a_command_warns_once(run, command):
    output = run(command, "torch.nn:Identity", "--input", "3,5")
    assert output.count("Warning: nothing in Identity was patched") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it serves")
def test_verify_with_a_forced_backend_that_is_absent(run):
    backends._force("cuda")
    output = run("verify", TARGET, "--input", "3,4", status=1)
    assert "Error: backend 'cuda' was forced, but cannot serve: " in output


def test_verify_fails_where_they_differ(run, monkeypatch):
    from fastlayers import functional

    monkeypatch.setattr(functional, "add_relu", lambda x, y: torch.relu(x + y) * 1.01)
    output = run("verify", TARGET, "--input", "3,4", status=1)
    assert "DIFFER" in output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("resnet50", "'resnet50' is not the name of a model; expected timm:NAME"),
        ("no.such.module:build", "cannot import no.such.module"),
        (f"{__name__}:Nothing", "has no Nothing"),
        (f"{__name__}:not_a_model", "gives a int; expected a torch.nn.Module"),
        (
            "torch.nn:Linear",
            r"torch.nn:Linear cannot be called without arguments \(missing .*'in_features'\): name a function",
        ),
        (":x", "is not the name of a model"),
    ],
)
def test_wrong_targets(run, target, message):
    with pytest.raises(TargetError, match=message):
        load_target(target)
    output = run("scan", target, status=2)
    assert "Invalid value for TARGET" in output


def test_targets_and_their_inputs():
    assert isinstance(load_target(TARGET), Block)
    model = load_target(f"{__name__}:Nested.block")
    assert model is Nested.block
    assert default_inputs(model) == [(None, (2, 3, 224, 224))]
    model.pretrained_cfg = {"input_size": (3, 99, 99)}
    assert default_inputs(model) == [(None, (2, 3, 99, 99))]
    del model.pretrained_cfg


def test_random_inputs():
    model = nn.Sequential(nn.Embedding(3, 4), nn.Embedding(7, 4))
    args, kwargs = random_inputs(model, [(None, (2, 3))], "cpu", torch.bfloat16)
    assert (args[0].dtype, args[0].shape, kwargs) == (torch.bfloat16, (2, 3), {})
    args, kwargs = random_inputs(model, [("input_ids", (50, 50)), ("mask", (2,)), ("x", (1,))], "cpu")
    assert args == ()
    assert kwargs["input_ids"].unique().tolist() == [0, 1, 2]
    assert kwargs["mask"].tolist() == [1, 1]
    assert kwargs["x"].dtype == torch.float32


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)

    def forward(self, input_ids, *, scores):
        return (self.embedding(input_ids) @ self.embedding.weight.T * 0.5).softmax(-1) * scores


NAMED = ("--input", "input_ids=2,3", "--input", "scores=2,3,5")


def test_inputs_by_name(run):
    run("verify", f"{__name__}:Named", *NAMED)
    run("bench", f"{__name__}:Named", *NAMED, "--eval")


def test_scan_estimates_what_is_saved(run):
    assert "less to move" not in run("scan", TARGET)
    assert "about 16.0 KiB a step less to move" in " ".join(run("scan", TARGET, "--input", "256,4").split())


@pytest.fixture
def _quick(monkeypatch):
    from fastlayers.patching.measure import profile

    monkeypatch.setattr(profile, "SECONDS", 0.0)


@pytest.mark.usefixtures("_quick")
def test_bench(run):
    output = run("bench", TARGET, "--input", "3,4")
    assert "Block, 2 modules patched, forward and backward on " in output
    assert "peak memory" in output
    data = json.loads(run("bench", TARGET, "--input", "3,4", "--eval", "--format", "json"))
    assert not data["training"]
    assert data["after"]["step_ms"] > 0
    assert "| step |" in run("bench", TARGET, "--input", "3,4", "--dtype", "bfloat16", "--format", "markdown")


@pytest.mark.usefixtures("_quick")
def test_bench_draws(run, tmp_path, monkeypatch):
    path = tmp_path / "profile.png"
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    output = run("bench", TARGET, "--input", "3,4", "--plot", str(path), status=1)
    assert "Error: --plot needs matplotlib: pip install matplotlib" in output
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    run("bench", TARGET, "--input", "3,4", "--plot", str(path))
    assert path.exists()


@pytest.mark.parametrize("command", ["scan", "verify", "bench"])
def test_help_says_what_a_target_is(run, command):
    assert "TARGET is timm:NAME, torchvision:NAME, transformers:NAME" in " ".join(run(command, "--help").split())


# -- libraries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_libraries_that_are_not_installed(monkeypatch, run, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(TargetError, match=rf"{library} cannot be imported .* pip install {library}"):
        load_target(f"{library}:anything")
    output = run("bench", f"{library}:anything", status=2)
    assert f"pip install {library}" in " ".join(output.split())


@pytest.mark.parametrize("target", ["timm:resnet18", "torchvision:resnet18"])
def test_scan_of_a_vision_model(run, target):
    pytest.importorskip(target.partition(":")[0])
    output = run("scan", target, "--format", "json", "--input", "2,3,64,64")
    data = json.loads(output)
    assert data["counts"] == {
        "conv_batch_norm_act": 9, "conv_batch_norm_add_act": 8, "conv_batch_norm": 3, "MaxPool2d": 1, "Linear": 1,
    }  # fmt: skip
    assert data["bytes_saved"] > 2**20


@pytest.mark.parametrize("target", ["timm:resnet1", "torchvision:resnet1", "transformers:bort"])
def test_a_library_without_such_a_model(run, target):
    library = target.partition(":")[0]
    pytest.importorskip(library)
    output = run("scan", target, status=2)
    assert f"{library} has no such model: " in output


def test_transformers_says_what_is_close():
    pytest.importorskip("transformers")
    with pytest.raises(TargetError, match=r"'bort' is not a model type .*did you mean .*bert"):
        load_target("transformers:bort")
    with pytest.raises(TargetError, match="gives no configuration of transformers"):
        load_target("transformers:/nowhere/at/all")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bert", "BertModel"), ("GPT2Config", "GPT2Model"), ("T5ForConditionalGeneration", "T5ForConditionalGeneration")],
)
def test_names_of_transformers(name, kind):
    pytest.importorskip("transformers")
    model = load_target(f"transformers:{name}", tiny=True)
    assert type(model).__name__ == kind
    assert sum(p.numel() for p in model.parameters()) < 10**6
    assert not model.config.use_cache


def test_a_folder_with_a_configuration(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    model = load_target(f"transformers:{tmp_path}", weights=False)
    assert type(model).__name__ == "BertForMaskedLM"
    assert model.config.num_hidden_layers == 1


def test_scan_of_transformers_needs_no_weights(run):
    pytest.importorskip("transformers")
    assert next(load_target("transformers:llama", weights=False).parameters()).is_meta
    output = run("scan", "transformers:llama", "--format", "json")  # 7B parameters
    data = json.loads(output)
    assert data["counts"]["rms_norm (llama)"] == 33  # The layers do the work of their second norms.
    assert data["bytes_saved"] > 2**30
    run("scan", "transformers:bert", "--tiny")  # It has a linear_act.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "LlamaForCausalLM", "t5", "vit", "whisper", "GPT2LMHeadModel", "wav2vec2"])
def test_verify_of_transformers(run, name):
    pytest.importorskip("transformers")
    run("verify", f"transformers:{name}", "--tiny")


@pytest.mark.usefixtures("_quick")
def test_bench_of_transformers(run):
    pytest.importorskip("transformers")
    output = run("bench", "transformers:Qwen2ForCausalLM", "--tiny", "--dtype", "bfloat16")
    assert "matmul" in output
