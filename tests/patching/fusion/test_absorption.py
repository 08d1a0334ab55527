"""What kernels of ours absorb: biases, norms and activations of what is next to them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.harness import needs_gpu

pytest.importorskip("triton")

from fastlayers import functional as FL
from fastlayers.kernels.generated import Kernel
from fastlayers.patching.fusion import specialised
from fastlayers.patching.fusion.absorption import absorbed
from fastlayers.patching.program.program import Operation, Program, Value, plain_name
from tests.patching.fusion.programs import INTERPRETED, TOLERANCE, check, launches, names

pytestmark = pytest.mark.cpu_kernels


def biased_convolution(x, kernel, bias, weight):
    y = F.conv2d(x.contiguous(memory_format=torch.channels_last), kernel, bias, padding=1)
    return FL.layer_norm(y.permute(0, 2, 3, 1), (16,), weight)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_bias_of_a_convolution_is_added_in_the_norm_after_it(dtype, autocast):
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
              for shape in ((2, 8, 12, 12), (16, 8, 3, 3), (16,), (16,))]  # fmt: skip

    def function(*args):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return biased_convolution(*args)

    program, other = check(function, *inputs, tolerance=3e-2, noise=4)
    convolution = next(o for o in other.forward if plain_name(o.function) == "convolution")
    assert convolution.args[2] is None
    assert any(type(o.function) is Kernel and convolution.makes[0] in o.uses for o in other.forward)
    assert launches(other.forward) <= launches(program.forward)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_bias_of_a_convolution_and_what_is_written_over_their_sum(device, transposed, monkeypatch):
    monkeypatch.setattr(specialised, "is_served", lambda t: True)
    x, kernel, bias = (torch.randn(s, device=device) for s in ((2, 4, 6, 6), (4, 4, 3, 3), (4,)))
    convolve = F.conv_transpose2d if transposed else F.conv2d
    _, other = check(
        lambda *t: torch.relu_(convolve(*t)), x.contiguous(memory_format=torch.channels_last), kernel, bias
    )
    assert names(other.forward) == ["convolution", "fused_add_relu"]
    # Nothing joins the sum, which is small: torch adds the bias.
    _, other = check(lambda x, k, b: F.max_pool2d(convolve(x, k, b), 2), x, kernel, bias)
    assert [o.args[2] is None for o in other.forward if plain_name(o.function) == "convolution"] == [False]


@needs_gpu
@pytest.mark.parametrize(("name", "options"), [("gelu", {}), ("gelu", {"approximate": "tanh"}), ("silu", {})])
def test_an_activation_and_the_gradient_of_the_bias_before_it(name, options):
    """torch's, as a rule did not see it: alone in the forward, its gradient is summed where it is computed."""
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)
    weight, bias = torch.randn(1024, 64, device="cuda"), torch.randn(1024, device="cuda")
    inputs = [x, weight.requires_grad_(), bias.requires_grad_(), torch.randn(64, 1024, device="cuda")]

    def function(x, weight, bias, other):
        with torch.autocast("cuda", torch.bfloat16):
            return FL.linear(getattr(F, name)(FL.linear(x, weight, bias), **options), other)

    _, other = check(function, *inputs, tolerance=3e-2, noise=64)
    assert "bias_act_forward" in names(other.forward)
    (gradient,) = (o for o in other.backward if plain_name(o.function) == "bias_act_backward")
    assert gradient.makes[1] in other.wanted
    assert name not in names(other.forward)


