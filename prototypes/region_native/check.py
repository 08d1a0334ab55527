"""Outputs and gradients of native regions against eager, bit by bit."""
import copy, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = ["/work/proto/native/wt", "/work/proto", "/work/proto/native"]
import torch
from torch import nn
import torch.nn.functional as F
import native
from modules import Two, Out, Mlp, SwiGLU, Bott, Block, Drop, Multi, Cat, Conv
torch.set_num_threads(1)
fails = 0
def say(name, ok, more=""):
    global fails
    fails += not ok
    print(("ok   " if ok else "FAIL ") + name, more)
def same(a, b):
    if a is None or b is None: return a is b
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
def leaves(o): return [t for t in torch.utils._pytree.tree_leaves(o) if isinstance(t, torch.Tensor)]
def patched(m, kind=native.Fast):
    n = copy.deepcopy(m); n.__class__ = native.region_class(type(m), kind); return n
def region(n): return type(n).__fastlayers_region__
def entries(n): return [e for l in region(n).entries.values() for e in l]
def step(m, args, autocast=False, grads=True, seed=3, nonleaf=True):
    args = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    torch.manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(grads):
        out = leaves(m(*(a * 1 if a.requires_grad and nonleaf else a for a in args)))
    found = []
    if grads:
        active = [t for t in out if t.requires_grad]
        args_ = args
        ps = [t for t in (*args, *m.parameters()) if t.requires_grad]
        torch.manual_seed(9)
        found = torch.autograd.grad(active, ps, [torch.randn(t.shape).to(t.dtype) for t in active], allow_unused=True)
    return [*(t.detach() for t in out), *found, *m.buffers(), torch.get_rng_state()], out
T = lambda *s: torch.randn(*s, requires_grad=True)
cases = [(Two, (T(1,4,32),)), (Out, (T(1,4,32), T(1,4,32))), (Mlp, (T(1,4,32),)), (SwiGLU, (T(1,4,32),)), (Bott, (T(1,8,4,4),)), (Block, (T(1,4,32),)), (Drop, (T(1,4,32),)), (Multi, (T(1,4,32),)), (Cat, (T(1,4,32),torch.randn(1,4,32))), (Conv, (T(2,8,4,4),))]
for K, args in cases:
  for autocast in (False, True):
    for grads in (True, False):
      m = K(); n = patched(m)
      ok, used = True, True
      for i in range(4):
        a, _ = step(m, args, autocast, grads, i); b, out = step(n, args, autocast, grads, i)
        ok &= len(a) == len(b) and all(same(s, t) for s, t in zip(a, b))
        if grads and i: used &= any(t.grad_fn is not None and "RegionBackward" in t.grad_fn.name() for t in out)
      es = entries(n)
      say(f"{K.__name__} autocast={autocast} grads={grads}", ok and used and any(e.compiled for e in es), "" if used and ok else (ok, out[0].grad_fn, [str(e.refusal) for e in es], region(n).refused))
# what autograd promises
m = Block(); n = patched(m); x = T(1,4,32); n(x)
y = n(x); g = torch.randn_like(y)
a = torch.autograd.grad(y, [x, *n.parameters()], g, retain_graph=True); b = torch.autograd.grad(y, [x, *n.parameters()], g)
say("retain_graph", all(same(s, t) for s, t in zip(a, b)))
try: torch.autograd.grad(y, x, g); say("backward twice", False)
except RuntimeError as e: say("backward twice", "second time" in str(e), str(e)[:60])
# pruned
y = n(x); a = torch.autograd.grad(y, [x], g); y = m(x); b = torch.autograd.grad(y, [x], g); say("only x", same(a[0], b[0]))
e = [e for e in entries(n) if e.wanted][0]
for p in [n.fc1.weight]:
    y = n(x); a = torch.autograd.grad(y, [p], g); y = m(x); b = torch.autograd.grad(y, [m.fc1.weight], g); say("only fc1.weight", same(a[0], b[0]))
