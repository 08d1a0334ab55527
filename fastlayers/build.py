"""Compile ``csrc`` into ``fastlayers/_C.so``, the C++ and CUDA part of the package, and into the executor of regions.

``pip install`` (through setup.py) and ``python -m fastlayers build`` call :func:`build`. This file imports neither
torch nor fastlayers, so that setup.py can load it by path before either is importable: it only needs torch's headers
and libraries on disk. The library has no Python symbols and uses only PyTorch's stable ABI, so one file serves every
Python and every torch from 2.11 on. The executor of regions, ``csrc/regions``, uses more of torch than that. It is a
library of its own, named after the version of torch that it serves, and everything works without it, only slower.

Environment variables:
    FASTLAYERS_CUDA_ARCHS: Compute capabilities to compile for, such as "90" or "80;90+PTX". As in torch's
        TORCH_CUDA_ARCH_LIST, +PTX adds PTX, which a driver compiles for GPUs that are newer than the list, and as in
        CMake "90-virtual" is PTX alone, in half of the time. Default: the capabilities of the GPUs that nvidia-smi
        lists. With neither, the CUDA part is not built.
    CUDA_HOME, CUDA_PATH: The CUDA toolkit. If one is set, the build looks nowhere else.
    CXX: The C++ compiler.
    MAX_JOBS: The number of compilers to run at once, as for torch's own extension builder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
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
PTX, VIRTUAL = "+PTX", "-virtual"
#: The variants of a source of CPU kernels beside the one for every machine of the architecture. cpu_library.h in csrc
#: picks one. The flags are those of torch's own kernels.
CPU_VARIANTS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
#: CPU kernels that are compiled as one source, under the name of the first. They share templates, and torch's headers
#: take as long as a small source. Sources in no row are compiled by themselves.
CPU_UNITS = (
    ("batch_norm", "group_norm", "squeeze_excite"),
    ("bias_act", "glu"),
    ("cross_entropy", "kl_div", "softmax"),
    ("elementwise", "layer_norm", "max_pool2d", "residual", "rotary"),
)
#: Variables in which nvcc looks for options of its own. Others make other objects.
NVCC_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
NO_GPU = (
    "no GPU of compute capability 8.0 or later here. To compile CUDA kernels for another machine, name its capability: "
    "FASTLAYERS_CUDA_ARCHS=90 python -m fastlayers build"
)

#: Called as report(steps done, total steps, what was just done).
Report = Callable[[int, int, str], None]


class BuildError(RuntimeError):
    """The library cannot be built on this machine. The message says what is missing or what failed."""


class CudaBuildError(BuildError):
    """The CUDA part cannot be built on this machine. The C++ part may still be."""


@dataclass(frozen=True)
class BuildInfo:
    """What a library was built from, kept beside it as JSON. ``python -m fastlayers info`` reads it."""

    torch: str | None = None
    compiler: str | None = None
    nvcc: str | None = None
    cuda_archs: tuple[str, ...] = ()
    #: Why a part is missing, or None if everything was built.
    problem: str | None = None

    def contents(self) -> str:
        """One line: what the library contains, and why a part is missing."""
        parts = ["CPU kernels"]
        if self.cuda_archs:
            named = (_codes(arch)[0] + " with PTX" * arch.endswith(PTX) for arch in self.cuda_archs)
            parts.append(f"CUDA kernels for {', '.join(named)}")
        return " and ".join(parts) + (f" ({self.problem})" if self.problem else "")

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether the CUDA kernels run on a GPU of this compute capability.

        Machine code runs on the later GPUs of its generation, PTX on all later ones, and code with a suffix on its own.
        """
        device = 10 * capability[0] + capability[1]
        for arch in self.cuda_archs:
            built = _arch_number(arch)
            later = _capability(arch).isdecimal() and (arch.endswith((PTX, VIRTUAL)) or device // 10 == built // 10)
            if device == built or (later and device > built):
                return True
        return False

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
    # An isolated pip build hides the target environment's site-packages from sys.path, but it runs that environment's
    # interpreter, which still knows where they are. A venv may also see the site-packages of its base.
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix]
    paths = sysconfig.get_paths()
    for folder in [paths["purelib"], paths["platlib"], *site.getsitepackages(prefixes), site.getusersitepackages()]:
        yield Path(folder) / "torch"


