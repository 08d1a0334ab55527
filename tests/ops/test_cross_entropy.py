"""cross_entropy beyond the contract: every option of torch's at once, errors, the guard of inplace_backward, chunks."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlayers import backends, functional
from fastlayers.ops import cross_entropy as ops
from tests import ROOT
from tests.harness import INTERPRETER, PLACES, Place, answer, assert_close, assert_no_worse, excess, needs_gpu
from tests.table.losses import CROSS_ENTROPY
from tests.table.sample import Call
from tests.table.softmax import HALF

BACKENDS = [
    pytest.param(place, marks=place.marks(), id=str(place)) for place in PLACES if place.backend in ("triton", "cuda")
]
EVERYWHERE = [pytest.param(Place("cpu", "eager"), id="cpu-eager"), *BACKENDS]
SHAPES = {"no batch": (9,), "rows": (6, 37), "pixels": (2, 9, 7)}


def made(shape: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.float64, ignored: bool = True):
    """Logits, classes of which some are ignored, and a weight of each class."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = (3 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    count, of = (shape[0], ()) if len(shape) == 1 else (shape[1], shape[:1] + shape[2:])
    target = torch.randint(count, of, generator=generator)
    if ignored and target.dim():
        target.view(-1)[::4] = -100
    weight = torch.rand(count, generator=generator) + 0.5
    return x, target.to(device), weight.to(device, dtype)


# ---- torch's options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_combination(shape, place):
    x, target, weight = made(shape, place.device)
    for w, reduction, smoothing, softcap, z_loss in itertools.product(
        (None, weight), ("none", "mean", "sum"), (0.0, 0.2), (None, 3.0), (0.0, 0.1)
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap, "z_loss": z_loss}
        call = Call((x, target, w), options)
        with backends.backend(place.backend):
            ours = answer(functional.cross_entropy, call)
        stock = answer(CROSS_ENTROPY.reference, call)
        assert_close((ours.outs, ours.grads), (stock.outs, stock.grads))


@pytest.mark.parametrize(
    ("size_average", "reduce"), [(None, None), (True, None), (False, None), (None, False), (False, True)]
)
def test_deprecated_arguments(size_average, reduce):
    x, target, _ = made((6, 37))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_close(
            functional.cross_entropy(x, target, None, size_average, -100, reduce),
            F.cross_entropy(x, target, None, size_average, -100, reduce),
        )


@pytest.mark.parametrize("place", EVERYWHERE)
def test_all_rows_ignored(place):
    x, target, weight = made((6, 37), place.device)
    target.fill_(-100)
    for w, z_loss in itertools.product((None, weight), (0.0, 0.1)):
        with backends.backend(place.backend):
            loss = functional.cross_entropy(x, target, w, z_loss=z_loss)
            (dx,) = torch.autograd.grad(loss, x)
        assert loss.isnan()
        if not z_loss or place.backend != "eager":
            assert torch.equal(dx, torch.zeros_like(x))


@pytest.mark.parametrize("place", BACKENDS)
def test_ignored_rows_are_not_read(place):
    x, target, _ = made((7, 37), place.device, torch.float32)
    values = x.detach().clone()
    values[target == -100] = float("nan")
    values.requires_grad_()
    with backends.backend(place.backend):
        expected = torch.autograd.grad(functional.cross_entropy(x, target), x)
        ours = torch.autograd.grad(functional.cross_entropy(values, target), values)
    assert_close(ours, expected)


@pytest.mark.parametrize("wrong", [-1, 37, 2**40])
def test_target_out_of_range(wrong):
    x, target, _ = made((6, 37))
    target[2] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        functional.cross_entropy(x, target)


OUT_OF_RANGE = """
import sys, torch
from fastlayers import backends, functional
backend, wrong, shape = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
x = torch.randn(shape, device="cuda")
target = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64, device="cuda")
target.view(-1)[2] = wrong
try:
    with backends.backend(backend):
        functional.cross_entropy(x, target)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""


@needs_gpu
@pytest.mark.parametrize("wrong", [-1, 37, 2**40])
@pytest.mark.parametrize("shape", [(6, 37), (2, 37, 5)], ids=str)
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_target_out_of_range_on_a_gpu(backend, shape, wrong):
    """A device-side assert, as torch's kernel has it: it ends the context, so in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_RANGE, backend, str(wrong), str(shape)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert "assert" in run.stdout + run.stderr


def test_softcap_must_be_positive():
    x, target, _ = made((6, 37))
    for softcap in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="softcap"):
            functional.cross_entropy(x, target, softcap=softcap)


