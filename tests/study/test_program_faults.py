"""Faults of functions that report by themselves, in real processes."""

import sys
import threading
from pathlib import Path
from typing import Any

import programs
import pytest
from programs import search

import shoal
from shoal.core.errors import ShoalError, StudyFailedError, TaskError
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.programs.opaque import Command


def test_functions_that_raise_are_shown(tmp_path: Path) -> None:
    study = search(programs.raises, tmp_path, retries=1, algorithm=shoal.Grid(1))
    first, *others = study.trials
    assert first.state is TrialState.COMPLETE
    for row in others:
        assert (row.state, row.failures) == (TrialState.FAILED, 2)
        assert "KeyError: 'no such thing'" in row.reason
        assert "programs.py" in row.reason
        assert "Log: " in row.reason
        assert "shoal/programs" not in row.reason


def test_a_crash_is_shown_by_its_innermost_frames(tmp_path: Path) -> None:
    words = r"(?s)Fatal Python error: Segmentation fault.* in crashes.*crashes was killed by SIGSEGV"
    with pytest.raises(StudyFailedError, match=words):
        search(programs.crashes, tmp_path, {"slope": 1}, retries=0, algorithm=shoal.Grid(1))


def test_a_function_may_leave_a_pool_of_processes_and_a_thread_at_its_end(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    space = {"marker": shoal.choice([str(marker)])}
    study = search(programs.leaves_a_pool, tmp_path, space, time_limit=120.0, retries=0)
    assert [(row.state, row.epoch) for row in study.trials] == [(TrialState.COMPLETE, 4)]
    assert marker.read_text() == "in order"


def test_silence_ends_after_the_time_limit(tmp_path: Path) -> None:
    study = search(programs.silent, tmp_path, {"slope": shoal.grid([1, 2])}, time_limit=5.0, algorithm=shoal.Grid(1))
    fine, mute = study.trials
    assert (fine.state, fine.epoch) == (TrialState.COMPLETE, 1)
    assert (mute.state, mute.failures) == (TrialState.FAILED, 0)
    assert "silent has never reported for 5 s, its time limit" in mute.reason


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(programs.says_nothing, "says_nothing ended without a report; call shoal.report", id="no report"),
        pytest.param(
            programs.says_words,
            "the metric 'loss' must be a number, got 'low'",
            id="no number",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_no_trial_can_do_right_ends_the_study(tmp_path: Path, function: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        search(function, tmp_path, {"slope": 1}, retries=0)


def test_a_command_that_prints_other_names_is_told_which(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('print(\'{"epoch": 1, "val_loss": 0.5}\')\n')
    command = Command((sys.executable, "train.py", "{slope}"), ("loss",), tmp_path)
    words = "ended without a report; its lines of JSON have 'epoch', 'val_loss' and lack the metric 'loss'; print it"
    with pytest.raises(TaskError, match=words):
        search(command, tmp_path, {"slope": 1}, retries=0)


@pytest.mark.thorough
def test_a_trial_that_misnames_a_metric_fails_alone(tmp_path: Path) -> None:
    study = search(programs.misnames, tmp_path, algorithm=shoal.Grid(1), devices="cpu:1")
    assert [str(row.state) for row in study.trials] == ["failed", "complete", "complete"]
    assert "MetricNameError: a metric is named 3; names must be strings, such as '3'" in study.trials[0].reason
    assert "programs.py" in study.trials[0].reason


@pytest.mark.thorough
def test_steps_that_are_left_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(shoal.StudyFailedError, match="the only trial failed") as error:
        search(programs.skips_steps, tmp_path, {"slope": 1}, algorithm=shoal.Random(1, 6))
    (row,) = shoal.Study(error.value.directory).trials
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


@pytest.mark.thorough
def test_a_function_that_fails_for_all_configurations_ends_the_study_soon(tmp_path: Path) -> None:
    with pytest.raises(shoal.StudyFailedError, match=r"programs.py[^$]*KeyError: 'width'") as error:
        search(programs.asks_too_much, tmp_path, {"slope": shoal.uniform(0, 1)}, algorithm=shoal.Random(40, 4))
    rows = shoal.Study(error.value.directory).trials
    assert {row.state for row in rows} == {TrialState.PENDING}
    with JournalView.read(error.value.directory) as journal:
        assert len(journal.jobs()) < 10


def test_a_command_that_fails_is_said_to_with_what_it_raised(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('begun', file=sys.stderr)\n{}['width']\n")
    command = Command((sys.executable, "train.py", "{slope}"), ("loss",), tmp_path)
    with pytest.raises(shoal.StudyFailedError, match="all 2 trials failed") as error:
        search(command, tmp_path, {"slope": shoal.grid([1, 2])})
    assert "2 failed: train exited with status 1: KeyError: 'width' (trials 0-1; log: " in str(error.value)
