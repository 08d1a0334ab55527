"""Contract, point 2, where it takes a GPU: more than 2^31 elements, other streams, a device that is not current.

The rest of the domain is in the calls that the table of ops lists, and test_1_answer.py runs them.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness import (
    Place,
    answer,
    assert_close,
    assert_like,
    cases,
    check_answer,
    excess,
    greatest_error,
    needs_gpu,
    outputs,
    plain,
)
from tests.table import OPS
from tests.table.elementwise import MUL
from tests.table.sample import Input, Sample
from tests.table.softmax import SOFTMAX

KERNELS_ON_GPU = [
    pytest.param(op, Place("cuda", backend), marks=Place("cuda", backend).marks(), id=f"{op.name}-{backend}")
    for op in OPS
    for backend in op.kernels
    if backend != "cpu" and op.matrix is not None
]
HUGE = (2**16 + 1, 2**15 + 8)  # 2.15e9 elements


def judge(reference, inputs, dys, ours):
    """Compares part of the results and gradients with the reference on that part of the inputs."""

    def all_of(dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        outs = outputs(reference(*leaves))
        return [*outs, *torch.autograd.grad(outs, leaves, [dy.to(dtype) for dy in dys])]

    for mine, stock, exact in zip(ours, all_of(dys[0].dtype), all_of(torch.float64), strict=True):
        mine, stock, exact = mine.detach(), stock.detach(), exact.detach()
        assert_like(mine, stock, "part")
        assert excess(mine, exact, greatest_error(stock, exact)) is None


@pytest.mark.parametrize(("op", "place"), KERNELS_ON_GPU)
def test_more_than_2_to_31_elements(gpu_memory, op, place):
    """Forward and backward of bfloat16 tensors whose offsets pass 32 bits, compared at both ends and in the middle."""
    arguments = op.matrix(Input(HUGE))
    places = [i for i, value in enumerate(arguments) if isinstance(value, Input)]
    shapes = [arguments[i].shape for i in places]
    needed = 2 * 4 * sum(torch.Size(shape).numel() for shape in shapes)
    gpu_memory(needed * 1.1)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_() for shape in shapes]

    def given(tensors):
        put = dict(zip(places, tensors, strict=True))
        return [put.get(i, value) for i, value in enumerate(arguments)]

    with place.forced(op.samples[0]):
        outs = outputs(op.fused(*given(tensors)))
        dys = [torch.empty_like(out).normal_() for out in outs]
        grads = torch.autograd.grad(outs, tensors, dys)
    size = shapes[0][op.alone]
    for start in (0, size // 2, size - 2):

        def part(all_of, start=start):
            return [t.narrow(op.alone, start, 2) for t in all_of]

        judge(lambda *t: op.reference(*given(t)), part(tensors), part(dys), part((*outs, *grads)))


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_2_to_31_elements_in_columns(gpu_memory, backend):
    """The kernels that index differently: softmax over a strided dimension, and a factor that broadcasts."""
    gpu_memory(20 * 2**30)
    place = Place("cuda", backend)
    x = torch.empty((2**12 + 1, 2**19 + 8), dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    row = torch.randn(x.shape[1], dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dy = x.detach()
    ends = (slice(0, 2), slice(-2, None))
    with place.forced(SOFTMAX.samples[0]):
        out = SOFTMAX.fused(x, 0)
        (dx,) = torch.autograd.grad(out, x, dy)
    for part in ends:
        judge(lambda t: SOFTMAX.reference(t, 0), [x[:, part]], [dy[:, part]], [out[:, part], dx[:, part]])
    del out, dx
    with place.forced(MUL.samples[0]):
        out = MUL.fused(x, row)
        dx, drow = torch.autograd.grad(out, (x, row), dy)
    for part in ends:
        judge(torch.mul, [x[:, part], row[part]], [dy[:, part]], [out[:, part], dx[:, part], drow[part]])


@cases(plain, dtypes=[torch.float32], devices=["cuda"])
def test_stream(op, sample, place, dtype):
    """Kernels run on torch's current stream: ops see the work that was queued there before them."""
    call = sample.make(place.device, dtype)
    expected = answer(op.reference, call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), place.forced(sample):
        late = call.map(torch.zeros_like)
        torch.cuda._sleep(20_000_000)  # about 10 ms: a kernel on the default stream would read the zeros
        with torch.no_grad():
            for empty, full in zip(late.tensors(), call.tensors(), strict=True):
                empty.copy_(full)
        ours = answer(op.fused, late)
    torch.cuda.current_stream().wait_stream(stream)
    assert_close((ours.outs, ours.grads), (expected.outs, expected.grads))


@cases(plain, dtypes=[torch.float32], devices=["cuda"])
def test_device_that_is_not_current(op, sample, place, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        check_answer(op, sample, Place("cuda:1", place.backend), dtype)


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("offset", range(1, 9))
def test_every_alignment(backend, offset):
    """Storage offsets of 1 to 8 elements, over row lengths on both sides of a vector."""
    for op in OPS:
        for length in (64, 67) if op.matrix is not None and backend in op.kernels else ():
            arguments = op.matrix(Input((5, length), lambda t: shifted(t, offset)))
            check_answer(op, Sample(f"offset {offset}", arguments), Place("cuda", backend), torch.bfloat16)


def shifted(t: torch.Tensor, offset: int) -> torch.Tensor:
    return t.new_empty(t.numel() + offset)[offset:].view(t.shape).copy_(t)
