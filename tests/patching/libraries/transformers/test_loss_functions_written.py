"""Losses that forwards of transformers write, and logits that are asked for after a loss without them."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import nn

from fastlayers.patching import patch_model, patch_report, plan_patch, unpatch_model, verify_patch
from tests.patching.libraries.losses import SMALL, assert_same_step, batch, causal_model, hook, is_lazy, twins

# -- transformers: losses that a forward writes ----------------------------------------------------------------------


ENCODER = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
MASKED = {"Bert": 2, "Roberta": 2, "ModernBert": 2, "DebertaV2": 2, "Electra": 1, "Albert": 1}


def encoder(name, suffix="ForMaskedLM", **options):
    transformers = pytest.importorskip("transformers")
    config = ENCODER | options | ({"cls_token_id": 1, "sep_token_id": 2} if name == "ModernBert" else {})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{suffix}")(getattr(transformers, f"{name}Config")(**config)).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKED)
def test_masked_language_models(name, dtype, chunked):
    model = encoder(name).to(dtype)
    fused = dict(plan_patch(model)[""].fused)
    assert fused == dict([("cross_entropy", 1), ("linear_cross_entropy", 1)][: MASKED[name]])
    twin = copy.deepcopy(model)
    patch_model(model)
    output = model(**batch())
    assert is_lazy(output.logits) == bool(chunked) == (MASKED[name] == 2)
    assert output.loss.dtype == twin(**batch()).loss.dtype
    for training in (True, False):
        report = verify_patch(model.train(training), **batch())
        assert report, report


def test_a_head_of_several_layers(chunked):
    """Its other layers run once, with their hooks; a hook on itself, or on the last one, wants the logits."""
    model = encoder("Bert")
    patch_model(model)
    twin = copy.deepcopy(model)
    unpatch_model(twin)
    seen = []
    model.cls.predictions.transform.register_forward_hook(lambda module, args, output: seen.append(module))
    assert is_lazy(assert_same_step(model, twin).logits)
    assert len(seen) == 1
    for path in ("cls", "cls.predictions", "cls.predictions.decoder"):
        handles = [each.get_submodule(path).register_forward_hook(hook) for each in (model, twin)]
        assert not is_lazy(assert_same_step(model, twin).logits)
        [handle.remove() for handle in handles]
    assert is_lazy(assert_same_step(model, twin).logits)


def test_a_flag_that_chooses_the_head(chunked):
    """As it was when the model was patched; of two models of one class each has its own."""
    model = patch_model(encoder("DebertaV2"))
    twin = unpatch_model(copy.deepcopy(model))
    assert is_lazy(assert_same_step(model, twin).logits)
    other = encoder("DebertaV2", legacy=False)
    assert dict(plan_patch(other)[""].fused) == {"cross_entropy": 1}
    assert_same_step(patch_model(other), unpatch_model(copy.deepcopy(other)))
    for each in (model, twin):
        each.legacy = False
        each.lm_predictions = copy.deepcopy(twin.cls)
        each.lm_predictions.forward = MethodType(lambda cls, x, embeddings: cls(x) * 2, each.cls)
    assert not is_lazy(assert_same_step(model, twin).logits)


@pytest.mark.parametrize("path", ["cls", "cls.predictions.decoder"])
def test_an_excluded_part_of_a_head(path):
    model = patch_model(encoder("Bert"), exclude=path)
    assert dict(patch_report(model)[""].fused) == {"cross_entropy": 1}
    assert not is_lazy(model(**batch()).logits)


def test_a_few_classes_keep_their_logits():
    model = encoder("Bert", "ForTokenClassification")
    twin = copy.deepcopy(model)
    row = plan_patch(model)[""]
    assert dict(row.fused) == {"cross_entropy": 1}
    assert not row.left
    labels = batch()["labels"] % 2
    assert not is_lazy(assert_same_step(patch_model(model), twin, labels=labels).logits)


def test_compiled_masked_language_model(chunked):
    model = encoder("Bert")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    twin = copy.deepcopy(model)
    patch_model(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch())
    assert compiled.logits is None
    torch.testing.assert_close(compiled.loss, twin(**batch()).loss)
    torch.compiler.reset()


def test_a_loss_that_somebody_replaced_is_called(monkeypatch):
    model = patch_model(encoder("Bert"))
    from transformers.models.bert import modeling_bert

    monkeypatch.setattr(modeling_bert, "CrossEntropyLoss", lambda: lambda scores, labels: scores.sum() * 0)
    output = model(**batch())
    assert output.loss == 0
    assert not is_lazy(output.logits)


def refusals(body):
    """What find_pair says of a forward."""
    import ast
    import textwrap

    from fastlayers.patching.libraries.transformers.loss_functions import find_pair
    from fastlayers.patching.reasons import Refusal

    source = "def forward(self, x, labels=None, **kwargs):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    try:
        return find_pair(ast.parse(source).body[0])
    except Refusal as refusal:
        return refusal.reason.name


PAIR = """
hidden = self.model(x)
logits = self.lm_head(hidden)
{}
loss = None
if labels is not None:
    {}
    loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
{}
return Output(loss=loss, logits=logits)
"""
MOVED = "labels = labels.to(logits.device)"
CAP = """
if self.cap:
    logits = logits / self.cap
    logits = torch.tanh(logits)
    logits = logits * self.cap
