"""Guards: what a call of a forward reads, as one generated function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fastlayers.patching.capture.reads import Reads
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.generate import CHILD
from fastlayers.patching.runtime.checks import GLOBAL_HOOKS, HOOKS
from fastlayers.patching.runtime.folded_layers import folded_layer, folded_tensors, may_fold

__all__ = ["Reader"]


class Reader:
    """A function that reads, from a module, the state that Python decides by, and the tensors that it uses.

    Folded weights are among these where there are some: they follow the parameters that they are made of.
    """

    def __init__(self, reads: Reads, module: nn.Module) -> None:
        pairs = folded_pairs(reads, module)
        names = {origin: f"m{i}" for i, origin in enumerate(module_origins(reads))}
        short = {origin: shortened(origin, {o: n for o, n in names.items() if o != origin}) for origin in names}
        lines = ["def read(self):"]
        lines += [f"    {names[origin]} = {short[origin]}" for origin in names]
        tests = [*(f"global_hooks[{i}]" for i in range(len(GLOBAL_HOOKS)))]
        for called in reads.called:
            tests += [f"{shortened(called, names)}.{hook}" for hook in HOOKS]
            tests.append(f"'forward' in {shortened(called, names)}.__dict__")
        lines.append(f"    if {' or '.join(tests)}:")
        lines.append("        return None")
        layers = ", ".join(origin for pair in pairs for origin in pair)
        conditions = [*reads.tests, *([f"may_fold({layers})"] if pairs else [])]
        if conditions:
            lines.append(f"    if not ({' and '.join(shortened(test, names) for test in conditions)}):")
            lines.append("        raise KeyError")
        values = "".join(f"\n        {shortened(expression, names)}," for expression in reads.values)
        used = [*reads.tensors, *([f"*folded_tensors({layers})"] if pairs else [])]
        tensors = "".join(f"\n        {shortened(expression, names)}," for expression in used)
        lines.append(f"    return ({values}\n    ), ({tensors}\n    )")
        self.source = "\n".join(lines) + "\n"
        self.key = (self.source, *((name, id(value)) for name, value in sorted(reads.namespace.items())))
        own = {"global_hooks": GLOBAL_HOOKS, "may_fold": may_fold, "folded_tensors": folded_tensors}
        scope = {**reads.namespace, **own}
        exec(compile(self.source, "<fastlayers guard>", "exec"), scope)
        self.read: Callable[[nn.Module], tuple[tuple[Any, ...], tuple[Tensor, ...]] | None] = scope["read"]
        #: The expressions of the owners of the tensors, and the names there; None for a folded weight.
        self.places = [*map(place, reads.tensors), *(None for _ in (*pairs, *pairs))]
        #: How many norms are folded.
        self.folds = len(pairs)

    @contextmanager
    def replaced(self, module: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the forward of a module read other tensors."""
        chosen = [(*found, t) for found, t in zip(self.places, tensors, strict=True) if found is not None]
        changes = [(eval(owner, {"self": module}), name, t) for owner, name, t in chosen]
        before = [(owner, name, owner[name]) for owner, name, _ in changes]
        try:
            for owner, name, t in changes:
                owner[name] = t
            yield
        finally:
            for owner, name, t in before:
                owner[name] = t


def folded_pairs(reads: Reads, module: nn.Module) -> list[tuple[str, str]]:
    """The expressions of the layers and norms that are called and that use folded weights."""
    called: dict[Any, str] = {eval(origin, {**reads.namespace, "self": module}): origin for origin in reads.called}
    pairs = [(folded_layer(norm), norm) for norm in called]
    used = [(layer, norm) for layer, norm in pairs if layer is not None and layer in called and may_fold(layer, norm)]
    return [(called[layer], called[norm]) for layer, norm in used]


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


def place(expression: str) -> tuple[str, str]:
    """The expression of the dict that holds a tensor, and its key there."""
    match = re.fullmatch(r"(.*\._(?:parameters|buffers))\['([^'\\]*)'\]", expression)
    if match:
        return match.group(1), match.group(2)
    owner, _, name = expression.rpartition(".")
    if not name.isidentifier():
        raise Refusal(Reason.READS_STATE, f"the tensor {expression}")
    return f"{owner}.__dict__", name
