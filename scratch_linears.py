"""On a GPU: numerics and times of what s5_linears adds, against what torch does. PYTHONPATH=. python scratch_linears.py"""

import copy
import time

import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers import functional
from fastlayers.ops import linear, split
from fastlayers.patching import calls

assert torch.cuda.is_available()
START = time.time()
flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
torch.manual_seed(0)


def gpu_us(f, repeat=15):
    """Sum of the kernels of a call, cold L2: median of several."""
    for _ in range(3):
        f()
    times = []
    for _ in range(repeat):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)  # the host is ahead: no launch gaps
        a.record()
        f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000)
    return sorted(times)[len(times) // 2]


def host_us(f, n=300):
    for _ in range(20):
        f()
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(5):
        t = time.perf_counter()
        for _ in range(n):
            f()
        best = min(best, (time.perf_counter() - t) / n)
        torch.cuda.synchronize()
    return best * 1e6


def error(a, exact):
    return ((a.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()


def check(what, ours, theirs, exact):
    a, b = error(ours, exact), error(theirs, exact)
    print(f"  {what:28s} error {a:.2e}, torch {b:.2e}  {'ok' if a <= 1.5 * b + 1e-7 else 'WORSE'}")


x = torch.randn(2**27, device="cuda", dtype=torch.bfloat16)
y = torch.empty_like(x)
copied = 4 * x.numel() / gpu_us(lambda: y.copy_(x)) / 1e6
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {copied:.2f} TB/s")

print("\ncolumn sums: us and share of the copy bandwidth")
for rows, n, where in [(12608, 768, "ViT proj, fc2"), (12608, 2304, "ViT qkv"), (12608, 3072, "ViT fc1"),
                       (200704, 96, "ConvNeXt 0"), (200704, 384, "ConvNeXt 0 fc1"), (50176, 192, "ConvNeXt 1"),
                       (12544, 384, "ConvNeXt 2"), (3136, 768, "ConvNeXt 3"), (16384, 768, "GPT-2"), (16384, 2304, "GPT-2 qkv"),
                       (1024, 512, "1 MiB"), (1000, 50257, "odd"), (4096, 1031, "odd")]:
    dy = torch.randn(rows, n, device="cuda").bfloat16()
    row = [f"  {rows}x{n} {where:16s}"]
    exact = dy.double().sum(0)
    stock = dy.sum(0)
    for name in ("torch", "cuda", "triton"):
        if name == "torch":
            f = lambda: dy.sum(0)  # noqa: E731
        else:
            with fastlayers.backend(name):
                kernel = linear.FAMILY.serving(dy).column_sum
            f = lambda: kernel(dy, torch.float32)  # noqa: E731, B023
            low = kernel(dy, torch.bfloat16)
            assert error(low, exact) <= 1.5 * error(stock, exact) + 1e-7, (rows, n, name)
            assert torch.equal(f(), f())
            assert error(f(), exact) <= 1.5 * error(dy.sum(0, dtype=torch.float32), exact) + 1e-6, (rows, n, name)
        us = gpu_us(f)
        row.append(f"{name} {us:7.1f} ({2 * dy.numel() / us / 1e6 / copied:.2f})")
    print("  ".join(row))

print("\nlinear, float32 parameters under bfloat16 autocast: forward and backward, GPU us; host us of a forward")
for shape, k, n in [((64, 197), 768, 2304), ((64, 197), 3072, 768), ((64, 56, 56), 384, 96), ((16, 1024), 768, 768)]:
    layer = nn.Linear(k, n).cuda()
    fused = copy.deepcopy(layer)
    fused.__class__ = fastlayers.FusedLinear
    x = torch.randn(*shape, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(*shape, n, device="cuda", dtype=torch.bfloat16)

    def step(module):
        with torch.autocast("cuda", torch.bfloat16):
            out = module(x)  # noqa: B023
        return out, *torch.autograd.grad(out, [x, *module.parameters()], dy)  # noqa: B023

    ours, theirs = step(fused), step(layer)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours[:3], theirs[:3]))
    check(f"dbias {(*shape, k)} to {n}", ours[3], theirs[3], dy.double().flatten(0, -2).sum(0))
    assert ours[3].dtype == theirs[3].dtype
    print(f"  {'':28s} fused {gpu_us(lambda: step(fused)):.1f}, torch {gpu_us(lambda: step(layer)):.1f}")

small = nn.Linear(64, 64).cuda()
small_fused = copy.deepcopy(small)
small_fused.__class__ = fastlayers.FusedLinear
x = torch.randn(2, 8, 64, device="cuda")
t, f = host_us(lambda: small(x)), host_us(lambda: small_fused(x))
print(f"  host, small: torch {t:.1f}, fused (torch's own call) {f:.1f}")
before, linear.LEAST = linear.LEAST, 0
print(f"  host, small, engaged: {host_us(lambda: small_fused(x)):.1f}")
with torch.autocast("cuda", torch.bfloat16):
    linear.LEAST = before
    t, f = host_us(lambda: small(x)), host_us(lambda: small_fused(x))
    linear.LEAST = 0
    e = host_us(lambda: small_fused(x))
print(f"  host, small, autocast: torch {t:.1f}, fused (torch's own call) {f:.1f}, engaged {e:.1f}")


def both(module):
    out = module(x)
    out.backward(out.detach())


print(f"  host, forward and backward: torch {host_us(lambda: both(small)):.1f}, engaged {host_us(lambda: both(small_fused)):.1f}")
linear.LEAST = before

print("\nlinear_act under autocast: gelu(linear(x)), forward and backward, GPU us; host us")
for shape, k, n in [((64, 197), 768, 3072), ((64, 56, 56), 96, 384), ((64, 14, 14), 384, 1536)]:
    layer = nn.Linear(k, n).cuda()
    x = torch.randn(*shape, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(*shape, n, device="cuda", dtype=torch.bfloat16)
    wants = [x, layer.weight, layer.bias]

    def act(f):
        with torch.autocast("cuda", torch.bfloat16):
            out = f(x, layer.weight, layer.bias)  # noqa: B023
        return out, *torch.autograd.grad(out, wants, dy)  # noqa: B023

    def stock(x, w, b):
        return F.gelu(F.linear(x, w, b))

    def ours(x, w, b):
        return calls.linear_act(x, w, b, "gelu")

    w64 = [t.detach().double().requires_grad_() for t in wants]
    out = F.gelu(F.linear(*w64))
    exact = out.detach(), *torch.autograd.grad(out, w64, dy.double())
    for what, a, b, e in zip(("out", "dx", "dweight", "dbias"), act(ours), act(stock), exact):
        assert a.dtype == b.dtype
        check(f"{what} {(*shape, k)}", a, b, e)
    del w64, out, exact
    print(f"  {'':28s} fused {gpu_us(lambda: act(ours)):.1f}, torch {gpu_us(lambda: act(stock)):.1f};"
          f" host {host_us(lambda: act(ours), 50):.0f}, torch {host_us(lambda: act(stock), 50):.0f}")

print("\nparts of a product: backward, GPU us; host us. Bytes: 2b at the copy bandwidth is the limit")


def timm(product, unbind):
    B, N, C = product.shape
    return unbind(product.reshape(B, N, 3, C // 192, 64).permute(2, 0, 3, 1, 4), 0)


cases = {
    "ViT 64x197x2304 unbind": ((64, 197, 2304), lambda p: timm(p, calls.unbind), lambda p: timm(p, torch.unbind), True),
    "GPT-2 16x1024x2304 split": ((16, 1024, 2304), lambda p: calls.split(p, 768, 2), lambda p: p.split(768, 2), False),
    "chunk 16x1024x2304": ((16, 1024, 2304), lambda p: calls.chunk(p, 3, -1), lambda p: p.chunk(3, -1), False),
}
for name, (shape, ours, theirs, heads) in cases.items():
    product = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    times, answers = [], []
    for f in (ours, theirs):
        parts = f(product * 1)
        dys = [torch.randn(p.shape[0], p.shape[2], p.shape[1], 64, device="cuda").bfloat16().transpose(1, 2) if heads
               else torch.randn(p.shape, device="cuda").bfloat16() for p in parts]
        torch.manual_seed(1)
        dys = [torch.empty_like(d).normal_() for d in dys]
        made = product.detach().requires_grad_()
        parts = f(made)
        answers.append(torch.autograd.grad(parts, made, dys, retain_graph=True)[0])
        run = lambda: torch.autograd.grad(parts, made, dys, retain_graph=True)  # noqa: E731, B023
        times.append((gpu_us(run), host_us(run, 100), type(parts[0].grad_fn).__name__))
    assert torch.equal(*answers)
    limit = 4 * product.numel() / copied / 1e6
    print(f"  {name:26s} ours {times[0][0]:.1f} ({limit / times[0][0]:.2f}), torch {times[1][0]:.1f} "
          f"({limit / times[1][0]:.2f}); host {times[0][1]:.0f}, {times[1][1]:.0f}; {times[0][2]}")

print("\nresiduals under autocast: half x, float32 gamma and residual; forward, GPU us")
x = torch.randn(64, 197, 768, device="cuda", dtype=torch.bfloat16)
residual, gamma = torch.randn(64, 197, 768, device="cuda"), torch.randn(768, device="cuda")
a = calls.scale_add(x, gamma, residual, written=None, scaled=False)
assert a.dtype == torch.float32
check("scale_add", a, x * gamma + residual, x.double() * gamma.double() + residual.double())
print(f"  ours {gpu_us(lambda: calls.scale_add(x, gamma, residual, written=None, scaled=False)):.1f}, "
      f"torch {gpu_us(lambda: x * gamma + residual):.1f}")
assert calls.dropout_add(x, residual, 0.1, True, written=None).dtype == torch.float32
print(f"  dropout_add: ours {gpu_us(lambda: calls.dropout_add(x, residual, 0.1, True, written=None)):.1f}, "
      f"torch {gpu_us(lambda: F.dropout(x, 0.1) + residual):.1f}")


class Block(nn.Module):
    """ViT-B's, as timm writes it."""

    def __init__(self, width=768, heads=12):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


print("\na block of ViT-B, batch 64, autocast: forward and backward")
block = Block().cuda()
patched = fastlayers.patch_model(copy.deepcopy(block))
print(f"  {fastlayers.patch_report(patched).summary()}")
x = torch.randn(64, 197, 768, device="cuda", requires_grad=True)


def train(module, x=x):
    with torch.autocast("cuda", torch.bfloat16):
        out = module(x)
    return out, *torch.autograd.grad(out, [x, *module.parameters()], out.detach())


exact_block = copy.deepcopy(block).double()
out = exact_block(x.double())
names = ["out", "dx", *(name for name, _ in block.named_parameters())]
ours, theirs = train(patched), train(block)
x64 = x.detach().double().requires_grad_()
out = exact_block(x64)
exact = out, *torch.autograd.grad(out, [x64, *exact_block.parameters()], out.detach())
for name, a, b, e in zip(names, ours, theirs, exact):
    assert a.dtype == b.dtype, name
    check(name, a, b, e)
del exact, out
print(f"  GPU us: patched {gpu_us(lambda: train(patched)):.0f}, torch {gpu_us(lambda: train(block)):.0f}; "
      f"host {host_us(lambda: train(patched), 10):.0f}, {host_us(lambda: train(block), 10):.0f}")
print(f"\n{time.time() - START:.0f} s")
