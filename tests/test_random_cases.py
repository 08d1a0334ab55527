"""10,000 random calls against float64: ``make test-random`` on a GPU, and a few of them in every run of the tests.

A call errs no more than torch does in the same dtype, judged as tests/contract judges the calls of the table of ops.
The number of calls is FASTLAYERS_RANDOM_CASES, their seed FASTLAYERS_RANDOM_SEED. Each call that fails is written, as a
line of JSON, to the file that FASTLAYERS_RANDOM_FAILURES names. The lines of random_failures.jsonl are tests of their
own from then on. With FASTLAYERS_RANDOM_SHRINK=1 a test stops at the first call that fails, and hypothesis looks for
the smallest one, which takes minutes where kernels are compiled.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from fastlayers.backends import BackendError
from tests import ROOT
from tests.harness import INTERPRETER, PLACES, Place, check_answer
from tests.random_cases import BUILDERS, Case, Sizes, random_cases
from tests.table import OPS
from tests.table.sample import FLOATING, Op

KEPT = Path(__file__).with_name("random_failures.jsonl")
FAILURES = Path(os.environ.get("FASTLAYERS_RANDOM_FAILURES", ROOT / "build/random_failures.jsonl"))
ASKED = os.environ.get("FASTLAYERS_RANDOM_CASES")
CASES = int(ASKED or 400)
#: Without a GPU these tests show that the calls are valid ones, and that the ops answer as torch does.
CASES_ON_CPU = int(ASKED or 200)
SEED = int(os.environ.get("FASTLAYERS_RANDOM_SEED", "0"))
SHRINKS = os.environ.get("FASTLAYERS_RANDOM_SHRINK") == "1"
#: Shares of the cases. Triton compiles a kernel for nearly each of them.
SHARES = {"cuda": 0.85, "triton": 0.15}
#: A call that errs more than torch does is judged by torch's errors in so many draws of its values, whatever its size:
#: of 10,000 calls some are as unlucky as one in 10,000, and a result may be a single number.
JUDGED = {"few": 2**62, "draws": 200}
#: Failures after which a test gives up.
MOST_FAILURES = 5
SMALL = Sizes(elements=2048, row=257, long_row=600)
#: On the CPU these add float32 up in float64, and so their error is no measure of sums in float32.
SUMMED_IN_FLOAT64 = ("batch_norm", "batch_norm_eval", "instance_norm")
CUDA, TRITON, CPU = Place("cuda", "cuda"), Place("cuda", "triton"), Place("cpu", "cpu")


def op_of(name: str) -> Op:
    return next(op for op in OPS if op.name == name)


def ops_of(place: Place) -> list[str]:
    """The ops with a call in the table that a kernel of the backend serves."""
    return [
        op.name
        for op in OPS
        if place.backend in op.kernels
        and any(place.backend not in sample.refused for sample in op.samples)
        and not (place == INTERPRETER and op.name in SUMMED_IN_FLOAT64)
    ]


def at(place: Place) -> pytest.MarkDecorator:
    params = [pytest.param(name, id=f"{name}-{place}", marks=place.marks()) for name in ops_of(place)]
    return pytest.mark.parametrize("name", params)


def judge(case: Case, place: Place) -> bool:
    """Whether a kernel of the place served the case. An op that has none for it falls back when nothing is forced."""
    op = op_of(case.op)
    # cuDNN's batch_norm (9.19) reads parameters that are not aligned to 16 bytes as if they were, and torch ends there.
    with torch.backends.cudnn.flags(enabled=False):
        try:
            check_answer(op, case.sample, place, case.dtype, **JUDGED)
        except BackendError:
            check_answer(op, replace(case.sample, refused=(place.backend,)), place, case.dtype, **JUDGED)
            return False
    return place.backend != "eager"


def keep(line: str) -> None:
    FAILURES.parent.mkdir(parents=True, exist_ok=True)
    with FAILURES.open("a") as file:
        file.write(line + "\n")


def check(name: str, place: Place, sizes: Sizes, cases: int) -> list[bool]:
    """Judges so many random cases of an op, and says of each whether a kernel served it.

    Raises:
        AssertionError: some err more than torch, or fail.
    """
    served: list[bool] = []
    failures: dict[str, str] = {}
    # The interpreter rounds to 16 bits in its own way.
    dtypes = FLOATING[2:] if place == INTERPRETER else FLOATING

    @seed(SEED)
    @settings(
        max_examples=max(1, cases),
        deadline=None,
        database=None,  # the lines of JSON are kept instead
        phases=(Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=random_cases(op_of(name), sizes, dtypes))
    def one(case: Case) -> None:
        if len(failures) >= MOST_FAILURES and not SHRINKS:
            return
        try:
            served.append(judge(case, place))
        except Exception as error:
            line = case.line(str(place))
            if line not in failures:
                keep(line)
            failures[line] = f"{type(error).__name__}: {error}"
            if SHRINKS:
                raise

    one()
    advice = f"seed {SEED}; to keep a case, add its line to tests/{KEPT.name}"
    assert not failures, "\n".join([advice, *(f"{error}\n    {line}" for line, error in failures.items())])
    return served


def share(place: Place, cases: float) -> int:
    """Cases of one op, of so many of all ops of a place."""
    return round(cases / max(1, len(ops_of(place))))


@at(CUDA)
def test_cuda(name):
    assert_served(check(name, CUDA, Sizes(), share(CUDA, SHARES["cuda"] * CASES)))


@at(TRITON)
def test_triton(name):
    assert_served(check(name, TRITON, Sizes(), share(TRITON, SHARES["triton"] * CASES)))


@at(CPU)
def test_cpu(name):
    assert_served(check(name, CPU, SMALL, share(CPU, CASES_ON_CPU)))


def assert_served(served: list[bool]) -> None:
    """The cases say nothing about the kernels where most ops fall back; a few cases may."""
    assert any(served) or len(served) < 10, "no kernel served any of the cases"


if INTERPRETER in PLACES:

    @at(INTERPRETER)
    def test_interpreted(name):
        """Run by hand: ``TRITON_INTERPRET=1 pytest tests/test_random_cases.py -k interpreted``."""
        check(name, INTERPRETER, SMALL, share(INTERPRETER, CASES))


@pytest.mark.parametrize("name", [op.name for op in OPS])
def test_calls_are_valid(name):
    """On the CPU, whatever answers there."""
    check(name, Place("cpu", "eager"), SMALL, CASES_ON_CPU // len(OPS))


def test_every_op_has_random_cases():
    assert set(BUILDERS) == {op.name for op in OPS}


@pytest.mark.parametrize("name", [op.name for op in OPS])
def test_a_line_gives_the_same_case(name):
    @seed(SEED)
    @settings(max_examples=5, deadline=None, database=None, phases=[Phase.generate])
    @given(case=random_cases(op_of(name), SMALL))
    def one(case):
        assert Case.read(case.line("cuda-cuda")) == (case, "cuda-cuda")

    one()


def test_a_wrong_answer_is_kept(monkeypatch, tmp_path):
    """Each case that fails is a line, and the line fails again."""
    op = op_of("mul")
    wrong = replace(op, fused=lambda x, y: op.fused(x, y) * 1.01)
    monkeypatch.setitem(globals(), "op_of", lambda name: wrong)
    monkeypatch.setitem(globals(), "FAILURES", tmp_path / "failures.jsonl")
    with pytest.raises(AssertionError, match="err more than torch"):
        check("mul", Place("cpu", "eager"), SMALL, 20)
    lines = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert len(lines) == MOST_FAILURES
    case, place = Case.read(lines[0])
    assert place == "cpu-eager"
    with pytest.raises(AssertionError, match="err more than torch"):
        judge(case, Place("cpu", "eager"))


@pytest.mark.parametrize("place", [pytest.param(place, id=str(place), marks=place.marks()) for place in PLACES])
def test_what_failed_once(place):
    for line in KEPT.read_text().splitlines() if KEPT.exists() else []:
        case, where = Case.read(line)
        if where == str(place):
            judge(case, place)