# ---- inplace_backward ------------------------------------------------------------------------------------------------


def test_leaves_are_never_written():
    x, target, _ = made((6, 37))
    with pytest.raises(ValueError, match="leaf"):
        functional.cross_entropy(x, target, inplace_backward=True)
    functional.cross_entropy(x.detach(), target, inplace_backward=True)


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradient_in_place(shape, place, reduction):
    x, target, weight = made(shape, place.device)
    options = {"reduction": reduction, "label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.1}
    with backends.backend(place.backend):
        expected = torch.autograd.grad(functional.cross_entropy(x, target, weight, **options).sum(), x)
        logits = x * 1
        loss = functional.cross_entropy(logits, target, weight, **options, inplace_backward=True).sum()
        ours = torch.autograd.grad(loss, x)
    assert_close(ours, expected)
    assert torch.equal(logits, ours[0]) == (place.backend != "eager")


@pytest.mark.parametrize("place", BACKENDS)
def test_second_backward_raises(place):
    x, target, _ = made((6, 37), place.device)
    with backends.backend(place.backend):
        loss = functional.cross_entropy(x * 1, target, inplace_backward=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward"):
        loss.backward()


@pytest.mark.parametrize("place", BACKENDS)
def test_whoever_else_kept_the_logits_is_told(place):
    x, target, _ = made((6, 37), place.device)
    logits = x * 1
    with backends.backend(place.backend):
        loss = functional.cross_entropy(logits, target, inplace_backward=True)
    other = logits.square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("place", BACKENDS)
def test_second_derivatives_write_nothing(place):
    x, target, _ = made((6, 37), place.device)
    logits = x * 1
    before = logits.detach().clone()
    with backends.backend(place.backend):
        loss = functional.cross_entropy(logits, target, inplace_backward=True)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(logits, before)
    assert torch.autograd.grad(dx.square().sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("place", BACKENDS)
def test_logits_that_are_not_contiguous_stay(place):
    x, target, _ = made((37, 6), place.device)
    logits = (x * 1).t()
    before = logits.detach().clone()
    with backends.backend(place.backend):
        loss = functional.cross_entropy(logits, target[:6] % 37, inplace_backward=True)
        loss.backward()
    assert torch.equal(logits, before)


# ---- the chunk of linear_cross_entropy -------------------------------------------------------------------------------


CHUNKS = [(5, 37, 40), (5, 37, 37), (3, 64, 64), (4, 1000, 1024), (2, 5000, 5056), (2, 4099, 4100)]


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(("rows", "columns", "padded"), CHUNKS)
def test_chunk(rows, columns, padded, place):
    """Losses of each row, and in the place of the logits their gradient: against cross_entropy on the classes."""
    check_chunks(rows, columns, padded, place, torch.float64)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "padded"), [*CHUNKS, (3, 128256, 128256), (3, 50257, 50304), (2, 700_001, 700_008)]
)
def test_chunk_on_a_gpu(rows, columns, padded, dtype):
    check_chunks(rows, columns, padded, Place("cuda", "cuda"), dtype)


def check_chunks(rows: int, columns: int, padded: int, place: Place, dtype: torch.dtype) -> None:
    x, target, weight = made((rows, columns), place.device, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    scales = [None, torch.tensor([0.5]), torch.linspace(0.5, 2, rows)]
    variants = [(None, 0.0, None, 0.0), (weight, 0.1, None, 0.0), (None, 0.0, 3.0, 0.1), (weight, 0.2, 5.0, 0.1)]
    # Each combination takes the interpreter a second: it gets every scale and every variant once.
    together = zip if place == INTERPRETER else itertools.product
    for scale, options in together([*scales, None], variants):
        w, smoothing, softcap, z_loss = options
        scale = scale if scale is None else scale.to(place.device, wide)
        exact = x.detach().double().requires_grad_()
        losses = CROSS_ENTROPY.reference(
            exact, target, w if w is None else w.double(), reduction="none", label_smoothing=smoothing,
            softcap=softcap, z_loss=z_loss,
        )  # fmt: skip
        (dx,) = torch.autograd.grad((losses * (1.0 if scale is None else scale)).sum(), exact)
        for want_grad in (False, True):
            logits = torch.full((rows, padded), float("nan"), dtype=dtype, device=place.device)
            logits[:, :columns] = x.detach()
            before = logits.clone()
            with backends.backend(place.backend):
                ours = ops.cross_entropy_chunk_(
                    logits, target, w, -100, smoothing, softcap, z_loss, scale, want_grad, columns
                )
            assert ours.dtype == wide
            near = 1e-12 if dtype == torch.float64 else 2e-6
            torch.testing.assert_close(ours.double(), losses.detach(), rtol=near, atol=near)
            if want_grad:
                unit = float(dx.abs().max()) * torch.finfo(dtype).eps
                assert excess(logits[:, :columns], dx, max(unit, near * float(dx.abs().max()))) is None
                assert not logits[:, columns:].any()
            else:
                torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)


def test_chunk_of_wrong_classes():
    with pytest.raises(IndexError, match="out of bounds"):
        ops.cross_entropy_chunk_(torch.randn(2, 8), torch.tensor([0, 7]), None, -100, 0.0, None, 0.0, None, True, 6)


# ---- what the contract's table has no place for ----------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("shape", [(2**16 + 1, 2**15 + 8), (3, 2**20 + 3, 700)], ids=["rows", "columns"])
def test_more_than_2_to_31_elements(gpu_memory, backend, shape):
    gpu_memory(20 * 2**30)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    target = torch.randint(shape[1], shape[:1] + shape[2:], device="cuda")
    with backends.backend(backend):
        losses = functional.cross_entropy(x, target, reduction="none")
        (dx,) = torch.autograd.grad(losses.sum(), x)
    for part in (slice(0, 2), slice(-2, None)):
        where = (part,) if len(shape) == 2 else (slice(-1, None), slice(None), part)
        exact = x.detach()[where].double().requires_grad_()
        true = F.cross_entropy(exact, target[(where[0], *where[2:])], reduction="none")
        torch.testing.assert_close(losses[(where[0], *where[2:])].double(), true, rtol=1e-2, atol=1e-2)
        (true_dx,) = torch.autograd.grad(true.sum(), exact)
        assert excess(dx[where], true_dx, 1e-5) is None


@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("length", [64, 67])
def test_every_alignment(backend, offset, length):
    x, target, _ = made((5, length), "cuda", torch.bfloat16)
    moved = x.detach().new_empty(x.numel() + offset)[offset:].view(x.shape).copy_(x.detach()).requires_grad_()
    with backends.backend(backend):
        ours = torch.autograd.grad(functional.cross_entropy(moved, target), moved)
        expected = torch.autograd.grad(functional.cross_entropy(x, target), x)
    assert_close(ours, expected)


@pytest.mark.skipif(backends.problem("cpu") is not None, reason="csrc was not built")
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.2}], ids=["plain", "all"])
@pytest.mark.parametrize("shape", [(2, 21, 700), (3, 40, 130), (2, 5, 3), (300, 24), (2, 70, 4)], ids=str)
def test_tiles_of_rows_on_a_cpu(shape, options):
    """Several tiles, one that is not whole, and tiles that are transposed since the classes are few."""
    x, target, _ = made(shape, dtype=torch.float32)

    def outcome(x, function=CROSS_ENTROPY.reference):
        loss = function(x, target, **options)
        return loss, torch.autograd.grad(loss, x)

    with backends.backend("cpu"):
        assert_no_worse(outcome(x, functional.cross_entropy), outcome, x)


