"""The losses of models of transformers: ``model.loss_function``, the head and its loss, losses inside of a forward.

The forward of such a model is compiled again from its own source (:mod:`fastlayers.patching.capture.rebuild`), with its
decorators around it. If it computes logits by a linear layer, as :mod:`fastlayers.patching.libraries.heads` knows it,
and passes them to ``self.loss_function``,

    logits = self.lm_head(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, ...)
    return CausalLMOutputWithPast(loss=loss, logits=logits, ...)

a call with labels uses ``DeferredLogits`` of :mod:`fastlayers.patching.libraries.transformers.deferred_logits`, not
the logits. The loss is computed from them chunk by chunk, and the output has logits that are computed when somebody
uses them (:mod:`fastlayers.patching.runtime.lazy`), or None in a training step that is compiled. Every other call
computes the logits as before. The same applies if a masked language model uses ``loss_fct = CrossEntropyLoss()``, if
the layer is the last one of a head like BERT's, and if a flag of the model chooses the head: the forward is changed for
calls that find the flag as it is now.

``model.loss_function`` is a property of the generated class: nothing is set on the model, and nothing of transformers
changes. The function is compiled again too, with a fused ``fixed_cross_entropy``. If the user sets another one, that is
called with the logits.
"""

from __future__ import annotations

import ast
import copy
import functools
import operator
import sys
import types
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import nn

from fastlayers.patching.capture.rebuild import innermost, rebuild, rewrap
from fastlayers.patching.capture.syntax import parse
from fastlayers.patching.ir.known_functions import known_function
from fastlayers.patching.libraries.adapters import RewrittenModel
from fastlayers.patching.libraries.heads import is_known
from fastlayers.patching.libraries.transformers.deferred_logits import (
    DeferredLogits,
    Split,
    defer,
    fixed_cross_entropy,
    fused_loss,
    later,
    token_loss,
    with_logits_in_tuples,
)
from fastlayers.patching.reasons import Reason, Refusal
from fastlayers.patching.runtime.checks import hooked, original_class

__all__ = ["fuse_losses", "is_same", "pretrained_model", "stored"]


def pretrained_model() -> type[nn.Module] | None:
    """The base class of all models of transformers, if it is loaded."""
    return getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)


# -- transformers' loss functions -------------------------------------------------------------------------------------


def known_loss(function: Any) -> tuple[Any, bool]:
    """The fused function that computes the same as a loss function of transformers; None if that is unknown.

    Returns:
        The function, and whether it takes deferred logits.
    """
    scope = getattr(function, "__globals__", {})
    if known_function(scope.get("fixed_cross_entropy")) != "fixed_cross_entropy" or scope.get("nn") is not nn:
        return None, False
    return compiled_again(function) if "fixed_cross_entropy" in function.__code__.co_names else (None, False)


@functools.cache
def compiled_again(function: types.FunctionType) -> tuple[Any, bool]:
    """A loss function with another :func:`fixed_cross_entropy`, and whether it takes deferred logits."""
    try:
        tree = parse(function)
        defers = leave_wide(tree)
        bound = {"fixed_cross_entropy": token_loss if defers else fixed_cross_entropy}
        return rebuild(function, tree, bound)[0], defers
    except Refusal:
        return None, False


def leave_wide(tree: ast.FunctionDef) -> bool:
    """Remove the cast of the logits from a loss function that only views them and passes them to the cross-entropy.

    ForCausalLMLoss and ForMaskedLMLoss do. Returns whether the cast was removed.
    """
    casts = [statement for statement in tree.body if is_same(statement, "logits = logits.float()")]
    views = sum(is_same(statement, "logits = logits.view(-1, vocab_size)") for statement in tree.body)
    known = 2 * len(casts) + 2 * views
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("logits"), "device") | ast.Call(
                ast.Name("fixed_cross_entropy"), [ast.Name("logits"), *_]
            ):
                known += 1
    if len(casts) != 1 or views != 1 or mentioned(tree).count("logits") != known:
        return False
    tree.body.remove(casts[0])
    return True


def fused_property(original: type[nn.Module], theirs: Any, ours: Any) -> property:
    """The property ``loss_function`` of a generated class: ``ours`` where it would be ``theirs``."""
    known: Any = getattr(original, "loss_function")  # noqa: B009 - mypy knows no such attribute
    scope = theirs.__globals__
    inner = scope["fixed_cross_entropy"]

    def loss_function(self: nn.Module) -> Any:
        present = known.fget(self)
        return ours if present is theirs and scope["fixed_cross_entropy"] is inner else present

    return property(loss_function, known.fset, known.fdel, known.__doc__)


