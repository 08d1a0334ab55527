exec(open("check.py").read().split("T = lambda")[0])
import gc, weakref
class Keep(nn.Module):
    def __init__(s): super().__init__(); s.l = nn.Linear(32, 32)
    def forward(s, x): return torch.tanh(s.l(x))
for what in ("eager", "python", "native", "native after backward"):
    m = Keep(); x = torch.randn(1,4,32, requires_grad=True)
    if what == "python": native.regions.Tape = native.tape.Tape; native.regions.LEAST = 0; m.__class__ = native.regions.region_class(Keep, {})
    elif what != "eager": m.__class__ = native.region_class(Keep)
    m(x); m(x); m.__dict__["last"] = m(x)
    if "after" in what: m.last.sum().backward()
    r = weakref.ref(m); del m, x; gc.collect(); print(what, "collected", r() is None)
