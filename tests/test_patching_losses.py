"""Losses: layers and functions in any forward, and the seams of transformers' language models."""

from __future__ import annotations

import copy
import pickle
import warnings
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from harness import assert_no_worse, needs_gpu
from torch import nn

import fastlayers
from fastlayers import modules
from fastlayers.patching import patch_model, patch_report, plan_patch, unpatch_model, verify_patch
from fastlayers.patching.reasons import PatchWarning
from fastlayers.patching.regions.results import Taken, put_together, take_apart
from fastlayers.patching.runtime.lazy import LazyTensor


def counts(model):
    return plan_patch(model).counts()


# -- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "fused"), [(nn.CrossEntropyLoss, modules.FusedCrossEntropyLoss), (nn.KLDivLoss, modules.FusedKLDivLoss)]
)
def test_loss_layers_are_swapped(layer, fused):
    """A swapped layer was never built by the fused constructor, and lacks none of its attributes."""
    options = {"label_smoothing": 0.1, "ignore_index": 2} if layer is nn.CrossEntropyLoss else {"reduction": "sum"}
    loss, torch_state = layer(**options), dict(layer(**options).__dict__)
    x = torch.randn(6, 5).log_softmax(-1)
    target = torch.randint(0, 5, (6,)) if layer is nn.CrossEntropyLoss else torch.rand(6, 5)
    expected = loss(x, target)
    patch_model(loss)
    assert isinstance(loss, fused)
    assert all(hasattr(loss, name) for name in vars(fused(**options)))
    assert all(hasattr(loss, name) for name in ("softcap", "z_loss", "inplace_backward")) or layer is nn.KLDivLoss
    torch.testing.assert_close(loss(x, target), expected)
    assert repr(loss)
    assert loss.__dict__.keys() == torch_state.keys()
    assert isinstance(copy.deepcopy(loss), fused)
    assert type(pickle.loads(pickle.dumps(loss))) is layer
    unpatch_model(loss)
    assert type(loss) is layer
    assert loss.__dict__.keys() == torch_state.keys()


# -- functions --------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 5)
        self.register_buffer("class_weight", torch.rand(5) + 0.5)


class Function(Classifier):
    def forward(self, x, target):
        return F.cross_entropy(self.fc(x), target, self.class_weight, ignore_index=1, label_smoothing=0.1)


class Nll(Classifier):
    def forward(self, x, target):
        return F.nll_loss(F.log_softmax(self.fc(x), dim=1), target, weight=self.class_weight, reduction="sum")


class NllLast(Classifier):
    def forward(self, x, target):
        return F.nll_loss(self.fc(x).log_softmax(-1), target)


@pytest.mark.parametrize("cls", [Function, Nll, NllLast])
def test_functions_in_a_forward(cls):
    model = cls()
    rule = "cross_entropy" if cls is Function else "nll_loss"
    assert counts(model) == {rule: 1, "Linear": 1}
    report = verify_patch(model, torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 4, 0]))
    assert report, report


def test_nll_loss_over_another_dimension_is_what_it_was():
    """nll_loss takes the classes from dimension 1, whatever log_softmax normalised."""

    class Last(nn.Module):
        def forward(self, x, target):
            return F.nll_loss(F.log_softmax(x, dim=-1), target)

    x, target = torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))
    report = verify_patch(Last(), x, target)
    assert report, report
    model = patch_model(Last())
    torch.testing.assert_close(model(x[..., 0], target[:, 0]), F.cross_entropy(x[..., 0], target[:, 0]))
    torch.testing.assert_close(model(x[0, :, 0], target[0, 0]), F.cross_entropy(x[0, :, 0], target[0, 0]))


def test_nll_loss_of_probabilities_stays_an_error():
    class Probabilities(nn.Module):
        def forward(self, x, target):
            return F.nll_loss(F.log_softmax(x, dim=1), target)

    x = torch.randn(4, 5)
    for model in (Probabilities(), patch_model(Probabilities())):
        with pytest.raises(RuntimeError):
            model(x, x.softmax(-1))


def test_log_probabilities_that_are_used_elsewhere():
    class Both(Classifier):
        def forward(self, x, target):
            logs = F.log_softmax(self.fc(x), dim=1)
            return logs, F.nll_loss(logs, target)

    assert "nll_loss" not in counts(Both())


# -- transformers: the head and its loss -----------------------------------------------------------------------------

