"""Losses: layers, and functions in any forward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlayers import modules
from fastlayers.patching import patch_model, unpatch_model, verify_patch
from tests.patching.harness import counts, written

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


def classifier(body):
    return written(Classifier, body, globals(), "x, target")()


FUNCTIONS = [
    ("cross_entropy", "F.cross_entropy(self.fc(x), target, self.class_weight, ignore_index=1, label_smoothing=0.1)"),
    ("nll_loss", "F.nll_loss(F.log_softmax(self.fc(x), dim=1), target, weight=self.class_weight, reduction='sum')"),
    ("nll_loss", "F.nll_loss(self.fc(x).log_softmax(-1), target)"),
]


@pytest.mark.parametrize(("rule", "loss"), FUNCTIONS)
def test_functions_in_a_forward(rule, loss):
    model = classifier(f"return {loss}")
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
    both = classifier("logs = F.log_softmax(self.fc(x), dim=1)\nreturn logs, F.nll_loss(logs, target)")
    assert "nll_loss" not in counts(both)
