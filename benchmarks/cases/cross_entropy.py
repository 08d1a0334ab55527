"""Cross-entropy over vocabularies and segmentation maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Input, Op
from benchmarks.implementations import liger
from fastlayers import functional

_liger = liger("liger_cross_entropy")


def liger_out_of_place(logits: Tensor, target: Tensor) -> Tensor:
    """Liger's forward overwrites logits that need a gradient with it, so in training it gets a copy."""
    assert _liger is not None
    result: Tensor = _liger(logits.clone() if torch.is_grad_enabled() else logits.detach(), target)
    return result


def in_place(logits: Tensor, target: Tensor) -> Tensor:
    """The gradient overwrites the logits, so they are a copy. The copy is part of the forward, not of the backward."""
    if not torch.is_grad_enabled():
        return functional.cross_entropy(logits, target)
    return functional.cross_entropy(logits.clone(), target, inplace_backward=True)


def fused_softcap(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target, softcap=30.0, z_loss=1e-4)


def eager_softcap(logits: Tensor, target: Tensor) -> Tensor:
    logits = 30.0 * torch.tanh(logits / 30.0)
    return F.cross_entropy(logits, target) + 1e-4 * torch.logsumexp(logits, 1).square().mean()


CROSS_ENTROPY = Op(
    "cross_entropy",
    "cross_entropy",
    functional.cross_entropy,
    F.cross_entropy,
    liger=None if _liger is None else liger_out_of_place,
)
IN_PLACE = Op("cross_entropy_in_place", "cross_entropy", in_place, F.cross_entropy, liger=CROSS_ENTROPY.liger)
SOFTCAP = Op("softcap_cross_entropy", "cross_entropy", fused_softcap, eager_softcap)


def classes(count: int, ignored: float = 0.0):
    def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        target = torch.randint(count, shape, device=device)
        return target.masked_fill_(torch.rand(shape, device=device) < ignored, -100)

    return make


def row(op: Op, *shape: int, dtype: torch.dtype = torch.bfloat16, ignored: float = 0.0, **fields) -> Case:
    """The forward reads the logits. The backward reads them and writes their gradient."""
    target = Input(shape[:1] + shape[2:], classes(shape[1], ignored), grad=False, parameter=True)
    return Case(op, (Input(shape), target), dtype, "b", "2b", **fields)


#: (rows, vocabulary): GPT-2's, Llama 2's, Llama 3's and Qwen's.
BARS = {
    (8192, 32000): {"forward": 0.95, "backward": 0.95},
    (8192, 128256): {"forward": 0.95, "backward": 0.95},
    (4096, 151936): {"forward": 0.95, "backward": 0.95},
    (8192, 50257): {"forward": 0.92, "backward": 0.92},
}

CASES = [
    *(row(CROSS_ENTROPY, *shape, bars=bars) for shape, bars in BARS.items()),
    row(CROSS_ENTROPY, 8192, 32000, dtype=torch.float16),
    row(CROSS_ENTROPY, 8192, 32000, dtype=torch.float32),
    row(CROSS_ENTROPY, 8192, 32000, options={"label_smoothing": 0.1}, label="label smoothing",
        contestants=("eager", "compile", "fastlayers", "triton", "cuda")),
    row(CROSS_ENTROPY, 8192, 32000, ignored=0.5, label="half of the rows ignored"),
    row(SOFTCAP, 8192, 32000, contestants=("eager", "compile", "fastlayers", "triton", "cuda")),
    row(IN_PLACE, 8192, 128256),
    # Few rows of a large vocabulary, classes of images, segmentation maps.
    row(CROSS_ENTROPY, 8, 128256),
    row(CROSS_ENTROPY, 16384, 1000),
    row(CROSS_ENTROPY, 16, 21, 512, 512),
    row(CROSS_ENTROPY, 8, 150, 256, 256),
    row(CROSS_ENTROPY, 64, 1000, host=True),
    row(CROSS_ENTROPY, 8, 10, host=True),
]  # fmt: skip
