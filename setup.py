"""What pyproject.toml cannot express: how to build _C.so, and the tag of the wheel that contains it.

FASTLAYERS_BUILD_EXT controls the C++ and CUDA part: "auto" (default) builds what this machine can build and never fails
the installation, "0" builds nothing, "1" makes any failure fatal. fastlayers/build.py documents the other variables.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MODE = os.environ.get("FASTLAYERS_BUILD_EXT", "auto")
if MODE not in ("auto", "0", "1"):
    sys.exit(f"FASTLAYERS_BUILD_EXT={MODE!r}: expected auto, 0 or 1")

# Loaded by path, because importing the package would import torch, which may not be importable here.
spec = importlib.util.spec_from_file_location("fastlayers_build", ROOT / "fastlayers" / "build.py")
assert spec is not None
assert spec.loader is not None
builder = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = builder
spec.loader.exec_module(builder)


class BuildExt(build_ext):
    """Builds _C.so with fastlayers/build.py instead of setuptools' own compilers."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self) -> None:
        folder = builder.PACKAGE if self.inplace else Path(self.build_lib, "fastlayers")
        library = folder / "_C.so"
        if not self.inplace:
            # build/lib survives between builds: a library that an earlier build left must not get into this wheel.
            library.unlink(missing_ok=True)
        try:
            info = self.compile(library)
        except builder.BuildError as error:
            if MODE == "1":
                sys.exit(f"fastlayers: FASTLAYERS_BUILD_EXT=1, and the build failed: {error}")
            info = builder.BuildInfo(problem=str(error))
            print(f"fastlayers: no C++ or CUDA kernels in this build: {error}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        info.write(library)

    def compile(self, library: Path) -> builder.BuildInfo:  # type: ignore[name-defined]
        # If the user names architectures, a build without CUDA kernels is a failure too.
        strict = MODE == "1" and bool(os.environ.get("FASTLAYERS_CUDA_ARCHS"))
        objects = Path(self.build_temp, "csrc")
        try:
            return builder.build(library, objects, cuda=True if strict else None, report=report)
        except builder.CudaBuildError as error:
            if MODE == "1":
                raise
            print(f"fastlayers: no CUDA kernels in this build: {error}", file=sys.stderr)
            info = builder.build(library, objects, cuda=False, report=report)
            return replace(info, problem=str(error))

    def get_outputs(self) -> list[str]:
        files = [Path(self.build_lib, "fastlayers", name) for name in ("_C.so", "_C.json")]
        return [str(file) for file in files if file.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BdistWheel(bdist_wheel):
    """Tags the wheel by platform only: _C.so has no Python symbols, so any Python can load it."""

    def get_tag(self) -> tuple[str, str, str]:
        self.root_is_pure = not Path(self.get_finalized_command("build_ext").build_lib, "fastlayers", "_C.so").exists()
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


def report(done: int, total: int, what: str) -> None:
    print(f"[{done}/{total}] {what}", flush=True)


setup(
    packages=[*find_packages(include=["fastlayers", "fastlayers.*"]), "fastlayers.csrc"],
    # The sources are installed too, so that `python -m fastlayers build` can compile them later.
    package_dir={"fastlayers.csrc": "csrc"},
    package_data={
        "fastlayers": ["py.typed"],
        "fastlayers.integrations.hub_kernels": ["metadata.json"],
        "fastlayers.csrc": ["*.cpp", "*.cu", "*.h", "*.cuh", "common/*", "regions/*"],
    },
    ext_modules=[] if MODE == "0" else [Extension("fastlayers._C", sources=[])],
    cmdclass={"build_ext": BuildExt, "bdist_wheel": BdistWheel},
    zip_safe=False,
)
