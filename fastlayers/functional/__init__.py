"""Fused operations as functions. Those that bear the name of a torch function take its arguments.

Each function computes what the torch composition in its docstring computes, in the same shape, dtype, memory format and
autocast behaviour. Where no kernel applies, that composition runs. *Keeps* lists what is kept for the backward. Double
backward, ``torch.func`` transforms and ``torch.compile`` work on all functions. Kernels take float16, bfloat16, float32
and float64. An argument that should be a tensor and is not raises a TypeError.
"""

from fastlayers.functional.batch_norm import batch_norm
from fastlayers.functional.bias_act import (
    bias_act,
    elu,
    gelu,
    hardswish,
    leaky_relu,
    mish,
    quick_gelu,
    relu2,
    silu,
    softplus,
)
from fastlayers.functional.cross_entropy import cross_entropy
from fastlayers.functional.elementwise import add_relu, mul, relu_add
from fastlayers.functional.glu import gated_linear, geglu, glu, reglu, swiglu
from fastlayers.functional.group_norm import group_norm, instance_norm
from fastlayers.functional.kl_div import js_div_logits, kl_div, kl_div_logits
from fastlayers.functional.layer_norm import (
    ada_layer_norm,
    add_layer_norm,
    add_rms_norm,
    channel_layer_norm,
    layer_norm,
    rms_norm,
)
from fastlayers.functional.linear import linear
from fastlayers.functional.linear_cross_entropy import linear_cross_entropy
from fastlayers.functional.linear_divergence import linear_divergence
from fastlayers.functional.linear_log_prob import linear_log_prob
from fastlayers.functional.linear_topk import linear_accuracy, linear_argmax, linear_topk
from fastlayers.functional.max_pool2d import max_pool2d
from fastlayers.functional.preference import cpo_loss, dpo_loss, grpo_loss, kto_loss, orpo_loss, simpo_loss
from fastlayers.functional.residual import dropout_add, scale_add
from fastlayers.functional.response_norm import global_response_norm
from fastlayers.functional.rotary import qk_norm_rotary, rotary
from fastlayers.functional.softmax import log_softmax, softmax
from fastlayers.functional.squeeze_excite import squeeze_excite
from fastlayers.functional.vocab_parallel import vocab_parallel_cross_entropy
from fastlayers.ops import sharding as _sharding  # noqa: F401  (its rules answer calls on DTensors)

__all__ = [
    "ada_layer_norm",
    "add_layer_norm",
    "add_relu",
    "add_rms_norm",
    "batch_norm",
    "bias_act",
    "channel_layer_norm",
    "cpo_loss",
    "cross_entropy",
    "dpo_loss",
    "dropout_add",
    "elu",
    "gated_linear",
    "geglu",
    "gelu",
    "global_response_norm",
    "glu",
    "group_norm",
    "grpo_loss",
    "hardswish",
    "instance_norm",
    "js_div_logits",
    "kl_div",
    "kl_div_logits",
    "kto_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_accuracy",
    "linear_argmax",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_prob",
    "linear_topk",
    "log_softmax",
    "max_pool2d",
    "mish",
    "mul",
    "orpo_loss",
    "qk_norm_rotary",
    "quick_gelu",
    "reglu",
    "relu2",
    "relu_add",
    "rms_norm",
    "rotary",
    "scale_add",
    "silu",
    "simpo_loss",
    "softmax",
    "softplus",
    "squeeze_excite",
    "swiglu",
    "vocab_parallel_cross_entropy",
]
