"""fastlayers in the Trainer of transformers: one line, ``patch_model(model)``, before the Trainer gets the model.

    python examples/hf_trainer.py [--steps N] [--stock] [--resume] [--device cpu|cuda] [--out DIR]

A small Llama learns the source text of Python's standard library, byte by byte. The Trainer's checkpoints are
safetensors with the names of the stock network, so a patched run and a stock run can resume each other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from fastlayers import patch_model, patch_report
from stdlib_text import SourceText
from training import DEVICE, OUT, RESUME, Panel, console, draw_curves, find_device


class Passages(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The text as rows of equal length."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].long()
        return {"input_ids": row, "labels": row}


class RichProgress(TrainerCallback):
    """The progress bar of the other examples, in place of the Trainer's."""

    def __init__(self, title: str) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, TextColumn("{task.fields[state]}"), console=console)
        self.bar = self.progress.add_task(title, total=None, state="")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.start()
        self.progress.update(self.bar, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.update(self.bar, completed=state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **what: Any) -> None:
        if "loss" in what["logs"]:
            self.progress.update(self.bar, state=f"loss {float(what['logs']['loss']):.3f}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.stop()


@click.command()
@click.option("--steps", default=100, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--save-every", default=50, show_default=True, type=click.IntRange(min=1), help="Steps between checkpoints."
)
@click.option("--stock", is_flag=True, help="Leave the network unpatched.")
@RESUME
@DEVICE
@OUT
def main(steps: int, save_every: int, stock: bool, resume: bool, device: str | None, out: Path) -> None:
    """Train a patched Llama with the Trainer of transformers."""
    where = find_device(device)
    disable_progress_bar()  # one for each file that is written
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    if not stock:
        patch_model(model)  # the one line
        console.print(patch_report(model).summary())

    folder = out / "hf_trainer"
    if resume and not any(folder.glob("checkpoint-*")):
        raise click.UsageError(f"--resume: there is no checkpoint in {folder}")
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=16, learning_rate=2e-3, warmup_steps=10,
        lr_scheduler_type="cosine", logging_steps=1, save_steps=save_every, save_total_limit=2, seed=0,
        use_cpu=where.type == "cpu", bf16=where.type == "cuda", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = Passages(SourceText.load().train, 129)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[RichProgress("training")])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    history = [{"loss": float(entry["loss"])} for entry in trainer.state.log_history if "loss" in entry]
    draw_curves(
        {"stock" if stock else "patched": history}, (Panel("training loss", ("loss",)),), folder / "curve.png", "step"
    )
    console.print(
        f"loss {history[-1]['loss']:.6f} after {trainer.state.global_step} steps; checkpoints and curve in {folder}"
    )


if __name__ == "__main__":
    main()
