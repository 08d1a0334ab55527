"""fastlayers/build.py and setup.py: what they find, what they compile, and when an installation may fail."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastlayers import build as builder
from tests import ROOT

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder at the head of PATH, and a function that puts a shell script there. No GPU is visible."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for variable in ("CUDA_HOME", "CUDA_PATH", "CXX", "FASTLAYERS_CUDA_ARCHS", "FASTLAYERS_BUILD_EXT", "MAX_JOBS"):
        monkeypatch.delenv(variable, raising=False)

    def add(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    add("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    return add


@pytest.fixture
def h100(programs):
    """An nvidia-smi that lists one H100."""
    programs("nvidia-smi", "echo 9.0")


NVCC = """
case "$*" in
  --version) echo 'Cuda compilation tools, release 12.8, V12.8.93' ;;
  --list-gpu-arch) echo 'compute_75 compute_80 compute_86 compute_90 compute_120' ;;
  *--dryrun*) echo '#$ LIBRARIES=  "-L/toolkit/lib"' ;;
  *) echo 'nvcc: unsupported GNU version' >&2; exit 1 ;;
esac
"""


@pytest.fixture
def nvcc(programs):
    """An nvcc that answers questions and compiles nothing."""
    return str(programs("nvcc", NVCC))


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """One small source and a header, in place of the real ones."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "common").mkdir()
    (folder / "common" / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text(
        '#include "common/answer.h"\n'
        'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    monkeypatch.setattr(builder, "csrc_folder", lambda: folder)
    return folder


# What the machine has ------------------------------------------------------------------------------------------------


def test_torch_is_found_without_importing_it():
    code = "import sys, runpy; b = runpy.run_path(sys.argv[1]); b['find_torch'](); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(ROOT / "fastlayers" / "build.py")], check=True)


def test_torch_is_found_where_pip_isolates_the_build(tmp_path):
    # What pip does: the target environment's interpreter, with its site-packages taken off sys.path at start.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if not p.endswith('site-packages')]\n"
    )
    code = (
        "import sys, runpy, importlib.util\n"
        "assert importlib.util.find_spec('torch') is None, 'not isolated'\n"
        "print(runpy.run_path(sys.argv[1])['find_torch']().root)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "fastlayers" / "build.py")],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == builder.find_torch().root


def test_an_older_torch_is_refused_by_version(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu126'\n")
    monkeypatch.setattr(builder, "_torch_folders", lambda: iter([tmp_path / "torch"]))
    with pytest.raises(builder.BuildError, match=r"torch 2\.11 or later.* found 2\.9\.1\+cu126 in"):
        builder.find_torch()


def test_no_torch(monkeypatch):
    monkeypatch.setattr(builder, "_torch_folders", lambda: iter([]))
    with pytest.raises(builder.BuildError, match="found no torch in this environment"):
        builder.find_torch()


def test_a_compiler_that_is_not_there(programs, monkeypatch):
    monkeypatch.setenv("CXX", "ccache no-such-compiler")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(builder.BuildError, match="CXX='ccache no-such-compiler'"):
        builder.find_compiler()
    monkeypatch.delenv("CXX")
    with pytest.raises(builder.BuildError, match=r"g\+\+, c\+\+ and clang\+\+ are not on PATH"):
        builder.find_compiler()


def test_cuda_home_decides(nvcc, monkeypatch, tmp_path):
    assert builder.find_nvcc() == nvcc
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-toolkit"))
    with pytest.raises(builder.CudaBuildError, match=r"CUDA_HOME=.*no-toolkit"):
        builder.find_nvcc()


@pytest.mark.parametrize(
    ("asked", "archs"),
    [
        ("90", ("90",)),
        ("120;80", ("80", "120")),
        ("8.0, 9.0", ("80", "90")),
        ("90a", ("90a",)),
        ("90 90", ("90",)),
        ("8.0;9.0+PTX", ("80", "90+PTX")),
        ("8.0;9.0-virtual", ("80", "90-virtual")),
    ],
)
def test_archs_that_were_asked_for(nvcc, h100, monkeypatch, asked, archs):
    monkeypatch.setenv("FASTLAYERS_CUDA_ARCHS", asked)
    assert builder.choose_archs(nvcc, builder.wanted_archs()) == archs


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("hopper", "expected compute capabilities from 80 on.* but got 'hopper'"),
        ("75", "expected compute capabilities from 80 on.* but got '75'"),
        ("90+ptx", r"such as '90' or '80;90\+PTX', but got '90\+ptx'"),
        ("80;100", "nvcc 12.8.93 does not know '100', only 75, 80, 86, 90, 120"),
    ],
)
def test_archs_that_cannot_be(nvcc, monkeypatch, asked, message):
    monkeypatch.setenv("FASTLAYERS_CUDA_ARCHS", asked)
    with pytest.raises(builder.CudaBuildError, match=message):
        builder.choose_archs(nvcc, builder.wanted_archs())


@pytest.mark.parametrize(
    ("answer", "archs"),
    [
        ("echo 9.0; echo 8.6; echo 9.0", ("86", "90")),
        ("echo 12.1", ("120+PTX",)),  # newer than this nvcc: PTX of its newest runs there
        ("echo 7.5", ()),  # too old for any kernel
        ("echo NVIDIA-SMI has failed; exit 9", ()),
    ],
)
def test_archs_of_the_gpus_that_are_here(programs, nvcc, answer, archs):
    programs("nvidia-smi", answer)
    assert builder.choose_archs(nvcc, builder.wanted_archs()) == archs


@pytest.mark.parametrize(
    ("version", "archs", "expected"),
    [
        ("13.0.88", ("90",), ["-gencode=arch=compute_90,code=sm_90", "--compress-mode=size"]),
        # nvcc 12 may serve a driver that does not read the smallest form.
        ("12.8.93", ("90a",), ["-gencode=arch=compute_90a,code=sm_90a", "-Xfatbin=-compress-all"]),
        (
            "13.0.88",
            ("80", "90+PTX"),
            [
                "-gencode=arch=compute_80,code=sm_80",
                "-gencode=arch=compute_90,code=[sm_90,compute_90]",
                "--compress-mode=size",
            ],
        ),
        ("13.0.88", ("90-virtual",), ["-gencode=arch=compute_90,code=compute_90", "--compress-mode=size"]),
    ],
)
def test_no_ptx_unless_it_is_asked_for(version, archs, expected):
    assert builder._code_flags(archs, version) == expected


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (("90",), (9, 0), True),
        (("80",), (8, 9), True),  # machine code of the same generation
        (("89",), (8, 0), False),
        (("80",), (9, 0), False),
        (("80+PTX",), (9, 0), True),
        (("90+PTX",), (8, 0), False),
        (("80-virtual",), (9, 0), True),
        (("90-virtual",), (8, 0), False),
        (("80", "90"), (12, 0), False),
        (("100a",), (10, 3), False),
        (("100a+PTX",), (12, 0), False),
        ((), (9, 0), False),
    ],
)
def test_gpus_that_the_kernels_run_on(archs, capability, runs):
    assert builder.BuildInfo(cuda_archs=archs).runs_on(capability) == runs


