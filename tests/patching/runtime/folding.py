"""Networks whose norms are folded, and steps of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.block = Block()
        self.head = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def forward(self, x):
        return self.head(self.block(self.stem(x)).mean((2, 3)))


def image():
    torch.manual_seed(3)
    return torch.randn(4, 3, 6, 5)


def warmed(model, *inputs):
    """In eval, with statistics, weights and offsets that a fold has to get right."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        for _ in range(3):
            model.train()(*inputs)
    return model.eval()


def infer(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


def state(model):
    return {name: (dict(vars(module)), type(module)) for name, module in model.named_modules()}


LAYERS = [
    (lambda: nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6, affine=False), (2, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8, eps=0.1), (2, 4, 9, 8)),
    (lambda: nn.Conv2d(4, 8, 3, padding="same", padding_mode="reflect"), nn.BatchNorm2d(8), (2, 4, 9, 8)),
    (lambda: nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), (2, 4, 4, 5, 3)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d(6), (2, 4, 5)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), nn.BatchNorm2d(6), (2, 4, 5, 4)),
    (lambda: nn.ConvTranspose3d(4, 6, 2, groups=2, bias=False), nn.BatchNorm3d(6), (2, 4, 3, 4, 5)),
    (lambda: nn.Linear(4, 6), nn.BatchNorm1d(6), (5, 4)),
    (lambda: nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), (5, 4)),
]


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, channels, act=None, **options):
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), act or nn.ReLU(inplace=True)

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        average = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                average = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            average,
            self.eps,
        )
        return self.act(self.drop(x))


def features(dtype=torch.float32, channels_last=True):
    torch.manual_seed(5)
    x = torch.randn(3, 4, 8, 7).to(dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x
