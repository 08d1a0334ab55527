"""Clean-up: steps that a rewritten forward can do without. A small call costs the CPU as much as a kernel the GPU."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from fastlayers import functional
from fastlayers.patching.capture.recording import Recording, bind, module_expression
from fastlayers.patching.ir.view import View, counts_batch, is_about_rank, is_barrier
from fastlayers.patching.rewrite.safety import layer_guards
from fastlayers.patching.runtime.checks import hooked, is_plain_layer, original_class

__all__ = ["clean_up"]

#: Layers that return their argument itself if p is 0.
DROPOUTS: frozenset[type[nn.Module]] = frozenset({nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d})


def clean_up(view: View, recording: Recording, excluded: frozenset[str]) -> list[str]:
    """Remove unnecessary steps from a rewritten graph. Returns the children that must have no hooks then."""
    count_in_norms(view)
    assert_by_guards(view, recording)
    for node in list(view.position):
        if node.op == "get_attr" and not node.users and is_registered(view.root, str(node.target)):
            view.graph.erase_node(node)
    unseen = list(remove_idle_layers(view, recording, excluded))
    view.refresh()
    return unseen


def is_registered(root: nn.Module, path: str) -> bool:
    """Whether reading an attribute gives a child, a parameter or a buffer, without a side effect."""
    parent, _, name = path.rpartition(".")
    try:
        module = root.get_submodule(parent)
    except AttributeError:
        return False
    return name in {**module._modules, **module._parameters, **module._buffers} and not hasattr(type(module), name)


def remove_idle_layers(view: View, recording: Recording, excluded: frozenset[str]) -> Iterator[str]:
    """Remove calls of layers that return their argument, and yield the paths of these."""
    for node in list(recording.graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node):
            continue
        path = str(node.target)
        child: Any = view.child(node)
        if not is_plain_layer(child) or path in excluded or hooked(child):
            continue
        layer = original_class(child)
        if layer is not nn.Identity and not (layer in DROPOUTS and child.p == 0.0):
            continue
        recording.guards.update(dict.fromkeys(layer_guards(path, layer, recording)))
        if layer in DROPOUTS:
            recording.guards[f"{module_expression(path)}.p == 0.0"] = None
        node.replace_all_uses_with(node.args[0])
        recording.graph.erase_node(node)
        yield path


def count_in_norms(view: View) -> None:
    """Let the kernel of a batch_norm increment the batch count of its layer: one kernel instead of two."""
    for norm in list(view.position):
        mean = norm.kwargs.get("running_mean")
        if (
            norm.target is not functional.batch_norm
            or norm.kwargs.get("training") is not True
            or "num_batches_tracked" in norm.kwargs
            or not isinstance(mean, Node)
            or mean.op != "get_attr"
        ):
            continue
        counted = str(mean.target).removesuffix("running_mean") + "num_batches_tracked"
        users = [user for read in view.position if read.target == counted for user in read.users]
        if len(users) != 1 or not counts_batch(users[0], counted):
            continue
        count = users[0]
        between = view.between(count, norm)
        if view.position[norm] < view.position[count] or any(n.op == "call_module" or is_barrier(n) for n in between):
            continue
        norm.kwargs = {**norm.kwargs, "num_batches_tracked": count.args[0]}
        view.graph.erase_node(count)
        view.refresh()


def assert_by_guards(view: View, recording: Recording) -> None:
    """Turn assertions about the rank of an argument into guards. If one fails, the original forward raises."""
    for node in list(view.position):
        condition = node.args[0] if node.target is torch._assert and not node.users else None
        if not isinstance(condition, Node) or condition.target is not operator.eq or not is_about_rank(condition):
            continue
        rank, expected = condition.args
        tensor = rank.args[0] if isinstance(rank, Node) and isinstance(expected, int) else None
        if not isinstance(tensor, Node) or tensor.op != "placeholder":
            continue
        recording.guards[f"isinstance({tensor.target}, {bind(recording, torch.Tensor)})"] = None
        recording.guards[f"{tensor.target}.ndim == {expected}"] = None
        erase(view, node)
    view.refresh()


def erase(view: View, node: Node) -> None:
    """Remove a node from the graph, and the nodes that only it used."""
    before = node.all_input_nodes
    view.graph.erase_node(node)
    for other in before:
        if not other.users and is_about_rank(other):
            erase(view, other)
