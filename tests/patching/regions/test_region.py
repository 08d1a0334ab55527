"""Regions: forwards that run as one node of autograd, against the same forwards op by op."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import fastlayers
from fastlayers.patching import plan
from fastlayers.patching.reasons import PatchWarning
from fastlayers.patching.regions import demand
from fastlayers.patching.regions import region as regions
from fastlayers.patching.regions.demand import FREE
from fastlayers.patching.regions.entries import no_regions
from fastlayers.patching.regions.region import size_of
from tests.harness import DEVICES, assert_no_worse, needs_gpu
from tests.patching.networks import Parts
from tests.patching.regions import blocks
from tests.patching.regions.blocks import (
    Attend,
    Block,
    Bottleneck,
    Cross,
    FlashBlock,
    Idioms,
    Plain,
    Spellings,
    images,
    in_regions,
    outcome,
    recorded,
    repeated,
    same,
    tokens,
)

pytestmark = [
    pytest.mark.cpu_kernels,
    pytest.mark.usefixtures("from_the_first_call", "any_size", "executor", "operations_of_torch"),
]


class Many(Parts):
    """Several results, one without a gradient and one that is no tensor; and keyword arguments."""

    def forward(self, x, *, scale=1.0, more=None, **options):
        y = self.norm(self.a(x).relu() * scale)
        z = self.b(y) + (0 if more is None else more["other"]) + options.get("shift", 0)
        return z.tanh(), {"best": z.argmax(-1), "rank": z.dim()}, z.sigmoid() * y


def traces(monkeypatch):
    """The modules whose calls were traced, from now on."""
    seen = []
    original = regions.read_by

    def read_by(module, *rest):
        seen.append(module)
        return original(module, *rest)

    monkeypatch.setattr(regions, "read_by", read_by)
    return seen


def itself():
    x = tokens(2, 3, 8)
    return x, x, (x, tokens(8))


class ChannelsLast(nn.Module):
    """A view of a view, with strides of its own in a dimension of one element."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return (self.norm(x.permute(0, 2, 3, 1)).tanh() * 2).permute(0, 3, 1, 2).flatten(2)


