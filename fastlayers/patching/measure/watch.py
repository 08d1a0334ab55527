"""Watches a run from outside: the calls of modules, their arguments and their results.

A forward hook would change the run: a patched parent that has absorbed a layer calls that layer again if it has a hook,
or if there is a global one. Python's profiling hook sees calls without affecting them. It works for one thread, and a
profiler that was on before is on again afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import nn

#: The code that every call of a module runs, whatever its class.
MODULE_CALL: CodeType = nn.Module._call_impl.__code__  # type: ignore[attr-defined]


@contextmanager
def watching(
    codes: Container[CodeType], entered: Callable[[FrameType], None], left: Callable[[FrameType, Any], None]
) -> Iterator[None]:
    """Report the calls of some Python functions while a block runs.

    Args:
        codes: the code objects of these functions; :data:`MODULE_CALL` for calls of modules.
        entered: called with the frame of a call at its start; ``f_locals`` of the frame are the arguments.
        left: called with that frame and the result of the call, None if it raises.
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
