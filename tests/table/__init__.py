"""The table of fused ops, one row for each. tests/contract derives every test from it: a new op only adds a row.

A row names the fused function and the torch composition that it stands for, and describes calls of it: their tensors by
shape, layout and values, so that each can be made on any device and in any dtype.
"""

from __future__ import annotations

from tests.table.activations import BARE, BIAS_ACT, GATED_LINEAR, GEGLU, GLU, LINEAR, REGLU, SWIGLU
from tests.table.batch_norm import BATCH_NORM, BATCH_NORM_EVAL, GROUP_NORM, INSTANCE_NORM
from tests.table.divergences import JS_DIV_LOGITS, KL_DIV, KL_DIV_LOGITS, LINEAR_DIVERGENCE
from tests.table.elementwise import ADD_RELU, DROPOUT_ADD, MAX_POOL2D, MUL, RELU_ADD, SCALE_ADD, SQUEEZE_EXCITE
from tests.table.layer_norm import (
    ADA_LAYER_NORM,
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    CHANNEL_LAYER_NORM,
    GLOBAL_RESPONSE_NORM,
    LAYER_NORM,
    RMS_NORM,
)
from tests.table.losses import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROB
from tests.table.rotary import QK_NORM_ROTARY, ROTARY
from tests.table.softmax import LOG_SOFTMAX, SOFTMAX

OPS = (
    SOFTMAX, LOG_SOFTMAX, RELU_ADD, ADD_RELU, MUL, SQUEEZE_EXCITE, MAX_POOL2D, DROPOUT_ADD, SCALE_ADD,
    LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM, ADA_LAYER_NORM, GLOBAL_RESPONSE_NORM,
    CHANNEL_LAYER_NORM,
    GROUP_NORM, INSTANCE_NORM, BATCH_NORM, BATCH_NORM_EVAL,
    BIAS_ACT, *BARE, SWIGLU, GEGLU, REGLU, LINEAR, GATED_LINEAR, GLU, ROTARY, QK_NORM_ROTARY,
    CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, LINEAR_LOG_PROB,
    KL_DIV, KL_DIV_LOGITS, JS_DIV_LOGITS, LINEAR_DIVERGENCE,
)  # fmt: skip

LAYERS = [(op, layer) for op in OPS for layer in op.layers]
