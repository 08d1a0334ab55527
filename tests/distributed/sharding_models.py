"""A small Llama under tensor and sequence parallelism, patched and not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fastlayers import functional as F
from fastlayers.ops import sharding
from fastlayers.patching import patch_model

WIDTH, HEADS, CLASSES, POSITIONS = 32, 4, 52, 8


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, cos, sin):
        batch, positions, _ = x.shape
        q, k, v = (layer(x).view(batch, positions, -1, WIDTH // HEADS) for layer in (self.wq, self.wk, self.wv))
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch_functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, positions, -1))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(torch_functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x, cos, sin):
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.mlp(self.mlp_norm(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids, cos, sin):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def parallelized(model: Llama, mesh: DeviceMesh, sequence: bool) -> Llama:
    """Tensor parallelism, and with ``sequence`` the plan of torchtitan: norms on shards of the sequence."""
    rows = Shard(1) if sequence else Replicate()
    out = {"output_layouts": rows, "use_local_output": not sequence}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **out),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    block = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    block |= {"mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel()}
    block |= {"attention.wo": RowwiseParallel(**out), "mlp.w2": RowwiseParallel(**out)}
    if sequence:
        plan["norm"] = block["attention_norm"] = block["mlp_norm"] = SequenceParallel()
        block["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        block["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(model, mesh, plan)
    for layer in model.blocks:
        parallelize_module(layer, mesh, block)
    return model


def step(model: nn.Module, loss_of: Callable[..., Tensor]) -> list[Tensor]:
    """The loss and the gradients of the second step: regions are recorded by then."""
    generator = torch.Generator().manual_seed(1)
    ids, target = torch.randint(CLASSES, (2, 2, POSITIONS), generator=generator)
    angles = torch.rand(POSITIONS, 1, WIDTH // HEADS, dtype=torch.float64, generator=generator)
    for _ in range(2):
        model.zero_grad()
        logits = model(ids, angles.cos(), angles.sin())
        loss = loss_of(logits.flatten(0, 1), target.flatten())
        loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama().double()


def check_llama(mesh: DeviceMesh) -> None:
    """Patched before or after parallelize_module it has the loss and gradients of one process, all by rules."""
    expected = step(llama(), torch_functional.cross_entropy)
    for sequence in (False, True):
        for before in (True, False):
            model = parallelized(patch_model(llama()) if before else llama(), mesh, sequence)
            if not before:
                patch_model(model)
            sharding.fallbacks(reset=True)
            torch.testing.assert_close(step(model, F.cross_entropy), expected)
            assert not sharding.fallbacks(), sharding.fallbacks()
