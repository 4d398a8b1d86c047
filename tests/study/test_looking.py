"""Looking at a study runs no code that its directory holds; continuing with it does."""

import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app


class Hostile:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def hostile(finished: shoal.Study) -> Path:
    """The directory of a study that has ended; whatever it has pickled makes a directory `mark` beside it."""
    mark = finished.directory.with_name("mark")
    with closing(sqlite3.connect(finished.directory / "journal.sqlite")) as journal, journal:
        journal.execute("UPDATE blobs SET data = ?", (pickle.dumps(Hostile(mark)),))
        journal.execute("UPDATE trials SET state = 'failed', reason = 'as if it had' WHERE number = 1")
    return finished.directory


def test_looking_at_a_study_runs_none_of_its_code(hostile: Path) -> None:
    mark = hostile.parent / "mark"
    more = {
        "trial retry": ["--failed"],
        "trial add": ["--set", "lr=0.01", "--epochs", "1"],
        "trial clone": ["0", "--anew"],
        "policy": ["fifo"],
    }
    for command in ("status", "trials", "best", "report", *more):
        after = more.get(command, [])
        done = CliRunner().invoke(app, [*command.split(), str(hostile), *after])
        assert done.exit_code == 0, (command, done.output, done.exception)
        assert not mark.exists(), command
    study = shoal.Study(hostile)
    looked = (study.trials, study.best_trial, study.pareto, study.grid(), study.dataframe(), study.to_optuna())
    assert all(look is not None for look in looked)
    assert not mark.exists()


@pytest.mark.parametrize("command", ["resume", "best_model"])
def test_going_on_and_the_best_model_run_it(command: str, hostile: Path) -> None:
    """As docs/resume.md says."""
    with pytest.raises((AttributeError, TypeError)):
        shoal.resume(hostile) if command == "resume" else shoal.Study(hostile).best_model()
    assert (hostile.parent / "mark").exists()
