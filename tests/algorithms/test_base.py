"""Arguments that every algorithm accepts and refuses."""

import math
from fractions import Fraction

import numpy as np
import pytest

import shoal
from shoal.algorithms.base import Algorithm, Problem, call_text, check_integer
from shoal.core.errors import AlgorithmError, TaskError
from shoal.core.objective import Objective
from shoal.core.space import Space, uniform
from shoal.core.trial import Report

PROBLEM = Problem(Space({"x": uniform(0, 1)}), "loss", "min", 0, None, (Objective("size", "max"),))


@pytest.mark.parametrize("value", [0.5, 3, math.nan, -math.inf, Fraction(1, 2), np.float32(0.5), np.int64(3)], ids=repr)
def test_real_numbers_are_metrics(value):
    found = PROBLEM.values(Report(7, 2, {"loss": 0.25, "size": value}))
    assert found[0] == 0.25
    assert found[1] is value


@pytest.mark.parametrize(
    "value", [None, "0.5", 1j, [0.5], np.zeros(2)], ids=["None", "str", "complex", "list", "array"]
)
@pytest.mark.parametrize("metric", ["loss", "size"])
def test_a_metric_that_is_not_a_real_number_is_named(metric, value):
    with pytest.raises(TaskError) as error:
        PROBLEM.values(Report(7, 2, {"loss": 0.5, "size": 1.0, metric: value}))
    assert str(error.value) == (
        f"metric {metric!r} must be a real number, but trial 7 reports {value!r} at epoch 2; return a number from the "
        "task, NaN where there is none"
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0, "an integer of at least 1, got 0"),
        (True, "an integer of at least 1, got True"),
        (1.5, "an integer of at least 1, got 1.5"),
        ("3", "an integer of at least 1, got '3'"),
        (np.int64(3), "a Python int of at least 1, got np.int64(3); write int(...)"),
        (np.uint8(0), "a Python int of at least 1, got np.uint8(0); write int(...)"),
    ],
    ids=repr,
)
def test_settings_that_count(value, wanted):
    with pytest.raises(AlgorithmError) as error:
        check_integer("n", value)
    assert str(error.value) == f"`n` must be {wanted}"


@pytest.mark.parametrize(
    ("algorithm", "wanted"),
    [
        (shoal.Hyperband(9), "Hyperband(max_epochs=9)"),
        (shoal.Hyperband(9, eta=2), "Hyperband(max_epochs=9, eta=2)"),
        (shoal.Random(3, epochs=2), "Random(n=3, epochs=2)"),
    ],
)
def test_an_algorithm_is_told_without_its_defaults(algorithm: Algorithm, wanted: str) -> None:
    assert call_text(algorithm) == wanted
