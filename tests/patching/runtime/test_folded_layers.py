"""fold_batch_norm: equal in eval, never in the way of training, and undone exactly."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from fastlayers.patching import (
    PatchError,
    PatchWarning,
    Reason,
    fold_batch_norm,
    patch_model,
    plan_fold,
    plan_patch,
    unfold_batch_norm,
    unpatch_model,
)
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.runtime import folded_layers
from tests.harness import assert_no_worse
from tests.patching.harness import written
from tests.patching.networks import Parts
from tests.patching.runtime.folding import LAYERS, Block, Net, NormAct, image, infer, state, warmed


def norms_of(model, *inputs):
    """How many BatchNorms an inference computes."""
    with no_regions(), torch.profiler.profile() as profile:
        infer(model, *inputs)
    return sum(event.key == "aten::batch_norm" for event in profile.events())


@pytest.mark.parametrize("patch", [False, True])
def test_equal_and_undone_exactly(net, patch):
    expected, keys = infer(net, image()), list(net.state_dict())
    assert norms_of(net, image()) == 4
    if patch:
        patch_model(net)
    before, unfolded = state(net), infer(net, image())
    assert plan_fold(net).counts()["fold_batch_norm"] == 4
    assert state(net) == before
    assert fold_batch_norm(net) is net
    assert [row.fqn for row in plan_fold(net).patched] == ["stem", "block", "head"]
    assert list(net.state_dict()) == keys
    assert repr(net.block).startswith("FoldedBlock(")
    assert isinstance(net.block, Block)
    torch.testing.assert_close(infer(net, image()), expected)
    assert norms_of(net, image()) == 0
    fold_batch_norm(net)  # twice changes nothing
    assert unfold_batch_norm(net) is net
    assert state(net) == before
    assert torch.equal(infer(net, image()), unfolded)
    unfold_batch_norm(net)


def test_with_patches_both_ways(net):
    expected = infer(net, image())
    fold_batch_norm(patch_model(net))
    assert dict(plan_fold(net)["block"].fused) == {"fold_batch_norm": 2}  # what follows is part of it
    torch.testing.assert_close(infer(net, image()), expected)
    unpatch_model(net)
    assert type(net.block) is Block
    fold_batch_norm(net)
    assert plan_patch(net)["block"].left == ((Reason.FOLDED, ""),)
    patch_model(net)
    assert repr(net.block).startswith("FoldedBlock(")
    unfold_batch_norm(net)
    assert type(net.block) is Block


@pytest.mark.parametrize(("make", "norm", "shape"), LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_layer(make, norm, shape, dtype):
    x = torch.randn(shape)
    model = warmed(nn.Sequential(make(), copy.deepcopy(norm)), x).to(dtype)
    x = x.to(dtype)
    folded = fold_batch_norm(copy.deepcopy(model), strict=True)
    actual = infer(folded, x)
    expected = assert_no_worse(actual, infer, model, x)
    assert actual.stride() == expected.stride()


def test_a_sequence_to_a_linear_layer():
    """BatchNorm1d takes the middle dimension for the channels, whatever Linear made the last one of."""
    x = torch.randn(3, 6, 4)
    model = warmed(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), x)
    expected = infer(model, x)
    assert torch.equal(infer(fold_batch_norm(model), x), expected)


def test_without_a_batch_it_raises_as_before():
    model = fold_batch_norm(warmed(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), image()))
    with pytest.raises(ValueError, match="expected 4D"):
        infer(model, image()[0])


@pytest.mark.parametrize("patch", [False, True])
def test_training_a_folded_model_is_training_the_model(net, patch):
    if patch:
        patch_model(net)
    folded = fold_batch_norm(copy.deepcopy(net))
    infer(folded, image())
    for model in (net, folded):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            model(image()).square().mean().backward()
            optimizer.step()
    for (name, a), (_, b) in zip(net.state_dict().items(), folded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert_no_worse(infer(folded.eval(), image()), infer, net.eval(), image())


def test_statistics_that_a_forward_in_training_writes(net):
    """F.batch_norm does not tell the buffers it writes; nor is there a count to go by where momentum was 0."""
    fold_batch_norm(net)
    infer(net, image())
    infer(net.train(), image() * 5)
    torch.testing.assert_close(infer(net.eval(), image()), infer(unfold_batch_norm(copy.deepcopy(net)), image()))


def test_gradients_in_eval_are_those_of_the_parameters(net):
    folded = fold_batch_norm(copy.deepcopy(net))
    for model in (net, folded):
        model(image()).square().sum().backward()
    for (name, a), b in zip(net.named_parameters(), folded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    frozen = folded.requires_grad_(False)
    x, y = image().requires_grad_(), image().requires_grad_()
    frozen(x).sum().backward()  # of the input, through the folded weights
    net(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_one_norm_in_training(net):
    """Others of the block may be frozen: what is folded is decided where all of it is in eval."""
    fold_batch_norm(net)
    net.block.bn1.train()
    other = unfold_batch_norm(copy.deepcopy(net))
    assert torch.equal(infer(net.block, torch.ones(2, 4, 3, 3)), infer(other.block, torch.ones(2, 4, 3, 3)))
    assert torch.equal(net.block.bn1.running_mean, other.block.bn1.running_mean)


def test_inference_mode_and_autocast(net):
    plain = copy.deepcopy(net)
    fold_batch_norm(net)
    with torch.inference_mode():
        first = net(image())
    torch.testing.assert_close(infer(net, image()), first)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_no_worse(net(image()), infer, plain, image())
    with torch.inference_mode():
        born = fold_batch_norm(warmed(Net(), image()))
        torch.testing.assert_close(born(image()), unfold_batch_norm(copy.deepcopy(born))(image()))


@pytest.mark.parametrize("patch", [False, True])
def test_compile_and_export(net, patch):
    expected = infer(net, image())
    if patch:
        patch_model(net)
    fold_batch_norm(net.requires_grad_(False))
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    torch.testing.assert_close(infer(compiled, image()), expected)
    with torch.no_grad():
        exported = torch.export.export(net, (image(),)).module()
        torch.testing.assert_close(exported(image()), expected)


def test_compile_in_training(net):
    fold_batch_norm(net)
    infer(net, image())
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    infer(net.train() and compiled, image() * 5)
    torch.testing.assert_close(infer(net.eval(), image()), infer(unfold_batch_norm(copy.deepcopy(net)), image()))


def test_functional_call_and_vmap(net):
    fold_batch_norm(net)
    expected = infer(net, image())
    doubled = {name: p.detach() * 2 for name, p in net.named_parameters()}
    unfolded = unfold_batch_norm(copy.deepcopy(net))
    with torch.no_grad():
        actual = torch.func.functional_call(net, doubled, (image(),))
        assert_no_worse(actual, torch.func.functional_call, unfolded, doubled, image())
        stacked = torch.vmap(net)(image().unsqueeze(1))
    torch.testing.assert_close(stacked[:, 0], expected)
    torch.testing.assert_close(infer(net, image()), expected)


def test_copies_and_pickles(net):
    fold_batch_norm(patch_model(net))
    expected = infer(net, image())
    copied = copy.deepcopy(net)
    assert type(copied.block) is type(net.block)
    with torch.no_grad():
        copied.block.conv1.weight.zero_()
    assert torch.equal(infer(net, image()), expected)
    assert not torch.allclose(infer(copied, image()), expected)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(net, protocol))
        assert type(loaded.block) is Block
        torch.testing.assert_close(infer(loaded, image()), expected)
    assert repr(unfold_batch_norm(copied).block).startswith("FusedBlock(")


def test_memory_is_given_back():
    net = fold_batch_norm(Net().eval())
    infer(net, image())
    assert len([norm for norm in net.modules() if norm in folded_layers._folded]) == 4
    unfold_batch_norm(net)
    assert not [norm for norm in net.modules() if norm in folded_layers._folded]
    fold_batch_norm(net)
    infer(net, image())
    kept = weakref.ref(net.block.bn1)
    del net
    gc.collect()
    assert kept() is None


def test_shared_layers_are_right_too():
    """Nothing is overwritten, so one convolution may fold into several norms."""

    class Shared(Parts):
        def forward(self, x):
            return self.b(self.conv(self.a(self.conv(x))))

    model = warmed(Shared(conv=nn.Conv2d(3, 3, 1), a=nn.BatchNorm2d(3), b=nn.BatchNorm2d(3)), image())
    expected = infer(model, image())
    assert plan_fold(model).counts() == {"fold_batch_norm": 2}
    torch.testing.assert_close(infer(fold_batch_norm(model), image()), expected)


class ActNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), NormAct(4, nn.SiLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), NormAct(4, nn.Identity(), eps=0.1, affine=False))

    def forward(self, x):
        x = self.bn1(self.conv1(x))
        out = self.block[1](self.block[0](x))
        out += x
        return F.relu(out)


@pytest.fixture
def act_net():
    torch.manual_seed(0)
    return warmed(ActNet(), image() * 3 + 1)


@pytest.mark.parametrize("steps", [[fold_batch_norm], [patch_model, fold_batch_norm], [fold_batch_norm, patch_model]])
def test_a_norm_with_an_activation(act_net, steps):
    plain, expected = copy.deepcopy(act_net), infer(act_net, image())
    assert plan_fold(act_net).counts()["fold_batch_norm"] == 3  # of the block in the Sequential, and in its parent
    for step in steps:
        step(act_net)
    torch.testing.assert_close(infer(act_net, image()), expected)
    assert (norms_of(act_net, image()), norms_of(plain, image())) == (0, 2)
    seen = []
    act_net.bn1.act.register_forward_hook(lambda module, args, out: seen.append(out.mean()))
    torch.testing.assert_close(infer(act_net, image()), expected)
    assert len(seen) == 1
    act_net.bn1.act = plain.bn1.act = nn.Tanh()
    torch.testing.assert_close(infer(act_net, image()), infer(plain, image()))
    act_net.bn1.eps = plain.bn1.eps = 0.5
    torch.testing.assert_close(infer(act_net, image()), infer(plain, image()))
    for model in (act_net, plain):
        model.train()(image()).square().mean().backward()
    torch.testing.assert_close(act_net.state_dict(), plain.state_dict())
    torch.testing.assert_close(act_net.conv1.weight.grad, plain.conv1.weight.grad)
    torch.testing.assert_close(infer(act_net.eval(), image()), infer(plain.eval(), image()))
    for model in (act_net, plain):
        with pytest.raises(AssertionError, match="expected 4D"):
            infer(model, image()[0])
    unpatch_model(act_net)
    assert [type(module) for module in act_net.modules()] == [type(module) for module in plain.modules()]


NORM = "F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps)"


@pytest.mark.parametrize(
    "body",
    [
        "return super().forward(x * 2)",
        f"return self.act({NORM.replace('self.eps', '1e-2')})",
        f"return self.act({NORM.replace('self.weight, self.bias', 'self.bias, self.weight')})",
        f"return self.act({NORM.replace('False, 0.1', 'True, 0.0')})",  # the statistics of its batch
        f"y = {NORM}\nreturn self.act(y) * y",
        f"torch._assert(x.shape[-1] == 3, 'three columns')\nreturn self.act({NORM})",
    ],
)
def test_norms_that_do_something_else(body):
    norms = [written(NormAct, text, globals())(4) for text in (f"return self.act({NORM})", body)]
    assert [bool(plan_fold(pair(norm=norm)).patched) for norm in norms] == [True, False]


# -- what is left alone ------------------------------------------------------------------------------------------------


class UsedTwice(Block):
    def forward(self, x):
        out = self.conv1(x)
        return self.bn1(out) + out


def pair(conv=None, norm=None):
    return nn.Sequential(conv or nn.Conv2d(3, 4, 3), norm or nn.BatchNorm2d(4)).eval()


def hooked():
    model = pair()
    model[0].register_forward_hook(lambda *args: None)
    return model


class Own(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: pair().train(), Reason.TRAINING),
        (lambda: pair(norm=nn.BatchNorm2d(4, track_running_stats=False)), Reason.NO_STATISTICS),
        (hooked, Reason.HOOKED_CHILD),
        (lambda: UsedTwice().eval(), Reason.USED_ELSEWHERE),
        (lambda: pair(conv=parametrizations.weight_norm(nn.Conv2d(3, 4, 3))), Reason.PARAMETRIZED),
        (lambda: pair(conv=weight_norm(nn.Conv2d(3, 4, 3))), Reason.HOOKED_CHILD),
        (lambda: pair(conv=Own(3, 4, 3)), Reason.SUBCLASS),
        (lambda: pair(norm=nn.BatchNorm3d(4)), Reason.SUBCLASS),
        (lambda: pair(norm=NormAct(4)).train(), Reason.TRAINING),
        (lambda: pair(conv=Own(3, 4, 3), norm=NormAct(4)), Reason.SUBCLASS),
        (lambda: pair(norm=nn.SyncBatchNorm(4)), Reason.NOTHING_TO_FUSE),
        (lambda: pair(norm=nn.GroupNorm(2, 4)), Reason.NOTHING_TO_FUSE),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)).eval(), Reason.NOTHING_TO_FUSE),
        (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)).eval(), Reason.NOTHING_TO_FUSE),
    ],
)
def test_what_is_left_alone_and_why(make, reason):
    model = make()
    row = plan_fold(model)[""]
    assert row.became is None
    assert reason in (row.reason, *(why for why, _ in row.left))
    before = state(model)
    with pytest.warns(PatchWarning, match="nothing in .* was folded"):
        fold_batch_norm(model)
    assert state(model) == before
    with pytest.raises(PatchError, match="nothing was changed"):
        fold_batch_norm(model, strict=True)


def test_selection(net):
    fold_batch_norm(net, include="block")
    assert [row.fqn for row in plan_fold(net).patched if "Folded" in repr(net.get_submodule(row.fqn))] == ["block"]
    unfold_batch_norm(net)
    assert plan_fold(net, exclude="block.bn1").counts() == {"fold_batch_norm": 3}
    with pytest.raises(TypeError, match="Module"):
        fold_batch_norm("net")
    with pytest.raises(TypeError, match="Module"):
        unfold_batch_norm("net")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fold_batch_norm(net, strict=True)
