"""Supervised fine-tuning with LoRA: TRL's SFTTrainer and peft, on a patched Llama.

    python examples/lora_sft.py [--steps N] [--size small|1b] [--stock] [--resume] [--device cpu|cuda] [--out DIR]

The Llama learns to document functions: a prompt is the qualified name and the signature of a function of Python's
standard library, and the completion is its docstring. ``patch_model(model)`` after ``get_peft_model`` is the only line
that is added; it fuses the adapters as well.

Nothing is downloaded, so the network begins with random weights. A small network learns little if its random
embeddings stay frozen, so they are trained beside the adapters, and the head, too. The Llama of ``--size 1b``, in
bfloat16 and for a GPU, trains the adapters alone, as one does with pretrained weights.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from fastlayers import patch_model, patch_report
from fastlayers.tables import Table
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
from training import DEVICE, OUT, RESUME, History, Panel, console, draw_curves, find_device, latest, seed_all

with needed("accelerate", "datasets", "peft", "tokenizers", "transformers", "trl"):
    import datasets
    from peft import PeftModel
    from transformers import (
        PreTrainedTokenizerFast,
        PrinterCallback,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.utils.logging import disable_progress_bar
    from trl import SFTConfig, SFTTrainer

    from hf_trainer import RichProgress

PANELS = (
    Panel("loss, nats a token", ("loss", "validation loss")),
    Panel("tokens predicted", ("accuracy", "validation accuracy"), percent=True),
)


class Steps(TrainerCallback):
    """Times the steps, and stops after one of them."""

    def __init__(self, times: StepTimes, stop_at: int | None) -> None:
        self.times = times
        self.stop_at = stop_at

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.times.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.times.end()
        if state.global_step == self.stop_at:
            control.should_save = control.should_training_stop = True


def dataset(entries: list[Entry]) -> datasets.Dataset:
    """In TRL's format: the loss is that of the completions."""
    return datasets.Dataset.from_list([vars(entry) for entry in entries])


def history_of(log: list[dict[str, float]]) -> History:
    """The measures of each step in the Trainer's log, which has validations in entries of their own."""
    history: History = []
    for entry in log:
        if "loss" in entry:
            history.append({"loss": entry["loss"], "accuracy": entry["mean_token_accuracy"]})
        elif "eval_loss" in entry:
            history[-1]["validation loss"] = entry["eval_loss"]
            history[-1]["validation accuracy"] = entry["eval_mean_token_accuracy"]
    return history


def answers(model: PeftModel, tokenizer: PreTrainedTokenizerFast, entries: list[Entry], length: int) -> Table:
    """What the model writes for functions that it has not seen."""
    rows = []
    model.eval()
    for entry in entries:
        prompt = tokenizer(entry.prompt, return_tensors="pt").to(model.device)
        tokens = model.generate(**prompt, max_new_tokens=length, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        written = str(tokenizer.decode(tokens, skip_special_tokens=True))
        rows.append([shorten(text, 90) for text in (entry.prompt, written, entry.completion)])
    return Table(("function", "the model's docstring", "its own"), rows)


@click.command()
@click.option("--steps", default=300, show_default=True, type=click.IntRange(min=1))
@click.option("--batch", default=16, show_default=True, type=click.IntRange(min=1), help="Docstrings of a step.")
@click.option("--learning-rate", type=float, help="[default: 2e-3, with --size 1b 2e-4]")
@click.option(
    "--validate-every", default=50, show_default=True, type=click.IntRange(min=1), help="Steps between validations."
)
@click.option(
    "--save-every", default=100, show_default=True, type=click.IntRange(min=1), help="Steps between checkpoints."
)
@click.option("--sample", default=40, show_default=True, type=click.IntRange(min=0), help="Tokens to write at the end.")
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
    steps: int, batch: int, learning_rate: float | None, validate_every: int, save_every: int, sample: int, size: str,
    rank: int, length: int, texts: int | None, stop_at: int | None, stock: bool, resume: bool, device: str | None,
    out: Path,
) -> None:  # fmt: skip
    """Fine-tune a patched Llama on docstrings with TRL's SFTTrainer and LoRA."""
    where = find_device(device)
    folder, kind = out / "lora_sft", "stock" if stock else "patched"
    if resume and not any(folder.glob("checkpoint-*")):
        raise click.UsageError(f"--resume: there is no checkpoint in {folder}")
    disable_progress_bar()  # one for each file that is written
    datasets.disable_progress_bars()

    console.rule(f"1. The network, on {where}", align="left")
    seed_all(0)
    text, chosen = Documentation.load(texts), SIZES[size]
    tokenizer = train_tokenizer(text.train)
    trained = ["embed_tokens", "lm_head"] if size == "small" else None
    base = build_llama(chosen, tokenizer, where)
    model = adapt(base.to(chosen.dtype), rank, trained)  # type: ignore[arg-type]
    console.print(describe(model))
    if not stock:
        patch_model(model)  # the one line
        console.print(patch_report(model))

    console.rule(f"2. Training on {len(text.train)} docstrings", align="left")
    arguments = SFTConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch, max_length=length,
        learning_rate=learning_rate or chosen.learning_rate, warmup_steps=10, lr_scheduler_type="cosine",
        logging_steps=1, save_steps=save_every, save_total_limit=2, eval_strategy="steps", eval_steps=validate_every,
        per_device_eval_batch_size=batch, seed=0, use_cpu=where.type == "cpu", bf16=where.type == "cuda",
        gradient_checkpointing=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    times = StepTimes(where)
    trainer = SFTTrainer(
        model, arguments, train_dataset=dataset(text.train), eval_dataset=dataset(text.validation),
        processing_class=tokenizer, callbacks=[RichProgress("training"), Steps(times, stop_at)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "adapter"))
    history = history_of(trainer.state.log_history)
    write_log(history, folder / "log.jsonl")
    draw_curves({kind: history}, PANELS, folder / "curves.png", "step")
    for name, value in latest(history).items():
        console.print(f"{name} {value:.6f} after {len(history)} steps")
    console.print(f"{kind}: {times}")
    console.print(f"checkpoints, adapter, log and curves in {folder}")

    if sample:
        console.rule("3. What it writes", align="left")
        spread = text.validation[:: len(text.validation) // 3]
        console.print(answers(model, tokenizer, spread[:3], sample))


if __name__ == "__main__":
    main()
