"""What people do to models besides calling them, before patching and after: wrappers, hooks, compilers, copies, tools.

Each is done to a patched model and to one that never was, and both must stay equal.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
import subprocess
import sys
import textwrap
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from fastlayers.patching import (
    PatchError,
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
from fastlayers.patching.regions.region import Region
from tests.distributed.processes import run_in_processes
from tests.harness import assert_no_worse

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
]


class MLP(nn.Module):
    """Two linear layers around an activation, a gate and a norm: four fusions that absorb children or swap them."""

    def __init__(self, size=8):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, size)
        self.act = nn.GELU()
        self.down = nn.Linear(size, size)
        self.gate = nn.Linear(size, size)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(self.act(self.up(h))) + F.silu(self.gate(x)) * h


class Cell(nn.Module):
    """BatchNorm, a sum and an activation, in a residual block."""

    def __init__(self, size=4):
        super().__init__()
        self.conv = nn.Conv2d(size, size, 3, padding=1)
        self.bn = nn.BatchNorm2d(size)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


def mlp(training=False):
    torch.manual_seed(0)
    return nn.Sequential(MLP(), MLP()).train(training)


def cells(training=False):
    torch.manual_seed(0)
    return nn.Sequential(Cell(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), Cell()).train(
        training
    )


def rows():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def images():
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def step(model, x):
    """Output and gradients of a forward and a backward."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, grads


def same(model, stock, x):
    torch.testing.assert_close(step(model, x), step(stock, x))


def undone(model):
    """A copy that is unpatched: what a patched model must be equal to after something was done to it."""
    return unpatch_model(copy.deepcopy(model))


# -- the weights of layers, computed anew -----------------------------------------------------------------------------

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


def test_initialisation_by_type_and_by_name():
    def initialise(module):
        name = type(module).__name__
        if name == "LayerNorm":
            nn.init.normal_(module.weight, 1.0, 0.02)
        elif name.find("Linear") != -1:
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)

    for make in (mlp, cells):
        model, stock = patch_model(make()), make()
        for either in (model, stock):
            torch.manual_seed(3)
            either.apply(initialise)
        assert all(map(torch.equal, model.state_dict().values(), stock.state_dict().values()))


def test_weight_decay_groups_by_type():
    def groups(model):
        exempt = (nn.LayerNorm, nn.BatchNorm2d)
        kept = {
            f"{name}.{key}"
            for name, module in model.named_modules()
            for key, _ in module.named_parameters(recurse=False)
            if key == "bias" or isinstance(module, exempt)
        }
        return [[name for name, _ in model.named_parameters() if (name in kept) is which] for which in (True, False)]

    for make in (mlp, cells):
        assert groups(patch_model(make())) == groups(make())
        assert all(groups(make()))


def test_names_and_keys():
    for make in (mlp, cells):
        model, stock = patch_model(make()), make()
        for listing in ("named_modules", "named_parameters", "named_buffers"):
            assert [name for name, _ in getattr(model, listing)()] == [name for name, _ in getattr(stock, listing)()]
        assert model.load_state_dict(stock.state_dict(), strict=True) == ([], [])
        assert stock.load_state_dict(model.state_dict(), strict=True, assign=True) == ([], [])


