"""Launching a Triton kernel at the cost of one native call.

``kernel[grid](...)`` binds, specialises and looks the kernel up again at every call: 16 to 20 us for a few arguments. A
:class:`Launch` pays that once, keeps the compiled kernel and hands it to the driver directly. The wrappers keep their
launches by shape and layout, so that a repeated call computes nothing but addresses.
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

#: Launches that one wrapper keeps; each is a few hundred bytes.
KEPT = 4096

#: What ``JITFunction.run`` does once it has a compiled kernel, and therefore what :class:`Launch` may do in its place.
_LAUNCH = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    " knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
)


def _run_is_as_expected() -> bool:
    """Whether this Triton launches as the one that this file was written for; if not, ``kernel[grid]`` stays in use."""
    source = inspect.getsource(JITFunction.run)
    return torch.version.hip is None and " ".join(_LAUNCH.split()) in " ".join(source.split())


_DIRECT = _run_is_as_expected()


def _hooked() -> bool:
    """Whether a profiler listens to launches: then Triton itself has to make them."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Launch:
    """A ``@triton.jit`` function with its grid and all of its arguments but the tensors, ready to be called with these.

    The function takes tensors (or None) first, then ints and floats (annotated ``tl.float64``), then constexprs. One
    launch serves tensors of the same dtypes only. ``exact``: no product is contracted with a sum.
    """

    __slots__ = ("aligned", "compiled", "constants", "direct", "exact", "function", "num_warps", "programs", "scalars")

    def __init__(
        self,
        function: Any,
        programs: int,
        scalars: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        exact: bool = False,
    ) -> None:
        self.function = function
        self.programs = programs
        self.scalars = scalars
        self.constants = constants
        self.num_warps = num_warps
        self.exact = exact
        self.direct = _DIRECT and isinstance(function, JITFunction)
        self.compiled: dict[tuple[int, ...], tuple[Any, int, Any]] = {}
        #: What was compiled for tensors that are aligned, if they are there, by the number of their device.
        self.aligned: dict[int, Any] = {}

    def at(self, programs: int, scalars: tuple[Any, ...]) -> Launch:
        """The same with another grid and other scalars, which what is compiled does not depend on."""
        other = Launch(self.function, programs, scalars, self.constants, self.num_warps, self.exact)
        other.compiled, other.aligned = self.compiled, self.aligned
        return other

    def __call__(self, first: Tensor, *others: Tensor | None) -> None:
        """Run on the current stream of the device of the first tensor."""
        device = first.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(first, *others)
        elif not self.direct:
            self._with_triton(first, *others)
        else:
            addresses = [first.data_ptr(), *[0 if tensor is None else tensor.data_ptr() for tensor in others]]
            # What Triton specialises on, of all that is not the same in every call: presence and 16-byte alignment.
            key = (device, *[(address & 15 == 0) + (address == 0) for address in addresses])
            entry = self.compiled.get(key)
            if entry is None or _hooked():
                kernel = self._with_triton(first, *others)
                self.compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)
                if 0 not in key[1:]:
                    self.aligned[device] = kernel
            else:
                run, function, metadata = entry
                stream = torch._C._cuda_getCurrentRawStream(device)
                run(
                    self.programs, 1, 1, stream, function, metadata, None, None, None,
                    *addresses, *self.scalars, *self.constants,
                )  # fmt: skip

    def _with_triton(self, *tensors: Tensor | None) -> Any:
        options = {"enable_fp_fusion": False} if self.exact else {}
        return self.function[(self.programs,)](
            *tensors, *self.scalars, *self.constants, num_warps=self.num_warps, **options
        )


@dataclass(frozen=True)
class Result:
    """A tensor that a kernel makes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, sizes: tuple[int, ...], dtype: torch.dtype) -> Result:
        return cls(sizes, tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes))), dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


class Producer:
    """A launch for inputs of one shape and layout, and the tensors that it makes. Called with its inputs, it returns a
    list of its results. A region launches it from C++.

    Args:
        name: what it is called where a program is shown.
        launch: takes the results first.
        absent: the places of its tensors that are None.

    Attributes:
        sizes: what it is called with after its inputs, if it serves many sizes.
    """

    sizes: tuple[int, ...] = ()

    def __init__(
        self, name: str, launch: Launch, results: Sequence[Result], device: torch.device, absent: Sequence[int] = ()
    ) -> None:
        self.__name__ = name
        self.launch, self.results, self.device, self.absent = launch, tuple(results), device, absent

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outs = [result.empty(self.device) for result in self.results]
        given: list[Tensor | None] = [*outs, *inputs]
        for place in self.absent:
            given.insert(place, None)
        self.launch(*given)  # type: ignore[arg-type]
        return outs

    def machine_code(self) -> tuple[Any, ...] | None:
        """The address of the machine code for aligned tensors, its grid, threads, shared memory and numbers, and for
        each number whether it has 64 bits; None before it was called with such tensors."""
        launch = self.launch
        found = launch.aligned.get(self.device.index)
        if found is None:
            return None
        metadata = found.metadata
        simple = metadata.num_ctas == 1 and not (metadata.global_scratch_size or metadata.profile_scratch_size)
        if not simple or metadata.launch_cooperative_grid or metadata.launch_pdl:
            return None
        types = list(found.src.signature.values())[-len(launch.scalars) - len(launch.constants) :]
        kept = [(n, t) for n, t in zip(launch.scalars, types, strict=False) if t != "constexpr"]
        numbers = [struct.unpack("q", struct.pack("d", n))[0] if t == "fp64" else n for n, t in kept]
        wide = [int(t in ("i64", "fp64")) for _, t in kept]
        return found.function, launch.programs, 32 * metadata.num_warps, metadata.shared, numbers, wide


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b
