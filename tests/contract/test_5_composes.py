"""Contract, point 5: fused ops work with torch's compilers, transforms, hooks and wrappers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers import backends, functional
from fastlayers.ops.softmax import result_dtype
from tests.harness import (
    DEVICES,
    answer,
    assert_close,
    assert_no_worse,
    cases,
    gradients_of,
    needs_gpu,
    outputs,
    plain,
    same_bits,
)
from tests.table import LAYERS, OPS
from tests.table.batch_norm import BATCH_NORM, GROUP_NORM, INSTANCE_NORM
from tests.table.divergences import JS_DIV_LOGITS, KL_DIV_LOGITS
from tests.table.elementwise import ADD_RELU
from tests.table.layer_norm import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from tests.table.losses import CROSS_ENTROPY
from tests.table.sample import Call
from tests.table.softmax import LOG_SOFTMAX, SOFTMAX

BY_NAME = {"ids": lambda value: getattr(value, "name", value)}


def at_once(call: Call):
    """The same call on fresh leaves, for ``backward()``."""
    return call.map(lambda t: t.clone())


# ---- torch.compile, torch.export -------------------------------------------------------------------------------------


def few(op):
    """Of the samples of an op the first one, and smooth ones: at most four."""
    return [op.samples[0], *(sample for sample in op.samples[1:] if sample.smooth)][:4]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "number"), [(op, i) for op in OPS for i in range(len(few(op)))], **BY_NAME)
def test_compiles_to_one_graph(op, number, device):
    """With fullgraph=True, forward and backward, by Dynamo and AOTAutograd without Inductor. A draw takes each op."""
    call = few(op)[number].make(device, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(op.fused, fullgraph=True, backend="aot_eager")
    ours, expected = answer(compiled, call), answer(op.reference, call)
    assert_close((ours.outs, ours.grads), (expected.outs, expected.grads))


def everything(x: Tensor, y: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    a = functional.relu_add(x, y, bias)
    b = functional.add_relu(a, functional.mul(x, bias))
    p = functional.softmax(b, -1, scale=0.5, mask=mask)
    return functional.mul(p, functional.log_softmax(b, 0))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device):
    """Inductor compiles a graph of several ops, forward and backward."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(33, 70, generator=generator).to(device).requires_grad_() for _ in range(2))
    bias = torch.randn(70, generator=generator).to(device).requires_grad_()
    keep = (torch.rand(33, 70, generator=generator) > 0.2).to(device)
    call = Call((x, y, bias, keep), {})
    ours = answer(torch.compile(everything, fullgraph=True), call)
    expected = answer(everything, call)
    assert_close((ours.outs, ours.grads), (expected.outs, expected.grads))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "layer"), LAYERS, ids=lambda row: type(getattr(row, "module", None)).__name__)
def test_exports(op, layer, device):
    """torch.export gets torch's own operations only, so an exported program runs without fastlayers."""
    call = layer.sample.make(device, torch.float32)
    module, inputs = layer.module.to(device), layer.arguments(call)
    program = torch.export.export(module, inputs)
    assert_close(program.module()(*inputs), op.reference(*call.args, **call.kwargs))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not any("fastlayers" in target for target in targets)


