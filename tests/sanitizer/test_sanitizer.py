"""What ``make test-sanitizer`` shows without a GPU: its cases claim every kernel, and it reads what the tools say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fastlayers.build import BuildError
from tests.sanitizer import __main__ as sanitizer
from tests.sanitizer import kernels, selection, worker
from tests.table import OPS
from tests.table.sample import channels_last, expanded, misaligned, row_slice, strided, transposed

CASES = selection.cases()
REPORTS = {
    "memcheck": """\
========= COMPUTE-SANITIZER
softmax: rows, float32, cuda
========= Invalid __global__ read of size 16 bytes
=========     at void fastlayers::(anonymous namespace)::softmax_forward_rows<float, float, (int)1>(fastlayers::\
(anonymous namespace)::ForwardArgs<float>)+0x1a0 in softmax_forward.cu:250
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f3a82000400 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3a82000000 of size 1024 bytes
=========
========= Program hit cudaErrorInvalidValue (error 1) due to "invalid argument" on CUDA API call to cudaLaunchKernelExC.
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
""",
    "racecheck": """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _whole_forward+0x1a0 in softmax.py:160
=========     and Read access at _whole_forward+0x2f0 in softmax.py:166 [508 hazards]
=========
========= Error: Race reported between Write access at _whole_forward+0x25f0 in layer_norm.py:136
=========     and Write access at _whole_forward+0x25f0 in layer_norm.py:136 [248 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
""",
    "initcheck": """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel<(int)512, (int)1>(T3)+0x230
=========     by thread (0,0,0) in block (0,0,0)
=========     Access to 0x7f5e71e00000
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at fused_tanh_mul__block_py_88+0x230 in <fastlayers kernel 3>:4
=========     by thread (1,0,0) in block (0,0,0)
=========     Access to 0x7f5e71e00004
=========
========= ERROR SUMMARY: 2 errors
""",
    "synccheck": "========= COMPUTE-SANITIZER\n3 cases, 0 failed\n========= ERROR SUMMARY: 0 errors\n",
}


def test_every_kernel_of_csrc_is_claimed():
    claimed = {kernel for names in selection.CLAIMED.values() for kernel in names}
    assert claimed == kernels.cuda_kernels()


def test_every_op_runs_on_each_of_its_backends():
    found = {(case.row, case.backend) for case in CASES}
    assert {(op.name, backend) for op in OPS for backend in op.kernels if backend != "cpu"} <= found
    assert set(selection.CLAIMED) <= {case.row for case in CASES}


def test_cases_have_names_of_their_own():
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("row", [op.name for op in OPS])
def test_the_plainest_case_runs(row):
    """On the CPU, on no kernel: the call is a valid one, with incoming gradients in every layout."""
    for case in CASES:
        if case.row == row and (case.name == next(c.name for c in CASES if c.row == row) or "gradient" in case.name):
            case.run("cpu")


def test_calls_that_are_no_op_run():
    selection.run_dropout(torch.bfloat16, "cpu")
    selection.run_patched(torch.float32, "cpu")
    selection.run_topk(torch.bfloat16, "cpu")


@pytest.mark.parametrize("layout", [transposed, strided, misaligned, row_slice, expanded(0), channels_last])
def test_a_tensor_keeps_its_layout(layout):
    t = layout(torch.randn(2, 3, 4, 5)).requires_grad_()
    copy = selection.on_device(t, "cpu")
    assert (copy.shape, copy.stride(), copy.storage_offset()) == (t.shape, t.stride(), t.storage_offset())
    assert torch.equal(copy, t)
    assert copy.is_leaf
    assert copy.requires_grad


def test_names_that_tools_show():
    shown = "void fastlayers::(anonymous namespace)::softmax_forward_rows<float, (int)4>(fastlayers::Args<float>)"
    assert kernels.cuda_kernel_of(shown) == "softmax_forward_rows"
    assert kernels.cuda_kernel_of("void fastlayers::add_pieces<float>(float const*)") == "add_pieces"
    assert kernels.cuda_kernel_of("void at::native::reduce_kernel<512, 1>(float)") is None
    assert all(map(kernels.is_ours, (shown, "_whole_forward", "fused_mean")))
    assert not any(map(kernels.is_ours, ("void at::native::reduce_kernel<512, 1>(float)", "ampere_sgemm_32x32_sliced")))


def test_reports():
    read = {tool: sanitizer.read_reports(log) for tool, log in REPORTS.items()}
    assert {tool: found.total for tool, found in read.items()} == {
        "memcheck": 2, "racecheck": 2, "initcheck": 2, "synccheck": 0,
    }  # fmt: skip
    (access, kernel), (call, none) = read["memcheck"].ours
    assert access == "Invalid __global__ read of size 16 bytes"
    assert "softmax_forward_rows" in kernel
    assert call.startswith("Program hit cudaErrorInvalidValue")
    assert none == ""
    race = "Error: Race reported between Write access", "_whole_forward"
    assert read["racecheck"].ours == read["racecheck"].others == {race: 1}  # Threads that write the same are no race.
    assert not sanitizer.read_reports(REPORTS["racecheck"], misjudged="_whole_forward").ours
    assert list(read["initcheck"].ours) == [
        ("Uninitialized __global__ memory read of size 4 bytes", "fused_tanh_mul__block_py_88")
    ]
    assert sum(read["initcheck"].others.values()) == 1
    assert not read["synccheck"].ours


def test_kernels_that_are_left_out():
    every = kernels.cuda_kernels() | kernels.triton_kernels()
    assert sanitizer.missing_kernels({"softmax": every}, []) == []
    assert sanitizer.missing_kernels({"softmax": every - {"softmax_forward_held"}}, []) == ["softmax_forward_held"]
    assert sanitizer.missing_kernels({"linear": {"column_sum"}}, ["linear"]) == []
    assert sanitizer.missing_kernels({"linear": set()}, ["linear"]) == ["column_sum"]
    assert sanitizer.unclaimed({"linear": set()}) == ["linear: column_sum"]


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in for compute-sanitizer: it prints a log, and does not run what it should watch."""

    def stand_in(log: str, status: int = 0) -> None:
        script = tmp_path / "compute-sanitizer"
        script.write_text(f"#!{sys.executable}\nimport sys, time\nprint({log!r})\nsys.exit({status})\n")
        script.chmod(0o755)
        monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: str(script))

    monkeypatch.setattr(sanitizer, "build_allocator", lambda folder: folder / "allocator.so")
    return stand_in


