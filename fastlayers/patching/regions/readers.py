"""Guards: what a call of a forward reads, as one generated function."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from fastlayers.patching.capture.fake_run import Reads
from fastlayers.patching.capture.recording import exactly, has_number
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.generate import CHILD
from fastlayers.patching.runtime.checks import GLOBAL_HOOKS, HOOKS, OWN_CALLS, calls_are_torchs
from fastlayers.patching.runtime.folded_layers import folded_layer, folded_tensors, may_fold, sources

__all__ = ["Reader"]


class Reader:
    """A function that reads, from a module, the state that Python decides by, and the tensors that it uses.

    Folded weights are among these where there are some: they follow the parameters that they are made of. Those are
    only read where a backward may be differentiated, which needs them to run the forward again.
    """

    def __init__(self, reads: Reads, module: nn.Module) -> None:
        called: dict[Any, str] = {eval(origin, {**reads.namespace, "self": module}): origin for origin in reads.called}
        pairs = folded_pairs(called)
        folded = set() if torch.is_grad_enabled() else {id(t) for pair in pairs for t in sources(*pair)[:-1]}
        held: dict[int, list[str]] = {}
        for expression, t in reads.tensors.items():
            if id(t) not in folded:
                held.setdefault(id(t), []).append(expression)
        used = [expression for expression, *_ in held.values()]
        names = {origin: f"m{i}" for i, origin in enumerate(module_origins(reads))}
        short = {origin: shortened(origin, {o: n for o, n in names.items() if o != origin}) for origin in names}
        lines = ["def read(self):"]
        lines += [f"    {names[origin]} = {short[origin]}" for origin in names]
        tests = ["not calls_are_torchs()", *(f"global_hooks[{i}]" for i in range(len(GLOBAL_HOOKS)))]
        hiding, others = hiding_and_others(reads)
        for origin in reads.called:
            tests += [f"{shortened(origin, names)}.{hook}" for hook in HOOKS]
            tests += own_calls(shortened(origin, names), hiding.get(origin, ()))
        lines.append(f"    if {' or '.join(tests)}:")
        lines.append("        return None")
        also = repeated(held.values())
        if others or also:
            lines.append(f"    if not ({' and '.join(shortened(test, names) for test in (*others, *also))}):")
            lines.append("        raise KeyError")
        if pairs:
            layers = ", ".join(shortened(called[layer], names) for pair in pairs for layer in pair)
            lines += [f"    folded = folded_tensors({layers})", "    if folded is None:", "        raise KeyError"]
        expressions = [*values_of(reads), *types_of(reads), *zeros_of(reads)]
        self._floats = floats_of(reads)
        values = "".join(f"\n        {shortened(expression, names)}," for expression in expressions)
        tensors = "".join(f"\n        {shortened(e, names)}," for e in (*used, *(["*folded"] if pairs else [])))
        lines.append(f"    return ({values}\n    ), ({tensors}\n    )")
        self.source = "\n".join(lines) + "\n"
        self.key = (
            self.source,
            reads.tests_numbers,
            *((name, id(value)) for name, value in sorted(reads.namespace.items())),
        )
        scope = {
            **reads.namespace,
            "calls_are_torchs": calls_are_torchs,
            "copysign": math.copysign,
            "global_hooks": GLOBAL_HOOKS,
            "folded_tensors": folded_tensors,
        }
        exec(compile(self.source, "<fastlayers guard>", "exec"), scope)
        self.read: Callable[[nn.Module], tuple[tuple[Any, ...], tuple[Tensor, ...]] | None] = scope["read"]
        #: For each tensor the expressions of its owners, and the names there; none for a folded weight.
        self.places = [*map(places, held.values()), *([] for _ in (*pairs, *pairs))]
        #: What the tensors are called.
        self.tensors = [*map(readable, used), *("a folded tensor" for _ in (*pairs, *pairs))]
        self._namespace = reads.namespace
        for owner, name in (found for every in self.places for found in every):
            if not isinstance(self._owner(owner, module), dict | list):
                raise Refusal(Reason.READS_STATE, f"the tensor {name!r} of {owner}")
        #: Whether Python asked for the type of a number: a symbol in place of a size would be none.
        self.tests_numbers = reads.tests_numbers
        #: How many norms are folded.
        self.folds = len(pairs)

    def _owner(self, expression: str, module: nn.Module) -> Any:
        """What holds a tensor; None if that has no place for others."""
        try:
            return eval(expression, {**self._namespace, "self": module})
        except AttributeError:  # a closure
            return None

    def exact(self, values: tuple[Any, ...]) -> Any:
        """What tells containers with floats apart that are equal; None if there are none."""
        return [exactly(values[i]) for i in self._floats] or None

    @contextmanager
    def replaced(self, module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the forward of a module read other tensors."""
        chosen = [(*found, t) for every, t in zip(self.places, tensors, strict=True) for found in every]
        changes = [(self._owner(owner, module), name, t) for owner, name, t in chosen]
        before = [(owner, name, owner[name]) for owner, name, _ in changes]
        try:
            for owner, name, t in changes:
                if isinstance(owner[name], nn.Parameter):  # A forward may ask.
                    t._is_param = True  # type: ignore[attr-defined]
                owner[name] = t
            yield
        finally:
            for owner, name, t in before:
                owner[name] = t


