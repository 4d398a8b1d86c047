"""`shoal report` and `shoal status` of studies that look as if they had been run."""

import json

import pytest
from timeline_samples import pretend
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.reporting import drawing


@pytest.fixture
def study(tmp_path):
    pretend(tmp_path / "study", devices=2, jobs=12, failing=0.4).close()
    return tmp_path / "study"


def shoal(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_page_and_a_picture_below_the_study(study):
    for _ in range(2):  # the second takes the place of the first
        done = shoal(study)
        assert (done.exit_code, done.stdout) == (0, "")
    page, picture = study / "report" / "report.html", study / "report" / "timeline.png"
    assert f"written: {page}\nshoal: written: {picture}" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_one_file_elsewhere(study, tmp_path, name, start):
    assert shoal(study, "--output", tmp_path / name).exit_code == 0
    assert (tmp_path / name).read_bytes().startswith(start)
    assert not (study / "report").exists()


def test_as_json_nothing_is_drawn_unless_asked_for(study, tmp_path):
    shown = json.loads(shoal(study, "--json").stdout)
    assert (shown["directory"], shown["jobs"], shown["files"]) == (str(study), 16, [])
    assert not (study / "report").exists()
    shown = json.loads(shoal(study, "--json", "--output", tmp_path / "a.svg").stdout)
    assert shown["files"] == [str(tmp_path / "a.svg")]


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("a.pdf", r"a timeline is a .png or .svg file, got"),
        ("a.html", "write the page of the study with --html"),
        ("nowhere/a.png", "is not a writable folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(study, tmp_path, output, hint):
    done = shoal(study, "--output", tmp_path / output)
    assert done.exit_code == 1
    assert hint in str(done.exception)


def test_a_folder_that_cannot_be_made_is_named(study):
    (study / "report").write_text("a file")
    done = shoal(study)
    assert done.exit_code == 1
    assert "name other files with --html and with --output" in str(done.exception)


def test_without_matplotlib_the_remedy_is_named(study, monkeypatch):
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    done = shoal(study)
    assert str(done.exception) == "a timeline needs matplotlib. Install it with: pip install matplotlib"


def test_status_of_a_running_study_tells_of_devices_and_of_failures(tmp_path):
    with pretend(tmp_path, devices=2, jobs=40, side_by_side=2, failing=0.5, running=True):
        done = CliRunner().invoke(app, ["status", str(tmp_path), "--json"])
        shown = json.loads(done.stdout)
    assert [device["device"] for device in shown["devices"]] == ["cuda:0", "cuda:1"]
    assert all(0 < device["promised"] <= device["memory"] for device in shown["devices"])
    assert {len(device["jobs"]) for device in shown["devices"]} == {2}
    assert "waits to be tried again" in shown["failing"][0]["next"]
