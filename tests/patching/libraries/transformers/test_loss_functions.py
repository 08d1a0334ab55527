"""The losses of transformers' language models, which their forwards look up: without the logits in memory."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlayers
from fastlayers.ops import head
from fastlayers.patching import patch_model, patch_report, plan_patch, unpatch_model, verify_patch
from fastlayers.patching.libraries.transformers import deferred_logits
from fastlayers.patching.reasons import PatchWarning
from fastlayers.patching.regions.results import Taken, put_together, take_apart
from tests.harness import assert_no_worse, needs_gpu
from tests.patching.libraries.losses import (
    CAUSAL,
    VOCABULARY,
    assert_same_step,
    batch,
    causal_model,
    hook,
    is_lazy,
    twins,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models(family, dtype, chunked):
    model = causal_model(family).to(dtype)
    assert dict(plan_patch(model)[""].fused) == {"linear_cross_entropy": 1, "cross_entropy": 1}
    twin = copy.deepcopy(model)
    patch_model(model)
    if dtype is torch.float32:
        assert is_lazy(assert_same_step(model, twin).logits)
    else:
        assert model(**batch()).loss.dtype is torch.float32
    assert chunked
    for training in (True, False):
        report = verify_patch(model.train(training), **batch())
        assert report, report


def test_softcap_and_scale_are_honoured(chunked):
    """With the config's numbers changed after patching: they are read on every call."""
    for family, options in (("Gemma2", {"final_logit_softcapping": 0.05}), ("Granite", {"logits_scaling": 50.0})):
        model, twin = twins(causal_model(family))
        before = model(**batch()).loss
        for name, value in options.items():
            setattr(model.config, name, value)
            setattr(twin.config, name, value)
        assert abs(assert_same_step(model, twin).loss - before) > 1e-2
    model, twin = twins(causal_model("Gemma2", final_logit_softcapping=None))
    assert_same_step(model, twin)


def test_a_scale_that_is_no_number_computes_the_logits():
    model = causal_model("Cohere")
    model.logit_scale = torch.tensor(0.5)
    twin = copy.deepcopy(model)
    assert not is_lazy(assert_same_step(patch_model(model), twin).logits)


def test_when_the_logits_are_computed_with_the_loss(monkeypatch):
    model = patch_model(causal_model())
    given, ids = batch(), {"input_ids": batch()["input_ids"]}
    assert is_lazy(model(**given).logits)
    assert not is_lazy(model(**ids).logits)
    with torch.no_grad():  # A weight average may be swapped out by the time that they are used.
        assert not is_lazy(model(**given).logits)
        assert not is_lazy(model(**ids).logits)
        with monkeypatch.context() as patch:
            patch.setattr(deferred_logits, "MOST_ON_A_CPU", 0)
            assert is_lazy(model(**given).logits)
    assert is_lazy(model.eval()(**given).logits)
    with torch.inference_mode():
        torch.testing.assert_close(model(**given).logits.float(), model(**ids).logits)
    assert not is_lazy(patch_model(unpatch_model(model), exclude="lm_head")(**given).logits)


def test_few_logits_are_computed_with_the_loss(monkeypatch):
    """Their loss is not chunked, and would compute them anyway."""
    monkeypatch.setattr(deferred_logits, "is_large", head.is_large)
    model, twin = twins(causal_model())
    assert type(assert_same_step(model, twin).logits) is torch.Tensor


USES = {
    "argmax": lambda logits: logits.argmax(-1),
    "index": lambda logits: logits[..., :-1, :].float().log_softmax(-1),
    "cast": lambda logits: logits.float().double(),
    "numpy": lambda logits: torch.from_numpy(logits.detach().cpu().float().numpy().copy()),
    "list": lambda logits: torch.tensor(logits.detach().tolist()),
    "cat": lambda logits: torch.cat([logits, logits]),
    "in place": lambda logits: logits.clone().div_(2) + logits.detach().clone().mul_(3),
    "detach": lambda logits: logits.detach().exp(),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "copy": lambda logits: copy.deepcopy(logits.detach()),
    "rows": lambda logits: torch.stack([*logits]),
    "compare": lambda logits: logits.detach() == logits.detach().max(),
}


