"""A Llama-style language model of characters, trained on the source text of Python's standard library.

    python examples/char_gpt.py [--steps N] [--layers fused|torch|patched] [--resume] ...
    torchrun --nproc-per-node 4 examples/char_gpt.py --parallel ddp|fsdp|hsdp|tp|2d [--inner 2] ...

The model has RMSNorm, rotary embeddings and SwiGLU, written with einops. Its definition uses fused layers: a sum and
its norm, the rotation of queries and keys, the gated MLP without its product in memory, and the last linear layer with
the loss, without the logits in memory. ``--layers torch`` is the same model without fastlayers, and ``--layers
patched`` is that model after ``patch_model``.

The processes of torchrun share the batch (ddp), the batch and the memory of the parameters (fsdp; hsdp: within groups
of --inner processes), the matrices and the sequence (tp), or batch and memory between groups whose --inner processes
share the matrices (2d). The batch of a step depends only on the seed and the number of the step. So one process and
several, shared in any way, give the same losses up to rounding, and can resume each other's checkpoints.
The defaults are for a GPU. On a CPU: --dim 128 --depth 4 --heads 4 --context 128 --batch 16 --steps 300
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fastlayers.functional as FL
from fastlayers import FusedAddRMSNorm, FusedRMSNorm, patch_model, patch_report, save_model
from stdlib_text import SourceText, random_rows
from training import (
    DEVICE,
    IS_FIRST,
    OUT,
    RESUME,
    Panel,
    ShardedCheckpoint,
    console,
    cosine,
    draw_curves,
    find_device,
    fit,
    latest,
    seed_all,
    set_rate,
)

VOCABULARY = 256  # a character is a byte of UTF-8


# the layers, fused and in plain torch --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """The parts of the model besides torch's linear layers, embedding and attention."""

    RMSNorm: type[nn.RMSNorm]
    AddRMSNorm: type[nn.RMSNorm]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gated_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    linear_cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]


class AddRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        total = x + residual
        return F.rms_norm(total, self.normalized_shape, self.weight, self.eps), total


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def gated_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, weight)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2), target.flatten())


LAYERS = {
    "fused": Layers(FusedRMSNorm, FusedAddRMSNorm, FL.rotary, FL.gated_linear, FL.linear_cross_entropy),  # type: ignore[arg-type]
    "torch": Layers(nn.RMSNorm, AddRMSNorm, rotary, gated_linear, linear_cross_entropy),
}


# the model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    dim: int
    depth: int
    heads: int
    context: int

    @property
    def hidden(self) -> int:
        """Hidden size of the MLP, 8/3 of dim: three matrices then have as many weights as two with 4 dim."""
        return (self.dim * 8 // 3 + 63) // 64 * 64


class Attention(nn.Module):
    def __init__(self, config: Config, layers: Layers) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.rotary = layers.rotary

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # A head's rows of the weight follow each other. A process that has a part of the rows has whole heads.
        q, k, v = rearrange(self.qkv(x), "b t (h three d) -> three b h t d", three=3, d=self.head_dim)
        q, k = self.rotary(q, k, cos.to(q.dtype), sin.to(q.dtype))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(rearrange(attended, "b h t d -> b t (h d)"))


class GatedMLP(nn.Module):
    def __init__(self, config: Config, layers: Layers) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)
        self.gated_linear = layers.gated_linear

    def forward(self, x: Tensor) -> Tensor:
        return self.gated_linear(self.gate(x), self.up(x), self.down.weight)


class Block(nn.Module):
    def __init__(self, config: Config, layers: Layers) -> None:
        super().__init__()
        self.norm1 = layers.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config, layers)
        self.norm2 = layers.AddRMSNorm(config.dim, eps=1e-5)
        self.mlp = GatedMLP(config, layers)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed, x = self.norm2(self.attention(self.norm1(x), cos, sin), residual=x)
        return x + self.mlp(normed)


class Head(nn.Linear):
    """Returns the loss if the next characters are given, else the logits."""

    def __init__(self, config: Config, layers: Layers) -> None:
        super().__init__(config.dim, VOCABULARY, bias=False)
        self.linear_cross_entropy = layers.linear_cross_entropy

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(hidden) if target is None else self.linear_cross_entropy(hidden, self.weight, target)