# -- reading a forward ------------------------------------------------------------------------------------------------

HIDDEN, PRODUCT, DEFER, DEFERRED, FINISH, LATER, KNOWN, LOSS = (
    f"_fastlayers_{name}"
    for name in ("hidden", "product", "defer", "DeferredLogits", "finish", "later", "known", "fused_loss")
)


@dataclass
class Pair:
    """The places in a forward that compute logits and their loss.

    Attributes:
        logits: the variable.
        call: the call of the linear layer.
        start, end: the statements that compute the logits.
        loss: the statement that computes the loss.
        function: an expression for the loss function.
        scale, softcap: expressions for the factor and the bound of the logits.
        condition: an expression that is true for calls whose logits may be None.
    """

    logits: str
    call: ast.Call
    start: int
    end: int
    loss: int
    function: str
    scale: ast.expr
    softcap: ast.expr
    condition: str

    @property
    def head(self) -> str:
        """The path of the linear layer."""
        return ast.unparse(self.call.func).removeprefix("self.")


def unused(message: str) -> Refusal:
    return Refusal(Reason.LOGITS_USED, message)


def find_pair(tree: ast.FunctionDef) -> Pair | None:
    """The logits and the loss of a forward; None if it computes no loss of labels over a vocabulary.

    Raises:
        Refusal: no layer of the module computes the logits, or they have other uses.
    """
    calling = ((i, call) for i, statement in enumerate(tree.body) if (call := loss_call(statement)) is not None)
    index, call = next(calling, (0, None))
    if call is None:
        return None
    name, written = logits_of(call), class_of_loss(tree.body[index])
    start = next((i for i, statement in enumerate(tree.body[:index]) if name in stored(statement)), None)
    head = head_call(tree.body[start], name) if start is not None else None
    if start is None or head is None:
        raise unused(f"{ast.unparse(call)}, and the logits are not the result of a layer of the module")
    end = start + 1
    while end < index and name in mentioned(tree.body[end]):
        end += 1
    transforms = Transforms(name)
    transforms.run(tree.body[start + 1 : end])
    for statement in (*tree.body[end:index], *body_of(tree.body[index])[: -2 if written else -1]):
        if not is_constant(statement) and not is_same(statement, f"labels = labels.to({name}.device)"):
            raise unused(f"{ast.unparse(statement)} is between them and the loss")
    rest = [*tree.body[:start], *tree.body[end:]]
    tuples = sum(tuple_reads(statement, name) for statement in tree.body[index + 1 :])
    known = device_reads(tree.body[index], name) + output_reads(tree.body[-1], name) + tuples + 1
    found = sum(mentioned(statement).count(name) for statement in rest)
    if found != known:
        raise unused(f"{name} is used {found} times, and only {known} uses are known")
    condition = "labels is not None and return_dict" if tuples else "labels is not None"
    function = written or "self.loss_function"
    return Pair(name, head, start, end, index, function, transforms.scale, transforms.softcap, condition)


def mentioned(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]


def stored(node: ast.AST) -> list[str]:
    return [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)]


def is_same(node: ast.AST, code: str) -> bool:
    return ast.unparse(node) == code


def body_of(statement: ast.stmt) -> list[ast.stmt]:
    return statement.body if isinstance(statement, ast.If) else []


