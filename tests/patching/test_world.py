"""What people do to models besides calling them, before patching and after: wrappers, hooks, copies, quantisation.

Each is done to a patched model and to one that never was, and both must stay equal.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import textwrap
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from fastlayers.patching import (
    PatchWarning,
    Reason,
    fold_batch_norm,
    patch_model,
    patch_report,
    unpatch_model,
)
from tests.distributed.processes import run_in_processes
from tests.patching.world import Cell, cells, images, mlp, rows, same, step, undone

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


# -- the weights of layers, computed again ----------------------------------------------------------------------------

REPARAMETRIZED = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm by a hook": torch.nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm by a hook": torch.nn.utils.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruned": partial(torch.nn.utils.prune.l1_unstructured, name="weight", amount=0.5),
}


@pytest.mark.parametrize("name", REPARAMETRIZED)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_reparametrized_layers(name, when):
    model, stock = mlp(), mlp()
    if when == "after":
        patch_model(model)
    for either in (model, stock):
        torch.manual_seed(2)  # spectral_norm draws its first vector
        for layer in ("up", "down", "gate"):
            REPARAMETRIZED[name](getattr(either[0], layer))
    if when == "before":
        patch_model(model)
    assert list(model.state_dict()) == list(stock.state_dict())
    same(model.train(), stock.train(), rows())
    same(model.eval(), stock.eval(), rows())
    same(unpatch_model(model), stock, rows())


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def test_a_patched_layer_that_is_parametrized():
    model, stock = patch_model(mlp()), mlp()
    for either in (model, stock):
        parametrize.register_parametrization(either[0].norm, "weight", Double())
    same(model, stock, rows())
    clone = copy.deepcopy(model)
    assert clone[0].norm.parametrizations.weight.original is not model[0].norm.parametrizations.weight.original
    same(clone, stock, rows())
    for either in (clone, stock):
        parametrize.remove_parametrizations(either[0].norm, "weight")
    same(clone, stock, rows())
    unpatch_model(clone)
    assert type(clone[0].norm) is nn.LayerNorm


# -- hooks ------------------------------------------------------------------------------------------------------------


def test_every_hook_sees_the_same_calls():
    def watched(model):
        names, seen = [], []

        def hook(module, args, kwargs, result, *, name):
            names.append(name)
            seen.append([t.detach().clone() for t in (*args, *kwargs.values(), result)])

        handles = [
            module.register_forward_hook(partial(hook, name=name), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        result = step(model, rows())
        for handle in handles:
            handle.remove()
        return names, (seen, result)

    (names, tensors), (expected_names, expected) = watched(patch_model(mlp())), watched(mlp())
    assert names == expected_names
    torch.testing.assert_close(tensors, expected)


def test_hooks_on_state_dicts_and_loading():
    model = patch_model(mlp())
    seen = []
    model[0].norm.register_state_dict_post_hook(lambda *args: seen.append("saved"))
    model[0].register_load_state_dict_post_hook(lambda *args: seen.append("loaded"))
    assert model.load_state_dict(model.state_dict(), strict=True) == ([], [])
    assert seen == ["saved", "loaded"]


@pytest.mark.parametrize("how", ["no_split_module_classes", "get_module_class_from_name"])
def test_classes_are_found_by_their_names(how):
    """accelerate and FSDP are told the names of blocks: a split of one, or a block that is not found, is an error."""
    pytest.importorskip("accelerate")
    from accelerate.utils import infer_auto_device_map
    from accelerate.utils.dataclasses import get_module_class_from_name

    model, stock = patch_model(mlp()), mlp()
    if how == "get_module_class_from_name":
        found = get_module_class_from_name(model, "MLP")
        assert found is not None
        assert all(isinstance(block, found) for block in model)
    else:
        size = sum(p.nbytes for p in stock.parameters())
        room = {0: int(1.6 * size / 2), "cpu": 10 * size}  # one block and a part of the next
        split = partial(infer_auto_device_map, max_memory=room, no_split_module_classes=["MLP"])
        assert split(model) == split(stock)
        assert all(len(name.split(".")) == 1 for name in split(model))


# -- names and types --------------------------------------------------------------------------------------------------


def test_classes_bear_the_names_of_their_originals():
    for model, stock in ((patch_model(mlp()), mlp()), (fold_batch_norm(patch_model(cells())), cells())):
        for module, other in zip(model.modules(), stock.modules(), strict=True):
            for attribute in ("__name__", "__qualname__", "__module__"):
                assert getattr(type(module), attribute) == getattr(type(other), attribute)
            assert module._get_name() == other._get_name()  # the Trainer of transformers asks for that
        assert repr(model) != repr(stock)  # what is patched shows


def test_names_and_keys():
    for make in (mlp, cells):
        model, stock = patch_model(make()), make()
        for listing in ("named_modules", "named_parameters", "named_buffers"):
            assert [name for name, _ in getattr(model, listing)()] == [name for name, _ in getattr(stock, listing)()]
        assert model.load_state_dict(stock.state_dict(), strict=True) == ([], [])
        assert stock.load_state_dict(model.state_dict(), strict=True, assign=True) == ([], [])


# -- copies and other processes ---------------------------------------------------------------------------------------


def answer(rank, model, x, path):
    torch.save((repr(model), model(x)), path)


@pytest.mark.slow
def test_a_spawned_process_gets_the_unpatched_model(tmp_path):
    """A pickle holds the original classes, and that is how a model reaches another process."""
    model = patch_model(mlp()).share_memory()
    assert all(p.is_shared() for p in model.parameters())
    torch.multiprocessing.spawn(answer, (model, rows(), tmp_path / "answer.pt"))
    text, output = torch.load(tmp_path / "answer.pt")
    assert text == repr(mlp())
    assert torch.equal(output, mlp()(rows()))
    assert repr(model[0]).startswith("FusedMLP(")


def test_a_saved_module_loads_without_fastlayers(tmp_path, monkeypatch):
    (tmp_path / "networks.py").write_text(
        textwrap.dedent(
            """
            from torch import nn

            class Block(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.up = nn.Linear(8, 8)
                    self.act = nn.GELU()
                    self.norm = nn.LayerNorm(8)

                def forward(self, x):
                    return self.norm(self.act(self.up(x)) + x)
            """
        )
    )
    load = """
        import sys, torch
        sys.modules["fastlayers"] = None  # importing it raises, as where it is not installed
        model, x, y = torch.load("saved.pt", weights_only=False)
        assert torch.equal(model(x), y)
        assert not any(name.startswith("fastlayers.") for name in sys.modules)
    """
    spec = importlib.util.spec_from_file_location("networks", tmp_path / "networks.py")
    networks = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "networks", networks)
    spec.loader.exec_module(networks)
    model = patch_model(nn.Sequential(networks.Block(), networks.Block()))
    assert "FusedBlock" in repr(model)
    assert "FusedLayerNorm" in repr(model)
    x = torch.randn(3, 8)
    torch.save((model, x, unpatch_model(copy.deepcopy(model))(x)), tmp_path / "saved.pt")
    command = [sys.executable, "-c", textwrap.dedent(load)]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment(tmp_path))


def environment(*paths):
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, sys.path)])}


def test_a_shallow_copy_is_right():
    model = patch_model(mlp())
    assert torch.equal(copy.copy(model[0])(rows()), undone(model)[0](rows()))


def test_replicas_of_data_parallel(monkeypatch):
    """nn.DataParallel's copies have plain tensors in the place of parameters, on the devices that a CPU lacks."""
    replicate = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, *args: device)
    monkeypatch.setattr(
        replicate,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [[t.clone() for t in tensors] for _ in devices],
    )
    for make, x in ((mlp, rows()), (cells, images())):
        model, stock = patch_model(make()), make()
        first, second = replicate.replicate(model, [0, 1])
        assert type(first[0]) is type(model[0])
        assert not list(first.parameters())
        (first(x).square().sum() + second(x).square().sum()).backward()
        (2 * stock(x).square().sum()).backward()
        for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)


