"""Compiles every Triton kernel, as the wrappers launch it, for sm_80 and sm_90 without a GPU; nothing much may spill.

The wrappers run on meta tensors. Instead of being launched each kernel is compiled with the specialisation of its
launch, so the tests check what the launch rules pick.

sm_90 gets every specialisation, sm_80 each kernel once for each set of dtypes. A kernel is the same program for both,
with the same 255 registers a thread: only the translation of its instructions differs, and that depends on dtypes, not
on the sizes that a launch rule picks. ``make test`` leaves sm_90 out, which takes four minutes, and ``make test-gpu``
runs all.

bfloat16 gets every row of the launch rules; float32 gets some, since a kernel of a wider dtype differs in its loads,
stores and tiles. Those of float64 are compiled by the tests on a GPU. What is optional (a residual, weights, a mask) is
there or not for one size, and elsewhere in the combination that takes most registers.
"""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastlayers.kernels import (
    batch_norm,
    bias_act,
    convolution,
    cross_entropy,
    elementwise,
    flat,
    glu,
    group_norm,
    image_geometry,
    kl_div,
    launch,
    layer_norm,
    linear_divergence,
    low_rank,
    max_pool2d,
    norm_rows,
    response_norm,
    rotary,
    softmax,
    squeeze_excite,
    sync_batch_norm,
    topk,
    vocab_parallel,
)
from fastlayers.kernels import residual as joints

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF16, F32 = torch.bfloat16, torch.float32
F16 = torch.float16
#: float16 kernels are those of bfloat16 with other conversions, and the tests on a GPU compile them.
DTYPES = (BF16, F32)
#: To fit one more block on an SM, ptxas keeps a few values that the loop does not use in local memory: at most so many
#: bytes a thread, in kernels of at most 64 registers. Other kernels must not spill.
TRADED = 32
TYPES = {
    F16: "fp16", BF16: "bf16", F32: "fp32", torch.uint8: "u8", torch.bool: "i1", torch.int64: "i64",
}  # fmt: skip


def specialisation(function, arguments, constants):
    """(signature, constexprs, attributes) as JITFunction.run derives them from the arguments of a launch."""
    signature, constexprs, attributes = {}, {}, {}
    for position, (name, value) in enumerate(zip(function.arg_names, (*arguments, *constants), strict=True)):
        if position >= len(arguments) or value is None or (type(value) is int and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif type(value) is int:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp64"
    return signature, constexprs, attributes


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file], capture_output=True, text=True, check=True)
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage.stdout)}


#: What each specialisation that was compiled has spilled, None for nothing worth mentioning.
#: The Triton that the launch rules were tuned with. Another one allocates registers in another way: 3.9 spills 8 to 48
#: bytes in six of these tests. What that costs is for the benchmark to say.
TUNED = "3.6."
SPILLS: dict[tuple, str | None] = {}


def spill(launched, tensors, arch, folder):
    """What the kernel of a launch spills. Every specialisation is compiled once, for sm_80 every kernel and dtypes."""
    signature, constexprs, attributes = specialisation(
        launched.function, (*tensors, *launched.scalars), launched.constants
    )
    # sm_80 gets a kernel once for each set of dtypes, whatever the arguments that are None or 1.
    key: tuple = (arch, launched.function.fn, frozenset(kind for kind in signature.values() if kind.startswith("*")))
    if arch != 80:
        key = (arch, launched.function.fn, *signature.items(), *constexprs.items())
        key += (*((position, str(what)) for position, what in attributes.items()), launched.num_warps)
    if key not in SPILLS:
        source = ASTSource(launched.function, signature, constexprs, attributes)
        kernel = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": launched.num_warps})
        usage = resources(kernel.asm["cubin"], folder)
        traded = TRADED if usage["REG"] <= 64 else 0
        spilled = usage["STACK"] > traded or usage["LOCAL"]
        what = f"{kernel.metadata.name} of {launched.scalars}, {launched.constants}: {usage}"
        SPILLS[key] = what if spilled else None
    return SPILLS[key]


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def compiled(request, monkeypatch, tmp_path):
    """Names of the kernels that the test has compiled so far. At its end, none of them may have spilled, with TUNED."""
    names, spills = [], []

    def compile_instead(self, *tensors):
        spills.append(spill(self, tensors, request.param, tmp_path))
        names.append(self.function.__name__)

    monkeypatch.setattr(launch.Launch, "__call__", compile_instead)
    for family in (softmax, flat, layer_norm, norm_rows, image_geometry, group_norm, bias_act, kl_div, low_rank):
        monkeypatch.setattr(family, "multiprocessors", lambda device: 132)
    yield names
    if triton.__version__.startswith(TUNED):
        assert not any(spills), [what for what in spills if what]


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


