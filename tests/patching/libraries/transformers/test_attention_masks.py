"""The attention masks of transformers' models under torch.compile: there in eager mode, or not there at all."""

from __future__ import annotations

import ast
import copy
import pickle
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastlayers.patching import patch_model, plan_patch, unpatch_model
from fastlayers.patching.libraries.transformers import attention_masks as masks
from tests.patching.libraries.losses import SMALL, VOCABULARY, twins

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.masking_utils")
if masks.loaded_library() is None:
    pytest.skip("transformers has no such masks", allow_module_level=True)

LENGTH = 9
GPT = {
    **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    **{"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
}
BART = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32},
    **{"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
HUBERT = {
    **SMALL,
    **{"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
MODELS = {
    "Llama": SMALL,
    "Mistral": {**SMALL, "sliding_window": None},  # which function it calls depends on that
    "Qwen3": SMALL,  # it calls them with **mask_kwargs
    "GPT2": GPT,
    "Bert": SMALL,  # it calls them in another method
    "Bart": BART,
    "Hubert": HUBERT,  # it calls them in a child, which is nothing of transformers' base class
}
COUNTS = {"Llama": 1, "Mistral": 1, "Qwen3": 1, "GPT2": 2, "Bert": 3, "Bart": 3, "Hubert": 1}


def base_model(family="Llama", **options):
    config = getattr(transformers, f"{family}Config")(**{**MODELS[family], "attn_implementation": "sdpa", **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}Model")(config).eval()


def batch(family="Llama"):
    torch.manual_seed(1)
    if family == "Hubert":
        return {"input_values": torch.randn(2, 200)}
    return {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH))}


def compiled(model, found, fullgraph=True, **options):
    """A compiled model that notes of each attention in its graphs whether it has a mask."""

    def backend(module, inputs):
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
                given = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
                found.append(given is not None)
        return module

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=fullgraph, **options)


def assert_masks(model, twin, masked, **inputs):
    """The compiled model computes what its unpatched twin does in eager mode, with or without masks."""
    found, breaks = [], model.config.model_type == "bart"  # in some versions of transformers, unpatched too
    with torch.no_grad():
        output, expected = compiled(model, found, not breaks)(**inputs)[0], twin(**inputs)[0]
    torch.testing.assert_close(output, expected)
    assert set(found) == {masked}, inputs.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_models_compiled(family):
    model = base_model(family)
    twin = copy.deepcopy(model)
    assert plan_patch(model).counts()["attention_mask"] == COUNTS[family]
    patch_model(model)
    given = batch(family)
    assert_masks(model, twin, False, **given)
    if family in ("Llama", "Mistral", "Qwen3", "GPT2"):  # a mask that every transformers makes otherwise
        assert_masks(model, twin, False, use_cache=False, **given)
        assert_masks(model.train(), twin, False, use_cache=False, inputs_embeds=torch.randn(2, LENGTH, 32))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["padding", "no padding", "packed", "counted"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "GPT2"])
def test_what_needs_a_mask_has_it(family, given):
    model, twin = twins(base_model(family, use_cache=False))
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, :3] = given == "no padding"
    packed = torch.arange(LENGTH) % 4
    options = {
        "packed": {"position_ids": packed.expand(2, -1)},
        "counted": {"position_ids": torch.arange(LENGTH)[None]},  # which nobody may look at
    }
    assert_masks(model, twin, True, **options.get(given, {"attention_mask": padding}), **batch())


def test_bert_with_padding():
    model = base_model("Bert")
    twin = copy.deepcopy(model)
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, 5:] = 0
    assert_masks(patch_model(model), twin, True, attention_mask=padding, **batch())


def test_a_cache():
    """Empty, it is as if there were none; filled, whatever transformers does."""
    model, twin = twins(base_model())
    found, ids = [], batch()["input_ids"]
    run = compiled(model, found)
    with torch.no_grad():
        outputs, wanted = (m(input_ids=ids[:, :5]) for m in (run, twin))
        assert found == [False]
        for part in (ids[:, 5:8], ids[:, 8:]):
            outputs = run(input_ids=part, past_key_values=outputs.past_key_values)
            wanted = twin(input_ids=part, past_key_values=wanted.past_key_values)
            torch.testing.assert_close(outputs[0], wanted[0])
    assert found[1]


def test_lengths_of_all_kinds():
    model = base_model(use_cache=False)
    twin, found = copy.deepcopy(model), []
    run = compiled(patch_model(model), found, dynamic=True)
    with torch.no_grad():
        for length in (9, 5, 1, 17):
            ids = torch.randint(3, VOCABULARY, (2, length))
            torch.testing.assert_close(run(ids)[0], twin(ids)[0])
    assert not any(found)


def test_a_head_and_its_loss():
    config = transformers.LlamaConfig(**SMALL, attn_implementation="sdpa", use_cache=False)
    model = transformers.LlamaForCausalLM(config).train()
    twin, found = copy.deepcopy(model), []
    patch_model(model)
    run, ids = compiled(model, found), batch()["input_ids"]
    loss, expected = (m(input_ids=ids, labels=ids).loss for m in (run, twin))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert found == [False]


