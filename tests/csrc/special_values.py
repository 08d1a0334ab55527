"""Special values on a CPU: NaN and infinities come out where torch has them, under any instruction set.

test_instruction_sets.py runs this file in processes that have fewer instructions than the machine. To run it by hand::

    ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 pytest tests/csrc/special_values.py
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from fastlayers.ops import post_ops
from fastlayers.ops.activations import ACTIVATIONS
from tests.harness import Place, assert_like, cases, check_answer

CPU = torch.device("cpu")
ACTS = [*post_ops.ATTRIBUTES, *post_ops.IN_PLACE]
DTYPES = (torch.float32, torch.bfloat16)
#: The last ones are denormals of float32.
VALUES = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40)


def special(op):
    return (sample for sample in op.samples if "NaN" in sample.name or "infinit" in sample.name)


@cases(special, devices=["cpu"])
def test_kernels(op, sample, place, dtype):
    if place == Place("cpu", "cpu"):
        check_answer(op, sample, place, dtype)


def has_served(dtype):
    """Whether oneDNN takes this dtype on this machine: bfloat16 wants AVX-512."""
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@torch.no_grad()
def test_linear(act, value, dtype):
    for features, out, bias in itertools.product((8, 40), (8, 13, 64), (True, False)):
        layer = nn.Linear(features, out, bias=bias).to(dtype)
        x = torch.randn(33, features)
        x[3, features // 2] = x[5] = value
        x = x.to(dtype)
        ours = post_ops.linear(x, layer.weight, layer.bias, act)
        assert (ours is not None) == has_served(dtype)
        if ours is not None:
            assert_like(ours, ACTIVATIONS[act].function(layer(x)), f"{features} to {out}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("act", ACTS, ids=str)
@torch.no_grad()
def test_convolution(act, value, dtype):
    served = 0
    layouts = (torch.contiguous_format, torch.channels_last)
    for (ins, outs, groups), k, layout in itertools.product(
        ((3, 16, 1), (8, 8, 2), (8, 8, 8), (13, 24, 1)), (1, 3), layouts
    ):
        layer = nn.Conv2d(ins, outs, k, padding=k // 2, groups=groups).to(dtype)
        images = torch.randn(2, ins, 9, 18)
        images[0, 0, 2, 3] = value
        images = images.to(dtype, memory_format=layout)
        stock = layer(images)
        residual = torch.randn_like(stock)
        residual[1, 1, 2, 3] = value
        for add in (None, residual):
            ours = post_ops.convolution(layer, images, layer.weight, layer.bias, add, act)
            if ours is not None:
                served += 1
                expected = ACTIVATIONS[act].function(stock if add is None else stock + add)
                assert_like(ours, expected, f"{ins} to {outs} in {groups} groups, {k}x{k}, {layout}")
    assert (served > 0) == has_served(dtype)
