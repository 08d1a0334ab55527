"""Whole numbers that follow from sizes which differ from call to call, for kernels that serve all of these.

A :class:`Symbolic` is an int, the one that it is for the sizes at which a kernel is written, and a polynomial of these
sizes, as which it is printed into the kernel. So what computes with sizes needs no second version. An order that the
polynomials do not settle by themselves is a condition on the sizes, which :func:`conditions` collects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "NAME",
    "Symbol",
    "Symbolic",
    "as_float",
    "conditions",
    "divides",
    "hint",
    "is_less",
    "is_surely_less",
    "symbols_in",
]

#: How the names of symbols begin.
NAME = "size"

#: The least value of a size that differs: torch takes 0 and 1 for sizes of their own.
LEAST = 2


class Symbol(NamedTuple):
    """A size that differs, and the one where a kernel is written."""

    name: str
    value: int

    def __str__(self) -> str:
        return self.name


class Quotient(NamedTuple):
    """``a // b``, or ``a % b``, of numbers that are not negative, where that is no polynomial."""

    sign: str
    a: int
    b: int

    @property
    def value(self) -> int:
        a, b = hint(self.a), hint(self.b)
        return a // b if self.sign == "//" else a % b

    def __str__(self) -> str:
        return f"({self.a} {self.sign} {self.b})"


Atom: TypeAlias = Symbol | Quotient
#: The coefficient of each product of atoms; that of no atoms is the constant.
Terms: TypeAlias = dict[tuple[Atom, ...], int]

_conditions: ContextVar[dict[str, None] | None] = ContextVar("_conditions", default=None)


@contextmanager
def conditions() -> Iterator[dict[str, None]]:
    """Collect what is assumed of sizes, as source."""
    found: dict[str, None] = {}
    token = _conditions.set(found)
    try:
        yield found
    finally:
        _conditions.reset(token)


class Symbolic(int):
    """A number that follows from sizes. It equals another one if the polynomials are the same.

    Attributes:
        terms: of the polynomial.
    """

    terms: Terms

    @staticmethod
    def symbol(name: str, value: int) -> Symbolic:
        """The number that a size is, which has this value where a kernel is written."""
        return _symbolic({(Symbol(name, value),): 1})

    def __add__(self, other: int) -> int:
        terms = dict(self.terms)
        for atoms, factor in terms_of(other).items():
            terms[atoms] = terms.get(atoms, 0) + factor
        return _number(terms)

    def __mul__(self, other: int) -> int:
        terms: Terms = {}
        others = terms_of(other)
        for ours, first in self.terms.items():
            for theirs, second in others.items():
                atoms = tuple(sorted((*ours, *theirs), key=str))
                terms[atoms] = terms.get(atoms, 0) + first * second
        return _number(terms)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> int:
        return self * -1

    def __sub__(self, other: int) -> int:
        return self + -other

    def __rsub__(self, other: int) -> int:
        return -self + other

    def __floordiv__(self, other: int) -> int:
        return parts(self, other)[0]

    def __mod__(self, other: int) -> int:
        return parts(self, other)[1]

    def __rfloordiv__(self, other: int) -> int:
        return parts(other, self)[0]

    def __rmod__(self, other: int) -> int:
        return parts(other, self)[1]

    def __eq__(self, other: object) -> bool:
        return type(other) is Symbolic and self.terms == other.terms

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        return is_less(self, other)

    def __gt__(self, other: int) -> bool:
        return is_less(other, self)

    def __le__(self, other: int) -> bool:
        return not is_less(other, self)

    def __ge__(self, other: int) -> bool:
        return not is_less(self, other)

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        products = [" * ".join([*map(str, atoms), *([str(c)] if c != 1 or not atoms else [])]) for atoms, c in self]
        is_atom = [(len(atoms), c) for atoms, c in self] == [(1, 1)]
        return products[0] if is_atom else f"({' + '.join(products)})"

    def __iter__(self) -> Iterator[tuple[tuple[Atom, ...], int]]:
        """The terms, in an order of their own."""
        return iter(sorted(self.terms.items(), key=str))

    def __format__(self, spec: str) -> str:
        return str(self)

    __repr__ = __str__

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"{self} is another number for other sizes")

    __int__ = __float__ = __truediv__ = __rtruediv__ = __pow__ = __and__ = __or__ = __rshift__ = __lshift__ = _refuse
    __divmod__ = __abs__ = __round__ = __xor__ = __invert__ = _refuse

    def __reduce__(self) -> Any:
        return _symbolic, (self.terms,)