# -- what changes after patching --------------------------------------------------------------------------------------


def test_moves_and_modes():
    model = patch_model(cells())
    stock = cells()
    for change in (
        lambda m: m.double(),
        lambda m: m.train(),
        lambda m: m.bfloat16(),
        lambda m: m.float().to(memory_format=torch.channels_last),
        lambda m: m.eval(),
        lambda m: m.requires_grad_(False),
    ):
        change(model), change(stock)
        x = images().to(next(stock.parameters()).dtype)
        torch.testing.assert_close(model(x), stock(x))
    with torch.inference_mode():
        torch.testing.assert_close(model(images()), stock(images()))
    model.half(), stock.half()
    torch.testing.assert_close(model(images().half()), stock(images().half()))
    assert model.to("meta")(images().to("meta", torch.half)).device.type == "meta"
    model.to_empty(device="cpu").float().load_state_dict(stock.float().state_dict())
    torch.testing.assert_close(model(images()), stock(images()))


def remove(name):
    return lambda parent: delattr(parent, name)


def function_in_its_place(name, function):
    def change(parent):
        delattr(parent, name)
        setattr(parent, name, function)

    return change


CHANGED_CHILDREN = {
    "replaced": (Cell, lambda cell: setattr(cell, "relu", nn.Sigmoid())),
    "None": (Cell, lambda cell: setattr(cell, "relu", None)),
    "gone": (Cell, remove("relu")),
    "gone, another one": (Cell, remove("bn")),
    "a function": (Cell, function_in_its_place("relu", torch.sigmoid)),
    "a lambda": (Cell, function_in_its_place("bn", lambda x: x * 3)),
    "one more": (Cell, lambda cell: setattr(cell, "more", nn.Dropout())),
    "appended": (cells, lambda model: model[1].append(nn.Sigmoid())),
    "inserted": (cells, lambda model: model[1].insert(1, nn.Sigmoid())),
    "deleted first": (cells, lambda model: model[1].__delitem__(0)),
    "deleted last": (cells, lambda model: model[1].__delitem__(2)),
    "popped": (cells, lambda model: model[1].pop(1)),
    "shared": (cells, lambda model: setattr(model[2], "bn", model[0].bn)),
    "the container": (cells, lambda model: setattr(model, "1", nn.Identity())),
}


