"""People intervene in studies that train models: what comes of it is what plain PyTorch gives."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import check_plain, jobs, tune

import shoal
from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.rows import ReportRow, Row
from shoal.core.trial import Origin, TrialState
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal

SPACE = {"lr": shoal.grid([0.01, 0.02, 0.04])}


@pytest.fixture
def when(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], Callable[[], object]]:
    """Number of a trial and the epoch that it reports -> what people do then."""
    asks: dict[tuple[int, int], Callable[[], object]] = {}
    write = Journal.write

    def writing(journal: Journal, rows: Sequence[Row]) -> None:
        write(journal, rows)
        for row in rows:
            if isinstance(row, ReportRow):
                asks.pop((row.report.trial, row.report.epoch), lambda: None)()

    monkeypatch.setattr(Journal, "write", writing)
    return asks


def test_a_trial_that_was_paused_and_a_study_that_was_have_trained_as_undisturbed(
    when: dict[tuple[int, int], Any], tmp_path: Path
) -> None:
    directory = tmp_path / "study"

    def stop_and_go() -> None:
        shoal.Study(directory).pause_study()
        shoal.Study(directory).resume_study()

    when[0, 1] = lambda: shoal.Study(directory).pause([1])
    when[0, 4] = lambda: shoal.Study(directory).resume([1])
    when[1, 3] = stop_and_go
    study = tune(tasks.Blobs(), SPACE, directory, fuse=False)
    assert not when
    check_plain(study, tasks.Blobs())
    outcomes = [(job.trials, job.outcome) for job in jobs(directory) if job.purpose is Purpose.TRAIN]
    assert [each for each in outcomes if each[0] == (1,)] == [((1,), "stopped"), ((1,), "finished")]


def test_a_clone_goes_on_with_what_a_trial_has_learnt_and_another_begins_anew(tmp_path: Path) -> None:
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study")
    assert study.clone(1, {"lr": 0.5}, epochs=6, outside=True) == [1_000_000]
    assert study.clone(1, {"lr": 0.04}, anew=True) == [1_000_001]
    shoal.resume(study.directory, show_progress=False)
    on, anew = study.trials[-2:]
    assert (on.number, on.state, on.epoch, on.trial.origin) == (1_000_000, TrialState.COMPLETE, 6, Origin(1, 4))
    assert (anew.number, anew.state, anew.epoch, anew.trial.origin) == (1_000_001, TrialState.COMPLETE, 4, None)
    with JournalView.read(study.directory) as journal:
        assert [report.epoch for report in journal.curve(on.number)] == [5, 6]
        first = journal.curve(1)[0].metrics["valid_loss"]
        assert journal.curve(on.number)[0].metrics["valid_loss"] < first, "it began where the other was"
    assert study.rerun(anew.number).largest < 1e-9


def test_a_paused_study_that_runs_says_how_it_goes_on(finished: shoal.Study) -> None:
    with closing(Journal.open(finished.directory)) as journal:
        journal.put("paused", True)
        with pytest.raises(
            JournalError, match=r"is paused, and process \d+ runs it; resume it with: shoal study resume"
        ):
            shoal.resume(finished.directory)
