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
    return lambda *arguments: CliRunner().invoke(cli.main, arguments)


def test_scan(run):
    result = run("scan", TARGET)
    assert result.exit_code == 0, result.output
    assert "FusedBlock" in result.output
    assert "add_relu" in result.output


def test_scan_as_json_and_markdown(run):
    data = json.loads(run("scan", TARGET, "--format", "json").output)
    assert data["counts"] == {"add_relu": 1, "Linear": 1}
    assert "| (model) | Block | FusedBlock | add_relu |" in run("scan", TARGET, "--format", "markdown").output


def test_verify(run):
    result = run("verify", TARGET, "--input", "3,4")
    assert result.exit_code == 0, result.output
    assert "equal (2 modules patched, 4 tensors compared, training mode)" in result.output
    assert "eval mode" in result.output
    assert "| output |" in run("verify", TARGET, "--input", "3,4", "--format", "markdown").output


def test_verify_says_what_the_model_does_not_take(run):
    result = run("verify", TARGET, "--input", "3,5")
    assert result.exit_code == 1
    assert "Error: the model itself, unpatched and in training mode, fails on random inputs of (3, 5)" in result.output
    assert "Traceback" not in result.output


def test_verify_where_nothing_is_patched_warns_once(run):
    result = run("verify", "torch.nn:Identity", "--input", "3,5")
    assert result.exit_code == 0, result.output
    assert result.output.count("Warning: nothing in Identity was patched") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it serves")
def test_verify_with_a_forced_backend_that_is_absent(run):
    backends._force("cuda")
    result = run("verify", TARGET, "--input", "3,4")
    assert result.exit_code == 1
    assert "Error: backend 'cuda' was forced, but cannot serve: " in result.output


def test_verify_fails_where_they_differ(run, monkeypatch):
    from fastlayers import functional

    monkeypatch.setattr(functional, "add_relu", lambda x, y: torch.relu(x + y) * 1.01)
    result = run("verify", TARGET, "--input", "3,4")
    assert result.exit_code == 1, result.output
    assert "DIFFER" in result.output


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
    result = run("scan", target)
    assert result.exit_code == 2
    assert "Invalid value for TARGET" in result.output


def test_wrong_input(run):
    result = run("verify", TARGET, "--input", "a,b")
    assert result.exit_code == 2
    assert "expected sizes such as 2,3,224,224, got a,b" in result.output


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
    result = run("verify", f"{__name__}:Named", *NAMED)
    assert result.exit_code == 0, result.output
    assert run("bench", f"{__name__}:Named", *NAMED, "--eval").exit_code == 0
    wrong = run("verify", f"{__name__}:Named", "--input", "2,3", "--input", "scores=2,3,5")
    assert wrong.exit_code == 2
    assert "expected a name for every input or for none, got 2,3 scores=2,3,5" in wrong.output


def test_scan_estimates_what_is_saved(run):
    assert "less to move" not in run("scan", TARGET).output
    result = run("scan", TARGET, "--input", "256,4")
    assert "about 16.0 KiB a step less to move" in " ".join(result.output.split())
    result = run("scan", TARGET, "--input", "256,5")
    assert result.exit_code == 1
    assert "fails on random inputs of (256, 5); see --input" in result.output


@pytest.fixture
def _quick(monkeypatch):
    from fastlayers.patching.measure import profile

    monkeypatch.setattr(profile, "SECONDS", 0.0)


@pytest.mark.usefixtures("_quick")
def test_bench(run):
    result = run("bench", TARGET, "--input", "3,4")
    assert result.exit_code == 0, result.output
    assert "Block, 2 modules patched, forward and backward on " in result.output
    assert "peak memory" in result.output
    data = json.loads(run("bench", TARGET, "--input", "3,4", "--eval", "--format", "json").output)
    assert not data["training"]
    assert data["after"]["step_ms"] > 0
    assert "| step |" in run("bench", TARGET, "--input", "3,4", "--dtype", "bfloat16", "--format", "markdown").output


@pytest.mark.usefixtures("_quick")
def test_bench_draws(run, tmp_path, monkeypatch):
    path = tmp_path / "profile.png"
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    result = run("bench", TARGET, "--input", "3,4", "--plot", str(path))
    assert result.exit_code == 1
    assert "Error: --plot needs matplotlib: pip install matplotlib" in result.output
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert run("bench", TARGET, "--input", "3,4", "--plot", str(path)).exit_code == 0
    assert path.exists()


def test_bench_says_what_the_model_does_not_take(run):
    result = run("bench", TARGET, "--input", "3,5")
    assert result.exit_code == 1
    assert "in training mode, fails on random inputs of (3, 5); see --input" in result.output


@pytest.mark.usefixtures("_quick")
def test_bench_warns_where_nothing_is_patched(run):
    assert run("bench", "torch.nn:Identity", "--input", "3,5").output.count("Warning: nothing in Identity") == 1


@pytest.mark.parametrize("command", ["scan", "verify", "bench"])
def test_help_says_what_a_target_is(run, command):
    assert "TARGET is timm:NAME, torchvision:NAME, transformers:NAME" in " ".join(run(command, "--help").output.split())


def test_tiny_is_for_transformers(run):
    result = run("scan", TARGET, "--tiny")
    assert result.exit_code == 2
    assert "only a model of transformers has a configuration to make tiny" in " ".join(result.output.split())


# -- libraries --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_libraries_that_are_not_installed(monkeypatch, run, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(TargetError, match=rf"{library} cannot be imported .* pip install {library}"):
        load_target(f"{library}:anything")
    result = run("bench", f"{library}:anything")
    assert result.exit_code == 2
    assert f"pip install {library}" in " ".join(result.output.split())


@pytest.mark.parametrize("target", ["timm:resnet18", "torchvision:resnet18"])
def test_scan_of_a_vision_model(run, target):
    pytest.importorskip(target.partition(":")[0])
    result = run("scan", target, "--format", "json", "--input", "2,3,64,64")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["counts"] == {
        "conv_batch_norm_act": 9, "conv_batch_norm_add_act": 8, "conv_batch_norm": 3, "MaxPool2d": 1, "Linear": 1,
    }  # fmt: skip
    assert data["bytes_saved"] > 2**20


@pytest.mark.parametrize("target", ["timm:resnet1", "torchvision:resnet1", "transformers:bort"])
def test_a_library_without_such_a_model(run, target):
    library = target.partition(":")[0]
    pytest.importorskip(library)
    result = run("scan", target)
    assert result.exit_code == 2
    assert f"{library} has no such model: " in result.output


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
    result = run("scan", "transformers:llama", "--format", "json")  # 7B parameters
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["counts"]["rms_norm (llama)"] == 33  # The layers do the work of their second norms.
    assert data["bytes_saved"] > 2**30
    assert run("scan", "transformers:bert", "--tiny").exit_code == 0  # It has a linear_act.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "LlamaForCausalLM", "t5", "vit", "whisper", "GPT2LMHeadModel", "wav2vec2"])
def test_verify_of_transformers(run, name):
    pytest.importorskip("transformers")
    result = run("verify", f"transformers:{name}", "--tiny")
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("_quick")
def test_bench_of_transformers(run):
    pytest.importorskip("transformers")
    result = run("bench", "transformers:Qwen2ForCausalLM", "--tiny", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "matmul" in result.output
