"""Ops and patched models in many threads at a time, each on a stream of its own: they give what one thread gives."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlayers
from tests.harness import DEVICES, Answer, Place, answer, assert_close, gradients_of, needs_gpu, outputs, same_bits
from tests.table import OPS
from tests.table.sample import Op, Sample

#: Ops with products: cuBLAS may choose another algorithm on another stream.
PRODUCTS = ("linear", "gated_linear", "linear_cross_entropy")
#: Threads that have a draw of the values in common share its tensors.
DRAWS = 4
#: Kernels whose blocks wait for each other, in their own launch.
LONG = {
    "softmax": ("length 262145", "length 1048579"),
    "layer_norm": ("length 262145", "length 1048579"),
    "group_norm": ("long group", "many pixels, channels_last"),
    "batch_norm": ("many pixels", "many pixels, channels_last"),
    "kl_div_logits": ("length 262145",),
    "cross_entropy": ("one long row", "more rows than one block adds"),
}
#: Triton compiles the kernels of each op in a second.
FEW = ("softmax", "relu_add", "mul", "layer_norm", "group_norm", "batch_norm", "rotary", "cross_entropy", "swiglu")


class Work:
    """Threads that run one function, each with its number and on a stream of its own. Raises what one of them does."""

    def __init__(self, threads: int, device: str) -> None:
        self.threads, self.device = threads, device
        self.barrier = threading.Barrier(threads)
        self.errors: list[BaseException] = []

    def run(self, function: Callable[[int], None]) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()  # what the threads read was written on another stream
        threads = [threading.Thread(target=self._one, args=(function, i)) for i in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads), "a thread does not end"
        if self.errors:
            raise self.errors[0]
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _one(self, function: Callable[[int], None], number: int) -> None:
        try:
            self.barrier.wait()
            with own_stream(self.device):
                function(number)
        except BaseException as error:
            self.errors.append(error)


def own_stream(device: str) -> AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()


def samples(op: Op, place: Place) -> Iterable[Sample]:
    """Its plainest call, and on csrc those with kernels of many blocks. Without a GPU torch answers most of them."""
    if place.device == "cuda" and (
        place.backend not in op.kernels or (place.backend == "triton" and op.name not in FEW)
    ):
        return
    yield op.samples[0]
    if place.backend == "cuda":
        yield from (op.sample(name) for name in LONG.get(op.name, ()))


@pytest.mark.parametrize(("place", "threads", "rounds"), [
    pytest.param(place, threads, rounds, id=str(place), marks=place.marks())
    for place, threads, rounds in (
        (Place("cuda", "cuda"), 16, 3), (Place("cuda", "triton"), 8, 3), (Place("cpu", "cpu"), 8, 3),
    )
])  # fmt: skip
def test_ops(place, threads, rounds):
    """The bits of a single thread, whatever the others run. The threads come first: what is made once, they make."""
    chosen = [(op, sample) for op in OPS for sample in samples(op, place)]
    calls = [[sample.make(place.device, torch.bfloat16, draw) for draw in range(DRAWS)] for _, sample in chosen]
    found: list[dict[int, list[Answer]]] = [{} for _ in range(threads)]

    def work(number: int) -> None:
        order = random.Random(number)
        for turn in range(rounds):
            for i in order.sample(range(len(chosen)), len(chosen)):
                result = answer(chosen[i][0].fused, calls[i][number % DRAWS])
                if turn in (0, rounds - 1):
                    found[number].setdefault(i, []).append(result)

    with place.forced(Sample("", ())) if place.device == "cuda" else nullcontext():
        Work(threads, place.device).run(work)
        for i, (op, sample) in enumerate(chosen):
            alone = [answer(op.fused, call) for call in calls[i]]
            for number in range(threads):
                expected = alone[number % DRAWS]
                for result in found[number][i]:
                    assert_alike(op, sample, result, expected)


def assert_alike(op: Op, sample: Sample, result: Answer, expected: Answer) -> None:
    for (what, mine), (_, theirs) in zip(result.named(), expected.named(), strict=True):
        if op.name in PRODUCTS:
            assert_close(mine, theirs)
        else:
            assert same_bits(mine, theirs), f"{op.name}, {sample.name}: {what} differs from that of a single thread"


@needs_gpu
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_backward_on_another_stream(op):
    """Autograd runs a backward on the stream of its forward, and makes the streams wait for each other."""
    call = op.samples[0].make("cuda", torch.bfloat16)
    expected = answer(op.fused, call)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        torch.cuda._sleep(5_000_000)  # what did not wait would read what is not there yet
        outs = outputs(op.fused(*call.args, **call.kwargs))
    second.wait_stream(first)
    with torch.cuda.stream(second):
        torch.cuda._sleep(5_000_000)
        dys = gradients_of(outs)
        sent = [(out, dy) for out, dy in zip(outs, dys, strict=True) if out.requires_grad]
        grads = torch.autograd.grad([out for out, _ in sent], call.leaves(), [dy for _, dy in sent])
        copies = [grad.clone() for grad in grads]
    torch.cuda.synchronize()
    assert_alike(op, op.samples[0], Answer(tuple(out.detach() for out in outs), tuple(copies)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_backward_in_another_thread(device):
    """Each thread runs the backward of what another one has computed."""
    calls = [
        op.samples[0].make(device, torch.float32 if op.dtypes[2:3] == (torch.float32,) else op.dtypes[0]) for op in OPS
    ]
    outs = [outputs(op.fused(*call.args, **call.kwargs)) for op, call in zip(OPS, calls, strict=True)]
    grads: list[tuple[Tensor, ...]] = [() for _ in OPS]

    def work(number: int) -> None:
        for i in range(number, len(OPS), 4):
            dys = gradients_of(outs[i])
            grads[i] = torch.autograd.grad(outs[i], calls[i].leaves(), dys)

    Work(4, device).run(work)
    for op, call, found in zip(OPS, calls, grads, strict=True):
        assert_alike(op, op.samples[0], Answer((), found), Answer((), answer(op.fused, call).grads))


# ---- patched models --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.proj((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class Gated(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.RMSNorm(width), nn.Linear(width, 96), nn.Linear(48, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wide(self.norm(x)).chunk(2, -1)
        return x + self.narrow(F.silu(gate) * up)


class Residual(nn.Module):
    """A bottleneck in eval mode: no batch changes the statistics."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 9, 32)),
    "gated": (lambda: nn.Sequential(Gated(), Gated()), (3, 7, 32)),
    "residual": (lambda: nn.Sequential(Residual(), Residual()).eval(), (2, 8, 6, 5)),
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Softmax(-1)), (5, 16)),
}