def find_torch() -> Torch:
    """Find the torch whose headers and libraries to build against.

    Raises:
        BuildError: If there is no torch, or only one older than 2.11.
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
        f"the build needs torch {oldest} or later with its C++ headers; found "
        f"{', '.join(seen) or 'no torch in this environment'}"
    )


def find_compiler() -> list[str]:
    """Find the C++ compiler, as the start of a command line: $CXX, else g++, c++ or clang++.

    Raises:
        BuildError: If there is none.
    """
    asked = os.environ.get("CXX")
    if asked:
        command = shlex.split(asked)
        if shutil.which(command[0]) is None:
            raise BuildError(f"no C++ compiler: CXX={asked!r} does not exist")
        return command
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: g++, c++ and clang++ are not on PATH, and CXX is not set")


def find_nvcc() -> str:
    """Find the CUDA compiler.

    Raises:
        CudaBuildError: If there is none.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            nvcc = Path(home, "bin", "nvcc")
            if nvcc.is_file():
                return str(nvcc)
            raise CudaBuildError(f"no nvcc: {variable}={home!r}, but {nvcc} does not exist")
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        raise CudaBuildError("no nvcc: it is not on PATH or in /usr/local/cuda/bin, and CUDA_HOME is not set")
    return path


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def _nvcc_version(nvcc: str) -> str:
    output = _output_of(nvcc, "--version")
    found = re.search(r"release [\d.]+, V([\d.]+)", output)
    return found[1] if found else output.strip().splitlines()[-1]