def is_constant(statement: ast.stmt) -> bool:
    """Whether a statement is like ``loss = None``."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Constant):
        return False
    return not {"self", "labels", "return_dict"} & set(mentioned(statement))


def loss_call(statement: ast.stmt) -> ast.Call | None:
    """The call in ``if labels is not None: loss = self.loss_function(...)``, or of a loss that stands before it."""
    match statement:
        case ast.If(test, [*_, ast.Assign([ast.Name()], ast.Call() as call)], []) if is_same(
            test, "labels is not None"
        ) and (is_same(call.func, "self.loss_function") or class_of_loss(statement)):
            return call
    return None


def class_of_loss(statement: ast.stmt) -> str:
    """CrossEntropyLoss in ``loss = CrossEntropyLoss(); ... = loss(logits.view(-1, vocab_size), labels.view(-1))``."""
    match body_of(statement)[-2:]:
        case [
            ast.Assign([loss], ast.Call(ast.Call(looked_up, [written]), [], [])),
            ast.Assign(value=ast.Call(called, [_, labels], []) as call),
        ] if (
            is_same(looked_up, LOSS)
            and is_same(called, ast.unparse(loss))
            and is_same(labels, "labels.view(-1)")
            and logits_of(call)
        ):
            return ast.unparse(written)
    return ""


def logits_of(call: ast.Call) -> str:
    """The name of the logits in a call of a loss."""
    match [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "logits")]:
        case [ast.Name(name)]:
            return name
        # The logits of a classifier with few classes are small, and its output needs them.
        case [ast.Call(ast.Attribute(ast.Name(name), "view"), [rows, ast.Attribute(attr="vocab_size")])] if is_same(
            rows, "-1"
        ) and not is_same(call.func, "self.loss_function"):
            return name
    return ""


def device_reads(statement: ast.stmt, name: str) -> int:
    """The number of statements ``labels = labels.to(logits.device)`` before the loss."""
    return sum(is_same(inner, f"labels = labels.to({name}.device)") for inner in body_of(statement))


def output_reads(statement: ast.stmt, name: str) -> int:
    """The number of uses of the logits in ``return Output(..., logits=logits, ...)`` at the end of a forward."""
    call = statement.value if isinstance(statement, ast.Return) else None
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return sum(keyword.arg == "logits" and is_same(keyword.value, name) for keyword in keywords)


def tuple_reads(statement: ast.stmt, name: str) -> int:
    """The number of uses of the logits in ``if not return_dict: return ...``."""
    returns = isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Return)
    return mentioned(statement).count(name) if returns and is_same(statement.test, "not return_dict") else 0  # type: ignore[attr-defined]


def unwidened(value: ast.expr) -> ast.expr:
    """An expression without casts to float32 and ``contiguous()``: the loss is computed in float32 anyway."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.keywords:
        how = (value.func.attr, *map(ast.unparse, value.args))
        if how not in (("float",), ("contiguous",), ("to", "torch.float32")):
            break
        value = value.func.value
    return value


def assigned(statement: ast.stmt, name: str) -> ast.expr | None:
    """The expression that a statement assigns to a single name."""
    if isinstance(statement, ast.AugAssign) and is_same(statement.target, name):
        return ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value)
    targets = [ast.unparse(target) for target in statement.targets] if isinstance(statement, ast.Assign) else []
    return statement.value if isinstance(statement, ast.Assign) and targets == [name] else None


def head_call(statement: ast.stmt, name: str) -> ast.Call | None:
    """The call in ``logits = self.lm_head(hidden)``."""
    value = assigned(statement, name)
    match unwidened(value) if value is not None else None:
        case ast.Call(ast.Attribute() as layer, [argument], []) as call if is_attribute(layer):
            return call if not isinstance(argument, ast.Starred) else None
    return None


@dataclass
class Transforms:
    """The operations on the logits in a forward: products with a number, and a bound."""

    name: str
    scale: ast.expr = field(default_factory=lambda: ast.Constant(1.0))
    softcap: ast.expr = field(default_factory=lambda: ast.Constant(None))

    def run(self, statements: list[ast.stmt]) -> None:
        while statements:
            first, *rest = statements
            if isinstance(first, ast.If) and not first.orelse and self.name not in mentioned(first.test):
                bound = self.bound(first.body)
                self.softcap = ast.IfExp(first.test, self.limit(bound), ast.Constant(None))
            elif len(statements) >= 3 and (bound := self.bound(statements[:3])) is not None:
                self.softcap, rest = self.limit(bound), statements[3:]
            else:
                self.multiply(first)
            statements = rest

    def limit(self, bound: ast.expr | None) -> ast.expr:
        if bound is None or not is_same(self.softcap, "None"):
            raise unused("it computes something unknown with them")
        return bound

    def bound(self, statements: list[ast.stmt]) -> ast.expr | None:
        """softcap in ``logits = logits / softcap; logits = torch.tanh(logits); logits = logits * softcap``."""
        match [assigned(statement, self.name) for statement in statements]:
            case [ast.BinOp(right=softcap) as divided, ast.Call() as bounded, ast.BinOp() as product] if (
                is_attribute(softcap)
                and is_same(divided, f"{self.name} / {ast.unparse(softcap)}")
                and is_same(bounded, f"torch.tanh({self.name})")
                and is_same(product, f"{self.name} * {ast.unparse(softcap)}")
            ):
                return softcap
        return None

    def multiply(self, statement: ast.stmt) -> None:
        value = assigned(statement, self.name)
        if value is not None and is_same(unwidened(value), self.name):
            return
        if not is_same(self.softcap, "None") or not isinstance(value, ast.BinOp):
            raise unused("it computes something unknown with them")
        left, right = value.left, value.right
        if isinstance(value.op, ast.Mult) and is_same(right, self.name):
            left, right = right, left
        if not isinstance(value.op, ast.Mult | ast.Div) or not is_same(left, self.name) or not is_attribute(right):
            raise unused("it computes something unknown with them")
        self.scale = ast.BinOp(self.scale, value.op, right)