#: One length for every row of the launch rules, an odd one, and one past the registers.
LENGTHS = [64, 1024, 4095, 4096, 8192, 16384, 32768, 131072]
#: (shape, dim): last, and across the memory; the last two of these are too long, and split among programs.
SHAPES = [((4096, n), 1) for n in LENGTHS] + [((64, n, 192), 1) for n in (16, 256, 512, 4096)]
SPLIT = [((1, 2**20), 1), ((2**16, 64), 0)]


@pytest.mark.parametrize(("dtype", "shapes"), [(BF16, SHAPES + SPLIT), (F32, SHAPES[1::2] + SHAPES[6::4])])
@pytest.mark.parametrize("mask", [None, torch.bool])
def test_softmax(compiled, dtype, shapes, mask):
    for shape, dim in shapes:
        x = meta(*shape, dtype=dtype)
        keep = None if mask is None else meta(*shape, dtype=mask)
        log = mask is None and dtype != BF16
        y = softmax.softmax_forward(x, dim, 0.125, keep, dtype, log)
        softmax.softmax_backward(x, y, dim, 0.125, keep, dtype, log)
    assert set(compiled) == {"_whole_forward", "_whole_backward", "_long_forward", "_long_backward"}


def test_softmax_additive_mask_and_float32_result(compiled):
    for shape, dim in SHAPES:
        x, mask = meta(*shape), meta(*shape[1:], dtype=F32)
        y = softmax.softmax_forward(x, dim, 0.125, mask, F32, False)
        softmax.softmax_backward(y, y, dim, 0.125, None, BF16, False)
    assert len(compiled) == 2 * len(SHAPES)


def test_more_than_2_to_the_31_elements(compiled):
    for shape, dim in [((2**22, 1024), 1), ((2, 2**31), 1), ((2**20, 64, 64), 1)]:
        x = meta(*shape)
        softmax.softmax_backward(
            x, softmax.softmax_forward(x, dim, 1.0, None, BF16, False), dim, 1.0, None, BF16, False
        )
    x = meta(2**20, 2**12)
    elementwise.relu_backward(*elementwise.relu_add_train(x, x, x[0], 0.0))
    elementwise.mul(x, x[0])
    elementwise.mul_backward(x, x, x[0])
    elementwise.mul_backward(x, x, x[:, :1].contiguous())
    assert len(compiled) > 10


@pytest.mark.parametrize(("dtype", "offset"), [(BF16, 0), (BF16, 1), (F32, 1)])
def test_elementwise(compiled, dtype, offset):
    x = meta(64 * 512 * 128 + 1, dtype=dtype)[offset:][: 64 * 512 * 128].view(64, 512, 128)
    for bias in (None, x[0, 0], x):
        elementwise.relu_add(x, x, bias, 0.5)
        elementwise.relu_backward(*elementwise.relu_add_train(x, x, bias, 0.5))
    elementwise.add_relu(x, x)
    elementwise.relu_backward(*elementwise.add_relu_train(x, x))
    elementwise.scale_(x, meta(dtype=F32))
    row, column, middle = x[0, 0], x[:, :, :1].contiguous(), x[:, :1].contiguous()
    for y in (x, row, column, middle, x[0, 0, 0]):
        elementwise.mul(x, y)
        elementwise.mul_backward(x, x, y)
    expected = {
        "relu_add",
        "add_relu",
        "relu_backward",
        "scale",
        "mul",
        "mul_backward",
        "mul_backward_rows",
        "mul_backward_columns",
    }
    assert set(compiled) == {f"_{name}" for name in expected}


