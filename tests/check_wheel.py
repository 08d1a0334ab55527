"""Check that one wheel serves several Pythons and torches: ``check_wheel.py WHEEL PYTHON...`` (``make test-wheel``).

The wheel is unpacked once. Each Python, with the torch that it has, imports fastlayers from there and compares the CPU
kernels with the eager backend. If a cuobjdump is found (Triton carries one), the GPU code inside is listed too.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MAX_BYTES = 100_000_000  # PyPI's limit for a file
EXPECTED_ARCHS = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}


def check_here(folder: str) -> None:
    """What each Python runs."""
    sys.path.insert(0, folder)
    import torch

    import fastlayers
    from fastlayers import backends
    from fastlayers import functional as F

    assert Path(fastlayers.__file__).is_relative_to(folder), fastlayers.__file__
    reason = backends.available()["cpu"]
    assert reason is None, reason
    assert backends.has_library_kernel("softmax_forward", "CUDA"), "no CUDA kernels in the library"

    x, y = torch.randn(33, 257), torch.randn(33, 257)
    calls = {
        "relu_add": lambda: F.relu_add(x, y, 0.5),
        "add_relu": lambda: F.add_relu(x, y),
        "softmax": lambda: F.softmax(x),
        "log_softmax": lambda: F.log_softmax(x, 0),
        "mul": lambda: F.mul(x, y),
    }
    served = []
    for name, call in calls.items():
        with backends.backend("eager"):
            expected = call()
        try:
            with backends.backend("cpu"):
                torch.testing.assert_close(call(), expected)
        except backends.BackendError:
            continue  # no CPU kernel for this one
        served.append(name)
    assert {"relu_add", "add_relu"} <= set(served), served
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"Python {python}, torch {torch.__version__}: imported; right on the CPU: {', '.join(served)}")


def gpu_code(library: Path) -> set[str] | None:
    """The architectures with machine code, and PTX as compute_NN; None without a cuobjdump."""
    try:
        import triton

        cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        listing = [
            subprocess.run([cuobjdump, flag, library], check=True, capture_output=True, text=True).stdout
            for flag in ("--list-elf", "--list-ptx")
        ]
    except (ImportError, OSError):
        return None
    ptx = {arch.replace("sm", "compute") for arch in re.findall(r"sm_\d+", listing[1])}
    return set(re.findall(r"sm_\d+", listing[0])) | ptx


def main(wheel: str, *pythons: str) -> None:
    size = Path(wheel).stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"{wheel} has {size / 1e6:.0f} MB; indexes take up to {MAX_BYTES / 1e6:.0f}")
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        library = Path(folder, "fastlayers", "_C.so")
        print(f"{wheel}: _C.so sha256 {hashlib.sha256(library.read_bytes()).hexdigest()[:16]}")
        held = gpu_code(library)
        if held is not None:
            print("GPU code:", *sorted(held, key=lambda arch: int(arch.split("_")[1])))
            missing = (EXPECTED_ARCHS | {"compute_120"}) - held
            if missing:
                sys.exit(f"missing from the wheel: {', '.join(sorted(missing))}")
        for python in pythons:
            subprocess.run([python, __file__, "--here", folder], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        check_here(sys.argv[2])
    else:
        main(*sys.argv[1:])
