"""What four processes do: every case in every placement, beside one process with whole tensors."""

from __future__ import annotations

import itertools
import logging
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fastlayers import backends
from fastlayers import functional as F
from fastlayers.ops import sharding, vocab_parallel_head
from tests.distributed.sharding_cases import CASES, Case
from tests.distributed.sharding_models import check_llama

RANKS = 4
#: What a test of all cases would take a minute for.
PARTS = 6


def outputs(found: Any) -> list[Tensor]:
    return [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]


def leaves_of(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    return [t.requires_grad_() if case.gradients and i not in case.make else t for i, t in enumerate(tensors)]


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


class Expected:
    """Results, gradients and second derivatives of a case by torch's composition on whole tensors."""

    def __init__(self, case: Case) -> None:
        self.case = case
        with backends.backend("eager"):
            self.leaves = leaves_of(case, case.tensors())
            self.outs = outputs(case.function(*self.leaves))
            if not case.gradients:
                return
            self.wanted = [i for i, t in enumerate(self.leaves) if t.requires_grad and self.reaches(t)]
            generator = torch.Generator().manual_seed(1)
            self.dys = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in self.outs]
            own = [self.leaves[i] for i in self.wanted]
            self.gradients = torch.autograd.grad(self.outs, own, self.dys, create_graph=True)
            self.second = second(self.gradients, own) if case.twice else []

    def reaches(self, t: Tensor) -> bool:
        found = torch.autograd.grad([out.sum() for out in self.outs], t, retain_graph=True, allow_unused=True)
        return found[0] is not None


def second(gradients: tuple[Tensor, ...], own: list[Tensor]) -> list[Tensor]:
    """The gradients of the sum of squares of gradients, which may depend on no leaf."""
    total = sum(g.square().sum() for g in gradients) + sum((t * 0.0).sum() for t in own)
    return list(torch.autograd.grad(total, own))


def check(expected: Expected, mesh: DeviceMesh, placements: tuple[tuple[Placement, ...], ...], twice: bool) -> None:
    case = expected.case
    tensors = [
        distribute_tensor(t.detach(), mesh, placed, src_data_rank=None)
        for t, placed in zip(case.tensors(), placements, strict=True)
    ]
    own = leaves_of(case, tensors)
    outs = outputs(case.function(*own))
    for out, want in zip(outs, expected.outs, strict=True):
        assert isinstance(out, DTensor)
        assert out.shape == want.shape
        torch.testing.assert_close(whole(out), want)
    if not case.gradients:
        return
    wanted = [own[i] for i in expected.wanted]
    for replicated in (False, True):
        dys = [
            distribute_tensor(
                dy,
                mesh,
                [Replicate()] * mesh.ndim
                if replicated or any(p.is_partial() for p in out.placements)
                else out.placements,
                src_data_rank=None,
            )
            for dy, out in zip(expected.dys, outs, strict=True)
        ]
        found = torch.autograd.grad(outs, wanted, dys, create_graph=twice and replicated, retain_graph=True)
        for g, want, t in zip(found, expected.gradients, wanted, strict=True):
            assert g.shape == t.shape
            torch.testing.assert_close(whole(g), want)
    if twice:
        for g, want in zip(second(found, wanted), expected.second, strict=True):
            torch.testing.assert_close(whole(g), want)
    with torch.no_grad():
        for out, want in zip(outputs(case.function(*own)), expected.outs, strict=True):
            torch.testing.assert_close(whole(out), want)


def check_cases(part: int, rank: int) -> None:
    """Unforced calls are computed by torch's operations, in float64 and of these sizes, and forced ones by kernels."""
    meshes = quiet_meshes()
    for case in CASES[part::PARTS]:
        expected = Expected(case)
        for mesh in meshes:
            for i, placements in enumerate(case.placements(mesh.ndim)):
                backend = "cpu" if case.cpu and i % 2 else None
                sharding.fallbacks(reset=True)
                try:
                    with backends.backend(backend):
                        check(expected, mesh, placements, case.twice and i == 1)
                    assert not sharding.fallbacks(), sharding.fallbacks()
                except Exception as error:
                    given = ", ".join(map(str, placements))
                    raise AssertionError(f"{case.name} on {mesh}, {given}, backend {backend}") from error