def is_attribute(value: ast.expr) -> bool:
    """Whether an expression is a number or an attribute path that starts at the module."""
    if isinstance(value, ast.Constant):
        return True
    while isinstance(value, ast.Attribute):
        value = value.value
    return is_same(value, "self")


def take_branches(tree: ast.FunctionDef, module: nn.Module) -> str:
    """Replace each test of a flag of the module, ``if self.legacy: ... else: ...``, by the branch that it takes now.

    Returns:
        The condition for that, as source; empty if there is no such test.
    """
    conditions, body = [], list[ast.stmt]()
    for statement in tree.body:
        test = statement.test if isinstance(statement, ast.If) else None
        value: Any = None
        if isinstance(test, ast.Attribute) and is_attribute(test):
            with suppress(AttributeError):
                value = operator.attrgetter(ast.unparse(test).removeprefix("self."))(module)
        if not isinstance(statement, ast.If) or not isinstance(value, bool):
            body.append(statement)
            continue
        conditions.append(f"{'' if value else 'not '}{ast.unparse(statement.test)}")
        body += statement.body if value else statement.orelse
    tree.body = body
    return " and ".join(conditions)


def defer_logits(tree: ast.FunctionDef, pair: Pair) -> None:
    """Change a forward so that it defers its logits if it computes a loss."""
    computing, hidden = tree.body[pair.start : pair.end], ast.unparse(pair.call.args[0])
    parts = (pair.call.func, pair.scale, pair.softcap)
    head, scale, softcap = map(ast.unparse, parts)
    operands = f"self, {pair.function}, {head}, {KNOWN}, {HIDDEN}, {scale}, {softcap}, {FINISH}, {pair.head!r}"
    before = f"""
def {FINISH}({PRODUCT}):
    return {pair.logits}
{HIDDEN} = {hidden}
{pair.logits} = {DEFER}({operands}) if {pair.condition} else None
if {pair.logits} is None:
    {pair.logits} = {FINISH}({head}({HIDDEN}))
"""
    after = f"""
if isinstance({pair.logits}, {DEFERRED}):
    {pair.logits} = {LATER}({pair.logits})
"""
    finish, *rest = ast.parse(before).body
    assert isinstance(finish, ast.FunctionDef)
    product = Replaced(pair.call, ast.Name(PRODUCT, ast.Load()))
    finish.body[:0] = [product.visit(statement) for statement in computing]
    tree.body[pair.loss + 1 : pair.loss + 1] = ast.parse(after).body
    tree.body[pair.start : pair.end] = [finish, *rest]


class Replaced(ast.NodeTransformer):
    """Puts another node in the place of one."""

    def __init__(self, node: ast.AST, other: ast.AST) -> None:
        self.node, self.other = node, other

    def visit(self, node: ast.AST) -> Any:
        return self.other if node is self.node else super().visit(node)


class Losses(ast.NodeTransformer):
    """Changes a forward so that it looks the function up where it uses torch's cross-entropy."""

    def __init__(self, scope: dict[str, Any], own: set[str]) -> None:
        self.scope = scope
        self.own = own
        self.count = 0

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return None if node.id in self.own else self.scope.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.value(node.value)
        return getattr(owner, node.attr, None) if isinstance(owner, types.ModuleType) else None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        value = self.value(node.func)
        if value is nn.CrossEntropyLoss or value is F.cross_entropy:
            self.count += 1
            node.func = ast.Call(ast.Name(LOSS, ast.Load()), [node.func], [])
        return node


# -- the outcome for one model ----------------------------------------------------------------------------------------


def fuse_losses(module: nn.Module, excluded: frozenset[str]) -> RewrittenModel | None:
    """Rewrite the losses of a model of transformers; None for other modules, and if it computes no known loss."""
    base, original = pretrained_model(), original_class(module)
    forward = original.forward
    if base is None or not issubclass(original, base) or not isinstance(forward, types.FunctionType):
        return None
    inner = innermost(forward)
    try:
        tree = parse(inner, decorated=True)
    except Refusal:
        return None
    if not tree.args.args or tree.args.args[0].arg != "self":
        return None
    found = RewrittenModel(harmless=(base,))
    try:
        rewrite(found, module, tree, inner, forward, excluded)
    except Refusal as refusal:
        found.left.append(refusal.kept())
    return found if found.rules or found.left else None