def _symbolic(terms: Terms) -> Symbolic:
    made = int.__new__(Symbolic, sum(c * math.prod(atom.value for atom in atoms) for atoms, c in terms.items()))
    made.terms = terms
    return made


def _number(terms: Terms) -> int:
    """The number of a polynomial; a plain one if it has no atoms."""
    terms = {atoms: factor for atoms, factor in terms.items() if factor}
    return _symbolic(terms) if any(terms) else terms.get((), 0)


def hint(number: int) -> int:
    """The plain number that it is for the sizes at which a kernel is written. To choose by it assumes nothing."""
    return int.__add__(number, 0)


def terms_of(number: int) -> Terms:
    return number.terms if type(number) is Symbolic else {(): number}


def parts(a: int, b: int) -> tuple[int, int]:
    """The quotient and the remainder of numbers that are not negative."""
    whole: Terms = {}
    rest: Terms = {}
    for atoms, factor in terms_of(a).items():
        found = _divided(atoms, factor, terms_of(b))
        if found is None:
            rest[atoms] = factor
        else:
            whole[found[0]] = found[1]
    quotient, left = _number(whole), _number(rest)
    if type(left) is not Symbolic and type(b) is not Symbolic:
        return quotient + left // b, left % b
    if (_least(left) or 0) >= 0 and _least(left) is not None and (_least(b - left) or 0) > 0:
        return quotient, left
    below, rest_of = (_symbolic({(Quotient(sign, left, b),): 1}) for sign in ("//", "%"))
    return quotient + below, rest_of


def _divided(atoms: tuple[Atom, ...], factor: int, by: Terms) -> tuple[tuple[Atom, ...], int] | None:
    """A term by a polynomial of one term; None if that is no term."""
    if len(by) != 1:
        return None
    ((others, divisor),) = by.items()
    left = list(atoms)
    for atom in others:
        if atom not in left:
            return None
        left.remove(atom)
    return (tuple(left), factor // divisor) if factor % divisor == 0 else None


def _least(number: int) -> int | None:
    """A lower bound; None where the terms show no such bound."""
    # Of what is above the least value of each atom: where no coefficient is negative, all of it is 0 at least.
    shifted: dict[tuple[Atom, ...], int] = {}
    for atoms, factor in terms_of(number).items():
        products: dict[tuple[Atom, ...], int] = {(): factor}
        for atom in atoms:
            low = LEAST if isinstance(atom, Symbol) else 0
            more = {tuple(sorted((*each, atom), key=str)): c for each, c in products.items()}
            for each, c in products.items():
                more[each] = more.get(each, 0) + low * c
            products = more
        for each, c in products.items():
            shifted[each] = shifted.get(each, 0) + c
    total = shifted.pop((), 0)
    return total if all(c >= 0 for c in shifted.values()) else None


def is_less(a: int, b: int) -> bool:
    """Whether a < b. Where that is not so for all sizes it is assumed."""
    if type(a) is not Symbolic and type(b) is not Symbolic:
        return a < b
    above, below = _least(b - a), _least(a - b)
    if above is not None and above > 0:
        return True
    if below is not None and below >= 0:
        return False
    found, known = hint(a) < hint(b), _conditions.get()
    if known is not None:
        known[f"{a} {'<' if found else '>='} {b}"] = None
    return found


def is_surely_less(a: int, b: int) -> bool:
    """Whether a < b. If not, nothing is assumed: what asks must be right for either."""
    with conditions() as found:
        less = is_less(a, b)
    known = _conditions.get()
    if less and known is not None:
        known.update(found)
    return less


def divides(divisor: int, number: int) -> bool:
    """Whether one number divides another one, whatever the sizes."""
    rest = number % divisor
    return type(rest) is not Symbolic and rest == 0


def as_float(number: int, dtype: str) -> str:
    """The number as the source of a float, in Triton's name of a dtype."""
    return f"{number}.to({dtype})" if type(number) is Symbolic else str(float(number))


def symbols_in(source: str) -> tuple[str, ...]:
    """The names of the symbols that a source has, each once."""
    return tuple(sorted(set(re.findall(rf"\b{NAME}\d+\b", source))))