VOCABULARY = 61
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = {
    "Llama": SMALL,
    "Mistral": SMALL,
    "Qwen2": SMALL,
    "Qwen3": SMALL,
    "Gemma": SMALL,
    "Gemma2": {**SMALL, "final_logit_softcapping": 0.5},
    "Phi": SMALL,
    "GPTNeoX": SMALL,
    "Cohere": {**SMALL, "logit_scale": 0.25},
    "Granite": {**SMALL, "logits_scaling": 3.0},
    "Olmo": SMALL,
    "Mixtral": {**SMALL, "output_router_logits": True, "experts_implementation": "eager"},
    "OPT": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "GPT2LMHead": GPT,
    "GPTJ": {**GPT, "rotary_dim": 8},
    "Bloom": SMALL,
}


def causal_model(family="Llama", **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family.removesuffix('LMHead')}Config")(**{**CAUSAL[family], **options})
    torch.manual_seed(0)
    name = f"{family}Model" if family.endswith("LMHead") else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch(seed=1):
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture
def chunked(monkeypatch):
    """Losses of any size chunk by chunk; and a count of them."""
    from fastlayers.ops import head
    from fastlayers.ops import linear_cross_entropy as ops

    calls = []

    def sweep(leaves, *args):
        calls.append(leaves.input.shape)
        return swept(leaves, *args)

    swept = ops.sweep
    monkeypatch.setattr(head, "CPU_LEAST", 1)
    monkeypatch.setattr(ops, "sweep", sweep)
    return calls


def step(model, **kwargs):
    """The loss and the gradients of one training step."""
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**{**batch(), **kwargs})
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def is_lazy(logits):
    return isinstance(logits, LazyTensor)


def assert_same_step(model, twin, **kwargs):
    output, gradients = step(model, **kwargs)

    def answer(model):
        output, gradients = step(model, **kwargs)
        return output.loss, gradients

    assert_no_worse((output.loss, gradients), answer, twin)
    return output


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
        model = causal_model(family)
        twin = copy.deepcopy(model)
        patch_model(model)
        before = model(**batch()).loss
        for name, value in options.items():
            setattr(model.config, name, value)
            setattr(twin.config, name, value)
        assert abs(assert_same_step(model, twin).loss - before) > 1e-2
    model = causal_model("Gemma2", final_logit_softcapping=None)
    twin = copy.deepcopy(model)
    assert_same_step(patch_model(model), twin)


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
        monkeypatch.setattr("fastlayers.patching.libraries.transformers.deferred_logits.MOST_ON_A_CPU", 0)
        assert is_lazy(model(**given).logits)
        monkeypatch.undo()
    assert is_lazy(model.eval()(**given).logits)
    with torch.inference_mode():
        torch.testing.assert_close(model(**given).logits.float(), model(**ids).logits)
    assert not is_lazy(patch_model(unpatch_model(model), exclude="lm_head")(**given).logits)


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
    model = causal_model(family).train(training)
    twin = copy.deepcopy(model)
    patch_model(model)
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

    model = causal_model(family)
    twin = copy.deepcopy(model)
    patch_model(model)
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
    model = causal_model()
    twin = copy.deepcopy(model)
    patch_model(model)
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
    model = causal_model(family)
    twin = copy.deepcopy(model)
    patch_model(model)
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
    model = causal_model()
    twin = copy.deepcopy(model)
    assert is_lazy(assert_same_step(patch_model(model), twin, **options).logits)
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
    model = causal_model()
    twin = copy.deepcopy(model)
    patch_model(model)
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


def hook(module, args, output):
    return output * 2


def test_a_head_with_a_hook_is_left_alone():
    model = causal_model()
    model.lm_head.register_forward_hook(hook)
    twin = copy.deepcopy(model)
    row = plan_patch(model)[""]
    assert dict(row.fused) == {"cross_entropy": 1}
    assert row.left[0][0].name == "HOOKED_CHILD"
    assert not is_lazy(assert_same_step(patch_model(model), twin).logits)


def test_a_hook_that_comes_later_runs():
    model = causal_model()
    twin = copy.deepcopy(model)
    patch_model(model)
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
    model = causal_model()
    twin = copy.deepcopy(model)
    patch_model(model)
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
    stock = causal_model(family).double()
    ours = patch_model(copy.deepcopy(stock))
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
    stock = causal_model().train(mode == "train")
    ours = patch_model(copy.deepcopy(stock))
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