REDUCTIONS = [
    SOFTMAX, LOG_SOFTMAX, LAYER_NORM, RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM, GROUP_NORM, INSTANCE_NORM, BATCH_NORM,
    CROSS_ENTROPY,
    KL_DIV_LOGITS, JS_DIV_LOGITS,
]  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("op", REDUCTIONS, **BY_NAME)
def test_compiled_reduction_keeps_its_kernel(op):
    torch._dynamo.reset()
    graphs = []

    def look(graph, _):
        graphs.append(graph)
        return graph.forward

    call = op.samples[0].make("cuda", torch.float32)
    ours = answer(torch.compile(op.fused, fullgraph=True, backend=look), call)
    assert_close(ours.grads, answer(op.reference, call).grads)
    assert "fastlayers" in graphs[0].code


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_dtype_under_a_mask_is_traced(shape, dtype):
    """That of the sum. A graph on a GPU asks for it before it keeps the kernel."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, mask: x.to(result_dtype(x, mask, None)), fullgraph=True, backend="eager")
    mask = torch.ones(shape, dtype=dtype)
    for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)):
        assert compiled(x, mask).dtype is (x + mask).dtype


# ---- memory and precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@cases(plain, dtypes=[torch.float32])
def test_activation_checkpointing(op, sample, place, dtype, use_reentrant):
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        expected = answer(op.fused, call)
        again = at_once(call)
        fused = functools.partial(op.fused, **again.kwargs)  # the reentrant one takes no keywords
        out = checkpoint(fused, *again.args, use_reentrant=use_reentrant)
        torch.autograd.backward(outputs(out), gradients_of(outputs(out)))
    assert all(same_bits(leaf.grad, g) for leaf, g in zip(again.leaves(), expected.grads, strict=True))


@cases(plain, dtypes=[torch.float32])
def test_saved_tensors_hooks(op, sample, place, dtype):
    """Saved tensors may be packed and come back as other tensors, as offloading does."""
    call = sample.make(place.device, dtype)
    with place.forced(sample):
        expected = answer(op.fused, call)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu().clone(), lambda t: t.to(place.device)):
            ours = answer(op.fused, call)
    assert_close(ours.grads, expected.grads)


class Net(nn.Module):
    """A block with every fused layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.relu_add, self.add_relu = fastlayers.FusedReLUAdd(0.5), fastlayers.FusedAddReLU()
        self.mul, self.softmax, self.log_softmax = (
            fastlayers.FusedMul(),
            fastlayers.FusedSoftmax(-1),
            fastlayers.FusedLogSoftmax(0),
        )
        self.dropout_add, self.scale_add = fastlayers.FusedDropoutAdd(0.0), fastlayers.FusedScaleAdd(12, 0.5)
        self.layer_norm, self.rms_norm = fastlayers.FusedLayerNorm(12), fastlayers.FusedRMSNorm(12)
        self.add_layer_norm, self.add_rms_norm = fastlayers.FusedAddLayerNorm(12), fastlayers.FusedAddRMSNorm(12)
        self.batch_norm, self.batch_norm_act = fastlayers.FusedBatchNorm1d(12), fastlayers.FusedBatchNormAct1d(12)
        self.gate, self.bias_act, self.gelu = (
            fastlayers.FusedSwiGLU(),
            fastlayers.FusedBiasAct(12),
            fastlayers.FusedGELU(),
        )
        self.group_norm, self.group_norm_act = fastlayers.FusedGroupNorm(3, 12), fastlayers.FusedGroupNormAct(3, 12)
        self.rotary = fastlayers.FusedRotary()

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu_add(self.first(x), x)
        h = self.scale_add(self.add_relu(self.second(h), x), self.dropout_add(x, h))
        h, s = self.add_layer_norm(self.batch_norm(h), self.layer_norm(x))
        h, s = self.add_rms_norm(self.batch_norm_act(self.group_norm(h), x), self.rms_norm(s))
        h = self.group_norm_act(h + s)
        h = self.gate(self.bias_act(h), self.gelu(s))
        h, _ = self.rotary(h, s, x[:1].detach().cos(), x[:1].detach().sin())
        return self.mul(self.softmax(h), self.log_softmax(h))


def network(device: str) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().to(device), torch.randn(6, 12).to(device)


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision(device, dtype):
    """A step of AMP with a GradScaler gives what it gives with torch's own operations."""

    def step(net, x, backend="eager"):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=128.0, enabled=x.dtype is torch.float32)
        with backends.backend(backend), torch.autocast(device, dtype):
            loss = net(x).float().square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return list(net.parameters())

    assert_no_worse(step(*network(device), None), step, *network(device))


def test_distributed_data_parallel(tmp_path):
    net, x = network("cpu")
    expected = gradients(net, x)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ours = gradients(nn.parallel.DistributedDataParallel(net), x)
    finally:
        torch.distributed.destroy_process_group()
    assert_close(ours, expected)


@cases(plain, dtypes=[torch.float32, torch.bfloat16], devices=["cuda"])
def test_cuda_graph(op, sample, place, dtype):
    """A CUDA graph captures forward and backward, and replays them on other values."""
    call = sample.make(place.device, dtype)
    fixed = at_once(call)
    with place.forced(sample):
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            dys = gradients_of(outputs(op.fused(*fixed.args, **fixed.kwargs)))
            answer(op.fused, fixed)
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = outputs(op.fused(*fixed.args, **fixed.kwargs))
            grads = torch.autograd.grad(outs, fixed.leaves(), dys)
        other = call.map(lambda t: t.flip(0) if t.dim() else t)
        with torch.no_grad():
            for mine, new in zip(fixed.tensors(), other.tensors(), strict=True):
                mine.copy_(new)
        graph.replay()
        expected = answer(op.fused, other)
    assert all(map(same_bits, outs, expected.outs))
    assert all(map(same_bits, grads, expected.grads))