class CharGPT(nn.Module):
    """Returns the loss if the next characters are given, else the logits of the last character."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, layers: Layers) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config, layers) for _ in range(config.depth))
        self.norm = layers.RMSNorm(config.dim, eps=1e-5)
        self.head = Head(config, layers)
        angles = rotary_angles(config.context, config.dim // config.heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Weights that add to the residual stream start smaller, so that it does not grow with the depth.
                scale = (2 * config.depth) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, text: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.embedding(text)
        cos, sin = self.cos[: text.shape[1]], self.sin[: text.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return self.head(x[:, -1] if target is None else x, target=target)


def rotary_angles(length: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """(length, head_dim): the angle t / base^(2i / head_dim) for position t and pair i of a head's elements."""
    frequencies = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    return repeat(torch.outer(torch.arange(length), frequencies), "t d -> t (two d)", two=2)


# processes -----------------------------------------------------------------------------------------------------------

#: The dimensions of the mesh of processes. Along "replicate" and "shard" each process has rows of the batch; gradients
#: are averaged, and along "shard" parameters, gradients and the optimizer's state are divided by FSDP2. Along "tensor"
#: all have the same rows and divide the matrices. Processes of the last dimension are neighbours: one machine's GPUs.
MESHES = {
    "ddp": ("replicate",),
    "fsdp": ("shard",),
    "hsdp": ("replicate", "shard"),
    "tp": ("tensor",),
    "2d": ("shard", "tensor"),
}

#: How processes along "tensor" divide the model. Between the blocks, in the norms and the sums, each has a part of the
#: sequence. Attention and MLP gather the sequence; each process computes some heads, or some of the hidden features,
#: and a reduce-scatter adds the results up and divides the sequence again. The loss is of logits that stay divided.
SEQUENCE, WHOLE = Shard(1), Replicate()
TENSOR_PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=WHOLE, output_layouts=SEQUENCE, use_local_output=False),
    "blocks.*.norm1": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(SEQUENCE, None, None), desired_input_layouts=(WHOLE, None, None)
    ),
    "blocks.*.attention.qkv": ColwiseParallel(),  # its output is a plain tensor: attention knows only its own heads
    "blocks.*.attention.out": RowwiseParallel(output_layouts=SEQUENCE, use_local_output=False),
    "blocks.*.norm2": SequenceParallel(),
    "blocks.*.mlp": PrepareModuleInputOutput(
        input_layouts=SEQUENCE,
        desired_input_layouts=WHOLE,
        output_layouts=Partial(),
        desired_output_layouts=SEQUENCE,
        use_local_output=False,
    ),
    "blocks.*.mlp.gate": ColwiseParallel(use_local_output=False),
    "blocks.*.mlp.up": ColwiseParallel(use_local_output=False),
    "blocks.*.mlp.down": RowwiseParallel(),  # only divides the weight, which gated_linear multiplies with
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=SEQUENCE, output_layouts=WHOLE, use_local_output=False),
}