CASES = [
    (ChannelsLast, lambda: (tokens(2, 8, 1, 1),)),
    (Block, lambda: (tokens(),)),
    (lambda: Block(p=0.3), lambda: (tokens(),)),
    (Block, lambda: (tokens(), torch.randn(5, 5))),
    (Bottleneck, lambda: (images(),)),
    (Bottleneck, lambda: (images().detach().to(memory_format=torch.channels_last).requires_grad_(),)),
    (FlashBlock, lambda: (tokens(),)),
    (FlashBlock, lambda: (tokens(), torch.randn(5, 5))),
    (Spellings, lambda: (tokens(2, 3, 8),)),
    (Idioms, lambda: (tokens(2, 3, 8),)),
    (Spellings, lambda: (tokens(2, 3, 8), tokens(8))),
    (Plain, lambda: (tokens(2, 3, 8),)),
    (Cross, itself),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode", "autocast"])
@pytest.mark.parametrize(("make", "inputs"), CASES)
def test_bit_equal(make, inputs, mode, device, runs, deterministic):
    module = make().train(mode in ("train", "autocast")).to(device)
    region, moved = in_regions(module), {}
    args = torch.utils._pytree.tree_map(
        lambda t: moved.setdefault(id(t), t.detach().to(device).requires_grad_(t.requires_grad)), inputs()
    )
    context = {
        "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast(device, torch.bfloat16),
    }.get(mode, torch.enable_grad)  # fmt: skip
    for _ in range(3):
        with context():
            same(module, region, *args)
    assert runs == [True, False, False]


class Precise(nn.Module):
    """A product in float32 whatever the precision around it, as routers of experts and rotary code have it."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.weight = nn.Linear(width, width), nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return (x.float() @ self.weight).sigmoid() * x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [Precise, Block])
def test_a_backward_outside_of_autocast(make, device, runs, deterministic):
    """It computes in the dtypes of the forward: a product in float32 has gradients in float32."""
    module = make().to(device)
    region, x = in_regions(module), tokens().to(device)
    found = []
    for kind in (module, region, region):
        kind.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            out = kind(x)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *kind.parameters()])])
    assert runs == [True, False]
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_outside_of_autocast(device):
    module = Block().to(device)
    x = tokens().to(device)
    with torch.autocast(device, torch.bfloat16):
        region = recorded(module, x)

    def second(module, x):
        with torch.autocast(device, torch.bfloat16):
            out = module(x)
        (dx,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, module.gamma])

    assert_no_worse(second(region, x), second, module, x)


def replace_object(module):
    class Other(Attend):
        def gain(self, x):
            return x * 5

    module.attend = Other()


def replace_call(module):
    module.attend.gain = lambda x: x - 1


OF_AN_OBJECT = {
    "object": replace_object,
    "method of the object": replace_call,
    "its attribute": lambda module: setattr(module.attend, "power", 3),
    "class attribute": (Attend, "power", 2),
    "method": (Attend, "gain", lambda self, x: x * 7),
    "property": (Attend, "half", property(lambda self: 0.25)),
    "call": (Attend, "__call__", lambda self, module, x, shift=0.0: module.fc(x) - shift),
    "its signature": (Attend, "__call__", lambda self, module, x: module.fc(x)),
    "script function": (blocks, "scaled", lambda x, factor: x * factor),
}


@pytest.mark.parametrize("change", OF_AN_OBJECT)
def test_a_replaced_part_of_an_object_is_seen(change, runs, monkeypatch):
    module, x = Spellings(), tokens(2, 3, 8)
    region = repeated(module, x)
    before = module(x)[0]
    change = OF_AN_OBJECT[change]
    if isinstance(change, tuple):
        monkeypatch.setattr(*change)
    else:
        change(module), change(region)
    for _ in range(3):
        same(module, region, x)
    assert not torch.equal(module(x)[0], before)
    assert runs[:2] == [True, False]


def test_a_branch_that_was_not_taken(runs):
    module, x = Spellings(), tokens(2, 3, 8)
    region = repeated(module, x, calls=1)
    for each in (module, region):
        each.steps = 4
    for _ in range(3):
        same(module, region, x)
    assert module.steps == region.steps == 7
    assert runs == [True]


@pytest.mark.parametrize("device", DEVICES)
def test_several_results_and_keywords(device, runs):
    module = Many(a=nn.Linear(8, 8), b=nn.Linear(8, 8), norm=nn.LayerNorm(8)).to(device)
    region, x = in_regions(module), tokens(3, 8, device=device)
    for options in ({}, {"scale": 2.0}, {"more": {"other": torch.ones(8, device=device)}}, {"shift": 1}):
        for _ in range(2):
            same(module, region, x, **options)
            _, more, _ = region(x, **options)
        assert more["rank"] == 2
        assert not more["best"].requires_grad
    assert runs.count(True) == 4


def test_blocks_that_differ_in_a_number_share_their_class(runs):
    known = {}
    stock = nn.Sequential(*(Block(index=i) for i in range(3)))
    blocks = nn.Sequential(*(in_regions(block, known) for block in stock))
    assert len({type(block) for block in blocks}) == 1
    for _ in range(2):
        same(stock, blocks, tokens())
    assert runs == [True] * 3 + [False] * 3
    assert len(type(blocks[0]).__fastlayers_region__.readers) == 1


class Scaled(Block):
    def forward(self, x, scale):
        return super().forward(x) * scale


def test_numbers_that_keep_changing_are_recorded_ever_later(runs, monkeypatch):
    """The fourth one at its second call, the fifth at its fourth, and so on."""
    monkeypatch.setattr(demand, "FREE", 2)
    module = Scaled()
    region = in_regions(module)
    for number, calls in enumerate((1, 1, 1, 2, 4, 8), start=1):
        for call in range(1, calls + 1):
            runs.clear()
            same(module, region, tokens(), float(number))
            assert runs == [True] * (call == calls)
    monkeypatch.setattr(demand, "PAYING", 5)
    for _ in range(20):  # which pay for four of the six
        same(module, region, tokens(), 3.0)
    runs.clear()
    same(module, region, tokens(), 9.0)
    assert runs == [True]


def test_alike_layers_share_what_changing_numbers_may_cost(runs, monkeypatch):
    monkeypatch.setattr(demand, "FREE", 2)
    known = {}
    stock = [Scaled() for _ in range(4)]
    layers = [in_regions(block, known) for block in stock]
    for scale in range(1, 9):
        for module, region in zip(stock, layers, strict=True):
            same(module, region, tokens(), float(scale))
    assert runs == [*[True, False, False, False] * 3]  # not once more by each layer


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("mask", mask)

    def forward(self, x):
        y = torch.sin(self.linear(x)).cos()
        return y if self.mask is None else y + self.mask


def test_layers_of_one_class_with_and_without_a_buffer(runs):
    """As the blocks of a Swin have an attention mask or None."""
    known = {}
    stock = [Masked(mask) for mask in (torch.randn(16), None, torch.randn(16), None)]
    layers = [in_regions(block, known) for block in stock]
    for _ in range(2):
        for module, region in zip(stock, layers, strict=True):
            same(module, region, tokens(2, 3, 16))
    assert runs == [True, True, *[False] * 6]


def test_many_layers_of_one_class(runs):
    """Each has its own widths."""
    known = {}
    stock = [Block(4 * i) for i in range(1, 10 * FREE + 3)]
    layers = [in_regions(block, known) for block in stock]
    for _ in range(2):
        for i, (module, region) in enumerate(zip(stock, layers, strict=True), start=1):
            same(module, region, tokens(2, 3, 4 * i))
    assert runs == [True] * len(layers) + [False] * len(layers)


def test_a_hook_from_the_start(runs, monkeypatch):
    """It costs no trace in every call; once it is gone, a region is made."""
    known = {}
    module = in_regions(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), known)
    other = in_regions(nn.Sequential(nn.Linear(8, 8)), known)
    x, traced = tokens(2, 8), traces(monkeypatch)
    for _ in range(2):
        other(x)
    handle = module[0].register_forward_hook(lambda *_: None)
    for _ in range(10 * FREE + 5):
        module(x)
    assert len(traced) < 5
    assert len(runs) == 2
    handle.remove()
    for _ in range(2):
        module(x)
    assert len(runs) == 4


def test_what_is_seen_once_is_not_recorded(runs, monkeypatch):
    monkeypatch.setattr(demand, "CALLS", 2)
    module = Block()
    region = in_regions(module)
    same(module, region, tokens())
    same(module, region, tokens(), torch.zeros(5, 5))
    assert runs == []


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class Bottlenecks(nn.Module):
    """Convolutions over channels of 64 values, as in a hybrid network."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Bottleneck(), Bottleneck()

    def forward(self, x):
        return self.second(self.first(x.unflatten(2, (8, 8)))).flatten(2)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_recorded_kernels(training, autocast, dtype, runs, deterministic):
    """Kernels of CUDA C++ and of Triton do in a region what they do op by op."""
    model = nn.Sequential(Block(64), Block(64, p=0.2), Bottlenecks()).to("cuda", dtype).train(training)
    region = fastlayers.patch_model(model)
    alone = copy.deepcopy(region)
    x = torch.randn(4, 8, 64, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for _ in range(3):
            with no_regions():
                expected = outcome(alone, x)
            torch.testing.assert_close(outcome(region, x), expected, rtol=0, atol=0)
    assert runs.count(False) == 2 * runs.count(True) > 0


@needs_gpu
def test_captured_in_a_cuda_graph(runs):
    model = fastlayers.patch_model(nn.Sequential(Block(64), Block(64)).cuda())
    x = torch.randn(2, 8, 64, device="cuda", requires_grad=True)
    wanted = [x, *model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = torch.autograd.grad(model(x).square().sum(), wanted)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(model(x).square().sum(), wanted)
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)
    assert runs.count(False) > 2


@needs_gpu
def test_captured_before_it_is_recorded(runs):
    """A capture is no place to record: the forward runs op by op then."""
    model = fastlayers.patch_model(nn.Sequential(Block(64)).cuda()).eval()
    x = torch.randn(2, 8, 64, device="cuda")
    with torch.no_grad(), no_regions():
        expected = model(x)  # what has to be loaded or compiled
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = model(x)
    graph.replay()
    assert torch.equal(captured, expected)
    assert not runs


FIRST_RECORDING = """
import gc
import torch
import fastlayers
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.second(self.first(x).sin().cos())

model = fastlayers.patch_model(Net())
gc.collect()
gc.disable()
for _ in range(2):
    model(torch.randn(8, 4)).sum().backward()
print(sum(isinstance(t, torch.Tensor) and t.shape == (8, 64) for t in gc.get_objects()))
"""


@pytest.mark.slow  # and not one for each executor
def test_the_first_recording_of_a_process_leaves_no_garbage(tmp_path):
    """What torch imports for it left the frames of its callers in a cycle, and with them tensors."""
    script = tmp_path / "script.py"
    script.write_text(FIRST_RECORDING)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"


class Waves(nn.Module):
    """No rule has anything for it."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(8, 8)), nn.Identity()

    def forward(self, x):
        return self.last(torch.sin(x @ self.weight).cos() @ self.weight)


def test_which_modules_become_regions(monkeypatch):
    def is_region(module):
        return hasattr(type(module), "__fastlayers_region__")

    with pytest.warns(PatchWarning, match="no rule fuses anything in Sequential"):
        alone = fastlayers.patch_model(nn.Sequential(Waves(), nn.Identity()))
    assert is_region(alone)
    waves = nn.Sequential(*(Waves() for _ in range(8)))
    size = len([*waves.modules()])
    for most in ("MAX_MODULES", "MAX_WHOLE"):
        monkeypatch.setattr(plan, most, size)
    large = nn.Sequential(waves, Block(8))
    fastlayers.patch_model(model := nn.Sequential(large))
    assert [*map(is_region, (model, large, waves, waves[0], large[1]))] == [False, False, True, True, True]
    for limit in (size, size - 1):
        monkeypatch.setattr(plan, "MAX_WHOLE", limit)
        whole = nn.Sequential(nn.LayerNorm(8), *(Waves() for _ in range(7)), nn.Identity())
        assert len([*whole.modules()]) == size
        assert is_region(fastlayers.patch_model(whole)) is (limit == size)
        inner = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), nn.Sequential(whole, Listed(whole))))[1]
        assert [*map(is_region, inner)] == [limit == size, True]  # A list of modules does not count.
    inner = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), nn.Sequential(whole, Listed([*whole, Waves()]))))[1]
    assert [*map(is_region, inner)] == [False, False]
    monkeypatch.setattr(plan, "MAX_MODULES", size_of(inner[1]))
    inner = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), nn.Sequential(whole, Listed([*whole, Waves()]))))[1]
    assert [*map(is_region, inner)] == [False, True]


class Listed(nn.Module):
    """Calls layers one after the other, as a Sequential does, and does something itself."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_whole_model_that_is_a_region_in_inference_alone(runs, monkeypatch):
    """Its gradients would all come at the end of its backward."""
    stock = Listed([Waves() for _ in range(4)])
    monkeypatch.setattr(plan, "MAX_WHOLE", size_of(stock) - 1)
    model = fastlayers.patch_model(copy.deepcopy(stock))
    root, x = type(model).__fastlayers_region__, tokens(2, 3, 8)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(model(x), stock(x))
        same(stock, model, x)
    assert [entry.facts.wanted for entries in root.entries.values() for entry in entries] == [0]
    assert runs.count(False) > 2  # Its layers are regions in training.


def test_a_region_of_too_many_operations_is_left_to_smaller_ones(monkeypatch):
    stock = nn.Sequential(Block(8), Block(8))
    model = fastlayers.patch_model(copy.deepcopy(stock))
    regions_made = [type(each).__fastlayers_region__ for each in (model, model[0])]
    x = tokens(2, 3, 8)
    monkeypatch.setattr(regions, "MOST", 150)
    monkeypatch.setattr(regions, "FEW_MODULES", 12)
    for _ in range(3):
        torch.testing.assert_close(model(x), stock(x))
    found = [[entry.refusal for several in region.entries.values() for entry in several] for region in regions_made]
    assert [bool(refusal) for (refusal,) in found] == [True, False]


def test_a_sequential_is_tried_where_another_one_was_too_small():
    """Both are of one class, and have nothing else in common."""
    small, large = nn.Sequential(nn.Identity(), nn.Identity()), nn.Sequential(*(Waves() for _ in range(3)))
    model = fastlayers.patch_model(nn.Sequential(nn.LayerNorm(8), Apart(small), Apart(small), Apart(large)))
    for _ in range(8):
        model(tokens(2, 3, 8)).sum().backward()
    region = type(large).__fastlayers_region__
    assert region is not type(small).__fastlayers_region__
    assert any(entry.refusal is None for several in region.entries.values() for entry in several)


class Apart(nn.Module):
    """No region, since it depends on values."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if bool(x.isfinite().all()) else x
