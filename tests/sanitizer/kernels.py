"""The names of the kernels of fastlayers, read off its sources, and how tools write them."""

from __future__ import annotations

import ast
import re

from tests import ROOT

#: The name follows __launch_bounds__(...), whose arguments may have parentheses of their own.
_CUDA_KERNEL = re.compile(
    r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)\s*)?(\w+)\s*\("
)
#: What --kernel-name of compute-sanitizer takes: mangled names of csrc and of generated kernels, and the functions of
#: fastlayers/kernels, which are the only kernels with such names.
MANGLED = ("fastlayers", "^_[a-z]")
#: The same for the names that reports and the profiler show.
_OURS = re.compile(r"\bfastlayers::|^(?:_|fused_)[a-z]")


def cuda_kernels() -> set[str]:
    """The ``__global__`` functions of csrc.

    Raises:
        ValueError: a file declares one in a way that this does not read.
    """
    names = set()
    for path in sorted((ROOT / "csrc").rglob("*.cu*")):
        source = re.sub(r"//.*", "", path.read_text())
        found = _CUDA_KERNEL.findall(source)
        if len(found) != source.count("__global__"):
            raise ValueError(f"{path.name} has {source.count('__global__')} kernels; these were read: {found}")
        names.update(found)
    return names


def triton_kernels() -> set[str]:
    """The ``@triton.jit`` functions that are launched, as module.function: host code names no others."""
    functions, named = set(), set()
    for path in sorted((ROOT / "fastlayers/kernels").glob("*.py")):
        tree = ast.parse(path.read_text())
        module = path.stem
        imported = {
            alias.asname or alias.name: f"{statement.module.rsplit('.', 1)[-1]}.{alias.name}"
            for statement in ast.walk(tree)
            if isinstance(statement, ast.ImportFrom) and statement.module
            for alias in statement.names
        }
        jitted = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_jitted(node)]
        functions.update(f"{module}.{node.name}" for node in jitted)
        inside = {id(node) for function in jitted for node in ast.walk(function)}
        named.update(
            imported.get(node.id, f"{module}.{node.id}")
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and id(node) not in inside
        )
    return functions & named


def _is_jitted(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def is_ours(kernel: str) -> bool:
    """Whether a kernel that a report or the profiler names is one of fastlayers."""
    return _OURS.search(kernel) is not None


def cuda_kernel_of(shown: str) -> str | None:
    """The ``__global__`` function of a kernel of csrc that the profiler shows, demangled; None for another kernel."""
    found = re.search(r"\bfastlayers::(?:\(anonymous namespace\)::|_GLOBAL__\w+::)?(\w+)[<(]", shown)
    return found and found[1]
