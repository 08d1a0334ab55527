exec(open("check.py").read().split("T = lambda")[0])
T = lambda *s: torch.randn(*s, requires_grad=True)
from torch.utils.checkpoint import checkpoint
m = Block(); n = patched(m); x = T(1,4,32); g = torch.randn(1,4,32)
for i in range(3):
    a = torch.autograd.grad(m(x), [x, *m.parameters()], g)
    for r in (False, True):
        b = torch.autograd.grad(checkpoint(n, x, use_reentrant=False), [x, *n.parameters()], g)
    say(f"checkpoint, call {i}", all(same(s, t) for s, t in zip(a, b)))
with torch.autograd.detect_anomaly(): b = torch.autograd.grad(n(x), [x, *n.parameters()], g)
say("anomaly mode", all(same(s, t) for s, t in zip(a, b)))
with torch.profiler.profile() as p: torch.autograd.grad(n(x), [x], g)
print("    ", sorted({e.key for e in p.key_averages()})[:6], [e.key for e in p.key_averages() if "egion" in e.key])
try:
    from torch._dynamo import compiled_autograd
    with compiled_autograd._enable(lambda gm: gm): b = torch.autograd.grad(n(x), [x], g)
    say("compiled autograd", same(a[0], b[0]))
except Exception as e: say("compiled autograd", False, repr(e)[:200])
class H(nn.Module):
    def __init__(s): super().__init__(); s.b = nn.ModuleList([Block() for _ in range(3)])
    def forward(s, x):
        for b in s.b: x = b(x)
        return x
h = H(); k = copy.deepcopy(h); C = native.region_class(Block)
for b in k.b: b.__class__ = C
for _ in range(3):
    torch.manual_seed(0); oh = torch.optim.SGD(h.parameters(), 0.1); ok_ = torch.optim.SGD(k.parameters(), 0.1)
    for q, o in ((h, oh), (k, ok_)): o.zero_grad(); (q(x).square().mean()).backward(); o.step()
say("three blocks, three steps of SGD", all(torch.equal(s, t) for s, t in zip(h.parameters(), k.parameters())), type(k(x).grad_fn).__name__ + " " + k(x).grad_fn.name())
p = k(x).grad_fn; print("     next", len(p.next_functions))
try: print("     saved attributes", [s for s in dir(p) if s.startswith("_saved")])
except Exception as e: print(e)
import tracemalloc, resource, gc
gc.collect(); r0 = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for i in range(6000): torch.autograd.grad(k(x), [x], g)
print("     growth of memory over 6000 steps, KiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - r0)
