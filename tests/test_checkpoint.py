"""save_model and load_model: whole files or none, everything checked before anything changes."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import nn

import fastlayers
from fastlayers.checkpoint import CheckpointError, load_model, save_model
from fastlayers.patching import patch_model


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.bn(self.conv(x))
        out += x
        return self.relu(out)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.shared = nn.ModuleList([block := Block(), block])

    def forward(self, ids):
        return F.relu(self.head(self.embedding(ids))) + 1


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def seeded(build, seed):
    torch.manual_seed(seed)
    return build()


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def assert_refused(model, path, message):
    """With nothing changed."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_model(model, path)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def keys_of(path):
    with safe_open(path, "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_round_trip_patched_or_not(path, saved, loaded):
    model, other = seeded(Block, 0), seeded(Block, 1)
    model(torch.randn(2, 4, 5, 5))
    if saved:
        patch_model(model)
    if loaded:
        patch_model(other)
    save_model(model, path)
    assert keys_of(path) == set(model.state_dict())
    conv = other.conv.weight
    assert load_model(other, path) == ([], [])
    assert equal(model, other)
    assert other.conv.weight is conv
    assert other.bn.num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_dtypes(path, dtype):
    model, other = nn.Module(), nn.Module()
    model.register_buffer("t", torch.randn(3, 4).to(dtype))
    other.register_buffer("t", torch.zeros(3, 4, dtype=dtype))
    save_model(model, path)
    load_model(other, path)
    assert torch.equal(model.t.float(), other.t.float())


def test_odd_buffers(path):
    def build():
        module = nn.Module()
        base = torch.randn(4, 6)
        module.register_buffer("transposed", base.t())
        module.register_buffer("view", base[1:3, ::2])
        module.register_buffer("row", base[0])
        module.register_buffer("expanded", torch.randn(1, 3).expand(4, 3).clone())
        module.register_buffer("empty", torch.empty(0, 3))
        module.register_buffer("scalar", torch.tensor(3))
        module.register_buffer("flag", torch.tensor([True, False]))
        module.register_buffer("complex", torch.randn(2, dtype=torch.complex64))
        module.register_buffer("hidden", torch.randn(2), persistent=False)
        module.register_buffer("none", None)
        return module

    model, other = seeded(build, 0), seeded(build, 1)
    save_model(model, path)
    assert "hidden" not in keys_of(path)
    load_model(other, path)
    assert equal(model, other)
    assert other.transposed.stride() == (1, 6)


def test_channels_last_stays(path):
    model, other = seeded(Block, 0), seeded(Block, 1).to(memory_format=torch.channels_last)
    save_model(model.to(memory_format=torch.channels_last), path)
    load_model(other, path)
    assert equal(model, other)
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


# -- tied weights -----------------------------------------------------------------------------------------------------


def test_tied_weights_are_stored_once_and_stay_tied(path):
    model, other = seeded(Tied, 0), seeded(Tied, 1)
    save_model(patch_model(model), path)
    stored = keys_of(path)
    assert "embedding.weight" in stored
    assert "head.weight" not in stored
    assert not any(key.startswith("shared.1") for key in stored)
    load_model(other, path)
    assert equal(model, other)
    assert other.head.weight is other.embedding.weight


def test_tied_weights_into_a_model_that_is_not_tied(path):
    model, other = seeded(Tied, 0), seeded(Tied, 1)
    other.head.weight = nn.Parameter(torch.zeros(7, 3))
    save_model(model, path)
    load_model(other, path)
    assert torch.equal(other.head.weight, model.embedding.weight)
    assert other.head.weight is not other.embedding.weight


def test_untied_weights_into_a_tied_model(path):
    model, other = seeded(Tied, 0), seeded(Tied, 1)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    save_model(model, path)
    assert "head.weight" in keys_of(path)
    load_model(other, path)
    with torch.no_grad():
        model.head.weight += 1
    save_model(model, path)
    assert_refused(other, path, "embedding.weight and head.weight are one tensor in the model, and two different")


def test_one_name_of_several_is_enough(path):
    model, other = seeded(Tied, 0), seeded(Tied, 1)
    state = {key: value for key, value in model.state_dict().items() if not key.startswith(("embedding", "shared.0"))}
    save_file({key: value.clone() for key, value in state.items()}, path)
    load_model(other, path)
    assert equal(model, other)


# -- wrappers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel, lambda m: nn.DataParallel(torch.compile(m))]
)
def test_wrappers_do_not_show_in_the_keys(path, wrap):
    model, other = seeded(Block, 0), seeded(Block, 1)
    save_model(wrap(model), path)
    assert keys_of(path) == set(model.state_dict())
    load_model(wrap(other), path)
    assert equal(model, other)


