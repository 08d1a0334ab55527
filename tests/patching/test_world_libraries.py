"""What accelerate, transformers and PEFT do to models, before patching and after."""

from __future__ import annotations

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from fastlayers.patching import (
    PatchWarning,
    Reason,
    fold_batch_norm,
    patch_model,
    patch_report,
    patched,
    unfold_batch_norm,
    unpatch_model,
    verify_patch,
)
from tests.harness import assert_no_worse
from tests.patching.world import MLP, cells, images, mlp, rows, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


# -- accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks():
    return pytest.importorskip("accelerate.hooks")


def every(function, model):
    for module in list(model.modules()):
        function(module)


def test_accelerate_hooks_after_patching(hooks):
    model, stock = patch_model(mlp()), mlp()
    every(lambda module: hooks.add_hook_to_module(module, hooks.ModelHook()), model)
    same(model, stock, rows())
    same(copy.deepcopy(model), stock, rows())
    hooks.remove_hook_from_module(model, recurse=True)
    same(model, stock, rows())
    assert torch.equal(unpatch_model(model)(rows()), stock(rows()))


def test_accelerate_hooks_are_still_there_after_undoing(hooks):
    model, stock, seen = patch_model(mlp()), mlp(), []

    class Count(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    every(lambda module: hooks.add_hook_to_module(module, Count()), model)
    unpatch_model(model)
    assert torch.equal(model(rows()), stock(rows()))
    assert len(seen) == len(list(model.modules()))
    model[0].act = stock[0].act = nn.ReLU()  # the fused forward would hand this on to the original one
    assert torch.equal(model(rows()), stock(rows()))
    hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(rows()), stock(rows()))


def test_a_forward_that_removed_hooks_left_behind_is_patched(hooks):
    """Removing accelerate's hook puts the module's own forward on the instance."""
    model, stock = mlp(), mlp()
    every(lambda module: hooks.add_hook_to_module(module, hooks.ModelHook()), model)
    with pytest.warns(PatchWarning):
        patch_model(model)
    assert {row.reason for row in patch_report(model).rows} == {Reason.FORWARD_REPLACED}
    hooks.remove_hook_from_module(model, recurse=True)
    assert "forward" in vars(model[0])
    patch_model(model)
    assert patch_report(model)["0.norm"].became == "FusedLayerNorm"
    assert model[0].norm.forward.__func__ is type(model[0].norm).forward
    same(model, stock, rows())
    assert torch.equal(unpatch_model(model)(rows()), stock(rows()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_offloads_weights(when):
    accelerate = pytest.importorskip("accelerate")
    model, stock = mlp(), mlp()
    if when == "after":
        patch_model(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    if when == "before":
        with pytest.warns(PatchWarning, match="forward was replaced"):
            patch_model(model)
    with torch.no_grad():
        torch.testing.assert_close(model(rows()), stock(rows()))


def test_patching_between_two_dispatches_of_accelerate(hooks):
    accelerate = pytest.importorskip("accelerate")
    model, stock, places = mlp(), mlp(), {"0": "cpu", "1": "cpu"}
    accelerate.dispatch_model(model, places, force_hooks=True)
    hooks.remove_hook_from_submodules(model)
    patch_model(model)
    assert {"0", "0.norm", "1.act"} <= {row.fqn for row in patch_report(model).patched}
    accelerate.dispatch_model(model, places, force_hooks=True)
    assert "_hf_hook" in vars(model[0])
    same(model, stock, rows())


def test_a_pickle_of_a_model_without_its_hooks(hooks, tmp_path):
    model = patch_model(mlp())
    every(lambda module: hooks.add_hook_to_module(module, hooks.ModelHook()), model)
    hooks.remove_hook_from_module(model, recurse=True)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert repr(loaded) == repr(mlp())
    assert torch.equal(loaded(rows()), mlp()(rows()))


def test_a_wrapped_forward_keeps_a_module_patched(hooks):
    """As Accelerator.prepare wraps it for mixed precision, or ``model.forward = torch.compile(model.forward)``."""
    model, stock = patch_model(mlp()), mlp()
    inner = model[0].forward

    def forward(*args):
        return inner(*args)

    forward.__wrapped__ = inner
    model[0].forward = forward
    with pytest.warns(PatchWarning, match=r"class of 0 was .*or a wrapper was put around its forward"):
        unpatch_model(model)
    assert [row.fqn for row in patch_report(model).patched] == ["0"]
    same(model, stock, rows())
    del model[0].forward
    assert torch.equal(unpatch_model(model)(rows()), stock(rows()))


def test_verify_looks_through_accelerate_hooks(hooks):
    model = patch_model(mlp())
    every(lambda module: hooks.add_hook_to_module(module, hooks.ModelHook()), model)
    model[0].act = nn.ReLU()
    assert verify_patch(model, rows())


# -- transformers and PEFT --------------------------------------------------------------------------------------------


def llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **options)).train()


def tokens():
    return torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(0))


def language_step(model):
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_step(model, stock):
    torch.testing.assert_close(language_step(model), language_step(stock))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing_of_transformers(reentrant, when):
    model, stock = llama(), llama()
    if when == "after":
        patch_model(model)
    for either in (model, stock):
        either.gradient_checkpointing_enable({"use_reentrant": reentrant})
        either.enable_input_require_grads()
    if when == "before":
        patch_model(model)
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: calls.append(1))
    same_step(model, stock)
    assert len(calls) == 2  # once more in the backward
    for either in (model, stock):
        either.gradient_checkpointing_disable()
    same_step(model, stock)


