"""python -m fastlayers scan and verify."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from fastlayers import backends, cli
from fastlayers.patching.targets import TargetError, default_input, load_target

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
    assert data["counts"] == {"add_relu": 1}
    assert "| (model) | Block | FusedBlock | add_relu |" in run("scan", TARGET, "--format", "markdown").output


def test_verify(run):
    result = run("verify", TARGET, "--input", "3,4")
    assert result.exit_code == 0, result.output
    assert "equal (1 modules patched, 4 tensors compared, training mode)" in result.output
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
        ("resnet50", "'resnet50' names no model; expected timm:NAME"),
        ("no.such.module:build", "cannot import no.such.module"),
        (f"{__name__}:Nothing", "has no Nothing"),
        (f"{__name__}:not_a_model", "gives a int; expected a torch.nn.Module"),
        (":x", "names no model"),
    ],
)
def test_wrong_targets(run, target, message):
    with pytest.raises(TargetError, match=message):
        load_target(target)
    result = run("scan", target)
    assert result.exit_code == 2
    assert "Invalid value for TARGET" in result.output


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(TargetError, match=r"timm cannot be imported .* pip install timm"):
        load_target("timm:resnet18")


def test_wrong_input(run):
    result = run("verify", TARGET, "--input", "a,b")
    assert result.exit_code == 2
    assert "expected sizes such as 2,3,224,224, got a,b" in result.output


def test_targets_and_their_inputs():
    assert isinstance(load_target(TARGET), Block)
    model = load_target(f"{__name__}:Nested.block")
    assert model is Nested.block
    assert default_input(model) == (2, 3, 224, 224)
    model.pretrained_cfg = {"input_size": (3, 99, 99)}
    assert default_input(model) == (2, 3, 99, 99)
    del model.pretrained_cfg
