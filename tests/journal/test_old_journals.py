"""Studies that older versions of Shoal have begun, and a kill interrupted, still open, report and go on."""

import json
import sqlite3
import tarfile
from collections import Counter
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shoal
from shoal.arguments import load_algorithm
from shoal.cli.app import app
from shoal.core.activity import Activity
from shoal.core.errors import JournalError
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.core.trial import Report, TrialState
from shoal.journal.schema import _MIGRATIONS, VERSION
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.reporting.accounting import accounting
from shoal.worker.checkpoint_paths import checkpoint_stem

HERE = Path(__file__).parent

STATES = {
    3: {TrialState.STOPPED: 10, TrialState.RUNNING: 6, TrialState.PENDING: 1},
    4: {
        TrialState.STOPPED: 5,
        TrialState.PAUSED: 6,
        TrialState.COMPLETE: 1,
        TrialState.RUNNING: 1,
        TrialState.PENDING: 5,
    },
    5: {TrialState.PAUSED: 4, TrialState.RUNNING: 11, TrialState.PENDING: 2},
    6: {TrialState.PAUSED: 3, TrialState.RUNNING: 14},
    7: {TrialState.STOPPED: 12, TrialState.RUNNING: 5},
    8: {TrialState.STOPPED: 6, TrialState.PENDING: 11},
    9: {TrialState.STOPPED: 6, TrialState.PAUSED: 1, TrialState.PENDING: 10},
    10: {TrialState.STOPPED: 10, TrialState.RUNNING: 3, TrialState.PENDING: 4},
}
"""Version -> how many trials are in each state."""

BEST = {3: 15, 4: 8, 5: 8, 6: 9, 7: 3, 8: 14, 9: 0, 10: 9}


@pytest.fixture(params=STATES, ids="version {}".format)
def begun(request, tmp_path):
    """A Hyperband of `old_task.Line`; `undisturbed.json` is what the version that began it found in the end.

    In the study of version 4, users had intervened: trials were paused, stopped, added and tried again, the policy was
    changed and a device taken away; that a trial goes on is still to be done. The one of version 5 was killed twice;
    trials 2 and 12 are paused, and requests to resume them are pending. In the one of version 8, a job was suspended
    and not yet resumed.
    """
    return unpacked(request.param, tmp_path)


def unpacked(number, tmp_path):
    with tarfile.open(HERE / f"begun_by_version_{number}.tar.gz") as archive:
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
    assert Counter(row.state for row in study.trials) == STATES[before]
    assert study.best_trial.number == BEST[before]
    assert version(begun) == before < VERSION


@pytest.mark.parametrize("command", ["status", "trials", "report"])
def test_commands_that_look_at_it_show_all_of_its_trials(begun, command, tmp_path):
    before = version(begun)
    page = tmp_path / "page.html"
    told = ["--html", str(page)] if command == "report" else ["--json"]
    done = CliRunner().invoke(app, [command, str(begun), *told])
    assert done.exit_code == 0, done.output
    count = sum(STATES[before].values())
    if command == "report":
        assert "<html" in page.read_text()
    else:
        said = json.loads(done.stdout)
        assert (len(said) if command == "trials" else sum(said["trials"].values())) == count
    assert version(begun) == before


def test_a_kill_while_it_is_migrated_leaves_it_as_it_was(begun, monkeypatch):
    before = version(begun)
    cut = {**_MIGRATIONS, before: (*_MIGRATIONS[before], "SELECT no_such_column FROM trials")}
    with monkeypatch.context() as patch:
        patch.setattr("shoal.journal.schema._MIGRATIONS", cut)
        with pytest.raises(JournalError, match="no_such_column"):
            Journal.open(begun)
    assert version(begun) == before
    with Journal.open(begun) as journal:
        assert len(journal.trials()) == sum(STATES[before].values())
    assert version(begun) == VERSION


@pytest.mark.in_turns(3)
def test_it_goes_on_to_the_end_that_it_would_have_had(begun):
    undisturbed = json.loads((begun / "undisturbed.json").read_text())
    study = shoal.resume(begun, accept_changes=True, show_progress=False)
    found = [(row.number, dict(row.config), row.state, row.epoch) for row in study.trials]
    assert found == [(row["number"], row["config"], row["state"], row["epoch"]) for row in undisturbed]
    for row, expected in zip(study.trials, undisturbed, strict=True):
        assert row.metrics == pytest.approx(expected["metrics"], rel=1e-9)


