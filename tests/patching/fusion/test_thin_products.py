"""Products with adapters beside frozen weights: thin products, with dropout, gates and norms."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fastlayers import backends
from fastlayers import functional as FL
from fastlayers.kernels import low_rank
from fastlayers.ops import glu
from fastlayers.ops import low_rank as ops
from fastlayers.patching.fusion import specialised, thin_products
from fastlayers.patching.fusion.passes import fused
from fastlayers.patching.program.executors import KEYS, Facts, PythonExecutor, excluding
from fastlayers.patching.program.program import plain_name
from tests.patching.fusion.programs import (
    INTERPRETED,
    LOW,
    TOLERANCE,
    adapted,
    adapter,
    check,
    dropped,
    names_of,
    recorded,
)

pytestmark = pytest.mark.cpu_kernels


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize(
    ("rows", "inside", "outside", "rank"), [(35, 136, 200, 16), (17, 130, 131, 3), (150, 200, 136, 40)]
)
def test_an_adapter_beside_a_frozen_weight(device, dtype, rows, inside, outside, rank):
    """Forward and backward have one sum of products each, and read their large factors as they are."""
    x = torch.randn(2, rows, inside, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(outside, inside, device=device) * 0.1).to(LOW)
    bias = torch.randn(outside, device=device).to(LOW)
    a, b = adapter(device, dtype, inside, outside, rank)
    _, other = check(lambda *given: adapted(*given, 0.75), x, weight, a, b, tolerance=TOLERANCE[LOW])
    thin = dtype is torch.float32
    forward, found = names_of(other.forward), names_of(other.backward)
    for each in (forward, found):
        each.pop("sum_rows", 0)  # A long row is multiplied in parts.
    assert forward == Counter(wide_product=1, addmm_=1, **{"thin_product" if thin else "mm": 1})
    assert found["wide_product"] == 1
    if thin:
        assert found == Counter(wide_product=1, addmm_=1, thin_product=3)
        assert "x0" in other.kept
    else:  # The gradient is multiplied by the scale in the products with it, not before them.
        assert found == Counter(wide_product=1, addmm_=1, addmm=2, mm=1, empty=1)
    check(lambda *given: adapted(*given[:4], -2.0, given[4]), x, weight, a, b, bias, tolerance=TOLERANCE[LOW])


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("alike", [True, False])
def test_a_dropout_before_an_adapter(device, dtype, alike, monkeypatch):
    """Its mask is kept, and x as it is: in float32 nothing is drawn where torch draws the same in 16 bits."""
    monkeypatch.setattr(specialised, "draws_the_same", lambda device: alike)
    x = torch.randn(2, 17, 130, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(136, 130, device=device) * 0.1).to(LOW)
    a, b = adapter(device, dtype, 130, 136, 5)
    rounds = dtype is LOW
    _, other = check(
        lambda *given: dropped(*given, 0.75, 0.3, rounds), x, weight, a, b, tolerance=TOLERANCE[LOW], seed=1
    )
    (mask,) = (o.makes[1] for o in other.forward if plain_name(o.function) == "native_dropout")
    assert {"x0", mask} < {*other.kept}
    assert len(other.kept) == 6  # A, B, the frozen weight and the thin product
    forward, backward = names_of(other.forward), names_of(other.backward)
    assert forward["thin_product"] == forward["wide_product"] == forward["native_dropout"] == 1
    assert ("empty" in forward) == alike
    assert backward["thin_product"] == 1 + (0 if rounds else 2)
    assert backward["wide_product"] == 1
    assert "native_dropout_backward" not in backward


def test_dropouts_before_adapters_on_one_input(device):
    """Each has a mask of its own, and the gradient of what they read is one sum."""
    x = torch.randn(2, 17, 136, device=device, dtype=LOW, requires_grad=True)
    weights = [(torch.randn(n, 136, device=device) * 0.1).to(LOW) for n in (72, 40, 40, 24, 16, 16)]
    ranks, chances = (8, 8, 8, 8, 3, 8), (0.1, 0.1, 0.1, 0.4, 0.5, 0)
    parameters = [
        t for w, r in zip(weights, ranks, strict=True) for t in adapter(device, torch.float32, 136, len(w), r)
    ]

    def function(x, *given):
        factors, weights = given[:12], given[12:]
        results = []
        for i, (w, p) in enumerate(zip(weights, chances, strict=True)):
            a, b = factors[2 * i : 2 * i + 2]
            results.append(dropped(x, w, a, b, 0.5, p) if p else adapted(x, w, a, b, 0.5))
        return tuple(results)

    _, other = check(function, x, *parameters, *weights, tolerance=TOLERANCE[LOW], seed=1)
    found = names_of(other.backward)
    assert (found["wide_product"], found["addmm_"], found["add"]) == (4, 1, 0)  # without a mask; of rank 3; 3 and 1
    masks = [o.makes[1] for o in other.forward if plain_name(o.function) == "native_dropout"]
    assert len({*masks}) == 5
    assert {*masks} < {*other.kept}


def test_an_adapter_with_a_magnitude(device):
    """DoRA: no identity matrix is made, and what B gives is multiplied again, not kept."""
    x = torch.randn(2, 17, 130, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(136, 130, device=device) * 0.1).to(LOW)
    a, b = adapter(device, torch.float32, 130, 136, 5)
    magnitude = torch.rand(136, device=device).add_(0.5).requires_grad_()

    def function(x, weight, a, b, magnitude):
        y = F.linear(x, weight)
        product = F.linear(F.linear(torch.eye(130, device=device), a), b).T.detach()
        norm = torch.linalg.norm(weight.to(product.dtype) + 0.75 * product, dim=1).detach()
        share = (magnitude / norm).view(1, -1)
        thin = F.linear(F.linear(x.to(a.dtype), a), b)
        return (y + (share - 1) * y + share * thin * 0.75).to(y.dtype)

    program, other = check(function, x, weight, a, b, magnitude, tolerance=TOLERANCE[LOW])
    assert "eye" in names_of(program.forward)
    assert "eye" not in names_of(other.forward)
    # One is thin, two are terms of a sum, and one is computed again.
    assert names_of(other.backward)["mm"] == names_of(program.backward)["mm"] - 3 + 1
    large = {o.makes[0] for o in other.forward if plain_name(o.function) == "mm"}
    assert large
    assert large.isdisjoint(other.kept)


def test_a_gate_before_an_adapter(device, monkeypatch):
    """Its product is what A's gradient reads, and computed again of the gate and what it lets pass."""
    monkeypatch.setattr(glu, "CPU_LEAST", 0)
    gate, up = (torch.randn(2, 17, 136, device=device, dtype=LOW, requires_grad=True) for _ in range(2))
    weight = (torch.randn(72, 136, device=device) * 0.1).to(LOW)
    factors = adapter(device, torch.float32, 136, 72, 8)
    _, other = check(
        lambda gate, up, *given: adapted(FL.swiglu(gate, up), *given, 0.75),
        gate, up, weight, *factors, tolerance=TOLERANCE[LOW],
    )  # fmt: skip
    (product,) = (o.makes[0] for o in other.forward if plain_name(o.function) == "gated_forward")
    assert product not in other.kept
    assert len(other.kept) == 6  # gate, up, A, B, the frozen weight and the thin product
    assert names_of(other.backward)["gated_forward"] == 1


