"""Numbers that follow from sizes: against plain numbers, and what they assume."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlayers.kernels.launch import cdiv
from fastlayers.kernels.symbolic import (
    Symbolic,
    conditions,
    divides,
    hint,
    is_less,
    is_surely_less,
    symbols_in,
)

OPERATIONS = [operator.add, operator.mul, operator.floordiv, operator.mod, cdiv, min, max]
#: Numbers of two sizes, a and b, that are not negative.
NUMBERS = [
    lambda a, b: a, lambda a, b: a * b, lambda a, b: 64 * a, lambda a, b: 64 * a + 3, lambda a, b: b * (a + 1),
    lambda a, b: a * a - a, lambda a, b: a // 4, lambda a, b: 7 * b % 5, lambda a, b: 64, lambda a, b: 1,
]  # fmt: skip


@given(
    st.integers(2, 99), st.integers(2, 99), *(st.sampled_from(NUMBERS) for _ in range(2)), st.sampled_from(OPERATIONS)
)
def test_as_plain_numbers(a, b, first, second, operation):
    sizes = {"size0": a, "size1": b}
    symbols = [Symbolic.symbol(name, value) for name, value in sizes.items()]
    x, y = (f(*symbols) for f in (first, second))
    plain = [f(a, b) for f in (first, second)]
    if operation in (operator.floordiv, operator.mod, cdiv) and plain[1] == 0:
        return
    with conditions() as found:
        result = operation(x, y)
    assert hint(result) == operation(*plain)
    assert eval(str(result), sizes) == operation(*plain)
    assert all(eval(each, dict(sizes)) for each in found)


@given(*(st.integers(2, 99) for _ in range(4)), *(st.sampled_from(NUMBERS) for _ in range(2)))
def test_an_order_is_right_for_all_sizes_that_meet_what_it_assumes(a, b, c, d, first, second):
    x, y = (f(Symbolic.symbol("size0", a), Symbolic.symbol("size1", b)) for f in (first, second))
    with conditions() as found:
        less = is_less(x, y)
    if all(eval(each, {"size0": c, "size1": d}) for each in found):
        assert less == (first(c, d) < second(c, d))
    with conditions() as found:
        less = is_surely_less(x, y)
    if less and all(eval(each, {"size0": c, "size1": d}) for each in found):
        assert first(c, d) < second(c, d)


def test_what_follows_from_the_numbers_themselves_assumes_nothing():
    n, m = Symbolic.symbol("size0", 37), Symbolic.symbol("size1", 5)
    with conditions() as found:
        assert n > 1
        assert 64 * n > 63
        assert n * m > n
        assert n - 1 < n
        assert not is_surely_less(n, 5)
        assert divides(64, 64 * n)
        assert divides(n, m * n)
        assert not divides(64, n)
    assert found == {}
    with conditions() as found:
        assert n < 1024
        assert min(n, 40) is n
    assert [eval(each, {"size0": 1030}) for each in found] == [False, False]


def test_equal_numbers_are_one_key():
    n = Symbolic.symbol("size0", 37)
    assert {2 * n: 1}[n * 3 - n] == 1
    assert n != 37
    assert n - n == 0
    assert type(n - n) is int
    assert symbols_in(f"x < {n * 2} & size12 < resize3") == ("size0", "size12")


@pytest.mark.parametrize("lose", [int, float, lambda n: n / 2, lambda n: n**2, lambda n: n >> 1, divmod])
def test_what_would_lose_the_polynomial_is_an_error(lose):
    with pytest.raises(TypeError):
        lose(Symbolic.symbol("size0", 37))


def test_copies():
    n = Symbolic.symbol("size0", 37) * 2 + 1
    for other in (copy.copy(n), copy.deepcopy(n), pickle.loads(pickle.dumps(n))):
        assert other == n
        assert hint(other) == 75