@pytest.mark.parametrize("name", CHANGED_CHILDREN)
@pytest.mark.parametrize("training", [True, False])
def test_children_that_change(name, training):
    make, change = CHANGED_CHILDREN[name]
    model = patch_model(make().train(training))
    change(model)
    stock = undone(model)

    def outcome(either):
        try:
            return step(either, images())
        except Exception as error:
            return type(error), str(error)

    expected = outcome(stock)
    if isinstance(expected[0], type):
        assert outcome(model) == expected
    else:
        torch.testing.assert_close(outcome(model), expected)


# -- quantised layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_dynamic_quantisation(when):
    quantise = partial(torch.ao.quantization.quantize_dynamic, qconfig_spec={nn.Linear})
    stock = quantise(mlp())
    if when == "after":  # it looks for exactly nn.Linear
        model = quantise(unpatch_model(patch_model(mlp())))
    else:
        model = quantise(mlp())
        with pytest.warns(PatchWarning, match="quantised layers"):
            patch_model(model)
        assert patch_report(model)["0.up"].reason is Reason.QUANTIZED
    torch.testing.assert_close(model(rows()), stock(rows()))
    assert torch.equal(unpatch_model(model)(rows()), stock(rows()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_torchao(when):
    quantization = pytest.importorskip("torchao.quantization")
    model, stock = mlp(), mlp()
    if when == "after":
        patch_model(model)
    for either in (model, stock):
        quantization.quantize_(either, quantization.Int8WeightOnlyConfig())
    if when == "before":
        patch_model(model)
    torch.testing.assert_close(model(rows()), stock(rows()))


# -- parallel training ------------------------------------------------------------------------------------------------


def ddp(model):
    return DistributedDataParallel(model)


def compiled_ddp(model):
    return DistributedDataParallel(torch.compile(model, backend="eager"))


def fsdp(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def fsdp_of_layers(model):
    for module in list(model.modules())[:0:-1]:
        if next(module.parameters(recurse=False), None) is not None:
            fully_shard(module)
    return fully_shard(model)


def train(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


class Forwarding(nn.Module):
    """Looks up in its model what it has not, as the models of peft do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.look_up(name)

    def look_up(self, name):
        return getattr(self.model, name)

    def forward(self, x):
        return self.model(x) * 2


def test_a_copy_of_a_wrapper_is_a_wrapper():
    """It was a copy of the model inside, whose class has a method for copies."""
    wrapper = Forwarding(patch_model(mlp()))
    copied = copy.deepcopy(wrapper)
    assert type(copied) is Forwarding
    assert type(copied.model) is type(wrapper.model)
    assert copied.model is not wrapper.model
    assert type(copy.deepcopy(wrapper.model)) is type(wrapper.model)


def train_in_parallel(rank, before):
    warnings.simplefilter("ignore", PatchWarning)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    expected = train(mlp(True), batch)
    for wrap in (ddp, compiled_ddp, fsdp, fsdp_of_layers):
        model = mlp(True)
        model = wrap(patch_model(model)) if before else patch_model(wrap(model))
        losses = train(model, batch[2 * rank : 2 * rank + 2])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses / 2, expected, msg=f"{wrap.__name__}, patched before: {before}")
        report = patch_report(model)
        if before or wrap is fsdp:  # Where layers have the hooks of FSDP, a forward does not do their work.
            assert report.counts() == patch_report(patch_model(mlp())).counts(), wrap
            if wrap is fsdp:
                assert report["0"].became == "FusedMLP"
        train(unpatch_model(model), batch)


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["patched before", "patched after"])
def test_ddp_and_fsdp(tmp_path, before):
    run_in_processes(partial(train_in_parallel, before=before), 2, tmp_path)
