"""Compile ``csrc`` into ``fastlayers/_C.so``, the C++ and CUDA part of the package.

``pip install`` (through setup.py), ``make build`` and ``python -m fastlayers build`` all come here. The file imports
neither torch nor fastlayers, so that it runs by path before either is importable: it needs torch's headers and
libraries on disk and nothing more. What it builds has no Python symbols and only PyTorch's stable ABI, so one file
serves every Python and every torch from 2.11 on.

Environment variables:
    FASTLAYERS_CUDA_ARCHS: compute capabilities to compile for, as "90" or "80;90". Default: those of the GPUs that
        nvidia-smi lists, else "80;90".
    CUDA_HOME, CUDA_PATH: the CUDA toolkit. Where one is set, no other is looked for.
    CXX: the C++ compiler.
    MAX_JOBS: how many compilers run at once, as for torch's own extension builder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "_C.so"

OLDEST_TORCH = (2, 11)
#: The oldest torch whose stable ABI the library may use, in the encoding of torch/headeronly/version.h.
TORCH_TARGET_VERSION = "0x020b000000000000"
OLDEST_ARCH = 80
DEFAULT_ARCHS = ("80", "90")

#: Called as report(steps done, steps in all, what was just done).
Report = Callable[[int, int, str], None]


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what is missing or what failed."""


class CudaBuildError(BuildError):
    """The CUDA part cannot be built here; the C++ part may."""


@dataclass(frozen=True)
class BuildInfo:
    """What a library was built from. Kept beside it as JSON, which ``python -m fastlayers info`` reads."""

    torch: str | None = None
    compiler: str | None = None
    nvcc: str | None = None
    cuda_archs: tuple[str, ...] = ()
    #: Why a part is missing; None where everything was built.
    problem: str | None = None

    def contents(self) -> str:
        """One line: what the library holds, and why not more."""
        parts = ["CPU kernels"]
        if self.cuda_archs:
            parts.append(f"CUDA kernels for {', '.join(f'sm_{arch}' for arch in self.cuda_archs)}")
        return " and ".join(parts) + (f" ({self.problem})" if self.problem else "")

    def write(self, library: Path) -> None:
        library.with_suffix(".json").write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, library: Path) -> BuildInfo | None:
        try:
            fields = json.loads(library.with_suffix(".json").read_text())
        except FileNotFoundError:
            return None
        return cls(**{**fields, "cuda_archs": tuple(fields["cuda_archs"])})


# What this machine has -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    root: Path
    version: str


def _torch_folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        yield Path(next(iter(spec.submodule_search_locations)))
    # pip isolates a build by hiding the site-packages of the environment that it installs into from sys.path, but it
    # runs that environment's interpreter, which still knows where they are. A venv may also see those of its base.
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix]
    paths = sysconfig.get_paths()
    for folder in [paths["purelib"], paths["platlib"], *site.getsitepackages(prefixes), site.getusersitepackages()]:
        yield Path(folder) / "torch"


def find_torch() -> Torch:
    """The torch whose headers and libraries to build against.

    Raises:
        BuildError: there is none, or only one that is older than 2.11.
    """
    seen: list[str] = []
    for root in dict.fromkeys(_torch_folders()):
        header = root / "include" / "torch" / "csrc" / "stable" / "library.h"
        version_file = root / "version.py"
        if not version_file.is_file():
            continue
        found = re.search(r"__version__ = '(\d+)\.(\d+)([^']*)'", version_file.read_text())
        if found and (int(found[1]), int(found[2])) >= OLDEST_TORCH and header.is_file():
            return Torch(root, f"{found[1]}.{found[2]}{found[3]}")
        seen.append(f"{found[1]}.{found[2]}{found[3]} in {root}" if found else str(root))
    oldest = ".".join(map(str, OLDEST_TORCH))
    raise BuildError(
        f"torch {oldest} or later, with its C++ headers, is needed to build; found "
        f"{', '.join(seen) or 'no torch in this environment'}"
    )


def find_compiler() -> list[str]:
    """The C++ compiler as the start of a command line: $CXX, else g++, c++ or clang++.

    Raises:
        BuildError: there is none.
    """
    asked = os.environ.get("CXX")
    if asked:
        command = shlex.split(asked)
        if shutil.which(command[0]) is None:
            raise BuildError(f"no C++ compiler: CXX={asked!r}, and there is no such program")
        return command
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: none of g++, c++ and clang++ is on PATH, and CXX is not set")