def on_mesh(mesh: DeviceMesh, t: Tensor, *placements: Placement) -> DTensor:
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def check_dropout(mesh: DeviceMesh) -> None:
    """Shards are dropped independently, and replicas alike; the gradient has the mask of the result."""
    ones, zeros = torch.ones(64, 1024), torch.zeros(64, 1024)
    masks = []
    for placement in (Shard(0), Shard(1), Replicate()):
        for name in (None, "cpu"):
            torch.manual_seed(0)
            x, y = (on_mesh(mesh, t, placement).requires_grad_() for t in (ones, zeros))
            with backends.backend(name):
                out = F.dropout_add(x, y, 0.25)
            whole_out = whole(out)
            kept = (whole_out != 0).double()
            dx, dy = torch.autograd.grad(out, (x, y), on_mesh(mesh, ones, Replicate()))
            torch.testing.assert_close(whole(dx), whole_out)
            assert bool((whole(dy) == 1).all())
            assert abs(kept.mean() - 0.75) < 0.01
            torch.testing.assert_close(whole_out, kept.float() / 0.75)
            masks.append(kept - 0.75)
            gathered = [torch.empty_like(whole_out) for _ in range(RANKS)]
            dist.all_gather(gathered, whole_out)
            assert all(torch.equal(whole_out, other) for other in gathered)
            assert len({torch.get_rng_state().sum().item()}) == 1
    rows = masks[0].chunk(RANKS)
    for a, b in itertools.combinations(rows, 2):
        assert abs((a * b).mean()) < 0.01, "the masks of two shards depend on each other"
    assert not sharding.fallbacks()
    torch.manual_seed(0)
    expected = F.scale_add(ones, ones[0], zeros, 0.5, True)
    for placement, of_gamma in ((Shard(0), Replicate()), (Shard(1), Shard(0))):
        torch.manual_seed(0)
        out = F.scale_add(
            on_mesh(mesh, ones, placement), on_mesh(mesh, ones[0], of_gamma), on_mesh(mesh, zeros, placement), 0.5, True
        )
        torch.testing.assert_close(whole(out), expected)  # the same samples as in one process


def check_replicas(mesh: DeviceMesh) -> None:
    """On a mesh of two dimensions, of which one shards, replicas have one mask and shards have two."""
    ones = torch.ones(64, 1024)
    for placements in ((Shard(0), Replicate()), (Replicate(), Shard(1))):
        torch.manual_seed(0)
        out = F.dropout_add(on_mesh(mesh, ones, *placements), on_mesh(mesh, 0 * ones, *placements), 0.25)
        for dim, placement in enumerate(placements):
            own = out.to_local()
            gathered = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(gathered, own, mesh.get_group(dim))
            assert torch.equal(*gathered) == (placement == Replicate())