@pytest.mark.parametrize(
    ("act", "dtype"),
    [*((act, BF16) for act in range(1, 15)), (3, F32), (14, F32)],
)
def test_bias_act_and_gates(compiled, act, dtype):
    x = meta(16384, 4096, dtype=dtype)
    for bias in (None, x[0]):
        bias_act.bias_act_forward(x, bias, act, 1.0, 20.0)
        bias_act.bias_act_backward(x, x, bias, act, 1.0, 20.0, bias is not None)
    glu.gated_forward(x, x, act)
    glu.gated_backward(x, x, x, act)
    if act == 2:
        y = glu.glu_forward(x, 1, act, True)
        glu.glu_backward(y, x, 1, act, True)
        odd = meta(300, 514, dtype=dtype)
        glu.glu_backward(glu.glu_forward(odd, 1, act, False), odd, 1, act, False)
        bias_act.bias_act_backward(odd, odd, odd[0], act, 1.0, 20.0, True)
    names = {"_bias_act", "_act_backward", "_bias_act_backward", "_sum_rows", "_gated", "_gated_backward"}
    assert set(compiled) == names


@pytest.mark.parametrize("dtype", DTYPES)
def test_kl_div(compiled, dtype):
    shapes = [(4096, 1000), (8192, 50257), (4096, 16), (8192, 32000), (2**16 + 1, 2**15 + 8)]
    for rows, n in shapes if dtype == BF16 else shapes[:2]:
        x, labels = meta(rows, n, dtype=dtype), meta(rows, dtype=torch.int64)
        for beta, given in ((0.0, labels), (0.5, None), (0.5, labels)) if n == 1000 else ((0.0, None), (0.5, labels)):
            losses, stats = kl_div.divergence_forward(x, x, given, -100, beta, 2.0)
            for one in (losses, losses[:1].expand(rows)):
                kl_div.divergence_backward(one, x, x, given, -100, beta, 2.0, stats, True, one is losses)
        for log_target in (False, True):
            kl_div.kl_div_elements(x, x, log_target, F32)
            kl_div.kl_div_backward(x, x, x, log_target, True, True)
            kl_div.kl_div_backward(kl_div.kl_div_sum(x, x, log_target), None, x, log_target, True, False)
    names = {"_divergence_forward", "_divergence_backward", "_kl_div_sum", "_kl_div_elements", "_kl_div_backward"}
    assert set(compiled) == names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", linear_divergence.CODES)
def test_linear_divergence(compiled, kind, dtype):
    labels, dlosses = meta(256, dtype=torch.int64), meta(1, dtype=F32).expand(256)
    student = meta(256, 50304, dtype=dtype)
    numbers = (30.0, 0.5, 30.0, 2.0, 0.5)
    linear_divergence.divergence_chunk_(student, student, labels, dlosses, 50257, -100, kind, *numbers)
    if dtype == BF16:
        student, given = meta(256, 128256), meta(256, 128256, dtype=F32)
        for gradient in (None, dlosses):
            linear_divergence.divergence_chunk_(
                student, given, None, gradient, 128256, -100, kind, 0.0, 1.0, 0.0, 1.0, 0.5
            )
    assert set(compiled) == {"_divergence"}


