"""Fusable sites: calls of torch that another one next to them could be fused with, in a model as it is and patched.

A call is a site if it is about each element or each row of its tensors: a norm, an activation, a softmax, a loss, a sum
or a product of two tensors. It is fusable if it is next to another one: if it takes the result of one, or one takes its
own, perhaps in another shape or dtype. A relu between two convolutions is not fusable: it has to read and to write.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import fastlayers

__all__ = ["Site", "Sites", "fusable"]

KINDS = {
    **dict.fromkeys(("layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "normalize"), "norm"),
    **dict.fromkeys(
        ("relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "relu6", "leaky_relu",
         "elu", "mish", "softplus", "prelu", "selu", "celu", "logsigmoid", "softsign"),
        "activation",
    ),
    **dict.fromkeys(("softmax", "log_softmax"), "softmax"),
    **dict.fromkeys(("cross_entropy", "nll_loss", "kl_div"), "loss"),
    **dict.fromkeys(("add", "iadd", "radd", "sub", "isub", "rsub"), "sum"),
    **dict.fromkeys(("mul", "imul", "rmul", "div", "truediv", "itruediv", "rtruediv"), "product"),
}  # fmt: skip
#: What only looks at its argument in another shape or dtype, or in training drops parts of it.
SAME = frozenset(
    {"view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "t", "unsqueeze", "squeeze",
     "chunk", "split", "unbind", "getitem", "expand", "expand_as", "contiguous", "clone", "to", "float", "half",
     "bfloat16", "type", "type_as", "view_as", "dropout", "narrow", "select", "roll", "detach"}
)  # fmt: skip
TORCH, OURS = (str(Path(package.__file__).parent) for package in (torch, fastlayers))


@dataclass
class Site:
    """A call: its kind, whether another is next to it, and whether it runs inside of a region."""

    kind: str
    fusable: bool = False
    in_region: bool = False


class Sites(TorchFunctionMode):
    """Collects the sites of the forwards that run in it, without those inside of functions of fastlayers."""

    def __init__(self, regions: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self.regions = set(map(id, regions))
        self.found: list[Site] = []
        #: The site that made a tensor, or None for a function of fastlayers; the tensor keeps its identity unique.
        self.makers: dict[int, tuple[Tensor, Site | None]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "").strip("_")
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor) and value.is_floating_point()]
        known = [self.makers[id(t)][1] for t in given if id(t) in self.makers]
        ours, in_region = self.caller()
        if ours:
            for site in known:
                self.touch(site)
            self.mark(made, None)
        elif (kind := kind_of(name, given)) is not None and made:
            site = Site(kind, bool(known), in_region)
            for other in known:
                self.touch(other)
            self.found.append(site)
            self.mark(made, site)
        elif name in SAME and known:
            self.mark(made, known[0])
        return result

    def touch(self, site: Site | None) -> None:
        if site is not None:
            site.fusable = True

    def mark(self, made: list[Tensor], site: Site | None) -> None:
        for t in made:
            self.makers[id(t)] = t, site

    def caller(self) -> tuple[bool, bool]:
        """Whether a function of fastlayers makes the present call, and whether a module that is a region does."""
        frame, ours, first = sys._getframe(2), False, True
        while frame is not None:
            file = frame.f_code.co_filename
            if first and not file.startswith(TORCH):
                ours, first = file.startswith(OURS), False
            if self.regions and id(frame.f_locals.get("self")) in self.regions:
                return ours, True
            frame = frame.f_back
        return ours, False


def kind_of(name: str, given: list[Tensor]) -> str | None:
    kind = KINDS.get(name) or KINDS.get(name.removesuffix("_"))
    if kind not in ("sum", "product"):
        return kind
    # Of activations: sums of biases, masks of numbers and scaled weights are no sites.
    large = [t for t in given if t.dim() > 1 and t.is_floating_point() and not isinstance(t, nn.Parameter)]
    return kind if len(large) > 1 else None


def fusable(sites: Iterable[Site], in_region: bool = False) -> dict[str, int]:
    """The number of fusable sites by kind, of those inside or outside of regions."""
    kinds = Counter(site.kind for site in sites if site.fusable and site.in_region is in_region)
    return dict(sorted(kinds.items()))