def test_attention_both_ways():
    """A configuration that says so makes a decoder bidirectional, whatever the positions are."""
    model = base_model(use_cache=False)
    model.config.is_causal = False
    for layer in model.layers:
        layer.self_attn.is_causal = False
    twin = copy.deepcopy(model)
    patch_model(model)
    assert_masks(model, twin, False, **batch())
    padding = torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, :2] = 0
    assert_masks(model, twin, True, attention_mask=padding, **batch())


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_graph_has_the_mask(strict):
    model = patch_model(base_model(use_cache=False))
    graph = torch.export.export(model, (), batch(), strict=strict).graph
    attentions = [node for node in graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    assert attentions
    assert all(len(node.args) > 3 and node.args[3] is not None for node in attentions)


# -- what eager mode does ---------------------------------------------------------------------------------------------


def caches(config):
    """Caches by what they are."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    seen = DynamicCache(config=config)
    seen.update(torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16), 0)
    return {
        "none": None,
        "empty": DynamicCache(),
        "of the layers": DynamicCache(config=config),
        "of both": EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)),
        "seen": seen,
        "static": StaticCache(config=config, max_cache_len=16),
    }


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("kind", ["create_causal_mask", "create_bidirectional_mask"])
def test_eager_mode_makes_no_mask_that_is_left_out(kind, length, is_causal):
    """transformers is asked itself, with all that our condition looks at."""
    library = masks.loaded_library()
    config = base_model().config
    config.is_causal = is_causal
    create, counted = getattr(library, kind), torch.arange(length)[None]
    skip = "allow_is_causal_skip" if kind == "create_causal_mask" else "allow_is_bidirectional_skip"
    cases = [
        {"attention_mask": padding, "past_key_values": cache, **positions, **options}
        for padding in (None, torch.ones(2, length, dtype=torch.long))
        for cache in caches(config).values()
        for positions in ({}, {"position_ids": None}, {"position_ids": counted}, {"position_ids": counted.clone()})
        for options in ({}, {skip: True}, {skip: False}, {"or_mask_function": lambda b, h, q, kv: q == kv})
    ]
    left_out = 0
    for case in cases:
        given = {"config": config, "inputs_embeds": torch.randn(2, length, 32), **case}
        if masks.is_needless(library, create, counted, **given):
            left_out += 1
            assert create(**given) is None, case
    assert left_out
    for name in ("eager", "flash_attention_2", "flex_attention"):
        config._attn_implementation = name
        given = {"config": config, "inputs_embeds": torch.randn(2, length, 32), "attention_mask": None}
        assert not masks.is_needless(library, create, counted, **given)


class Looks(TorchDispatchMode):
    """Counts how often somebody looks at the value of a tensor, for which a GPU would have to be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "GPT2"])
def test_eager_mode_does_not_look_at_positions_that_the_model_counted(family):
    model = base_model(family, use_cache=False)
    twin, packed = copy.deepcopy(model), torch.arange(LENGTH) % 4
    patch_model(model)
    with Looks() as stock:
        expected = twin(**batch())[0]
    with Looks() as looks:
        output = model(**batch())[0]
    torch.testing.assert_close(output, expected)
    assert (stock.count, looks.count) == (1, 0)
    for given in ({"position_ids": packed.expand(2, -1)}, {"position_ids": torch.arange(LENGTH)[None]}):
        with Looks() as looks:
            output = model(**batch(), **given)[0]
        torch.testing.assert_close(output, twin(**batch(), **given)[0])
        assert looks.count == 1


def test_a_traced_model_has_its_mask():
    """The trace is for other lengths, too, and for positions that are given to it."""
    config, asked = base_model().config, []

    def trace(inputs):
        asked.append(masks.attention_mask(library, create, None, config=config, inputs_embeds=inputs))
        return inputs + 1

    def create(**given):
        return "a mask"

    library = masks.loaded_library()._replace(create_causal_mask=create)
    given = torch.randn(2, 6, 32)
    trace(given)
    assert asked.pop() is None
    torch.jit.trace(trace, given, check_trace=False)
    torch.func.vmap(trace)(given[None])
    with FakeTensorMode() as mode:
        trace(mode.from_tensor(given))
    trace(torch.fx.Proxy(torch.fx.Graph().placeholder("x")))
    assert asked == ["a mask"] * 4


def test_another_function_of_the_library_is_called():
    """That of a sliding window, one that somebody put there, and one with arguments that are not known."""
    library, config = masks.loaded_library(), base_model().config
    given = {"config": config, "inputs_embeds": torch.randn(2, 6, 32), "attention_mask": None}
    assert masks.is_needless(library, library.create_causal_mask, None, **given)
    assert not masks.is_needless(library, lambda **kwargs: None, None, **given)
    assert not masks.is_needless(library, library.create_causal_mask, None, **given, input_embeds=None)
    assert masks.attention_mask(library, lambda *args, **kwargs: (args, kwargs), None, 1, a=2) == ((1,), {"a": 2})


