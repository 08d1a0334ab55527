"""The pages that are made of the source: one for each op, and the list of them. A hook of mkdocs.

A page holds the function (formula, shapes, what it keeps), the modules that go through it, and the plots of it and of
its family that the committed results have.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from rst import exported, markdown, targets

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FAMILIES = {
    "softmax": "Softmax",
    "layer_norm": "LayerNorm and RMSNorm",
    "batch_norm": "BatchNorm",
    "group_norm": "GroupNorm and InstanceNorm",
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
    "kl_div": "Divergences",
}


@dataclass
class Op:
    """A function of fastlayers.functional and what belongs to it."""

    name: str
    family: str
    summary: str
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
    functional = ast.parse((ROOT / "fastlayers/functional.py").read_text())
    defined = {node.name: node for node in functional.body if isinstance(node, ast.FunctionDef)}
    modules = modules_by_function()
    found = []
    for name in exported(ROOT / "fastlayers/functional.py"):
        docstring = ast.get_docstring(defined[name]) or ""
        summary = " ".join(docstring.partition("\n\n")[0].split())
        found.append(Op(name, family_of(defined[name]), summary, modules.get(name, [])))
    return tuple(sorted(found, key=lambda op: (list(FAMILIES).index(op.family), op.name)))


def family_of(function: ast.FunctionDef) -> str:
    """The file of fastlayers.ops that the function calls: ``_softmax.softmax(...)``."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            family = node.value.id.removeprefix("_")
            if family in FAMILIES and node.value.id.startswith("_"):
                return family
    raise ValueError(f"{function.name} calls no op of a family that has a title in docs/pages.py")


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


def overview() -> str:
    """Every op with the first sentence of its docstring."""
    known, blocks = targets(), ["# Operations"]
    for family, title in FAMILIES.items():
        rows = [
            f"| [`{op.name}`]({op.name}.md) | {', '.join(f'`{name}`' for name in op.modules)} "
            f"| {markdown(op.summary, known)} |"
            for op in ops()
            if op.family == family
        ]
        blocks.append("\n".join([f"## {title}\n", "| function | module | |", "|---|---|---|", *rows]))
    return "\n\n".join(blocks) + "\n"


# -- what mkdocs calls ------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    families: list[Any] = ["ops/index.md"]
    for family, title in FAMILIES.items():
        families.append({title: [{op.name: op.page} for op in ops() if op.family == family]})
    config.nav = [
        {"fastlayers": "index.md"},
        {"Operations": families},
        {"Networks": "models.md"},
        {"Patching": "patching.md"},
        {"Backends and checkpoints": "backends.md"},
        {"Building": "build.md"},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "ops/index.md", content=overview()))
    for op in ops():
        files.append(File.generated(config, op.page, content=op.content()))
    for name in sorted({name for op in ops() for name in op.plots()} | models_plots()):
        files.append(File.generated(config, f"plots/{name}", abs_src_path=str(RESULTS / name)))
    return files


def models_plots() -> set[str]:
    return {name for name in ("models.png", "models-kinds.png") if (RESULTS / name).exists()}


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """The plots of whole models, where a run of them has been committed."""
    if page.file.src_uri != "index.md" or not models_plots():
        return markdown
    pictures = "\n\n".join(f"![{name.removesuffix('.png')}](plots/{name})" for name in sorted(models_plots()))
    return f"{markdown}\n## Whole models, measured\n\n{pictures}\n"
