"""Index arithmetic for generated kernels: where an element of a view lies, as a formula of the loop's variable.

An index is a constant and a sum of coefficients times atoms, where an atom is ``(variable // divisor) % size``. Views,
broadcasts, slices and permutations of what a loop walks over all stay of this form: dividing a sum by a stride splits
an atom in two. Where it would not, because sizes do not divide each other, :func:`divide` says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastlayers.kernels.symbolic import divides, is_surely_less

__all__ = ["ZERO", "Atom", "Index", "divide", "flatten", "indices_of", "unflatten"]


class Atom(NamedTuple):
    """``(variable // divisor) % size``."""

    variable: str
    divisor: int
    size: int


@dataclass(frozen=True)
class Index:
    """``constant + the sum of coefficient * atom``; the terms are in a fixed order, and each atom appears once."""

    terms: tuple[tuple[int, Atom], ...] = ()
    constant: int = 0

    @staticmethod
    def of(variable: str, size: int, divisor: int = 1) -> Index:
        return Index(((1, Atom(variable, divisor, size)),)) if size > 1 else ZERO

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        return Index(merged((*self.terms, *other.terms)), self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        return Index(tuple((c * factor, a) for c, a in self.terms) if factor else (), self.constant * factor)

    @property
    def least(self) -> int:
        return self.constant + sum(min(0, c * (a.size - 1)) for c, a in self.terms)

    @property
    def most(self) -> int:
        return self.constant + sum(max(0, c * (a.size - 1)) for c, a in self.terms)

    @property
    def variables(self) -> frozenset[str]:
        """Those of the loop. A variable may be an expression of them in parentheses."""
        return frozenset(name for _, atom in self.terms for name in re.findall(r"\b[a-z]\b", atom.variable))

    def source(self, sizes: dict[str, int]) -> str:
        """The formula in Python. ``sizes`` are those of the variables."""
        parts = []
        for c, (variable, divisor, size) in self.terms:
            atom = variable if divisor == 1 else f"({variable} // {divisor})"
            if not is_surely_less(sizes[variable] - 1, divisor * size):
                atom = f"({atom} % {size})"
            parts.append(atom if c == 1 else f"{atom} * {c}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


ZERO = Index()


def merged(terms: Sequence[tuple[int, Atom]]) -> tuple[tuple[int, Atom], ...]:
    """Terms with equal atoms added up, and neighbouring atoms that continue each other made one."""
    sums: dict[Atom, int] = {}
    for c, atom in terms:
        sums[atom] = sums.get(atom, 0) + c
    found = sorted(((c, a) for a, c in sums.items() if c), key=lambda term: (term[1].variable, term[1].divisor))
    joined: list[tuple[int, Atom]] = []
    for c, atom in found:
        if joined:
            below, (variable, divisor, size) = joined[-1]
            if variable == atom.variable and divisor * size == atom.divisor and c == below * size:
                joined[-1] = (below, Atom(variable, divisor, size * atom.size))
                continue
        joined.append((c, atom))
    return tuple(joined)


def divide(index: Index, stride: int) -> tuple[Index, Index] | None:
    """Quotient and remainder of an index by a stride; None if they are not of this form."""
    quotient: list[tuple[int, Atom]] = []
    rest: list[tuple[int, Atom]] = []
    for c, atom in index.terms:
        if divides(stride, c):
            quotient.append((c // stride, atom))
        elif c > 0 and is_surely_less(c * (atom.size - 1), stride):
            rest.append((c, atom))
        elif c > 0 and divides(c, stride) and divides(stride // c, atom.size):
            factor = stride // c
            quotient.append((1, Atom(atom.variable, atom.divisor * factor, atom.size // factor)))
            rest.append((c, Atom(atom.variable, atom.divisor, factor)))
        else:
            return None
    found = Index(merged(quotient), index.constant // stride), Index(merged(rest), index.constant % stride)
    return found if is_surely_less(-1, found[1].least) and is_surely_less(found[1].most, stride) else None


def flatten(indices: Sequence[Index], strides: Sequence[int]) -> Index:
    """The offset of an element of a tensor, from its index in each dimension."""
    place = ZERO
    for index, stride in zip(indices, strides, strict=True):
        place = place + index * stride
    return place


def unflatten(place: Index, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Index, ...] | None:
    """The index in each dimension of a dense tensor of the element at an offset; None if it is not of this form."""
    found = [ZERO] * len(sizes)
    for d in sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: -strides[d]):
        parts = divide(place, strides[d])
        if parts is None:
            return None
        found[d], place = parts
    return tuple(found) if not place.terms and place.constant == 0 else None


def indices_of(variable: str, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Index, ...] | None:
    """The index in each dimension of the elements of a dense tensor, counted in the order of its memory."""
    total = 1
    for size in sizes:
        total *= size
    return unflatten(Index.of(variable, total), sizes, strides)
