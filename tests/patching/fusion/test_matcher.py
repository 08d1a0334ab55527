"""Rows of patterns: what they match, and how what they return becomes a program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from fastlayers.patching.fusion.matcher import Edit, Op, Patterns, Row, step
from fastlayers.patching.program.lint import lint
from fastlayers.patching.program.program import Program, Value, plain_name

aten = torch.ops.aten


def program(*forward, results=("out",), inputs=("x", "y")):
    """A program of steps such as ``("a", "relu", "x")``; ``view_`` writes a view, ``relu_`` over its operand."""
    operations, values = [], {name: torch.ones(2, 3) for name in inputs}
    for made, name, *operands in forward:
        args = [Value(operand) for operand in operands]
        if name == "view":
            values[made] = values[operands[0]].view(6)
            operations.append(step(aten.view.default, *args, (6,), makes=made, view=True))
        else:
            function = getattr(aten, name)
            chosen = function.Tensor if name in ("add", "sub", "div") else function.default
            written = replace(step(chosen, *args, makes=made), effect=name.endswith("_"))
            values[made] = values[operands[0]] if written.effect else torch.ones_like(values[operands[0]])
            operations.append(written)
    given = Program(inputs, operations, results, (), (), [], (), values=values, fake=FakeTensorMode())
    lint(given)
    return given


def names(given):
    lint(given)
    return [plain_name(operation.function) for operation in given.forward]


def once(match):
    """The example of CONTRIBUTING."""
    first = match["first"]
    if match.root.operands != first.makes or match.program.is_written(first.operands[0]):
        return None
    return [step(aten.relu.default, *first.args, makes=match.out)]


without_repeated_relus = Patterns(Row(Op("relu", of=(Op("relu", key="first"),)), once))


def test_what_makes_an_operand():
    relus = ("a", "relu", "x"), ("b", "sin", "a"), ("out", "relu", "a")
    found = without_repeated_relus(program(*relus, results=("b", "out")))
    assert names(found) == ["relu", "sin", "relu"]
    assert found.forward[2].args == (Value("x"),)
    assert names(without_repeated_relus(program(("a", "relu", "x"), ("out", "relu", "a")))) == ["relu"]


@pytest.mark.parametrize(
    "forward",
    [
        [("a", "sin", "x"), ("out", "relu", "a")],
        [("a", "relu", "x"), ("b", "view", "a"), ("out", "relu", "b")],
        [("z", "sin", "x"), ("a", "relu", "z"), ("w", "sin_", "z"), ("out", "relu", "a")],
    ],
    ids=["another operation", "behind a view", "written between"],
)
def test_what_stays(forward):
    given = program(*forward)
    assert without_repeated_relus(given) is given


def taken(*expected):
    def becomes(match):
        assert tuple(plain_name(match[key].function) for key in ("a", "b") if key in match.found) == expected
        return [step(aten.neg.default, match.root.args[0], makes=match.out)]

    return becomes


@pytest.mark.parametrize("operands", [("x", "a"), ("a", "x")])
def test_either_order_of_operands(operands):
    pattern = Op("add.Tensor", key="sum", of=(None, Op("relu", key="a")), commutes=True)
    seen = []
    see = Row(pattern, lambda match: seen.append(match["sum"].operands))
    Patterns(see)(program(("a", "relu", "x"), ("out", "add", *operands)))
    assert seen == [("x", "a")]


def test_the_only_reader():
    pattern = Patterns(Row(Op("sin", read_by=Op("relu", key="a")), taken("relu")))
    assert names(pattern(program(("a", "sin", "x"), ("out", "relu", "a")))) == ["neg", "relu"]
    for others in ({"results": ("a", "out")}, {"results": ("out", "b")}):
        given = program(("a", "sin", "x"), ("b", "cos", "a"), ("out", "relu", "a"), **others)
        assert pattern(given) is given


def test_what_nothing_writes():
    pattern = Patterns(Row(Op("relu", of=(Op("sin", unwritten=True),)), taken()))
    assert names(pattern(program(("a", "sin", "x"), ("out", "relu", "a")))) == ["sin", "neg"]
    given = program(("a", "sin", "x"), ("b", "sin_", "a"), ("out", "relu", "a"))
    assert pattern(given) is given


def test_of_patterns_that_overlap_the_last_one_applies():
    def joined(match):
        negated = step(aten.neg.default, *match["first"].args, makes=match.out)
        return Edit([(match["first"], ()), (match.root, [negated])])

    row = Row(Op("relu", of=(Op("relu", key="first", read_by=Op()),)), joined)
    given = program(("a", "relu", "x"), ("b", "relu", "a"), ("out", "relu", "b"))
    assert names(Patterns(row)(given)) == ["relu", "neg"]
    assert names(Patterns(row, in_turn=True)(given)) == ["neg", "relu"]


def test_operations_that_matches_share():
    def added(match):
        both = match.shared("y", lambda: step(aten.cos.default, Value("y"), makes=match.empty(match.t("y"))))
        return [step(aten.add.Tensor, match.root.args[0], both, makes=match.out)]

    found = Patterns(Row(Op("relu"), added))(program(("a", "sin", "x"), ("b", "relu", "a"), ("out", "relu", "b")))
    assert names(found) == ["sin", "cos", "add", "add"]


def test_rows_in_their_order_and_part():
    rows = Row(Op("sin"), taken(), "backward"), Row(Op("sin"), lambda match: None), Row(Op("sin"), taken())
    assert names(Patterns(*rows)(program(("out", "sin", "x")))) == ["neg"]
    assert names(Patterns(*rows[:2])(program(("out", "sin", "x")))) == ["sin"]
    assert names(Patterns(replace(rows[2], when=lambda match: False))(program(("out", "sin", "x")))) == ["sin"]


def test_other_names():
    row = Row(Op("sin"), lambda match: Edit([(match.root, ())], {match.out: "x"}))
    found = Patterns(row)(program(("a", "sin", "x"), ("out", "relu", "a")))
    assert found.forward[0].args == (Value("x"),)
