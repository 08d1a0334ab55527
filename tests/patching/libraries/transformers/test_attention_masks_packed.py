"""Packed sequences in models of transformers: documents one after the other in a row, told apart by their positions."""

from __future__ import annotations

import copy

import pytest
import torch

from fastlayers.patching import patch_model
from fastlayers.patching.runtime.checks import rewritten_everywhere

transformers = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("ignore:a loss was computed without its logits")

VOCABULARY, LENGTH = 1031, 12
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MODELS = {
    "Llama": SMALL,
    "Mistral": {**SMALL, "sliding_window": 4},
    "Qwen3": SMALL,
    "GPTNeoX": {**SMALL, "rotary_pct": 0.5},
}
#: The lengths of the documents of each call. All rows are equally long, so that regions see one signature.
PACKED = [(12,)] * 3 + [(5, 7)] * 3 + [(3, 4, 5), (12,), (1, 11), (7, 5)]


def pair(family, attention):
    options = {**MODELS[family], "attn_implementation": attention}
    torch.manual_seed(0)
    stock = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options))
    stock = stock.to(torch.float64)
    return stock, patch_model(copy.deepcopy(stock))


def packed(lengths, seed=0):
    """As DataCollatorWithFlattening makes it: no token predicts the first one of the next document."""
    ids = torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def borders(lengths):
    """What kernels for packed sequences want to know, which SDPA ignores."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = {f"max_length_{name}": max(lengths) for name in "qk"}
    return {f"cu_seq_lens_{name}": ends for name in "qk"} | longest


def step(model, batch):
    model.zero_grad()
    out = model(**batch)
    if model.training:
        out.loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().float() for t in (out.loss, out.logits, *grads)]  # transformers has the loss in float32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MODELS)
def test_documents_in_a_row(family, attention):
    """The same as the stock model in every call, whatever lengths the calls before had."""
    stock, model = pair(family, attention)
    calls = [packed(lengths, i) for i, lengths in enumerate(PACKED)]
    calls += [packed(lengths, i) | borders(lengths) for i, lengths in enumerate(PACKED[3:])]
    rows = [packed((5, 7)), packed((3, 9), 1)]
    calls += [{name: torch.cat([row[name] for row in rows]) for name in rows[0]}] * 3
    for training in (True, False):
        stock.train(training)
        model.train(training)
        for i, batch in enumerate(calls):
            with rewritten_everywhere():
                ours = step(model, batch)
            torch.testing.assert_close(ours, step(stock, batch), msg=lambda text, i=i: f"call {i}: {text}")


@pytest.mark.parametrize("family", MODELS)
def test_a_document_does_not_see_the_others(family):
    _, model = pair(family, "sdpa")
    model.eval()
    with torch.no_grad(), rewritten_everywhere():
        for lengths in PACKED:
            batch = packed(lengths)
            together = model(**batch, use_cache=False).logits
            parts = batch["input_ids"].split(lengths, 1)
            alone = [model(input_ids=part, use_cache=False).logits for part in parts]
            torch.testing.assert_close(together.clone(), torch.cat(alone, 1), rtol=1e-10, atol=1e-10)


def test_a_compiled_model_keeps_documents_apart():
    stock, model = pair("Llama", "sdpa")
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), backend="aot_eager")
    stock.eval()
    with torch.no_grad(), rewritten_everywhere():
        for lengths in ((5, 7), (12,), (3, 9)):
            batch = packed(lengths)
            del batch["labels"]
            actual, expected = (call(**batch, use_cache=False).logits for call in (compiled, stock))
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_images_of_several_sizes():
    """Qwen2.5-VL's vision model has windows and images as packed sequences, by ``cu_seqlens``."""
    from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl

    config = configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32, patch_size=2, window_size=8,
        fullatt_block_indexes=[1], attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    stock = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config).to(torch.float64)
    model = patch_model(copy.deepcopy(stock))
    for sizes in [[(4, 8), (4, 4)]] * 3 + [[(4, 4), (4, 8)]] * 2 + [[(4, 4), (4, 4), (4, 4)], [(8, 6)]]:
        images = torch.tensor([(1, *size) for size in sizes])
        patches = torch.randn(int(images.prod(1).sum()), 24, dtype=torch.float64)
        found = []
        for each in (stock, model):
            each.zero_grad()
            with rewritten_everywhere():
                out = each(hidden_states=patches, grid_thw=images).last_hidden_state
                out.square().mean().backward()
            found.append([out.detach(), *(p.grad for p in each.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
