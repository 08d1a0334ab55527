"""Calls every raw op of csrc on rows and images of odd sizes, under compute-sanitizer.

Kernels read whole 16-byte words, of which the last may reach past its tensor; no allocation of CUDA ends within one. So
tensors here end with a word.
"""

import torch

import fastlayers  # noqa: F401  (registers the ops)

ops = torch.ops.fastlayers
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def whole(t: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout. Its storage ends with a 16-byte word."""
    return t.new_empty(t.numel() + -t.numel() % 8).as_strided(t.shape, t.stride()).copy_(t)


def randn(*shape: int) -> torch.Tensor:
    return whole(torch.randn(*shape, device="cuda", dtype=dtype))


for dtype in DTYPES:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    for n in (1, 3, 5, 37, 64, 255, 1024, 4095, 20001):
        for rows in (1, 3, 12, 300):
            x = randn(rows, n)
            p = whole(ops.softmax_forward(x, 1, 1.0, None, dtype, False))
            ops.softmax_backward(x, p, 1, 1.0, None, dtype, False)
            weight = randn(n)
            seed, keep = torch.tensor(3, device="cuda"), torch.ones(rows, device="cuda", dtype=compute)
            ops.dropout_add(x, x, 0.5, seed, dtype)
            ops.dropout_add(x, None, 0.5, seed, dtype)
            for gamma in (weight, randn(rows, 1)):
                ops.scale_add(x, gamma, x, keep, 2.0, dtype)
                ops.scale_add_backward(x, x, gamma, keep if gamma is weight else None, 2.0)
            for act in (1, 3, 12):
                for bias in (None, weight):
                    y = ops.bias_act_forward(x, bias, act, 0.0, 0.0)
                    ops.bias_act_backward(whole(y), x, bias, act, 0.0, 0.0, bias is not None)
                ops.gated_backward(whole(ops.gated_forward(x, x, act)), x, x, act)
                ops.gated_backward_(randn(rows, n), x, x, act)
                packed = randn(rows, 2 * n)
                ops.glu_backward(whole(ops.glu_forward(packed, 1, act, False)), packed, 1, act, False)
            labels = torch.arange(rows, device="cuda") % 3 - 1
            for beta in (0.0, 0.5):
                for given in (None, labels):
                    losses, stats = ops.divergence_forward(x, p, given, -1, beta, 2.0)
                    ops.divergence_backward(losses, x, p, given, -1, beta, 2.0, stats, True, True)
            for log_target in (False, True):
                elements = whole(ops.kl_div_elements(x, p, log_target, compute))
                ops.kl_div_backward(elements, x, p, log_target, True, True)
                ops.kl_div_backward(ops.kl_div_sum(x, p, log_target), None, p, log_target, True, False)
            if n < 4096:
                ops.gather_backward(x, torch.randint(-1, n + 1, (rows, n), device="cuda"), n)
            target = torch.randint(n, (rows,), device="cuda")
            for options in ((0.0, 0.0, 0.0), (0.1, 5.0, 0.1)):
                loss, stats = ops.cross_entropy_forward(x, target, whole(weight.to(compute)), -100, 1, *options, dtype)
                ops.cross_entropy_backward(loss, x, target, whole(weight.to(compute)), stats, -100, 1, *options)
                ops.cross_entropy_chunk_(whole(x), target, None, -100, *options, None, True, n)
            for kind in (0, 1):
                bias = weight if kind == 0 else None
                y, stats = ops.layer_norm_forward(x, 1, weight, bias, 1e-5, kind, dtype, True)
                ops.add_layer_norm_forward(x, x, 1, weight, bias, 1e-5, kind, dtype, True)
                ops.layer_norm_backward(whole(y), None, x, 1, weight, stats, kind, True, kind == 0)
                ops.layer_norm_backward(whole(y), x, x, 1, None, stats, kind, False, False)
    for shape in ((2, 4, 3, 2), (8, 5, 7, 3), (4, 64, 9, 8), (302, 4, 3), (4, 6)):
        x = randn(*shape)
        target = torch.randint(shape[1], shape[:1] + shape[2:], device="cuda")
        for options in ((0.0, 0.0, 0.0), (0.1, 5.0, 0.1)):
            losses, stats = ops.cross_entropy_forward(x, target, None, -100, 0, *options, dtype)
            ops.cross_entropy_backward(losses, x, target, None, stats, -100, 0, *options)
        layouts = (x, whole(x.contiguous(memory_format=torch.channels_last))) if x.dim() == 4 else (x,)
        weight = randn(shape[1])
        for x in layouts:
            for act in (0, 1, 2):
                for residual in (None, whole(torch.randn_like(x))):
                    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
                    gated = residual is not None and act == 1
                    if gated and x.numel() % 32 != 0:
                        continue  # bits are or-ed in words of 32, of which the last may reach past them too
                    y, stats, bits = ops.batch_norm_train(x, mean, var, weight, weight, 0.1, 1e-5, residual, act, gated)
                    kept = residual if act == 2 else None, bits if gated else None
                    wanted = residual is not None
                    ops.batch_norm_backward(whole(y), x, weight, weight, stats, True, *kept, act, wanted)
                groups = 1 if shape[1] % 2 else 2
                y, stats = ops.group_norm_forward(x, groups, weight, weight, 1e-5, act, dtype, True)
                ops.group_norm_backward(whole(y), x, groups, weight, weight, stats, act)
    for shape in ((2, 3, 7, 9), (2, 8, 5, 6), (3, 16, 12, 8), (1, 24, 1, 1), (5, 2, 33, 40)):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = whole(torch.randn(*shape, device="cuda", dtype=dtype).contiguous(memory_format=memory_format))
            last = not x.is_contiguous()
            for kernel, stride, padding in ((3, 2, 1), (2, 2, 1), (3, 1, 1), (2, 3, 1), (5, 3, 2)):
                window = tuple([number] * 2 for number in (kernel, stride, padding, 1))
                size = [(side + 2 * padding - kernel) // stride + 1 for side in shape[2:]]
                if min(size) > 0:
                    y, offsets = ops.max_pool2d_forward(x, *window, size, last, True)
                    ops.max_pool2d_backward(whole(y), whole(offsets), *window, list(shape[2:]), last)
            gates = whole(ops.spatial_sum(x, None, 0.5))
            ops.spatial_sum(x, x, 1.0)
            ops.scale_shift(x, gates, gates, 0.5)
    for dim, width, half in ((16, 16, 8), (80, 20, 10), (64, 32, 16), (7, 4, 2), (6, 6, 3)):
        for q in (randn(2, 9, 5, dim), whole(randn(2, 5, 9, dim).transpose(1, 2))):
            k = randn(2, 3, 5, dim)
            for columns in (width, half):
                cos, sin = randn(5, columns), randn(5, columns)
                for interleaved in (False, True):
                    for backward in (False, True):
                        rest = (interleaved, width, backward, dtype, 1, q.stride(), k.stride())
                        ops.rotary(q, k, cos, sin, *rest)
torch.cuda.synchronize()
