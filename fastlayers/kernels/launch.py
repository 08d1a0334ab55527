"""Launching a Triton kernel at the cost of one native call.

``kernel[grid](...)`` binds, specialises and looks the kernel up anew at every call: 16 to 20 us for a few arguments. A
:class:`Kernel` pays that once per specialisation, keeps the compiled kernel and hands it to the driver directly.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

#: What ``JITFunction.run`` does once it has a compiled kernel, and therefore what :class:`Kernel` may do in its place.
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
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


class Kernel:
    """A ``@triton.jit`` function with a cache of its compiled specialisations.

    The function takes run-time arguments first (tensors, ints, floats annotated ``tl.float64``, None), then its
    constexprs.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.direct = _DIRECT and isinstance(function, JITFunction)
        self.compiled: dict[tuple[Any, ...], tuple[Any, int, Any]] = {}

    def __call__(self, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], num_warps: int) -> None:
        """Run ``programs`` programs on the current stream of the device of ``arguments[0]``, which is a tensor."""
        device = arguments[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(programs, arguments, constants, num_warps)
        if not self.direct:
            self.function[(programs,)](*arguments, *constants, num_warps=num_warps)
            return None
        # The key says of each argument what Triton specialises on; `values` has addresses in the place of tensors.
        key: list[Any] = [device, num_warps, constants]
        values: list[Any] = []
        for argument in arguments:
            if type(argument) is int:
                key.append((argument == 1, argument & 15 == 0, argument > 0x7FFFFFFF))
            elif argument is None or type(argument) is float:
                key.append(type(argument))
            else:
                address = argument.data_ptr()
                key.append((argument.dtype, address & 15 == 0))
                argument = address
            values.append(argument)
        entry = self.compiled.get(tuple(key))
        if entry is None or _hooked():
            kernel = self.function[(programs,)](*arguments, *constants, num_warps=num_warps)
            self.compiled[tuple(key)] = (kernel.run, kernel.function, kernel.packed_metadata)
            return None
        run, function, metadata = entry
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(programs, 1, 1, stream, function, metadata, None, None, None, *values, *constants)
        return None


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