@needs_gpu
@pytest.mark.parametrize("norm", ["layer", "rms", "added"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_norms_absorb(dtype, turned, norm):
    """The cast of a result, also of a view of it, that of a gradient, and the sum with a residual's gradient."""
    x, residual, proj = (torch.randn(s, device="cuda", requires_grad=True) for s in ((4, 6, 64), (4, 6, 64), (64, 64)))
    weight, bias = (torch.randn(64, device="cuda", requires_grad=True) for _ in range(2))

    def function(x, residual, weight, bias, proj):
        if norm == "added":
            y, x = FL.add_layer_norm(x, residual, (64,), weight, bias)
        else:
            y = FL.layer_norm(x, (64,), weight, bias) if norm == "layer" else FL.rms_norm(x, (64,), weight)
        y = y.transpose(0, 1) if turned else y
        return x + (y.to(dtype).reshape(-1, 64) @ proj.to(dtype)).float().view(y.shape).view(x.shape)

    _, other = check(function, x, residual, weight, bias, proj, tolerance=TOLERANCE[dtype])
    casts = [name for name in names(other.forward) if name in ("to", "_to_copy")]
    assert len(casts) == 1  # That of the other factor.
    (backward,) = (o for o in other.backward if plain_name(o.function) == "layer_norm_backward")
    assert not any(plain_name(o.function) in ("to", "_to_copy") and o.makes[0] == backward.args[0].name
                   for o in other.backward)  # fmt: skip
    assert backward.args[1] is not None
    assert "add" not in names(other.backward)


@pytest.mark.skipif(not hasattr(torch.ops.fastlayers, "layer_norm_forward"), reason="csrc is not built")
def test_absorption_by_names():
    """What is needed otherwise keeps its dtype; what is added must be there before."""
    values, ops = {}, torch.ops.fastlayers

    def made(name, *shape, dtype=torch.float32):
        values[name] = torch.randn(shape).to(dtype)
        return (name,)

    for name in ("x0", "g0"):
        made(name, 4, 8)
    made("x1", 8)
    x, weight, dy = (Value(name) for name in ("x0", "x1", "g0"))
    values["stats"] = torch.randn(1, 4)
    forward = [
        Operation(ops.layer_norm_forward.default, (x, 1, weight, None, 1e-5, 1, torch.float32, True), {},
                  (*made("y", 4, 8), "stats"), False, False),
        Operation(torch.ops.aten.to.dtype, (Value("y"), torch.bfloat16), {}, made("low", 4, 8, dtype=torch.bfloat16),
                  True, False),
        Operation(torch.ops.aten.relu.default, (Value("low"),), {}, made("out", 4, 8, dtype=torch.bfloat16), True,
                  False),
    ]  # fmt: skip
    backward = [
        Operation(torch.ops.aten.to.dtype, (dy, torch.bfloat16), {}, made("dlow", 4, 8, dtype=torch.bfloat16), True,
                  False),
        Operation(torch.ops.aten._to_copy.default, (Value("dlow"),), {"dtype": torch.float32}, made("dy", 4, 8), True,
                  False),
        Operation(ops.layer_norm_backward.default, (Value("dy"), None, x, 1, weight, Value("stats"), 1, True, False),
                  {}, (*made("dx", 4, 8), *made("dw", 8), ""), False, False),
        Operation(torch.ops.aten.add.Tensor, (Value("dx"), dy), {}, made("total", 4, 8), True, False),
    ]  # fmt: skip
    values["dlow"] = values["g0"].bfloat16()
    program = Program(
        ("x0", "x1"), forward, ("out",), ("x0", "x1", "stats", "low"), ("g0",), backward, ("total", "dw"),
        values=values, fake=FakeTensorMode(),
    )  # fmt: skip
    found = absorbed(program)
    assert names(found.forward) == ["layer_norm_forward", "relu"]
    assert found.forward[0].args[6] is torch.bfloat16
    low = found.forward[1].args[0].name
    assert found.kept == ("stats", "x0", "x1")  # The backward does not read it.
    assert values[low].dtype is torch.bfloat16
    assert names(found.backward) == ["to", "layer_norm_backward"]
    assert found.backward[1].args[:2] == (Value("dlow"), dy)
    assert found.backward[1].makes[0] == found.wanted[0]
    # Also through what only moves its elements, but not if a moved value is needed as it is.
    moving = [
        forward[0],
        Operation(torch.ops.aten.roll.default, (Value("y"), [1], [0]), {}, made("rolled", 4, 8), True, False),
        Operation(torch.ops.aten.view.default, (Value("rolled"), [8, 4]), {}, ("viewed",), True, False, True),
        Operation(torch.ops.aten.clone.default, (Value("viewed"),), {}, made("copy", 8, 4), True, False),
        replace(forward[1], args=(Value("copy"), torch.bfloat16), makes=made("low2", 8, 4, dtype=torch.bfloat16)),
        replace(forward[2], args=(Value("low2"),)),
    ]
    values["viewed"] = values["rolled"].view(8, 4)
    moved = replace(program, forward=moving, kept=("x0", "x1", "stats", "low2"))
    last = absorbed(moved).forward
    assert names(last) == ["layer_norm_forward", "roll", "clone", "relu"]
    assert last[0].args[6] is torch.bfloat16
    assert {values[o.makes[0]].dtype for o in last} == {torch.bfloat16}
    assert values[last[2].makes[0]].shape == (8, 4)
    kept = replace(moved, results=("out", "rolled"))
    assert names(absorbed(kept).forward) == ["layer_norm_forward", "roll", "clone", "to", "relu"]
    # As float32 something else reads it, or it is kept so; or the sum is one of what comes later.
    assert names(absorbed(replace(program, kept=(*program.kept, "y"))).forward) == names(forward)
    assert names(absorbed(replace(program, results=("out", "y"))).forward) == names(forward)
    late = replace(backward[3], args=(Value("dx"), Value("later")))
    later = Operation(torch.ops.aten.neg.default, (dy,), {}, made("later", 4, 8), True, False)
    assert "add" in names(absorbed(replace(program, backward=[*backward[:3], later, late])).backward)
    # What a cast of the gradient makes, for something that no kernel is generated for, is written beside it.
    for source, shape in (("total", (4, 8)), ("flat", (32,))):
        view = Operation(torch.ops.aten.view.default, (Value("total"), shape), {}, made("flat", 32), True, False, True)
        cast = Operation(torch.ops.aten.to.dtype, (Value(source), torch.bfloat16), {},
                         made("dlow2", *shape, dtype=torch.bfloat16), True, False)  # fmt: skip
        product = Operation(torch.ops.aten.cumsum.default, (Value("dlow2"), 0), {},
                            made("sum", *shape, dtype=torch.bfloat16), True, False)  # fmt: skip
        values["flat"] = values["total"].view(32)
        more = replace(program, backward=[*backward, view, cast, product], wanted=("total", "sum"))
        last = absorbed(more).backward[1:]
        assert last[0].args[9] is torch.bfloat16
        assert names(last) == ["layer_norm_backward", "cumsum"]
        assert (last[0].makes[3] == "dlow2") is (source == "total")
        if INTERPRETED:  # Else no kernel is generated for tensors on a CPU.
            negated = replace(product, function=torch.ops.aten.neg.default, args=(Value("dlow2"),))
            later = absorbed(replace(more, backward=[*more.backward[:-1], negated]))
            assert "to" in names(later.backward[2:])
    twice = Operation(torch.ops.aten.neg.default, (Value("dx"),), {}, made("other", 4, 8), True, False)
    twice = replace(program, backward=[*backward, twice], wanted=("total", "other"))
    assert "add" in names(absorbed(twice).backward)