def whole(value: Tensor) -> Tensor:
    """A plain tensor of all shards."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def add_up(model: nn.Module) -> None:
    """Add up the gradients of which each process has a part. clip_grad_norm_ of torch 2.11 does not scale parts."""
    for weight in model.parameters():
        if isinstance(weight.grad, DTensor):
            placements = [Replicate() if each.is_partial() else each for each in weight.grad.placements]
            weight.grad = weight.grad.redistribute(placements=placements)


@dataclass(frozen=True)
class Processes:
    """The processes that torchrun started, or this one alone; ``mesh`` has the size of each dimension by its name."""

    rank: int
    world: int
    device: torch.device
    mesh: dict[str, int]

    @classmethod
    def join(cls, device_name: str | None, parallel: str, inner: int) -> Processes:
        device = find_device(device_name)
        world = int(os.environ.get("WORLD_SIZE", 1))
        outer, last = MESHES[parallel][:-1], MESHES[parallel][-1]
        inner = inner if outer and world > 1 else world
        if world % inner:
            raise click.UsageError(f"--inner {inner}: expected a divisor of the {world} processes")
        mesh = dict.fromkeys(outer, world // inner) | {last: inner}
        if "WORLD_SIZE" not in os.environ:
            return cls(0, 1, device, mesh)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        return cls(dist.get_rank(), world, device, mesh)

    def leave(self) -> None:
        if not dist.is_initialized():
            return
        # A thread of gloo that still holds a tensor of the last collective when Python ends aborts the process, and
        # DTensor's caches keep those threads beyond destroy_process_group. While this one waits they let go.
        dist.barrier()
        dist.destroy_process_group()

    @property
    def tensor(self) -> int:
        """The number of processes that divide a matrix, and have the same rows of the batch."""
        return self.mesh.get("tensor", 1)

    def share(self, rows: Tensor) -> Tensor:
        """The rows of the global batch that belong to this process."""
        return rows[self.rank // self.tensor :: self.world // self.tensor].to(self.device)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the processes; those that have the same rows have the same value."""
        value = value.detach().clone()
        if self.world > 1:
            dist.all_reduce(value)
        return value / self.world

    def divided_loss(self) -> AbstractContextManager[None]:
        """For a forward and its backward: the cross-entropy of logits whose classes are divided is not gathered."""
        return loss_parallel() if self.tensor > 1 else nullcontext()

    def spread(self, model: CharGPT) -> nn.Module:
        if self.world == 1:
            return model
        mesh = dist.init_device_mesh(
            self.device.type, tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh.keys())
        )
        if "tensor" in self.mesh:
            parallelize_module(model, mesh["tensor"], TENSOR_PLAN)
        if "shard" in self.mesh:
            # The parameters of a block are gathered for its forward and backward, those of the root for the whole step.
            batch = mesh[tuple(name for name in self.mesh if name != "tensor")]
            for block in model.blocks:
                fully_shard(block, mesh=batch)
            fully_shard(model, mesh=batch)
        return nn.parallel.DistributedDataParallel(model) if self.mesh.keys() == {"replicate"} else model


# training ------------------------------------------------------------------------------------------------------------