def test_a_wrapper_inside_a_model(path):
    model, other = (seeded(lambda: nn.Sequential(Block(), Block()), seed) for seed in range(2))
    plain = set(model.state_dict())
    model[1] = torch.compile(model[1], backend="eager")
    save_model(model, path)
    assert keys_of(path) == plain
    load_model(other, path)
    assert torch.equal(model[1].conv.weight, other[1].conv.weight)


def test_a_child_that_is_called_module_keeps_its_name(path):
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    model._orig_mod = nn.Linear(2, 2)
    save_model(model, path)
    assert keys_of(path) == set(model.state_dict())


# -- the file ---------------------------------------------------------------------------------------------------------


def test_metadata(path):
    save_model(Tied(), path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert metadata["fastlayers"] == fastlayers.__version__
    assert json.loads(metadata["tied"])["head.weight"] == "embedding.weight"


def test_a_file_is_replaced_whole_or_not_at_all(path, monkeypatch):
    model, other = seeded(Block, 0), seeded(Block, 1)
    save_model(model, path)
    before = path.read_bytes()

    def fails(tensors, filename, metadata):
        filename.write_bytes(b"half a fi")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="no space left"):
        save_model(other, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_saving_over_a_file_and_to_a_string_path(path):
    model, other = seeded(Block, 0), seeded(Block, 1)
    save_model(other, path)
    save_model(model, str(path))
    load_model(other, str(path))
    assert equal(model, other)
    assert os.listdir(path.parent) == [path.name]


def test_places_that_cannot_be_written(path):
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        save_model(Block(), path.parent / "nowhere" / "model.safetensors")
    with pytest.raises(IsADirectoryError, match="it is a directory"):
        save_model(Block(), path.parent)


@pytest.mark.parametrize("damage", ["truncated", "header", "empty", "text", "tied"])
def test_a_damaged_file(path, damage):
    model = Block()
    save_model(model, path)
    data = path.read_bytes()
    if damage == "tied":
        save_file({"x": torch.ones(1)}, path, {"tied": "{not json"})
    else:
        damaged = {"truncated": data[:-10], "header": b"\xff" * 20 + data[20:], "empty": b"", "text": b"hello, world"}
        path.write_bytes(damaged[damage])
    assert_refused(model, path, f"{re.escape(str(path))} is not a whole safetensors file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
DTYPES = st.sampled_from(["F64", "F32", "F16", "BF16", "I64", "I8", "BOOL", "U8", "F8_E4M3", "F32 ", "", "X"])
PLACES = st.integers(-3, 700) | st.sampled_from([2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64])


@st.composite
def hostile_files(draw):
    """Files beside a whole one: with another header, another length of it, other bytes, or fewer or more of them."""
    data = WHOLE
    length = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + length], data[8 + length :]
    what = draw(st.sampled_from(["entry", "entries", "metadata", "length", "bytes", "cut", "more", "twice"]))
    if what in ("entry", "entries", "metadata"):
        table = json.loads(header)
        key = draw(st.sampled_from([*table]))
        if what == "entries":
            table[draw(st.text(max_size=30))] = table.pop(key)
        elif what == "metadata":
            table["__metadata__"] = draw(JSON | st.builds(lambda tied: {"tied": json.dumps(tied)}, JSON))
        else:
            entry = table[key]
            part = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            values = DTYPES if part == "dtype" else st.lists(PLACES, max_size=4)
            entry[part] = draw(values | JSON)
        header = json.dumps(table).encode()
    elif what == "twice":
        header = header.rstrip()[:-1] + b', "bn.bias": ' + json.dumps(json.loads(header)["bn.weight"]).encode() + b"}"
    elif what == "bytes":
        place, new = draw(st.integers(0, len(header) - 1)), draw(st.binary(min_size=1, max_size=9))
        header = header[:place] + new + header[place + len(new) :]
    whole = len(header).to_bytes(8, "little") + header + rest
    if what == "length":
        whole = (draw(PLACES) % 2**64).to_bytes(8, "little") + whole[8:]
    elif what == "cut":
        whole = whole[: draw(st.integers(0, len(whole) - 1))]
    elif what == "more":
        whole += draw(st.binary(min_size=1, max_size=99))
    return whole


WHOLE = save({key: value.contiguous() for key, value in Block().state_dict().items()}, {"tied": "{}"})


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=hostile_files())
def test_a_hostile_file_is_refused_or_fits_and_changes_nothing_else(path, data):
    path.write_bytes(data)
    model = seeded(Block, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load_model(model, path)
    except CheckpointError:
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    else:
        assert {key: (t.shape, t.dtype) for key, t in model.state_dict().items()} == {
            key: (t.shape, t.dtype) for key, t in before.items()
        }


@pytest.mark.parametrize("tied", ["[1]", "3", "null", '{"bn.bias": ["bn.weight"]}', "[" * 5000 + "]" * 5000])
def test_a_table_of_tied_names_that_is_none(path, tied):
    save_file(dict(Block().state_dict()), path, {"tied": tied})
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load_model(Block(), path)


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_model(Block(), path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_model(Block(), path.parent)


# -- what does not fit ------------------------------------------------------------------------------------------------


def change(path, edit):
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("bn.bias"), r"missing key: bn.bias \(float32 \[4\]\)"),
        (lambda t: t.update(extra=torch.ones(2, 3)), r"unexpected key: extra \(float32 \[2, 3\]\)"),
        (
            lambda t: t.update({"bn.bias": torch.ones(5)}),
            r"bn.bias: the file has float32 \[5\], the model expects float32 \[4\]",
        ),
        (
            lambda t: t.update({"bn.bias": torch.ones(4).half()}),
            r"bn.bias: the file has float16 \[4\], the model expects float32",
        ),
        (lambda t: t.update({"bn.bias": torch.ones(4, dtype=torch.int64)}), r"bn.bias: the file has int64 \[4\]"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(path, edit, message):
    save_model(seeded(Block, 0), path)
    change(path, edit)
    assert_refused(seeded(Block, 1), path, f"(?s)does not fit Block; nothing was loaded:.*{message}")


def test_all_differences_are_named_at_once(path):
    save_model(Block(3), path)
    with pytest.raises(CheckpointError) as caught:
        load_model(Block(4), path)
    assert all(key in str(caught.value) for key in ("conv.weight", "conv.bias", "bn.running_mean"))


def test_not_strict(path):
    save_model(seeded(Block, 0), path)
    change(path, lambda t: (t.pop("bn.bias"), t.update(extra=torch.ones(2))))
    model = seeded(Block, 1)
    assert load_model(model, path, strict=False) == (["bn.bias"], ["extra"])
    assert torch.equal(model.conv.weight, seeded(Block, 0).conv.weight)
    change(path, lambda t: t.update({"conv.bias": torch.ones(9)}))
    with pytest.raises(CheckpointError, match=r"conv\.bias"):
        load_model(model, path, strict=False)


def test_models_that_cannot_be_saved(path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    sparse = nn.Module()
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    for model, message in [
        (Extra(2, 2), "cannot save _extra_state: a safetensors file holds tensors, and this is a dict"),
        (sparse, "cannot save s: its layout is torch.sparse_coo"),
        (nn.Linear(2, 2, device="meta"), "cannot save weight: it is on the meta device"),
        (nn.LazyLinear(2), "cannot save weight: it is a UninitializedParameter"),
        ({"a": 1}, "expected a torch.nn.Module, got dict"),
    ]:
        with pytest.raises(TypeError, match=message):
            save_model(model, path)
    assert not path.exists()


def test_loading_into_the_meta_device(path):
    save_model(nn.Linear(2, 2), path)
    with pytest.raises(CheckpointError, match="weight: the model has it on the meta device"):
        load_model(nn.Linear(2, 2, device="meta"), path)
