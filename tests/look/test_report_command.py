"""`shoal report` and `shoal status` of studies that look as if they had been run."""

import json
import sqlite3
from contextlib import closing

import pytest
from timeline_samples import pretend
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.core.errors import JournalError


@pytest.fixture
def study(tmp_path):
    pretend(tmp_path / "study", devices=2, jobs=12, failing=0.4).close()
    return tmp_path / "study"


def shoal(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_page_below_the_study(study):
    for _ in range(2):  # the second takes the place of the first
        done = shoal(study)
        assert (done.exit_code, done.stdout) == (0, "")
    page = study / "report" / "report.html"
    assert done.stderr == f"shoal: written: {page}\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    (study / "report").rename(study / "other")
    (study / "report").write_text("a file")
    done = shoal(study)
    assert done.exit_code == 1
    assert "name another file with --html" in str(done.exception)


def test_a_study_that_is_refused_gets_no_folder(study):
    with closing(sqlite3.connect(study / "journal.sqlite")) as connection, connection:
        connection.execute("UPDATE trials SET config = '{' WHERE number = 1")
    done = shoal(study)
    assert (done.exit_code, type(done.exception)) == (1, JournalError)
    assert not (study / "report").exists()


def test_as_json_nothing_is_written_unless_asked_for(study, tmp_path):
    shown = json.loads(shoal(study, "--json").stdout)
    assert (shown["directory"], shown["jobs"], shown["files"]) == (str(study), 16, [])
    shown = json.loads(shoal(study, "--json", "--html", tmp_path / "a.HTML").stdout)
    assert shown["files"] == [str(tmp_path / "a.HTML")]
    assert not (study / "report").exists()


def test_status_of_a_running_study_tells_of_devices_and_of_failures(tmp_path):
    with pretend(tmp_path, devices=2, jobs=40, side_by_side=2, failing=0.5, running=True):
        done = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
        shown = json.loads(done.stdout)
    assert [device["device"] for device in shown["devices"]] == ["cuda:0", "cuda:1"]
    assert all(0 < device["reserved"] <= device["memory"] for device in shown["devices"])
    assert {len(device["jobs"]) for device in shown["devices"]} == {2}
    assert "waits to be tried again" in shown["failing"][0]["next"]
