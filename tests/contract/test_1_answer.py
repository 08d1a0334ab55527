"""Contract, point 1: the same result as torch. The calls that the table lists cover point 2, the whole domain."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.harness import DEVICES, DRAWS, answer, assert_close, cases, check_answer, excess, greatest_error, plain
from tests.table import OPS
from tests.table.sample import FLOATING, Input, Sample, expanded, misaligned, one_value, strided, transposed
from tests.table.softmax import HALF


@cases()
def test_answer(op, sample, place, dtype):
    """Result and gradients have torch's shape, dtype and memory format, and an error no greater than torch's."""
    check_answer(op, sample, place, dtype)


def laid_out(op):
    names = {"channels_last", "transposed", "y a row", "boolean mask"}
    return [op.samples[0], *(sample for sample in op.samples if sample.name in names)]


@pytest.mark.parametrize("layout", [one_value, transposed, strided, misaligned, expanded(0)], ids=lambda f: f.__name__)
@cases(laid_out, dtypes=[torch.float32, torch.bfloat16])
def test_layout_of_the_incoming_gradient(op, sample, place, dtype, layout):
    """An incoming gradient of any layout gives what its dense copy gives."""
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        ours = answer(op.fused, call, layout)
        dense = answer(op.fused, call, lambda t: layout(t).contiguous())
    assert_close(ours.grads, dense.grads)


def random_layout(choose: random.Random, shape: tuple[int, ...]):
    """A permutation of the dimensions in memory, some of them repeated with stride 0."""
    order = choose.sample(range(len(shape)), len(shape))
    repeated = [d for d in range(len(shape)) if choose.random() < 0.15]

    def layout(t):
        t = t.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
        for d in repeated:
            t = expanded(d)(t)
        return t

    return layout


@pytest.mark.parametrize("same_shape", [True, False])
@cases(plain, dtypes=[torch.float32], ops=[op for op in OPS if op.name in ("relu_add", "add_relu", "mul")])
def test_random_layouts(op, sample, place, dtype, same_shape):
    """The result has torch's strides for pairs of tensors of any order in memory, expanded or not."""
    choose = random.Random(0)
    for trial in range(60):
        shape = tuple(choose.choice((1, 1, 2, 3, 4)) for _ in range(choose.randint(1, 5)))
        shapes = [shape if same_shape else tuple(choose.choice((n, n, 1)) for n in shape) for _ in range(2)]
        pair = tuple(Input(each, random_layout(choose, each)) for each in shapes)
        served = same_shape or (op.name == "mul" and place.backend != "cpu")
        check_answer(op, Sample(f"trial {trial}", pair, refused=() if served else op.kernels), place, dtype)


@cases(plain, dtypes=[torch.float32, torch.float64, *HALF])
def test_autocast(op, sample, place, dtype):
    """Under autocast every input dtype gives torch's result dtype, and an error no greater than torch's."""
    low = torch.float16 if dtype == torch.float16 else torch.bfloat16
    if dtype == torch.float64:  # no wider type judges it
        call = sample.make(place.device, dtype)
        with torch.autocast(place.device, low):
            stock = answer(op.reference, call)
            with place.forced(sample):
                ours = answer(op.fused, call)
        assert_close((ours.outs, ours.grads), (stock.outs, stock.grads))  # dtypes too
        return
    allowed: list[float] = []
    for draw in range(DRAWS):
        call = sample.make(place.device, dtype, draw)
        exact = answer(op.reference, call.to_float64(), draw=draw)
        with torch.autocast(place.device, low):
            stock = answer(op.reference, call, draw=draw)
        errors = [
            greatest_error(theirs, true) for (_, theirs), (_, true) in zip(stock.named(), exact.named(), strict=True)
        ]
        allowed = [max(pair) for pair in zip(allowed or errors, errors, strict=True)]
    with torch.autocast(place.device, low), place.forced(sample):
        ours = answer(op.fused, call, draw=draw)
    for (what, mine), (_, theirs), (_, true), error in zip(
        ours.named(), stock.named(), exact.named(), allowed, strict=True
    ):
        assert mine.dtype == theirs.dtype, f"{what}: {mine.dtype}, and torch has {theirs.dtype}"
        problem = excess(mine, true, error)
        assert problem is None, f"{what}: {problem}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op", "mistake"),
    [pytest.param(op, mistake, id=f"{op.name}-{mistake.name}") for op in OPS for mistake in op.mistakes],
)
def test_mistakes(op, mistake, device):
    """Wrong arguments raise what torch raises."""
    call = mistake.make(device, torch.float32)
    with pytest.raises(Exception) as expected:  # noqa: PT011
        op.reference(*call.args, **call.kwargs)
    # A composition fails at the first attribute that its argument lacks. torch's own functions raise TypeError there.
    kind = TypeError if expected.type is AttributeError else expected.type
    with pytest.raises(kind):
        op.fused(*call.args, **call.kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_dtypes(op, device, dtype):
    """Dtypes that no kernel takes give what torch computes or raise what torch raises."""
    call = op.samples[0].make(device, torch.float32)
    call = replace(
        call, args=tuple((3 * detached(a)).to(dtype) if isinstance(a, torch.Tensor) else a for a in call.args)
    )
    try:
        expected = op.reference(*call.args, **call.kwargs)
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)):
            op.fused(*call.args, **call.kwargs)
    else:
        assert_close(op.fused(*call.args, **call.kwargs), expected)


@cases(plain, dtypes=FLOATING)
def test_no_gradient(op, sample, place, dtype):
    """A call gives the same bits without autograd as with it."""
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        trained = answer(op.fused, call)
        with torch.no_grad():
            untrained = answer(op.fused, replace(call, args=tuple(map(detached, call.args))))
    for ours, theirs in zip(untrained.outs, trained.outs, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value
