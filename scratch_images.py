"""max_pool2d, squeeze_excite and their kernels on a GPU: right against torch, and timed, at the shapes of ResNet-50 and EfficientNet-B0.

python scratch_images.py            numerics and kernel times (under a minute)
python scratch_images.py models     also a training step of both networks, eager and patched
"""

import sys

import torch
import torch.nn.functional as F

import fastlayers
from fastlayers import backends, functional

DEVICE = "cuda"
CL = torch.channels_last
assert torch.cuda.is_available()
flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)


def gpu_time(run, repeats=12):
    """Median of the GPU time of a call, in us, with a cold L2."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(200_000)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


big = torch.empty(2**27, dtype=torch.bfloat16, device=DEVICE)
other = torch.empty_like(big)
BANDWIDTH = 2 * big.numel() * 2 / gpu_time(lambda: other.copy_(big))  # bytes a us
print(f"copy {BANDWIDTH / 1e6:.2f} TB/s", torch.cuda.get_device_name(), torch.__version__)
del big, other


def report(name, ours, theirs, nbytes):
    ideal = nbytes / BANDWIDTH
    print(f"{name:58s} ours {ours:8.1f} us ({ideal / ours:.2f} of copy)   torch {theirs:8.1f} us ({ideal / theirs:.2f})", flush=True)


def images(*shape, dtype=torch.bfloat16, last=True, grad=True):
    x = torch.randn(shape, device=DEVICE).to(dtype)
    return x.contiguous(memory_format=CL if last else torch.contiguous_format).requires_grad_(grad)


# ---- numerics ----
def check_pool(shape, args, last, dtype, values=None):
    x = images(*shape, dtype=dtype, last=last)
    if values == "few":
        x = x.detach().round().clamp(-1, 1).requires_grad_()
    if values == "nan":
        x = x.detach()
        x[:, :, ::4, ::5] = float("nan")
        x.requires_grad_()
    y0 = F.max_pool2d(x, *args)
    y1 = functional.max_pool2d(x, *args)
    assert torch.equal(y0.nan_to_num(7), y1.nan_to_num(7)) and y0.stride() == y1.stride(), (shape, args, last, dtype)
    dy = torch.randn_like(y0)
    (exact,) = torch.autograd.grad(F.max_pool2d(x.double(), *args), x, dy.double())
    (g0,) = torch.autograd.grad(y0, x, dy)
    (g1,) = torch.autograd.grad(y1, x, dy)
    e0, e1 = (g0.double() - exact.double()).abs().max(), (g1.double() - exact.double()).abs().max()
    assert e1 <= 1.5 * e0 + 1e-12, (shape, args, last, dtype, e0, e1)


for backend in ("cuda", "triton"):
    with backends.backend(backend):
        for dtype in (torch.bfloat16, torch.float32):
            for last in (True, False):
                for shape in ((4, 64, 112, 112), (3, 5, 37, 41), (2, 24, 15, 16)):
                    for args in ((3, 2, 1), (2, 2), (3, 1, 1), (2, 2, 1), (5, 3, 2), (3, 2, 1, 2), (3, 2, 1, 1, True), ((1, 3), (2, 1), (0, 1))):
                        check_pool(shape, args, last, dtype)
                check_pool((2, 24, 15, 16), (3, 2, 1), last, dtype, "few")
                check_pool((2, 24, 15, 16), (3, 2, 1), last, dtype, "nan")
print("max_pool2d right")


def gate_of(w):
    return lambda m: torch.sigmoid(m * w)


def check_excite(shape, last, dtype):
    x, w = images(*shape, dtype=dtype, last=last), torch.randn(shape[1], 1, 1, device=DEVICE, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    out = []
    for cast, f in ((torch.double, None), (None, None), (None, functional.squeeze_excite)):
        a, b = (x, w) if cast is None else (x.detach().double().requires_grad_(), w.detach().double().requires_grad_())
        y = f(a, gate_of(b)) if f else a * gate_of(b)(a.mean((2, 3), keepdim=True))
        out.append([y, *torch.autograd.grad(y, (a, b), dy.to(y.dtype))])
    for exact, stock, ours in zip(*out, strict=True):
        assert ours.dtype == stock.dtype
        e0, e1 = (stock.double() - exact).abs().max(), (ours.double() - exact).abs().max()
        assert e1 <= 1.5 * e0 + torch.finfo(dtype).eps * exact.abs().max(), (shape, last, dtype, e0, e1)


for backend in ("cuda", "triton"):
    with backends.backend(backend):
        for dtype in (torch.bfloat16, torch.float32):
            for last in (True, False):
                for shape in ((4, 32, 112, 112), (3, 5, 37, 41), (2, 672, 7, 7), (8, 240, 14, 14), (2, 3, 300, 300)):
                    check_excite(shape, last, dtype)
print("squeeze_excite right")

# ---- kernels ----
ops = torch.ops.fastlayers
for shape, args in (((128, 64, 112, 112), (3, 2, 1)), ((128, 64, 112, 112), (2, 2, 0)), ((64, 256, 56, 56), (3, 1, 1))):
    for last in (True, False):
        x = images(*shape, last=last)
        y0, y1 = F.max_pool2d(x, *args), functional.max_pool2d(x, *args)
        dy = torch.randn_like(y0)
        n, m = x.numel(), y0.numel()
        label = f"max_pool2d {'x'.join(map(str, shape))} {args} {'NHWC' if last else 'NCHW'}"
        report(label + " forward", gpu_time(lambda: functional.max_pool2d(x, *args)), gpu_time(lambda: F.max_pool2d(x, *args)), 2 * n + 3 * m)
        ours = gpu_time(lambda: torch.autograd.grad(y1, x, dy, retain_graph=True))
        theirs = gpu_time(lambda: torch.autograd.grad(y0, x, dy, retain_graph=True))
        report(label + " backward", ours, theirs, 2 * n + 3 * m)
        if last and args[1] == 2 and args[0] == 3:
            with backends.backend("triton"):
                t = functional.max_pool2d(x, *args)
                report("  triton forward", gpu_time(lambda: functional.max_pool2d(x, *args)), 1, 2 * n + 3 * m)
                report("  triton backward", gpu_time(lambda: torch.autograd.grad(t, x, dy, retain_graph=True)), 1, 2 * n + 3 * m)
        del x, y0, y1, dy

BLOCKS = [(32, 112), (96, 56), (144, 56), (144, 28), (240, 28), (240, 14), (480, 14), (672, 14), (672, 7), (1152, 7)]
for c, s in BLOCKS:
    for last in (True, False) if c in (96, 672) else (True,):
        x = images(128, c, s, s, last=last, grad=False)
        dy = torch.randn_like(x)
        gate, m = (torch.rand(128, c, 1, 1, device=DEVICE, dtype=x.dtype) for _ in range(2))
        b, name = 2 * x.numel(), f"{c}x{s}x{s} {'NHWC' if last else 'NCHW'}"
        report(f"mean {name}", gpu_time(lambda: ops.spatial_sum(x, None, 1 / s**2)), gpu_time(lambda: x.mean((2, 3), keepdim=True)), b)
        report(f"sum dy*x {name}", gpu_time(lambda: ops.spatial_sum(dy, x, 1.0)), gpu_time(lambda: ops.mul_backward(dy, x, gate)), 2 * b)
        report(f"dx {name}", gpu_time(lambda: ops.scale_shift(dy, gate, m, 1 / s**2)), gpu_time(lambda: dy + m.expand_as(x) / s**2), 2 * b)
        del x, dy

total = [0.0, 0.0, 0.0]
for c, s in BLOCKS:
    x = images(128, c, s, s)
    w = torch.randn(c, 1, 1, device=DEVICE, dtype=x.dtype, requires_grad=True)
    dy = torch.randn_like(x)
    y0 = x * gate_of(w)(x.mean((2, 3), keepdim=True))
    y1 = functional.mul(x, gate_of(w)(x.mean((2, 3), keepdim=True)))
    y2 = functional.squeeze_excite(x, gate_of(w))
    for i, y in enumerate((y0, y1, y2)):
        total[i] += gpu_time(lambda: torch.autograd.grad(y, (x, w), dy, retain_graph=True))
    del x, dy, y0, y1, y2, y
print(f"backward of all SE of one each: torch {total[0]:.0f} us, mul alone {total[1]:.0f}, squeeze_excite {total[2]:.0f}", flush=True)


# ---- models ----
def step_times(name, patch, exclude=None):
    import timm
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    model = timm.create_model(name).cuda().to(memory_format=CL).train()
    if patch:
        from fastlayers.patching import patch_model

        patch_model(model, exclude=exclude) if exclude else patch_model(model)
    x = torch.randn(128, 3, 224, 224, device=DEVICE).to(memory_format=CL)
    target = torch.randint(1000, (128,), device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    torch.backends.cudnn.benchmark = True
    losses = [float(step().detach()) for _ in range(8)]
    torch.cuda.reset_peak_memory_stats()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        step()
    end.record()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    events = sorted((e for e in p.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: -e.self_device_time_total)
    gpu = sum(e.self_device_time_total for e in events) / 3000
    print(f"{name} {'patched' if patch else 'eager'}: step {start.elapsed_time(end) / 10:.2f} ms, GPU {gpu:.2f} ms, "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, losses {losses[0]:.3f} {losses[-1]:.3f}", flush=True)
    if patch:
        for e in events[:24]:
            print(f"    {e.self_device_time_total / 3000:7.3f} ms {e.count // 3:4d}x {e.key[:150]}")


if "models" in sys.argv:
    for name in ("resnet50", "efficientnet_b0"):
        for patch in (False, True):
            step_times(name, patch)
