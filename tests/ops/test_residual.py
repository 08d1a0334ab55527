"""dropout_add and scale_add where they draw random numbers; what they do without is in the table of ops.

A kernel's mask is checked element by element: against Philox in torch operations, keyed by the seed that the op drew.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers import backends, functional
from fastlayers.ops import residual as ops
from tests.harness import (
    DEVICES,
    PLACES,
    answer,
    assert_close,
    cases,
    check_answer,
    gradients_of,
    needs_gpu,
    same_bits,
    steps,
)
from tests.table.elementwise import DROPOUT_ADD, pairs
from tests.table.sample import Input, Op, Sample, channels_last, expanded, one_value, strided, transposed
from tests.table.softmax import HALF

KERNELS = [
    pytest.param(place, marks=place.marks(), id=str(place))
    for place in PLACES
    if place.backend in ("triton", "cuda", "cpu")
]
EVERYWHERE = [
    pytest.param(place, marks=place.marks(), id=str(place))
    for place in PLACES
    if place.backend in ("eager", "triton", "cuda", "cpu")
]
FLOAT64 = [torch.float64]


def randn(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


# ---- the generator ---------------------------------------------------------------------------------------------------


def test_philox_known_answers():
    """Of Random123's vectors that with zeros, and counters and keys on both sides of 32 bits."""
    words = ops.philox(torch.tensor(0), torch.tensor([0]))
    assert [hex(word) for word in words[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    for key, counter in itertools.product((0, 5, 2**32 + 7, 2**63 - 1), (0, 1, 2**32 - 1, 2**32, 2**40 + 3)):
        assert ops.philox(torch.tensor(key), torch.tensor([counter]))[0].tolist() == plain_philox(key, counter)


def plain_philox(key: int, counter: int) -> list[int]:
    low = 2**32 - 1
    a, b, c, d = counter & low, counter >> 32, 0, 0
    first, second = key & low, key >> 32
    for _ in range(10):
        x, y = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (y >> 32) ^ b ^ first, y & low, (x >> 32) ^ d ^ second, x & low
        first, second = (first + 0x9E3779B9) & low, (second + 0xBB67AE85) & low
    return [a, b, c, d]


# ---- dropout_add, the generator set before every call ----------------------------------------------------------------


def seeded(x: Tensor, residual: Tensor, p: float) -> Tensor:
    torch.manual_seed(0)
    return functional.dropout_add(x, residual, p)


def masked(x: Tensor, residual: Tensor, p: float) -> Tensor:
    torch.manual_seed(0)
    seed = ops.draw_seed(x)
    layout = (residual.detach() + x.detach().neg()).stride()
    mask = ops.dropout_mask(seed, x.shape, layout, p)
    return residual + x * mask * (1 / (1 - p))


FLOAT32 = Input((5, 37), dtype=torch.float32)
WIDE = (torch.float32, torch.float64)
SEEDED = Op(
    "dropout_add",
    seeded,
    masked,
    kernels=("triton", "cuda"),
    samples=(
        *(replace(sample, args=(*sample.args, 0.4)) for sample in pairs() if not sample.refused),
        *(Sample(f"p {p}", (Input((5, 40)), Input((5, 40)), p)) for p in (1e-3, 0.1, 0.5, 0.9)),
        # The composition's factor of a million is infinite in float16.
        Sample("p 0.999999", (Input((5, 40)), Input((5, 40)), 1 - 1e-6), dtypes=(torch.bfloat16, *WIDE)),
        Sample("float32 residual", (Input((5, 37)), FLOAT32, 0.4), dtypes=HALF),
    ),
    saved_bytes=lambda call, out: 8,
    mistakes=(),
    layers=(),
    matrix=None,
)


def kernel_cases(samples=lambda op: op.samples, dtypes=None):
    """As cases(), of the backends with kernels: eager answers with torch's own mask."""
    mark = cases(samples, dtypes, ops=[SEEDED])
    kept = [case for case in mark.args[1] if case.values[2].backend != "eager"]
    return pytest.mark.parametrize(mark.args[0], kept)


def some(op):
    return [op.sample(name) for name in ("matrix", "several blocks", "channels_last", "misaligned")]


@kernel_cases()
def test_masks(op, sample, place, dtype):
    check_answer(op, sample, place, dtype)


@pytest.mark.parametrize("layout", [one_value, transposed, strided, expanded(0)], ids=lambda f: f.__name__)
@kernel_cases(some, [torch.float32, torch.bfloat16])
def test_layout_of_the_incoming_gradient(op, sample, place, dtype, layout):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        ours = answer(op.fused, call, layout)
        dense = answer(op.fused, call, lambda t: layout(t).contiguous())
    assert_close(ours.grads, dense.grads)


@kernel_cases(lambda op: op.samples[:1], FLOAT64)
def test_derivatives(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        function, leaves = call.function_of_leaves(op.fused), call.leaves()
        assert gradcheck(function, leaves, check_batched_grad=True, fast_mode=True)
        assert gradgradcheck(function, leaves, gen_non_contig_grad_outputs=True, fast_mode=True)


@kernel_cases(some, [torch.float32])
def test_same_bits_nothing_written_and_eight_bytes_kept(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    before = [t.detach().clone() for t in call.tensors()]
    kept = []
    with place.forced(sample), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        runs = [answer(op.fused, call) for _ in range(2)]
    assert all(map(same_bits, (*runs[0].outs, *runs[0].grads), (*runs[1].outs, *runs[1].grads)))
    assert all(map(same_bits, call.tensors(), before))
    assert [t.numel() * t.element_size() for t in kept] == [8, 8]


@kernel_cases(lambda op: op.samples[:1], [torch.float32])
def test_only_what_is_wanted(op, sample, place, dtype):
    for wanted in itertools.product([False, True], repeat=2):
        call = sample.make(place.device, dtype)
        with place.forced(sample):
            everything = answer(op.fused, call)
            for leaf, wants in zip(call.tensors(), wanted, strict=True):
                leaf.requires_grad_(wants)
            some = answer(op.fused, call)
        assert_close(some.outs, everything.outs)
        assert_close(some.grads, tuple(g for g, wants in zip(everything.grads, wanted, strict=True) if wants))


@pytest.mark.parametrize("place", KERNELS)
def test_one_mask_for_every_dtype_and_alignment(place):
    """Also for a float32 residual, and for the gradient."""
    found = []
    with backends.backend(place.backend):
        for dtype, offset in itertools.product(
            (torch.float16, torch.bfloat16, torch.float32, torch.float64), (0, 1, 3)
        ):
            x = torch.ones(5000 + offset, device=place.device, dtype=dtype)[offset:].requires_grad_()
            for to in {dtype, torch.float32} if dtype in HALF else {dtype}:
                out = seeded(x, torch.zeros(5000, device=place.device, dtype=to), 0.3)
                (dx,) = torch.autograd.grad(out.sum(), x)
                assert dx.dtype == dtype
                found += [out != 0, dx != 0]
    assert all(torch.equal(mask, found[0]) for mask in found)
    mask = ops.dropout_mask(ops_seed(place.device), found[0].shape, found[0].stride(), 0.3)
    assert torch.equal(found[0], mask)


def ops_seed(device: str) -> Tensor:
    torch.manual_seed(0)
    return ops.draw_seed(torch.empty(0, device=device))


# ---- dropout_add, as it comes ----------------------------------------------------------------------------------------


def kept(place, p: float, n: int = 2**16) -> Tensor:
    ones = torch.ones(n, device=place.device)
    with backends.backend(place.backend):
        return functional.dropout_add(ones, torch.zeros_like(ones), p) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("place", EVERYWHERE)
def test_statistics(place, p):
    """As many kept as there should be, and as many of those that are neighbours, or kept by two calls."""
    torch.manual_seed(0)
    first, second = kept(place, p), kept(place, p)
    joint = [
        (first, 1 - p),
        (first & second, (1 - p) ** 2),
        (first[1:] & first[:-1], (1 - p) ** 2),
        (first[4:] & first[:-4], (1 - p) ** 2),
    ]
    for mask, expected in joint:
        deviation = 3 * (expected * (1 - expected) / mask.numel()) ** 0.5  # neighbours are not independent trials
        assert abs(mask.double().mean().item() - expected) < 2 * deviation


@pytest.mark.parametrize("place", EVERYWHERE)
def test_values(place):
    """Each element is the residual alone, or with x/(1 - p); and the gradient follows the mask."""
    x, residual = randn(place.device, 300, 70).requires_grad_(), randn(place.device, 300, 70, seed=1)
    with backends.backend(place.backend):
        out = functional.dropout_add(x, residual, 0.25)
    (dx,) = torch.autograd.grad(out.sum(), x)
    mask = dx != 0
    assert 0.7 < mask.double().mean() < 0.8
    assert_close(out.detach(), torch.where(mask, residual + x.detach() / 0.75, residual))
    assert_close(dx, mask / 0.75)


@pytest.mark.parametrize("place", EVERYWHERE)
def test_generator(place):
    """It follows the seed, goes on from call to call, and leaves the generator alone where nothing is drawn."""
    torch.manual_seed(3)
    first, second = kept(place, 0.5), kept(place, 0.5)
    torch.manual_seed(3)
    assert torch.equal(kept(place, 0.5), first)
    assert not torch.equal(second, first)
    x = randn(place.device, 4, 5)
    expected = torch.rand(3, device=place.device)
    torch.manual_seed(3)
    kept(place, 0.5)
    with backends.backend(place.backend):
        for p, training in ((0.5, False), (0.0, True), (1.0, True)):
            functional.dropout_add(x, x, p, training)
        functional.scale_add(x, x[0], x, 0.5, False)
        functional.scale_add(x, x[0], x, 0.0, True)
    assert torch.equal(torch.rand(3, device=place.device), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("place", EVERYWHERE)
def test_checkpointing_draws_the_same_again(place, use_reentrant):
    weight = randn(place.device, 40, seed=2).requires_grad_()

    def block(x):
        h = functional.dropout_add(x * weight, x, 0.5)
        return functional.scale_add(h.sin(), weight, h, 0.5, True)

    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        x = randn(place.device, 60, 40).requires_grad_()
        torch.manual_seed(1)
        with backends.backend(place.backend):
            out = run(x)
            weight.grad = None
            out.square().sum().backward()
        found.append((out.detach(), x.grad, weight.grad))
    assert_close(found[0], found[1])


@pytest.mark.parametrize("device", DEVICES)
def test_compiles(device):
    """In one graph, with torch's own mask."""
    torch._dynamo.reset()
    x, residual = randn(device, 30, 40).requires_grad_(), randn(device, 30, 40, seed=1)

    def both(x, residual):
        return functional.scale_add(functional.dropout_add(x, residual, 0.5), residual[0], residual, 0.25, True)

    out = torch.compile(both, fullgraph=True, backend="aot_eager")(x, residual)
    (dx,) = torch.autograd.grad(out.sum(), x)
    mask = dx != 0
    factor = torch.where(mask.any(1, keepdim=True), 1 / 0.75, 0.0)
    inner = torch.where(mask, residual + 2 * x.detach(), residual)
    dropped = factor == 0  # where nothing of the inner mask shows
    assert_close(out.detach(), torch.where(dropped, residual, residual + inner * residual[0] * factor))


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_cuda_graph_draws_anew(backend):
    """Every replay has a mask of its own, and its backward the same one; samples are drawn again too."""
    x = torch.ones(64, 2048, device="cuda").requires_grad_()
    zeros = torch.zeros_like(x)
    gamma = torch.ones(2048, device="cuda")

    def step():
        out = functional.dropout_add(x, zeros, 0.5)
        samples = functional.scale_add(x, gamma, zeros, 0.5, True)
        return out, *torch.autograd.grad(out.sum(), x), samples

    with backends.backend(backend):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
    seen = []
    for _ in range(3):
        graph.replay()
        out, dx, samples = (t.detach().clone() for t in results)
        assert torch.equal(out, dx)
        seen.append((out, samples))
    for first, second in itertools.combinations(seen, 2):
        assert 0.4 < (first[0] == second[0]).double().mean() < 0.6
        assert not torch.equal(first[1], second[1])


@needs_gpu
def test_unforced_calls_run_the_kernel():
    x = torch.ones(2**17, device="cuda")
    torch.manual_seed(0)
    out = functional.dropout_add(x, x, 0.3)
    mask = ops.dropout_mask(ops_seed("cuda"), x.shape, x.stride(), 0.3)
    assert torch.equal(out != 1, mask)


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_2_to_32_elements(gpu_memory, backend):
    """The counter of the last elements needs more than 30 bits, their offsets more than 32."""
    n = 2**32 + 40
    gpu_memory(5 * 2 * n)
    x = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    with backends.backend(backend):
        out = functional.dropout_add(x, x, 0.5)
    seed = ops_seed("cuda")
    for start in (0, 2**31 - 8, 2**32 - 8, n - 16):
        words = ops.philox(seed, torch.arange(start // 4, start // 4 + 4, device="cuda")).flatten()
        assert torch.equal(out[start : start + 16] != 1, words >= ops.threshold(0.5))


# ---- scale_add with drop_path ----------------------------------------------------------------------------------------


def timm_drop_path(x: Tensor, drop_prob: float) -> Tensor:
    """``timm.layers.drop_path`` in training; torchvision's StochasticDepth draws the same."""
    keep_prob = 1 - drop_prob
    random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep_prob)
    if keep_prob > 0.0:
        random_tensor.div_(keep_prob)
    return x * random_tensor


def stochastic(x: Tensor, residual: Tensor, gamma: Tensor | None, drop_path: float) -> Tensor:
    torch.manual_seed(0)
    return functional.scale_add(x, gamma, residual, drop_path, True)


def stock_stochastic(x: Tensor, residual: Tensor, gamma: Tensor | None, drop_path: float) -> Tensor:
    torch.manual_seed(0)
    return residual + timm_drop_path(x if gamma is None else x * gamma, drop_path)


def image(layout=lambda t: t, shape=(6, 8, 5, 6), gamma=(8, 1, 1), **options) -> tuple:
    return Input(shape, layout), Input(shape, options.pop("other", layout)), gamma and Input(gamma), 0.4


STOCHASTIC = Op(
    "scale_add",
    stochastic,
    stock_stochastic,
    kernels=("triton", "cuda"),
    samples=(
        Sample("rows", (Input((9, 37)), Input((9, 37)), Input((37,)), 0.4)),
        Sample("tokens", image(shape=(9, 7, 24), gamma=(24,))),
        Sample("many tokens", image(shape=(5, 1000, 40), gamma=(40,))),
        Sample("image", image()),
        Sample("channels_last", image(channels_last)),
        Sample("x channels_last", image(channels_last, other=lambda t: t)),
        Sample("odd image", image(shape=(7, 5, 3, 7), gamma=(5, 1, 1))),
        Sample("no gamma", image(gamma=None)),
        Sample("no gamma, odd", image(shape=(7, 5), gamma=None)),
        Sample("one a sample", image(shape=(40,), gamma=None)),
        Sample("gamma of the samples", image(shape=(24, 9), gamma=(24, 1))),
        Sample("gamma 0-dim", image(shape=(24, 9), gamma=(1,))),
        Sample("samples last in memory", image(transposed, shape=(24, 40), gamma=(40,))),
        Sample("one sample", image(shape=(1, 9, 40), gamma=(40,))),
        Sample("almost all dropped", (Input((9, 37)), Input((9, 37)), Input((37,)), 0.99)),
        Sample("float32 residual and gamma", (Input((9, 37)), Input((9, 37), dtype=torch.float32),
               Input((37,), dtype=torch.float32), 0.4), dtypes=HALF),
        Sample("gamma of a matrix", image(shape=(9, 4, 5), gamma=(4, 5)), refused=("triton", "cuda")),
    ),
    saved_bytes=lambda call, out: 0,
    mistakes=(),
    layers=(),
    matrix=None,
)  # fmt: skip


@cases(ops=[STOCHASTIC])
def test_samples_are_dropped_as_by_timm(op, sample, place, dtype):
    """The same samples after the same seed, on every backend, in every dtype."""
    check_answer(op, sample, place, dtype)


@cases(lambda op: [op.sample("tokens"), op.sample("image")], FLOAT64, ops=[STOCHASTIC])
def test_derivatives_with_dropped_samples(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        assert gradcheck(call.function_of_leaves(op.fused), call.leaves(), check_batched_grad=True, fast_mode=True)
        assert gradgradcheck(call.function_of_leaves(op.fused), call.leaves(), fast_mode=True)


@cases(lambda op: op.samples[:4], [torch.float32], ops=[STOCHASTIC])
def test_same_bits_of_dropped_samples(op, sample, place, dtype):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        runs = [answer(op.fused, call) for _ in range(2)]
    assert all(map(same_bits, (*runs[0].outs, *runs[0].grads), (*runs[1].outs, *runs[1].grads)))


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_more_than_2_to_31_elements_in_columns(gpu_memory, backend):
    rows, n = 2**16 + 8, 2**15 + 8
    gpu_memory(5 * 2 * rows * n)
    x = torch.empty((rows // 8, 8, n), dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    gamma = torch.randn(n, device="cuda", dtype=torch.bfloat16).requires_grad_()
    with backends.backend(backend):
        out = stochastic(x, x.detach(), gamma, 0.5)
        dx, dgamma = torch.autograd.grad(out, (x, gamma), x.detach())
    torch.manual_seed(0)
    factor = timm_drop_path(torch.ones(rows // 8, 1, 1, device="cuda"), 0.5)
    for part in (slice(0, 2), slice(-2, None)):
        piece, scale = x.detach()[part].double(), factor[part].double()
        torch.testing.assert_close(out[part].double(), piece * (1 + scale * gamma.double()), rtol=0.01, atol=0.01)
        torch.testing.assert_close(dx[part].double(), piece * scale * gamma.double(), rtol=0.01, atol=0.01)
        total = (x.detach()[..., part].double().square() * factor).sum((0, 1))
        torch.testing.assert_close(dgamma[part].double(), total, rtol=0.01, atol=0.01)


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("channels_first", [False, True])
def test_scale_add_layer(place, channels_first):
    shape = (6, 12, 5, 4) if channels_first else (6, 9, 12)
    layer = fastlayers.FusedScaleAdd(12, 0.5, 0.3, channels_first).to(place.device)
    assert layer.gamma.shape == (12,)
    x, residual = randn(place.device, *shape), randn(place.device, *shape, seed=1)
    gamma = layer.gamma.view(12, 1, 1) if channels_first else layer.gamma
    found = []
    for training in (True, False):
        layer.train(training)
        torch.manual_seed(0)
        with backends.backend(place.backend):
            out = layer(x, residual)
        torch.manual_seed(0)
        product = x * gamma
        expected = residual + (timm_drop_path(product, 0.3) if training else product)
        assert steps(out) == steps(expected)
        found += [(y, *torch.autograd.grad(y, layer.gamma, *gradients_of((y,)))) for y in (out, expected)]
    assert_close(found[0], found[1])
    assert_close(found[2], found[3])


def test_layers_say_what_they_are():
    assert repr(fastlayers.FusedDropoutAdd(0.1)) == "FusedDropoutAdd(p=0.1)"
    assert repr(fastlayers.FusedScaleAdd(8)) == "FusedScaleAdd(8, init_values=1e-05)"
    assert (
        repr(fastlayers.FusedScaleAdd(8, None, 0.1, True))
        == "FusedScaleAdd(8, init_values=None, drop_path=0.1, channels_first=True)"
    )
    for wrong in (lambda: fastlayers.FusedDropoutAdd(1.5), lambda: fastlayers.FusedScaleAdd(8, drop_path=-0.1)):
        with pytest.raises(ValueError, match="probability"):
            wrong()


def test_a_row_of_the_table_trains_nothing():
    """Its calls are compared with torch's own composition, whose mask is another."""
    for sample in DROPOUT_ADD.samples:
        _, _, p, *training = sample.args
        assert p in (0.0, 1.0) or training == [False]