def test_small_problems_are_torchs(monkeypatch):
    """Where one launch less is what counts, and no kernel has anything else to offer."""
    kernels = type("Kernels", (), {"backend": "cuda", "unasked": False})()
    monkeypatch.setattr(ops.FAMILY, "kernels_for", lambda x: kernels)
    x, target, _ = made((6, 37))
    assert_close(functional.cross_entropy(x, target), F.cross_entropy(x, target))


def test_composed_backward_is_torchs():
    """The formulas that serve second derivatives, over all options and in every derivative."""
    x, target, weight = made((2, 9, 7))
    dy = torch.randn(2, 7, dtype=torch.float64)
    for w, reduction, smoothing, softcap, z_loss in itertools.product(
        (None, weight), (0, 1, 2), (0.0, 0.2), (0.0, 3.0), (0.0, 0.1)
    ):
        options = ops.Options(-100, reduction, smoothing, softcap, z_loss)
        sent = dy if reduction == 0 else dy[0, 0]
        loss = CROSS_ENTROPY.reference(
            x, target, w, reduction=("none", "mean", "sum")[reduction], label_smoothing=smoothing,
            softcap=softcap or None, z_loss=z_loss,
        )  # fmt: skip
        (expected,) = torch.autograd.grad(loss, x, sent, create_graph=True)
        ours: Tensor = ops.decomposed_backward(sent, x, target, w, options)
        assert_close(ours, expected)
        again = torch.autograd.grad(ours.sin().sum(), x)
        assert_close(again, torch.autograd.grad(expected.sin().sum(), x))
