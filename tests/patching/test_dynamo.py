"""torch.compile(backend="fastlayers"): what is fused in captured graphs, and that nothing but the speed changes."""

from __future__ import annotations

import copy
import math
import re
from importlib.metadata import EntryPoint, entry_points

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastlayers
from fastlayers.patching import (
    GraphRule,
    Match,
    Reason,
    compile_report,
    dynamo_backend,
    patch_model,
    register_rule,
)
from tests import ROOT
from tests.harness import assert_no_worse

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(function, inputs, seed=0):
    """Outputs, then gradients of the inputs and of what the function's module has, then the inputs as they are now."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(seed)
    # An in-place operation on an input needs one that is no leaf.
    outputs = function(*(x * 1 if x.requires_grad else x for x in inputs))
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    wanted = [x for x in (*inputs, *getattr(function, "parameters", list)()) if x.requires_grad]
    differentiable = [y for y in outputs if y.requires_grad]
    for x in wanted:
        x.grad = None
    if differentiable and wanted:
        sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).float().sum() for y in differentiable).backward()
    return [*outputs, *(x.grad for x in wanted), *inputs, *getattr(function, "buffers", list)()]


def fused(function, *inputs, fullgraph=True, **options):
    """What was fused; the compiled function gave what the function gives."""
    plain = copy.deepcopy(function) if isinstance(function, nn.Module) else function
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=dynamo_backend, fullgraph=fullgraph, **options)
    assert_no_worse(run(compiled, inputs), run, plain, inputs)
    return compile_report().counts()


def reasons():
    return {
        reason for row in compile_report() for reason in (row.reason, *(reason for reason, _ in row.left)) if reason
    }


def tensor(*shape, grad=True, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


# -- what is found -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Code that no trace of one module reaches: an early return in a loop, **kwargs, a context manager."""

    def __init__(self, size=8):
        super().__init__()
        self.one, self.two = nn.Linear(size, size), nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x, **kwargs):
        for layer in (self.one, self.two):
            if kwargs.get("skip"):
                return x
            x = x + F.dropout(layer(x), 0.5, self.training)
        with torch.profiler.record_function("norm"):
            return self.norm(F.gelu(self.one(x)) * kwargs.get("factor", 1) + x)


def test_reaches_what_no_module_trace_does():
    block = Block()
    with pytest.warns(fastlayers.patching.PatchWarning):
        assert "dropout_add" not in fastlayers.patching.patch_report(patch_model(block, include="")).counts()
    counts = fused(Block(), tensor(3, 8))
    assert counts == {"add_layer_norm": 1, "dropout_add": 2, "linear_act": 1, "linear": 2}


@pytest.mark.parametrize(
    ("function", "counts"),
    [
        (lambda x, y: F.relu(x + y), {"add_relu": 1}),
        (lambda x, y: x.relu() + y + 2, {"relu_add_bias": 1}),
        (lambda x, y: F.silu(x) * y, {"swiglu": 1}),
        (lambda x, y: torch.softmax(x * 0.5 + y, -1), {"softmax": 1}),
        (lambda x, y: F.layer_norm(x + y, (8,)), {"add_layer_norm": 1}),
        (lambda x, y: F.mish(x) - F.glu(y.repeat(1, 2)), {"mish": 1, "glu": 1}),
        (lambda x, y: F.batch_norm(x, None, None, training=True).relu(), {"batch_norm_act": 1}),
        (lambda x, y: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) - y, {"gelu_tanh": 1}),
        (lambda x, y: x * (1 + torch.tanh(x * 0.79788456 * (1 + 0.044715 * x * x))) * 0.5 - y, {}),
        (lambda x, y: 0.5 * x * (1 + torch.tanh(x * 0.79788456 * (1 + 0.044715 * x * x))) - y, {"gelu_tanh": 1}),
        (lambda x, y: x * 0.5 * (1 + torch.tanh(x * 0.7978 * (1 + 0.044715 * x * x))) - y, {}),
        (lambda x, y: x * torch.sigmoid(1.702 * x) - y, {"quick_gelu": 1}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions(function, counts, dtype):
    assert fused(function, tensor(3, 8, dtype=dtype), tensor(3, 8, dtype=dtype, seed=2)) == counts


def rms(x, weight, dtype, *, late=False):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (weight * y).to(dtype) if late else weight * y.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_written_out(dtype):
    x, r, w = tensor(3, 8, dtype=dtype), tensor(3, 8, dtype=dtype, seed=2), tensor(8, dtype=dtype, seed=3)

    def add(x, r, w):
        s = x + r
        return rms(s, w, dtype), s

    def gemma(x, w):
        y = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + 1e-6)
        return (y * (1.0 + w.float())).type_as(x)

    assert fused(lambda x, w: rms(x, w, dtype), x, w) == {"rms_norm": 1}
    assert fused(lambda x, w: rms(x, w, dtype, late=True), x, w) == {"rms_norm": 1}
    assert fused(gemma, x, w) == {"rms_norm": 1}
    assert fused(add, x, r, w) == {"add_rms_norm": 1}


def test_norms_that_are_not_those_known():
    x, w = tensor(3, 8), tensor(8)
    assert not fused(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)), x, w)
    assert not fused(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.exp())), x, w)
    assert not fused(lambda x, w: w[0] * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)[:, None]), x, w)
    assert not fused(lambda x, w: w * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6)), x, w)
    assert not fused(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), x.double(), w)


