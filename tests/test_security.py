"""What comes from a file or a configuration is data: not unpickled, not executed, not a part of generated source."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers

PACKAGE = Path(fastlayers.__file__).parent
#: Names that would run code if generated source had them as they are.
HOSTILE = ["x'] + run() + ['", 'x"] + run() + ["', "x\\'] + run() #", "x\n    run()\n", "x']; run(); self['", "{run()}"]
ran = []


def run():
    ran.append(True)
    return ""


class Named(nn.Module):
    """With a child, a parameter, a buffer and settings whose names and values are anybody's."""

    def __init__(self, name):
        super().__init__()
        self.name, self.settings = name, {name: 2.0, "act": name}
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
        self.register_parameter(name, nn.Parameter(torch.ones(8)))
        self.register_buffer(f"of {name}", torch.ones(8))

    def forward(self, x):
        x = self.layers["norm"](F.gelu(self.layers[self.name](x)) + x)
        return x * getattr(self, self.name) + getattr(self, f"of {self.name}") * self.settings[self.name]


class Plain(nn.Module):
    """With an attribute that is not registered."""

    def __init__(self, name):
        super().__init__()
        self.name, self.norm, self.fc = name, nn.LayerNorm(8), nn.Linear(8, 8)
        setattr(self, name, 2.0)

    def forward(self, x):
        return self.fc(F.gelu(self.norm(x)) + x) * getattr(self, self.name)


@pytest.mark.parametrize("kind", [Named, Plain])
@pytest.mark.parametrize("name", [*HOSTILE, "class", "x - y", "plain"])
def test_names_and_settings_are_data(name, kind, monkeypatch):
    monkeypatch.setattr("builtins.run", run, raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(kind(name), kind(name))
    x = torch.randn(3, 8)
    expected = model(x)
    fastlayers.patch_model(model)
    for _ in range(4):
        torch.testing.assert_close(model(x), expected)
    str(fastlayers.patch_report(model))
    assert fastlayers.verify_patch(model, x)
    assert not ran


def test_no_pickle_is_loaded():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "joblib.load", "numpy.load"), file
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not {"pickle", "dill", "cloudpickle", "marshal", "shelve"} & names, file


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["info"], ["scan", "mine:build"]], ids=" ".join)
def test_the_command_imports_only_what_it_is_told_to(tmp_path, arguments):
    """A module of the current directory is not imported, unless the target names it."""
    (tmp_path / "timm.py").write_text("print('imported timm')")
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Softmax(-1)\n")
    command = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "fastlayers"]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}  # It may not be installed.
    found = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "imported" not in found.stdout
