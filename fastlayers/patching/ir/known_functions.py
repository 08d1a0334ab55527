"""Functions that many models repeat, recognised by their source, whatever the names in it."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import types
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastlayers import functional
from fastlayers.patching.capture.lookups import inside_function
from fastlayers.patching.capture.recording import binder
from fastlayers.patching.capture.syntax import lines_of, names_in
from fastlayers.patching.ir.spellings import Spelling

__all__ = ["canonical", "fused_rotary", "is_rotary", "known_spelling", "source_of"]

#: Stochastic depth of single samples, in two common forms. :data:`KNOWN` has their operands.
DROP_PATH = """
def drop_path(x, drop_prob=0.0, training=False, scale_by_keep=True):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0 and scale_by_keep:
        random_tensor.div_(keep_prob)
    return x * random_tensor
"""
STOCHASTIC_DEPTH = """
def stochastic_depth(input, p, mode, training=True):
    if not torch.jit.is_scripting() and not torch.jit.is_tracing():
        _log_api_usage_once(stochastic_depth)
    if p < 0.0 or p > 1.0:
        raise ValueError(f"drop probability has to be between 0 and 1, but got {p}")
    if mode not in ["batch", "row"]:
        raise ValueError(f"mode has to be either 'batch' or 'row', but got {mode}")
    if not training or p == 0.0:
        return input
    survival_rate = 1.0 - p
    if mode == "row":
        size = [input.shape[0]] + [1] * (input.ndim - 1)
    else:
        size = [1] * input.ndim
    noise = torch.empty(size, dtype=input.dtype, device=input.device)
    noise = noise.bernoulli_(survival_rate)
    if survival_rate > 0.0:
        noise.div_(survival_rate)
    return input * noise
"""


class Rename(ast.NodeTransformer):
    """Replaces the names of a function by numbers in the order of their first use, and drops annotations."""

    def __init__(self, own: set[str]) -> None:
        self.names: dict[str, str] = {}
        self.own = own

    def rename(self, name: str) -> str:
        return self.names.setdefault(name, f"_{len(self.names)}") if name in self.own else name

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.rename(node.arg))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.rename(node.id), node.ctx)


def canonical(source: str) -> str:
    """The syntax of a function without comments, annotations and decorators, and with numbers for its names."""
    tree = ast.parse(textwrap.dedent(source)).body[0]
    if not isinstance(tree, ast.FunctionDef):
        return ""
    own = {node.arg for node in ast.walk(tree.args) if isinstance(node, ast.arg)} | {tree.name}
    rename = Rename(own | names_in(tree, ast.Store))
    args = rename.visit(tree.args)
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return "\n".join(ast.dump(part) for part in (args, *map(rename.visit, body)))


def source_of(function: Any) -> str:
    """The canonical source of a plain function; empty if it is not available."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__") or function.__closure__:
        return ""
    try:
        return canonical(lines_of(function))
    except (OSError, TypeError, SyntaxError, IndexError):
        return ""


KNOWN = {
    canonical(DROP_PATH): Spelling("drop_path", ("input", "drop_prob", "training", "scale_by_keep")),
    canonical(STOCHASTIC_DEPTH): Spelling("drop_path", ("input", "p", "mode", "training")),
}
_seen: WeakKeyDictionary[types.FunctionType, Spelling | None] = WeakKeyDictionary()


def known_spelling(function: Any) -> Spelling | None:
    """The operation that a function computes, with its operands; None if the function is not a known one."""
    if not isinstance(function, types.FunctionType) or (function.__module__ or "").startswith(("torch.", "fastlayers")):
        return None
    if function not in _seen:
        _seen[function] = KNOWN.get(source_of(function))
    return _seen[function]


# -- rotary embedding -------------------------------------------------------------------------------------------------

HALVES = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
#: Before transformers 5 it has a parameter that it does not use.
BEFORE = "unsqueeze_dim=1", "position_ids=None, unsqueeze_dim=1"
#: That of heads of which only a part rotates, as in GPT-NeoX.
PARTIAL = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return q_embed, k_embed
"""


ROTATE_HALF = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


#: What they are called with, by their source: the defaults, and whether only a part of a head rotates.
ROTARY = {
    canonical(source.replace(*BEFORE) if before else source): ((None, 1) if before else (1,), source is PARTIAL)
    for source in (HALVES, PARTIAL)
    for before in (False, True)
}


def is_rotary(function: Any) -> bool:
    """Whether a function is transformers' apply_rotary_pos_emb, whatever its name."""
    found = ROTARY.get(source_of(function))
    if found is None or function.__defaults__ != found[0]:
        return False
    scope = function.__globals__
    return source_of(scope.get("rotate_half")) == canonical(ROTATE_HALF) and scope.get("torch") is torch


def fused_rotary(scope: dict[str, Any], name: str, original: Any) -> Any:
    """A function that replaces a rotary function. It calls the global itself if that is another one by now."""
    _, partial = ROTARY[source_of(original)]
    names: dict[str, Any] = {}
    called = (original, original.__globals__["rotate_half"])
    tests = itertools.chain.from_iterable(inside_function(function, binder(names)) for function in called)
    unchanged = eval(f"lambda: {' and '.join(tests)}", names)
    parameters = list(inspect.signature(original).parameters)  # the dimension is the last, whatever its name

    def rotary(*args: Any, **named: Any) -> Any:
        present = scope[name]
        expected = 4 <= len(args) <= len(parameters) and named.keys() <= set(parameters[len(args) :])
        if not (expected and present is original and unchanged()):
            return present(*args, **named)
        q, k, cos, sin, *rest = args
        width = cos.shape[-1]
        fits = width < min(q.shape[-1], k.shape[-1]) if partial else q.shape[-1] == k.shape[-1] == width
        if not fits or width % 2 or sin.shape[-1] != width:
            return present(*args, **named)
        dim = rest[-1] if len(args) == len(parameters) else named.get(parameters[-1], 1)
        return functional.rotary(q, k, cos.unsqueeze(dim), sin.unsqueeze(dim))

    return rotary