@pytest.mark.filterwarnings("ignore:a loss was computed")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
def test_logits_that_are_used_after_the_loss(family, training, chunked):
    model, twin = twins(causal_model(family).train(training))
    for name, use in USES.items():
        logits, expected = model(**batch()).logits, twin(**batch()).logits
        assert (logits.shape, logits.dtype, logits.device) == (expected.shape, expected.dtype, expected.device)
        assert (logits.requires_grad, len(logits)) == (expected.requires_grad, len(expected))
        assert chunked
        found, wanted = use(logits), use(expected)
        assert type(found) is torch.Tensor or name == "cast"
        torch.testing.assert_close(found, wanted, msg=lambda m, n=name: f"{n}: {m}")
    assert repr(model(**batch()).logits) == repr(model(**batch()).logits.clone()).replace("Clone", "View")


@pytest.mark.filterwarnings("ignore:a loss was computed")
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_gradients_of_logits_that_are_used_after_the_loss(family):
    """Also of a function of torch.autograd, which gets them as they are, and of a penalty on the gradient."""

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return ctx.saved_tensors[0] * dy * 2

    # Gemma2 of transformers before 5.24 takes attention of torch, whose backward on a CPU has no derivative.
    model, twin = twins(causal_model(family, attn_implementation="eager"))
    losses = [
        lambda output: output.logits.float().logsumexp(-1).pow(2).mean(),
        lambda output: output.loss + Squares.apply(output.logits).mean(),
        lambda output: output.loss + F.cross_entropy(output.logits.view(-1, VOCABULARY), batch()["labels"].view(-1)),
    ]

    def gradients(model, loss):
        return torch.autograd.grad(loss(model(**batch())), list(model.parameters()), allow_unused=True)

    def twice(model):
        logits, weight = model(**batch()).logits, model.get_output_embeddings().weight
        (first,) = torch.autograd.grad(logits.tanh().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), weight)

    for loss in losses:
        assert_no_worse(gradients(model, loss), gradients, twin, loss)
    assert_no_worse(twice(model), twice, twin)


def test_logits_under_autocast_are_those_of_the_forward():
    model, twin = twins(causal_model())
    with torch.autocast("cpu", torch.bfloat16):
        inside, expected = model(**batch()), twin(**batch())
        with pytest.warns(PatchWarning, match="used; if most steps use them, patch_model.model, exclude='lm_head'."):
            torch.testing.assert_close(inside.logits.exp(), expected.logits.exp())
        outside = model(**batch())
    torch.testing.assert_close(outside.logits, expected.logits, msg=str)
    assert outside.logits.dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore:a loss was computed")
def test_logits_that_are_used_later_in_a_result_that_is_taken_apart():
    """As graph_model does: what they are computed from is one of the tensors of the result."""
    model = patch_model(causal_model())
    output, expected = model(**batch()), model(input_ids=batch()["input_ids"])
    tensors = Taken()
    parts = take_apart(output, tensors)
    assert [tuple(t.shape) for t in tensors][:2] == [(), (2, 9, 32)]  # then keys and values
    again = put_together(parts, [t.detach().clone().requires_grad_() for t in tensors])
    torch.testing.assert_close(again.logits, expected.logits, msg=str)
    assert again.logits.requires_grad


