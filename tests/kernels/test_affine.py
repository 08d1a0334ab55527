"""Indices of generated kernels: those of the memory, and divisions that are exact or refused."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from fastlayers.kernels.affine import Index, divide, indices_of, unflatten


def value_of(index, **variables):
    return index.constant + sum(c * (variables[a.variable] // a.divisor % a.size) for c, a in index.terms)


@pytest.mark.parametrize("sizes", [(4, 6), (2, 3, 4), (5,), (3, 1, 2), (2, 2, 2, 3)])
def test_indices_are_those_of_the_memory(sizes):
    for order in itertools.permutations(range(len(sizes))):
        t = torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])
        indices = indices_of("x", t.shape, t.stride())
        for x in range(t.numel()):
            place = [value_of(index, x=x) for index in indices]
            assert sum(i * s for i, s in zip(place, t.stride(), strict=True)) == x
            assert all(0 <= i < n for i, n in zip(place, sizes, strict=True))


def test_division_is_exact_or_refused():
    x = Index.of("x", 24)
    for index, stride in itertools.product(
        [x, x + 3, x * 2 + -5, Index.of("x", 24, 2) * 4 + Index.of("x", 2)], range(1, 9)
    ):
        found = divide(index, stride)
        for i in range(24 if found else 0):
            quotient, rest = (value_of(part, x=i) for part in found)
            assert (quotient, rest) == divmod(value_of(index, x=i), stride)
    assert divide(x, 5) is None
    assert unflatten(x, (4, 6), (6, 1)) is not None
    assert unflatten(x, (3, 5), (5, 1)) is None


def test_neighbouring_atoms_join():
    rows, columns = Index.of("x", 4, 6), Index.of("x", 6)
    assert rows * 6 + columns == Index.of("x", 24)
    assert (rows * 6 + columns).source({"x": 24}) == "x"
    assert (rows * 8 + columns).source({"x": 24}) == "(x % 6) + (x // 6) * 8"