def check_fallbacks(mesh: DeviceMesh) -> None:
    """What has no rule is torch's, counted with its reason; a forced backend says so."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    partial_x = DTensor.from_local(x / RANKS, mesh, [Partial()])
    whole_w = on_mesh(mesh, w, Replicate())
    sharding.fallbacks(reset=True)
    torch.testing.assert_close(whole(F.rms_norm(partial_x, (12,), whole_w)), F.rms_norm(x, (12,), w))
    assert sharding.fallbacks() == {("rms_norm", "an operand is Partial(sum); expected Shard or Replicate"): 1}
    torch.testing.assert_close(whole(F.glu(on_mesh(mesh, x, Shard(1)), -1)), F.glu(x, -1))
    assert ("glu", "dimension 1 of (8, 12) is sharded; expected it on each rank as a whole") in sharding.fallbacks()
    with backends.backend("cpu"), pytest.raises(backends.BackendError, match="expected Shard or Replicate"):
        F.rms_norm(partial_x, (12,), whole_w)
    with pytest.raises(RuntimeError, match="mixed torch"):
        F.rms_norm(on_mesh(mesh, x, Shard(0)), (12,), w)
    with pytest.raises(RuntimeError):
        F.add_relu(on_mesh(mesh, x, Shard(0)), on_mesh(mesh, torch.cat((x, x)), Shard(0)))
    logits = on_mesh(mesh, x, Shard(1)).requires_grad_()
    target = torch.arange(8)
    sharding.fallbacks(reset=True)
    loss = F.cross_entropy(logits, target)  # plain, as in torch's loss_parallel
    torch.testing.assert_close(whole(loss), F.cross_entropy(x, target))
    assert not sharding.fallbacks()
    (d,) = torch.autograd.grad(loss, logits, create_graph=False)
    assert d.placements == (Shard(1),)
    waited = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)], async_op=True)
    late = partial_x.redistribute(placements=[Shard(0)], async_op=True).requires_grad_()
    for t in (waited, late):
        torch.testing.assert_close(whole(F.rms_norm(t, (12,), whole_w)), F.rms_norm(x, (12,), w))
    torch.testing.assert_close(
        whole(torch.autograd.grad(F.silu(late).sum(), late)[0]),
        torch.autograd.functional.jacobian(lambda t: F.silu(t).sum(), x),
    )


def check_head(mesh: DeviceMesh) -> None:
    """Several chunks, by a weight whose classes are sharded."""
    torch.manual_seed(0)
    x, w = torch.randn(1800, 6, dtype=torch.float64), torch.randn(13, 6, dtype=torch.float64)
    target = torch.randint(13, (1800,))
    assert vocab_parallel_head.chunk_size(1800) < 1800
    expected = F.linear_cross_entropy(x.requires_grad_(), w.requires_grad_(), target)
    dx, dw = torch.autograd.grad(expected, (x, w))
    own = [on_mesh(mesh, t.detach(), p).requires_grad_() for t, p in ((x, Replicate()), (w, Shard(0)))]
    sharding.fallbacks(reset=True)
    loss = F.linear_cross_entropy(*own, on_mesh(mesh, target, Replicate()))
    found = torch.autograd.grad(loss, own)
    assert [g.placements for g in found] == [(Partial(),), (Shard(0),)]
    torch.testing.assert_close([whole(t) for t in (loss, *found)], [expected, dx, dw])
    assert not sharding.fallbacks()


def check_ranks_without_rows(mesh: DeviceMesh) -> None:
    """A call without a rule falls back on all ranks, or those with rows would wait for the others."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    own = on_mesh(mesh, x, Shard(0), Replicate()), on_mesh(mesh, w, Replicate(), Shard(0))
    target = on_mesh(mesh, torch.zeros(1, dtype=torch.int64), Shard(0), Replicate())
    for function in (F.linear_cross_entropy, F.linear_log_prob):
        sharding.fallbacks(reset=True)
        function(*own, target)
        # The composition of torch 2.14 leaves partial logits, for which the loss within falls back, too.
        reasons = [reason for name, reason in sharding.fallbacks() if name == function.__name__]
        assert reasons == ["1 classes leave a rank without any"], sharding.fallbacks()


def check_running_statistics(mesh: DeviceMesh) -> None:
    """They take the moments of the whole batch, also where a rank has no samples, or some of the channels."""
    torch.manual_seed(0)
    for samples, (of_x, of_channels) in itertools.product((8, 3), ((Shard(0), Replicate()), (Shard(1), Shard(0)))):
        x = 3 + torch.randn(samples, 6, 4, dtype=torch.float64)
        statistics = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
        own = [on_mesh(mesh, t.clone(), of_channels) for t in statistics]
        sharding.fallbacks(reset=True)
        F.batch_norm(on_mesh(mesh, x, of_x), *own, training=True, momentum=0.3)
        F.batch_norm(x, *statistics, training=True, momentum=0.3)
        torch.testing.assert_close([whole(t) for t in own], [*statistics])
        assert not sharding.fallbacks()