# .backward() accumulates, steals
for q in (m, n): q.zero_grad(set_to_none=True)
for _ in range(2): m(x).backward(g); n(x).backward(g)
say(".backward twice accumulates", all(same(p.grad, q.grad) for p, q in zip(m.parameters(), n.parameters())))
# expanded gradient
a = torch.autograd.grad(m(x).sum(), [x, *m.parameters()]); b = torch.autograd.grad(n(x).sum(), [x, *n.parameters()])
say("expanded gradient", all(same(s, t) for s, t in zip(a, b)))
# create_graph
def second(q, x=x):
    torch.manual_seed(1)
    y = q(x); g = torch.ones_like(y); gs = torch.autograd.grad(y, [x, *q.parameters()], g, create_graph=True)
    return [*gs, *torch.autograd.grad(sum((t * t).sum() for t in gs), [x, *q.parameters()], allow_unused=True)]
for K, x3 in ((Mlp, x), (Out, None), (SwiGLU, x), (Bott, T(1,8,4,4)), (Drop, x), (Two, x)):
    m1 = K() if K is not Out else None
    if m1 is None: continue
    n1 = patched(m1); n1(x3)
    for q in (m1, n1):
        for name, t in q.named_buffers(): t.zero_()
    try:
        a, b = second(m1, x3), second(n1, x3); say("create_graph " + K.__name__, all(same(s.detach(), t.detach()) for s, t in zip(a, b) if s is not None), max((s-t).abs().max().item() for s, t in zip(a, b) if s is not None))
    except Exception as e: say("create_graph " + K.__name__, K is Drop, repr(e)[:150])
# saved_tensors_hooks
counts = [0, 0]
def pack(t): counts[0] += 1; return t.clone()
def unpack(t): counts[1] += 1; return t
with torch.autograd.graph.saved_tensors_hooks(pack, unpack): y = n(x)
b = torch.autograd.grad(y, [x, *n.parameters()], g); a = torch.autograd.grad(m(x), [x, *m.parameters()], g)
say("saved_tensors_hooks", counts[0] > 5 and counts[0] == counts[1] and all(same(s, t) for s, t in zip(a, b)), counts)
with torch.autograd.graph.save_on_cpu(): y = n(x)
b = torch.autograd.grad(y, [x, *n.parameters()], g); say("save_on_cpu", all(same(s, t) for s, t in zip(a, b)))
# modified in place
def raises(f, text):
    try: f()
    except RuntimeError as e: return text in str(e)
    return False
def modified(q, which):
    z = x * 1
    y = q(z)
    with torch.no_grad():
        {"weight": lambda: q.fc1.weight.add_(0), "input": lambda: z.add_(0)}[which]()
    torch.autograd.grad(y, x, g)
for which in ("weight", "input"): say("modified in place: " + which, raises(lambda: modified(m, which), "modified by an inplace") == raises(lambda: modified(n, which), "modified by an inplace"), raises(lambda: modified(m, which), "modified by an inplace"))
class Lin(nn.Module):
    def __init__(s): super().__init__(); s.l = nn.Linear(32, 32); s.k = nn.Linear(32, 32)
    def forward(s, x): return s.k(torch.tanh(s.l(x))).sigmoid().view(1, 2, 64).view(1, 4, 32)
def mod_out(q, view=False):
    z = x * 1; y = q(z)
    (y if not view else y.view(-1)).mul_(2) if True else None
    torch.autograd.grad(y, x, g)
def mod_in(q, view=False):
    z = x * 1; y = q(z); (z if not view else z.view(-1)).mul_(2); torch.autograd.grad(y, list(q.parameters()), g)
def pythons(m):
    from fastlayers.patching.rewrite import regions
    n = copy.deepcopy(m); native.recording(); n.__class__ = regions.region_class(type(m), {}); return n
for name, f in (("result", mod_out), ("input", mod_in)):
    m1 = Lin(); n1 = patched(m1); n1(x * 1); p1 = pythons(m1); p1(x * 1)
    r = [raises(lambda: f(q, v), "modified by an inplace") for q in (m1, n1, p1) for v in (False, True)]
    say(f"modified in place: {name}", r[0:2] == r[2:4], f"eager {r[:2]} native {r[2:4]} python region {r[4:6]}")
