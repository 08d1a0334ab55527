"""The table of the corpus, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from corpus.check import Entry

__all__ = ["table"]

HEAD = """\
# The corpus

Written by `make test-corpus`. For each of these models, at a small size and with random weights: outputs, gradients and
buffers of the patched model equal those of the unpatched one in training and in eval, its state-dict keys are the same,
`deepcopy` gives a patched model and `pickle` an unpatched one that compute the same to the bit, and after
`unpatch_model` it computes the same to the bit as before.

*fused* counts places by rule; *left* are places that look fusable and are not, by reason; *not read* are forwards that
cannot be recorded, by reason, whatever is in them.
"""


def table(entries: list[Entry]) -> str:
    lines = [HEAD, versions(), ""]
    for library in dict.fromkeys(entry.library for entry in entries):
        group = [entry for entry in entries if entry.library == library]
        lines += [f"## {library}", "", summary(group), ""]
        lines += ["| model | modules | patched | fused | left | not read |", "|---|---:|---:|---|---|---|"]
        lines += [row(entry) for entry in group]
        lines.append("")
    return "\n".join(lines)


def versions() -> str:
    found = [f"torch {torch.__version__}"]
    for library in ("torchvision", "timm", "transformers"):
        found.append(f"{library} {__import__(library).__version__}")
    return ", ".join(found) + "."


def summary(entries: list[Entry]) -> str:
    fused, left = (sum((Counter(getattr(e, kind)) for e in entries), Counter()).total() for kind in ("fused", "left"))
    some = sum(bool(entry.fused) for entry in entries)
    wrong = [entry.name for entry in entries if entry.problems]
    text = f"{len(entries)} models, {some} with something fused; {fused} of {fused + left} places fused"
    return f"{text}; WRONG: {', '.join(wrong)}" if wrong else f"{text}; none errs or differs."


def row(entry: Entry) -> str:
    cells = (entry.name.partition(":")[2], str(entry.modules), str(entry.patched))
    return f"| {' | '.join((*cells, *map(counted, (entry.fused, entry.left, entry.unread))))} |"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(item(*pair) for pair in by_number(counts.items()))


def by_number(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(items, key=lambda pair: (-pair[1], pair[0]))


def item(name: str, count: int) -> str:
    return f"{count} {name}"