@needs_gpu
@pytest.mark.filterwarnings("ignore:a loss was computed")
@pytest.mark.parametrize("training", [True, False])
def test_logits_that_are_used_after_a_graph(training):
    stock = causal_model().cuda().train(training)
    model = fastlayers.graph_model(patch_model(copy.deepcopy(stock)))
    ids = [{name: t.cuda() for name, t in batch(seed).items()} for seed in range(8)]
    kept = []
    for given in ids:
        output, expected = model(**given), stock(**given)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.logits.exp(), expected.logits.exp(), rtol=1e-4, atol=1e-5)
        kept.append((output.logits, expected.logits.detach()))
        if training:
            output.loss.backward()
    for logits, expected in kept[-2:]:  # Another replay does not change them.
        torch.testing.assert_close(logits.detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def own_precision(monkeypatch):
    """What a trainer asks of accelerate holds for the whole process, and so for the tests after it."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    state._reset_state()


@pytest.mark.usefixtures("own_precision")
@pytest.mark.parametrize("reads", [True, False])
def test_the_trainer_of_transformers(reads, tmp_path, chunked):
    """Accuracy in training and in evaluation, and bf16, for which accelerate casts every output to float32."""
    transformers = pytest.importorskip("transformers")
    accuracies = []

    class Trainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if reads:
                right = outputs.logits[:, :-1].argmax(-1) == inputs["labels"][:, 1:]
                accuracies[-1].append(right.float().mean().item())
            else:
                assert is_lazy(outputs.logits) == (model is patched and model.training)
            return (loss, outputs) if return_outputs else loss

    def compute_metrics(prediction):
        return {"accuracy": (prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean()}

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(-1)

    stock = causal_model()
    patched, found = patch_model(copy.deepcopy(stock)), []
    rows = [{name: t[0] for name, t in batch(seed=i).items()} for i in range(4)]
    for model in (stock, patched):
        options = {"max_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": not reads, "seed": 0}
        given = transformers.TrainingArguments(str(tmp_path), learning_rate=1e-3, save_strategy="no", **options)
        metrics = {"compute_metrics": compute_metrics, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        trainer = Trainer(model, given, train_dataset=rows, eval_dataset=rows, **(metrics if reads else {}))
        accuracies.append([])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if reads else "error", PatchWarning)  # Nobody else looks at the logits.
            trainer.train()
            found.append(trainer.evaluate())
    assert chunked
    assert accuracies[0] == accuracies[1]
    assert found[0].get("eval_accuracy") == found[1].get("eval_accuracy")
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-2 if not reads else 1e-5)


def test_logits_that_cannot_be_computed_any_more():
    model = patch_model(causal_model())
    output, cast = model(**batch()), model(**batch()).logits.double()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    for logits in (output.logits, cast):
        with pytest.raises(RuntimeError, match=r"changed since the forward. Use them before the optimizer's step; "):
            logits.argmax(-1)
    logits = model(**batch()).logits
    with pytest.warns(PatchWarning):
        before = logits.detach().clone()
    cast = logits.double()
    logits.detach().zero_()
    assert not torch.equal(before, logits)
    with pytest.raises(RuntimeError, match="has changed"):
        cast.exp()
    with pytest.raises(RuntimeError, match="changes the shape"):
        logits.detach().unsqueeze_(0)


@pytest.mark.parametrize("family", ["Llama", "Bloom"])
def test_a_tuple_keeps_the_logits(family):
    """None would be missing from it, and everything after it would move."""
    model, twin = twins(causal_model(family))
    outputs, expected = (m(**batch(), return_dict=False)[:2] for m in (model, twin))
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": torch.tensor(7)},
        {"num_items_in_batch": 7},
        {"ignore_index": 5, "labels": torch.arange(18).view(2, 9) % 7},
        {"shift_labels": torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))},
    ],
)
def test_options_of_the_loss(options, chunked):
    model, twin = twins(causal_model())
    assert is_lazy(assert_same_step(model, twin, **options).logits)
    inputs = {**batch(), **options}
    torch.testing.assert_close(model.eval()(**inputs).loss, twin.eval()(**inputs).loss)


def test_bias_and_tied_weights(chunked):
    for options in ({"tie_word_embeddings": True}, {}):
        model = causal_model("Phi", **options)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == bool(options)
        twin = copy.deepcopy(model)
        assert_same_step(patch_model(model), twin)
    assert model.lm_head.bias is not None
    assert model.lm_head.bias.grad.abs().max() > 0


def test_autocast(chunked):
    model, twin = twins(causal_model())
    with torch.autocast("cpu", torch.bfloat16):
        report = verify_patch(model, **batch())
        assert report, report
        loss = model(**batch()).loss
        assert loss.dtype is torch.float32
        assert_no_worse(loss, lambda model: model(**batch()).loss, twin)
    assert chunked


def test_mixed_dtypes_stay_an_error():
    model = causal_model()
    model.lm_head.to(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="dtype"):
            model(**batch())
        patch_model(model)


def test_errors_of_labels_stay(chunked):
    model = patch_model(causal_model())
    with pytest.raises(IndexError, match="out of bounds"):
        model(**{**batch(), "labels": torch.full((2, 9), VOCABULARY)})
    with pytest.raises(ValueError, match=r"batch_size|shape"):
        model(**{**batch(), "labels": torch.zeros(2, 4, dtype=torch.long)})


def test_another_vocab_size_is_what_it_was():
    """transformers regroups the logits then."""
    model = causal_model()
    model.config.vocab_size = VOCABULARY * 2
    model.vocab_size = VOCABULARY * 2
    twin = copy.deepcopy(model)
    patch_model(model)
    labels = torch.randint(0, VOCABULARY, (1, 9))
    for each in (twin, model):
        with pytest.raises((ValueError, RuntimeError)):
            each(input_ids=batch()["input_ids"][:1], labels=labels)


def test_a_head_with_a_hook_is_left_alone():
    model = causal_model()
    model.lm_head.register_forward_hook(hook)
    twin = copy.deepcopy(model)
    row = plan_patch(model)[""]
    assert dict(row.fused) == {"cross_entropy": 1}
    assert row.left[0][0].name == "HOOKED_CHILD"
    assert not is_lazy(assert_same_step(patch_model(model), twin).logits)


def test_a_hook_that_comes_later_runs():
    model, twin = twins(causal_model())
    for each in (model, twin):
        each.lm_head.register_forward_hook(hook)
    assert not is_lazy(assert_same_step(model, twin).logits)


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_head_of_another_class_is_left_alone():
    model = causal_model()
    model.lm_head.__class__ = Adapted
    row = plan_patch(model)[""]
    assert dict(row.fused) == {"cross_entropy": 1}
    assert row.left[0][0].name == "UNKNOWN_HEAD"
    twin = copy.deepcopy(model)
    assert not is_lazy(assert_same_step(patch_model(model), twin).logits)
    model = patch_model(causal_model())
    twin = causal_model()
    for each in (model, twin):  # after patching
        each.lm_head.__class__ = Adapted
    assert not is_lazy(assert_same_step(model, twin).logits)


def test_an_excluded_head_keeps_the_logits():
    model = patch_model(causal_model(), exclude="lm_head")
    assert dict(patch_report(model)[""].fused) == {"cross_entropy": 1}
    assert not is_lazy(model(**batch()).logits)


def test_a_loss_function_that_was_set():
    def loss_function(logits, labels, vocab_size, **kwargs):
        return logits.square().mean()

    before, after = causal_model(), causal_model()
    before.loss_function = loss_function
    row = plan_patch(before)[""]
    assert row.became is None
    assert row.reason.name == "UNKNOWN_LOSS"
    assert "loss_function" in row.detail
    twin = copy.deepcopy(before)
    patch_model(after)
    after.loss_function = loss_function
    assert not is_lazy(assert_same_step(after, twin).logits)


def second_next_token_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    logits = logits.float()
    labels = nn.functional.pad(labels[..., 2:], (0, 2), value=ignore_index)
    logits = logits.view(-1, vocab_size)
    return fixed_cross_entropy(logits, labels.view(-1).to(logits.device), num_items_in_batch, ignore_index)  # noqa: F821


def penalised_loss(logits, labels, vocab_size, **kwargs):
    penalty = logits.square().mean()
    logits = logits.float()
    logits = logits.view(-1, vocab_size)
    return fixed_cross_entropy(logits, labels.view(-1)) + penalty  # noqa: F821


@pytest.mark.parametrize(("function", "deferred"), [(second_next_token_loss, True), (penalised_loss, False)])
def test_a_loss_of_tokens_that_the_library_does_not_have(function, deferred, monkeypatch, chunked):
    """It is compiled again; the logits may be deferred if it only passes them to the cross-entropy."""
    model = causal_model()
    from transformers.loss import loss_utils

    monkeypatch.setitem(globals(), "fixed_cross_entropy", loss_utils.fixed_cross_entropy)
    model.loss_function = function
    twin = copy.deepcopy(model)
    patch_model(model)
    assert is_lazy(assert_same_step(model, twin).logits) == deferred
    assert bool(chunked) == deferred
    assert verify_patch(model, **batch())


def test_a_changed_fixed_cross_entropy_is_called(monkeypatch):
    model = patch_model(causal_model())
    from transformers.loss import loss_utils

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda source, target, *args, **kwargs: source.sum() * 0)
    output = model(**batch())
    assert output.loss == 0
    assert not is_lazy(output.logits)


def classifier(name, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config.update({"image_size": 8, "patch_size": 4, **options})
    return getattr(transformers, name)(config).train()


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_labels": 5}, torch.tensor([1, 4, -100])),
        ({"num_labels": 1}, torch.randn(3)),
        ({"num_labels": 5}, torch.rand(3, 5)),
    ],
)
def test_classifiers(options, labels):
    model, images = classifier("ViTForImageClassification", **options), torch.randn(3, 3, 8, 8)
    assert dict(plan_patch(model)[""].fused) == {"cross_entropy": 1}
    twin = copy.deepcopy(model)
    for training in (True, False):
        assert verify_patch(patch_model(model).train(training), images, labels=labels)
    assert model.config.problem_type == (twin(images, labels=labels), twin.config.problem_type)[1]
    output, expected = model.train()(images, labels=labels), twin.train()(images, labels=labels)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)


def test_the_loss_of_a_classifier_goes_through_the_fused_one(monkeypatch):
    from fastlayers.patching.libraries.transformers import deferred_logits as language_models

    model = patch_model(classifier("ViTForImageClassification", num_labels=5))
    inputs = torch.randn(3, 3, 8, 8), torch.tensor([1, 4, 0])
    seen = []
    fused = language_models.functional.cross_entropy
    monkeypatch.setattr(
        language_models.functional, "cross_entropy", lambda *args, **kwargs: seen.append(1) or fused(*args, **kwargs)
    )
    given = model(inputs[0], labels=inputs[1], num_items_in_batch=torch.tensor(3)).loss
    assert seen == [1]
    torch.testing.assert_close(given, unpatch_model(model)(inputs[0], labels=inputs[1], num_items_in_batch=3).loss)


def test_a_fixed_cross_entropy_that_is_replaced_is_that_of_classifiers_too(monkeypatch):
    model = patch_model(classifier("ViTForImageClassification", num_labels=5))
    from transformers.loss import loss_utils

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda source, target, *args, **kwargs: source.sum() * 0)
    assert model(torch.randn(3, 3, 8, 8), labels=torch.tensor([1, 4, 0])).loss == 0


def test_logits_that_are_used_otherwise():
    """A forward of somebody's own, which also looks at them."""
    transformers = pytest.importorskip("transformers")

    class Entropy(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = self.lm_head(hidden)
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            entropy = logits.logsumexp(-1)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits, attentions=entropy)

    model = Entropy(causal_model().config)
    row = plan_patch(model)[""]
    assert dict(row.fused) == {"cross_entropy": 1}
    assert row.left[0][0].name == "LOGITS_USED"
    assert not is_lazy(patch_model(model)(**batch()).logits)


def test_undo_copy_and_pickle():
    model = causal_model()
    cls, state = type(model), dict(model.__dict__)
    patch_model(model)
    assert type(model) is not cls
    assert isinstance(model, cls)
    assert (type(model).__name__, type(model).__qualname__) == (cls.__name__, cls.__qualname__)  # config.json has it
    copied = copy.deepcopy(model)
    assert type(copied) is type(model)
    assert is_lazy(copied(**batch()).logits)
    assert type(pickle.loads(pickle.dumps(model))) is cls
    unpatch_model(model)
    assert type(model) is cls
    assert model.__dict__.keys() == state.keys()
    assert not is_lazy(model(**batch()).logits)
    unpatch_model(copied)
    assert type(copied) is cls


def test_nothing_global_changes():
    model, other = causal_model(), causal_model()
    from transformers.loss import loss_utils

    mapping, forward = dict(loss_utils.LOSS_MAPPING), type(model).forward
    patch_model(model)
    assert mapping == loss_utils.LOSS_MAPPING
    assert type(other).forward is forward
    assert other.loss_function is loss_utils.ForCausalLMLoss
    assert not is_lazy(other(**batch()).logits)


def test_signature_and_generation():
    import inspect

    model = causal_model()
    signature, ids = inspect.signature(model.forward), batch()["input_ids"]
    expected = model.eval().generate(ids, max_new_tokens=3, do_sample=False)
    patch_model(model)
    assert inspect.signature(model.forward) == signature
    assert model.generate(ids, max_new_tokens=3, do_sample=False).equal(expected)


def test_save_pretrained(tmp_path):
    model = patch_model(causal_model())
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["LlamaForCausalLM"]
    loaded = type(causal_model()).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.lm_head.weight, model.lm_head.weight)


def test_compiled(chunked):
    model, twin = twins(causal_model())
    assert torch.compile(model, backend="aot_eager", fullgraph=True)(**batch()).logits is None

    def answer(model, call):
        loss = call(**batch()).loss
        return loss, *torch.autograd.grad(loss, model.lm_head.weight)

    compiled = answer(model, torch.compile(model, backend="aot_eager"))
    assert_no_worse(compiled, lambda twin: answer(twin, twin), twin)
    torch.compiler.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, chunked):
    model = causal_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    twin = copy.deepcopy(model)
    assert is_lazy(assert_same_step(patch_model(model), twin).logits)


def test_verify_in_a_patch_that_is_wrong(monkeypatch):
    """Leaving out the logits does not hide a loss that differs."""
    model = patch_model(causal_model())
    from fastlayers import functional

    monkeypatch.setattr(functional, "linear_cross_entropy", lambda x, w, *args, **kwargs: (x @ w.t()).square().mean())
    assert not verify_patch(model, **batch())