def test_norms_known_but_for_their_end():
    """The normalisation is one in float32 all the same, and what follows stays as it is."""
    half, x, w = tensor(3, 8, dtype=torch.bfloat16), tensor(3, 8), tensor(8)
    assert fused(lambda x, w: rms(x, w, torch.float16), half, w.detach().bfloat16()) == {"rms_norm": 1}
    assert fused(lambda x, w: rms(x, w, torch.float32), x, tensor(3, 8)) == {"rms_norm": 1}
    assert fused(lambda x, w: rms(x, w, torch.float64, late=True), x, w) == {"rms_norm": 1}


def test_norm_in_a_casting_order_that_autocast_changes():
    x, w = tensor(3, 8, dtype=torch.bfloat16), tensor(8, dtype=torch.bfloat16)

    def inside(x, w):
        with torch.autocast("cpu"):
            return rms(x, w, torch.bfloat16, late=True)

    def outside(x, w):
        return rms(x, w, torch.bfloat16, late=True)

    assert casting_orders(outside, x, w) == [(torch.bfloat16, "torch")]
    assert casting_orders(inside, x, w) == [(torch.float32, "torch")]  # after x.float()
    with torch.autocast("cpu"):
        assert casting_orders(outside, x, w) == [(torch.float32, "torch")]
        assert casting_orders(lambda x, w: rms(x, w, torch.bfloat16), x, w) == [(torch.bfloat16, "llama")]


