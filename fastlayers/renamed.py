"""Old names of parameters: calls that use them work for one release, with a DeprecationWarning.

A wrapper would cost every call 0.1 us. So a renamed function keeps each old name as a last keyword-only parameter, at a
cost of 0.01 us, and :func:`formerly` hides it from the signature.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

#: Default of the required parameters of a renamed function: a call may pass the first one by its old name.
REQUIRED: Any = None

_Function = TypeVar("_Function", bound=Callable[..., Any])


def formerly(*old_names: str, required: int) -> Callable[[_Function], _Function]:
    """Decorate a renamed function: its signature shows no old names, and no defaults of the required parameters.

    Args:
        old_names: the parameters that exist only as old names.
        required: how many of the first parameters are required.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in old_names]
        kept[:required] = [parameter.replace(default=inspect.Parameter.empty) for parameter in kept[:required]]
        function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return function

    return decorate


def renamed(function: str, old: str, new: str, value: Any, given: Any) -> Any:
    """The argument ``value``, passed by its old name, for the parameter ``new``.

    Raises:
        TypeError: the parameter was given by its new name, too.
    """
    if given is not None:
        raise TypeError(f"{function}() got multiple values for argument {new!r}, which was called {old!r}")
    warnings.warn(
        f"{function}(): the parameter {old!r} is now {new!r}, and the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return value