def find_nvcc() -> str:
    """Path of the CUDA compiler.

    Raises:
        CudaBuildError: there is none.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            nvcc = Path(home, "bin", "nvcc")
            if nvcc.is_file():
                return str(nvcc)
            raise CudaBuildError(f"no nvcc: {variable}={home!r}, and there is no {nvcc}")
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        raise CudaBuildError("no nvcc: not on PATH, not in /usr/local/cuda/bin, and CUDA_HOME is not set")
    return path


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def _nvcc_version(nvcc: str) -> str:
    output = _output_of(nvcc, "--version")
    found = re.search(r"release [\d.]+, V([\d.]+)", output)
    return found[1] if found else output.strip().splitlines()[-1]


def _cudart_folders(nvcc: str) -> list[str]:
    # nvcc may be a wrapper far from its toolkit, so ask it where it links from.
    output = _output_of(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
    return [shlex.split(folder)[0] for folder in re.findall(r'"-L[^"]*"', output)]


def _gpu_archs() -> list[str]:
    """Compute capabilities of this machine's GPUs; none where there is no GPU or no driver."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.replace(".", "") for line in output.split() if re.fullmatch(r"\d+\.\d", line)]


def _arch_number(arch: str) -> int:
    return int(arch.rstrip("af"))


def choose_archs(nvcc: str) -> tuple[str, ...]:
    """Compute capabilities to compile for, ascending: FASTLAYERS_CUDA_ARCHS, else this machine's GPUs, else 80 and 90.

    Raises:
        CudaBuildError: FASTLAYERS_CUDA_ARCHS names something that is no capability, is older than 8.0, or is unknown to
            this nvcc.
    """
    supported = set(re.findall(r"compute_(\d+[af]?)", _output_of(nvcc, "--list-gpu-arch")))
    newest = max(map(_arch_number, supported))
    asked = os.environ.get("FASTLAYERS_CUDA_ARCHS", "")
    archs = [arch.replace(".", "") for arch in re.split(r"[;,\s]+", asked) if arch]
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch) or _arch_number(arch) < OLDEST_ARCH:
            raise CudaBuildError(
                f"FASTLAYERS_CUDA_ARCHS={asked!r}: expected compute capabilities from {OLDEST_ARCH} on, "
                f"as in '90' or '80;90', and {arch!r} is none"
            )
        if str(_arch_number(arch)) not in supported:
            known = ", ".join(sorted(supported, key=_arch_number))
            raise CudaBuildError(
                f"FASTLAYERS_CUDA_ARCHS={asked!r}: nvcc {_nvcc_version(nvcc)} does not know {arch!r}, only {known}"
            )
    if not archs:
        # A GPU newer than this nvcc runs the PTX of the newest capability that it knows.
        archs = [arch if arch in supported else str(newest) for arch in _gpu_archs() if int(arch) >= OLDEST_ARCH]
    return tuple(sorted(set(archs or DEFAULT_ARCHS), key=_arch_number))


# What to run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One command that makes one file, skipped where neither its inputs nor the command changed since."""

    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    output: Path
    stamp: Path
    #: What decides besides the command line, such as the version of the compiler behind it.
    tools: str

    def _key(self) -> str:
        # The output's own time is in the key: a library that something else put there is made anew.
        command = [word for word in self.command if not word.startswith("--threads=")]
        return json.dumps([command, self.tools, self.output.stat().st_mtime_ns])

    def up_to_date(self) -> bool:
        try:
            made = self.output.stat().st_mtime_ns
            return self.stamp.read_text() == self._key() and all(i.stat().st_mtime_ns <= made for i in self.inputs)
        except FileNotFoundError:
            return False

    def run(self) -> str:
        """Run the command; what the tools printed (warnings) is returned."""
        # Renamed into place when whole: an interrupted compiler leaves no half-written file, and a process that has
        # the old library mapped keeps it.
        partial = self.output.with_name(f"{self.output.name}.{os.getpid()}.tmp")
        command = [*self.command, "-o", str(partial)]
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                kind = CudaBuildError if self.inputs[0].suffix == ".cu" else BuildError
                raise kind(f"exit status {done.returncode} from\n{shlex.join(command)}\n{done.stdout}")
            partial.replace(self.output)
        finally:
            partial.unlink(missing_ok=True)
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(self._key())
        return done.stdout