def test_dropouts_that_stay(device):
    """What is dropped is a result, or read by something else; nothing is trained; the mask is read too."""
    x = torch.randn(35, 136, device=device, dtype=LOW)
    a, _ = (t.detach() for t in adapter(device, torch.float32, 136, 200, 8))

    def function(x, a):
        kept, mask = torch.native_dropout(x.float(), 0.3, True)
        others, _ = torch.native_dropout(x.float(), 0.3, True)
        twice, _ = torch.native_dropout(torch.native_dropout(x.float(), 0.3, True)[0], 0.3, True)
        idle, _ = torch.native_dropout(x.float(), 0.3, False)
        products = [F.linear(t, a) for t in (kept, others, twice, idle)]
        return (kept, mask.float(), others.sin().sum(1), *products)

    _, other = check(function, x, a, seed=1)
    assert "empty" not in names_of(other.forward)


def test_masked_thin_products(device):
    """They have the error of float32, and of infinity and 0 they make what torch makes."""
    x = torch.randn(90, 140, device=device).to(LOW)
    t, u = torch.randn(140, 12, device=device), torch.randn(90, 12, device=device)
    mask = torch.rand(x.shape, device=device) < 0.7
    for a, b, of_a, of_b in (
        (x, t, mask, None), (t.t(), x.t(), None, mask.t()), (x.t(), u, mask.t(), None), (u.t(), x, None, mask),
    ):  # fmt: skip
        own = low_rank.thin_product(a, b, 1.5, of_a, of_b)
        first, second = (v.double() if m is None else v.double() * m for v, m in ((a, of_a), (b, of_b)))
        bound = 1.5 * (first.abs() @ second.abs())
        assert (own.dtype, own.is_contiguous()) == (torch.float32, True)
        assert ((own - 1.5 * first @ second).abs() / bound).max() < 8 * torch.finfo(torch.float32).eps
        own = low_rank.thin_product(*(v.to(LOW) for v in (a, b)), 1.5, of_a, of_b)
        first, second = (v.to(LOW).double() if m is None else v.double() * m for v, m in ((a, of_a), (b, of_b)))
        assert own.dtype is LOW
        assert ((own - 1.5 * first @ second).abs() / bound).max() < TOLERANCE[LOW]
    x[3, 5], x[4, 6], mask[3, 5], mask[4, 6] = torch.inf, torch.nan, False, False
    own = low_rank.thin_product(x, t, 1.0, mask)
    assert own.isnan().nonzero()[:, 0].unique().tolist() == [3, 4]