@pytest.mark.parametrize("shared", [True, False], ids=["one model", "a model for each thread"])
@pytest.mark.parametrize("device", DEVICES)
def test_patched_models(device, shared):
    """One for all threads, or one for each: outputs and gradients are those of the stock model.

    Python 3.11 makes syntax trees in one thread at a time, so they are patched here.
    """
    torch.manual_seed(0)
    threads, rounds = (12, 6) if device == "cuda" else (6, 4)
    stock = {name: build().to(device) for name, (build, _) in MODELS.items()}
    patched = [
        {name: fastlayers.patch_model(copy.deepcopy(model)) for name, model in stock.items()}
        for _ in range(1 if shared else threads)
    ]
    inputs = {name: [torch.randn(shape, device=device) for _ in range(DRAWS)] for name, (_, shape) in MODELS.items()}
    found: list[list[tuple[str, list[Tensor]]]] = [[] for _ in range(threads)]

    def work(number: int) -> None:
        mine = patched[0 if shared else number]
        order = random.Random(number)
        for _ in range(rounds):
            for name in order.sample(list(mine), len(mine)):
                found[number].append((name, results(mine[name], inputs[name][number % DRAWS])))

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        Work(threads, device).run(work)
        expected = {name: [results(model, x) for x in inputs[name]] for name, model in stock.items()}
    for number in range(threads):
        assert len(found[number]) == rounds * len(MODELS)
        for name, result in found[number]:
            # Another thread's tensors would differ by far more; how exact an op is, its own tests say.
            torch.testing.assert_close(result, expected[name][number % DRAWS], rtol=1e-3, atol=1e-3)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output of a model, and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    out = model(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]
