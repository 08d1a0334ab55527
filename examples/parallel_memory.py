"""What a Llama needs on many GPUs: memory of each, and bytes that each sends in a training step.

    python examples/parallel_memory.py [--tokens 8192] [--bfloat16]

Prints the table of docs/many-gpus.md, which has the formulas. It needs no GPU, and trains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import click

GIB, GB = 2**30, 1e9
CHUNK = 896  # rows of the logits that linear_cross_entropy has in memory at once


@dataclass(frozen=True)
class Llama:
    name: str
    dim: int
    layers: int
    heads: int
    kv_dim: int  # features of all keys of a token
    hidden: int
    vocabulary: int = 128256
    tied: bool = False  # the head's weight is the embedding's

    @property
    def block(self) -> int:
        """Parameters of a layer."""
        return self.dim * (2 * self.dim + 2 * self.kv_dim + 3 * self.hidden + 2)

    @property
    def root(self) -> int:
        """Parameters outside of the layers: embedding, last norm, head."""
        return self.dim * ((1 if self.tied else 2) * self.vocabulary + 1)

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.root


@dataclass(frozen=True)
class Mesh:
    """Processes along each dimension, as in char_gpt.py: hsdp has the first two, 2d the last two."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.tensor

    def __str__(self) -> str:
        sizes = (("replicate", self.replicate), ("shard", self.shard), ("tensor", self.tensor))
        return " x ".join(f"{name} {size}" for name, size in sizes if size > 1)


@dataclass(frozen=True)
class Bytes:
    """Of a parameter: its weight, its gradient, AdamW's two averages, and its copy that computes."""

    weight: int = 4
    gradient: int = 4
    optimizer: int = 8
    compute: int = 2


MIXED, BFLOAT16 = Bytes(), Bytes(weight=2, gradient=2, optimizer=4)


def activations(model: Llama, mesh: Mesh, tokens: int, patched: bool) -> float:
    """Bytes that a layer keeps for its backward. What the sequence is gathered for is whole on each GPU: 4 dim."""
    inner = 4 * model.dim + 4 * model.kv_dim + 4 * model.heads  # q and the result of attention, k and v, log-sum-exp
    norms = 4 * model.dim if patched else 12 * model.dim  # a sum each; or in float32, and once more normalised
    mlp = (4 if patched else 8) * model.hidden  # gate and up; or silu(gate) and the product, too
    return tokens * (4 * model.dim + (inner + norms + mlp + 8) / mesh.tensor)


def head(model: Llama, mesh: Mesh, tokens: int, patched: bool) -> float:
    """Bytes at the loss: some rows of logits, and the weight's gradient; or all logits, their log-probabilities and
    the gradient of these in float32."""
    rows = 2 * min(tokens, CHUNK) + 2 * model.dim if patched else 10 * tokens
    return rows * model.vocabulary / mesh.tensor


def weights(model: Llama, mesh: Mesh, size: Bytes) -> tuple[float, float, float]:
    """Bytes of weights and the optimizer's state, of gradients, and of copies of weights and gradients."""
    own = model.parameters / mesh.tensor / mesh.shard
    if mesh.shard > 1:  # the root and two layers are gathered, and the gradient of one is divided
        gathered = size.compute * (model.root + 3 * model.block) + size.gradient * model.block
        copies = gathered / mesh.tensor
    else:  # autocast's casts, and DDP's buckets
        copies = own * (size.compute * (size.weight != size.compute) + size.gradient * (mesh.replicate > 1))
    return own * (size.weight + size.optimizer), own * size.gradient, copies


def peak(model: Llama, mesh: Mesh, tokens: int, size: Bytes, patched: bool) -> float:
    """Bytes of a step: gradients take the place of activations as the backward proceeds."""
    states, gradients, copies = weights(model, mesh, size)
    kept = model.layers * activations(model, mesh, tokens, patched) + head(model, mesh, tokens, patched)
    return states + copies + max(kept, gradients)


def sent(model: Llama, mesh: Mesh, tokens: int, size: Bytes) -> tuple[float, float, float]:
    """Bytes that a GPU sends in a step along replicate, shard and tensor, each collective as a ring."""
    own = model.parameters / mesh.tensor
    all_reduced = 2 * size.gradient * own / mesh.shard
    gathered = size.compute * (2 * model.layers * model.block + model.root) / mesh.tensor  # the root only once
    of_shards = gathered + size.gradient * own
    of_tokens = (8 * model.layers + 4) * size.compute * model.dim * tokens
    return tuple(
        volume * (processes - 1) / processes
        for volume, processes in ((all_reduced, mesh.replicate), (of_shards, mesh.shard), (of_tokens, mesh.tensor))
    )  # type: ignore[return-value]


LLAMA_1B = Llama("1.2B", 2048, 16, 32, 512, 8192, tied=True)
LLAMA_8B = Llama("8B", 4096, 32, 32, 1024, 14336)
LLAMA_70B = Llama("70B", 8192, 80, 64, 1024, 28672)
ROWS = (
    (LLAMA_1B, Mesh(replicate=2)),
    (LLAMA_1B, Mesh(shard=2)),
    (LLAMA_1B, Mesh(tensor=2)),
    (LLAMA_1B, Mesh(replicate=8)),
    (LLAMA_1B, Mesh(shard=8)),
    (LLAMA_1B, Mesh(replicate=8, shard=8)),
    (LLAMA_8B, Mesh(shard=8)),
    (LLAMA_8B, Mesh(shard=64)),
    (LLAMA_8B, Mesh(replicate=8, shard=8)),
    (LLAMA_8B, Mesh(shard=8, tensor=8)),
    (LLAMA_8B, Mesh(replicate=128, shard=8)),
    (LLAMA_70B, Mesh(shard=64)),
    (LLAMA_70B, Mesh(shard=8, tensor=8)),
    (LLAMA_70B, Mesh(shard=32, tensor=8)),
    (LLAMA_70B, Mesh(replicate=4, shard=32, tensor=8)),
)


@click.command()
@click.option("--tokens", default=8192, show_default=True, help="Of a step and each group along tensor.")
@click.option("--bfloat16", is_flag=True, help="Weights, gradients and AdamW's state too; otherwise in float32.")
def main(tokens: int, bfloat16: bool) -> None:
    """Print memory and traffic of Llamas on 2 to 1,024 GPUs."""
    size = BFLOAT16 if bfloat16 else MIXED
    print(
        "| Llama | GPUs | mesh | weights, AdamW | gradients | copies | activations, stock | patched | loss, stock "
        "| patched | peak, stock | patched | sent along replicate | shard | tensor |"
    )
    print("|---|---:|---|" + "---:|" * 12)
    for model, mesh in ROWS:
        kept = [model.layers * activations(model, mesh, tokens, patched) for patched in (False, True)]
        heads = [head(model, mesh, tokens, patched) for patched in (False, True)]
        peaks = [peak(model, mesh, tokens, size, patched) for patched in (False, True)]
        memory = (*weights(model, mesh, size), *kept, *heads, *peaks)
        cells = [f"{value / GIB:.1f}" for value in memory]
        cells += [f"{value / GB:.1f}" if value else "" for value in sent(model, mesh, tokens, size)]
        print(f"| {model.name} | {mesh.gpus} | {mesh} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