def casting_orders(function, *inputs):
    """The dtypes of what is normalised and the casting orders, of a function that stays what it was."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return dynamo_backend(graph, inputs)

    torch._dynamo.reset()
    results, expected = torch.compile(function, backend=keep)(*inputs), function(*inputs)
    assert results.dtype == expected.dtype
    torch.testing.assert_close(results, expected)
    return [
        (node.args[0].meta["example_value"].dtype, node.kwargs["casting"])
        for node in graphs[-1].nodes
        if node.target is fastlayers.functional.rms_norm
    ]


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_chunks(x):
    x1, x2 = x.chunk(2, -1)
    return torch.concat([x2.neg(), x1], -1)


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def rotate_neighbours(x):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.flatten(torch.stack([-x2, x1], -1), -2)


@pytest.mark.parametrize("rotate", [rotate_half, rotate_chunks, rotate_pairs, rotate_neighbours])
def test_rotary(rotate):
    def rotary(q, k, cos, sin):
        return q * cos + rotate(q) * sin, cos * k + sin * rotate(k)

    q, k = tensor(2, 4, 5, 8), tensor(2, 2, 5, 8, seed=2)
    cos, sin = tensor(1, 1, 5, 8, grad=False, seed=3), tensor(1, 1, 5, 8, grad=False, seed=4)
    assert fused(rotary, q, k, cos, sin) == {"rotary": 1}
    assert fused(lambda q, k, c, s: (q * c + rotate(q) * s, k * c + rotate(k) * c), q, k, cos, sin) == {"rotary": 2}
    assert fused(lambda q, k, c, s: (q * c + rotate(q) * s, k * c - rotate(k) * s), q, k, cos, sin) == {"rotary": 1}
    assert not fused(lambda q, k, c, s: (q * c + rotate(k) * s, k * c + rotate(q) * s), q, q.detach(), cos, sin)


def test_rotary_of_a_part():
    def partial(q, k, cos, sin):
        q = torch.cat((q[..., :8] * cos + rotate_half(q[..., :8]) * sin, q[..., 8:]), -1)
        return q, torch.cat((k[..., :8] * cos + rotate_half(k[..., :8]) * sin, k[..., 8:]), -1)

    def split(q, k, cos, sin):
        (q, q_rest), (k, k_rest) = q.split((8, 2), -1), k.split((8, 2), -1)
        q = torch.cat((q * cos + rotate_half(q) * sin, q_rest), -1)
        return q, torch.cat((k * cos + rotate_half(k) * sin, k_rest), -1)

    args = tensor(2, 3, 10), tensor(2, 3, 10, seed=2), tensor(3, 8, grad=False), tensor(3, 8, grad=False, seed=3)
    assert not fused(partial, *args)  # each slice is another tensor
    assert fused(split, *args) == {"rotary": 2}


def test_rotary_of_other_halves():
    def rotary(q, k, cos, sin):
        def turn(x):
            return torch.cat((-x[..., 3:], x[..., :3]), dim=-1)

        def mixed(x):
            return torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)

        return q * cos + turn(q) * sin, k * cos + mixed(k) * sin

    args = tensor(2, 3, 8), tensor(2, 3, 8, seed=2), tensor(3, 8, grad=False), tensor(3, 8, grad=False, seed=3)
    assert not fused(rotary, *args)


def drop_path(x, p, training, scale=True):
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    noise = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    if keep > 0.0 and scale:
        noise.div_(keep)
    return x * noise


def test_drop_path():
    gamma = nn.Parameter(tensor(8).detach())
    x, r = tensor(6, 3, 8), tensor(6, 3, 8, seed=2)
    assert fused(lambda x, r: r + drop_path(x, 0.3, True), x, r) == {"scale_add": 1}
    assert fused(lambda x, r: r + drop_path(x * gamma, 0.25, True), x, r) == {"scale_add": 1}
    assert fused(lambda x, r: r + gamma * x, x, r) == {"scale_add": 1}
    assert not fused(lambda x, r: r + drop_path(x, 0.3, True, scale=False), x, r)
    assert not fused(lambda x, r: (r + drop_path(x, 0.3, True)) * torch.rand(1), x, r).get("x")
    # its noise is drawn after the branch and before something else is
    assert not fused(lambda x, r: (d := drop_path(x, 0.3, True), torch.rand(3), r + d)[1:], x, r)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.relu(out)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_and_in_place_layers(training):
    model = nn.Sequential(Residual(), Residual()).train(training)
    counts = {"batch_norm_add_act": 2, "batch_norm_act": 2}
    assert fused(model, tensor(2, 4, 5, 5)) == counts


def test_a_batch_norm_whose_statistics_are_read():
    class Reads(Residual):
        def forward(self, x):
            y = self.bn1(x)
            mean = self.bn1.running_mean.clone()
            return F.relu(y), mean

    assert fused(Reads(), tensor(2, 4, 5, 5)) == {"batch_norm": 1}
    assert Reason.WRITTEN_BETWEEN in reasons()


# -- traps -------------------------------------------------------------------------------------------------------------


def test_mutations_that_are_seen():
    def of_an_input(x, y):
        x += y
        return F.relu(x)

    def of_a_result(x, y):
        z = x * 2
        z += y
        return F.relu(z), z

    def by_a_view(x, y):
        z = x * 2
        row = z[0]
        z += y
        return F.relu(z), row

    def in_between(x, y):
        y = y * 1
        z = x + y
        y.zero_()
        return F.relu(z), y

    def of_an_operand(x, y):
        y = y * 1
        r = F.relu(x)
        y[0] = 1.0
        return r + y

    x, y = tensor(3, 8), tensor(3, 8, seed=2)
    for function in (of_an_input, of_a_result, by_a_view):
        assert not fused(function, x, y)
        assert reasons() & {Reason.VISIBLE_MUTATION, Reason.USED_ELSEWHERE}
    assert fused(in_between, x, y) in ({}, {"add_relu": 1})
    assert fused(of_an_operand, x, y) in ({}, {"relu_add": 1})


def test_an_input_that_is_another_ones_view():
    def function(x, y):
        s = x + y
        y.mul_(2)
        return F.relu(s)

    def outcome(function):
        x = torch.arange(-4.0, 4.0)
        return function(x, x[:]), x

    expected, results = outcome(function), outcome(torch.compile(function, backend=dynamo_backend))
    torch.testing.assert_close(results, expected)
    assert not compile_report().counts()


def test_random_numbers_are_drawn_in_order():
    def function(x, y):
        a = F.dropout(x, 0.5)
        b = F.dropout(y, 0.5)
        return a + y, b + x, torch.rand(3)

    fused(function, tensor(3, 8), tensor(3, 8, seed=2))
    counts = fused(lambda x, y: (F.dropout(x, 0.5) + y, F.dropout(y, 0.3) + x), tensor(3, 8), tensor(3, 8, seed=2))
    assert counts == {"dropout_add": 2}


def test_regions_of_autocast_and_without_gradient():
    linear = nn.Linear(8, 8)

    def autocast(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = F.linear(x, linear.weight, linear.bias)
            inside = F.relu(z + z)
        return inside, F.gelu(z), F.relu(z.float() + y)

    def no_grad(x, y):
        with torch.no_grad():
            s = x + y
            r = F.relu(x) + y
        return F.relu(s) - x, r * y

    def enabled(x, y):
        with torch.no_grad(), torch.enable_grad():
            s = x + y
        return F.relu(s)

    def inference(x, y):
        with torch.inference_mode():
            s = F.relu(x + y)
        return s

    x, y = tensor(3, 8), tensor(3, 8, seed=2)
    assert fused(autocast, x, y) == {"add_relu": 2, "gelu": 1, "linear": 1}
    assert fused(no_grad, x, y) == {"relu_add": 1}
    assert fused(enabled, x, y) == {"add_relu": 1}  # both with a gradient: Dynamo drops what changes nothing
    assert fused(inference, x, y) == {"add_relu": 1}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_called_in_a_region(mode):
    block = Block().eval()
    compiled = torch.compile(block, backend=dynamo_backend)
    x = tensor(3, 8)
    with mode():
        torch.testing.assert_close(compiled(x), block(x))
        assert compiled(x).requires_grad == block(x).requires_grad
    compiled(x).sum().backward()
    assert x.grad is not None


def test_saved_tensors_hooks_see_what_backward_needs():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = torch.compile(lambda x, y: F.silu(x) * y, backend=dynamo_backend)(tensor(3, 8), tensor(3, 8, seed=2))
    assert packed
    y.sum().backward()


def test_second_derivative():
    x, y = tensor(3, 8, dtype=torch.float64), tensor(3, 8, dtype=torch.float64, seed=2)
    compiled = torch.compile(lambda x, y: F.silu(x) * y + torch.softmax(x, -1), backend=dynamo_backend)
    assert torch.autograd.gradgradcheck(compiled, (x, y))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoint_is_one(reentrant):
    """Computed again in backward, with the same random numbers: torch's own backend "eager" draws others."""
    model = Residual()
    calls = []

    def body(x, y):
        return F.dropout(F.relu(x + y), 0.5) * model.conv1(x)

    def function(x, y):
        return checkpoint(body, x, y, use_reentrant=reentrant) + y

    x, y = tensor(2, 4, 3, 3), tensor(2, 4, 3, 3, seed=2)
    assert fused(function, x, y) == {"add_relu": 1}

    def spy(view, node):
        relu = view.op(node, "relu")
        if relu is not None:
            yield Match((relu,), recorded, (relu["input"],), {})

    def recorded(x):
        calls.append(torch.is_grad_enabled())
        return F.relu(x)

    globals()["recorded"] = recorded
    torch._dynamo.reset()
    with register_rule(GraphRule("spied_relu", "relu", spy)):
        result = torch.compile(function, backend=dynamo_backend)(x, y)
        assert len(calls) == 1
        result.sum().backward()
    assert len(calls) == 2


