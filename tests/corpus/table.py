"""The table of the corpus, in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

from tests.corpus.check import Entry
from tests.corpus.models import PACKAGES, families, families_left_out

__all__ = ["table"]

HEAD = """\
# The corpus

Written by `make test-corpus`. For each of these models, at a small size and with random weights: outputs, gradients and
buffers of the patched model equal those of the unpatched one in training and in eval, its state-dict keys are the same,
`deepcopy` gives a patched model and `pickle` an unpatched one that compute the same to the bit, and after
`unpatch_model` it computes the same to the bit as before. Models of transformers that take labels are given some, and
their losses compared.

*fused* counts places by rule; *left* are places that look fusable to a rule and are not, by reason; *not read* are
forwards that cannot be recorded as a whole, by reason, whatever is in them: parts of them may be fused all the same.

*sites* are the norms, activations, softmaxes, losses, and sums and products of tensors of a forward in eval that are
next to another one, so that a kernel could do both. Of these *rules* fuse most; *in regions* kernels are generated for
the others on a GPU; *elsewhere* they stay as they are.
"""
FAMILIES_HEAD = """\
## Families

All that is left alone, besides layers that no rule looks for and forwards with nothing to fuse, in the models of these
families: the class, the reason, and how often. Most are forwards that cannot be recorded as a whole and have nothing
that a rule looks for in their parts.
"""
#: The families of which every place is fused, or there is a reason why not; names as fnmatch has them.
FAMILIES = {
    "ResNet": ("*:resnet*", "*:resnext*", "*:wide_resnet*", "timm:test_resnet"),
    "ConvNeXt": ("*:convnext*", "timm:test_convnext"),
    "ViT": ("torchvision:vit_*", "timm:vit_*", "timm:test_vit*", "transformers:vit", "transformers:vit[/_]*"),
    "EfficientNet": ("*:efficientnet*", "timm:test_efficientnet"),
    "Swin": ("*:swin*",),
    "BERT": ("transformers:bert*", "transformers:roberta*", "transformers:distilbert"),
    "GPT-2": ("transformers:gpt2*", "transformers:gpt-sw3"),
    "Llama": ("transformers:llama*",),
    "Qwen": ("transformers:qwen*", "timm:qwen*"),
    "T5": ("transformers:*t5", "transformers:*t5/*", "transformers:switch_transformers"),
}


def table(entries: list[Entry]) -> str:
    libraries = list(dict.fromkeys(entry.library for entry in entries))
    lines = [HEAD, versions(), ""]
    lines += [
        "| | models | err or differ | something fused | places fused | sites | by rules | in regions | elsewhere |",
        f"|---|{'---:|' * 8}",
        *(bars(name, [e for e in entries if e.library == name]) for name in libraries),
    ]
    if libraries == [PACKAGES]:
        packages = dict.fromkeys(entry.name.partition(":")[0] for entry in entries)
        lines += [bars(name, [e for e in entries if e.name.startswith(f"{name}:")]) for name in packages]
    else:
        lines += [bars("all", entries), "", FAMILIES_HEAD, "| family | models | fused | left alone |"]
        lines += ["|---|---:|---:|---|"]
        lines += [family(name, chosen(entries, patterns)) for name, patterns in FAMILIES.items()]
        lines += ["", *left_out()]
    lines.append("")
    for library in libraries:
        group = [entry for entry in entries if entry.library == library]
        lines += [f"## {library}", "", "| model | modules | patched | fused | sites | elsewhere | left | not read |"]
        lines += ["|---|---:|---:|---|---:|---|---|---|", *map(row, group), ""]
    return "\n".join(lines)


def versions() -> str:
    here = Path(__file__).parent
    pinned = (here / "requirements.txt").read_text() + (here / "packages.txt").read_text().partition("# What they")[0]
    names = re.findall(r"^([\w-]+)==", pinned, re.MULTILINE)
    return ", ".join(f"{name} {metadata.version(name)}" for name in names) + "."


def bars(name: str, entries: list[Entry]) -> str:
    fused, left = (sum(sum(getattr(entry, kind).values()) for entry in entries) for kind in ("fused", "left"))
    some = sum(bool(entry.fused) for entry in entries)
    wrong = [entry.name for entry in entries if entry.problems]
    sites, inside, outside = (
        sum(sum(getattr(entry, kind).values()) for entry in entries) for kind in ("sites", "in_regions", "elsewhere")
    )
    outside = min(outside, sites)
    inside = min(inside, sites - outside)  # What is fused has neighbours that the model itself has not.
    parts = (f"{part / sites:.1%}" if sites else "-" for part in (sites - inside - outside, inside, outside))
    cells = (name, len(entries), ", ".join(wrong) or 0, share(some, len(entries)), share(fused, fused + left), sites)
    return f"| {' | '.join(map(str, (*cells, *parts)))} |"


def share(part: int, whole: int) -> str:
    return f"{part} of {whole}, {part / whole:.1%}" if whole else "-"


def chosen(entries: list[Entry], patterns: tuple[str, ...]) -> list[Entry]:
    return [entry for entry in entries if any(fnmatchcase(entry.name, pattern) for pattern in patterns)]


def family(name: str, entries: list[Entry]) -> str:
    stated = sum((Counter(entry.stated) for entry in entries), Counter[str]())
    left = "<br>".join(f"{count} {what.replace('|', chr(92) + '|')}" for what, count in by_number(stated.items()))
    return f"| {name} | {len(entries)} | {sum(sum(entry.fused.values()) for entry in entries)} | {left or 'nothing'} |"


def left_out() -> list[str]:
    """What the corpus has not, and why."""
    headless, other = families_left_out()
    count = len(families())
    reasons = {
        "parts of others, with no model class in the mappings that the corpus looks into": headless,
        "of which a small configuration or inputs cannot be made by the names of things alone, which need a library or "
        "files that are not there, or which join models of kinds that are here": other,
    }
    lines = ["## Not here", "", f"Of transformers' {count + len(headless) + len(other)} model types {count} are here."]
    for reason, names in reasons.items():
        lines += ["", f"{len(names)}, {reason}: {', '.join(names)}."]
    return [*lines, ""]


def row(entry: Entry) -> str:
    name = entry.name if entry.library == PACKAGES else entry.name.partition(":")[2]
    cells = (name, entry.modules, entry.patched, counted(entry.fused), sum(entry.sites.values()))
    return f"| {' | '.join(map(str, (*cells, *map(counted, (entry.elsewhere, entry.left, entry.unread)))))} |"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(item(*pair) for pair in by_number(counts.items()))


def by_number(items: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return sorted(items, key=lambda pair: (-pair[1], pair[0]))


def item(name: str, count: int) -> str:
    return f"{count} {name}"
