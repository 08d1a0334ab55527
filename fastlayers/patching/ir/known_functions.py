"""Functions that many models repeat, recognised by their source, whatever the names in it."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import types
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fastlayers import functional
from fastlayers.patching.capture.lookups import inside_function
from fastlayers.patching.capture.recording import binder
from fastlayers.patching.capture.syntax import lines_of, names_in
from fastlayers.patching.ir.spellings import Spelling

__all__ = ["SPELLED", "fused_rotary", "is_rotary", "known_function"]

#: Stochastic depth of single samples, in two common forms. :data:`SPELLED` has their operands.
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
#: Rotary embedding, of transformers.
HALVES = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
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
#: Before transformers 5 both have a parameter that they do not use.
BEFORE = "unsqueeze_dim=1", "position_ids=None, unsqueeze_dim=1"
ROTATE_HALF = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""
#: What the losses of transformers call.
FIXED_CROSS_ENTROPY = """
def fixed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    reduction = "sum" if num_items_in_batch is not None else "mean"
    loss = nn.functional.cross_entropy(source, target, ignore_index=ignore_index, reduction=reduction)
    if reduction == "sum":
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return loss
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


KNOWN = {
    canonical(DROP_PATH): "drop_path",
    canonical(STOCHASTIC_DEPTH): "stochastic_depth",
    **dict.fromkeys(map(canonical, (HALVES, HALVES.replace(*BEFORE))), "rotary"),
    **dict.fromkeys(map(canonical, (PARTIAL, PARTIAL.replace(*BEFORE))), "partial_rotary"),
    canonical(ROTATE_HALF): "rotate_half",
    canonical(FIXED_CROSS_ENTROPY): "fixed_cross_entropy",
}
#: The operations of functions that are one, with their operands.
SPELLED = {
    "drop_path": Spelling("drop_path", ("input", "drop_prob", "training", "scale_by_keep")),
    "stochastic_depth": Spelling("drop_path", ("input", "p", "mode", "training")),
}
_seen: WeakKeyDictionary[types.CodeType, str] = WeakKeyDictionary()


def known_function(function: Any) -> str:
    """What a plain function is called in :data:`KNOWN`, whatever its own name; empty if it is not one of them."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__") or function.__closure__:
        return ""
    if (function.__module__ or "").startswith(("torch.", "fastlayers")):
        return ""
    if function.__code__ not in _seen:
        _seen[function.__code__] = ""
        with suppress(OSError, TypeError, SyntaxError, IndexError):
            _seen[function.__code__] = KNOWN.get(canonical(lines_of(function)), "")
    return _seen[function.__code__]


# -- rotary embedding -------------------------------------------------------------------------------------------------


def is_rotary(function: Any) -> bool:
    """Whether a function is transformers' apply_rotary_pos_emb, whatever its name."""
    if known_function(function) not in ("rotary", "partial_rotary") or function.__defaults__ not in ((1,), (None, 1)):
        return False
    scope = function.__globals__
    return known_function(scope.get("rotate_half")) == "rotate_half" and scope.get("torch") is torch


def fused_rotary(scope: dict[str, Any], name: str, original: Any) -> Any:
    """A function that replaces a rotary function. It calls the global itself if that is another one by now."""
    partial = known_function(original) == "partial_rotary"
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