#: A test that a module has no such attribute of its own.
HIDES = re.compile(r"'(\w+)' not in (self.*)\.__dict__")
#: What :func:`types_of` and :func:`zeros_of` tell apart in less time.
NUMBERS = (bool, int, float)


def hiding_and_others(reads: Reads) -> tuple[dict[str, list[str]], list[str]]:
    """For each module that is called the names that must not be in it, which are asked for at once, since each look
    takes 30 ns; and the other tests."""
    hiding: dict[str, list[str]] = {}
    for match in map(HIDES.fullmatch, reads.tests):
        if match is not None and match[2] in reads.called:
            hiding.setdefault(match[2], []).append(match[1])
    return hiding, [test for test in reads.tests if (m := HIDES.fullmatch(test)) is None or m[2] not in hiding]


def own_calls(expression: str, hidden: Iterable[str]) -> list[str]:
    """The tests, of which one is true if a module has a call of its own, or an attribute that hides a parameter."""
    first, *others = (*OWN_CALLS, *hidden)
    return [f"{first!r} in (own := {expression}.__dict__)", *(f"{name!r} in own" for name in others)]


def repeated(held: Iterable[list[str]]) -> list[str]:
    """The tests that the expressions of a tensor still give one tensor."""
    return [f"{other} is {expression}" for expression, *others in held for other in others]


def values_of(reads: Reads) -> list[str]:
    return list(reads.values)


# 1, 1.0 and True are equal, and so are 0.0 and -0.0, but a forward may tell them apart.


def types_of(reads: Reads) -> list[str]:
    typed = {test.partition(" is ")[0] for test in reads.tests}
    types = [f"type({e})" for e, value in reads.values.items() if isinstance(value, Number) and is_assigned(e)]
    return [each for each in types if each not in typed]


def zeros_of(reads: Reads) -> list[str]:
    return [f"copysign(1.0, {e})" for e, value in reads.values.items() if type(value) is float and value == 0]


def floats_of(reads: Reads) -> list[int]:
    """The numbers of the values that :func:`exactly` has to compare."""
    values = enumerate(reads.values.items())  # tuple(...) of a list or a dict
    return [i for i, (e, v) in values if type(v) not in NUMBERS and has_number(v, integers=e.startswith("tuple("))]


def is_assigned(expression: str) -> bool:
    """Whether an expression names something that Python code assigns. ``Module.train`` tests what it is given."""
    return not expression.endswith(".training") and "(" not in expression and " is " not in expression


def readable(expression: str) -> str:
    """An expression as a user would write it."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^'\\]*)'\]", r".\1", expression)


def folded_pairs(called: Collection[Any]) -> list[tuple[Any, Any]]:
    """The layers and norms among these modules that use folded weights."""
    pairs = [(folded_layer(norm), norm) for norm in called]
    return [(layer, norm) for layer, norm in pairs if layer is not None and layer in called and may_fold(layer, norm)]


def module_origins(reads: Reads) -> list[str]:
    """The expressions of the submodules among what was read, owners first."""
    texts = (*reads.values, *reads.tests, *reads.called, *reads.tensors)
    found = {match.group() for text in texts for match in CHILD.finditer(text)}
    return sorted(found, key=lambda origin: (origin.count("._modules["), origin))


def shortened(expression: str, names: dict[str, str]) -> str:
    """An expression with variables in place of submodules."""
    return CHILD.sub(lambda match: longest(match.group(), names), expression)


def longest(origin: str, names: dict[str, str]) -> str:
    start = origin
    while start not in names:
        if start == "self":
            return origin
        start = start[: start.rindex("._modules[")]
    return names[start] + origin[len(start) :]


def places(expressions: Sequence[str]) -> list[tuple[str, Any]]:
    """For each way to a tensor the expression of the dict or list that holds it, and its key there."""
    found: list[tuple[str, Any]] = []
    for expression in expressions:
        owner, _, name = expression.rpartition(".")
        if match := re.fullmatch(r"(.*\._(?:parameters|buffers))\['([^'\\]*)'\]", expression):
            found.append((match.group(1), match.group(2)))
        elif match := re.fullmatch(r"(self.*)\[(\d+)\]", expression):
            found.append((match.group(1), int(match.group(2))))
        elif name.isidentifier():
            found.append((f"{owner}.__dict__", name))
        else:
            raise Refusal(Reason.READS_STATE, f"the tensor {expression}")
    return found