def test_a_checkpoint_inside_of_another():
    def inner(x):
        return F.dropout(x, 0.5) * x

    def outer(x, y):
        return checkpoint(inner, F.relu(x + y), use_reentrant=False) * F.dropout(y, 0.5)

    def function(x, y):
        return checkpoint(outer, x, y, use_reentrant=False) + y

    assert fused(function, tensor(8, 8), tensor(8, 8, seed=2)) == {"add_relu": 1}


def test_selective_checkpoint_is_left_alone():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    def function(x, y):
        return checkpoint(lambda x, y: F.relu(x + y), x, y, use_reentrant=False, context_fn=contexts) + y

    assert not fused(function, tensor(3, 8), tensor(3, 8, seed=2))


def test_dynamic_shapes_recompile_no_more_than_dynamo():
    block, graphs = Block(), []

    def counting(graph, inputs):
        graphs.append(graph)
        return dynamo_backend(graph, inputs)

    compiled = torch.compile(block.eval(), backend=counting, dynamic=True)
    for rows in (3, 5, 9):
        x = tensor(rows, 8)
        torch.testing.assert_close(compiled(x), block(x))
    assert len(graphs) == 1
    assert compile_report().counts() == {"add_layer_norm": 1, "dropout_add": 2, "linear_act": 1, "linear": 2}

    weight = nn.Parameter(tensor(8).detach())

    def function(x):
        return rms(x, weight, torch.float32), x[:, : x.shape[0]] * x.shape[0]

    assert fused(function, tensor(4, 8), dynamic=True) == {"rms_norm": 1}
    assert not fused(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), tensor(4, 7), dynamic=True)


