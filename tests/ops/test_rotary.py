"""rotary where the table of ops does not reach: without keys, as model libraries write it, layouts at random, sizes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

import fastlayers
from fastlayers import backends, functional
from tests.harness import DEVICES, PLACES, Place, assert_close, excess, greatest_error, needs_gpu, steps
from tests.table.rotary import ROTARY, rotary

BACKENDS = [
    pytest.param(place, marks=place.marks(), id=str(place)) for place in PLACES if place.backend in ROTARY.kernels
]
EVERYWHERE = [pytest.param(Place("cpu", "eager"), id="cpu-eager"), *BACKENDS]


def heads(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def tables(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = heads(*shape, device=device, seed=9)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("interleaved", [False, True])
def test_without_keys(place, interleaved):
    q = heads(2, 6, 5, 16, device=place.device).requires_grad_()
    cos, sin = tables(5, 16, device=place.device)
    expected, _ = rotary(q, q, cos, sin, interleaved)
    with backends.backend(place.backend):
        out, none = functional.rotary(q, None, cos, sin, interleaved)
        (grad,) = torch.autograd.grad(out.sin().sum(), q)
    assert none is None
    assert_close(out, expected)
    assert_close(grad, torch.autograd.grad(expected.sin().sum(), q)[0])
    with backends.backend(place.backend), torch.no_grad():
        assert torch.equal(functional.rotary(q, None, cos, sin, interleaved)[0], out)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("used", [0, 1])
def test_only_one_result_is_used(place, used):
    """The other has no gradient, and neither has what it came from."""
    q, k = (heads(2, n, 5, 16, device=place.device, seed=n).requires_grad_() for n in (6, 2))
    cos, sin = tables(5, 16, device=place.device)
    with backends.backend(place.backend):
        ours = torch.autograd.grad(functional.rotary(q, k, cos, sin)[used].sin().sum(), (q, k), allow_unused=True)
    expected = torch.autograd.grad(rotary(q, k, cos, sin)[used].sin().sum(), (q, k), allow_unused=True)
    assert_close(ours[used], expected[used])
    assert ours[1 - used] is None


# ---- as model libraries write it -------------------------------------------------------------------------------------


def llama_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def cohere_half(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack([-x2, x1], dim=-1).flatten(-2)


def llama(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (llama_half(q) * sin), (k * cos) + (llama_half(k) * sin)


def cohere(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    q, k = q.float(), k.float()
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_embed, k_embed = (q * cos) + (cohere_half(q) * sin), (k * cos) + (cohere_half(k) * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


def gptj(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (tensor * cos) + (cohere_half(tensor) * sin)


def phi(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    turned = [(x * cos) + (llama_half(x) * sin) for x in (q[..., :width], k[..., :width])]
    return tuple(torch.cat([x, rest[..., width:]], -1) for x, rest in zip(turned, (q, k), strict=True))


def flash_attn(q, k, cos, sin):
    """Of (batch, seq, heads, dim), and tables of (seq, rotary_dim / 2)."""
    width = 2 * cos.shape[-1]
    cos, sin = (torch.cat((t, t), -1).unsqueeze(-2) for t in (cos, sin))
    return tuple(
        torch.cat([x[..., :width] * cos + llama_half(x[..., :width]) * sin, x[..., width:]], -1) for x in (q, k)
    )


def projected(batch: int, seq: int, count: int, dim: int, **options) -> Tensor:
    """Heads as transformers takes them from a projection."""
    return heads(batch, seq, count * dim, **options).view(batch, seq, count, dim).transpose(1, 2)


LIBRARY_CODE = {
    "Llama": (llama, lambda q, k, c, s: functional.rotary(q, k, c.unsqueeze(1), s.unsqueeze(1)), (2, 7, 16), False),
    "Cohere": (
        cohere,
        lambda q, k, c, s: functional.rotary(q, k, c.unsqueeze(1), s.unsqueeze(1), True, dtype=q.dtype),
        (2, 7, 16),
        False,
    ),
    "Phi": (phi, lambda q, k, c, s: functional.rotary(q, k, c.unsqueeze(1), s.unsqueeze(1)), (2, 7, 8), False),
    "GPT-J": (
        lambda q, k, c, s: (gptj(q, s, c), gptj(k, s, c)),
        lambda q, k, c, s: functional.rotary(q, k, c.unsqueeze(2), s.unsqueeze(2), True, rotary_dim=16),
        (2, 7, 8),
        True,
    ),
    "flash-attn": (
        flash_attn,
        lambda q, k, c, s: functional.rotary(q, k, c.unsqueeze(1), s.unsqueeze(1), rotary_dim=8),
        (7, 4),
        True,
    ),
}


@pytest.mark.parametrize("name", LIBRARY_CODE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", EVERYWHERE)
def test_library_code(name, dtype, place):
    stock, fused, shape, heads_last = LIBRARY_CODE[name]
    cos, sin = tables(*shape, device=place.device, dtype=dtype)
    q, k = (projected(2, 7, n, 16, device=place.device, dtype=dtype, seed=n) for n in (6, 2))
    if heads_last:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    expected = stock(q, k, cos, sin)
    exact = stock(*(t.double() for t in (q, k, cos, sin))) if name != "Cohere" else None
    with backends.backend(place.backend):
        ours = fused(q, k, cos, sin)
    for i, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        assert mine.dtype == theirs.dtype
        assert steps(mine) == steps(theirs)
        if exact is None:
            assert_close(mine, theirs)
        else:
            assert excess(mine, exact[i], greatest_error(theirs, exact[i])) is None


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [(1, 12), (12,)], ids=str)
def test_packed_sequences(place, interleaved, rows):
    """Documents one after the other, as (1, total, heads, dim) or (total, heads, dim): each as it is alone."""
    lengths = [5, 1, 4, 2]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(place.device)
    q, k = (heads(*rows, n, 16, device=place.device, seed=n).requires_grad_() for n in (6, 2))
    cos, sin = tables(9, 16, device=place.device)
    packed = [table[positions].unsqueeze(-2) for table in (cos, sin)]
    with backends.backend(place.backend):
        ours = functional.rotary(q, k, *packed, interleaved)
        grads = torch.autograd.grad(ours, (q, k), [out.detach().sin() for out in ours])
        parts = [t.split(lengths, -3) for t in (q, k)]
        alone = [
            functional.rotary(q_part, k_part, cos[:n].unsqueeze(-2), sin[:n].unsqueeze(-2), interleaved)
            for q_part, k_part, n in zip(*parts, lengths, strict=True)
        ]
    stock = rotary(q, k, *packed, interleaved)
    assert_close(ours, stock)
    assert_close(ours, tuple(torch.cat(results, -3) for results in zip(*alone, strict=True)))
    assert_close(grads, torch.autograd.grad(stock, (q, k), [out.detach().sin() for out in stock]))


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", BACKENDS)
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts(place, width, interleaved):
    """Heads and positions in any order in memory: torch's answer, in torch's strides."""
    choose = random.Random(0)
    for order, wide in itertools.product(itertools.permutations(range(3)), (False, True)):
        shape = [2, 3, 4]
        rows = [shape[d] for d in order]
        q, k = (heads(*rows, 8, device=place.device, seed=i) for i in (1, 2))
        if wide:  # every second index of a dimension
            d = choose.randrange(3)
            q, k = (t.repeat_interleave(2, d).narrow(d, 0, 2 * rows[d])[(slice(None),) * d + (slice(0, None, 2),)]
                    for t in (q, k))  # fmt: skip
        back = [order.index(d) for d in range(3)]
        q, k = q.permute(*back, 3).requires_grad_(), k.permute(*back, 3).requires_grad_()
        for table in ((4, width), (2, 1, 4, width), (3, 1, width), (2, 3, 1, width)):
            cos, sin = tables(*table, device=place.device)
            with backends.backend(place.backend):
                ours = functional.rotary(q, k, cos, sin, interleaved)
                grads = torch.autograd.grad(ours, (q, k), [out.detach().sin() for out in ours])
            stock = rotary(q, k, cos, sin, interleaved)
            assert_close(ours, stock)
            assert_close(grads, torch.autograd.grad(stock, (q, k), [out.detach().sin() for out in stock]))
            assert [steps(t) for t in ours] == [steps(t) for t in stock]


@pytest.mark.parametrize("place", BACKENDS)
def test_gradient_lies_as_the_heads_do(place):
    """So that the projection before takes it without a copy."""
    q, k = (projected(2, 7, n, 16, device=place.device, seed=n).requires_grad_() for n in (6, 2))
    for width in (16, 8):
        cos, sin = tables(7, width, device=place.device)
        with backends.backend(place.backend):
            grads = torch.autograd.grad(functional.rotary(q, k, cos, sin), (q, k), (torch.ones_like(q), k.detach()))
        assert [g.stride() for g in grads] == [q.stride(), k.stride()]


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [128, 127], ids=["words", "elements"])
def test_more_than_2_to_31_elements(gpu_memory, backend, interleaved, dim):
    shape = (2, 8, 2**20 + 2**14, dim)
    gpu_memory(24 * 2**30)
    q = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    k = q[:, :1, : shape[2]]
    cos, sin = tables(shape[2], 126 if dim == 127 else 128, device="cuda", dtype=torch.bfloat16)
    with backends.backend(backend):
        out, _ = functional.rotary(q, k, cos, sin, interleaved)
    for part in (slice(0, 3), slice(-3, None)):
        for batch, head in itertools.product((0, 1), (0, 7)):
            inputs = q[batch, head, part], cos[part], sin[part]
            stock, _ = rotary(inputs[0], inputs[0], *inputs[1:], interleaved)
            wide = [t.double() for t in inputs]
            exact, _ = rotary(wide[0], wide[0], *wide[1:], interleaved)
            assert excess(out[batch, head, part], exact, greatest_error(stock, exact)) is None


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_rotary_dim_that_fits_no_table(device):
    q, (cos, sin) = heads(2, 3, 5, 16, device=device), tables(5, 8, device=device)
    with pytest.raises(ValueError, match=r"rotary_dim=12 with cos of shape \(5, 8\); expected 8, or 16"):
        functional.rotary(q, q, cos, sin, rotary_dim=12)


def test_reprs():
    assert repr(fastlayers.FusedRotary()) == "FusedRotary()"
    layer = fastlayers.FusedRotary(True, rotary_dim=64, dtype=torch.bfloat16)
    assert repr(layer) == "FusedRotary(interleaved=True, rotary_dim=64, dtype=torch.bfloat16)"