def check_largest(mesh: DeviceMesh, square: DeviceMesh) -> None:
    """The first of equal scores, calls that autograd does not record, and those that have no rule."""
    torch.manual_seed(0)
    # Whole numbers: a sum of such has the same bits in every order, and that differs with a shard's size.
    x, w = (torch.randint(-9, 10, (rows, 6)).double() for rows in (8, 13))
    w[4] = w[6] = w[12] = 9 * w[0]  # of ranks 1 and 3, one of which has one class
    bias = torch.cat((torch.zeros(12), torch.full((1,), float("-inf")))).double()  # rank 3 has no share of a sum
    target = F.linear_argmax(x, w)
    own = [on_mesh(mesh, t, p).requires_grad_() for t, p in ((x, Replicate()), (w, Shard(0)))]
    sharding.fallbacks(reset=True)
    for name in (None, "cpu"):
        with backends.backend(name):
            found = F.linear_argmax(*own)
            accuracy = F.linear_accuracy(*own, on_mesh(mesh, target, Replicate()))
            with torch.no_grad():
                classes = F.linear_topk(*own, 1).indices
                log_prob = F.linear_topk(*own, 1, linear_bias=on_mesh(mesh, bias, Shard(0)), log_prob=True).values
        assert torch.equal(whole(found), target)
        assert torch.equal(whole(classes), target[:, None])
        torch.testing.assert_close(whole(log_prob), F.linear_topk(x, w, 1, linear_bias=bias, log_prob=True).values)
        assert 4 in target
        assert not found.requires_grad
        assert whole(accuracy).item() == 1.0
        assert accuracy.placements == (Replicate(),)
    assert not sharding.fallbacks()
    values, _ = F.linear_topk(*own, 1)
    (dw,) = torch.autograd.grad(values.sum(), own[1])
    (expected,) = torch.autograd.grad(F.linear_topk(x, w.requires_grad_(), 1).values.sum(), w)
    torch.testing.assert_close(whole(dw), expected)
    w = w.detach()
    adapter = [on_mesh(mesh, t, Replicate()) for t in (x[:, :2], torch.ones(13, 2, dtype=torch.float64))]
    with torch.no_grad():
        torch.testing.assert_close(whole(F.linear_topk(*own, 2).values), F.linear_topk(x, w, 2).values)
        F.linear_argmax(*own, low_rank=tuple(adapter))
        twice = [on_mesh(square, t, *[p] * 2) for t, p in ((x, Replicate()), (w, Shard(0)))]
        assert torch.equal(whole(F.linear_argmax(*twice)), target)
    assert sharding.fallbacks(reset=True) == {
        ("linear_topk", "autograd is to record it; its gradient takes the whole logits"): 1,
        ("linear_topk", "k is 2; expected 1 to 1, the number of classes of the last rank"): 1,
        ("linear_argmax", "expected an input (..., H), a weight (V, H) and no adapter"): 1,
        ("linear_argmax", "the classes are sharded; expected one dimension of the mesh for them"): 1,
    }
    by_rows = [on_mesh(mesh, t, p) for t, p in ((x, Shard(0)), (w, Replicate()))]
    for given in (own, by_rows):
        with torch.no_grad(), pytest.raises(RuntimeError, match="out of range"):
            F.linear_topk(*given, 14)


def check_distillation(mesh: DeviceMesh) -> None:
    """Numbers of rows and ranks that are not finite, several chunks, and 16 bits."""
    torch.manual_seed(0)
    x, w, y = (torch.randn(*shape, dtype=torch.float64) for shape in ((300, 6), (13, 6), (13, 300)))
    target = torch.randint(13, (300,)).masked_fill_(torch.rand(300) < 0.2, -100)
    target[0] = -100
    y = y.t()  # whose rows are not contiguous
    y[0], y[3:6, 4:], y[7, 12] = float("nan"), float("-inf"), float("-inf")  # rank 3 has class 12 alone
    spoilt = x.clone()
    spoilt[0] = float("nan")
    sharding.fallbacks(reset=True)
    for kind, chunked in itertools.product(("kl", "reverse_kl"), (None, "cpu")):
        call = partial(F.linear_divergence, divergence=kind, reduction="none", temperature=2.0)
        plain = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        placed = [on_mesh(mesh, t, p).requires_grad_() for t, p in ((spoilt, Replicate()), (w, Shard(0)))]
        one = call(*plain, y, target=target)
        with backends.backend(chunked):
            loss = call(*placed, on_mesh(mesh, y, Shard(1)), target=on_mesh(mesh, target, Replicate()))
        assert loss.placements == (Replicate(),)
        torch.testing.assert_close(whole(loss), one)
        if kind == "reverse_kl":  # infinite where the teacher has no share
            assert one[3:6].detach().isinf().any()
            continue
        (dx, dw), expected = torch.autograd.grad(loss.sum(), placed), torch.autograd.grad(one.sum(), plain)
        assert (dx.placements, dw.placements) == ((Partial(),), (Shard(0),))
        torch.testing.assert_close(whole(dx), expected[0])
        if chunked:  # the composition multiplies all rows
            torch.testing.assert_close(whole(dw), expected[1])
    low = [on_mesh(mesh, t.bfloat16(), p) for t, p in ((x, Replicate()), (w, Shard(0)), (x + 1, Replicate()))]
    loss = F.linear_divergence(*low, low[1], reduction="sum")
    assert loss.dtype is torch.bfloat16
    one = F.linear_divergence(x, w, x + 1, w, reduction="sum")
    torch.testing.assert_close(whole(loss).double(), one, rtol=2e-2, atol=0.0)
    assert not sharding.fallbacks()


