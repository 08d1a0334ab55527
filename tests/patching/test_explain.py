"""What ``explain`` prints: programs as Python that runs, with the lines that their operations come from."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import fastlayers
from fastlayers.patching.program.tape import Tape
from tests.patching.test_report_regions import Counts


def computed(x):
    y = torch.tanh(x * 2)
    mask = torch.ones(4, 4)  # has no node
    return torch.nn.functional.linear(y, x) * mask


def test_lines_of_both_directions():
    x = torch.randn(4, 4, requires_grad=True)
    for sources in (True, False):
        tape = Tape([x], (), sources)
        with tape:
            out = computed(x)
            with _disable_current_modes():
                dy = torch.ones_like(out)
            tape.protect(dy, "g0")
            torch.autograd.grad(out, x, dy)
        first = computed.__code__.co_firstlineno
        line = f"test_explain.py:{first + 1}: y = torch.tanh(x * 2)"
        last = f"test_explain.py:{first + 3}: return torch.nn.functional.linear(y, x) * mask"
        found = {str(each.function): each.source for each in tape.operations if not each.view}
        expected = {
            "aten.tanh.default": line, "aten.mm.default": last, "aten.tanh_backward.default": line,
        }  # fmt: skip
        assert expected.keys() <= found.keys()
        assert all(found[name] == (expected[name] if sources else None) for name in expected)


# -- what is printed --------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return x + self.out(torch.tanh(self.wide(self.norm(x)))).clamp(-float("inf"), 1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.counts = Mixer(), Counts()

    def forward(self, x):
        return self.counts(self.block(x))


LINE = Mixer.forward.__code__.co_firstlineno
PLACE = f"test_explain.py:{LINE}"


def explained(capsys, net, *inputs):
    with fastlayers.explain(net):
        for x in inputs:
            net(x).sum().backward()
    return capsys.readouterr().out


def test_one_call_is_enough(capsys):
    net, x = fastlayers.patch_model(Net()), torch.randn(2, 8, 16)
    text = explained(capsys, net, x)
    assert f"# Mixer.forward, {PLACE}\n# 2x8x16 float32; training\n# 0 calls ran as a region; of each: launches" in text
    assert "\n    # Mixer, rewritten: tanh = torch.tanh(wide)\n" in text
    assert "# op by op: its forward changes Python state (assigns calls of a Counts)" in text
    region = type(net.block).__fastlayers_region__
    assert len(region.made()) == 1
    # What was recorded in the block runs from then on, and is no more explained.
    assert not region.explained
    net(x)
    assert region.made()[0].calls == 1


def test_a_region_that_was_recorded_before(capsys):
    net, x = fastlayers.patch_model(Net()), torch.randn(2, 8, 16)
    for _ in range(3):
        net(x)
    text = explained(capsys, net, x, x)
    assert f"# Mixer.forward, {PLACE}\n# 2x8x16 float32; training\n# 2 calls ran as a region; of each" in text
    assert "rewritten" not in text  # No tape noted its lines.
    # Others that were recorded before and did not run are not printed.
    text = explained(capsys, net, torch.randn(3, 8, 16))
    assert text.count("def forward") == 1
    assert "# 3x8x16 float32; training\n" in text


@pytest.mark.parametrize("before", [0, 3])
def test_the_program_is_python_that_runs(before, capsys):
    net, x = fastlayers.patch_model(nn.Sequential(Mixer(), Mixer())), torch.randn(2, 8, 16)
    for _ in range(before):
        net(x)
    text = explained(capsys, net, x)
    scope = {}
    exec(text, scope)
    named = {f"self.{name}": t.clone() for name, t in net.state_dict().items()} | {"tensor 0 of the call": x}
    labels = re.findall(r"^    x\d+,  # (.*)$", text, re.MULTILINE)
    with torch.no_grad():
        (out,), kept = scope["forward"](*map(named.get, labels))
        gradients = scope["backward"](torch.ones_like(out), *kept)
    net.zero_grad()
    expected = net(x)
    expected.sum().backward()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    parameters = [p for label in labels for name, p in net.named_parameters() if label == f"self.{name}"]
    for a, p in zip(gradients, parameters, strict=False):
        torch.testing.assert_close(a, p.grad, rtol=0, atol=0)


def test_nothing_is_left_behind_by_an_error(capsys):
    net = fastlayers.patch_model(Net())
    region = type(net.block).__fastlayers_region__
    with pytest.raises(RuntimeError, match="normalized_shape"), fastlayers.explain(net):
        net(torch.randn(2, 8, 15))
    assert not region.explained
    assert capsys.readouterr().out == ""
    with fastlayers.explain(net), fastlayers.explain(net):
        net(torch.randn(2, 8, 16))
    assert not region.explained


def test_no_call(capsys):
    with fastlayers.explain(fastlayers.patch_model(Net())):
        pass
    assert capsys.readouterr().out == "# no call of a module that runs as a region\n"


def test_an_unpatched_model():
    with pytest.raises(
        ValueError, match=r"nothing in this Net is patched: call fastlayers.patch_model\(model\) before"
    ):
        fastlayers.explain(Net()).__enter__()
    with pytest.raises(TypeError, match="got int"):
        fastlayers.explain(3).__enter__()


SOURCE = """from torch import nn

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.inner(x.tanh().sin().cos().exp())
"""


def test_the_place_in_the_name_of_a_kernel(tmp_path, capsys):
    """Of the forward's class, in letters that a kernel's name may have; none of torch's own."""
    path = tmp_path / "modèle-1.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    chain = nn.Sequential(*(nn.Tanh() for _ in range(12)))
    for net, place in ((module.Outer(), "mod_le_1_py_8"), (chain, "")):
        explained(capsys, fastlayers.patch_model(net), torch.randn(2, 16, requires_grad=True))
        (entry,) = type(net).__fastlayers_region__.made()
        assert entry.program.place == place