def csrc_folder() -> Path:
    """The sources: inside an installed package, else beside the package in a checkout."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if list(folder.glob("*.cpp")):
            return folder
    raise BuildError(f"no C++ sources: neither {PACKAGE / 'csrc'} nor {PACKAGE.parent / 'csrc'} holds *.cpp files")


def _jobs() -> int:
    asked = os.environ.get("MAX_JOBS")
    if asked is None:
        return len(os.sched_getaffinity(0))
    if not asked.isdecimal() or int(asked) < 1:
        raise BuildError(f"MAX_JOBS={asked!r}: expected a positive number")
    return int(asked)


def _gencode(archs: tuple[str, ...]) -> list[str]:
    """Machine code for each capability, and PTX of the newest, from which a driver makes code for later GPUs."""
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    newest = _arch_number(archs[-1])
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def _steps(library: Path, objects: Path, torch: Torch, info: BuildInfo, nvcc: str | None) -> list[Step]:
    """The commands that make ``library``: one a source, and the link, which comes last."""
    csrc = csrc_folder()
    headers = tuple(sorted([*csrc.rglob("*.h"), *csrc.rglob("*.cuh")]))
    sources = sorted(csrc.glob("*.cpp"))
    cuda_sources = sorted(csrc.glob("*.cu")) if nvcc else []
    cxx = find_compiler()
    tools = f"torch {torch.version}, {info.compiler}, nvcc {info.nvcc}"
    common = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-std=c++17", "-O3", f"-I{torch.root / 'include'}"]

    def compile_step(source: Path, *command: str) -> Step:
        output = objects / f"{source.name}.o"
        stamp = output.with_suffix(".stamp")
        return Step((*command, *common, "-c", str(source)), (source, *headers), output, stamp, tools)

    steps = [compile_step(source, *cxx, "-fPIC", "-fvisibility=hidden") for source in sources]
    if nvcc is not None:
        # One source takes far longer than the others, so each may use every core for its architectures.
        threads = min(_jobs(), len(info.cuda_archs) + 1)
        host = ["-ccbin", cxx[-1]] if os.environ.get("CXX") else []
        flags = [*host, "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr", f"--threads={threads}"]
        steps += [compile_step(s, nvcc, *flags, *_gencode(info.cuda_archs)) for s in cuda_sources]
    link = [*cxx, "-shared", *(str(step.output) for step in steps), f"-L{torch.root / 'lib'}"]
    # libtorch, not libtorch_cuda: the same file then loads on a CPU-only torch, and under a CUDA build libtorch brings
    # libtorch_cuda into scope. cudart is linked in, so that no CUDA library is needed to load either.
    link += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    if nvcc is not None:
        link += [*_cudart_folders(nvcc), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    link += ["-Wl,--exclude-libs,ALL"]
    linking = Step(tuple(link), tuple(s.output for s in steps), library, objects / f"{library.name}.stamp", tools)
    return [*steps, linking]


def _run(steps: list[Step], report: Report) -> None:
    *compiles, link = steps
    done = 0
    with ThreadPoolExecutor(_jobs()) as pool:
        running = {pool.submit(step.run): step for step in compiles if not step.up_to_date()}
        done = len(compiles) - len(running)
        try:
            for future in as_completed(running):
                warnings = future.result()
                done += 1
                report(done, len(steps), "\n".join(filter(None, [running[future].inputs[0].name, warnings.strip()])))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not link.up_to_date():
        link.run()
    report(len(steps), len(steps), link.output.name)


# Entry points --------------------------------------------------------------------------------------------------------


def build(library: Path, objects: Path, *, cuda: bool | None = None, report: Report = lambda *_: None) -> BuildInfo:
    """Compile csrc into ``library``, with what this machine has; object files that are up to date are kept.

    Args:
        library: The file to make. Its description goes beside it, with the suffix ``.json``.
        objects: A folder for object files.
        cuda: Whether to build the CUDA part. None: if there is an nvcc.
        report: Told about every finished step.

    Raises:
        BuildError: no compiler, no torch, or a C++ source did not compile.
        CudaBuildError: a CUDA source did not compile, FASTLAYERS_CUDA_ARCHS is wrong, or ``cuda`` is True and there is
            no nvcc.
    """
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the C++ and CUDA kernels are built on Linux, and this is {sys.platform}")
    if library.parent.exists() and not os.access(library.parent, os.W_OK):
        raise BuildError(f"no permission to write {library}")
    torch = find_torch()
    compiler = _output_of(*find_compiler(), "--version").splitlines()[0]
    nvcc: str | None = None
    problem: str | None = None
    if cuda is not False:
        try:
            nvcc = find_nvcc()
        except CudaBuildError as error:
            if cuda:
                raise
            problem = str(error)
    info = BuildInfo(
        torch=torch.version,
        compiler=compiler,
        nvcc=_nvcc_version(nvcc) if nvcc else None,
        cuda_archs=choose_archs(nvcc) if nvcc else (),
        problem=problem,
    )
    _run(_steps(library, objects, torch, info, nvcc), report)
    info.write(library)
    return info


def build_in_place(report: Report = lambda *_: None) -> BuildInfo:
    """Compile for the package that this file belongs to, in a checkout or installed."""
    with contextlib.ExitStack() as stack:
        if csrc_folder().parent == PACKAGE:
            objects = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastlayers-")))
        else:
            objects = PACKAGE.parent / "build" / "csrc"
        return build(LIBRARY, objects, report=report)


def main() -> None:
    """``make build``: before fastlayers and its requirements are importable."""
    try:
        info = build_in_place(lambda done, total, what: print(f"[{done}/{total}] {what}", flush=True))
    except BuildError as error:
        sys.exit(f"fastlayers was not built: {error}")
    print(f"{LIBRARY}: {info.contents()}")


if __name__ == "__main__":
    main()
