"""Durations as users write them."""

import math

import numpy as np
import pytest

from shoal.core.duration import parse_duration
from shoal.core.errors import ShoalError


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("90s", 90.0),
        ("20m", 1200.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("1d2h3m4s", 93784.0),
        ("3600", 3600.0),
        (0.5, 0.5),
        (60, 60.0),
        (np.int64(3), 3.0),
        (None, None),
    ],
    ids=repr,
)
def test_a_duration_is_so_many_seconds(value: object, seconds: float | None) -> None:
    assert parse_duration("timeout", value) == seconds


@pytest.mark.parametrize(
    "value",
    ["2 hours", "", "2H", "h", "30m1h", "-1h", "0s", "nan", "1e3", 0, -1, math.nan, math.inf, True, [60], b"2h"],
    ids=repr,
)
def test_anything_else_is_refused_with_the_accepted_forms(value: object) -> None:
    with pytest.raises(ShoalError, match="`timeout` must be a duration such as '90s', '20m', '2h', '1d', '1h30m'") as e:
        parse_duration("timeout", value)
    assert repr(value) in str(e.value)
