"""Five trials that fail alone with one cause, before any trial has reported, end the study."""

import pytest

from shoal.core.cause import Cause
from shoal.study.retries import COMMON_FAILURES, FirstFailures
from shoal.study.trials import TrialTable

ALL = range(COMMON_FAILURES)


def message(number, text="ValueError: x"):
    return f"Traceback\n  here\n{text}\nLog: logs/{number}.log"


def noted(*failures):
    """After failures of (number, text)."""
    first = FirstFailures(TrialTable())
    for number, text in failures:
        assert first.common_cause() is None
        first.note(number, message(number, text))
    return first


def test_so_many_trials_that_fail_alike_end_a_study():
    first = noted(*((number, "ValueError: x") for number in ALL))
    assert first.common_cause() == Cause("ValueError: x", tuple(ALL), "logs/0.log", message(0))


@pytest.mark.parametrize(
    "failures",
    [
        [(number, "ValueError: x") for number in ALL[1:]],
        [(0, "ValueError: y"), *((number, "ValueError: x") for number in ALL[1:])],
        [(0, "ValueError: x")] * COMMON_FAILURES,
    ],
    ids=["too few", "another cause", "the same trial again"],
)
def test_what_ends_no_study(failures):
    assert noted(*failures).common_cause() is None


@pytest.mark.parametrize("before", [0, COMMON_FAILURES - 1])
def test_once_a_trial_has_reported_no_failures_end_a_study(before):
    first = noted(*((number, "ValueError: x") for number in range(before)))
    first.reported()
    for number in range(12):
        first.note(number, message(number))
    assert first.common_cause() is None


def test_trials_that_an_earlier_run_ended_on_do_not_count_again():
    trials = TrialTable()
    trials.common_failures = {*ALL}
    first = FirstFailures(trials)
    for number in range(2 * COMMON_FAILURES):
        assert first.common_cause() is None
        first.note(number, message(number))
    assert first.common_cause().trials == tuple(range(COMMON_FAILURES, 2 * COMMON_FAILURES))