# ---- the registered ops ----------------------------------------------------------------------------------------------


def matrices(device: str, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 16, generator=generator).to(device) for _ in range(count)]


def registered_calls(device: str):
    """A call of every op that csrc and fastlayers.ops register with the dispatcher."""
    x, y, dy = matrices(device, 3)
    bits = torch.full((10,), 0b1010110, dtype=torch.uint8, device=device)
    keep = x > 0
    return {
        "relu_add": (x, y, None, 0.5),
        "relu_add_train": (x, y, None, 0.5),
        "add_relu": (x, y),
        "add_relu_train": (x, y),
        "relu_add_backward": (dy, bits, [16]),
        "relu_backward": (dy, bits),
        "mul": (x, y),
        "mul_backward": (dy, x, y),
        "scale_": (x.clone(), dy[0, 0]),
        "dropout_add": (x, y, 0.25, torch.tensor(3, device=device), torch.float32),
        "scale_add": (x, y[0], dy, torch.ones(5, device=device), 0.5, torch.float32),
        "scale_add_backward": (dy, x, y[0], None, 1.0),
        "softmax_forward": (x, 1, 0.5, keep, torch.float32, False),
        "softmax_backward": (dy, y.softmax(1), 1, 0.5, keep, torch.float32, False),
        "softmax": (x.clone().requires_grad_(), keep, 1, 0.5, False, torch.float32),
        "bias_act_forward": (x, y[0], 3, 0.0, 0.0),
        "bias_act_backward": (dy, x, y[0], 7, 0.2, 0.0, True),
        "gated_forward": (x, y, 2),
        "gated_backward": (dy, x, y, 2),
        "gated_backward_": (dy, x, y, 2),
        "glu_forward": (x, 1, 2, True),
        "glu_backward": (dy[:, :8].contiguous(), x, 1, 2, True),
        "rotary": (x, y, dy[:1], dy[1:2], True, 16, True, torch.float32, 0, [16, 1], [16, 1]),
        **registered_images(device),
        **registered_divergences(device),
        **registered_norms(device),
        **registered_losses(device),
        **registered_heads(device),
    }


def registered_images(device: str):
    x = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0)).to(device)
    last, window = x.contiguous(memory_format=torch.channels_last), ([3, 3], [2, 2], [1, 1], [1, 1])
    small, offsets = x[:, :, :3, :3].contiguous(), torch.full((2, 8, 3, 3), 4, dtype=torch.uint8, device=device)
    gates = x[:, :, :1, :1].contiguous()
    return {
        "max_pool2d_forward": (last, *window, [3, 3], True, True),
        "max_pool2d_backward": (small, offsets, *window, [5, 6], False),
        "spatial_sum": (x, x.flip(0), 1.0),
        "scale_shift": (x, gates, gates, 0.5),
    }


def registered_losses(device: str):
    x, y = matrices(device)
    target, weight = torch.tensor([3, 0, -100, 15, 7], device=device), torch.rand(16, device=device)
    options = (0.1, 5.0, 0.2)
    stats = torch.rand(12, device=device)
    return {
        "cross_entropy_forward": (x, target, weight, -100, 1, *options, torch.float32),
        "cross_entropy_backward": (x[0, 0], x, target, weight, stats, -100, 1, *options),
        "cross_entropy_backward_": (x[:, 0], y.clone(), target, None, stats, -100, 0, *options),
        "cross_entropy_chunk_": (x.clone(), target, weight, -100, *options, stats[:5], True, 16),
        "cross_entropy": (x.clone().requires_grad_(), target, weight, -100, 1, *options, torch.float32),
    }