@pytest.mark.parametrize("number", [9, 10])
def test_trials_go_on_from_no_older_checkpoint_than_that_of_their_last_budget(number, tmp_path):
    directory = unpacked(number, tmp_path)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as old:
        budgets = dict(old.execute("SELECT trial, max(epoch) FROM reports WHERE state = 'paused' GROUP BY trial"))
    with JournalView.read(directory) as journal:
        assert journal.checkpoints() == {trial: checkpoint_stem(epoch, 0) for trial, epoch in budgets.items()}
    assert budgets


def test_what_people_asked_of_it_becomes_rows_of_the_sequence_in_their_places(tmp_path):
    directory = unpacked(4, tmp_path)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as old:
        times = dict(old.execute("SELECT -seq, time FROM asks UNION SELECT seq, time FROM reports"))
    with JournalView.read(directory) as journal:
        done = journal.interventions()
        assert [(each.verb, each.trials, each.text) for each in done] == [
            ("pause", (16,), ""),
            ("policy", (), "fifo"),
            ("add trial", (1_000_000,), ""),
            ("stop", (15,), ""),
            ("retry", (0, 6), ""),
        ]
        assert journal.retried.keys() == {0, 6}
        events = list(journal.events())
        assert not any(isinstance(x, Report) and x.trial in (0, 6) and x.metrics for x in events), "failures only"
        assert not {"interventions", "retried"} & journal.study.keys()
        sequence = journal.tables.rows(
            "SELECT seq, time FROM proposals UNION SELECT seq, time FROM reports "
            "UNION SELECT seq, time FROM interventions ORDER BY seq"
        )
    assert len(sequence) == len(times) + len(done)
    moments = [moment for _, moment in sequence]
    assert moments == sorted(moments)


def test_renamed_tables_and_values_keep_their_contents(tmp_path):
    directory = unpacked(5, tmp_path)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as old:
        ((reservations,),) = old.execute("SELECT count(*) FROM promises")
        ((proposals,),) = old.execute("SELECT count(*) FROM asks")
    with JournalView.read(directory) as journal:
        assert Counter((job.purpose, job.outcome) for job in journal.jobs()) == {
            (Purpose.SIGNATURE, Outcome.FINISHED): 4,
            (Purpose.TRAIN, Outcome.ORPHANED): 2,
            (Purpose.TRAIN, ""): 2,
        }
        assert sum(map(len, journal.reservations().values())) == reservations > 0
        assert journal.tables.rows("SELECT count(*) AS n FROM proposals") == [(proposals,)]
        assert journal.paused_trials() == (2, 12)


def test_jobs_of_an_older_version_have_reported_no_activities(tmp_path):
    with JournalView.read(unpacked(6, tmp_path)) as journal:
        jobs = journal.jobs()
        found = accounting(journal, 0.0)
    assert [dict(job.activities) for job in jobs] == [{}] * 5
    assert found.seconds[Activity.UNREPORTED] > 0
    assert sum(found.seconds.values()) == pytest.approx(found.total)


@pytest.mark.parametrize("number", [7, 8])
def test_renamed_activities_keep_their_seconds(number, tmp_path):
    directory = unpacked(number, tmp_path)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as old:
        before = [json.loads(text) for (text,) in old.execute("SELECT activities FROM jobs ORDER BY id")]
    with JournalView.read(directory) as journal:
        jobs = journal.jobs()
    names = {"survey": "signature", "races": "autotune"}
    assert [job.activities for job in jobs] == [{names.get(key, key): spent[key] for key in spent} for spent in before]
    assert {name for spent in before for name in spent} > names.keys()


def test_the_turns_of_a_job_that_was_suspended_are_kept(tmp_path):
    directory = unpacked(8, tmp_path)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as old:
        turns = old.execute("SELECT job, number, highest, lowest, last, steps, seconds FROM quanta").fetchall()
    shoal.resume(directory, accept_changes=True, show_progress=False)
    with JournalView.read(directory) as journal:
        suspended = next(job for job in journal.jobs() if job.outcome == Outcome.SUSPENDED)
        found = [(x.job, x.number, *astuple(x.losses)) for x in journal.quanta()[suspended.id]]
        assert found == turns
        assert suspended.id in {job.resumes for job in journal.jobs()}
    assert len(turns) == 1


def test_an_algorithm_pickled_with_gather_groups_by_the_same_parameters(tmp_path):
    with JournalView.read(unpacked(5, tmp_path)) as journal:
        algorithm = load_algorithm(journal.blob("algorithm"), journal.study, journal.space)
    assert algorithm.group_by == ["momentum"]
