"""python -m fastlayers info and build."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import fastlayers
from fastlayers import backends, cli
from fastlayers import build as builder
from fastlayers.patching.program import executors


@pytest.fixture
def run(monkeypatch):
    """Run a command, wide enough that no table breaks its lines."""
    monkeypatch.setattr(cli.console, "width", 1000)
    return lambda *arguments: CliRunner().invoke(cli.main, arguments)


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fastlayers", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: python -m fastlayers ")


def test_info_names_versions_and_every_backend(run):
    result = run("info")
    assert result.exit_code == 0, result.output
    for expected in (fastlayers.__version__, str(torch.__version__), *backends.BACKENDS):
        assert expected in result.output
    for reason in backends.available().values():
        assert reason is None or reason in result.output


def test_info_says_why_nothing_was_built(run, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "LIBRARY", tmp_path / "_C.so")
    builder.BuildInfo(problem="no C++ compiler on Sundays").write(tmp_path / "_C.so")
    assert "not built: no C++ compiler on Sundays" in run("info").output


@pytest.mark.parametrize(
    ("name", "expected"),
    [("eager", "eager, forced\n"), ("metal", "unknown backend 'metal'; expected one of eager")],
)
def test_info_says_what_the_environment_forces(run, monkeypatch, name, expected):
    assert "FASTLAYERS_BACKEND" not in run("info").output
    monkeypatch.setenv("FASTLAYERS_BACKEND", name)
    assert expected in run("info").output


def test_info_survives_a_forced_backend_that_is_absent():
    reason = backends.problem("cuda")
    environment = os.environ | {"FASTLAYERS_BACKEND": "cuda", "COLUMNS": "1000"}
    command = [sys.executable, "-m", "fastlayers", "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert reason is None or f"cuda, forced, but every call of an op raises: {reason}" in done.stdout


def test_info_says_how_to_get_a_backend(monkeypatch):
    assert "NVIDIA GPU" in cli._how_to_get("cuda") or torch.cuda.is_available()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert cli._how_to_get("cuda") == "install the CUDA toolkit (for its nvcc), then run `python -m fastlayers build`"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli._how_to_get("cpu").startswith("no C++ compiler: CXX='no-such-compiler'")


def test_info_says_how_to_get_cuda_kernels_without_a_gpu(run, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "LIBRARY", tmp_path / "_C.so")
    builder.LIBRARY.touch()
    builder.BuildInfo(problem=builder.NO_GPU).write(builder.LIBRARY)
    assert "FASTLAYERS_CUDA_ARCHS=90 python -m fastlayers build" in run("info").output


def test_build_reports_what_it_made(run, monkeypatch, tmp_path):
    def build_in_place(report):
        report(1, 1, "_C.so")
        return builder.BuildInfo(cuda_archs=("90",))

    monkeypatch.setattr(builder, "build_in_place", build_in_place)
    result = run("build")
    assert result.exit_code == 0, result.output
    assert f"{builder.LIBRARY}: CPU kernels and CUDA kernels for sm_90" in result.output


def test_build_of_what_runs_regions(run, monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "build_regions", lambda report: tmp_path / "_regions.so")
    monkeypatch.setattr(builder, "build_in_place", lambda report: pytest.fail("the kernels must stay"))
    result = run("build", "--regions")
    assert result.exit_code == 0, result.output
    assert "_regions.so" in result.output


@pytest.mark.parametrize(("problem", "expected"), [(None, "C++"), ("not built on Sundays", "Python: not built on")])
def test_info_says_what_runs_regions(run, monkeypatch, problem, expected):
    monkeypatch.setattr(executors, "problem", problem)
    assert f"regions are run by  {expected}" in run("info").output


def test_build_without_a_compiler(run, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run("build")
    assert result.exit_code == 1
    assert "Error: no C++ compiler: CXX='no-such-compiler'" in result.output