def own_mask():
    mask = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[..., 0] = True
    return lambda *args, **kwargs: mask


def test_a_mask_function_that_was_registered(monkeypatch):
    from transformers import AttentionMaskInterface

    model, twin = twins(base_model(use_cache=False))
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", own_mask())
    assert_masks(model, twin, True, **batch())


def test_a_function_that_was_replaced_in_the_module(monkeypatch):
    from transformers.models.llama import modeling_llama

    model, twin = twins(base_model(use_cache=False))
    monkeypatch.setattr(modeling_llama, "create_causal_mask", own_mask())
    assert_masks(model, twin, True, **batch())


# -- reading a method -------------------------------------------------------------------------------------------------


def counts(source):
    tree = ast.parse(textwrap.dedent(source)).body[0]
    return masks.counts_positions(tree)


def test_positions_that_are_counted_up():
    def forward(statement, parameter="position_ids=None", past="past.get_seq_length() if past is not None else 0"):
        lines = (f"def forward(self, x, past=None, {parameter}):", f"    n = {past}", "    if position_ids is None:")
        return "\n".join([*lines, *(f"        {line}" for line in statement.split("; ")), "    return position_ids"])

    for good in (
        "position_ids = torch.arange(x.shape[1], device=x.device)[None, :]",
        "position_ids = torch.arange(n, n + x.shape[1], device=x.device).unsqueeze(0)",
        "position_ids = torch.arange(x.shape[1]) + n; position_ids = position_ids.unsqueeze(0).expand(2, -1)",
        "position_ids = (torch.arange(x.shape[1]) + 2).unsqueeze(0).repeat(x.shape[0], 1)",
    ):
        assert counts(forward(good)), good
        assert not counts(forward(good, "other=None")), good
        assert not counts(forward(good) + " if x is None else (lambda position_ids: 1)"), good
        assert not counts(forward(good) + "\n    position_ids[0] = 0"), good
        assert not counts(forward(good) + "\n    position_ids.zero_()"), good
        assert not counts(forward(good) + "\n    position_ids = position_ids % 4"), good
    assert not counts(forward("position_ids = torch.arange(x.shape[1]) + n", past="x.cumsum(-1)"))
    for bad in (
        "position_ids = torch.arange(0, 8, 2)",
        "position_ids = torch.arange(x.shape[1]) % 4",
        "position_ids = torch.arange(x.shape[1]) * n",
        "position_ids = torch.arange(x.shape[1]).repeat(1, 2)",
        "position_ids = x.cumsum(-1)",
        "position_ids = self.position_ids[:, :n]",
        "other = position_ids = torch.arange(x.shape[1])",
        "position_ids = torch.arange(x.shape[1]); position_ids[0] = 3",
    ):
        assert not counts(forward(bad)), bad


# -- what is changed and what is not ----------------------------------------------------------------------------------


def test_only_the_class_of_this_model_changes():
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    model, other = base_model(use_cache=False), base_model(use_cache=False)
    before, names = type(model), dict(vars(modeling_llama))
    functions = dict(vars(masking_utils))
    patch_model(model)
    assert type(model) is not before
    assert type(model).__name__ == before.__name__
    assert type(other) is before
    assert dict(vars(modeling_llama)) == names
    assert dict(vars(masking_utils)) == functions
    for each in (copy.deepcopy(model), model):
        assert type(each) is type(model)
        assert_masks(each, other, False, **batch())
    assert type(pickle.loads(pickle.dumps(model))) is before
    unpatch_model(model)
    assert type(model) is before
    torch.testing.assert_close(model(**batch())[0], other(**batch())[0])


def test_only_models_with_such_attention_are_patched():
    assert "attention_mask" not in plan_patch(base_model(attn_implementation="eager")).counts()


def test_a_forward_of_a_user():
    class Mine(transformers.LlamaModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)[0] * 2

    model = Mine(base_model().config).eval()
    twin = copy.deepcopy(model)
    assert "attention_mask" not in plan_patch(model).counts()
    with torch.no_grad():
        torch.testing.assert_close(patch_model(model)(**batch()), twin(**batch()))


def test_the_root_and_a_child_of_a_model():
    model = patch_model(transformers.LlamaForCausalLM(base_model(use_cache=False).config).eval())
    assert type(model.model).__fastlayers_name__ == "FusedLlamaModel"
    assert type(patch_model(base_model())).__fastlayers_name__ == "FusedLlamaModel"
    assert_masks(model, unpatch_model(copy.deepcopy(model)), False, **batch())


def test_a_hook_still_runs():
    model = base_model(use_cache=False)
    twin, seen = copy.deepcopy(model), []
    patch_model(model)
    model.register_forward_hook(lambda module, args, output: seen.append(output[0].shape))
    for each in (model, twin):
        outputs = each(**batch(), output_hidden_states=True, return_dict=False)
        assert len(outputs) == 2
    assert seen == [(2, LENGTH, 32)]
