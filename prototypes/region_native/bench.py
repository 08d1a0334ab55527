"""us of process time: eager, Python region, native with Python's guards, native with its own guard."""
import os, copy, gc, sys, time, warnings
warnings.simplefilter("ignore")
sys.path[:0] = ["/work/proto/native/wt", "/work/proto", os.environ.get("NP","/work/proto/native"), "/work/proto/native"]
import torch
import native
from fastlayers.patching.rewrite import regions
from fastlayers.patching.rewrite.tape import Tape
from modules import Two, Out, Mlp, SwiGLU, Bott, Block
torch.set_num_threads(1)
def measured(functions, n=200, rounds=11):
    best = [1e9] * len(functions)
    for _ in range(rounds):  # interleaved, so that a busy machine is fair to all
        for i, f in enumerate(functions):
            s = time.process_time()
            for _ in range(n): f()
            best[i] = min(best[i], (time.process_time() - s) / n * 1e6)
    return best
def of(m, kind):
    n = copy.deepcopy(m)
    regions.LEAST = 0
    if kind == "python":
        regions.Tape = Tape; n.__class__ = regions.region_class(type(m), {})
    elif kind: n.__class__ = native.region_class(type(m), kind)
    return n
if "nomkldnn" in sys.argv: torch.backends.mkldnn.set_flags(False)
KINDS = (None, "python", native.Native, native.Fast)
T = lambda *s: torch.randn(*s, requires_grad=True)
print("module   what       eager  python  native(py guard)  native  native/eager", native.LIBRARY)
for K, a in ((Two, (T(1,4,32),)), (Out, (T(1,4,32), T(1,4,32))), (Mlp, (T(1,4,32),)), (SwiGLU, (T(1,4,32),)), (Bott, (T(1,8,4,4),)), (Block, (T(1,4,32),))):
    m = K()
    fs = {"forward": [], "fwd+bwd": [], "inference": []}
    for kind in KINDS:
        n = of(m, kind)
        ps = [*a, *n.parameters()]
        dy = torch.ones_like(n(*a))
        def fwd(n=n): n(*a)
        def both(n=n, ps=ps, dy=dy): torch.autograd.grad(n(*a), ps, dy)
        def infer(n=n):
            with torch.no_grad(): n(*a)
        regions.Tape = Tape if kind == "python" else native.NativeTape
        for name, f in zip(fs, (fwd, both, infer)): f(); f(); fs[name].append(f)
    for name, f in fs.items():
        t = measured(f)
        print(f"{K.__name__:8} {name:9} " + " ".join(f"{x:6.1f}" for x in t), f"        {t[3] / t[0]:.2f}", flush=True)
