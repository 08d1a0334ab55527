"""Language models of transformers: decoders, encoders, and encoders with a decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.networks.network import Batch, Network, Transformer, used

MASKED = 0.15  # share of the tokens that a masked language model is asked for, as BERT is trained


@dataclass(frozen=True)
class LanguageModel(Transformer):
    """A decoder or an encoder. Inference computes the logits of a prompt's last position, as ``generate`` does."""

    amp: bool = False
    host_size: int | None = 16
    auto: str = "AutoModelForCausalLM"

    decodes = True

    def example(self, device: torch.device) -> Batch:
        ids = self.ids(self.size, device)
        return {"input_ids": ids, "labels": ids}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["input_ids"], logits_to_keep=1).logits

    def decoder(self, model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
        prompt = batch["input_ids"][:1, : self.size // 4]
        found = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        cache, token = found.past_key_values, found.logits.argmax(-1)

        def step() -> Tensor:
            # All steps have one length: a new one takes 50 ms more, for which cuDNN's attention prepares itself. A
            # cache gets new tensors for what it is given, so a copy of its layers is enough.
            present = copy.copy(cache)
            present.layers = [copy.copy(layer) for layer in cache.layers]
            return model(input_ids=token, past_key_values=present, use_cache=True).logits

        return step


@dataclass(frozen=True)
class AdaptedLanguageModel(LanguageModel):
    """A decoder whose weights are frozen, with peft's LoRA on all of its linear layers but the head.

    Args:
        rank: columns of the adapters.
        four_bits: whether bitsandbytes keeps the weights of those layers in 4 bits (QLoRA).
        dropout: share of an adapter's input that is dropped.
        dora: whether the columns of the sum are scaled (DoRA).
    """

    rank: int = 16
    four_bits: bool = False
    dropout: float = 0.0
    dora: bool = False

    def build(self, device: torch.device) -> nn.Module:
        import peft

        model = super().build(device)
        if self.four_bits:
            quantise(model)
        adapter = peft.LoraConfig(
            task_type="CAUSAL_LM", r=self.rank, target_modules="all-linear", lora_dropout=self.dropout,
            use_dora=self.dora,
        )  # fmt: skip
        return used(peft.get_peft_model(model, adapter))


def quantise(model: nn.Module) -> None:
    """Replace the linear layers but the head by bitsandbytes' of 4 bits, as transformers does when it loads a model."""
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not nn.Linear or name == "lm_head":
                continue
            low = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=layer.weight.dtype, quant_type="nf4"
            )
            low.weight = bnb.nn.Params4bit(layer.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            setattr(parent, name, low.to(layer.weight.device))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


@dataclass(frozen=True)
class MaskedLanguageModel(Transformer):
    """An encoder. Inference computes the logits of all positions."""

    host_size: int | None = 16
    auto: str = "AutoModelForMaskedLM"

    def example(self, device: torch.device) -> Batch:
        ids = self.ids(self.size, device)
        chosen = torch.rand(ids.shape, device=device) < MASKED
        return {"input_ids": ids, "labels": ids.where(chosen, -100)}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["input_ids"]).logits


@dataclass(frozen=True)
class EncoderDecoder(Transformer):
    """An encoder of ``size`` tokens, and a decoder of ``target``."""

    host_size: int | None = 16
    auto: str = "AutoModelForSeq2SeqLM"
    target: int = 128

    def shape(self) -> str:
        return f"{self.batch}x({self.size} + {self.target})"

    def example(self, device: torch.device) -> Batch:
        return {"input_ids": self.ids(self.size, device), "labels": self.ids(min(self.target, self.size), device)}

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch["input_ids"], decoder_input_ids=batch["labels"]).logits


#: A tiny decoder with the names that most configurations use.
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

LLAMA = LanguageModel(
    "llama",
    "Llama 1.2B",
    "LlamaConfig",
    4,
    2048,
    {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    {**TINY, "num_key_value_heads": 2},
    gib=30,
)
GPT2 = LanguageModel(
    "gpt2",
    "GPT-2",
    "GPT2Config",
    16,
    1024,
    {"vocab_size": 50257},
    {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    gib=12,
)
BERT = MaskedLanguageModel(
    "bert",
    "BERT-base",
    "BertConfig",
    64,
    512,
    {"vocab_size": 30522},
    {**TINY, "max_position_embeddings": 32},
    gib=42,
    amp=False,
)

LLAMA_LORA = AdaptedLanguageModel(
    "llama_lora",
    "Llama 1.2B with LoRA",
    LLAMA.config,
    LLAMA.batch,
    LLAMA.size,
    LLAMA.options,
    LLAMA.tiny_options,
    gib=LLAMA.gib,
)
#: Not among those below: bitsandbytes makes a CUDA context where it is imported, which models.py cannot have.
LLAMA_QLORA = replace(LLAMA_LORA, name="llama_qlora", title="Llama 1.2B with QLoRA", four_bits=True)
#: Nor these, which differ little: fine_tuning.py has them.
LLAMA_LORA_DROPOUT = replace(LLAMA_LORA, name="llama_lora_dropout", title="Llama 1.2B with LoRA, dropout", dropout=0.05)
LLAMA_DORA = replace(LLAMA_LORA, name="llama_dora", title="Llama 1.2B with DoRA", dora=True)

LANGUAGE: tuple[Network, ...] = (
    LLAMA_LORA,
    LanguageModel(
        "pythia",
        "Pythia 1.4B, 12 of 24 layers (parallel residual)",
        "GPTNeoXConfig",
        4,
        2048,
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
        },
        TINY,
        gib=25,
    ),
    LanguageModel(
        "qwen3",
        "Qwen3 1.7B, 14 of 28 layers (QK-norm)",
        "Qwen3Config",
        2,
        2048,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 14,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        {**TINY, "num_key_value_heads": 2, "head_dim": 8},
        gib=25,
    ),
    LanguageModel(
        "gemma3",
        "Gemma 3 1B, 13 of 26 layers (sandwich norms)",
        "Gemma3TextConfig",
        2,
        2048,
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 13,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
        {**TINY, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8},
        gib=25,
    ),
    LanguageModel(
        "qwen3_moe",
        "Qwen3 30B-A3B, 3 of 48 layers (MoE)",
        "Qwen3MoeConfig",
        2,
        2048,
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        {
            **TINY,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        gib=35,
    ),
    MaskedLanguageModel(
        "modernbert",
        "ModernBERT-base",
        "ModernBertConfig",
        32,
        512,
        {"vocab_size": 50368},
        # Which tokens begin, end and pad is not among what is measured.
        {**TINY, "local_attention": 8} | dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id"), 0),
        gib=30,
    ),
    MaskedLanguageModel(
        "deberta",
        "DeBERTa-v3-base",
        "DebertaV2Config",
        16,
        512,
        {
            "vocab_size": 128100,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "max_relative_positions": -1,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
            "pos_att_type": ["p2c", "c2p"],
        },
        {**TINY, "position_buckets": 8, "max_position_embeddings": 32},
        gib=35,
    ),
    EncoderDecoder(
        "t5",
        "Flan-T5-base",
        "T5Config",
        32,
        512,
        {
            "vocab_size": 32128,
            "d_model": 768,
            "d_ff": 2048,
            "num_layers": 12,
            "num_heads": 12,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        gib=40,
    ),
    EncoderDecoder(
        "bart",
        "BART-base",
        "BartConfig",
        32,
        512,
        {
            "vocab_size": 50265,
            "d_model": 768,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
        },
        {
            "vocab_size": 97,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 32,
        },
        gib=20,
    ),
)
