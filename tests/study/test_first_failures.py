"""What trials fail of, each by itself, before any has reported anything: five alike end a study."""

import pytest

from shoal.core.cause import Cause
from shoal.study.retries import ALIKE, FirstFailures
from shoal.study.trials import TrialTable

ALL = range(ALIKE)


def message(number, text="ValueError: x"):
    return f"Traceback\n  here\n{text}\nLog: logs/{number}.log"


def noted(*failures):
    """After failures of (number, text)."""
    first = FirstFailures(TrialTable())
    for number, text in failures:
        assert first.alike() is None
        first.note(number, message(number, text))
    return first


def test_so_many_trials_that_fail_alike_end_a_study():
    first = noted(*((number, "ValueError: x") for number in ALL))
    assert first.alike() == Cause("ValueError: x", tuple(ALL), "logs/0.log", message(0))


@pytest.mark.parametrize(
    "failures",
    [
        [(number, "ValueError: x") for number in ALL[1:]],
        [(0, "ValueError: y"), *((number, "ValueError: x") for number in ALL[1:])],
        [(0, "ValueError: x")] * ALIKE,
    ],
    ids=["too few", "another cause", "the same trial again"],
)
def test_what_ends_no_study(failures):
    assert noted(*failures).alike() is None


@pytest.mark.parametrize("before", [0, ALIKE - 1])
def test_once_a_trial_has_reported_no_failures_end_a_study(before):
    first = noted(*((number, "ValueError: x") for number in range(before)))
    first.reported()
    for number in range(12):
        first.note(number, message(number))
    assert first.alike() is None


def test_trials_that_an_earlier_run_ended_on_do_not_count_again():
    trials = TrialTable()
    trials.tried = {*ALL}
    first = FirstFailures(trials)
    for number in range(2 * ALIKE):
        assert first.alike() is None
        first.note(number, message(number))
    assert first.alike().trials == tuple(range(ALIKE, 2 * ALIKE))
