"""The table of passes, what runs them, and what they may leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fastlayers.patching.fusion import passes
from fastlayers.patching.program.lint import lint
from fastlayers.patching.program.program import Operation, Program, Value
from tests.recorded.programs import PROGRAMS, as_on_an_h100, decode, read, text_of

pytestmark = pytest.mark.cpu_kernels

NAMES = [each.name for each in passes.PASSES]
aten = torch.ops.aten


@pytest.fixture
def program():
    """Of a small network with adapters."""
    return decode(read(PROGRAMS / "llama.jsonl.gz")[0])


@pytest.fixture
def environment(monkeypatch):
    def put(value):
        monkeypatch.setenv("FASTLAYERS_PASSES", value)
        passes.switched_off.cache_clear()

    yield put
    passes.switched_off.cache_clear()


def test_each_pass_comes_after_those_that_it_needs():
    for i, each in enumerate(passes.PASSES):
        assert set(each.after) <= set(NAMES[:i]), each.name


def test_a_pass_is_switched_off(program, environment):
    with as_on_an_h100():
        environment(",".join(f"-{name}" for name in NAMES))
        assert text_of(passes.fused(program)) == text_of(program)
        environment(",".join(f"-{name}" for name in NAMES if name != "kernels"))
        assert "@triton.jit" in text_of(passes.fused(program))


@pytest.mark.parametrize("given", ["-fuse", "kernels", "-"])
def test_an_unknown_pass(given, environment):
    environment(given)
    with pytest.raises(ValueError, match=rf"FASTLAYERS_PASSES has '{given}'; expected some of -numbers, -repetitions"):
        passes.switched_off()


def test_a_pass_that_fails_is_named_and_the_program_before_it_runs(program, environment, monkeypatch):
    def fails(program):
        raise KeyError("v1")

    table = [replace(each, run=fails) if each.name == "specialised" else each for each in passes.PASSES]
    monkeypatch.setattr(passes, "PASSES", table)
    failed = []
    with as_on_an_h100():
        found = passes.fused(program, lambda what, error: failed.append((what, repr(error))))
        with pytest.raises(KeyError):
            passes.fused(program)
        environment(",".join(f"-{name}" for name in NAMES[NAMES.index("specialised") :]))
        assert text_of(found) == text_of(passes.fused(program))
    assert failed == [("the pass specialised", "KeyError('v1')")]


def operation(function, given, made, **facts):
    return Operation(function, tuple(map(Value, given)), {}, (made,), single=True, effect=False, **facts)


SIN, COS = operation(aten.sin.default, ["x"], "y"), operation(aten.cos.default, ["y"], "z")
KNOWN = dict.fromkeys("xyzg", torch.ones(1))
RIGHT = Program(("x",), [SIN, COS], ("z",), ("y",), ("g",), [operation(aten.mul.Tensor, ["g", "y"], "d")], ("d",),
                values=KNOWN | {"d": torch.ones(1)})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": [COS, SIN]}, r"operation 0 of the forward, aten.cos.default, reads \['y'\]"),
        ({"forward": [SIN, SIN, COS]}, r"operation 1 of the forward, aten.sin.default, makes \['y'\] again"),
        ({"results": ("w",)}, r"returns or keeps \['w'\]"),
        ({"kept": ()}, r"operation 0 of the backward, aten.mul.Tensor, reads \['y'\]"),
        ({"wanted": ("z",)}, r"the backward returns \['z'\]"),
        ({"values": KNOWN}, r"operation 0 of the backward, aten.mul.Tensor, makes \['d'\], of unknown geometry"),
    ],
)
def test_what_no_pass_may_leave(changes, message):
    lint(RIGHT)
    with pytest.raises(ValueError, match=message):
        lint(replace(RIGHT, **changes))
