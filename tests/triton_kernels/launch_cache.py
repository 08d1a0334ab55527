"""The launcher's cache: one compilation for each specialisation, and none of Triton's own work after that."""

import pytest
import torch

from fastlayers.kernels import launch


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
def kernel(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    kernel = launch.Kernel(Function([]))
    kernel.direct = True
    kernel.log = kernel.function.log
    return kernel


def test_this_triton_is_launched_directly():
    assert launch._run_is_as_expected()


def test_second_launch_is_direct(kernel):
    x = torch.empty(64)
    for _ in range(2):
        kernel(3, (x, None, 48, 1.5), (True, 8), 4)
    assert kernel.log == [
        ("triton", (3,), (x, None, 48, 1.5, True, 8), 4),
        ("direct", 3, 1, 1, 99, 7, "metadata", None, None, None, x.data_ptr(), None, 48, 1.5, True, 8),
    ]


def test_everything_that_triton_specialises_on_compiles_anew(kernel):
    x = torch.empty(64)
    launches = [
        ((x, 48, 1.5), (True,), 4),
        ((x[1:], 48, 1.5), (True,), 4),
        ((x.double(), 48, 1.5), (True,), 4),
        ((x, 47, 1.5), (True,), 4),
        ((x, 1, 1.5), (True,), 4),
        ((x, 2**40, 1.5), (True,), 4),
        ((x, None, 1.5), (True,), 4),
        ((x, 48, 1.5), (False,), 4),
        ((x, 48, 1.5), (True,), 8),
    ]
    for arguments, constants, warps in launches:
        kernel(1, arguments, constants, warps)
    assert [entry[0] for entry in kernel.log] == ["triton"] * len(launches)
    same = [
        ((x[4:], 64, 2.5), (True,), 4),
        ((x[1:], 16, 0.0), (True,), 4),
        ((x, 2**41, 1.5), (True,), 4),
        ((x, 7, 1.5), (True,), 4),
    ]
    for arguments, constants, warps in same:
        kernel(1, arguments, constants, warps)
    assert [entry[0] for entry in kernel.log[len(launches) :]] == ["direct"] * len(same)


def test_a_profilers_hook_sees_every_launch(kernel, monkeypatch):
    x = torch.empty(4)
    kernel(1, (x,), (), 4)
    monkeypatch.setattr(launch, "_hooked", lambda: True)
    kernel(1, (x,), (), 4)
    assert [entry[0] for entry in kernel.log] == ["triton", "triton"]


def test_hooks_are_seen():
    hook = launch.triton.knobs.runtime.launch_enter_hook
    assert not launch._hooked()
    hook.add(print)
    try:
        assert launch._hooked()
    finally:
        hook.remove(print)
