"""A study whose first trials all fail alike ends soon, and one in which others may do better goes on."""

from pathlib import Path

import pytest

from shoal.planner.event import Outcome
from shoal.planner.fatal import ALIKE, FirstFailures
from shoal.planner.job import Member
from shoal.planner.standings import Standing, Standings
from shoal.trial import Trial, TrialState

CAUSE = (Outcome.RAISED, "ValueError: x")


class Study:
    """Trials that are begun and fail as a case says.

    Args:
        configs: of the trials, which all wait.
    """

    def __init__(self, configs):
        self.trials = Standings()
        for number, config in enumerate(configs):
            self.trials.move(Standing(Trial(number, config, 0, 0), 4), TrialState.PENDING)
        self.first = FirstFailures(self.trials)

    def begin(self, *numbers):
        self.trials.begin("job", [Member(self.trials[number].trial, 0, 4) for number in numbers])

    def fail(self, *numbers, cause=CAUSE, lost=False):
        """In an array, if there are several; returns what `hopeless` says then."""
        self.begin(*numbers)
        return self.end(*numbers, cause=cause, lost=lost)

    def end(self, *numbers, cause=CAUSE, lost=False):
        outcome, text = cause
        self.trials.wait_again({number: self.trials[number].failures + 1 for number in numbers})
        for number in numbers:
            message = f"Traceback\n  here\n{text}\nLog: logs/{number}.log"
            self.first.note(number, outcome, text, message, alone=len(numbers) == 1, lost=lost)
            if lost:
                self.trials.move(self.trials[number], TrialState.FAILED)
        return self.first.hopeless(numbers)


def alike(study, numbers=range(ALIKE)):
    """All fail, one after another; returns what is said after the last of them."""
    *before, last = numbers
    assert [study.fail(number) for number in before] == [()] * len(before)
    return study.fail(last)


RATES = [{"lr": rate} for rate in range(12)]


def test_so_many_trials_that_fail_alike_by_themselves_end_a_study():
    assert alike(Study(RATES)) == tuple(range(ALIKE))


def test_those_that_failed_in_an_array_are_named_and_do_not_suffice():
    study = Study(RATES)
    assert study.fail(*range(12)) == ()
    assert alike(study) == tuple(range(12))


def other_cause(study):
    return study.fail(0, cause=(Outcome.RAISED, "ValueError: y")) or alike(study, range(1, ALIKE))


def same_words_another_end(study):
    return study.fail(0, cause=(Outcome.CRASHED, CAUSE[1])) or alike(study, range(1, ALIKE))


def one_that_reported(study):
    study.fail(11)
    study.first.reported()
    return alike(study)


def memory(study):
    return [study.fail(number, cause=(Outcome.OUT_OF_MEMORY, "no memory")) for number in range(ALIKE)][-1]


def same_trial_again(study):
    return [study.fail(0) for _ in range(ALIKE)][-1]


def one_that_outlives_them(study):
    study.begin(11)
    return alike(study)


@pytest.mark.parametrize(
    "case", [other_cause, same_words_another_end, one_that_reported, memory, same_trial_again, one_that_outlives_them]
)
def test_what_does_not_end_a_study(case):
    assert case(Study(RATES)) == ()


def test_memory_that_no_device_has_ends_it():
    study = Study(RATES)
    found = [study.fail(number, cause=(Outcome.OUT_OF_MEMORY, "no memory"), lost=True) for number in range(ALIKE)]
    assert found == [()] * (ALIKE - 1) + [tuple(range(ALIKE))]


def test_one_that_was_begun_later_outlives_nobody():
    study = Study(RATES)
    alike(study, range(ALIKE - 1))
    study.begin(ALIKE - 1)
    study.begin(11)
    assert study.end(ALIKE - 1) == tuple(range(ALIKE))


def test_it_ends_when_the_one_that_outlived_them_has_failed_too():
    study = Study(RATES)
    study.begin(11)
    alike(study)
    assert study.end(11) == (*range(ALIKE), 11)


def test_a_value_that_all_have_that_failed_and_others_lack_may_be_to_blame():
    """As in a grid, whose first parameter changes last."""
    study = Study([{"model": model, "lr": rate} for model in "ab" for rate in range(8)])
    assert alike(study, range(8)) == ()
    assert study.fail(8) == tuple(range(9))


def test_a_parameter_that_only_those_have_that_failed_may_be_to_blame():
    study = Study([*({"optimizer": {"momentum": 0.9}} for _ in range(6)), *({"optimizer": {}} for _ in range(6))])
    assert alike(study) == ()


def test_a_value_that_all_trials_have_is_not_to_blame():
    assert alike(Study([{"model": "a"}] * 8)) == tuple(range(ALIKE))


@pytest.mark.parametrize("lost", [True, False])
def test_the_error_has_the_traceback_the_logs_and_the_remedy(lost):
    study = Study(RATES)
    for number in range(ALIKE):
        study.fail(number, lost=lost)
    error = study.first.error(range(ALIKE), Path("runs/one"), kept=False)
    text = str(error)
    assert text.startswith("the first 5 trials failed alike, and none has reported anything; trial 0:\n\nTraceback\n")
    assert "ValueError: x" in text
    assert "trials 0, 1, 2, 3, 4; logs: logs/0.log, logs/1.log" in text
    again = "shoal trial retry runs/one --failed, and then " if lost else ""
    assert text.endswith(f"Mend that, then go on with: {again}shoal resume runs/one --accept-changes")
    assert error.directory == Path("runs/one")
    kept = str(study.first.error(range(ALIKE), Path("runs/one"), kept=True))
    assert "mend that and begin a new study" in kept
    assert kept.endswith(f"go on with: {again}shoal resume runs/one --accept-changes")
