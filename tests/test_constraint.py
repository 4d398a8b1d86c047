"""Constraints: their form, the excess of a value, and the violation of a report."""

import math

import pytest

from shoal.core.constraint import Constraint, constraint_argument, parse_constraints, violation, with_directions
from shoal.core.errors import AlgorithmError
from shoal.core.objective import Objective


def test_they_are_read() -> None:
    assert parse_constraints({"latency_ms": "<= 10", "fairness": " >=0.8 "}) == (
        Constraint("latency_ms", "<=", 10.0),
        Constraint("fairness", ">=", 0.8),
    )
    assert list(map(str, parse_constraints({"a": "<=1e3", "b": ">= -2"}))) == ["a <= 1000", "b >= -2"]


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param({"a": "< 10"}, id="strict"),
        pytest.param({"a": "10"}, id="no relation"),
        pytest.param({"a": "<= ten"}, id="no number"),
        pytest.param({"a": "<= nan"}, id="nan"),
        pytest.param({"a": ">= inf"}, id="infinite"),
        pytest.param({"a": 10}, id="a number"),
        pytest.param({3: "<= 10"}, id="no name"),
        pytest.param(["a <= 10"], id="a list"),
        pytest.param("a <= 10", id="a text"),
    ],
)
def test_bad_ones_are_refused(bounds: object) -> None:
    with pytest.raises(AlgorithmError, match=r"`constraints` must (be|give).*latency_ms.*got"):
        parse_constraints(bounds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("latency_ms <= 10", ("latency_ms", "<= 10")),
        ("val/f1 score>=0.8", ("val/f1 score", ">=0.8")),
        ("<= 10", None),
        ("a = 10", None),
        ("a <= b", None),
    ],
)
def test_an_option_of_the_command_line(text: str, expected: tuple[str, str] | None) -> None:
    if expected is not None:
        assert constraint_argument(text) == expected
        return
    with pytest.raises(AlgorithmError):
        constraint_argument(text)


@pytest.mark.parametrize(
    ("constraint", "value", "excess"),
    [
        (Constraint("a", "<=", 10.0), 10.0, 0.0),
        (Constraint("a", "<=", 10.0), 15.0, 0.5),
        (Constraint("a", "<=", 10.0), 5.0, -0.5),
        (Constraint("a", ">=", 0.8), 0.5, 0.3),
        (Constraint("a", ">=", -4.0), -6.0, 0.5),
        (Constraint("a", "<=", 0.0), 2.0, 2.0),
        (Constraint("a", "<=", 1.0), None, math.inf),
        (Constraint("a", "<=", 1.0), math.nan, math.inf),
        (Constraint("a", ">=", 1.0), -math.inf, math.inf),
    ],
)
def test_the_excess_of_a_value(constraint: Constraint, value: float | None, excess: float) -> None:
    assert constraint.excess(value) == pytest.approx(excess)


def test_only_excesses_above_zero_add_up() -> None:
    bounds = parse_constraints({"a": "<= 10", "b": ">= 1", "c": "<= 0"})
    assert violation(bounds, {"a": -1000.0, "b": 0.5, "c": 0.25}) == 0.75
    assert violation(bounds, {"a": 0.0, "b": 1.0, "c": 0.0}) == 0.0
    assert violation(bounds, {"a": 0.0, "b": 1.0}) == math.inf
    assert violation((), {}) == 0.0


def test_their_values_have_a_direction() -> None:
    bounds = parse_constraints({"a": "<= 10", "loss": ">= 1"})
    goal = Objective("loss", "min")
    assert with_directions([goal], bounds) == (goal, Objective("a", "min"), Objective("loss", "max"))