def check_distillation_without_rule(mesh: DeviceMesh, square: DeviceMesh) -> None:
    torch.manual_seed(0)
    x, w, y = (torch.randn(*shape, dtype=torch.float64) for shape in ((8, 6), (13, 6), (8, 13)))
    sharding.fallbacks(reset=True)
    placed = [on_mesh(mesh, t, p) for t, p in ((x, Replicate()), (w, Shard(0)), (y, Shard(1)))]
    plain_adapter = (x[:, :2], torch.ones(13, 2, dtype=torch.float64))
    adapter = tuple(on_mesh(mesh, t, Replicate()) for t in plain_adapter)
    twice = [on_mesh(square, t, p, p) for t, p in ((x, Replicate()), (w, Shard(0)), (y, Shard(1)))]
    calls: list[tuple[list[Any], dict[str, Any]]] = [
        (placed, {"divergence": "tv"}),
        (placed, {"divergence": "cosine"}),
        (placed, {"divergence": "js"}),
        (placed, {"low_rank": adapter}),
        (twice, {}),
        ([*placed[:2], placed[2].clone().requires_grad_()], {}),
    ]
    for tensors, options in calls:
        plain_options = {**options, "low_rank": plain_adapter} if "low_rank" in options else options
        one = F.linear_divergence(x, w, y, **plain_options)
        torch.testing.assert_close(whole(F.linear_divergence(*tensors, **options)), one)
    with pytest.raises(RuntimeError, match="expected a teacher's logits in the shape"):
        F.linear_divergence(*placed[:2], on_mesh(mesh, y[:1], Shard(1)))
    sharded = "the classes are sharded"
    assert {reason for _, reason in sharding.fallbacks(reset=True)} == {
        *(f"{sharded}; expected a divergence of kl or reverse_kl, but got {kind}" for kind in ("tv", "cosine", "js")),
        f"{sharded}; expected one dimension of the mesh for them",
        f"{sharded}, and the teacher requires a gradient",
        "expected weights (V, H) and no adapter",
        "the teacher's logits are (1, 13), and the student's (8, 13); expected one shape",
    }


class Net(nn.Module):
    def forward(self, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        normed, s = F.add_rms_norm(x, y, (12,), w, 1e-6)
        return F.swiglu(F.softmax(normed, -1), F.silu(s))


def check_compile(mesh: DeviceMesh) -> None:
    """A graph holds torch's composition, which Inductor fuses."""
    torch.manual_seed(0)
    tensors = [
        torch.randn(8, 12, dtype=torch.float64),
        torch.randn(8, 12, dtype=torch.float64),
        torch.randn(12, dtype=torch.float64),
    ]
    placed = [
        on_mesh(mesh, t, p).requires_grad_() for t, p in zip(tensors, (Shard(0), Shard(0), Replicate()), strict=True)
    ]
    expected, found = Net()(*placed), torch.compile(Net(), backend="aot_eager", fullgraph=True)(*placed)
    torch.testing.assert_close(whole(found), whole(expected))
    ours, theirs = (torch.autograd.grad(whole(t).square().sum(), placed) for t in (found, expected))
    torch.testing.assert_close([whole(g) for g in ours], [whole(g) for g in theirs])


def quiet_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def check_all(rank: int) -> None:
    flat, square = quiet_meshes()
    check_fallbacks(flat)
    check_dropout(flat)
    check_replicas(square)
    check_head(flat)
    check_ranks_without_rows(square)
    check_running_statistics(flat)
    check_largest(flat, square)
    check_distillation(flat)
    check_distillation_without_rule(flat, square)
    check_compile(flat)
    check_llama(flat)
