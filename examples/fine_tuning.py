"""Shared by the examples that fine-tune a language model: the text, a tokenizer, a Llama with LoRA, logs and times.

The packages that only these examples need are imported where they are used, so that ``needed`` can name all that are
missing.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import statistics
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from torch import nn

from stdlib_text import source_files
from training import History, synchronize

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# options -------------------------------------------------------------------------------------------------------------

SIZE = click.option(
    "--size", type=click.Choice(["small", "1b"]), default="small", show_default=True, help="1b: a Llama for a GPU."
)
RANK = click.option("--rank", default=16, show_default=True, type=click.IntRange(min=1), help="Rank of the adapters.")
LENGTH = click.option(
    "--length", default=128, show_default=True, type=click.IntRange(min=32), help="Tokens of a text; the rest is cut."
)
TEXTS = click.option("--texts", type=click.IntRange(min=100), help="Docstrings to use.  [default: all]")
STOCK = click.option("--stock", is_flag=True, help="Leave the network unpatched.")
STOP_AT = click.option("--stop-at", type=click.IntRange(min=1), help="Stop after this step; --resume continues.")


# packages ------------------------------------------------------------------------------------------------------------


@contextmanager
def needed(*packages: str) -> Iterator[None]:
    """For the imports of an example: exits with the names of all packages that are missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"this example needs {', '.join(packages)}; not installed: {', '.join(missing)}. "
            f"To install: pip install {' '.join(missing)}"
        )
    yield


# the text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A function or class of the standard library: its qualified name with the signature, and its docstring."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Documentation:
    """Entries with different docstrings. A twentieth of them is for validation."""

    train: list[Entry]
    validation: list[Entry]

    @classmethod
    def load(cls, count: int | None = None) -> Documentation:
        """The first ``count`` entries of the library, or all."""
        entries = list(islice(distinct(documented_entries()), count))
        return cls([entry for index, entry in enumerate(entries) if index % 20], entries[::20])


def distinct(entries: Iterable[Entry]) -> Iterator[Entry]:
    seen = set()
    for entry in entries:
        if entry.completion not in seen:
            seen.add(entry.completion)
            yield entry


def documented_entries() -> Iterator[Entry]:
    """All public functions and classes with a docstring, in the order of the files."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in source_files():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in old string literals
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # templates and other encodings
            continue
        yield from entries_in(tree, module)


def entries_in(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Entry]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name, docstring = f"{prefix}.{node.name}", ast.get_docstring(node)
        inside = ", ".join(map(ast.unparse, node.bases)) if isinstance(node, ast.ClassDef) else ast.unparse(node.args)
        if docstring:
            yield Entry(f"{name}({inside})\n", docstring)
        if isinstance(node, ast.ClassDef):
            yield from entries_in(node, name)


def train_tokenizer(entries: list[Entry], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Byte pairs of the text, so that no character is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<pad>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    pairs.train_from_iterator((entry.prompt + entry.completion for entry in entries), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token="<pad>", eos_token="<eos>")


# the network ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """A Llama, the type of its frozen weights, and a learning rate."""

    config: dict[str, Any]
    dtype: torch.dtype
    learning_rate: float


SIZES = {
    "small": Size(
        {
            "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        torch.float32,
        2e-3,
    ),
    # The Llama of 1.2 billion weights in benchmarks/networks/language.py. The tokenizer uses a part of its vocabulary.
    "1b": Size(
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        },
        torch.bfloat16,
        2e-4,
    ),
}  # fmt: skip


def build_llama(size: Size, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> LlamaForCausalLM:
    """A Llama with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with device:
        return LlamaForCausalLM(LlamaConfig(**size.config, **tokens))


def adapt(model: nn.Module, rank: int, trained: list[str] | None = None) -> PeftModel:
    """Freeze the network, with LoRA on all linear layers but the head. The layers in ``trained`` are trained whole."""
    from peft import LoraConfig, get_peft_model

    # peft and TRL use the old name of an option of transformers.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear", modules_to_save=trained
        ),
    )  # fmt: skip


def describe(model: nn.Module) -> str:
    """How many weights the model has, and how many of them are trained."""
    trained, total = (
        sum(weight.numel() for weight in model.parameters() if weight.requires_grad >= least) for least in (True, False)
    )
    return f"{total / 1e6:.1f} M weights, {trained / 1e6:.2f} M of them trained"


# what a run leaves ---------------------------------------------------------------------------------------------------


class StepTimes:
    """The times of this run's training steps."""

    #: The first steps tune kernels and fill caches.
    WARM_UP = 3

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.begun = 0.0

    def begin(self) -> None:
        synchronize(self.device)
        self.begun = time.perf_counter()

    def end(self) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.begun)

    def __str__(self) -> str:
        if not self.seconds:
            return "no step was left to do"
        steady = self.seconds[self.WARM_UP :] or self.seconds
        text = f"a step takes {statistics.median(steady) * 1e3:.1f} ms, the median of {len(steady)}"
        if self.device.type == "cuda":
            text += f"; peak memory {torch.cuda.max_memory_allocated(self.device) / 2**30:.2f} GiB"
        return text


def write_log(history: History, path: Path) -> None:
    """A line of JSON for each step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step} | record) + "\n" for step, record in enumerate(history, 1)))