@pytest.mark.parametrize(("dtype", "to"), [(BF16, BF16), (BF16, F32), (F16, F32), (F32, F32)])
def test_residual(compiled, dtype, to):
    seed = meta(dtype=torch.int64)
    for shape in [(64, 512, 768), (8, 384, 14, 14), (2**16, 2**16)] if dtype == BF16 else [(64, 512, 768)]:
        x, y, keep = meta(*shape, dtype=dtype), meta(*shape, dtype=to), meta(shape[0], dtype=F32)
        for p in (0.1, 0.5) if dtype == to else (0.1,):
            joints.dropout_add(x, y, p, seed, to)
            joints.dropout_add(y, None, p, seed, dtype)
        few = (None, keep) if dtype == BF16 else (keep,)
        gammas = [meta(shape[-1], dtype=dtype), meta(shape[1], *[1] * (len(shape) - 2), dtype=to)]
        for gamma, factors in [(gamma, factors) for gamma in gammas for factors in few]:
            joints.scale_add(x, gamma, y, factors, 0.5, to)
            joints.scale_add(y, gamma, None, factors, 0.5, dtype)
            joints.scale_add_backward(y, x, gamma, factors, 0.5)
        joints.scale_add(x, None, y, keep, 2.0, to)
    names = ("dropout_add", "scale_add", "scale_backward_columns", "scale_backward_rows")
    assert set(compiled) == {*(f"_{name}" for name in names), "_sum_rows"}


#: One length for every row of the launch rules, short and odd ones, and one past the registers; (rows, n).
NORM_ROWS = [(8192, n) for n in (24, 100, 512, 2048, 4095, 4096, 8192, 16384, 32768, 131072)]
LAYER_NORM = {"_whole_forward", "_long_forward", "_whole_backward", "_long_backward", "_column_sums", "_sum_rows"}


def compile_layer_norm(x, residual, weight, bias, kind, dtype):
    dims, eps = 1, 1e-5
    if residual is None:
        y, stats = layer_norm.layer_norm_forward(x, dims, weight, bias, eps, kind, dtype, True)
        dsum = None
    else:
        y, x, stats = layer_norm.add_layer_norm_forward(x, residual, dims, weight, bias, eps, kind, dtype, True)
        dsum = x
    wanted = (weight is not None, bias is not None)
    layer_norm.layer_norm_backward(y, dsum, x, dims, weight, stats, kind, *wanted)


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(compiled, dtype, kind):
    sizes = NORM_ROWS if dtype == BF16 else NORM_ROWS[2::2]
    few = sizes[kind % 3 :: 3]
    for rows, n in sizes if kind < 2 else few:
        x, weight = meta(rows, n, dtype=dtype), meta(n, dtype=dtype)
        bias = weight if kind == 0 else None
        compile_layer_norm(x, x, weight, bias, kind, dtype)
        if (rows, n) not in few:
            continue
        if kind < 2 or dtype == BF16:
            compile_layer_norm(x, None, weight, bias, kind, dtype)
        if dtype == BF16 and kind < 3:
            compile_layer_norm(x, None, weight.float(), None if bias is None else bias.float(), kind, F32)
            compile_layer_norm(x, None, None, None, kind, BF16)
    assert set(compiled) <= LAYER_NORM


@pytest.mark.parametrize("dtype", DTYPES)
def test_ada_layer_norm(compiled, dtype):
    for n in (100, 768, 1152, 3072, 8192) if dtype == BF16 else (1152,):
        x, both = meta(32, 256, n, dtype=dtype), meta(32, 1, 2 * n, dtype=dtype)
        scale, shift = both.chunk(2, -1)
        y, stats = layer_norm.ada_layer_norm_forward(x, scale, shift, 1, 1e-6, dtype, True)
        for dscale, dshift in itertools.product((False, True), repeat=2):
            layer_norm.ada_layer_norm_backward(y, x, scale, stats, 1, dscale, dshift)
    assert set(compiled) == {"_whole_forward", "_whole_backward"}


def test_layer_norm_of_few_long_rows(compiled):
    x = meta(2, 2**20)
    compile_layer_norm(x, x, x[0], x[0], 0, BF16)
    compile_layer_norm(x, None, x[0], None, 1, BF16)
    compile_layer_norm(meta(2, 2**31), None, None, None, 0, BF16)
    compile_layer_norm(meta(2**22, 1024), None, x[0, :1024], x[0, :1024], 0, BF16)
    assert set(compiled) == LAYER_NORM


