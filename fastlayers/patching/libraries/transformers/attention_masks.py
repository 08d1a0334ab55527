"""The attention masks of models of transformers, left out where this needs no values of a tensor.

SDPA uses its fast kernels only without a mask. In eager mode ``create_causal_mask`` and ``create_bidirectional_mask``
return None if there is no padding, no packed sequence and nothing in the cache. To find out, they read the values of
the position ids and wait for the GPU in every forward. The GPU is then idle until the CPU has launched the next
kernels. While Dynamo traces they cannot read values, and most versions of transformers build the whole mask then.

A method that calls them is compiled again from its own source (:mod:`fastlayers.patching.capture.rebuild`), and calls
:func:`attention_mask` instead, with the function as an argument:

    positions_left_out = position_ids is None
    ...
    causal_mask = attention_mask(create_causal_mask, position_ids if positions_left_out else None, config=..., ...)

Position ids that the method itself counts up belong to one sequence, so their values need not be read. Nothing of
transformers changes.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fastlayers.ops.guard import is_dtensor, is_plain, must_decompose
from fastlayers.patching.capture.rebuild import innermost, rebuild, rewrap
from fastlayers.patching.capture.syntax import local_names, parse
from fastlayers.patching.libraries.adapters import RewrittenModel
from fastlayers.patching.libraries.transformers.loss_functions import is_same, pretrained_model, stored
from fastlayers.patching.reasons import Refusal
from fastlayers.patching.runtime.checks import original_class

__all__ = ["RULE", "fuse_masks", "leave_out_masks"]

POSITIONS = "position_ids"
MASK, LEFT_OUT = "_fastlayers_attention_mask", "_fastlayers_positions_left_out"
RULE = "attention_mask"


class Library(NamedTuple):
    """Objects of ``transformers.masking_utils`` and ``transformers.cache_utils``, by name."""

    create_causal_mask: Any
    create_bidirectional_mask: Any
    sdpa_mask: Any
    ALL_MASK_ATTENTION_FUNCTIONS: Any
    EncoderDecoderCache: Any
    DynamicCache: Any
    DynamicLayer: Any
    DynamicSlidingWindowLayer: Any


def loaded_library() -> Library | None:
    """The loaded library; None if there is none, or if it is too old."""
    masks, caches = (sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "cache_utils"))
    found = [getattr(masks, name, getattr(caches, name, None)) for name in Library._fields]
    return None if any(value is None for value in found) else Library(*found)


# -- what a patched model computes ------------------------------------------------------------------------------------


def attention_mask(library: Library, create: Any, counted: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of ``create``; None without a call of it if eager mode would return None whatever the values are.

    Args:
        library: the functions and classes of transformers.
        create: the function that the source of the model calls: one of the two above, or any other.
        counted: position ids that the method counted up itself; None if they were given.
        args, kwargs: the arguments of that call.
    """
    # An exported or traced graph serves all lengths, and some need the mask. It reads the flag as ops.guard does.
    if torch.compiler.is_compiling():
        for_every_length = torch.compiler._is_exporting_flag
    else:
        embeds = kwargs.get("inputs_embeds")
        for_every_length = must_decompose() or not (is_plain(embeds) or is_dtensor(embeds))
    if not for_every_length and not args and is_needless(library, create, counted, **kwargs):
        return None
    return create(*args, **kwargs)


def is_needless(
    library: Library,
    create: Any,
    counted: Any,
    *,
    config: Any = None,
    inputs_embeds: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    position_ids: Any = None,
    or_mask_function: Any = None,
    and_mask_function: Any = None,
    block_sequence_ids: Any = None,
    layer_idx: Any = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **unknown: Any,
) -> bool:
    """Whether eager mode would leave the mask out, whatever the values of the tensors are."""
    bidirectional = create is library.create_bidirectional_mask
    if unknown or not (bidirectional or create is library.create_causal_mask):
        return False
    patterns = (attention_mask, or_mask_function, and_mask_function, block_sequence_ids)
    if any(pattern is not None for pattern in patterns) or not (allow_is_causal_skip and allow_is_bidirectional_skip):
        return False
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return False
    if library.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not library.sdpa_mask:  # Another function has been registered.
        return False
    if bidirectional or not getattr(config, "is_causal", True):
        return True  # for any length, and so for any cache
    cache = past_key_values if cache is None else cache  # Its name until transformers 5.24.
    if cache is not None:
        return is_empty(library, cache)
    return position_ids is None or position_ids is counted