# a parameter that does not need a gradient: another signature
n.fc1.weight.requires_grad_(False); m.fc1.weight.requires_grad_(False)
for _ in range(2):
    a, _ = step(m, (x,)); b, out = step(n, (x,))
say("frozen weight", all(same(s, t) for s, t in zip(a, b)), str(out[0].grad_fn))
# eval mode, other shapes
for shape in ((2,4,32), (2,6,32)):
    for _ in range(2): a, _ = step(m, (T(*shape),)) , None; 
x2 = T(2,4,32)
for _ in range(2): a, _ = step(m, (x2,)); b, _ = step(n, (x2,))
say("another shape", all(same(s, t) for s, t in zip(a, b)))
# modes: torch_dispatch mode, vmap, jvp, inference_mode, hooks
from torch.utils._python_dispatch import TorchDispatchMode
class Seen(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(s, f, types, args=(), kwargs=None): s.n += 1; assert "fastlayers" not in str(f); return f(*args, **(kwargs or {}))
m, n = Block(), None; n = patched(m); n(x); n(x)
for q in (m, n):
    with Seen() as s: y = q(x); torch.autograd.grad(y, x, g)
    print("     operations seen by a mode", s.n)
with torch.inference_mode(): say("inference_mode", all(same(m(x), n(x)) for _ in range(3)))
say("vmap", torch.allclose(torch.vmap(m)(torch.ones(3,1,4,32)), torch.vmap(n)(torch.ones(3,1,4,32))))
y = n(x); gs = torch.randn(3, *y.shape)
try:
    b = torch.autograd.grad(y, [x], gs, is_grads_batched=True); a = torch.autograd.grad(m(x), [x], gs, is_grads_batched=True)
    say("is_grads_batched", torch.allclose(a[0], b[0]))
except Exception as e: say("is_grads_batched", False, repr(e)[:200])
import torch.autograd.forward_ad as fw
with fw.dual_level():
    d = m, n = Mlp(), None; n = patched(m); n(x); n(x); d = fw.make_dual(x.detach(), torch.ones_like(x)); a = fw.unpack_dual(m(d)).tangent; b = fw.unpack_dual(n(d)).tangent
    say("forward AD", torch.equal(a, b))
say("gradcheck", torch.autograd.gradcheck(patched(Mlp().double()), (torch.randn(1,2,32,dtype=torch.double,requires_grad=True),)))
# references: nothing is held after backward
import gc, weakref
m = Block(); n = patched(m); n(x); n(x)
y = n(x * 1); node = y.grad_fn; r = weakref.ref(n); torch.autograd.grad(y, [x], g)
del y
held = [t for t in gc.get_objects() if isinstance(t, tuple) and len(t) == 5 and t[2] is n]
del node, m, n, q; gc.collect()
say("the module dies", r() is None)
# threads
import threading
m = Block(); n = patched(m); n(x); errors = []
b0 = torch.autograd.grad(m(x), [x, *m.parameters()], g)
def work():
    for _ in range(100):
        a = torch.autograd.grad(n(x), [x, *n.parameters()], g)
        if not all(same(s, t) for s, t in zip(a, b0)): errors.append(1)
ts = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]; say("threads", not errors)
leaf = SwiGLU(); pl = patched(leaf); pp = pythons(leaf)
for _ in range(2): a, b, c = (step(q, (T(1,4,32),), True)[0] for q in (leaf, pl, pp))
x = T(1,4,32)
a, b, c = (step(q, (x,), True, nonleaf=False)[0] for q in (leaf, pl, pp))
print("     autocast, an input that is a leaf and cast twice: native as eager", all(same(s, t) for s, t in zip(a, b)), "python as eager", all(same(s, t) for s, t in zip(a, c)))
with torch.autocast("cpu", torch.bfloat16, cache_enabled=False): pass
print("FAILED" if fails else "all ok", fails)