def test_a_mask_is_drawn_as_for_float32(device):
    """Whatever the number of elements, the generator is left as it is by a dropout of float32."""
    for shape in ((3, 40), (3, 33), (2, 7), (2**20 + 1, 1)):
        x = torch.randn(shape, device=device, dtype=LOW)
        masks = []
        for mask_of in (lambda x: torch.native_dropout(x.float(), 0.2, True)[1], lambda x: ops.drawn_mask(x, 0.2)):
            torch.manual_seed(3)
            masks.append(torch.cat([mask_of(x).flatten(), torch.rand(9, device=device) < 0.5]))
        assert torch.equal(*masks)
    torch.manual_seed(3)
    expected = torch.rand(9, device=device)
    torch.manual_seed(3)
    ops.draws_the_same.cache_clear()
    assert ops.draws_the_same(x.device)
    assert torch.equal(torch.rand(9, device=device), expected)


def test_an_adapter_of_float64_stays(device):
    x = torch.randn(2, 35, 136, device=device, dtype=LOW, requires_grad=True)
    weight = (torch.randn(200, 136, device=device) * 0.1).to(LOW)
    _, other = check(lambda *given: adapted(*given, 0.75), x, weight, *adapter(device, torch.float64, 136, 200, 8))
    assert not {"wide_product", "thin_product"} & names_of([*other.forward, *other.backward]).keys()


@pytest.mark.parametrize("rank", [12, 64, 128])
@pytest.mark.parametrize("factors", range(6))
def test_thin_products_have_the_error_of_float32(device, factors, rank):
    x, dy = (torch.randn(130, 180, device=device).to(LOW) for _ in range(2))
    t, u = torch.randn(180, rank, device=device), torch.randn(130, rank, device=device)
    a, b = ((x, t), (t.t(), x.t()), (dy.t(), u), (u.t(), dy), (x[:, 8:150], t[8:150]), (x[::3], t))[factors]
    own = low_rank.thin_product(a, b, 1.5)
    exact = 1.5 * a.double() @ b.double()
    bound = 1.5 * (a.double().abs() @ b.double().abs())
    assert (own.dtype, own.is_contiguous()) == (torch.float32, True)
    assert ((own - exact).abs() / bound).max() < 8 * torch.finfo(torch.float32).eps


