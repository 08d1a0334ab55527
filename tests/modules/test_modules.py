"""The fused layers as modules: everything that a swap of ``__class__`` must leave as it is."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import re
import types
import warnings

import pytest
import torch
from torch import nn

import fastlayers
from fastlayers import modules
from fastlayers.modules.linear_cross_entropy import LinearCrossEntropyLoss
from tests.harness import assert_close
from tests.table import LAYERS

DROP_INS = [pytest.param(stock, fused, id=fused.__name__) for stock, fused in modules.DROP_IN.items()]
#: One set of constructor arguments for each torch class; a class without a line is constructed without any.
ARGUMENTS = {
    nn.Softmax: {"dim": -1},
    nn.LogSoftmax: {"dim": 1},
    nn.LayerNorm: {"normalized_shape": 5},
    nn.Linear: {"in_features": 5, "out_features": 4},
    LinearCrossEntropyLoss: {"in_features": 5, "num_classes": 4, "bias": True},
    nn.RMSNorm: {"normalized_shape": (5,), "eps": 1e-3},
    nn.GroupNorm: {"num_groups": 2, "num_channels": 6},
    nn.BatchNorm1d: {"num_features": 5},
    nn.BatchNorm2d: {"num_features": 6, "momentum": None},
    nn.BatchNorm3d: {"num_features": 6, "affine": False},
    nn.MaxPool2d: {"kernel_size": 3, "stride": 2},
    nn.MultiheadAttention: {"embed_dim": 8, "num_heads": 2, "batch_first": True},
    nn.InstanceNorm1d: {"num_features": 6},
    nn.InstanceNorm2d: {"num_features": 6, "affine": True},
    nn.InstanceNorm3d: {"num_features": 6, "track_running_stats": True},
}
#: And a shape that it takes, where that is not (3, 5).
SHAPES = {
    nn.GLU: (3, 6),
    nn.GroupNorm: (3, 6, 4),
    nn.BatchNorm2d: (3, 6, 4, 2),
    nn.BatchNorm3d: (3, 6, 4, 2, 2),
    nn.MaxPool2d: (3, 6, 4, 5),
    nn.MultiheadAttention: (3, 5, 8),
    nn.InstanceNorm1d: (3, 6, 4),
    nn.InstanceNorm2d: (3, 6, 4, 2),
    nn.InstanceNorm3d: (3, 6, 4, 2, 2),
}
#: Classes that take more arguments than torch's; its own mean what they mean there.
EXTENDED = (fastlayers.FusedCrossEntropyLoss, fastlayers.FusedLinearCrossEntropyLoss)
#: The second argument of those that take two, for its shape.
TARGETS = {
    nn.KLDivLoss: torch.rand,
    nn.CrossEntropyLoss: lambda shape: torch.arange(shape[0]),
    LinearCrossEntropyLoss: lambda shape: torch.arange(shape[0]),
}
#: And what of torch's modules is put together of several ops, which have rows of their own.
COMPOSED = (fastlayers.FusedMultiheadAttention,)
FUSED = {name: getattr(modules, name) for name in modules.__all__ if name.startswith("Fused")}


def arguments_for(stock: type[nn.Module]) -> tuple[torch.Tensor, ...]:
    shape = SHAPES.get(stock, (3, 5))
    if stock is nn.MultiheadAttention:
        return (torch.randn(shape),) * 3
    return (torch.randn(shape), TARGETS[stock](shape)) if stock in TARGETS else (torch.randn(shape),)


def pair(stock: type[nn.Module], fused: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    arguments = ARGUMENTS.get(stock, {})
    return stock(**arguments), fused(**arguments)


@pytest.mark.parametrize(("stock", "fused"), DROP_INS)
def test_constructs_as_torch(stock, fused):
    """Same arguments, same attributes, same state, and the repr but for the name."""
    theirs, ours = pair(stock, fused)
    assert isinstance(ours, stock)
    assert fused.__init__ is stock.__init__ or fused in EXTENDED
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert repr(ours) == "Fused" + repr(theirs)


@pytest.mark.parametrize(("stock", "fused"), DROP_INS)
def test_constructs_without_arguments_where_torch_does(stock, fused):
    try:
        theirs = stock()
    except TypeError:
        pytest.skip(f"{stock.__name__} needs arguments")
    assert fused().__dict__.keys() == theirs.__dict__.keys()
    assert repr(fused()) == "Fused" + repr(theirs)


@pytest.mark.parametrize(("stock", "fused"), DROP_INS)
def test_class_swap_in_both_directions(stock, fused):
    module = pair(stock, fused)[0]
    inputs = arguments_for(stock)
    expected, attributes = module(*inputs), dict(module.__dict__)
    module.__class__ = fused
    assert_close(module(*inputs), expected)
    module.__class__ = stock
    assert_close(module(*inputs), expected)
    assert module.__dict__ == attributes


@pytest.mark.parametrize(("stock", "fused"), DROP_INS)
def test_hooks_run(stock, fused):
    module = pair(stock, fused)[1]
    seen = []
    module.register_forward_hook(lambda module, args, out: seen.append(out))
    out = module(*arguments_for(stock))
    assert seen[0] is out


@pytest.mark.parametrize("fused", [nn.Softmax, nn.LogSoftmax], ids=lambda c: c.__name__)
def test_implicit_dim_warns_as_torch(fused):
    """dim=None: torch's choice of the dimension, and its warning, which points at the caller."""
    stock, ours = fused(), modules.DROP_IN[fused]()
    for shape in ((4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)):
        x = torch.randn(shape)
        seen = []
        for module in (stock, ours):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                seen.append((module(x), [(str(w.message), w.category, w.filename) for w in caught]))
        (expected, their_warning), (got, our_warning) = seen
        assert torch.equal(got, expected)
        assert our_warning == their_warning
        assert len(our_warning) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(("op", "layer"), LAYERS, ids=lambda row: type(getattr(row, "module", None)).__name__)