def is_empty(library: Library, cache: Any) -> bool:
    """Whether a cache has no tokens yet, and keeps all tokens that it gets."""
    if type(cache) is library.EncoderDecoderCache:
        cache = cache.self_attention_cache
    if type(cache) is not library.DynamicCache:
        return False
    plain = (library.DynamicLayer, library.DynamicSlidingWindowLayer)
    return not any(type(layer) not in plain or layer.is_initialized for layer in cache.layers)


# -- reading a method -------------------------------------------------------------------------------------------------


def leave_out_masks(
    module: nn.Module, tree: ast.FunctionDef, function: types.FunctionType
) -> tuple[int, dict[str, Any]]:
    """Change the syntax of a method so that it calls :func:`attention_mask`.

    Returns:
        The number of changed calls, and the objects that the new source names in addition to its globals.
    """
    library = loaded_library()
    if library is None or not uses_sdpa(module):
        return 0, {}
    names = mask_makers(tree, function, library)
    if not names:
        return 0, {}
    counts = counts_positions(tree)
    calls = Calls(names, f"{POSITIONS} if {LEFT_OUT} else None" if counts else "None")
    calls.visit(tree)
    if counts:
        tree.body[:0] = ast.parse(f"{LEFT_OUT} = {POSITIONS} is None").body
    ast.fix_missing_locations(tree)
    return calls.count, {MASK: functools.partial(attention_mask, library)}


