"""The loss of a user's own language model, whose logits are a linear layer's: without the logits in memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastlayers import patch_model, patch_report, unpatch_model, verify_patch
from fastlayers.ops import head
from fastlayers.patching import Reason
from tests.patching.harness import written
from tests.patching.networks import Parts

CLASSES = 1100


class GPT(nn.Module):
    """What the models here have in common; each has another spelling of the loss."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, CLASSES, bias=bias)
        self.block_size = 4096

    def hidden(self, tokens):
        return self.norm(self.embedding(tokens))


class ByRows(GPT):
    def forward(self, tokens, targets):
        logits = self.head(self.hidden(tokens))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class ByShape(GPT):
    def forward(self, tokens, targets=None):
        logits = self.head(self.hidden(tokens))
        if targets is None:
            loss = None
        else:
            B, T, C = logits.shape
            logits = logits.view(B * T, C)
            targets = targets.view(B * T)
            loss = F.cross_entropy(logits, targets)
        return loss


class Flattened(GPT):
    def forward(self, tokens, targets):
        assert tokens.size(1) <= self.block_size, "too long"  # cannot be recorded as a whole
        x = self.hidden(tokens)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        return loss


class LossOrLogits(GPT):
    def forward(self, tokens, targets=None):
        logits = self.head(self.hidden(tokens))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def spelled(body):
    return written(GPT, f"logits = self.head(self.hidden(tokens))\n{body}", globals(), "tokens, targets")


SPELLINGS = {
    "by rows": ByRows,
    "by shape": ByShape,
    "flattened": Flattened,
    "loss or logits": LossOrLogits,
    "by the last size": spelled(
        "return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction='sum')"
    ),
    "with a number": spelled("return F.cross_entropy(logits.view(-1, 1100), targets.view(-1))"),
    "classes second": spelled("return F.cross_entropy(logits.transpose(1, 2), targets, reduction='none')"),
    "rows": written(
        GPT, "return F.cross_entropy(self.head(self.hidden(tokens.flatten())), targets.flatten())", globals(),
        "tokens, targets",
    ),
    "a function": written(
        GPT, "x = F.linear(self.hidden(tokens), self.embedding.weight)\n"
        "return F.cross_entropy(x.view(-1, x.size(-1)), targets.view(-1))", globals(), "tokens, targets",
    ),
}  # fmt: skip


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *made])
        return result


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """In chunks, however few the logits are."""
    monkeypatch.setattr(head, "CPU_LEAST", 0)


def texts(rows=2, length=16):
    torch.manual_seed(0)
    return torch.randint(CLASSES, (rows, length)), torch.randint(CLASSES, (rows, length))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SPELLINGS)
def test_loss_and_gradients_are_those_of_the_unpatched_model(name, bias):
    net = patch_model(SPELLINGS[name](bias))
    assert patch_report(net).counts()["linear_cross_entropy"] == 1
    assert verify_patch(net, *texts())
    assert "forward" in vars(type(net))
    unpatch_model(net)
    assert type(net) is SPELLINGS[name]


@pytest.mark.parametrize("name", SPELLINGS)
def test_logits_are_never_whole(name):
    stock = SPELLINGS[name]()
    net = patch_model(copy.deepcopy(stock))
    given, seen = texts(16, 256), []
    for candidate in (stock, net):
        with Largest() as largest:
            candidate(*given).sum().backward()
        seen.append(largest.elements)
    assert seen[0] == 16 * 256 * CLASSES
    assert seen[1] < seen[0] / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    net = patch_model(ByRows(True).to(dtype))
    assert verify_patch(net, *texts())
    assert net(*texts()).dtype is dtype


def gradients(model, dtype=None):
    model = copy.deepcopy(model).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        loss = model(*texts())
        loss.backward()
    return loss, [parameter.grad.double() for parameter in model.parameters()]


def test_autocast():
    """The loss is float32, and no gradient has a larger error than without patching."""
    stock = ByRows(True)
    net = patch_model(copy.deepcopy(stock))
    loss, found = gradients(net)
    assert loss.dtype is torch.float32
    for exact, theirs, ours in zip(gradients(stock, torch.float64)[1], gradients(stock)[1], found, strict=True):
        assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


def test_logits_are_returned_where_a_call_needs_them():
    net, (tokens, targets) = LossOrLogits(), texts()
    expected = net(tokens)
    patch_model(net)
    assert torch.equal(net(tokens), expected)
    assert net(tokens, targets).dim() == 0


class Returned(GPT):
    def forward(self, tokens, targets=None):
        logits = self.head(self.hidden(tokens))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


class Counted(GPT):
    def forward(self, tokens, targets):
        logits = self.head(self.hidden(tokens))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return loss, (logits.argmax(-1) == targets).sum()


USED_OTHERWISE = {
    "returned": Returned,
    "counted": Counted,
    "rows returned": spelled("x = logits.view(-1, 1100)\nreturn x, F.cross_entropy(x, targets.view(-1))"),
    "size returned": spelled(
        "return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1)), logits.size(0)"
    ),
}


@pytest.mark.parametrize("name", USED_OTHERWISE)
def test_logits_that_are_used_otherwise_are_computed(name):
    """Where a forward returns its logits they are there, with their gradient, and the report says why."""
    stock = USED_OTHERWISE[name]()
    net = patch_model(copy.deepcopy(stock))
    report = patch_report(net)
    assert "linear_cross_entropy" not in report.counts()
    assert Reason.LOGITS_USED in [reason for reason, _ in report[""].left] or name == "rows returned"
    torch.testing.assert_close(net(*texts()), stock(*texts()))
    assert verify_patch(net, *texts())


def test_a_hook_on_the_head_sees_the_logits():
    net, seen = patch_model(ByRows()), []
    net.head.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    net(*texts())
    assert seen == [(2, 16, CLASSES)]


def test_another_head_is_called():
    net = patch_model(ByRows())
    net.head = nn.Sequential(nn.Linear(16, CLASSES), nn.Tanh())
    assert torch.isfinite(net(*texts()))
    expected = unpatch_model(copy.deepcopy(net))(*texts())
    torch.testing.assert_close(net(*texts()), expected)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("F.cross_entropy(logits.view(-1, 550), targets)", torch.randint(550, (64,))),  # rows of another length
        ("F.cross_entropy(logits.flatten(0, 1), targets)", torch.rand(32, CLASSES).softmax(-1)),  # probabilities
        ("F.cross_entropy(logits, targets)", torch.randint(16, (2, CLASSES))),  # the classes are the tokens
    ],
)
def test_classes_that_are_not_those_of_the_head(loss, targets):
    net = patch_model(spelled(f"return {loss}")())
    assert verify_patch(net, texts()[0], targets)


def test_few_classes_are_no_vocabulary():
    class Classifier(Parts):
        def forward(self, x, targets):
            logits = self.head(x)
            return logits, F.cross_entropy(logits, targets)

    net = patch_model(Classifier(head=nn.Linear(16, 10)), strict=True)
    assert patch_report(net).counts()["cross_entropy"] == 1
