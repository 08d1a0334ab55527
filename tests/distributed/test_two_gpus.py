"""What gloo has no part of, with NCCL on two GPUs: context parallelism, and graphs of models in parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from fastlayers import graph_model, graph_report, patch_model
from tests.distributed.processes import losses_of, run_in_processes

pytestmark = pytest.mark.gpu

WIDTH, STEPS = 256, 14


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Reduces(Net):
    """Sums over the processes at the end of its forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).clone()
        dist.all_reduce(x.detach())
        return x


def on_two_gpus(function: Callable[[int], None], tmp_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_in_processes(function, 2, tmp_path, "spawn", "nccl")


def rows(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(2, 64, WIDTH, generator=generator).cuda() for _ in range(STEPS)]


def losses(model: nn.Module, batches: list[Tensor]) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    return losses_of(model, optimizer, batches)


def replays(model: nn.Module) -> dict[str, int]:
    return {row.fqn: row.replays for row in graph_report(model) if row.replays}


def check_context_parallelism(rank: int) -> None:
    """The calls before and after, without it, run the regions that those within it must not record."""
    mesh = dist.init_device_mesh("cuda", (2,))
    stock = Net().to("cuda", torch.bfloat16)
    patched = patch_model(copy.deepcopy(stock))
    whole = torch.randn(2, 256, WIDTH, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        out = model(x)
        out.float().square().mean().backward()
        return [out.detach().float(), *(p.grad.float().clone() for p in model.parameters())]

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for _ in range(8):
            outside, inside = [], []
            for model in (stock, patched):
                outside.append(step(model, whole.chunk(2, 1)[rank].contiguous()))
                x = whole.clone()
                with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
                    inside.append(step(model, x))
            for expected, own in (outside, inside):
                for a, b in zip(expected, own, strict=True):
                    assert (a - b).norm() < 4 * torch.finfo(torch.bfloat16).eps * a.norm()


def test_context_parallelism(tmp_path):
    on_two_gpus(check_context_parallelism, tmp_path)


def check_graphs(rank: int) -> None:
    mesh = dist.init_device_mesh("cuda", (2,))
    batches = rows(rank)

    def check(build: Callable[[], nn.Module], parallel: Callable[[nn.Module], nn.Module], given: list[Tensor]) -> Any:
        """The model of which there are graphs, which trains as the one without them."""
        expected = losses(parallel(build()), given)
        model = graph_model(build())
        torch.testing.assert_close(losses(parallel(model), given), expected, rtol=1e-5, atol=0)
        return model

    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, device_ids=[rank])

    def sharded(model: Net) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def tensor_parallel() -> Net:
        model = Net().cuda()
        for block in model.blocks:
            parallelize_module(block.mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model

    assert {*replays(check(lambda: Net().cuda(), ddp, batches))} == {""}
    model = check(lambda: Reduces().cuda(), lambda model: model, batches)
    assert {*replays(model)} == {f"blocks.{i}" for i in range(4)}
    (reason,) = (row.reason for row in graph_report(model) if row.fqn == "")
    assert "communicates with other processes" in reason
    assert not replays(check(lambda: Net().cuda(), sharded, batches))
    model = check(tensor_parallel, lambda model: model, rows(0))
    assert {*replays(model)} == {""}
    before = replays(model)[""]
    for _ in range(3):  # Gradients that are kept end no replays, which one process might see and another not.
        model(rows(0)[0]).square().mean().backward()
    assert replays(model)[""] == before + 3
    loss = model(rows(0)[0]).square().mean()
    loss.backward(retain_graph=True)
    # A second backward would need what the graph has overwritten, and a process alone must not run the forward again.
    with pytest.raises(RuntimeError, match="communicates with other processes"):
        loss.backward()


def test_graphs(tmp_path):
    on_two_gpus(check_graphs, tmp_path)


def check_graphs_of_a_language_model(rank: int) -> None:
    """Sequence parallelism, and a loss of sharded classes in the forward: results and gradients are DTensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.parallel import parallelize

    mesh = dist.init_device_mesh("cuda", (2,))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = LlamaForCausalLM(config).cuda()
    graphed = patch_model(copy.deepcopy(stock))
    for model in (stock, graphed):
        parallelize(model, mesh)
    graph_model(graphed)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (stock, graphed)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(256, (2, 32), generator=generator).cuda()
        losses = []
        for model, optimizer in zip((stock, graphed), optimizers, strict=True):
            optimizer.zero_grad()
            with loss_parallel():
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert {*replays(graphed)} == {""}


def test_graphs_of_a_language_model(tmp_path):
    pytest.importorskip("transformers")
    on_two_gpus(check_graphs_of_a_language_model, tmp_path)
