"""Patched forwards that communicate, in two processes: collectives, context parallelism, loss parallelism."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from fastlayers import patch_model
from fastlayers.graphs.state import Counter, State, UncapturedError
from fastlayers.ops import vocab_parallel
from fastlayers.ops.dtensor import Whole, differentiable_shard_of, shard_of
from fastlayers.patching.libraries.transformers import attention_masks
from fastlayers.patching.regions.region import Region
from fastlayers.patching.runtime.checks import rewritten_everywhere
from tests.distributed.processes import run_in_processes

WORLD, WIDTH, CLASSES = 2, 16, 1100


class Sum(torch.autograd.Function):
    """The sum over processes, in place, in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    backward = forward


COLLECTIVES = {
    "all_reduce": Sum.apply,
    "without a gradient": lambda x: Sum.apply(x.detach()),
    "functional": lambda x: functional_collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD).mean(0),
}


class Reduces(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.norm1, self.norm2 = how, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.out = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.down(F.gelu(self.up(self.norm1(x))))
        x = x + h * COLLECTIVES[self.how](h.mean(1)).mean()
        return x + F.silu(self.out(self.norm2(x)))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifies(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.loss = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), nn.CrossEntropyLoss()

    def forward(self, x, target, layer):
        logits = self.head(self.norm(x)).view(-1, CLASSES)
        return self.loss(logits, target) if layer else F.cross_entropy(logits, target, ignore_index=3)


def pair(make):
    torch.manual_seed(0)
    stock = make().to(torch.float64)
    return stock, patch_model(copy.deepcopy(stock))


def tokens(length, seed=0):
    return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(model, *args):
    """The result of a call, and the gradients."""
    model.zero_grad()
    out = model(*args)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(actual, expected, case):
    assert len(actual) == len(expected), case
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text: f"{case}: {text}")


def check_collectives(rank):
    """One process sees a length again and again, the other one new lengths: each records at calls of its own."""
    for how in COLLECTIVES:
        stock, model = pair(lambda how=how: Reduces(how))
        for call in range(6):
            x = tokens(3 + call * rank, seed=2 * call + rank)
            assert_equal(step(model, x), step(stock, x), f"{how}, call {call}")


@contextmanager
def sequences_in_parts(rank):
    """As torch's context_parallel replaces attention, which has no implementation for a CPU: keys and values are those
    of all processes."""
    attention = F.scaled_dot_product_attention

    def attend(q, k, v, is_causal):
        assert is_causal
        k, v = (functional_collectives.all_gather_tensor_autograd(t, 2, dist.group.WORLD) for t in (k, v))
        first = rank * q.shape[2]
        rows, columns = torch.arange(first, first + q.shape[2])[:, None], torch.arange(k.shape[2])
        return attention(q, k.contiguous(), v.contiguous(), attn_mask=rows >= columns)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = attention


def check_context_parallel(rank):
    """A region that was recorded outside has the same shapes inside, and the other way round."""
    stock, model = pair(Attends)
    whole = tokens(12)
    part = whole.chunk(WORLD, 1)[rank].contiguous()
    alone, (out, *grads) = step(stock, part), step(stock, whole)
    together = [out.chunk(WORLD, 1)[rank], *grads]
    for turn in range(2):
        for call in range(3):
            assert_equal(step(model, part), alone, f"outside, turn {turn}, call {call}")
        for call in range(3):
            with sequences_in_parts(rank):
                out, *grads = step(model, part)
            for grad in grads:
                dist.all_reduce(grad)
            assert_equal([out, *grads], together, f"inside, turn {turn}, call {call}")
    region: Region = type(model).__fastlayers_region__
    found = {str(e.refusal) for entries in region.entries.values() for e in entries}
    assert any("communicates with other processes" in reason for reason in found)
    assert "None" in found  # outside


def check_loss_parallel(rank):
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    x, target = tokens(5), torch.arange(10) * 37 % CLASSES
    for layer in (False, True):
        stock, before = pair(Classifies)
        after = copy.deepcopy(stock)
        stock, before = (parallelize_module(model, mesh, plan) for model in (stock, before))
        after = patch_model(parallelize_module(after, mesh, plan))
        for call in range(3):
            with loss_parallel():
                expected, *found = [local(step(model, x, target, layer)) for model in (stock, before, after)]
            for name, actual in zip(("before", "after"), found, strict=True):
                assert_equal(actual, expected, f"patched {name}, call {call}, by a layer: {layer}")