# What is compiled ----------------------------------------------------------------------------------------------------


def compiled(tmp_path) -> list[str]:
    """Build, and say which files were made."""
    done: list[str] = []
    builder.build(tmp_path / "_C.so", tmp_path / "objects", cuda=False, report=lambda *step: done.append(step[2]))
    return done


@needs_compiler
def test_only_what_changed_is_compiled_again(programs, csrc, tmp_path, monkeypatch):
    assert compiled(tmp_path) == ["answer.cpp", "_C.so"]
    made = (tmp_path / "_C.so").stat().st_mtime_ns
    assert compiled(tmp_path) == ["_C.so"]
    assert (tmp_path / "_C.so").stat().st_mtime_ns == made, "linked again though nothing changed"
    (csrc / "common" / "answer.h").touch()
    assert compiled(tmp_path) == ["answer.cpp", "_C.so"]
    monkeypatch.setattr(builder, "TORCH_TARGET_VERSION", "0x020c000000000000")
    assert compiled(tmp_path) == ["answer.cpp", "_C.so"], "not compiled again though the flags changed"
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--lineinfo")  # CI has others there
    assert compiled(tmp_path) == ["answer.cpp", "_C.so"], "not compiled again though nvcc's own flags changed"
    (tmp_path / "_C.so").write_bytes(b"from elsewhere")
    compiled(tmp_path)
    assert (tmp_path / "_C.so").read_bytes().startswith(b"\x7fELF")


