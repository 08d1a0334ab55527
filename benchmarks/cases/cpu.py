"""The ops on a CPU, at sizes that two cores have: each beside eager and torch.compile's C++ code, in turns."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.case import Case
from benchmarks.cases import (
    batch_norm,
    bias_act,
    cross_entropy,
    elementwise,
    glu,
    group_norm,
    kl_div,
    layer_norm,
    max_pool2d,
    residual,
    rotary,
    softmax,
    squeeze_excite,
)

DTYPES = (torch.float32, torch.bfloat16)
NEVER_SLOWER = 1.0


def on_cpu(case: Case, times: float | None = None) -> Case:
    """The same case on a CPU. ``times``: by how much forward, and forward and backward, have to beat eager."""
    bars = {} if times is None else {"forward_ratio": 1 / times, "step": 1 / times}
    trains = any(given.grad for given in case.inputs)
    return replace(case, suite="cpu", contestants=("eager", "compile", "fastlayers", "cpu"), bars=bars, step=trains)


CASES = [
    *(on_cpu(layer_norm.row(layer_norm.RMS_NORM, 4096, 768, dtype), 3) for dtype in DTYPES),
    *(on_cpu(layer_norm.row(layer_norm.LAYER_NORM, 4096, 768, dtype), NEVER_SLOWER) for dtype in DTYPES),
    *(
        on_cpu(layer_norm.added(op, 4096, 768, dtype), 1.5)
        for op in (layer_norm.ADD_LAYER_NORM, layer_norm.ADD_RMS_NORM)
        for dtype in DTYPES
    ),
    *(on_cpu(rotary.case(rotary.ROTARY, 2, 16, 4, 1024, 64, dtype=dtype), 3) for dtype in DTYPES),
    *(on_cpu(glu.pair(op, 2048, 2048, dtype=dtype), 1.7) for op in (glu.SWIGLU, glu.GEGLU) for dtype in DTYPES),
    *(
        on_cpu(
            group_norm.row(group_norm.GROUP_NORM_SILU, 2, 320, 64, 64, dtype=dtype, nhwc=nhwc), 2.5 if nhwc else None
        )
        for nhwc in (True, False)
        for dtype in DTYPES
    ),
    *(on_cpu(cross_entropy.row(cross_entropy.CROSS_ENTROPY, 512, 32000, dtype=dtype), 2) for dtype in DTYPES),
    *(
        on_cpu(batch_norm.train(batch_norm.BATCH_NORM_ADD_RELU, 8, 256, 56, 56, dtype=dtype, nhwc=nhwc), 1.5)
        for nhwc in (True, False)
        for dtype in DTYPES
    ),
    on_cpu(batch_norm.evaluate(8, 256, 56, 56, dtype=torch.float32)),
    *(on_cpu(bias_act.biased("gelu", 4096, 1536, dtype=dtype), 1.3) for dtype in DTYPES),
    on_cpu(bias_act.biased("gelu_tanh", 4096, 1536, dtype=torch.float32)),
    on_cpu(bias_act.biased("silu", 4096, 1536, dtype=torch.float32)),
    *(on_cpu(softmax.row(softmax.SOFTMAX, 8192, 512, dtype=dtype), NEVER_SLOWER) for dtype in DTYPES),
    *(
        on_cpu(elementwise.pair(op, backward, 2**24, dtype=dtype))
        for op, backward, _ in elementwise.OPS
        for dtype in DTYPES
    ),
    *(on_cpu(of(4096, 768, dtype=dtype)) for of in (residual.scale, residual.dropout) for dtype in DTYPES),
    on_cpu(kl_div.logits(kl_div.KL_DIV_LOGITS, 512, 32000, dtype=torch.float32)),
    on_cpu(max_pool2d.images(max_pool2d.pool(3, 2, 1), 8, 64, 112, 112)),
    on_cpu(squeeze_excite.images(8, 96, 56, 56)),
]