"""


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("hidden.mul_(2)", MOVED, "pass"),  # what the loss would be computed from
        ("logits = logits.softmax(-1)", MOVED, "pass"),
        ("logits = logits * x", MOVED, "pass"),
        ("logits[..., 0] = 0", MOVED, "pass"),
        ("self.last = logits", MOVED, "pass"),
        ("labels = None", MOVED, "pass"),
        ("logits = torch.tanh(logits / 3.0) * 3.0", MOVED, "pass"),
        ("x = 1", "self.model(x)", "pass"),
        ("x = 1", MOVED, "accuracy = logits.argmax(-1)"),
        ("x = 1", MOVED, "return logits"),
        ("x = 1", MOVED, "del logits"),
    ],
)
def test_forwards_that_are_not_rewritten(before, inside, after):
    assert refusals(PAIR.format(before, inside, after)) == "LOGITS_USED"


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("logits = logits.float()", MOVED, "y = loss"),
        ("logits *= self.scale", MOVED, "if not return_dict:\n    return (logits,)"),
        (CAP, MOVED, "y = loss"),
    ],
)
def test_forwards_that_are_rewritten(before, inside, after):
    assert refusals(PAIR.format(before, inside, after)).head == "lm_head"


# -- what was not computed yet -----------------------------------------------------------------------------------------


def gradients_after(model, use, **options):
    """The gradients of a step in which something is done with the logits between the loss and its backward."""
    model.zero_grad()
    output = model(**batch(), **options)
    found = use(output)
    if output.loss.grad_fn is not None and found is None:
        output.loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [*grads, *(found or []), *([output.logits.grad] if output.logits.retains_grad else [])]


def hooked(output, *hooks):
    return [output.logits.register_hook(hook) for hook in hooks]


ASKS = {
    "a hook": lambda output: hooked(output, lambda dy: dy * 0.1) and None,
    "two hooks": lambda output: hooked(output, lambda dy: dy * 0.5, lambda dy: dy + 0.01) and None,
    "a hook that is removed": lambda output: hooked(output, lambda dy: dy * 0.1)[0].remove(),
    "torch.autograd.grad": lambda output: torch.autograd.grad(output.loss, output.logits, retain_graph=True),
    "grad with others": lambda output: torch.autograd.grad(
        output.loss, [output.logits, output.hidden_states[-1]], retain_graph=True
    ),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
@pytest.mark.filterwarnings("ignore:a loss was computed")
def test_the_loss_depends_on_its_logits(family, ask):
    ours, stock = twins(causal_model(family).double())
    found, expected = (gradients_after(m, ASKS[ask], output_hidden_states=True) for m in (ours, stock))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_gradient_of_the_logits_is_kept(family):
    stock = causal_model(family).double()
    ours, found = patch_model(copy.deepcopy(stock)), []
    for model in (stock, ours):
        output = model(**batch())
        output.logits.retain_grad()
        logits = output.logits
        output.loss.backward()
        found.append([logits.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


WRITES = {
    "data": lambda model: model.lm_head.weight.data.mul_(0.5),
    "one row": lambda model: model.lm_head.weight.data[3].add_(1),
    "data of the hidden states": None,
    "another tensor as data": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "in place": lambda model: torch.no_grad()(model.lm_head.weight.mul_)(0.5),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
@pytest.mark.filterwarnings("ignore:a loss was computed")
def test_logits_after_a_write(write, mode):
    """They are those of the forward, or an error says how to have them."""
    ours, stock = twins(causal_model().train(mode == "train"))
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    found = []
    for model in (stock, ours):
        with context():
            output = model(**batch(), output_hidden_states=True)
            logits = output.logits
            if WRITES[write] is not None:
                WRITES[write](model)
            else:
                output.hidden_states[-1].data.div_(2)
            if model is ours and mode in ("train", "eval"):
                with pytest.raises(RuntimeError, match="exclude='lm_head'"):
                    logits + 0
            else:  # A loop that evaluates reads them.
                found.append(logits.float() + 0)
    torch.testing.assert_close(found[-1], found[0])


def test_logits_that_are_given_other_data():
    logits = patch_model(causal_model())(**batch()).logits
    with pytest.raises(RuntimeError, match=r"have no data to replace.*exclude='lm_head'"):
        logits.data = torch.zeros(1)