@needs_compiler
def test_the_library_needs_no_cuda_and_no_python(programs, csrc, tmp_path):
    compiled(tmp_path)
    needed = subprocess.run(
        ["readelf", "-d", str(tmp_path / "_C.so")], capture_output=True, text=True, check=True
    ).stdout
    assert "[libtorch.so]" in needed
    assert "cuda" not in needed
    assert "python" not in needed


@pytest.fixture
def package(csrc, tmp_path, monkeypatch):
    """An empty package beside the sources, which have a small library for regions too."""
    (csrc / "regions").mkdir()
    (csrc / "regions" / "region.cpp").write_text("int region() { return 1; }\n")
    folder = tmp_path / "package"
    folder.mkdir()
    monkeypatch.setattr(builder, "PACKAGE", folder)
    monkeypatch.setattr(builder, "LIBRARY", folder / "_C.so")
    return folder


@needs_compiler
def test_what_runs_regions_is_built_for_one_torch_and_source(programs, csrc, package):
    done: list[str] = []
    builder.build_in_place(lambda *step: done.append(step[2]))
    (library,) = package.glob("_regions_*.so")
    assert library.name.startswith(f"_regions_{builder.find_torch().version.replace('.', '_')}_")
    assert library.stem in done
    assert done[-1] == "_C.so"
    made = library.stat().st_mtime_ns
    assert builder.build_regions() == library
    assert library.stat().st_mtime_ns == made, "compiled again though nothing changed"
    (csrc / "regions" / "region.cpp").write_text("int region() { return 2; }\n")
    other = builder.build_regions()
    assert other != library
    assert list(package.glob("_regions_*.so")) == [other], "a library of another source is used, or left there"


@needs_compiler
def test_a_build_does_not_need_what_runs_regions(programs, csrc, package):
    (csrc / "regions" / "region.cpp").write_text("int region() { return forty_two; }\n")
    done: list[str] = []
    builder.build_in_place(lambda *step: done.append(step[2]))
    assert (package / "_C.so").exists()
    (said,) = (what for what in done if what.startswith("_regions_"))
    assert "\nnot built: " in said
    assert "forty_two" in said.splitlines()[-1]
    with pytest.raises(builder.BuildError, match="forty_two"):
        builder.build_regions()


@needs_compiler
def test_a_source_that_does_not_compile(programs, csrc, tmp_path):
    (csrc / "answer.cpp").write_text("int answer() { return forty_two; }\n")
    with pytest.raises(builder.BuildError, match="forty_two") as error:
        compiled(tmp_path)
    assert "g++" in str(error.value), "the command is not quoted"
    assert not list(tmp_path.glob("_C.*"))
    assert not list((tmp_path / "objects").iterdir()), "an unfinished file was left"


@needs_compiler
def test_without_a_gpu_nvcc_is_not_started(nvcc, programs, csrc, tmp_path, monkeypatch):
    programs("nvcc", f"touch {tmp_path / 'started'}")
    (csrc / "kernel.cu").write_text("")
    info = builder.build(tmp_path / "_C.so", tmp_path / "objects")
    assert not (tmp_path / "started").exists()
    assert (tmp_path / "_C.so").exists(), "the C++ part is built all the same"
    assert info.problem is not None
    assert info.problem.endswith("FASTLAYERS_CUDA_ARCHS=90 python -m fastlayers build")
    assert info.contents() == f"CPU kernels ({info.problem})"
    with pytest.raises(builder.CudaBuildError, match=r"no GPU of compute capability 8\.0 or later"):
        builder.build(tmp_path / "_C.so", tmp_path / "objects", cuda=True)


@needs_compiler
def test_the_longest_source_is_compiled_first(programs, csrc, tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "1")
    (csrc / "z_longest.cpp").write_text("int longest() { return 0; }  // " + "so long " * 100 + "\n")
    assert compiled(tmp_path) == ["z_longest.cpp", "answer.cpp", "_C.so"]


