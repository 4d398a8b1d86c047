"""Studies that older versions of Shoal have begun, and a kill interrupted, still open, report and go on."""

import json
import sqlite3
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import JournalError
from shoal.core.trial import TrialState
from shoal.journal.schema import _MIGRATIONS, VERSION
from shoal.journal.writer import Journal

HERE = Path(__file__).parent


@pytest.fixture(params=[3], ids="version {}".format)
def begun(request, tmp_path):
    """A Hyperband of `old_task.Line`; `undisturbed.json` is what the same one found that nobody killed."""
    with tarfile.open(HERE / f"begun_by_version_{request.param}.tar.gz") as archive:
        archive.extractall(tmp_path / "study", filter="data")
    return tmp_path / "study"


def version(directory):
    with closing(sqlite3.connect(directory / "journal.sqlite")) as connection:
        ((found,),) = connection.execute("PRAGMA user_version").fetchall()
    return found


def test_it_is_read_and_left_as_it_is(begun):
    """Its engine, of the older version, may be at work."""
    before = version(begun)
    study = shoal.Study(begun)
    states = Counter(row.state for row in study.trials)
    assert states == {TrialState.STOPPED: 10, TrialState.RUNNING: 6, TrialState.PENDING: 1}
    assert study.best_trial.number == 15
    assert version(begun) == before < VERSION


def test_a_kill_while_it_is_migrated_leaves_it_as_it_was(begun, monkeypatch):
    before = version(begun)
    cut = {before: (*_MIGRATIONS[before], "SELECT no_such_column FROM trials")}
    with monkeypatch.context() as patch:
        patch.setattr("shoal.journal.schema._MIGRATIONS", cut)
        with pytest.raises(JournalError, match="no_such_column"):
            Journal.open(begun)
    assert version(begun) == before
    with Journal.open(begun) as journal:
        assert len(journal.trials()) == 17
    assert version(begun) == VERSION


def test_it_goes_on_to_the_end_that_it_would_have_had(begun):
    undisturbed = json.loads((begun / "undisturbed.json").read_text())
    study = shoal.resume(begun, accept_changes=True, show_progress=False)
    found = [(row.number, dict(row.config), row.state, row.epoch) for row in study.trials]
    assert found == [(row["number"], row["config"], row["state"], row["epoch"]) for row in undisturbed]
    for row, expected in zip(study.trials, undisturbed, strict=True):
        assert row.metrics == pytest.approx(expected["metrics"], rel=1e-9)
