"""Calls of ops on DTensors, each with the dimensions that its rule lets be sharded.

A case writes the dimensions of each tensor as letters. Capital letters are dimensions that the op needs whole. Another
dimension of the first tensor may be sharded, and any tensor with the same letter then is as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from fastlayers import functional as F

#: Over four ranks no size is even, and 3 leaves one rank without any. Over two 2 and 4 are even.
SIZES = {
    "b": 3,
    "s": 5,
    "n": 4,
    "c": 6,
    "h": 5,
    "o": 1,
    "C": 6,
    "H": 8,
    "S": 4,
    "W": 4,
    "K": 7,
    "v": 7,
    "V": 7,
    "u": 15,
}


@dataclass(frozen=True)
class Case:
    """A call of ``function`` on tensors.

    Attributes:
        dims: for each tensor its dimensions.
        function: the call; it may name a tensor's argument and give options.
        cpu: whether the C++ kernels take it in float64.
        gradients: whether the tensors want one.
        twice: whether it has a second derivative.
        also: dimensions of other tensors that may be sharded.
        once: dimensions that may be sharded over one dimension of the mesh only.
        make: what makes tensors that are not random, by position. These get no gradient.
    """

    name: str
    dims: tuple[str, ...]
    function: Callable[..., Any]
    cpu: bool = True
    gradients: bool = True
    twice: bool = True
    also: str = ""
    once: str = ""
    make: dict[int, Callable[..., Tensor]] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        found = []
        for i, letters in enumerate(self.dims):
            shape = [SIZES[letter] for letter in letters]
            make = self.make.get(i)
            t = torch.randn(shape, dtype=torch.float64, generator=generator) if make is None else make(shape, generator)
            found.append(t)
        return found

    def placements(self, mesh_dims: int) -> Iterator[tuple[tuple[Placement, ...], ...]]:
        """How the tensors can be placed: on a mesh of one dimension also with all but the first one replicated."""
        free = [letter for letter in self.dims[0] + self.also if letter.islower() and letter != "o"]
        chosen: tuple[str | None, ...]
        for chosen in itertools.product([None, *free], repeat=mesh_dims):
            if mesh_dims > 1 and (not any(chosen) or list(filter(None, chosen)) != sorted(filter(None, chosen))):
                continue
            if any(chosen.count(letter) > 1 for letter in self.once):
                continue
            own = tuple(tuple(_place(letters, letter) for letter in chosen) for letters in self.dims)
            yield own
            if mesh_dims == 1 and len(own) > 1:
                yield own[0], *[(Replicate(),)] * (len(own) - 1)


def _place(letters: str, letter: str | None) -> Placement:
    return Shard(letters.index(letter)) if letter is not None and letter in letters else Replicate()


def bools(shape: list[int], generator: torch.Generator) -> Tensor:
    found = torch.rand(shape, generator=generator) < 0.7
    found[..., 0] = True
    return found


def labels(shape: list[int], generator: torch.Generator) -> Tensor:
    """Of five classes, with one row that does not count."""
    found = torch.randint(5, shape, generator=generator)
    found.flatten()[-2:-1] = -100
    return found


def angles(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def numbers(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def positive(shape: list[int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator) + 0.5


def losses(reduction: str) -> list[Case]:
    cross_entropy = partial(F.cross_entropy, reduction=reduction)
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
    across: dict[str, Any] = {"make": {1: labels}, "cpu": False, "twice": False, "once": "h"}
    return [
        Case(f"cross_entropy {reduction}", ("sC", "s"), cross_entropy, make={1: labels}),
        Case(f"cross_entropy with weights {reduction}", ("bCs", "bs", "C"),
             partial(cross_entropy, **options), make={1: labels, 2: positive}),
        Case(f"cross_entropy of probabilities {reduction}", ("bC", "bC"), cross_entropy, cpu=False),
        Case(f"cross_entropy across {reduction}", ("sh", "s"), cross_entropy, **across),
        Case(f"cross_entropy with options across {reduction}", ("bhs", "bs"),
             partial(cross_entropy, **options), **across),
        Case(f"linear_cross_entropy {reduction}", ("bsH", "KH", "bs", "K"),
             lambda x, w, t, b: F.linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, **options),
             make={2: labels}),
        Case(f"linear_cross_entropy across {reduction}", ("bsH", "vH", "bs", "v"),
             lambda x, w, t, b: F.linear_cross_entropy(x, w, t, linear_bias=b, reduction=reduction, **options),
             also="v", make={2: labels}, cpu=False, twice=False, once="v"),
        Case(f"kl_div {reduction}", ("bc", "bc"), partial(F.kl_div, reduction=reduction), make={1: angles}),
        Case(f"kl_div_logits {reduction}", ("bsC", "bsC", "bs"),
             lambda x, y, t: F.kl_div_logits(x, y, labels=t, reduction=reduction), make={2: labels}),
    ]  # fmt: skip


def heads() -> list[Case]:
    """Calls by the whole weight of a head, and by one whose classes are sharded."""
    found = []
    for also, v, K in (("", "K", "K"), ("v", "v", "u")):
        options: dict[str, Any] = {"also": also, "once": also, "gradients": False, "twice": False}
        wider = options | {"also": K if also else "", "once": K if also else ""}
        name = " across" if also else ""
        found += [
            Case(f"linear_argmax{name}", ("bsH", f"{v}H", v), lambda x, w, b: F.linear_argmax(x, w, linear_bias=b),
                 **options),
            Case(f"linear_accuracy{name}", ("bsH", f"{v}H", "bs", v),
                 lambda x, w, t, b: F.linear_accuracy(x, w, t, linear_bias=b), make={2: labels}, **options),
        ]  # fmt: skip
        for k, log_prob in ((1, False), (3, True)):
            topk = partial(_topk, k=k, log_prob=log_prob, softcap=3.0 if k == 3 else None, logit_scale=0.5)
            found.append(Case(f"linear_topk {k} {log_prob}{name}", ("bsH", f"{K}H", K), topk, **wider))
    return found


def divergences() -> list[Case]:
    """Of a student's head from a teacher's, or from given logits."""
    found = []
    capped: dict[str, Any] = {"softcap": 3.0, "target_softcap": 2.0, "logit_scale": 0.5, "target_logit_scale": 1.5}
    for kind, reduction, options in (
        ("kl", "none", capped),
        ("kl", "mean", {}),
        ("kl", "batchmean", capped),
        ("kl", "sum", {}),
        ("reverse_kl", "none", {}),
        ("reverse_kl", "batchmean", capped),
        ("js", "mean", {"beta": 0.3}),
        ("js", "sum", {"beta": 1.0}),
        ("tv", "batchmean", capped),
        ("cosine", "mean", {}),
    ):
        call = partial(_divergence, divergence=kind, reduction=reduction, temperature=2.0, **options)
        name, make = f"linear_divergence {kind} {reduction}", {3: numbers, 4: numbers, 5: numbers, 6: labels}
        found.append(Case(name, ("bsH", "KH", "K", "bsC", "KC", "K", "bs"), call, make=make))
        if kind in ("kl", "reverse_kl") or options == {"beta": 1.0}:
            given = ("bsH", "vH", "v", "bsC", "vC", "v", "bs")
            found.append(Case(f"{name} across", given, call, make=make, twice=False, also="v", once="v"))
    call = partial(_divergence, temperature=2.0, divergence="kl")
    found.append(
        Case(
            "linear_divergence of logits across",
            ("bsH", "vH", "v", "bsv"),
            call,
            make={3: numbers},
            twice=False,
            also="v",
            once="v",
        )
    )
    found.append(Case("linear_divergence of logits", ("bsH", "KH", "K", "bsK"), call, make={3: numbers}))
    return found


def _divergence(
    x: Tensor, w: Tensor, b: Tensor, y: Tensor, target_w: Tensor | None = None, target_b: Tensor | None = None,
    target: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    return F.linear_divergence(x, w, y, target_w, linear_bias=b, target_bias=target_b, target=target, **options)


def _topk(x: Tensor, w: Tensor, b: Tensor, k: int, **options: Any) -> Any:
    return F.linear_topk(x, w, k, linear_bias=b, **options)


CASES = [
    Case("softmax", ("bsH",), lambda x: F.softmax(x, -1)),
    Case("softmax first dim", ("Hbs",), lambda x: F.softmax(x, 0)),
    Case("softmax across", ("bh",), lambda x: F.softmax(x, -1, scale=0.5), cpu=False),
    Case("softmax masked across", ("bh", "bh"), lambda x, m: F.softmax(x, -1, mask=m), cpu=False, make={1: bools}),
    Case("log_softmax across", ("hb",), lambda x: F.log_softmax(x, 0), cpu=False),
    Case("softmax masked", ("bsnH", "osoH"), lambda x, m: F.softmax(x, -1, scale=0.5, mask=m), make={1: bools}),
    Case("softmax biased", ("bsH", "sH"), lambda x, m: F.softmax(x, -1, mask=m)),
    Case("log_softmax", ("bsH",), lambda x: F.log_softmax(x, -1)),
    Case("relu_add", ("bs", "bs"), lambda x, y: F.relu_add(x, y, 0.5)),
    Case("relu_add of a bias", ("bsc", "bsc", "c"), F.relu_add, cpu=False),
    Case("add_relu", ("bsc", "bsc"), F.add_relu),
    Case("mul", ("bsc", "bsc"), F.mul),
    Case("mul broadcast", ("bsc", "so"), F.mul, cpu=False),
    Case("bias_act", ("bsc", "c"), lambda x, b: F.bias_act(x, b, "gelu")),
    Case("silu", ("bsc",), F.silu),
    Case("leaky_relu", ("bsc",), lambda x: F.leaky_relu(x, 0.2)),
    Case("swiglu", ("bsc", "bsc"), F.swiglu),
    Case("geglu", ("bsc", "bsc"), F.geglu),
    Case("gated_linear", ("bsC", "bsC", "vC", "v"), partial(F.gated_linear, act="silu"), also="v"),
    Case("gated_linear across", ("bh", "bh", "Kh"), partial(F.gated_linear, act="silu")),
    Case("glu", ("bsC",), lambda x: F.glu(x, -1, act="silu", gate_first=True)),
    Case("layer_norm", ("bsH", "H", "H"), lambda x, w, b: F.layer_norm(x, (8,), w, b)),
    Case("layer_norm of two dims", ("bsHC", "HC"), lambda x, w: F.layer_norm(x, (8, 6), w)),
    Case("rms_norm", ("bsH", "H"), lambda x, w: F.rms_norm(x, (8,), w)),
    Case("rms_norm llama", ("bsH", "H"), lambda x, w: F.rms_norm(x, (8,), w, 1e-6, casting="llama")),
    Case("rms_norm gemma", ("bsH", "H"), lambda x, w: F.rms_norm(x, (8,), w, 1e-6, casting="gemma")),
    Case("add_layer_norm", ("bsH", "bsH", "H", "H"), lambda x, y, w, b: F.add_layer_norm(x, y, (8,), w, b)),
    Case("add_rms_norm", ("bsH", "bsH", "H"), lambda x, y, w: F.add_rms_norm(x, y, (8,), w, 1e-6, casting="llama")),
    Case("norm with its input", ("bsH", "H"), lambda x, w: F.add_rms_norm(x, None, (8,), w), cpu=False),
    Case("layer_norm across", ("bh", "h", "h"), lambda x, w, b: F.layer_norm(x, (5,), w, b), cpu=False),
    Case("layer_norm across two dims", ("bsh", "sh"), lambda x, w: F.layer_norm(x, (5, 5), w), cpu=False),
    Case("rms_norm across", ("bh", "h"), lambda x, w: F.rms_norm(x, (5,), w), cpu=False),
    Case("rms_norm gemma across", ("bh", "h"), lambda x, w: F.rms_norm(x, (5,), w, casting="gemma"), cpu=False),
    Case("add_layer_norm across", ("bh", "bh", "h", "h"),
         lambda x, y, w, b: F.add_layer_norm(x, y, (5,), w, b), cpu=False),
    Case("add_rms_norm across", ("bh", "bh", "h"),
         lambda x, y, w: F.add_rms_norm(x, y, (5,), w, casting="llama"), cpu=False),
    Case("ada_layer_norm", ("bsH", "boH", "boH"), lambda x, g, h: F.ada_layer_norm(x, (8,), g, h), cpu=False),
    Case("global_response_norm", ("bSWC", "C", "C"),
         lambda x, w, b: F.global_response_norm(x, w, b, channels_last=True), cpu=False),
    Case("group_norm", ("bCSW", "C", "C"), lambda x, w, b: F.group_norm(x, 3, w, b, act="silu")),
    Case("instance_norm", ("bCSW", "C", "C"), lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    Case("batch_norm in evaluation", ("bcSW", "c", "c", "c", "c", "bcSW"),
         lambda x, m, v, w, b, y: F.batch_norm(x, m, v, w, b, residual=y, act="relu"), make={1: positive, 2: positive}),
    Case("batch_norm in training", ("bcSW", "c", "c", "bcSW"),
         lambda x, w, b, y: F.batch_norm(x, None, None, w, b, training=True, residual=y, act="relu"),
         cpu=False, twice=False, once="b"),
    Case("batch_norm of vectors in training", ("bc", "c", "c"),
         lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), cpu=False, twice=False, once="b"),
    Case("channel_layer_norm", ("bCSW", "C"), lambda x, w: F.channel_layer_norm(x, w), cpu=False),
    Case("max_pool2d", ("bcSW",), lambda x: F.max_pool2d(x, 2)),
    Case("rotary", ("bnsH", "bnsH", "sH", "sH"), F.rotary, make={2: angles, 3: angles}),
    Case("rotary of a batch", ("bsnH", "bsnH", "bsoH", "bsoH"), F.rotary, make={2: angles, 3: angles}),
    Case("rotary of fewer heads of k", ("bsnH", "bsoH", "soH", "soH"), F.rotary, make={2: angles, 3: angles}),
    Case("qk_norm_rotary", ("bsnH", "bsnH", "H", "H", "soH", "soH"), F.qk_norm_rotary, make={4: angles, 5: angles}),
    Case("scale_add", ("bsc", "c", "bsc"), F.scale_add),
    Case("squeeze_excite", ("bcSW",), lambda x: F.squeeze_excite(x, torch.sigmoid), cpu=False),
    *itertools.chain(*map(losses, ("none", "mean", "sum"))),
    Case("kl_div batchmean", ("bc", "bc"), partial(F.kl_div, reduction="batchmean"), make={1: angles}),
    Case("js_div_logits", ("bsC", "bsC"), partial(F.js_div_logits, reduction="batchmean")),
    Case("linear_log_prob", ("bsH", "KH", "bs", "K"),
         lambda x, w, t, b: F.linear_log_prob(x, w, t, linear_bias=b, entropy=True), make={2: labels}),
    Case("linear_cross_entropy by features", ("sh", "Vh", "s", "V"),
         lambda x, w, t, b: F.linear_cross_entropy(x, w, t, linear_bias=b, label_smoothing=0.1),
         make={2: labels}, cpu=False, twice=False, once="h"),
    Case("linear_log_prob by features", ("sh", "Vh", "s", "V"),
         lambda x, w, t, b: F.linear_log_prob(x, w, t, linear_bias=b, entropy=True),
         make={2: labels}, cpu=False, twice=False, once="h"),
    Case("linear_divergence by features", ("sh", "Vh", "sh", "Vh"),
         lambda x, w, y, v: F.linear_divergence(x, w, y.detach(), v.detach(), reduction="batchmean"),
         make={2: angles, 3: angles}, cpu=False, twice=False, once="h"),
    Case("linear_argmax by features", ("sh", "Vh"), F.linear_argmax,
         cpu=False, twice=False, once="h", gradients=False),
    Case("linear_log_prob across", ("bsH", "vH", "bs", "v"),
         lambda x, w, t, b: F.linear_log_prob(x, w, t, linear_bias=b, entropy=True, softcap=3.0),
         twice=False, also="v", once="v", make={2: labels}),
    *heads(),
    *divergences(),
    Case("cross_entropy of a row", ("C", ""), F.cross_entropy, make={1: lambda *args: torch.tensor(2)}, cpu=False),
]  # fmt: skip