def test_copies(op, layer, copied):
    again = copied(layer.module)
    assert type(again) is type(layer.module)
    assert repr(again) == repr(layer.module)
    call = layer.sample.make("cpu", torch.float32)
    assert_close(again(*layer.arguments(call)), op.reference(*call.args, **call.kwargs))


def test_reprs():
    assert repr(fastlayers.FusedReLUAdd()) == "FusedReLUAdd()"
    assert repr(fastlayers.FusedReLUAdd(0.5)) == "FusedReLUAdd(bias=0.5)"
    assert repr(fastlayers.FusedAddReLU()) == "FusedAddReLU()"
    assert repr(fastlayers.FusedMul()) == "FusedMul()"


@pytest.mark.parametrize("name", FUSED)
def test_every_layer_has_a_row(name):
    """Each fused layer is tested through the row of its op, and is public."""
    assert any(type(layer.module) is FUSED[name] for _, layer in LAYERS) or FUSED[name] in COMPOSED
    assert getattr(fastlayers, name) is FUSED[name]


# ---- nn.LinearCrossEntropyLoss, from torch 2.13 on -------------------------------------------------------------------

LOSSES = [
    {},
    {"bias": True, "reduction": "sum", "label_smoothing": 0.1},
    {"out_features": (2, 4), "bias": True, "weight": torch.tensor([1.0, 2.0, 0.5])},
    {"ignore_index": 1, "reduction": "none"},
]
needs_loss = pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it from 2.13 on")


@pytest.fixture
def before_torch_2_13(monkeypatch):
    """FusedLinearCrossEntropyLoss as it is where torch has no such layer."""
    monkeypatch.delattr(nn, "LinearCrossEntropyLoss", raising=False)
    spec = importlib.util.find_spec("fastlayers.modules.linear_cross_entropy")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FusedLinearCrossEntropyLoss


@needs_loss
@pytest.mark.parametrize("options", LOSSES, ids=[",".join(options) or "plain" for options in LOSSES])
def test_linear_loss_is_the_same_before_torch_2_13(options, request):
    stock = nn.LinearCrossEntropyLoss
    older = request.getfixturevalue("before_torch_2_13")
    assert not issubclass(older, stock)
    theirs, ours = stock(5, 3, **options), older(5, 3, **options)
    assert repr(ours) == "Fused" + repr(theirs)
    assert ours.__dict__.keys() == theirs.__dict__.keys()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(6, 5, requires_grad=True)
    target = torch.randint(3, (6, *options.get("out_features", ())))
    assert_close(ours(x, target), theirs(x, target))
    for arguments in ({"weight": torch.ones(2)}, {"label_smoothing": 1.5}):
        with pytest.raises(RuntimeError) as expected:
            stock(5, 3, **arguments)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            older(5, 3, **arguments)


@needs_loss
@pytest.mark.parametrize("options", LOSSES, ids=[",".join(options) or "plain" for options in LOSSES])
def test_linear_loss_is_swapped(options):
    net = nn.ModuleDict({"loss": nn.LinearCrossEntropyLoss(5, 3, **options)})
    x = torch.randn(6, 5, requires_grad=True)
    target = torch.randint(3, (6, *options.get("out_features", ())))
    expected = net["loss"](x, target)
    fastlayers.patch_model(net)
    assert isinstance(net["loss"], fastlayers.FusedLinearCrossEntropyLoss)
    assert_close(net["loss"](x, target), expected)
    fastlayers.unpatch_model(net)
    assert type(net["loss"]) is nn.LinearCrossEntropyLoss


def test_options_choose_the_chunks():
    """Those of torch 2.13, of which any object with these two attributes will do."""
    x, weight, target = torch.randn(9, 4), torch.randn(5, 4), torch.randint(5, (9,))
    options = types.SimpleNamespace(batch_chunk_size=0, acc_dtype=None)
    with pytest.raises(ValueError, match="chunk_size of at least 1 row or None, but got 0"):
        fastlayers.functional.linear_cross_entropy(x, weight, target, options=options)
    loss = fastlayers.functional.linear_cross_entropy(x, weight, target, options=options, chunk_size=4)
    assert_close(loss, nn.functional.cross_entropy(x @ weight.T, target))