@needs_compiler
@pytest.mark.parametrize("because", ["a GPU is there", "its architecture was asked for"])
def test_a_cuda_source_that_does_not_compile(programs, nvcc, csrc, tmp_path, monkeypatch, because):
    (csrc / "kernel.cu").write_text("")
    if because == "a GPU is there":
        programs("nvidia-smi", "echo 9.0")
    else:
        monkeypatch.setenv("FASTLAYERS_CUDA_ARCHS", "90")
    with pytest.raises(builder.CudaBuildError, match="unsupported GNU version"):
        builder.build(tmp_path / "_C.so", tmp_path / "objects")


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set elsewhere")
def test_cpu_kernels_are_compiled_for_each_instruction_set(programs, csrc, tmp_path):
    """The linker takes the first of several inline functions: those that every machine runs have to come first."""
    shutil.copy(ROOT / "csrc/common/cpu_library.h", csrc / "common")
    (csrc / "kernels.cpp").write_text(
        '#include "common/cpu_library.h"\nFASTLAYERS_CPU_KERNELS(kernels, m) { (void)m; }\n'
    )
    variants = ["kernels.cpp.avx2", "kernels.cpp.avx512"]
    assert sorted(compiled(tmp_path)) == ["_C.so", "answer.cpp", "kernels.cpp", *variants]
    steps, _ = builder.plan(tmp_path / "_C.so", tmp_path / "objects")
    linked = [Path(word).stem for word in steps[-1].command if word.endswith(".o")]
    assert linked == ["answer.cpp", "kernels.cpp", *variants]


def test_each_source_that_is_compiled_with_others_exists():
    names = [name for unit in builder.CPU_UNITS for name in unit]
    assert len(set(names)) == len(names)
    assert all((ROOT / "csrc" / f"{name}.cpp").is_file() for name in names)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_nothing_of_an_instruction_set_runs_unless_it_is_chosen():
    """Initialisers run as the library is loaded, on a machine that may not have the instructions of their object.

    Those of <iostream> are there, which one of torch's headers includes. They have no vectors.
    """
    objects = sorted((ROOT / "build/csrc").glob("*.cpp.*avx*.o"))
    if not objects:
        pytest.skip("csrc was not built in this checkout")
    for path in objects:
        command = ["objdump", "-d", "-j", ".text.startup", str(path)]
        initialisers = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert not re.search(r"%[xyz]mm", initialisers), path.name


