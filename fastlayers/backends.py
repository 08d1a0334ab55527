"""Which implementation answers a call: what this machine has, what a tensor gets, how a user forces one.

Four backends run on a GPU and three on a CPU:

=========  ==========================================================================================
eager      the plain-PyTorch composition, op by op. Always there; the oracle of every other backend
compile    the same composition under :func:`torch.compile`
triton     Triton kernels (CUDA tensors; CPU tensors too when ``TRITON_INTERPRET=1``)
cuda       CUDA C++ kernels from ``csrc``, for CUDA tensors
cpu        C++ kernels from ``csrc``, for CPU tensors
=========  ==========================================================================================

Left alone, a CUDA tensor gets ``cuda``, else ``triton``, else ``eager``; a CPU tensor gets ``cpu``, else ``eager``.
An op for which that backend has no kernel, or was measured slower than torch, answers with ``eager``. A *forced*
backend never does that silently: it serves, or raises :class:`BackendError` with the reason.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fastlayers.build import BuildInfo, platform_problem

__all__ = [
    "BACKENDS",
    "BackendError",
    "available",
    "backend",
    "changed",
    "choose",
    "generates_kernels",
    "get_backend",
    "on_change",
    "problem",
    "refuse",
    "set_backend",
]

BACKENDS = ("eager", "compile", "triton", "cuda", "cpu")
LIBRARY = Path(__file__).with_name("_C.so")

#: Compute capability from which the kernels are built; an older GPU is served by Triton or eager.
MINIMUM_CAPABILITY = (8, 0)

BUILD_HINT = "run `python -m fastlayers build`, or reinstall fastlayers on a machine with"


class BackendError(RuntimeError):
    """A forced backend cannot serve this call; the message says why and what would."""


def _load_library() -> str | None:
    """Register the ops of ``csrc`` with the dispatcher. Returns the reason where that is not possible."""
    if not LIBRARY.exists():
        missing = f"{LIBRARY.name} was not built; {BUILD_HINT} a C++ compiler (and nvcc for the CUDA part)"
        return platform_problem() or missing
    try:
        torch.ops.load_library(str(LIBRARY))
    except (OSError, RuntimeError) as error:
        return f"{LIBRARY.name} does not load under torch {torch.__version__}: {error}"
    return None


_library_problem = _load_library()
#: Not checked here: importing must not fail, and ``info`` must be able to say what is wrong. :func:`choose` checks it.
_forced: str | None = os.environ.get("FASTLAYERS_BACKEND") or None
_on_change: list[Callable[[], None]] = []


def has_library_kernel(op: str, dispatch_key: str) -> bool:
    """Whether ``csrc`` was built with a kernel of this op for "CPU" or "CUDA"."""
    return _library_problem is None and torch._C._dispatch_has_kernel_for_dispatch_key(
        f"fastlayers::{op}", dispatch_key
    )


def triton_interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def problem(name: str, device: torch.device | None = None) -> str | None:
    """Why backend ``name`` cannot run (for tensors on ``device``, or at all); None where it can."""
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; expected one of {', '.join(BACKENDS)}")
    kind = device.type if device is not None else None
    if name in ("eager", "compile"):
        return None
    if name == "cpu":
        if _library_problem is not None:
            return _library_problem
        if kind not in (None, "cpu"):
            return f"it serves CPU tensors, and got one on {device}"
        return None
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (it comes with the CUDA builds of torch on Linux)"
        if triton_interprets() and kind in (None, "cpu"):
            return None
    elif _library_problem is not None:
        return _library_problem
    elif not has_library_kernel("softmax_forward", "CUDA"):
        return f"{LIBRARY.name} was built without CUDA kernels; {BUILD_HINT} nvcc and a GPU"
    if kind not in (None, "cuda"):
        return f"it serves CUDA tensors, and got one on {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return f"needs compute capability {MINIMUM_CAPABILITY} or newer, and the device has {capability}"
    if name == "cuda":
        built = BuildInfo.read(LIBRARY)
        if built is not None and not built.runs_on(capability):
            needed = f"sm_{capability[0]}{capability[1]}"
            return f"{LIBRARY.name} has {built.contents()}, not for {needed}; run `python -m fastlayers build`"
    return None


def choose(device: torch.device) -> str:
    """The backend that answers for tensors on ``device``: the forced one, else the best one here.

    Raises:
        BackendError: the forced backend does not run on that device.
        ValueError: ``FASTLAYERS_BACKEND`` names no backend.
    """
    if _forced is not None:
        try:
            reason = problem(_forced, device)
        except ValueError as error:  # set_backend takes no such name
            raise ValueError(f"FASTLAYERS_BACKEND={_forced!r}: {error}") from None
        if reason is not None:
            raise BackendError(f"backend {_forced!r} was forced, but cannot serve: {reason}")
        return _forced
    order = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}.get(device.type, ())
    return next((name for name in order if problem(name, device) is None), "eager")


def generates_kernels(device: torch.device) -> bool:
    """Whether kernels that are generated, which are Triton's, serve tensors on ``device``."""
    forced = ("triton",) if device.type == "cpu" else (None, "cuda", "triton")
    return _forced in forced and problem("triton", device) is None


def refuse(reason: str) -> None:
    """Raise if a kernel backend is forced and this call is not for it; otherwise the caller falls back to eager."""
    if _forced not in (None, "eager", "compile"):
        raise BackendError(f"backend {_forced!r} was forced, but cannot serve: {reason}")


def available() -> dict[str, str | None]:
    """Every backend with None where this machine has it, else the reason why not."""
    return {name: problem(name) for name in BACKENDS}


def get_backend() -> str | None:
    """The forced backend, or None where each call gets the best one."""
    return _forced


def set_backend(name: str | None) -> None:
    """Force one backend for every fused op of this process; None gives the choice back.

    The environment variable ``FASTLAYERS_BACKEND`` does the same from outside, read once at import. Importing succeeds
    whatever it says: the first call of an op raises where the name is wrong or this machine does not have it.

    Raises:
        ValueError: no such backend.
        BackendError: this machine does not have it.
    """
    if name is not None:
        reason = problem(name)
        if reason is not None:
            raise BackendError(f"backend {name!r} is not available here: {reason}")
    _force(name)


def _force(name: str | None) -> None:
    global _forced
    _forced = name
    changed()


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """``with backend("triton"): ...`` forces one backend inside the block, for the whole process as set_backend.

    A graph recorded inside keeps its backend: the backward of an op uses the one that its forward used.
    """
    before = _forced
    set_backend(name)
    try:
        yield
    finally:
        _force(before)


def on_change(notify: Callable[[], None]) -> None:
    """Call ``notify`` whenever an op may take another implementation, for what caches such choices."""
    _on_change.append(notify)


def changed() -> None:
    """Say that ops may take other implementations from now on."""
    for notify in _on_change:
        notify()