NORMS = {"_statistics", "_finish_statistics", "_normalise", "_sums", "_finish_sums", "_gradient"}
#: (N, C, height, width): of image models and of a few odd ones, of which the last has more than 2^31 elements.
IMAGES = [
    (64, 64, 56, 56),
    (64, 24, 28, 28),
    (32, 2048, 7, 7),
    (2, 3, 333, 333),
    (256, 1000, 1, 1),
    (8, 64, 2048, 2048),
]


def layouts(shape, dtype):
    x = meta(*shape, dtype=dtype)
    return (x, x.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_batch_norm(compiled, last, dtype):
    for shape in IMAGES if dtype == BF16 else IMAGES[:3:2]:
        x = layouts(shape, dtype)[last]
        weight = meta(shape[1], dtype=F32)
        calls = [(None, 0, False), (x, 1, True), (None, 1, False), (x, 5, False)]
        # What follows the normalisation does not change what the launch rules pick for a shape.
        for residual, act, bits in calls if shape == IMAGES[0] else calls[1:2]:
            y, stats, packed = batch_norm.batch_norm_train(
                x, weight, weight, weight, weight, 0.1, 1e-5, residual, act, bits
            )
            batch_norm.batch_norm_eval(x, weight, weight, weight, weight, 1e-5, residual, act, bits, bits)
            batch_norm.channel_bias_act_(y, weight, residual, act)
            for training in (True, False):
                kept = (None, packed) if bits else (residual, None)
                batch_norm.batch_norm_backward(y, x, weight, weight, stats, training, *kept, act, residual is not None)
    assert NORMS <= set(compiled) <= NORMS | {"_normalise_flat"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_sync_batch_norm(compiled, dtype):
    x = meta(*IMAGES[0], dtype=dtype)
    channels = IMAGES[0][1]
    weight = meta(channels, dtype=F32)
    sync_batch_norm.sync_batch_norm_statistics(x)
    for processes in (2, 8, 1000):
        merged = sync_batch_norm.sync_batch_norm_merge(meta(processes, 2 * channels + 1, dtype=F32))
    sync_batch_norm.sync_batch_norm_update_(weight, weight, *merged, 0.1)
    y, stats, bits = sync_batch_norm.sync_batch_norm_normalize(x, weight, weight, weight, weight, 1e-5, x, 1, True)
    means, _, _ = sync_batch_norm.sync_batch_norm_sums(y, x, weight, weight, stats, None, bits, 1)
    sync_batch_norm.sync_batch_norm_gradient(y, x, weight, weight, stats, means, None, bits, 1, True)
    assert set(compiled) == NORMS | {"_merge", "_update"}


#: (shape, groups): in the registers, and not.
GROUPS = [((8, 320, 64, 64), 32), ((8, 640, 16, 16), 32), ((4, 128, 512, 512), 32), ((2, 96, 7, 7), 96), ((64, 512), 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_group_norm(compiled, last, dtype):
    for shape, groups in GROUPS if dtype == BF16 else GROUPS[::2]:
        x = meta(*shape, dtype=dtype)
        if last and len(shape) == 4:
            x = x.to(memory_format=torch.channels_last)
        weight = meta(shape[1], dtype=dtype)
        for act in (0, 2) if dtype == BF16 else (2,):
            y, stats = group_norm.group_norm_forward(x, groups, weight, weight, 1e-5, act, dtype, True)
            group_norm.group_norm_backward(y, x, groups, weight, weight if act else None, stats, act)
        if dtype == BF16:
            group_norm.group_norm_forward(x, groups, weight.float(), weight.float(), 1e-5, 0, F32, False)
    assert set(compiled) == NORMS | {"_whole_forward", "_whole_backward", "_sum_rows"}


def test_activations(compiled):
    x, weight = meta(8, 64, 28, 28), meta(64)
    for act in range(8):
        y, stats = group_norm.group_norm_forward(x, 64, weight, weight, 1e-5, act, BF16, True)
        group_norm.group_norm_backward(y, x, 64, weight, weight, stats, act)
        y, stats, _ = batch_norm.batch_norm_train(x, None, None, weight, weight, 0.1, 1e-5, None, act, False)
        batch_norm.batch_norm_backward(y, x, weight, weight, stats, True, None, None, act, False)
    assert len(compiled) == 8 * 9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(compiled, dtype, interleaved):
    table_dtypes = [dtype, F32] if dtype == BF16 else [dtype]
    for dim, width in [(128, 128), (80, 20), (256, 128)][: 3 if dtype == BF16 else 1]:
        q, k = meta(4, 2048, 32, dim, dtype=dtype).transpose(1, 2), meta(4, 8, 2048, dim, dtype=dtype)
        for table in table_dtypes if dim == 128 else table_dtypes[-1:]:
            cos = meta(2048, width, dtype=table)
            for result in {dtype, table}:
                for backward in (False, True):
                    strides = (q.stride(), k.stride())
                    rotary.rotary(q, k, cos, cos, interleaved, width, backward, result, 1, *strides)
            part = 2 * width if 2 * width <= dim else width
            rotary.rotary(q, None, cos, cos, interleaved, part, False, dtype, 1, q.stride(), (1,))
    q, cos = meta(2, 8, 2**21, 128, dtype=dtype), meta(2**21, 128, dtype=dtype)
    rotary.rotary(q, None, cos, cos, interleaved, 128, False, dtype, 1, q.stride(), (1,))
    assert set(compiled) == {"_rotate"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [(0.0, 0.0, 0.0), (0.1, 30.0, 1e-4)], ids=["plain", "everything"])
def test_cross_entropy(compiled, dtype, options):
    shapes = [(8192, 128256), (8192, 50257), (4096, 1000), (8, 128256), (16, 21, 512, 512), (8192, 10)]
    for shape in shapes if dtype == BF16 else shapes[1::3]:
        x, target = meta(*shape, dtype=dtype), meta(*shape[:1], *shape[2:], dtype=torch.int64)
        for reduction, weight in enumerate((None, meta(shape[1], dtype=F32))):
            loss, stats = cross_entropy.cross_entropy_forward(x, target, weight, -100, reduction, *options, F32)
            cross_entropy.cross_entropy_backward(loss, x, target, weight, stats, -100, reduction, *options)
        cross_entropy.cross_entropy_backward_(loss, x, target, weight, stats, -100, 1, *options)
    chunk = meta(1024, 50304, dtype=dtype)
    cross_entropy.cross_entropy_chunk_(chunk, meta(1024, dtype=torch.int64), None, -100, *options, None, True, 50257)
    names = ("statistics", "losses", "sum", "total", "gradient")
    assert set(compiled) == {f"_{name}" for name in names}


def test_cross_entropy_asserts_its_targets(tmp_path):
    """In debug mode, as its launch has it: the assertion is in the code of that kernel."""
    x, target = meta(64, 1000, dtype=F32), meta(64, dtype=torch.int64)
    options = cross_entropy.Options(-100, 0.0, 0.0, 0.0)
    geometry = cross_entropy._geometry(x)
    _, _, launched = cross_entropy._forward_launches(geometry, (F32, F32), False, options, torch.device("cpu"))
    assert launched.function.debug
    tensors = (x, x, x, x, target, None)
    signature, constexprs, attributes = specialisation(
        launched.function, (*tensors, *launched.scalars), launched.constants
    )
    source = ASTSource(launched.function, signature, constexprs, attributes)
    kernel = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "debug": True})
    assert "__assertfail" in kernel.asm["ptx"]


@pytest.mark.parametrize(("channels", "wanted"), [(64, 64), (256, 64), (512, 256), (2048, 512), (24, 144)])
def test_pointwise_backward(compiled, channels, wanted):
    convolution.pointwise_backward(meta(8, wanted, 14, 14), meta(wanted, channels, 1, 1), meta(8, channels, 14, 14))
    assert compiled == ["_product_and_sum"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_images(compiled, dtype, channels_last):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    for shape, kernel, stride, padding in [((128, 64, 112, 112), 3, 2, 1), ((2, 5, 30, 30), 2, 2, 0)]:
        x = meta(*shape, dtype=dtype).contiguous(memory_format=memory_format)
        window = tuple((number,) * 2 for number in (kernel, stride, padding, 1))
        size = tuple((side + 2 * padding - kernel) // stride + 1 for side in shape[2:])
        max_pool2d.max_pool2d_forward(x, *window, size, channels_last, False)
        max_pool2d.max_pool2d_backward(
            *max_pool2d.max_pool2d_forward(x, *window, size, channels_last, True), *window, shape[2:], channels_last
        )
        gates = squeeze_excite.spatial_sum(x, None, 0.5)
        squeeze_excite.spatial_sum(x, x, 1.0)
        squeeze_excite.scale_shift(x, gates, gates, 0.5)
    assert set(compiled) == {"_max_pool2d", "_max_pool2d_backward", "_spatial_sum", "_scale_shift"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_response_norm(compiled, dtype):
    for shape in [(128, 784, 768), (128, 49, 3072), (8, 100, 8192)] if dtype == BF16 else [(128, 784, 768)]:
        x = meta(*shape, dtype=dtype)
        for last in (True, False):
            parameter = meta(shape[2] if last else shape[1], dtype=dtype)
            y, norm = response_norm.response_norm_forward(x, parameter, parameter, 1e-6, last, dtype)
            response_norm.response_norm_backward(y, x, parameter, norm, 1e-6, last)
    assert set(compiled) == {"_spatial_sum", "_factors", "_gradients", "_apply", "_sum_rows"}


@pytest.mark.parametrize("compiled", [90], indirect=True)  # For sm_80 one spills 8 bytes beside 72 registers.
@pytest.mark.parametrize(("thin", "rank"), [(BF16, 16), (BF16, 64), (F32, 8), (F32, 32), (F32, 128)])
def test_low_rank(compiled, thin, rank):
    x, mask = meta(8192, 2048), meta(8192, 2048, dtype=torch.bool)
    a, u = meta(rank, 2048, dtype=thin), meta(8192, rank, dtype=thin)
    for of_x in (None, mask):
        if thin is F32 or of_x is mask:  # One of 16 bits without a mask is cuBLAS's.
            low_rank.thin_product(x, a.t(), 1.5, of_x)
            low_rank.thin_product(u.t(), x, 1.5, None, of_x)
        for parts in range(2, low_rank.most_parts(rank) + 1):
            low_rank.thin_products(x, [a.t()] * parts, 1.5, [of_x] * parts, True)
            low_rank.thin_products(x, [u.t()] * parts, 1.5, [of_x] * parts, False)
    for base in (None, x):
        low_rank.wide_product(u, a, 1.5, BF16, None if base is x else x[0], base)
        for masks in range(1, low_rank.MOST_PARTS + 1):
            factors = meta(8192, masks * rank, dtype=thin), meta(masks * rank, 2048, dtype=thin)
            low_rank.wide_product(*factors, 1.5, BF16, base=base, masks=[mask] * masks)
    assert set(compiled) == {"_thin", "_sum_rows", "_wide", "_wide_masked"}


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_topk(compiled, dtype):
    for columns, stride in ((131072, 131072), (50257, 50304)):
        for k, softcap, log_prob in itertools.product((1, 16), (0.0, 30.0), (False, True)):
            topk.topk_chunk(meta(896, stride, dtype=dtype), k, softcap, log_prob, columns)
    assert set(compiled) == {"_topk"}


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_vocab_parallel(compiled, dtype):
    target, lse = meta(8192, dtype=torch.int64), meta(8192, dtype=F32)
    for columns in (64128, 25129):
        logits = meta(8192, columns, dtype=dtype)
        for softcap, smoothing in itertools.product((0.0, 30.0), (0.0, 0.1)):
            vocab_parallel.shard(logits, target, softcap, columns, smoothing > 0)
            share = lse if smoothing else None
            vocab_parallel.shard_backward(lse, logits, target, lse, share, softcap, smoothing, 1e-4, columns, -100)
    assert set(compiled) == {"_shard", "_gradient"}