MULTIPLES = {
    "multiple": (lambda x, t: (x.sin() * 0.3) @ t, True),
    "quotient": (lambda x, t: (x.sin() / 7) @ t, True),
    "view": (lambda x, t: (x.sin() * -2).view(2, 17, 136).view(34, 136) @ t, True),
    "transposed": (lambda x, t: t.t() @ (x.sin() * 0.3).t(), True),
    "itself": (lambda x, t: (x.sin() * 1.0) @ t, True),
    "nothing": (lambda x, t: (x.sin() * 0.0) @ t, False),
    "of an input": (lambda x, t: (x * 0.3) @ t, False),
    "many columns": (lambda x, t: (x.sin() * 0.3) @ t.repeat(1, 30), False),
    "another layout": (lambda x, t: (x.sin().view(136, 34).t() * 0.3).contiguous() @ t, False),
    "written to": (lambda x, t: (x.sin() * 0.3).add_(1) @ t, False),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", MULTIPLES)
def test_a_thin_product_of_a_multiple(device, dtype, case):
    """The product multiplies by the number, which no pass over the matrix does then."""
    if INTERPRETED and dtype is not LOW:
        pytest.skip("the interpreter has no bfloat16")
    function, joins = MULTIPLES[case]
    x = torch.randn(34, 136, device=device, dtype=dtype, requires_grad=True)
    thin = torch.randn(136, 5, device=device, dtype=dtype)
    _, other = check(function, x, thin, tolerance=TOLERANCE[dtype])
    found = names_of(other.forward)
    assert (found["addmm"], found["mm"]) == ((1, 0) if joins and case != "itself" else (0, 1))
    assert not joins or found["mul"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_adapters_on_one_input(device, dtype, monkeypatch):
    """The gradient of what several layers read is one sum; the layers feed others."""
    monkeypatch.setattr(thin_products, "LARGE", 0)
    x = torch.randn(3, 50, 144, device=device, dtype=LOW, requires_grad=True)
    weights = [(torch.randn(n, 144, device=device) * 0.1).to(LOW) for n in (160, 160)]
    down = (torch.randn(144, 160, device=device) * 0.1).to(LOW)
    parameters = [t for n in (160, 160) for t in adapter(device, dtype, 144, n, 8)]
    last = adapter(device, dtype, 160, 144, 8)

    def function(x, a1, b1, a2, b2, a3, b3, gate, up, down):
        h = F.silu(adapted(x, gate, a1, b1, 2.0)) * adapted(x, up, a2, b2, 0.5)
        return adapted(h, down, a3, b3, 1.0)

    _, other = check(function, x, *parameters, *last, *weights, down, tolerance=TOLERANCE[LOW])
    forward, backward = names_of(other.forward), names_of(other.backward)
    assert forward["wide_product"] == 3
    assert backward["wide_product"] == 2
    # What two layers read is read once, and once for the gradients of their factors.
    assert forward["thin_products"] == backward["thin_products"] == 1
    thin = dtype is torch.float32  # In 16 bits a product alone is cuBLAS's.
    assert (forward["thin_product"], forward["mm"]) == ((1, 0) if thin else (0, 1))
    assert (backward["thin_product"], backward["mm"], backward["addmm"]) == ((7, 0, 0) if thin else (0, 3, 4))


def test_a_norm_after_an_adapter(device):
    """Its weight is frozen like that of the layer, whose sum is one of products all the same."""
    x = torch.randn(110, 136, device=device, dtype=LOW, requires_grad=True)
    weight, scale = (torch.randn(shape, device=device).to(LOW) for shape in ((136, 136), (136,)))
    a, b = adapter(device, torch.float32, 136, 136, 8)

    def function(x, a, b, weight, scale):
        with backends.backend("cpu" if device == "cpu" else "cuda"):
            return FL.add_rms_norm(adapted(x, weight, a, b, 0.75), x, (136,), scale)

    _, other = check(function, x, a, b, weight, scale, tolerance=TOLERANCE[LOW])
    assert names_of(other.forward)["wide_product"] == 1
    assert names_of(other.backward)["thin_product"] == 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("rank", "parts"), [(5, 3), (16, 2), (40, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_thin_products_of_one_matrix(device, dtype, rank, parts, masked):
    x = torch.randn(110, 141, device=device).to(LOW)
    masks = [torch.rand(110, 141, device=device) < 0.5 if masked else None for _ in range(parts)]
    assert parts <= low_rank.most_parts(rank)
    for rows, large_first in itertools.product((True, False), repeat=2):
        large, of_large = (x, masks) if rows else (x.t(), [None if mask is None else mask.t() for mask in masks])
        length = large.shape[1 if large_first else 0]
        thin = [torch.randn(length, rank, device=device).to(dtype) for _ in range(parts)]
        thin = thin if large_first else [t.t() for t in thin]
        own = low_rank.thin_products(large, thin, 1.5, of_large, large_first)
        for y, t, mask in zip(own, thin, of_large, strict=True):
            kept = large.double() if mask is None else large.double() * mask
            a, b = (kept, t.double()) if large_first else (t.double(), kept)
            assert (y.dtype, y.is_contiguous()) == (dtype, True)
            exact, largest = 1.5 * a @ b, 1.5 * a.abs() @ b.abs()
            limit = 8 * torch.finfo(torch.float32).eps * largest
            if dtype is LOW:  # It is rounded once.
                limit += torch.finfo(LOW).eps / 2 * exact.abs() + torch.finfo(LOW).smallest_normal
            assert ((y - exact).abs() <= limit).all()


@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_thin_products_that_are_results(device, dtype, monkeypatch):
    """Each has memory of its own, as torch's have; views of them, too."""
    monkeypatch.setattr(thin_products, "LARGE", 0)
    x = torch.randn(2, 20, 136, device=device).to(LOW)
    factors = [torch.randn(8, 136, device=device).to(dtype) for _ in range(4)]

    def function(x, *factors):
        a, b, c, d = (F.linear(x.to(dtype), factor) for factor in factors)
        return a, b, c * d

    _, other = check(function, x, *factors, tolerance=TOLERANCE[LOW])
    assert names_of(other.forward)["thin_products"] == 1  # Of those that are multiplied.
    with torch.no_grad(), excluding(KEYS):
        found, _ = PythonExecutor(other, Facts()).forward(x, *factors)
    assert len({t.untyped_storage().data_ptr() for t in found}) == 3


def test_a_thin_product_divided_by_zero(device):
    """Infinite, as torch's: it is no multiple that a sum of products could have."""
    x, weight = torch.randn(17, 136, device=device).to(LOW), torch.randn(136, 72, device=device).to(LOW)
    a, b = torch.randn(136, 8, device=device).to(LOW), torch.randn(8, 72, device=device).to(LOW)
    program, tape, (expected,), _, _ = recorded(lambda x, w, a, b: x @ w + (x @ a) @ b / 0, (x, weight, a, b))
    run = PythonExecutor(fused(program), Facts())
    with torch.no_grad(), excluding(KEYS):
        (found,), _ = run.forward(x, weight, a, b, *tape.constants)
    assert torch.equal(found, expected)


def test_thin_products_that_stay_apart(device):
    """One is computed of another, or of one that waits for it; of another rank; written over before the next."""
    x, z = (torch.randn(40, 136, device=device, dtype=LOW) for _ in range(2))
    factors = [torch.randn(136, n, device=device) * 0.1 for n in (8, 8, 8, 8, 4, 8)]

    def function(x, z, a, b, c, d, e, f):
        of_x = x.float() @ a
        of_z = z.float() @ (b * of_x.sum())
        again = z.float() @ c
        last = x.float() @ (d * again.sum())
        changed = (z * 2).float() @ f
        changed.mul_(3)
        products = of_x, of_z, last, x.float() @ e, changed, (z * 2).float() @ a
        return tuple(product.abs() for product in products)  # What is returned stays apart anyway.

    _, other = check(function, x, z, *factors)
    assert names_of(other.forward)["thin_products"] == 1