def local(tensors):
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def check_all(rank):
    with rewritten_everywhere():
        check_collectives(rank)
        check_context_parallel(rank)
        check_loss_parallel(rank)


@pytest.mark.slow
def test_forwards_that_communicate(tmp_path):
    run_in_processes(check_all, WORLD, tmp_path)


def parallel_mlp() -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    return parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def check_the_state_of_a_parallel_module(rank: int) -> None:
    module = parallel_mlp()
    state = State(module, torch.device("cpu"))
    assert state.is_parallel
    assert state.holds()
    with loss_parallel():  # changes what DTensors compute
        assert not state.holds()
    weight = module[0].weight.requires_grad_(False)
    assert not state.holds()
    weight.requires_grad_(True)
    hook = module[0].register_forward_hook(lambda *args: None)
    assert not state.holds()
    with pytest.raises(UncapturedError, match="hooks"):
        State(module, torch.device("cpu"))
    hook.remove()
    assert state.holds()
    with Counter() as counter:
        module(torch.randn(4, WIDTH))
    assert counter.communicates
    assert counter.count > 3
    assert not State(nn.Linear(2, 2), torch.device("cpu")).is_parallel


def test_the_state_of_a_parallel_module(tmp_path):
    """What a graph of its calls takes for granted."""
    run_in_processes(check_the_state_of_a_parallel_module, WORLD, tmp_path)


def check_shards_and_wholes(rank: int) -> None:
    """The gradient of a shard is placed as that of a result is."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    x = torch.arange(6.0).view(3, 2)
    for placement in (Shard(0), Replicate(), Partial()):
        whole = DTensor.from_local(
            x[: 2 - rank] if placement == Shard(0) else x, mesh, [placement], shape=(3, 2), stride=(2, 1)
        )
        leaf = whole.detach().requires_grad_()
        shard = differentiable_shard_of(leaf)
        again = Whole.of(leaf).of_shard(shard * 3)
        assert (again.placements, again.shape) == (leaf.placements, leaf.shape)
        again.square().sum().backward() if placement != Partial() else again.full_tensor().sum().backward()
        full = whole.full_tensor()
        expected = 18 * full if placement != Partial() else torch.full_like(full, 3.0)
        assert torch.equal(leaf.grad.full_tensor(), expected)
        assert Whole.of(shard) is None
        assert shard_of(leaf).data_ptr() == leaf.to_local().data_ptr()


def test_shards_and_wholes(tmp_path):
    run_in_processes(check_shards_and_wholes, WORLD, tmp_path)


def check_a_language_model(rank: int) -> None:
    """Patched before or after: the losses and gradients of stock. A mask is left out, the logits stay in 16 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.parallel import parallelize

    def refuse(**given):
        raise AssertionError("a mask was made")

    mesh = dist.init_device_mesh("cpu", (WORLD,))
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=CLASSES, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    stock, before, after = (LlamaForCausalLM(config) for _ in range(3))
    for model in (before, after):
        model.load_state_dict(stock.state_dict())
    patch_model(before)
    for model in (stock, before, after):
        parallelize(model, mesh)
    patch_model(after)
    ids = torch.randint(CLASSES, (2, 8), generator=torch.Generator().manual_seed(1))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4 * torch.finfo(torch.bfloat16).eps)):
        found = []
        for model in (stock, before, after):
            watch = mock.patch.object(vocab_parallel, "_shard", wraps=vocab_parallel._shard)
            with rewritten_everywhere(), loss_parallel(), watch as shard:
                loss = model.to(dtype)(input_ids=ids, labels=ids).loss
                loss.backward()
            assert [call.args[0].dtype for call in shard.call_args_list] == [dtype] * (model is not stock)
            found.append([t.full_tensor() if isinstance(t, DTensor) else t for t in (loss, model.lm_head.weight.grad)])
            model.zero_grad()
        for own in found[1:]:
            for actual, expected in zip(own, found[0], strict=True):
                assert (actual - expected).norm() < tolerance * expected.norm()
    library = attention_masks.loaded_library()
    library = library._replace(create_causal_mask=refuse)
    embeds = DTensor.from_local(torch.randn(2, 4, WIDTH), mesh, [Shard(1)])
    given = {"config": config, "inputs_embeds": embeds, "attention_mask": None, "past_key_values": None}
    assert attention_masks.attention_mask(library, refuse, None, **given) is None


def test_a_language_model_in_parallel(tmp_path):
    pytest.importorskip("transformers")
    run_in_processes(check_a_language_model, WORLD, tmp_path)
