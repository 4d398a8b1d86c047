"""What functions that report by themselves get wrong, in real processes."""

import threading
from pathlib import Path
from typing import Any

import programs
import pytest
from programs import search

import shoal
from shoal.errors import ShoalError, TaskError
from shoal.trial import TrialState


def test_functions_that_raise_are_shown(tmp_path: Path) -> None:
    study = search(programs.raises, tmp_path, retries=1, algorithm=shoal.Grid(1))
    first, *others = study.trials
    assert first.state is TrialState.COMPLETE
    for row in others:
        assert (row.state, row.failures) == (TrialState.FAILED, 2)
        assert "KeyError: 'no such thing'" in row.reason
        assert "programs.py" in row.reason
        assert "Log: " in row.reason
        assert "shoal/worker" not in row.reason


def test_silence_ends_after_the_time_limit(tmp_path: Path) -> None:
    study = search(programs.silent, tmp_path, {"slope": shoal.grid([1, 2])}, time_limit=1.0, algorithm=shoal.Grid(1))
    fine, mute = study.trials
    assert (fine.state, fine.epoch) == (TrialState.COMPLETE, 1)
    assert (mute.state, mute.failures) == (TrialState.FAILED, 0)
    assert "silent has never reported for 1 s, its time limit" in mute.reason


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(programs.says_nothing, "says_nothing ended without a report; call shoal.report", id="no report"),
        pytest.param(programs.says_words, "the metric 'loss' must be a number, got 'low'", id="no number"),
    ],
)
def test_what_no_trial_can_do_right_ends_the_study(tmp_path: Path, function: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        search(function, tmp_path, {"slope": 1}, retries=0)


def test_steps_that_are_left_out_are_refused(tmp_path: Path) -> None:
    study = search(programs.skips_steps, tmp_path, {"slope": 1}, algorithm=shoal.Random(1, 6))
    (row,) = study.trials
    assert (row.state, row.epoch) == (TrialState.FAILED, 1)
    assert "`step` counts the reports of a trial, as its budget does: 1, 2, 3, ...; after 1 came 5" in row.reason


@pytest.mark.parametrize("limit", [0, -1.0, "1 h", True])
def test_a_time_limit_that_is_none(tmp_path: Path, limit: object) -> None:
    with pytest.raises(ShoalError, match="`time_limit` must be a number of seconds above 0, got"):
        search(programs.counted, tmp_path, time_limit=limit)
    assert not (tmp_path / "study").exists()


def test_a_function_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the function .*acquire cannot be pickled"):
        search(threading.Lock().acquire, tmp_path)