def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(sys, "argv", ["sanitizer", "--no-record", "--ops", "mul", "--logs", str(tmp_path), *arguments])
    return sanitizer.main()


@pytest.mark.parametrize(("name", "status", "fails"), [
    ("synccheck", 0, False), ("memcheck", 0, True), ("racecheck", 0, True), ("synccheck", 3, True), (None, 0, True),
])  # fmt: skip
def test_the_command_fails_where_a_tool_reports(tool, monkeypatch, tmp_path, capsys, name, status, fails):
    tool(REPORTS.get(name, "nothing"), status)
    assert bool(run(monkeypatch, tmp_path, "--tools", name or "synccheck")) == fails
    assert (name or "synccheck") in capsys.readouterr().out
    assert (tmp_path / f"{name or 'synccheck'}-2.log").exists()


def test_a_tool_that_does_not_end_is_stopped(tool, monkeypatch, tmp_path, capsys):
    tool("nothing")
    script = tmp_path / "compute-sanitizer"
    script.write_text(script.read_text().replace("sys.exit(0)", "time.sleep(600)"))
    assert run(monkeypatch, tmp_path, "--tools", "memcheck", "--limit", "1")
    assert "stopped after 1 s" in capsys.readouterr().out


def test_no_tool(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name, path: None)
    with pytest.raises(BuildError, match="nvidia-cuda-sanitizer-api"):
        sanitizer.find_sanitizer()
    assert run(monkeypatch, tmp_path)
    assert "no compute-sanitizer" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--tools", "leakcheck"], ["--ops", "softmaxes"], ["--jobs", "0"]])
def test_arguments_that_are_wrong(arguments, capsys):
    with pytest.raises(SystemExit):
        sanitizer.parsed(arguments)
    assert "expected" in capsys.readouterr().err


def test_parts_have_every_case_once():
    parts = [CASES[i::3] for i in range(3)]
    assert sorted(str(case) for part in parts for case in part) == sorted(map(str, CASES))


def test_options_of_the_tools():
    command = sanitizer.sanitizer_command("compute-sanitizer", "racecheck", 50000, Path("allocator.so"))
    assert "regex=fastlayers" in command
    assert "--allocator" not in command
    command = sanitizer.sanitizer_command("compute-sanitizer", "initcheck", 50000, Path("allocator.so"))
    assert "--kernel-name" not in command
    assert command[-3:] == ["--allocator", "allocator.so", "--no-16-bit-products"]


def test_a_failing_case_is_counted(capsys):
    def fails(device):
        raise RuntimeError("this one")

    case = selection.Case("row", "name", torch.float32, None, fails)
    assert worker.run([case] * 30) == worker.MOST_FAILURES
    assert "this one" in capsys.readouterr().out
