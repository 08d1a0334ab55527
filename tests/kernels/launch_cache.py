"""The launcher's cache: one compilation for each specialisation, and none of Triton's own work after that."""

import pytest
import torch

from fastlayers.kernels import elementwise, rotary, softmax
from fastlayers.kernels import launch as module
from fastlayers.kernels.launch import Launch


class Compiled:
    function, packed_metadata = 7, "metadata"

    def __init__(self, log):
        self.log = log

    def run(self, *args):
        self.log.append(("direct", *args))


class Function:
    """Stands for a JITFunction: function[grid](...) compiles and launches."""

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        def launch_with_triton(*args, num_warps):
            self.log.append(("triton", grid, args, num_warps))
            return Compiled(self.log)

        return launch_with_triton


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    launch = Launch(Function([]), 3, (48, 1.5), (True, 8), 4)
    launch.direct = True
    return launch


def test_this_triton_is_launched_directly():
    assert module._run_is_as_expected()


def test_second_call_is_direct(launch):
    x = torch.empty(64)
    launch(x, None)
    launch(x, None)
    assert launch.function.log == [
        ("triton", (3,), (x, None, 48, 1.5, True, 8), 4),
        ("direct", 3, 1, 1, 99, 7, "metadata", None, None, None, x.data_ptr(), 0, 48, 1.5, True, 8),
    ]


def test_alignment_and_presence_are_specialised_on(launch):
    x = torch.empty(64)
    for tensors in [(x, x), (x[1:], x), (x, x[1:]), (x, None)]:
        launch(*tensors)
    assert [entry[0] for entry in launch.function.log] == ["triton"] * 4
    for tensors in [(x[4:], x), (x[2:], x[8:]), (x, x[3:]), (x[12:], None)]:
        launch(*tensors)
    assert [entry[0] for entry in launch.function.log[4:]] == ["direct"] * 4


def test_a_profilers_hook_sees_every_launch(launch, monkeypatch):
    x = torch.empty(4)
    launch(x)
    monkeypatch.setattr(module, "_hooked", lambda: True)
    launch(x)
    assert [entry[0] for entry in launch.function.log] == ["triton", "triton"]


@pytest.fixture
def used(monkeypatch):
    used = []
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: used.append(self))
    return used


def test_wrappers_keep_a_launch_for_each_specialisation(used):
    x, f = torch.empty(6, 64, dtype=torch.bfloat16), torch.empty(6, 64)
    keep = torch.ones(6, 64, dtype=torch.bool)
    different = [
        lambda: softmax.softmax_forward(x, 1, 1.0, None, x.dtype, False),
        lambda: softmax.softmax_forward(x, 1, 1.0, None, x.dtype, True),
        lambda: softmax.softmax_forward(x, 1, 2.0, None, x.dtype, False),
        lambda: softmax.softmax_forward(x, 0, 1.0, None, x.dtype, False),
        lambda: softmax.softmax_forward(x, 1, 1.0, None, torch.float32, False),
        lambda: softmax.softmax_forward(x, 1, 1.0, keep, x.dtype, False),
        lambda: softmax.softmax_forward(x, 1, 1.0, f, x.dtype, False),
        lambda: softmax.softmax_forward(x[:, :32], 1, 1.0, None, x.dtype, False),
        lambda: softmax.softmax_backward(x, x, 1, 1.0, None, x.dtype, False),
        lambda: softmax.softmax_backward(f, f, 1, 1.0, None, x.dtype, False),
        lambda: softmax.softmax_backward(x, x, 1, 1.0, keep, x.dtype, False),
        lambda: elementwise.relu_add(x, x, None, 0.0),
        lambda: elementwise.relu_add(f, f, None, 0.0),
        lambda: elementwise.relu_add(x, x, None, 1.0),
        lambda: elementwise.relu_add(x, x, x, 0.0),
        lambda: elementwise.relu_add(x, x, x[0], 0.0),
        lambda: elementwise.relu_add_train(x, x, x, 0.0),
        lambda: elementwise.add_relu(x, x),
        lambda: elementwise.add_relu_train(x, x),
        lambda: elementwise.relu_backward(x, keep),
        lambda: elementwise.mul(x, x),
        lambda: elementwise.mul(x, x[0]),
        lambda: elementwise.mul(x, x[:, :1]),
        lambda: elementwise.mul_backward(x, x, x),
        lambda: elementwise.mul_backward(x, x, x[0]),
        lambda: elementwise.mul_backward(f, f, f[0]),
        lambda: rotary.rotary(x, None, x[:1], x[:1], False, 64, False, x.dtype, 0, (64, 1), (1,)),
        lambda: rotary.rotary(x, None, x[:1], x[:1], True, 64, False, x.dtype, 0, (64, 1), (1,)),
        lambda: rotary.rotary(x, None, x[:1], x[:1], True, 64, True, x.dtype, 0, (64, 1), (1,)),
        lambda: rotary.rotary(x, None, f[:1], f[:1], True, 64, True, x.dtype, 0, (64, 1), (1,)),
        lambda: rotary.rotary(x, None, f[:1], f[:1], True, 64, True, f.dtype, 0, (64, 1), (1,)),
        lambda: rotary.rotary(x, None, x[:1, :32], x[:1, :32], True, 32, True, x.dtype, 0, (64, 1), (1,)),
    ]
    for call in different + different:
        call()
    first, second = used[: len(different)], used[len(different) :]
    assert len(set(first)) == len(different)
    assert first == second


def test_hooks_are_seen():
    hook = module.triton.knobs.runtime.launch_enter_hook
    assert not module._hooked()
    hook.add(print)
    try:
        assert module._hooked()
    finally:
        hook.remove(print)
