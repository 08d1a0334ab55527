import torch
from torch import nn
import torch.nn.functional as F
import sys
sys.path.insert(0,"/work/proto")
from tape import Block
class Out(nn.Module):
    def __init__(s): super().__init__(); s.l=nn.Linear(32,32); s.d=nn.Dropout(0.0); s.n=nn.LayerNorm(32)
    def forward(s,x,r): return s.n(s.d(s.l(x))+r)
class Mlp(nn.Module):
    def __init__(s): super().__init__(); s.a=nn.Linear(32,64); s.g=nn.GELU(); s.b=nn.Linear(64,32)
    def forward(s,x): return s.b(s.g(s.a(x)))
class Two(nn.Module):
    def __init__(s): super().__init__(); s.a=nn.Linear(32,64); s.g=nn.GELU()
    def forward(s,x): return s.g(s.a(x))
class SwiGLU(nn.Module):
    def __init__(s): super().__init__(); s.a=nn.Linear(32,64,bias=False); s.b=nn.Linear(32,64,bias=False); s.c=nn.Linear(64,32,bias=False)
    def forward(s,x): return s.c(F.silu(s.a(x))*s.b(x))
class Bott(nn.Module):
    def __init__(s):
        super().__init__(); s.c1=nn.Conv2d(8,4,1,bias=False); s.b1=nn.BatchNorm2d(4); s.c2=nn.Conv2d(4,4,3,padding=1,bias=False); s.b2=nn.BatchNorm2d(4); s.c3=nn.Conv2d(4,8,1,bias=False); s.b3=nn.BatchNorm2d(8); s.r=nn.ReLU(inplace=True)
    def forward(s,x):
        y=s.r(s.b1(s.c1(x))); y=s.r(s.b2(s.c2(y))); y=s.b3(s.c3(y)); y+=x; return s.r(y)
class Drop(nn.Module):
    def __init__(s): super().__init__(); s.l = nn.Linear(32, 32); s.d = nn.Dropout(0.3); s.n = nn.LayerNorm(32)
    def forward(s, x): return s.n(s.d(s.l(s.d(x))) + x)
class Multi(nn.Module):
    "Several results, one without a gradient."
    def __init__(s): super().__init__(); s.l = nn.Linear(32, 64)
    def forward(s, x): a, b = s.l(x).chunk(2, -1); return a.sigmoid(), {"b": b * a, "i": a.argmax(-1)}
class Cat(nn.Module):
    def __init__(s): super().__init__(); s.l = nn.Linear(32, 32)
    def forward(s, x, r): return torch.cat([s.l(x), r, x * x], -1).tanh()[:, 1:3]
class Conv(nn.Module):
    def __init__(s): super().__init__(); s.c = nn.Conv2d(8, 8, 3, padding=1, groups=2); s.b = nn.BatchNorm2d(8); s.p = nn.MaxPool2d(2); s.g = nn.GroupNorm(2, 8)
    def forward(s, x): return s.g(s.p(s.b(s.c(x)).relu())).mean((2, 3))
