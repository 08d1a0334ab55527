"""Direct preference optimisation (DPO) with LoRA in a plain loop, which never has the logits in memory.

    python examples/dpo.py [--steps N] [--size small|1b] [--stock] [--resume] [--device cpu|cuda] [--out DIR]

For a function of Python's standard library, its own docstring is the chosen completion, and that of another function
is the rejected one. ``linear_log_prob`` computes the log-probability of each token from the last hidden states and the
head's weight, in chunks, and ``dpo_loss`` the loss from their sums. The reference is the same network with its adapters
disabled. ``--stock`` is the same in plain torch, with whole logits and an unpatched network.

Nothing is downloaded, so the example first trains a base network on the docstrings, also with ``linear_log_prob``.
Then the base is frozen, in bfloat16 for ``--size 1b``, and its adapters learn the preferences.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlayers.functional as FL
from fastlayers import load_model, patch_model, patch_report, save_model
from fine_tuning import (
    LENGTH,
    RANK,
    SIZE,
    SIZES,
    STOCK,
    STOP_AT,
    TEXTS,
    Documentation,
    Entry,
    StepTimes,
    adapt,
    build_llama,
    describe,
    needed,
    train_tokenizer,
    write_log,
)
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
    latest,
    seed_all,
    set_rate,
)

with needed("peft", "tokenizers", "transformers"):
    from peft import PeftModel
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PANELS = (
    Panel("loss, nats a pair", ("loss", "validation")),
    Panel("held-out pairs that are ranked right", ("accuracy",), percent=True),
    Panel("margin of the rewards of held-out pairs, nats", ("margin",)),
)
#: Pairs in a validation.
VALIDATED = 256
IGNORED = -100  # the target of a token that has no loss


# the losses, fused and in plain torch --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    linear_log_prob: Callable[[Tensor, Tensor, Tensor], Tensor]
    dpo_loss: Callable[..., Tensor]


def linear_log_prob(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_probs = F.linear(hidden, weight).float().log_softmax(-1)
    picked = log_probs.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return picked.where(target != IGNORED, 0)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float) -> Tensor:
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()


LOSSES = {"patched": Losses(FL.linear_log_prob, FL.dpo_loss), "stock": Losses(linear_log_prob, dpo_loss)}


# the text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Rows of a prompt and its completion, padded on the right. ``target`` has the next token of each, or IGNORED."""

    ids: Tensor
    mask: Tensor
    target: Tensor


class Text:
    """The entries as tokens."""

    def __init__(
        self, entries: list[Entry], tokenizer: PreTrainedTokenizerFast, length: int, device: torch.device
    ) -> None:
        prompts = tokenizer([entry.prompt for entry in entries])["input_ids"]
        completions = tokenizer([entry.completion + tokenizer.eos_token for entry in entries])["input_ids"]
        pairs = zip(prompts, completions, strict=True)
        # At least half of a row is for the completion.
        self.entries = [(prompt, completion) for prompt, completion in pairs if len(prompt) <= length // 2]
        if len(self.entries) < 2:
            raise click.UsageError(f"--length {length}: expected two prompts or more of at most {length // 2} tokens")
        self.length = length
        self.device = device

    def __len__(self) -> int:
        return len(self.entries)

    def batch(self, prompts: list[int], completions: list[int], learn_prompts: bool = False) -> Batch:
        """A row for each pair of entries: the prompt of one and the completion of the other."""
        rows = [
            (self.entries[first][0], self.entries[second][1])
            for first, second in zip(prompts, completions, strict=True)
        ]
        width = min(self.length, max(len(prompt) + len(completion) for prompt, completion in rows))
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        target = torch.full_like(ids, IGNORED)
        for row, (prompt, completion) in enumerate(rows):
            tokens = torch.tensor(prompt + completion)[:width]
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
            begin = 1 if learn_prompts else len(prompt)
            target[row, begin - 1 : len(tokens) - 1] = tokens[begin:]
        return Batch(*(tensor.to(self.device) for tensor in (ids, mask, target)))


# training ------------------------------------------------------------------------------------------------------------


def token_log_probs(model: LlamaForCausalLM, batch: Batch, losses: Losses) -> Tensor:
    """(rows, tokens): the log-probability of each next token, and 0 where the target is ignored."""
    hidden = model.model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).last_hidden_state
    return losses.linear_log_prob(hidden, model.lm_head.weight, batch.target)


class BaseTraining:
    """Trains a whole network on prompts and completions, in place of pretrained weights."""

    def __init__(self, model: LlamaForCausalLM, text: Text, losses: Losses, rows: int, rate: float, steps: int) -> None:
        self.model = model
        self.text = text
        self.losses = losses
        self.rows = rows
        self.rate, self.steps = rate, steps
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def step(self, index: int) -> dict[str, Tensor]:
        set_rate(self.optimizer, self.rate * cosine((index + 1) / self.steps, warmup=0.05))
        chosen = torch.randint(len(self.text), (self.rows,)).tolist()
        batch = self.text.batch(chosen, chosen, learn_prompts=True)
        with autocast(self.text.device):
            log_probs = token_log_probs(self.model, batch, self.losses)
        loss = -log_probs.sum() / (batch.target != IGNORED).sum()
        update(self.optimizer, loss, self.model)
        return {"loss": loss.detach()}


