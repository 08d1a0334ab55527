"""Guards: what a call of a forward reads, as one generated function."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastlayers.patching.capture.reads import Reads
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.rewrite.generate import CHILD
from fastlayers.patching.runtime.checks import GLOBAL_HOOKS, HOOKS
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
        used = [expression for expression, t in reads.tensors.items() if id(t) not in folded]
        names = {origin: f"m{i}" for i, origin in enumerate(module_origins(reads))}
        short = {origin: shortened(origin, {o: n for o, n in names.items() if o != origin}) for origin in names}
        lines = ["def read(self):"]
        lines += [f"    {names[origin]} = {short[origin]}" for origin in names]
        tests = [*(f"global_hooks[{i}]" for i in range(len(GLOBAL_HOOKS)))]
        for origin in reads.called:
            tests += [f"{shortened(origin, names)}.{hook}" for hook in HOOKS]
            tests.append(f"'forward' in {shortened(origin, names)}.__dict__")
        lines.append(f"    if {' or '.join(tests)}:")
        lines.append("        return None")
        if reads.tests:
            lines.append(f"    if not ({' and '.join(shortened(test, names) for test in reads.tests)}):")
            lines.append("        raise KeyError")
        if pairs:
            layers = ", ".join(shortened(called[layer], names) for pair in pairs for layer in pair)
            lines += [f"    folded = folded_tensors({layers})", "    if folded is None:", "        raise KeyError"]
        values = "".join(f"\n        {shortened(expression, names)}," for expression in reads.values)
        tensors = "".join(f"\n        {shortened(e, names)}," for e in (*used, *(["*folded"] if pairs else [])))
        lines.append(f"    return ({values}\n    ), ({tensors}\n    )")
        self.source = "\n".join(lines) + "\n"
        self.key = (self.source, *((name, id(value)) for name, value in sorted(reads.namespace.items())))
        scope = {**reads.namespace, "global_hooks": GLOBAL_HOOKS, "folded_tensors": folded_tensors}
        exec(compile(self.source, "<fastlayers guard>", "exec"), scope)
        self.read: Callable[[nn.Module], tuple[tuple[Any, ...], tuple[Tensor, ...]] | None] = scope["read"]
        #: The expressions of the owners of the tensors, and the names there; None for a folded weight.
        self.places = [*map(place, used), *(None for _ in (*pairs, *pairs))]
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


def place(expression: str) -> tuple[str, str]:
    """The expression of the dict that holds a tensor, and its key there."""
    match = re.fullmatch(r"(.*\._(?:parameters|buffers))\['([^'\\]*)'\]", expression)
    if match:
        return match.group(1), match.group(2)
    owner, _, name = expression.rpartition(".")
    if not name.isidentifier():
        raise Refusal(Reason.READS_STATE, f"the tensor {expression}")
    return f"{owner}.__dict__", name
