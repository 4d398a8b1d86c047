"""Journals of other versions, and of the time before release 0.1.0: refused in words, and left as they are."""

import re
import shutil
import sqlite3
from contextlib import closing

import pytest
from journal_samples import create, group
from support.recorded import RecordedJournal
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.errors import JournalError
from shoal.journal.view import JournalView
from shoal.look.page.views import summary_view


@pytest.fixture(params=[1, 11, 2])
def version(request):
    return request.param


@pytest.fixture(params=["closed", "killed", "killed at once"])
def other(request, version, tmp_path):
    """A study whose journal says that it is of another version: before the release, but for version 2."""
    with create(tmp_path / "of this one") as journal:
        journal.record_proposal(1, [group([0, 1], 3)])
    directory = tmp_path / "study"
    shutil.copytree(journal.directory, directory)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        if request.param == "killed at once":  # nothing of it has come from the WAL to the file yet
            connection.execute("PRAGMA user_version = 0")
            connection.execute("PRAGMA application_id = 0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute(f"PRAGMA user_version = {version}")
        if version != 2:
            connection.execute("PRAGMA application_id = 0")
        elif request.param == "killed at once":
            connection.execute("PRAGMA application_id = 0x53686f61")
        if request.param == "closed":
            connection.execute("PRAGMA journal_mode = DELETE")
        if request.param == "killed":
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("DELETE FROM runs")
        shutil.copytree(directory, tmp_path / "copy")
    shutil.rmtree(directory)
    return (tmp_path / "copy").rename(directory)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.glob("journal.sqlite*")}


def test_it_is_refused_by_name_with_the_remedy_and_left_as_it_is(other, version):
    which = f"version {version}{'' if version == 2 else ' of the time before release 0.1.0'}"
    refusal = (
        f"the journal {other / 'journal.sqlite'} is of {which}, and this Shoal reads version 1 of release 0.1.0 alone; "
        "finish its study with the Shoal that wrote it, or start a new directory"
    )
    before = contents(other)
    for use in (RecordedJournal.open, JournalView.read, shoal.Study, shoal.resume, lambda place: create(place).close()):
        with pytest.raises(JournalError, match=re.escape(refusal)):
            use(other)
    assert summary_view(other, 0.0) == {"error": refusal}
    for command in ("resume", "status", "report", "page"):
        done = CliRunner().invoke(app, [command, str(other)])
        assert isinstance(done.exception, JournalError), command
        assert str(done.exception) == refusal
    assert contents(other) == before


def test_one_of_this_version_is_not(tmp_path):
    with create(tmp_path / "study") as journal, JournalView.read(journal.directory) as view:
        assert view.spec == journal.spec