class Preferences:
    """Trains the adapters of a network on pairs of completions."""

    def __init__(
        self, model: PeftModel, train: Text, validation: Text, losses: Losses, pairs: int, beta: float, rate: float,
        steps: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.train, self.validation = train, validation
        self.losses = losses
        self.pairs, self.beta = pairs, beta
        self.rate, self.steps = rate, steps
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        #: What a checkpoint has: the adapters alone. Names in a ParameterDict have no dots.
        self.adapters = nn.ParameterDict({name.replace(".", "/"): weight for name, weight in trained.items()})
        self.optimizer = torch.optim.AdamW(trained.values(), weight_decay=0.0)
        self.times = StepTimes(train.device)

    def step(self, index: int) -> dict[str, Tensor]:
        set_rate(self.optimizer, self.rate * cosine((index + 1) / self.steps, warmup=0.05))
        self.times.begin()
        loss, _ = self.measure(self.train)
        update(self.optimizer, loss, self.model)
        self.times.end()
        return {"loss": loss.detach()}

    @torch.no_grad()
    def validate(self) -> dict[str, Tensor]:
        seed_all(0)  # the same pairs every time
        parts = [self.measure(self.validation) for _ in range(max(1, VALIDATED // self.pairs))]
        loss, margin = (torch.stack([part[index] for part in parts]) for index in (0, 1))
        return {"validation": loss.mean(), "accuracy": (margin > 0).float().mean(), "margin": margin.mean()}

    def measure(self, text: Text) -> tuple[Tensor, Tensor]:
        """The loss of random pairs, and for each pair the reward of the chosen completion less that of the other."""
        own = torch.randint(len(text), (self.pairs,))
        other = (own + torch.randint(1, len(text), (self.pairs,))) % len(text)
        batch = text.batch(own.repeat(2).tolist(), torch.cat((own, other)).tolist())
        log_probs = self.log_probs(batch).chunk(2)
        with torch.no_grad(), self.model.disable_adapter():
            reference = self.log_probs(batch).chunk(2)
        chosen, rejected = (
            self.beta * (policy - ref).detach() for policy, ref in zip(log_probs, reference, strict=True)
        )
        return self.losses.dpo_loss(*log_probs, *reference, beta=self.beta), chosen - rejected

    def log_probs(self, batch: Batch) -> Tensor:
        """The log-probability of each row's completion."""
        with autocast(batch.ids.device):
            return token_log_probs(self.model.get_base_model(), batch, self.losses).sum(1)


def update(optimizer: torch.optim.Optimizer, loss: Tensor, model: nn.Module) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_([weight for weight in model.parameters() if weight.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # last, so that the frozen base keeps no gradients


def autocast(device: torch.device) -> torch.autocast | nullcontext[None]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@click.command()
@click.option("--steps", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--base-steps", default=600, show_default=True, type=click.IntRange(min=1), help="Steps of the base.")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(min=1), help="Pairs of a step.")
@click.option("--beta", default=0.1, show_default=True, help="Weight of the divergence from the reference.")
@click.option("--learning-rate", type=float, help="[default: 1e-3, with --size 1b 1e-4]")
@click.option(
    "--validate-every", default=25, show_default=True, type=click.IntRange(min=1), help="Steps between validations."
)
@click.option(
    "--save-every", default=50, show_default=True, type=click.IntRange(min=1), help="Steps between checkpoints."
)
@SIZE
@RANK
@LENGTH
@TEXTS
@STOP_AT
@STOCK
@RESUME
@DEVICE
@OUT
def main(
    steps: int, base_steps: int, batch: int, beta: float, learning_rate: float | None, validate_every: int,
    save_every: int, size: str, rank: int, length: int, texts: int | None, stop_at: int | None, stock: bool,
    resume: bool, device: str | None, out: Path,
) -> None:  # fmt: skip
    """Teach a patched Llama to prefer a function's own docstring, by DPO with LoRA."""
    where = find_device(device)
    folder = out / "dpo"
    saved_base = folder / "base.safetensors"
    if resume and not saved_base.is_file():
        raise click.UsageError(f"--resume: there is no checkpoint {saved_base}")
    kind = "stock" if stock else "patched"
    losses, chosen = LOSSES[kind], SIZES[size]

    console.rule(f"1. A base network, on {where}", align="left")
    seed_all(0)
    text = Documentation.load(texts)
    tokenizer = train_tokenizer(text.train)
    train, validation = (Text(part, tokenizer, length, where) for part in (text.train, text.validation))
    base = build_llama(chosen, tokenizer, where)
    if resume:
        load_model(base, saved_base)
    else:
        training = BaseTraining(base, train, losses, 2 * batch, chosen.learning_rate, base_steps)
        fit("base", base_steps, training.step, report=10)
        folder.mkdir(parents=True, exist_ok=True)
        save_model(base, saved_base)

    console.rule("2. Adapters", align="left")
    seed_all(0)
    model = adapt(base.to(chosen.dtype), rank)  # type: ignore[arg-type]
    console.print(describe(model))
    if not stock:
        patch_model(model)
        console.print(patch_report(model))

    console.rule(f"3. Preferences for {len(train)} docstrings", align="left")
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    preferences = Preferences(
        model, train, validation, losses, batch, beta, learning_rate or chosen.learning_rate / 2, steps
    )

    def one_round(index: int) -> dict[str, Tensor]:
        measured = preferences.step(index)
        if (index + 1) % validate_every == 0 or index + 1 == steps:
            measured |= preferences.validate()
        return measured

    checkpoint = Checkpoint(folder / "checkpoint.safetensors", preferences.adapters, preferences.optimizer, save_every)
    history = fit("training", steps, one_round, report=10, stop_at=stop_at, checkpoint=checkpoint, resume=resume)
    model.save_pretrained(folder / "adapter")
    write_log(history, folder / "log.jsonl")
    draw_curves({kind: history}, PANELS, folder / "curves.png", "step")
    for name, value in latest(history).items():
        console.print(f"{name} {value:.6f} after {len(history)} steps")
    console.print(f"{kind}: {preferences.times}")
    console.print(f"base, checkpoint, adapter, log and curves in {folder}")


if __name__ == "__main__":
    main()
