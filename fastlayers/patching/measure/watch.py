"""Watching a run from outside: which modules are called, with what, and what they return.

A forward hook would change what it watches: a patched parent that has absorbed a layer calls that layer again once
there is a hook on it, or a global one. The interpreter's own profiling hook sees calls without taking part in them. It
is that of one thread, and a profiler which was on before is on again afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import nn

__all__ = ["MODULE_CALL", "watching"]

#: What every call of a module goes through, whatever its class.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__  # type: ignore[attr-defined]


@contextmanager
def watching(
    codes: Container[CodeType], entered: Callable[[FrameType], None], left: Callable[[FrameType, Any], None]
) -> Iterator[None]:
    """Report the calls of some Python functions while the block runs.

    Args:
        codes: the code of these functions, :data:`MODULE_CALL` for calls of modules.
        entered: given the frame of a call that begins; its ``f_locals`` are the arguments.
        left: given that frame and what the call returns, None where it raises.
    """

    def notice(frame: FrameType, event: str, result: Any) -> None:
        if frame.f_code in codes:
            if event == "call":
                entered(frame)
            elif event == "return":
                left(frame, result)

    before: Any = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(before if callable(before) else None)
        if hasattr(before, "enable"):  # cProfile's until Python 3.11, which cannot be set as a function
            before.enable()
