"""The vocabulary of operations: their spellings in code, and properties of torch's layers and functions.

:data:`SPELLINGS` is the only place that knows that ``x + y``, ``x += y``, ``torch.add(x, y)``, ``x.add(y)`` and
``x.add_(y)`` are all ``add``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastlayers import functional


@dataclass(frozen=True)
class Spelling:
    name: str
    operands: tuple[str, ...]
    inplace: bool = False
    #: Whether the last operand may be given as several arguments.
    gathers: bool = False


#: The spelling of each function, and of each tensor method by its name.
SPELLINGS: dict[Any, Spelling] = {}


def spell(name: str, operands: str, *callables: Any, inplace: bool = False, gathers: bool = False) -> None:
    for function in callables:
        SPELLINGS[function] = Spelling(name, tuple(operands.split()), inplace, gathers)


spell("relu", "input inplace", F.relu)
spell("relu", "input", torch.relu, "relu")
spell("relu", "input", torch.relu_, F.relu_, "relu_", inplace=True)
spell("silu", "input inplace", F.silu)
spell("gelu", "input approximate", F.gelu)
spell("mish", "input inplace", F.mish)
spell("glu", "input dim", F.glu)
spell("hardswish", "input inplace", F.hardswish)
spell("relu6", "input inplace", F.relu6)
spell("leaky_relu", "input negative_slope inplace", F.leaky_relu)
spell("leaky_relu", "input negative_slope", F.leaky_relu_, inplace=True)
spell("add", "input other", operator.add)
spell("add", "input other", operator.iadd, inplace=True)
spell("add", "input other alpha", torch.add, "add")
spell("add", "input other alpha", "add_", inplace=True)
spell("mean", "input dim keepdim dtype", torch.mean, "mean")
spell("adaptive_avg_pool2d", "input output_size", F.adaptive_avg_pool2d)
spell("linear", "input weight bias", F.linear)
spell("addmm", "input mat1 mat2", torch.addmm)
spell("unbind", "input dim", torch.unbind, "unbind")
spell("chunk", "input chunks dim", torch.chunk, "chunk")
spell("split", "input split_size dim", torch.split, "split")
spell("sub", "input other", operator.sub, torch.sub, torch.subtract, "sub", "subtract")
spell("dropout", "input p training inplace", F.dropout)
spell("mul", "input other", operator.mul, torch.mul, torch.multiply, "mul", "multiply")
spell("mul", "input other", operator.imul, "mul_", "multiply_", inplace=True)
spell("div", "input other", operator.truediv, torch.true_divide, "true_divide")
spell("div", "input other rounding_mode", torch.div, torch.divide, "div", "divide")
spell("div", "input other", operator.itruediv, "div_", "divide_", inplace=True)
spell("softmax", "input dim _stacklevel dtype", F.softmax)
spell("softmax", "input dim dtype", torch.softmax, torch.special.softmax, "softmax")
spell("log_softmax", "input dim _stacklevel dtype", F.log_softmax)
spell("log_softmax", "input dim dtype", torch.log_softmax, torch.special.log_softmax, "log_softmax")
spell(
    "cross_entropy", "input target weight size_average ignore_index reduce reduction label_smoothing", F.cross_entropy
)
spell("nll_loss", "input target weight size_average ignore_index reduce reduction", F.nll_loss)
spell("masked_fill", "input mask value", torch.masked_fill, "masked_fill")
spell("masked_fill", "input mask value", "masked_fill_", inplace=True)
spell("where", "condition input other", torch.where)
spell("not", "input", operator.invert, torch.bitwise_not, "bitwise_not")
spell("eq", "input other", operator.eq, torch.eq, "eq")
spell("batch_norm", "input running_mean running_var weight bias training momentum eps", F.batch_norm)
spell("group_norm", "input num_groups weight bias eps", F.group_norm, torch.group_norm)
spell("instance_norm", "input running_mean running_var weight bias use_input_stats momentum eps", F.instance_norm)
spell("layer_norm", "input normalized_shape weight bias eps", F.layer_norm, torch.layer_norm)
spell("permute", "input dims", torch.permute)
spell("permute", "input dims", "permute", gathers=True)
spell("rms_norm", "input normalized_shape weight eps", F.rms_norm, torch.rms_norm)

#: Layers that compute one operation, and the attributes that are its operands. A guard compares these.
LAYERS: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Identity: ("identity", ()),
    nn.Linear: ("linear", ()),
    nn.Conv1d: ("convolution", ()),
    nn.Conv2d: ("convolution", ()),
    nn.Conv3d: ("convolution", ()),
    nn.Dropout: ("dropout", ()),
    nn.AdaptiveAvgPool2d: ("adaptive_avg_pool2d", ("output_size",)),
    nn.ReLU: ("relu", ()),
    nn.SiLU: ("silu", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.Hardswish: ("hardswish", ()),
    nn.ReLU6: ("relu6", ("min_val", "max_val")),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.Softmax: ("softmax", ("dim",)),
    nn.LogSoftmax: ("log_softmax", ("dim",)),
    nn.BatchNorm1d: ("batch_norm", ()),
    nn.BatchNorm2d: ("batch_norm", ()),
    nn.BatchNorm3d: ("batch_norm", ()),
    nn.InstanceNorm1d: ("instance_norm", ()),
    nn.InstanceNorm2d: ("instance_norm", ()),
    nn.InstanceNorm3d: ("instance_norm", ()),
    nn.GroupNorm: ("group_norm", ()),
    nn.LayerNorm: ("layer_norm", ()),
    nn.RMSNorm: ("rms_norm", ()),
}
#: Attributes of a norm layer that the function takes. The rewritten code reads them on every call.
NORM_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "group_norm": ("num_groups", "weight", "bias", "eps"),
    "layer_norm": ("normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("normalized_shape", "weight", "eps"),
}

NUMBER_METHODS = frozenset(
    {"size", "dim", "numel", "ndimension", "item", "stride", "element_size", "tolist", "nelement"}
)
NUMBER_ATTRIBUTES = frozenset({"shape", "ndim"})
NUMBER_FUNCTIONS = frozenset({int, float, bool, len, round, max, min, abs, pow, divmod})

INPLACE_OPERATORS = frozenset(
    {
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
        operator.iconcat, operator.setitem, operator.delitem,
    }
)  # fmt: skip
FUSED_FUNCTIONS = frozenset(getattr(functional, name) for name in functional.__all__)

#: Operations that may draw random numbers.
RANDOM = frozenset({"dropout", "drop_path", "draw"})
#: Functions and methods that draw no random numbers, in addition to the fresh ones.
NOT_RANDOM = frozenset(
    {getattr, operator.getitem, "view", "reshape", "flatten", "transpose", "contiguous", "unsqueeze"}
)
MAY_DRAW = frozenset(
    {torch.rand_like, torch.randn_like, F.scaled_dot_product_attention, functional.dropout_add, functional.scale_add}
)

#: Functions whose result never shares memory with an argument. More say so themselves: runtime.traits.
FRESH_FUNCTIONS = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.matmul, operator.pow,
        operator.invert,
        operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm,
        torch.cat,
        torch.stack, torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.softmax, torch.log_softmax, torch.rsqrt,
        torch.sqrt,
        torch.masked_fill, torch.where, torch.mean, torch.sum, torch.zeros_like, torch.ones_like, torch.empty_like,
        torch.full_like, torch.rand_like, torch.randn_like,
        F.relu, F.linear, F.conv1d, F.conv2d, F.conv3d, F.batch_norm, F.layer_norm, F.rms_norm, F.group_norm,
        F.instance_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss,
        F.gelu, F.silu, F.hardswish, F.relu6, F.leaky_relu, F.sigmoid, F.tanh, F.avg_pool2d,
        F.max_pool2d, F.embedding, F.scaled_dot_product_attention,
        *FUSED_FUNCTIONS,
    }
)  # fmt: skip
FRESH_METHODS = frozenset(
    {
        "add", "sub", "mul", "div", "matmul", "bmm", "mm", "relu", "sigmoid", "tanh", "exp", "softmax", "log_softmax",
        "masked_fill",
        "clone", "mean", "sum", "pow", "rsqrt", "sqrt", "neg", "baddbmm", "new_empty", "new_zeros", "new_ones",
        "new_full",
    }
)  # fmt: skip
#: Layers that return a tensor of their own, keep no reference to it, and write none of their arguments.
FRESH_LAYERS: frozenset[type[nn.Module]] = frozenset(
    {
        nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
        nn.ConvTranspose3d,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.Embedding, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax,
        nn.LogSoftmax, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.PReLU,
        nn.Softplus,
        nn.Upsample,
    }
)  # fmt: skip
#: The same of model libraries, which their adapters tell of.
FRESH_LAYERS_OF_LIBRARIES: set[type[nn.Module]] = set()
#: Layers with an ``inplace`` option: they return a new tensor, or overwrite the argument.
OPTIONAL_INPLACE: frozenset[type[nn.Module]] = frozenset(
    {
        nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish,
        nn.Hardtanh,
    }
)  # fmt: skip

#: Layers that may return their argument itself.
PASSING_LAYERS: frozenset[type[nn.Module]] = frozenset(
    {nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten}
)

#: Stands for memory that the caller, the module or an unknown layer may keep.
OUTSIDE = "outside"