@pytest.mark.parametrize("when", ["before", "after"])
def test_convert_sync_batchnorm(when):
    model, stock = cells(), nn.SyncBatchNorm.convert_sync_batchnorm(cells())
    if when == "after":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(patch_model(model))
    else:
        model = patch_model(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    assert isinstance(model[0].bn, nn.SyncBatchNorm)
    assert list(model.state_dict()) == list(stock.state_dict())
    same(model.eval(), stock.eval(), images())
    assert [type(module) for module in unpatch_model(model).modules()] == [type(module) for module in stock.modules()]


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


def test_averaged_copies():
    model, stock = patch_model(mlp(True)), mlp(True)
    averages = [torch.optim.swa_utils.AveragedModel(either) for either in (model, stock)]
    for _ in range(3):
        for either, average in zip((model, stock), averages, strict=True):
            step(either, rows())
            with torch.no_grad():
                for p in either.parameters():
                    p -= 0.001 * p.grad
            average.update_parameters(either)
    torch.testing.assert_close(averages[0](rows()), averages[1](rows()))
    assert list(averages[0].state_dict()) == list(averages[1].state_dict())
    assert repr(averages[0].module[0]).startswith("FusedMLP(")


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


# -- compilers and tracers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "x"), [(mlp, rows()), (cells, images())])
def test_scripting_is_refused_with_what_to_do(make, x):
    model = patch_model(make())
    before = [*model.modules()]
    with pytest.raises(PatchError, match=r"is a patched module.*unpatch_model\(model\)"):
        torch.jit.script(model)
    assert [*model.modules()] == before
    scripted = torch.jit.script(unpatch_model(model))
    torch.testing.assert_close(scripted(x), model(x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("make", "x"), [(mlp, rows()), (cells, images())])
def test_tracing_and_exporting(make, x):
    model = patch_model(make())
    expected = undone(model)(x)
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


class Scores(nn.Module):
    """A scale that is computed from a size, which is a tensor in a trace."""

    def __init__(self, by_power):
        super().__init__()
        self.norm, self.by_power = nn.LayerNorm(8), by_power

    def forward(self, x):
        x = self.norm(x)
        _, D = x.shape
        scores = (x @ x.mT) * D**-0.5 if self.by_power else x @ x.mT / x.size(-1) ** 0.5
        return F.softmax(scores, -1) @ x


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).split(4, -1)
        return q + k * v


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn, self.proj, self.fc, self.out = (nn.Linear(*shape) for shape in ((8, 24), (8, 8), (8, 32), (32, 8)))

    def forward(self, x):
        T, C = x.size()
        q, k, v = (t.view(T, 2, C // 2).transpose(0, 1) for t in self.attn(self.ln_1(x)).split(C, dim=1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(T, C))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("make", [partial(Scores, True), partial(Scores, False), Packed, GPTBlock])
def test_a_trace_is_that_of_the_stock_model(make, trains, recorded):
    """With torch's own check, which traces a second time."""
    stock = make().train(trains)
    model = patch_model(copy.deepcopy(stock))
    for _ in range(3 * recorded):
        model(rows())
    expected, found = (torch.jit.trace(m, (rows(),)) for m in (stock, model))
    kinds = [[node.kind() for node in traced.inlined_graph.nodes()] for traced in (expected, found)]
    assert kinds[1] == kinds[0]
    torch.testing.assert_close(found(rows()), stock(rows()))


@pytest.mark.parametrize(("make", "x"), [(mlp, rows()), (cells, images())])
def test_symbolic_trace_gives_the_graph_of_the_unpatched_model(make, x):
    model = patch_model(make())
    traced, stock = torch.fx.symbolic_trace(model), torch.fx.symbolic_trace(make())
    assert [(n.op, n.target) for n in traced.graph.nodes] == [(n.op, n.target) for n in stock.graph.nodes]
    same(traced, make(), x)


class Branching(nn.Module):
    """Cannot be recorded as a whole, but torch.fx follows it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, **options):
        h = torch.softmax(self.linear(x) * 2, dim=-1)
        return h + options.get("more", 0)


def test_symbolic_trace_of_stretches():
    model = Branching()
    traced = torch.fx.symbolic_trace(patch_model(model))
    assert patch_report(model)[""].fused
    assert torch.softmax in [node.target for node in traced.graph.nodes]
    torch.testing.assert_close(traced(rows()), undone(model)(rows()))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["patched, compiled", "compiled, patched"])
def test_the_compile_method(order):
    model, stock = mlp(), mlp()
    torch._dynamo.reset()
    for action in order.split(", "):
        if action == "patched":
            patch_model(model)
        else:
            model.compile(backend="aot_eager")
            same(model, stock, rows())
    same(model, stock, rows())
    unpatch_model(model)
    same(model, stock, rows())
    patch_model(model)
    model[0].act = stock[0].act = nn.ReLU()
    same(model, stock, rows())


def test_functional_calls_and_transforms():
    model, stock = patch_model(mlp()), mlp()
    parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}

    def call(either, parameters, x):
        return torch.func.functional_call(either, parameters, (x,))

    torch.testing.assert_close(call(model, parameters, rows()), call(stock, parameters, rows()))
    torch.testing.assert_close(torch.func.vmap(model)(rows()), torch.func.vmap(stock)(rows()))
    torch.testing.assert_close(torch.func.jacrev(model)(rows()), torch.func.jacrev(stock)(rows()))
    torch.testing.assert_close(torch.func.jvp(model, (rows(),), (rows(),)), torch.func.jvp(stock, (rows(),), (rows(),)))
    clones = [model, copy.deepcopy(model)]
    stacked, buffers = torch.func.stack_module_state(clones)
    base, x = copy.deepcopy(model).to("meta"), rows()
    both = torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(stacked, buffers)
    torch.testing.assert_close(both, torch.stack([stock(x)] * 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_patched_blocks(reentrant):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            for block in self:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model, stock = Checkpointed(*mlp(True)), Checkpointed(*mlp(True))
    same(patch_model(model), stock, rows())


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
    torch.manual_seed(0)
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


def test_a_layer_of_a_loop_that_is_taken_out():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)])
            self.acts = nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()})

        def forward(self, x):
            for layer in self.layers:
                x = F.relu(layer(x)) + x
            for act in self.acts.values():
                x = act(x) + x
            return x

    for change in (
        lambda model: model.layers.__delitem__(1),
        lambda model: model.layers.append(nn.Sigmoid()),
        lambda model: model.acts.pop("a"),
        lambda model: model.acts.update({"c": nn.Tanh()}),
    ):
        model = patch_model(Loop())
        change(model)
        same(model, undone(model), rows())


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
def test_changes_of_adapters_are_honoured(what, monkeypatch):
    """A layer of peft asks which adapters are active, and whether they are merged, in every forward."""
    peft = pytest.importorskip("peft")
    ran, run = [], Region.run
    monkeypatch.setattr(Region, "run", lambda self, *args: ran.append(self) or run(self, *args))
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