def rewrite(
    found: RewrittenModel,
    module: nn.Module,
    tree: ast.FunctionDef,
    inner: types.FunctionType,
    forward: types.FunctionType,
    excluded: frozenset[str],
) -> None:
    original = original_class(module)
    theirs, ours, deferring = None, None, False
    if "loss_function" in inner.__code__.co_names:
        theirs = module.loss_function
        ours, deferring = known_loss(theirs)
        if ours is None:
            found.left.append(Refusal(Reason.UNKNOWN_LOSS, getattr(theirs, "__name__", type(theirs).__name__)))
        else:
            found.members["loss_function"] = fused_property(original, theirs, ours)
            found.rules["cross_entropy"] += 1
    own = set(stored(tree)) | {arg.arg for arg in ast.walk(tree.args) if isinstance(arg, ast.arg)}
    losses = Losses(inner.__globals__, own)
    losses.visit(tree)
    whole, condition = tree.body, take_branches(tree, module)
    pair, splits = None, dict[type[nn.Module], Split]()
    try:
        pair = find_pair(tree) if deferring or losses.count else None
        if pair is not None and pair.function == "self.loss_function" and not deferring:
            pair = None
        if pair is not None:
            splits = check_head(module, pair.head, excluded)
    except Refusal as refusal:
        found.left.append(refusal.kept())
        pair = None
    found.key = (original, theirs, pair is not None and condition, *map(str, found.left))
    if pair is None and not losses.count:
        return
    if pair is None:
        tree.body = whole
    else:
        whole = copy.deepcopy(whole) if condition else []
        defer_logits(tree, pair)
        if condition:
            tree.body = [ast.If(ast.parse(condition, mode="eval").body, tree.body, []), *whole]
    bound = {DEFER: defer, DEFERRED: DeferredLogits, LATER: later, KNOWN: (ours, splits), LOSS: fused_loss}
    rebuilt, found.source = rebuild(inner, tree, bound)
    wrapped = rewrap(forward, rebuilt)
    found.members["forward"] = with_logits_in_tuples(forward, wrapped) if pair is not None else wrapped
    found.rules += Counter({"linear_cross_entropy": int(pair is not None), "cross_entropy": losses.count})


def check_head(module: nn.Module, path: str, excluded: frozenset[str]) -> dict[type[nn.Module], Split]:
    """Check that a head ends with a layer whose product can be computed chunk by chunk.

    Returns:
        The steps before that layer, by the classes of the modules around it.

    Raises:
        Refusal: it does not.
    """
    splits: dict[type[nn.Module], Split] = {}
    while True:
        try:
            head = module.get_submodule(path)
        except AttributeError:
            raise unused(f"{path} is not a layer of it") from None
        if path in excluded:
            raise Refusal(Reason.EXCLUDED_CHILD, path)
        if "forward" in head.__dict__:
            raise Refusal(Reason.FORWARD_REPLACED, path)
        if hooked(head):
            raise Refusal(Reason.HOOKED_CHILD, path)
        cls = original_class(head)
        if is_known(head):
            return splits
        split = split_of(cls) if cls not in splits else None
        if split is None:
            raise Refusal(Reason.UNKNOWN_HEAD, f"{path} is a {cls.__name__}")
        splits[cls] = split
        path = f"{path}.{split.child}"


def split_of(cls: type[nn.Module]) -> Split | None:
    """Split a forward that returns the result of a child into that child and the steps before it."""
    forward = cls.forward
    if not isinstance(forward, types.FunctionType) or (forward.__module__ or "").startswith("torch."):
        return None
    try:
        tree = parse(forward)
        *_, before, last = (None, *tree.body)
        value = last.value if isinstance(last, ast.Return) else None
        if isinstance(value, ast.Name) and before is not None:
            value = assigned(before, value.id)
            tree.body.pop(-2)
        call = value if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords else None
        owner = call.func if call is not None else None
        if call is None or not isinstance(owner, ast.Attribute) or not is_same(owner.value, "self"):
            return None
        returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
        if len(returns) > 1 or len(tree.args.args) != 2 or isinstance(call.args[0], ast.Starred):
            return None
        returns[0].value = call.args[0]
        return Split(owner.attr, rebuild(forward, tree, {})[0])
    except Refusal:
        return None