class Training:
    """Training of a model on the text: its steps, and its loss on text that it has not seen."""

    def __init__(self, model: CharGPT, processes: Processes, batch: int, context: int, rate: float, steps: int) -> None:
        self.text = SourceText.load()
        self.processes = processes
        self.model = processes.spread(model)
        self.rows, self.length = batch, context + 1  # the target of a character is the next character
        self.rate, self.steps = rate, steps
        matrices = [weight for weight in self.model.parameters() if weight.ndim == 2]
        others = [weight for weight in self.model.parameters() if weight.ndim != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

    def loss(self, text: Tensor) -> Tensor:
        """The loss of this process' share of a global batch. All processes draw the same batch."""
        rows = self.processes.share(random_rows(text, self.rows, self.length))
        kind = rows.device.type
        # Weights are float32 under FSDP2 too: its own mixed precision would round differently than autocast.
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return whole(self.model(rows[:, :-1], rows[:, 1:]))

    def step(self, index: int) -> dict[str, Tensor]:
        set_rate(self.optimizer, self.rate * cosine((index + 1) / self.steps, warmup=0.05))
        self.optimizer.zero_grad(set_to_none=True)
        with self.processes.divided_loss():
            loss = self.loss(self.text.train)
            loss.backward()
        add_up(self.model)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": self.processes.mean(loss), "gradient": whole(norm)}

    @torch.no_grad()
    def validation_loss(self) -> Tensor:
        seed_all(0)  # the same passages every time
        with self.processes.divided_loss():
            losses = [self.loss(self.text.validation) for _ in range(4)]
        return self.processes.mean(torch.stack(losses).mean())


@torch.no_grad()
def sample(model: CharGPT, prompt: str, length: int) -> str:
    """Text from the model, one character at a time. Every process must call it; all draw the same text."""
    seed_all(0)
    device = model.cos.device
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = whole(model(text[:, -len(model.cos) :]))[0].float().cpu()
        chosen = torch.multinomial((logits / 0.8).softmax(-1), 1)
        text = torch.cat((text, chosen[None].to(device)), 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def save_whole(model: nn.Module, empty: CharGPT, path: Path) -> None:
    """The weights under their plain names, gathered from all processes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if IS_FIRST:
        empty.load_state_dict(weights)
        save_model(empty, path)


@click.command()
@click.option("--steps", default=2000, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--batch", default=64, show_default=True, type=click.IntRange(min=1), help="Rows of all processes together."
)
@click.option("--dim", default=384, show_default=True, type=click.IntRange(min=2))
@click.option("--depth", default=6, show_default=True, type=click.IntRange(min=1), help="Blocks.")
@click.option("--heads", default=6, show_default=True, type=click.IntRange(min=1))
@click.option("--context", default=256, show_default=True, type=click.IntRange(min=2), help="Characters in a row.")
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--layers", "kind", default="fused", show_default=True, type=click.Choice(["fused", "torch", "patched"]))
@click.option(
    "--parallel",
    default="ddp",
    show_default=True,
    type=click.Choice(list(MESHES)),
    help="How torchrun's processes share the model.",
)
@click.option(
    "--inner",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Processes that share the parameters (hsdp) or the matrices (2d): best those of a machine.",
)
@click.option(
    "--validate-every", default=100, show_default=True, type=click.IntRange(min=1), help="Steps between validations."
)
@click.option(
    "--save-every", default=500, show_default=True, type=click.IntRange(min=1), help="Steps between checkpoints."
)
@click.option("--stop-at", default=None, type=click.IntRange(min=1), help="Stop after this step; --resume continues.")
@click.option("--seed", default=0, show_default=True)
@click.option("--sample", "sampled", default=400, show_default=True, help="Characters to write at the end.")
@RESUME
@DEVICE
@OUT
def main(
    steps: int, batch: int, dim: int, depth: int, heads: int, context: int, learning_rate: float, kind: str,
    parallel: str, inner: int, validate_every: int, save_every: int, stop_at: int | None, seed: int, sampled: int,
    resume: bool, device: str | None, out: Path,
) -> None:  # fmt: skip
    """Train a language model on the source text of Python's standard library."""
    if dim % (2 * heads):
        raise click.UsageError(f"--dim {dim} --heads {heads}: expected heads of equal and even size")
    processes = Processes.join(device, parallel, inner)
    shares = processes.world // processes.tensor
    if batch % shares:
        raise click.UsageError(f"--batch {batch}: expected a multiple of the {shares} processes that share the batch")
    if heads % processes.tensor:
        raise click.UsageError(
            f"--heads {heads}: expected a multiple of the {processes.tensor} processes that share the matrices"
        )
    where = processes.device

    console.rule(f"1. The model, on {where}", align="left")
    seed_all(seed)
    config, layers = Config(dim, depth, heads, context), LAYERS["torch" if kind == "patched" else kind]
    model = CharGPT(config, layers).to(where)
    console.print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M parameters, {kind} layers")
    if kind == "patched":
        console.print(patch_report(patch_model(model)))
    training = Training(model, processes, batch, context, learning_rate, steps)

    def one_round(index: int) -> dict[str, Tensor]:
        measured = training.step(index)
        if (index + 1) % validate_every == 0 or index + 1 == steps:
            measured["validation"] = training.validation_loss()
        return measured

    console.rule(f"2. Training on {len(training.text.train) / 1e6:.1f} MB of source text", align="left")
    checkpoint = ShardedCheckpoint(out / "char_gpt.checkpoint", training.model, training.optimizer, save_every)
    start = time.perf_counter()
    history = fit(
        "training", steps, one_round, seed=seed, report=10, stop_at=stop_at, checkpoint=checkpoint, resume=resume
    )
    console.print(f"{len(history)} steps, {time.perf_counter() - start:.1f} s of this run")
    measured = latest(history)
    for name in ("loss", "validation"):
        if name in measured:
            console.print(f"{name} {measured[name]:.3f}, {measured[name] / math.log(2):.2f} bits a character")
    if where.type == "cuda":
        console.print(f"peak memory {torch.cuda.max_memory_allocated(where) / 2**30:.2f} GiB a GPU")
    save_whole(training.model, CharGPT(config, layers), out / "char_gpt.safetensors")
    if IS_FIRST:
        (out / "char_gpt.json").write_text(json.dumps(history))
    picture = out / "char_gpt.png"
    draw_curves({"": history}, (Panel("loss, nats a character", ("loss", "validation")),), picture, unit="step")
    console.print(f"weights, losses and their curves in {out / 'char_gpt'}.safetensors, .json and .png")

    console.rule("3. What it writes", align="left")
    console.print(sample(model, "def ", sampled), markup=False)
    processes.leave()


if __name__ == "__main__":
    main()