def _cudart_folders(nvcc: str) -> list[str]:
    # nvcc may be a wrapper outside of its toolkit, so ask it where it links from.
    output = _output_of(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
    return [shlex.split(folder)[0] for folder in re.findall(r'"-L[^"]*"', output)]


def _gpu_archs() -> list[str]:
    """Compute capabilities of this machine's GPUs. Empty without a GPU or a driver."""
    try:
        output = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    archs = [line.replace(".", "") for line in output.split() if re.fullmatch(r"\d+\.\d", line)]
    return [arch for arch in archs if int(arch) >= OLDEST_ARCH]


def _capability(arch: str) -> str:
    return arch.removesuffix(PTX).removesuffix(VIRTUAL)


def _codes(arch: str) -> list[str]:
    """What nvcc calls that which is compiled for a capability: machine code, PTX, or both."""
    machine, ptx = f"sm_{_capability(arch)}", f"compute_{_capability(arch)}"
    return [machine, ptx] if arch.endswith(PTX) else [ptx] if arch.endswith(VIRTUAL) else [machine]


def _arch_number(arch: str) -> int:
    return int(_capability(arch).rstrip("af"))


def wanted_archs() -> list[str]:
    """Compute capabilities to compile for: FASTLAYERS_CUDA_ARCHS, else those of this machine's GPUs, which may be none.

    Raises:
        CudaBuildError: If FASTLAYERS_CUDA_ARCHS names something that is not a compute capability, or is older than 8.0.
    """
    asked = os.environ.get("FASTLAYERS_CUDA_ARCHS", "")
    archs = [arch.replace(".", "") for arch in re.split(r"[;,\s]+", asked) if arch]
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?(\+PTX|-virtual)?", arch) or _arch_number(arch) < OLDEST_ARCH:
            raise CudaBuildError(
                f"FASTLAYERS_CUDA_ARCHS={asked!r}: expected compute capabilities from {OLDEST_ARCH} on, "
                f"such as '90' or '80;90+PTX', but got {arch!r}"
            )
    return archs or _gpu_archs()


def choose_archs(nvcc: str, wanted: list[str]) -> tuple[str, ...]:
    """The wanted compute capabilities as this nvcc compiles for them, ascending.

    Raises:
        CudaBuildError: If this nvcc does not know one that FASTLAYERS_CUDA_ARCHS names.
    """
    supported = set(re.findall(r"compute_(\d+[af]?)", _output_of(nvcc, "--list-gpu-arch")))
    newest = max(map(_arch_number, supported))
    asked = os.environ.get("FASTLAYERS_CUDA_ARCHS")
    chosen = set()
    for arch in wanted:
        if str(_arch_number(arch)) in supported:
            chosen.add(arch)
        elif asked:
            known = ", ".join(sorted(supported, key=_arch_number))
            raise CudaBuildError(
                f"FASTLAYERS_CUDA_ARCHS={asked!r}: nvcc {_nvcc_version(nvcc)} does not know {arch!r}, only {known}"
            )
        else:  # a GPU that is newer than this nvcc: its driver compiles the PTX
            chosen.add(f"{newest}{PTX}")
    return tuple(sorted(chosen, key=_arch_number))


# What to run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One command that makes one file. It is skipped if neither its inputs nor the command have changed."""

    command: tuple[str, ...]
    inputs: tuple[Path, ...]
    output: Path
    stamp: Path
    #: What else the output depends on, such as the version of the compiler.
    tools: str

    def _key(self) -> str:
        # The key includes the output's own time: a library that something else put there is replaced.
        command = [word for word in self.command if not word.startswith("--threads=")]
        return json.dumps([command, self.tools, self.output.stat().st_mtime_ns])

    def up_to_date(self) -> bool:
        try:
            made = self.output.stat().st_mtime_ns
            return self.stamp.read_text() == self._key() and all(i.stat().st_mtime_ns <= made for i in self.inputs)
        except FileNotFoundError:
            return False

    def run(self) -> str:
        """Run the command and return what it printed, such as warnings."""
        # The output is renamed into place when it is complete: an interrupted compiler leaves no partial file, and a
        # process that has mapped the old library keeps it.
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
    """The sources: inside an installed package, or beside the package in a checkout."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if list(folder.glob("*.cpp")):
            return folder
    raise BuildError(f"no C++ sources: neither {PACKAGE / 'csrc'} nor {PACKAGE.parent / 'csrc'} contains *.cpp files")


def regions_source() -> Path:
    return csrc_folder() / "regions" / "region.cpp"


def regions_library(torch_version: str) -> Path:
    """The library that runs regions in C++. It serves one version of torch, and calls of one version of fastlayers.

    Raises:
        BuildError: If its source is not installed.
    """
    try:
        source = hashlib.sha256(regions_source().read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise BuildError(f"no {error.filename}") from None
    return PACKAGE / f"_regions_{torch_version.replace('.', '_')}_{source[:8]}.so"


def jobs() -> int:
    asked = os.environ.get("MAX_JOBS")
    if asked is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not asked.isdecimal() or int(asked) < 1:
        raise BuildError(f"MAX_JOBS={asked!r}: expected a positive number")
    return int(asked)


def _code_flags(archs: tuple[str, ...], nvcc_version: str) -> list[str]:
    """Machine code for each capability, or PTX where that is asked for, all of it compressed: a tenth of the size."""
    flags = []
    for arch in archs:
        codes = _codes(arch)
        code = f"[{','.join(codes)}]" if len(codes) > 1 else codes[0]
        flags.append(f"-gencode=arch=compute_{_capability(arch)},code={code}")
    # The smallest form needs a driver of CUDA 12.4 or later, and an older nvcc may serve an older driver.
    small = int(nvcc_version.split(".")[0]) >= 13
    return [*flags, "--compress-mode=size" if small else "-Xfatbin=-compress-all"]


def included(source: Path) -> list[Path]:
    """The headers of csrc that ``source`` includes, and those that these include."""
    found: list[Path] = []
    waiting = [source]
    while waiting:
        file = waiting.pop()
        names = re.findall(r'^#include "(.+)"$', file.read_text(), re.MULTILINE)
        new = {path for name in names if (path := (file.parent / name).resolve()).is_file()}.difference(found)
        found += new
        waiting += new
    return sorted(found)


def _units(sources: list[Path]) -> list[tuple[Path, ...]]:
    """The C++ sources as they are compiled: those of a row of CPU_UNITS together, every other one by itself."""
    by_name = {source.stem: source for source in sources}
    rows = [tuple(by_name.pop(name) for name in row if name in by_name) for row in CPU_UNITS]
    return sorted([row for row in rows if row] + [(source,) for source in by_name.values()])


def _steps(library: Path, objects: Path, torch: Torch, info: BuildInfo, nvcc: str | None) -> list[Step]:
    """The commands that make ``library``: one for each source, and the link, which comes last."""
    csrc = csrc_folder()
    sources = sorted(csrc.glob("*.cpp"))
    cuda_sources = sorted(csrc.glob("*.cu")) if nvcc else []
    # A source that another one includes is compiled there.
    parts = {part for source in cuda_sources for part in included(source)}
    cuda_sources = [source for source in cuda_sources if source.resolve() not in parts]
    cxx = find_compiler()
    tools = f"torch {torch.version}, {info.compiler}, nvcc {info.nvcc}"
    tools += "".join(f" {os.environ[name]}" for name in NVCC_FLAGS if os.environ.get(name))
    common = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-std=c++20", f"-I{torch.root / 'include'}"]

    def compile_step(unit: tuple[Path, ...], *command: str, variant: str = "") -> Step:
        *before, source = unit
        output = objects / f"{unit[0].name}{variant}.o"
        stamp = output.with_suffix(".stamp")
        words = (*command, *common, *(word for other in before for word in ("-include", str(other))), "-c", str(source))
        headers = {header for each in unit for header in included(each)}
        return Step(words, (*unit, *sorted(headers)), output, stamp, tools)

    units = _units(sources)
    host_code = [*cxx, "-fPIC", "-fvisibility=hidden"]
    variants = CPU_VARIANTS if platform.machine() == "x86_64" else {}
    # Where there are variants, only machines without AVX2 run the others, and -O1 compiles in half of the time.
    all_machines = ["-O1", "-DFASTLAYERS_CPU_VARIANTS"] if variants else ["-O3"]
    steps = [compile_step(unit, *host_code, *all_machines) for unit in units]
    if nvcc is not None:
        assert info.nvcc is not None
        # One source takes far longer than the others, so each may use every core for its architectures.
        threads = min(jobs(), len(info.cuda_archs))
        host = ["-ccbin", cxx[-1]] if os.environ.get("CXX") else []
        # The level is one of the code for the host, a tenth of the time; that for GPUs is compiled with the highest.
        flags = [
            *host,
            "-O2",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            "--expt-relaxed-constexpr",
            f"--threads={threads}",
        ]
        flags += _code_flags(info.cuda_archs, info.nvcc)
        steps += [compile_step((source,), nvcc, *flags) for source in cuda_sources]
    # Linked last, and AVX-512 after AVX2. Of an inline function that several objects have, such as one of std::vector,
    # the linker takes the first: so no object calls one with instructions that a machine which runs it may not have.
    for variant, options in variants.items():
        flags = ["-O3", f"-DFASTLAYERS_CPU_VARIANT={variant}", *options]
        steps += [
            compile_step(unit, *host_code, *flags, variant=f".{variant}")
            for unit in units
            if any(header.name == "cpu_library.h" for header in included(unit[0]))
        ]
    link = _link_command(cxx, [str(step.output) for step in steps], torch, nvcc)
    linking = Step(tuple(link), tuple(s.output for s in steps), library, objects / f"{library.name}.stamp", tools)
    return [*steps, linking]


def _link_command(cxx: list[str], objects: list[str], torch: Torch, nvcc: str | None) -> list[str]:
    link = [*cxx, "-shared", *objects, f"-L{torch.root / 'lib'}"]
    # Linking libtorch and not libtorch_cuda lets the same file load on a CPU-only torch. In a CUDA build of torch,
    # libtorch brings libtorch_cuda into scope. cudart is linked statically, so loading needs no CUDA library either.
    link += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"]
    if nvcc is not None:
        link += [*_cudart_folders(nvcc), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    link += ["-Wl,--exclude-libs,ALL"]
    # The names of templates are a third of the library.
    return link if any(word.startswith("-g") for word in cxx) else [*link, "-Wl,--strip-all"]


def regions_step(objects: Path) -> Step:
    """The command that makes the executor of regions for the torch that is here.

    Raises:
        BuildError: If there is no compiler or no torch.
    """
    torch = find_torch()
    library = regions_library(torch.version)
    _check_machine(library)
    source = regions_source()
    includes = [f"-I{torch.root / 'include'}", f"-I{torch.root / 'include/torch/csrc/api/include'}"]
    includes.append("-DAT_PER_OPERATOR_HEADERS")  # instead of one for all of them, which takes a third of the time
    options = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1", "-shared"]
    link = [f"-L{torch.root / 'lib'}", "-ltorch_cpu", "-lc10"]
    cxx = find_compiler()
    tools = f"torch {torch.version}, {_output_of(*cxx, '--version').splitlines()[0]}"
    command = (*cxx, *options, *includes, str(source), *link)
    return Step(command, (source,), library, objects / f"{library.name}.stamp", tools)


def _source_size(step: Step) -> int:
    return sum(path.stat().st_size for path in step.inputs if path.suffix == step.inputs[0].suffix)


def _run(steps: list[Step], report: Report, beside: Step | None = None) -> None:
    """Runs the steps, of which the last one links, and one that may fail beside them."""
    *compiles, link = steps
    total = len(steps) + (beside is not None)
    wanted = [step for step in (*compiles, beside) if step is not None]
    # The longest source first: compiled last, it would leave the other cores idle.
    stale = sorted((step for step in wanted if not step.up_to_date()), key=_source_size, reverse=True)
    done = len(wanted) - len(stale)
    with ThreadPoolExecutor(jobs()) as pool:
        running = {pool.submit(step.run): step for step in stale}
        try:
            for future in as_completed(running):
                step = running[future]
                try:
                    said = future.result().strip()
                except BuildError as error:
                    if step is not beside:
                        raise
                    said = f"not built: {_reason(error)}"
                done += 1
                report(done, total, "\n".join(filter(None, [step.output.stem, said])))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not link.up_to_date():
        link.run()
    report(total, total, link.output.name)


def _reason(error: BuildError) -> str:
    lines = str(error).splitlines()
    return next((line for line in lines if "error:" in line), lines[0])


def platform_problem() -> str | None:
    """Why nothing of csrc can be built on this operating system, or None on Linux."""
    system = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
    is_linux = system.startswith("linux")
    return None if is_linux else f"the C++ and CUDA kernels are built on Linux only, and this is {system}"


def _check_machine(library: Path) -> None:
    problem = platform_problem()
    if problem is not None:
        raise BuildError(problem)
    if library.parent.exists() and not os.access(library.parent, os.W_OK):
        raise BuildError(f"no permission to write {library}")


# Entry points --------------------------------------------------------------------------------------------------------


def plan(library: Path, objects: Path, *, cuda: bool | None = None) -> tuple[list[Step], BuildInfo]:
    """The steps that compile csrc into ``library`` with what this machine has, and what it will contain.

    Args:
        library: The file to make.
        objects: A folder for object files.
        cuda: Whether to build the CUDA part. None builds it if there is an nvcc, and a GPU or FASTLAYERS_CUDA_ARCHS to
            compile for.

    Raises:
        BuildError: If there is no compiler or no torch.
        CudaBuildError: If FASTLAYERS_CUDA_ARCHS is wrong, or if ``cuda`` is True and there is no nvcc or nothing to
            compile for.
    """
    _check_machine(library)
    torch = find_torch()
    compiler = _output_of(*find_compiler(), "--version").splitlines()[0]
    nvcc: str | None = None
    problem: str | None = None
    archs: list[str] = []
    if cuda is not False:
        archs = wanted_archs()
        try:
            if not archs:
                raise CudaBuildError(NO_GPU)
            nvcc = find_nvcc()
        except CudaBuildError as error:
            if cuda:
                raise
            problem = str(error)
    info = BuildInfo(
        torch=torch.version,
        compiler=compiler,
        nvcc=_nvcc_version(nvcc) if nvcc else None,
        cuda_archs=choose_archs(nvcc, archs) if nvcc else (),
        problem=problem,
    )
    return _steps(library, objects, torch, info, nvcc), info


def build(
    library: Path,
    objects: Path,
    *,
    cuda: bool | None = None,
    report: Report = lambda *_: None,
    beside: Step | None = None,
) -> BuildInfo:
    """Compile csrc into ``library``, as :func:`plan` says. Object files that are up to date are kept.

    The description of the library goes beside it, with the suffix ``.json``. ``report`` is called after every finished
    step. The step ``beside`` runs with the others and may fail.

    Raises:
        BuildError: What ``plan`` raises, and if a C++ source does not compile.
        CudaBuildError: What ``plan`` raises, and if a CUDA source does not compile.
    """
    steps, info = plan(library, objects, cuda=cuda)
    _run(steps, report, beside)
    info.write(library)
    return info


def build_regions(report: Report = lambda *_: None) -> Path:
    """Compile the executor of regions for the torch that is here. Returns the library.

    Raises:
        BuildError: If there is no compiler or no torch, or if it does not compile with the headers of that torch.
    """
    with _objects_folder() as objects:
        step = regions_step(objects)
        if not step.up_to_date():
            step.run()
    _remove_others(step.output)
    report(1, 1, step.output.name)
    return step.output


def _remove_others(library: Path) -> None:
    """Removes the executors of regions of older sources."""
    for other in library.parent.glob(f"{library.stem[:-8]}*.so"):
        if other != library:
            other.unlink()


def build_in_place(report: Report = lambda *_: None) -> BuildInfo:
    """Compile for the package that contains this file, in a checkout or installed."""
    with _objects_folder() as objects:
        regions = regions_step(objects)
        info = build(LIBRARY, objects, report=report, beside=regions)
    _remove_others(regions.output)
    return info


@contextlib.contextmanager
def _objects_folder() -> Iterator[Path]:
    if csrc_folder().parent != PACKAGE:
        yield PACKAGE.parent / "build" / "csrc"
        return
    with tempfile.TemporaryDirectory(prefix="fastlayers-") as folder:
        yield Path(folder)
