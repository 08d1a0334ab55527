"""An argument that should be a tensor, and is not, raises a TypeError as in torch, never an AttributeError.

So the rows of the table of ops have no such mistakes.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from fastlayers import functional
from fastlayers.ops import batch_norm, group_norm
from tests.harness import DEVICES
from tests.table import LAYERS, OPS
from tests.table.sample import Input

CALLS = {op.fused.__name__: (op.fused, op.samples[0]) for op in OPS if op.fused.__name__ in functional.__all__}
WRONG = {"None": None, "list": [1.0], "str": "no"}


def tensors_of(sample):
    """The places of the tensors of a call."""
    return [i for i, value in enumerate(sample.args) if isinstance(value, Input)]


def test_every_function_is_called():
    # squeeze_excite takes a function, and vocab_parallel_cross_entropy a process group. Losses of preferences have no
    # kernels, and the largest logits no gradient: tests/ops/test_linear_topk.py calls these.
    others = {name for name in set(functional.__all__) - set(CALLS) if not name.endswith("_loss")}
    without_gradient = {"linear_topk", "linear_argmax", "linear_accuracy"}
    assert others <= {"squeeze_excite", "vocab_parallel_cross_entropy"} | without_gradient


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(("function", "sample"), CALLS.values(), ids=CALLS)
def test_function(function, sample, wrong, device):
    for place in tensors_of(sample):
        call = sample.make(device, torch.float32)
        args = [wrong if i == place else value for i, value in enumerate(call.args)]
        if wrong is None and place > 0:  # it may be optional, or optional in some calls
            with suppress(TypeError, ValueError, RuntimeError):
                function(*args, **call.kwargs)
        else:
            with pytest.raises(TypeError):
                function(*args, **call.kwargs)


@pytest.mark.parametrize("wrong", [[1.0], "no"], ids=["list", "str"])
def test_the_guards_of_norms(wrong):
    """Whatever stands beside the wrong parameter; on a CPU no call reaches these guards."""
    x, one = torch.randn(2, 4, 3), torch.ones(4)
    for weight, bias in ((wrong, one), (one, wrong), (None, wrong)):
        with pytest.raises(TypeError):
            group_norm.unsupported(x, 2, weight, bias)
        with pytest.raises(TypeError):
            batch_norm.unsupported(x, one, one, weight, bias, True, 1e-5, None)
    with pytest.raises(TypeError):
        batch_norm.unsupported(x, one, wrong, one, one, True, 1e-5, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_squeeze_excite(wrong, device):
    with pytest.raises(TypeError):
        functional.squeeze_excite(wrong, lambda mean: mean)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("layer", [layer for _, layer in LAYERS], ids=lambda layer: type(layer.module).__name__)
def test_layer(layer, wrong):
    inputs = layer.arguments(layer.sample.make("cpu", torch.float32))
    # torch's norms with buffers ask for the number of dimensions first, and so do ours.
    with pytest.raises((TypeError, AttributeError) if hasattr(layer.module, "_check_input_dim") else TypeError):
        layer.module(wrong, *inputs[1:])
