"""A hook of mkdocs: the pages that are generated from the source, and the navigation.

Each op has a page with the function (formula, shapes, what it keeps), the modules that go through it, and the plots of
the committed results. Files of the repository that GitHub shows, such as the README, are pages of the site as well.
"""

from __future__ import annotations

import ast
import posixpath
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rst import exported

ROOT = Path(__file__).parents[1]
FUNCTIONAL = ROOT / "fastlayers" / "functional"
RESULTS = ROOT / "benchmarks" / "results"
#: Files outside docs that are pages of the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/README.md": "measured.md",
}
FAMILIES = {
    "softmax": "Softmax",
    "layer_norm": "LayerNorm and RMSNorm",
    "batch_norm": "BatchNorm",
    "group_norm": "GroupNorm and InstanceNorm",
    "response_norm": "Response norm",
    "elementwise": "Elementwise",
    "squeeze_excite": "Squeeze-and-excite",
    "max_pool2d": "Pooling",
    "residual": "Residual branches",
    "rotary": "Rotary embeddings",
    "bias_act": "Activations",
    "linear": "Linear layers",
    "glu": "Gated units",
    "cross_entropy": "Cross-entropy",
    "linear_cross_entropy": "Cross-entropy of a linear layer",
    "vocab_parallel": "Cross-entropy over ranks",
    "linear_divergence": "Distillation of a linear layer",
    "linear_log_prob": "Log-probabilities of a linear layer",
    "linear_topk": "Largest logits of a linear layer",
    "preference": "Losses of preferences and rewards",
    "kl_div": "Divergences",
}


@dataclass
class Op:
    """A function of fastlayers.functional and what belongs to it."""

    name: str
    family: str
    modules: list[str] = field(default_factory=list)

    @property
    def page(self) -> str:
        return f"ops/{self.name}.md"

    def plots(self) -> list[str]:
        """File names: its own sweep, and the bars of its family."""
        wanted = (f"results-{self.name}-sweep.png", f"results-{self.family}-bars.png")
        return [name for name in wanted if (RESULTS / name).exists()]

    def content(self) -> str:
        blocks = [f"# {self.name}", f"::: fastlayers.functional.{self.name}\n    options: {{heading_level: 2}}"]
        blocks += [f"::: fastlayers.modules.{name}\n    options: {{heading_level: 2}}" for name in self.modules]
        if self.plots():
            blocks.append("## Measured")
            blocks.append("Shares are of the bandwidth of a plain copy, measured in the same run.")
            blocks += [f"![{name.removesuffix('.png')}](../plots/{name})" for name in self.plots()]
        return "\n\n".join(blocks) + "\n"


@cache
def ops() -> tuple[Op, ...]:
    """By family, in the order above."""
    modules = modules_by_function()
    public = exported(FUNCTIONAL / "__init__.py")
    found = []
    for family in FAMILIES:
        functions = ast.parse((FUNCTIONAL / f"{family}.py").read_text()).body
        names = {node.name for node in functions if isinstance(node, ast.FunctionDef)}
        found += [Op(name, family, modules.get(name, [])) for name in sorted(names.intersection(public))]
    return tuple(found)


def modules_by_function() -> dict[str, list[str]]:
    """The public modules, by the function that they go through as their docstring or code says; else by their file."""
    public = exported(ROOT / "fastlayers/modules/__init__.py")
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "fastlayers/modules").glob("*.py")):
        source = file.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name in public:
                text = ast.get_source_segment(source, node) or ""
                used = re.search(r"(?<!torch\.nn\.)\bfunctional\.(\w+)", text)
                found.setdefault(used[1] if used else file.stem, []).append(node.name)
    return found


# -- links that lead out of docs --------------------------------------------------------------------------------------


def localized(text: str, source: str, page: str) -> str:
    """The text of a file of the repository for the page of the site that shows it.

    Links to files that have a page lead there. A link to any other file, such as a source file, becomes its text.
    """

    def link(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups(default="")
        if target.startswith("http"):
            return match[0]
        place = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        if place is None:
            return label
        return f"{image}[{label}]({posixpath.relpath(place, posixpath.dirname(page) or '.')}{anchor})"

    prose_and_code = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    prose_and_code[::2] = [
        re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)", link, prose) for prose in prose_and_code[::2]
    ]
    return "".join(prose_and_code)


def place_of(path: str) -> str | None:
    """Where the site has a file of the repository; None if it has not."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".png") and path.startswith("benchmarks/results/"):
        return f"plots/{posixpath.basename(path)}"
    return None


# -- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    families: list[Any] = ["ops.md"]
    for family, title in FAMILIES.items():
        families.append({title: [{op.name: op.page} for op in ops() if op.family == family]})
    config.nav = [
        {"fastlayers": "index.md"},
        {
            "Guides": [
                {"Patching a model": "patching.md"},
                {"What is guaranteed": "guarantees.md"},
                {"Fine-tuning": "fine-tuning.md"},
                {"Many GPUs": "many-gpus.md"},
                {"Using other tools": "tools.md"},
                {"CUDA graphs": "graphs.md"},
                {"Sharded tensors": "distributed.md"},
                {"Backends": "backends.md"},
                {"Building": "build.md"},
                {"Compatibility": "compatibility.md"},
            ]
        },
        {"Operations": families},
        {"Reference": [{"Patching": "patching-reference.md"}, {"Backends and checkpoints": "backends-reference.md"}]},
        {"Benchmarks": ["benchmarks.md", {"Every row": "measured.md"}]},
        {
            "Development": [
                {"Your first fused op": "first-op.md"},
                {"Architecture": "architecture.md"},
                {"Contributing": "contributing.md"},
                {"Changelog": "changelog.md"},
                {"Security": "security.md"},
            ]
        },
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for op in ops():
        files.append(File.generated(config, op.page, content=op.content()))
    for plot in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    uri = page.file.src_uri
    if uri in {op.page for op in ops()}:
        return markdown
    if uri == "ops.md":  # each function leads to its page
        markdown = re.sub(r"^\| `(\w+)` \|", r"| [`\1`](ops/\1.md) |", markdown, flags=re.MULTILINE)
    sources = {place: path for path, place in ROOT_PAGES.items()}
    return localized(markdown, sources.get(uri, f"docs/{uri}"), uri)