def uses_sdpa(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"


def mask_makers(tree: ast.FunctionDef, function: types.FunctionType, library: Library) -> set[str]:
    """The names of the two functions in a function: ``create_causal_mask``, or a variable that may be it."""
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - local_names(tree)
    names = {name for name in mentioned if makes_masks(function.__globals__.get(name), library)}
    chosen = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and names & set(alternatives(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return names | chosen


def alternatives(value: ast.expr) -> Iterator[str]:
    """The names in ``a if condition else b``."""
    if isinstance(value, ast.IfExp):
        yield from alternatives(value.body)
        yield from alternatives(value.orelse)
    elif isinstance(value, ast.Name):
        yield value.id


class Calls(ast.NodeTransformer):
    """Replaces calls of some names by calls of :func:`attention_mask`."""

    def __init__(self, names: set[str], counted: str) -> None:
        self.names = names
        self.counted = counted
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            self.count += 1
            node.args = [node.func, ast.parse(self.counted, mode="eval").body, *node.args]
            node.func = ast.Name(MASK, ast.Load())
        return node


def counts_positions(tree: ast.FunctionDef) -> bool:
    """Whether a function counts up its position ids if it gets none, and never changes given ones."""
    own, every = ([arg.arg for arg in ast.walk(part) if isinstance(arg, ast.arg)] for part in (tree.args, tree))
    if not own.count(POSITIONS) == every.count(POSITIONS) == 1:  # A lambda may have a parameter of that name too.
        return False
    changes = sum(is_change(node) for node in ast.walk(tree))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and is_same(node.test, f"{POSITIONS} is None") and POSITIONS in stored(node)
    ]
    counted = sum(is_counting(statement, tree) for block in blocks for statement in block.body)
    return len(blocks) == 1 and counted == changes


def is_change(node: ast.AST) -> bool:
    """Whether a node assigns or overwrites ``position_ids``."""
    if isinstance(node, ast.Subscript) and is_same(node.value, POSITIONS):
        return not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Attribute) and is_same(node.value, POSITIONS):
        return node.attr.endswith("_")
    return isinstance(node, ast.Name) and node.id == POSITIONS and not isinstance(node.ctx, ast.Load)


def is_counting(statement: ast.stmt, tree: ast.FunctionDef) -> bool:
    """Whether a statement is like ``position_ids = torch.arange(length) + past``, or reshapes such a row."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [ast.unparse(target) for target in targets] == [POSITIONS] and is_row(statement.value, tree)


def is_row(value: ast.expr, tree: ast.FunctionDef) -> bool:
    """Whether an expression counts up by one along its last dimension."""
    if isinstance(value, ast.Name):
        return value.id == POSITIONS  # counted up by an earlier statement
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Add) and is_row(value.left, tree) and is_length(value.right, tree)
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.slice) in ("(None, :)", "None, :") and is_row(value.value, tree)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if is_same(value.func, "torch.arange"):
        given = {keyword.arg for keyword in value.keywords}
        starred = any(isinstance(arg, ast.Starred) for arg in value.args)
        return len(value.args) in (1, 2) and not starred and given <= {"device", "dtype"}
    how = (value.func.attr, *map(ast.unparse, value.args))
    rows = len(how) == 3 and (how[0], how[2]) in (("expand", "-1"), ("repeat", "1"))
    return (how == ("unsqueeze", "0") or rows) and not value.keywords and is_row(value.func.value, tree)


def is_length(value: ast.expr, tree: ast.FunctionDef) -> bool:
    """Whether an expression is a number, such as the tokens in a cache, or a variable that is always a number."""
    if not isinstance(value, ast.Name):
        return is_number(value)
    values = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [value.id]
    ]
    parameter = any(isinstance(node, ast.arg) and node.arg == value.id for node in ast.walk(tree))
    return 0 < len(values) == stored(tree).count(value.id) and all(map(is_number, values)) and not parameter


def is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return is_number(value.body) and is_number(value.orelse)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "get_seq_length"
    return isinstance(value, ast.Constant) and isinstance(value.value, int)


# -- the outcome for one model ----------------------------------------------------------------------------------------


def fuse_masks(module: nn.Module, found: RewrittenModel | None) -> RewrittenModel | None:
    """Add the methods that create masks to a rewritten model."""
    base, library, original = pretrained_model(), loaded_library(), original_class(module)
    if base is None or library is None or not issubclass(original, base):
        return found
    for name, method in own_methods(original, base, library):
        if found is not None and name in found.members:  # The forward of a head, compiled again for its loss.
            continue
        try:
            inner = innermost(method)
            tree = parse(inner, decorated=True)
            count, bound = leave_out_masks(module, tree, inner)
            if not count:
                continue
            rebuilt, source = rebuild(inner, tree, bound)
            rebuilt = rewrap(method, rebuilt)
        except Refusal:
            continue
        found = found or RewrittenModel(key=(original,), harmless=(base,))
        found.key = (*found.key, name)
        found.members[name] = rebuilt
        found.rules[RULE] += count
        found.source = "\n".join(filter(None, (found.source, source)))
    return found


def own_methods(
    original: type[nn.Module], base: type[nn.Module], library: Library
) -> Iterator[tuple[str, types.FunctionType]]:
    """The methods of a model, without those of the base class, that name a function that creates masks."""
    methods: dict[str, Any] = {}
    for cls in original.__mro__[: original.__mro__.index(base)]:
        for name, method in vars(cls).items():
            methods.setdefault(name, method)
    for name, method in methods.items():
        if isinstance(method, types.FunctionType):
            inner = innermost(method)
            if any(makes_masks(inner.__globals__.get(word), library) for word in global_names(inner.__code__)):
                yield name, method


def makes_masks(value: Any, library: Library) -> bool:
    return value is library.create_causal_mask or value is library.create_bidirectional_mask


def global_names(code: types.CodeType) -> Iterator[str]:
    """The names in a function, and in the functions inside of it, that are not its variables."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from global_names(constant)