@needs_compiler
def test_max_jobs(programs, csrc, tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(builder.BuildError, match="MAX_JOBS='many': expected a positive number"):
        compiled(tmp_path)


def test_what_was_built_is_on_record(tmp_path):
    info = builder.BuildInfo(torch="2.11.0", compiler="g++", nvcc="13.0.88", cuda_archs=("80", "90"))
    info.write(tmp_path / "_C.so")
    assert builder.BuildInfo.read(tmp_path / "_C.so") == info
    assert info.contents() == "CPU kernels and CUDA kernels for sm_80, sm_90"
    assert builder.BuildInfo(cuda_archs=("90+PTX",)).contents() == "CPU kernels and CUDA kernels for sm_90 with PTX"
    assert builder.BuildInfo(cuda_archs=("90-virtual",)).contents() == "CPU kernels and CUDA kernels for compute_90"
    assert builder.BuildInfo.read(tmp_path / "elsewhere" / "_C.so") is None


@pytest.mark.skipif(not builder.LIBRARY.exists() or shutil.which("nm") is None, reason="csrc is not built, or no nm")
def test_no_host_code_calls_a_device_function():
    """nvcc compiles such a call in a template to exit(), without a warning: the process ends without a word."""
    symbols = subprocess.run(["nm", "-D", str(builder.LIBRARY)], check=True, capture_output=True, text=True).stdout
    assert "torch" in symbols
    assert not [line for line in symbols.splitlines() if line.split()[-1].partition("@")[0] == "exit"]


def test_the_library_is_small():
    info = builder.BuildInfo.read(builder.LIBRARY)
    if info is None or not info.cuda_archs or not builder.LIBRARY.exists():
        pytest.skip("no CUDA kernels were built in this checkout")
    for_cpus = 6_000_000  # the loops of four dtypes for three instruction sets
    assert builder.LIBRARY.stat().st_size <= for_cpus + 15_000_000 * len(info.cuda_archs)


# pip -----------------------------------------------------------------------------------------------------------------


def wheel(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``pip wheel`` on a copy of the package whose csrc is one small file and, where nvcc is called, a .cu file."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("_C.*", "__pycache__")
    shutil.copytree(ROOT / "fastlayers", source / "fastlayers", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "csrc" / "common").mkdir(parents=True)
    (source / "csrc" / "common" / "answer.h").write_text("#define ANSWER 42\n")
    (source / "csrc" / "answer.cpp").write_text('#include "common/answer.h"\nint answer() { return ANSWER; }\n')
    (source / "csrc" / "kernel.cu").write_text("")
    options = ["--no-index", "--no-build-isolation", "--no-deps", "-w", "dist"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "."]
    return subprocess.run(command, cwd=source, env={**os.environ, **variables}, capture_output=True, text=True)


def contents(tmp_path: Path, **variables: str) -> tuple[str, set[str], dict[str, str] | None]:
    """The tag of the wheel that ``pip wheel`` makes, its files, and the record of its build."""
    done = wheel(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "source" / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        record = json.loads(archive.read("fastlayers/_C.json")) if "fastlayers/_C.json" in names else None
    return path.stem.split("-", 2)[2], names, record


@needs_compiler
def test_install_without_nvcc(programs, h100, tmp_path):
    tag, names, record = contents(tmp_path, CUDA_HOME="/nowhere")
    assert tag.startswith("py3-none-linux_")
    assert {
        "fastlayers/_C.so",
        "fastlayers/csrc/answer.cpp",
        "fastlayers/csrc/common/answer.h",
        "fastlayers/csrc/kernel.cu",
        "fastlayers/py.typed",
    } <= names
    assert "CUDA_HOME='/nowhere'" in record["problem"]


@needs_compiler
def test_install_without_a_gpu(nvcc, programs, tmp_path):
    programs("nvcc", f"touch {tmp_path / 'started'}")
    _, names, record = contents(tmp_path)
    assert not (tmp_path / "started").exists()
    assert "fastlayers/_C.so" in names
    assert "FASTLAYERS_CUDA_ARCHS=90 python -m fastlayers build" in record["problem"]


@needs_compiler
def test_install_where_nvcc_fails(nvcc, h100, tmp_path):
    tag, names, record = contents(tmp_path)
    assert tag.startswith("py3-none-linux_")
    assert "fastlayers/_C.so" in names
    assert "unsupported GNU version" in record["problem"]


def test_install_without_a_compiler(programs, tmp_path):
    tag, names, record = contents(tmp_path, CXX="no-such-compiler")
    assert tag == "py3-none-any"
    assert "fastlayers/_C.so" not in names
    assert "CXX='no-such-compiler'" in record["problem"]


def test_install_of_nothing_but_python(programs, tmp_path):
    tag, names, _ = contents(tmp_path, FASTLAYERS_BUILD_EXT="0")
    assert tag == "py3-none-any"
    assert not any(name.startswith("fastlayers/_C.") for name in names)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FASTLAYERS_BUILD_EXT": "1", "CXX": "no-such-compiler"}, "CXX='no-such-compiler'"),
        ({"FASTLAYERS_BUILD_EXT": "yes"}, "FASTLAYERS_BUILD_EXT='yes': expected auto, 0 or 1"),
        pytest.param(
            {"FASTLAYERS_BUILD_EXT": "1", "FASTLAYERS_CUDA_ARCHS": "90", "CUDA_HOME": "/nowhere"},
            "CUDA_HOME='/nowhere'",
            marks=needs_compiler,
        ),
    ],
)
def test_an_install_that_must_fail(programs, tmp_path, variables, message):
    done = wheel(tmp_path, **variables)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_no_source_defines_what_a_header_defines_inline():
    """The linker would take the one for the other, without a word: a function's name is not its file's alone."""
    objects = sorted((ROOT / "build" / "csrc").glob("*.cu.o"))
    if not objects:
        pytest.skip("no CUDA kernels were built in this checkout")
    listed = subprocess.run(["nm", "--defined-only", *map(str, objects)], capture_output=True, text=True, check=True)
    strong: dict[str, list[str]] = {}
    weak: set[str] = set()
    for line in listed.stdout.splitlines():
        _, _, symbol = line.partition(" ")
        kind, _, name = symbol.partition(" ")
        if "fastlayers" in name:
            weak |= {name} if kind in "Ww" else set()
            if kind == "T":
                strong.setdefault(name, []).append(line)
    assert strong
    assert not weak & strong.keys()
    assert all(len(lines) == 1 for lines in strong.values())
