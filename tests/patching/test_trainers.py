"""Trainers of other packages on a patched model: the losses of the stock one, by the fused forward."""

from __future__ import annotations

import copy

import pytest
import torch

import fastlayers
from fastlayers.patching.rewrite.classes import working
from fastlayers.patching.runtime.checks import rewritten_everywhere

pytestmark = pytest.mark.cpu_kernels

WORDS = 96
STEPS = 3


def tokenizer(transformers):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(WORDS - 2))])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<eos>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def llama(transformers):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def text(seed: int, least: int = 3, most: int = 9) -> str:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(least, most, (1,), generator=generator))
    return " ".join(f"w{int(i)}" for i in torch.randint(WORDS - 2, (count,), generator=generator))


ROWS = {
    "SFT": [{"prompt": text(i), "completion": " " + text(i + 50)} for i in range(8)],
    "DPO": [{"prompt": text(i), "chosen": " " + text(i + 50), "rejected": " " + text(i + 90)} for i in range(8)],
    "KTO": [{"prompt": text(i), "completion": " " + text(i + 50), "label": i % 3 > 0} for i in range(8)],
    "GRPO": [{"prompt": text(i)} for i in range(8)],
}
ROWS["ORPO"] = ROWS["CPO"] = ROWS["DPO"]


def options_of(name: str) -> dict:
    return {"max_completion_length": 6, "num_generations": 2} if name == "GRPO" else {}


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def trained(name: str, model, where) -> list[float]:
    """The losses of some steps."""
    transformers, trl, datasets = (pytest.importorskip(package) for package in ("transformers", "trl", "datasets"))
    if name in ("ORPO", "CPO"):
        module = pytest.importorskip(f"trl.experimental.{name.lower()}")
    else:
        module = trl
    arguments = getattr(module, f"{name}Config")(
        output_dir=str(where), per_device_train_batch_size=2, max_steps=STEPS, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, learning_rate=1e-2, seed=0,
        gradient_checkpointing=False, **options_of(name),
    )  # fmt: skip
    rest = {"reward_funcs": length} if name == "GRPO" else {}
    if name in ("DPO", "KTO") and not hasattr(model, "peft_config"):
        rest["ref_model"] = copy.deepcopy(model)
    rows = datasets.Dataset.from_list(ROWS[name])
    trainer = getattr(module, f"{name}Trainer")(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer(transformers), **rest
    )
    torch.manual_seed(1)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "ORPO", "CPO", "GRPO"])
@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
def test_trl(name, adapted, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trl")
    stock = llama(transformers)
    if adapted:
        peft = pytest.importorskip("peft")
        torch.manual_seed(3)
        stock = peft.get_peft_model(stock, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
    patched = fastlayers.patch_model(copy.deepcopy(stock))
    fused = working(patched)
    assert fused
    with rewritten_everywhere():
        found = trained(name, patched, tmp_path)
    expected = trained(name, stock, tmp_path)
    assert len(found) == STEPS
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert working(patched) == fused