def test_graph_breaks():
    def function(x, y):
        z = F.relu(x + y)
        torch._dynamo.graph_break()
        return F.relu(z - 1) + y

    assert fused(function, tensor(3, 8), tensor(3, 8, seed=2), fullgraph=False) == {"add_relu": 1, "relu_add": 1}


def test_shapes_that_change_in_place():
    """Dynamo records one shape of a tensor, the last."""

    def function(x, w):
        x = x - 1
        y = rms(x, w, torch.float32)
        x.unsqueeze_(0)
        return y, x

    assert not fused(function, tensor(3, 8, grad=False), tensor(8, grad=False))
    assert reasons() == {Reason.RESHAPED_IN_PLACE}


def test_calls_of_modules():
    graph = torch.fx.symbolic_trace(Residual())
    run = dynamo_backend(graph, [])
    assert reasons() == {Reason.CALLS_MODULES}
    assert run(tensor(2, 4, 5, 5)).shape == (2, 4, 5, 5)


def test_functional_transforms():
    x = tensor(3, 8, grad=False)
    function = torch.func.vmap(torch.func.grad(lambda x: (F.silu(x) * x.exp()).sum()))
    torch.testing.assert_close(torch.compile(function, backend=dynamo_backend)(x), function(x))


# -- the metadata, the report, the name --------------------------------------------------------------------------------


def test_graphs_stay_valid_and_keep_what_dynamo_recorded():
    seen = []

    def keep(graph, inputs):
        run = dynamo_backend(graph, inputs)
        seen.append(graph)
        return run

    torch.compile(Block(), backend=keep)(tensor(3, 8))
    (graph,) = seen
    graph.graph.lint()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            pair = node.target is fastlayers.patching.runtime.norm_calls.add_layer_norm
            values = node.meta["example_value"] if pair else (node.meta["example_value"],)
            assert [value.shape for value in values] == [(3, 8)] * (1 + pair)


def test_ops_run_outside_of_the_compiler():
    seen = []

    def relu(x):
        seen.append((torch.compiler.is_compiling(), type(x)))
        return F.relu(x)

    globals()["seen_relu"] = relu

    def find(view, node):
        op = view.op(node, "relu")
        if op is not None:
            yield Match((op,), relu, (op["input"],), {})

    with register_rule(GraphRule("seen_relu", "relu", find)):
        torch.compile(lambda x: F.relu(x), backend=dynamo_backend)(tensor(3))
    assert seen == [(False, torch.Tensor)]


def test_report():
    model = nn.Sequential(Residual(), nn.Flatten(), nn.Linear(36, 8), Block())
    assert not compile_report().rows
    torch.compile(model, backend=dynamo_backend)(tensor(2, 4, 3, 3))
    report = compile_report()
    assert dict(report["0"].fused) == {"batch_norm_add_act": 1, "batch_norm_act": 1}
    assert report["3"].was == "Block"
    assert dict(report["3"].fused) == {"dropout_add": 2, "linear_act": 1, "add_layer_norm": 1}
    assert report["3"].became.startswith("graph 0/0")
    assert "dropout_add x2" in str(report)
    del report
    torch.compile(lambda x: x * 2, backend=dynamo_backend)(tensor(3))
    assert compile_report().rows[-1].reason is Reason.NOTHING_TO_FUSE
    torch.compiler.reset()
    assert not compile_report().rows


def test_compile_method_of_a_module():
    model = Block()
    plain = copy.deepcopy(model)
    model.compile(backend=dynamo_backend)
    torch.testing.assert_close(run(model, [tensor(3, 8)]), run(plain, [tensor(3, 8)]))
    assert compile_report().counts() == {"add_layer_norm": 1, "dropout_add": 2, "linear_act": 1, "linear": 2}


def test_a_patched_model():
    model = patch_model(nn.Sequential(Residual(), Residual()))
    assert fused(model, tensor(2, 4, 5, 5)) is not None


@pytest.mark.skipif(
    "fastlayers" not in entry_points(group="torch_dynamo_backends").names, reason="fastlayers is not installed"
)
def test_by_name():
    model = Block()
    model.compile(backend="fastlayers")
    model(tensor(3, 8))
    assert compile_report().counts()["dropout_add"] == 2


def test_entry_point():
    declared = ROOT.joinpath("pyproject.toml").read_text()
    value = re.search(r'"torch_dynamo_backends"\]\nfastlayers = "(.*)"', declared)[1]
    assert EntryPoint("fastlayers", value, "torch_dynamo_backends").load() is dynamo_backend