def test_initialisation_of_transformers():
    model, stock = patch_model(llama()), llama()
    for either in (model, stock):
        torch.manual_seed(3)
        either.apply(either._init_weights)
        either.post_init()
    assert all(map(torch.equal, model.state_dict().values(), stock.state_dict().values()))


def test_methods_of_transformers():
    model, stock = patch_model(llama(attn_implementation="eager")), llama(attn_implementation="eager")
    ask = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        a, b = model(tokens(), **ask), stock(tokens(), **ask)
    torch.testing.assert_close((a.hidden_states, a.attentions), (b.hidden_states, b.attentions))
    for either in (model, stock):
        torch.manual_seed(3)
        either.resize_token_embeddings(72, mean_resizing=False)
        either.tie_weights()
        either.set_attn_implementation("sdpa")
    same_step(model, stock)
    prompt = {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens()), "pad_token_id": 0}
    generated = [e.eval().generate(**prompt, max_new_tokens=4, do_sample=False) for e in (model, stock)]
    assert torch.equal(*generated)
    program = torch.export.export(model, (tokens(),), {"use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(tokens(), use_cache=False).logits, stock(tokens()).logits)


def lora(peft, **options):
    return peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"]} | options)


ADAPTERS = {
    "LoRA": lora,
    "DoRA of all": partial(lora, target_modules="all-linear", use_dora=True),
    "LoRA of the head": partial(lora, target_modules=["q_proj", "lm_head"]),
    "modules to save": partial(lora, modules_to_save=["lm_head", "norm"]),
    "IA3": lambda peft: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms": lambda peft: peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "prompt": lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_of_peft(name, when):
    peft = pytest.importorskip("peft")
    model, stock = llama(), llama()
    if when == "after":
        patch_model(model)
    adapted = []
    for either in (model, stock):
        torch.manual_seed(5)
        either = peft.get_peft_model(either, ADAPTERS[name](peft))
        for key, p in either.named_parameters():
            if "lora_B" in key:  # zero at first, which would hide what the adapter does
                nn.init.normal_(p)
        adapted.append(either.train())
    model, stock = adapted
    if when == "before":
        patch_model(model)
    assert list(model.state_dict()) == list(stock.state_dict())
    same_step(model, stock)
    with model.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, stock(tokens()).logits)
    if name == "prompt":
        return
    model, stock = (either.merge_and_unload().requires_grad_() for either in (model, stock))
    same_step(model, stock)
    types = [type(module) for module in stock.modules()]
    assert [type(module) for module in unpatch_model(model).modules()] == types
    same_step(model, stock)


def scale(model, **values):
    for module in model.modules():
        if isinstance(vars(module).get("scaling"), dict):
            module.scaling.update(values)


def drop(model, p):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p


#: What a user changes of adapters between two steps.
ADAPTER_CHANGES = {
    "another adapter": lambda model: model.set_adapter("other"),
    "two adapters": lambda model: model.base_model.set_adapter(["default", "other"]),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "scaling": lambda model: scale(model, default=9.0),
    "dropout": lambda model: drop(model, 0.0),
    "deleted": lambda model: (model.set_adapter("other"), model.delete_adapter("default")),
    "in evaluation": lambda model: model.eval(),
    "not trained": lambda model: [p.requires_grad_(False) for n, p in model.named_parameters() if "lora_A" in n],
}


@pytest.mark.parametrize("what", ADAPTER_CHANGES)
def test_changes_of_adapters_are_honoured(what, ran):
    """A layer of peft asks which adapters are active, and whether they are merged, in every forward."""
    peft = pytest.importorskip("peft")

    models = []
    for _ in range(2):
        torch.manual_seed(5)
        model = peft.get_peft_model(llama(), lora(peft, lora_dropout=0.5, target_modules=["q_proj", "down_proj"]))
        model.add_adapter("other", lora(peft, r=4, target_modules=["q_proj", "down_proj"]))
        for key, p in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(p)
            p.requires_grad_(p.requires_grad or "norm" in key)
        models.append(model.train())
    stock, model = models
    patch_model(model)

    def gradients(model):
        torch.manual_seed(7)
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    for change in (lambda model: None, ADAPTER_CHANGES[what]):
        for either in models:
            change(either)
        for _ in range(4):
            assert_no_worse(gradients(model), gradients, stock)
    assert ran


def test_patching_adds_no_memory():
    model = llama(tie_word_embeddings=True)

    def storages():
        tensors = itertools.chain(model.parameters(), model.buffers())
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    before, attributes = storages(), [set(vars(module)) for module in model.modules()]
    patch_model(model)
    assert storages() == before
    assert [set(vars(module)) for module in model.modules()] == attributes


# -- undoing ----------------------------------------------------------------------------------------------------------


def test_with_a_wrapped_forward_the_context_warns():
    model = mlp()
    with pytest.warns(PatchWarning, match="class of 0 was changed again"), patched(model):
        model[0].forward = torch.compile(model[0].forward, backend="eager")
    assert type(model[1]) is MLP


def test_folding_with_hooks_of_accelerate(hooks):
    model, stock = fold_batch_norm(cells()), cells()
    every(lambda module: hooks.add_hook_to_module(module, hooks.ModelHook()), model)
    with torch.no_grad():
        assert_no_worse(model(images()), lambda stock: stock(images()), stock)
        assert torch.equal(unfold_batch_norm(model)(images()), stock(images()))