def registered_heads(device: str):
    x, thin, wide = (t[:, :n].contiguous() for t, n in zip(matrices(device, 3), (8, 3, 6), strict=True))
    target = torch.tensor([3, 0, -100, 4, 1], device=device)
    head, rows = (x, x.flip(0), None, thin, thin.flip(0)), x[:, 0].contiguous()
    options = (0.1, 0.0, 0.1, 0.5, None, 2, None, (True, True, False, True, True))
    numbers = ([0.0, 1.0, 2.0, 0.5, 1.5, 0.3], None, 2, None, (True, True, False, False, True))
    teacher = (wide, wide.flip(0), None)
    return {
        "linear_cross_entropy_forward": (*head, target, None, -100, 1, *options),
        "linear_cross_entropy_backward": (rows, *head, target, None, -100, *options),
        "linear_divergence_forward": (*head, *teacher, target, -100, "js", "batchmean", *numbers),
        "linear_divergence_backward": (rows, *head, *teacher, target, -100, "js", *numbers),
        "linear_topk": (x.view(5, 1, 8), *head[1:2], None, None, None, 3, 0.0, 1.0, True, torch.bfloat16, 2),
        "linear_accuracy": (*head, target, -100, None, 2),
    }


def registered_divergences(device: str):
    x, y, dy = matrices(device, 3)
    labels = torch.tensor([0, -100, 1, 2, -100], device=device)
    one, rows, stats = dy.sum(), dy[:, 0].contiguous(), torch.rand(5, 6, device=device)
    return {
        "kl_div_sum": (x, y, True),
        "kl_div_elements": (x, y, True, torch.float32),
        "kl_div_backward": (one, x, y, True, True, True),
        "divergence_forward": (x, y, labels, -100, 0.0, 2.0),
        "divergence_backward": (rows, x, y, labels, -100, 0.5, 2.0, stats, True, False),
        "divergence": (x.clone().requires_grad_(), y.clone().requires_grad_(), labels, -100, 0.5, 2.0),
    }


def registered_norms(device: str):
    x, y, dy = matrices(device, 3)
    weight, bias = torch.ones(16, device=device), torch.zeros(16, device=device)
    leaf, stats = x.clone().requires_grad_(), torch.stack((x.mean(1), x.var(1)))
    mean, var = torch.zeros(16, device=device), torch.ones(16, device=device)
    of_columns, of_groups = torch.stack((x.mean(0), x.var(0))), torch.rand(2, 20, device=device)
    bits = torch.full((10,), 0b1010110, dtype=torch.uint8, device=device)
    return {
        "layer_norm_forward": (x, 1, weight, bias, 1e-5, 0, torch.float32, True),
        "add_layer_norm_forward": (x, y, 1, weight, bias, 1e-5, 0, torch.float32, False),
        "layer_norm_backward": (dy, y, x, 1, weight, stats, 0, True, False),
        "layer_norm": (leaf, weight, bias, 1, 1e-5, 0, torch.float32),
        "add_layer_norm": (leaf, y, weight, None, 1, 1e-5, 2, torch.float32),
        "batch_norm_train": (x, mean, var, weight, bias, 0.1, 1e-5, y, 1, True),
        "batch_norm_moments": (x, weight, bias, 1e-5, y, 1),
        "batch_norm_eval": (x, mean, var, weight, bias, 1e-5, None, 2, False, True),
        "channel_bias_act_": (x.clone(), bias, y, 1),
        "batch_norm_backward": (dy, x, weight, None, of_columns, True, None, bits, 1, True),
        "batch_norm": (leaf, y, weight, bias, 1e-5, 1),
        "group_norm_forward": (x, 4, weight, bias, 1e-5, 2, torch.float32, True),
        "group_norm_backward": (dy, x, 4, weight, bias, of_groups, 2),
        "group_norm": (leaf, weight, bias, 4, 1e-5, 2, torch.float32),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", registered_calls("cpu"))
def test_opcheck(name, device):
    key = "CUDA" if device == "cuda" else "CPU"
    in_graphs, of_torch = (
        torch._C._dispatch_has_kernel_for_dispatch_key(f"fastlayers::{name}", f"Composite{kind}Autograd")
        for kind in ("Implicit", "Explicit")
    )
    if in_graphs and device == "cpu":
        pytest.skip("no graph of CPU tensors holds a kernel")
    if not of_torch and not backends.has_library_kernel("softmax_forward" if in_graphs else name, key):
        pytest.skip(f"fastlayers::{name} has no implementation for {device} here")
    torch.library.opcheck(getattr(torch.ops.fastlayers, name).default, registered_calls(device)[name])


@pytest.mark.slow
def test_forced_compile_backend():
    call = ADD_RELU.samples[0].make("cpu", torch.float32)
    with backends.backend("compile"):
        ours = answer(functional.add_relu, call)
    expected = answer(ADD_RELU.reference, call)
    assert_close((ours.outs, ours.grads), (expected.outs, expected.grads))
