"""`shoal page` and `shoal report --html`, and what they refuse."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from page_studies import lively_study
from serving import Page
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.look.page import beside


@pytest.fixture
def study(tmp_path: Path) -> Path:
    lively_study(tmp_path / "study", trials=16, running=False).close()
    return tmp_path / "study"


def test_a_report_is_written_where_it_is_asked_for(study: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(study), "--html", str(tmp_path / "out.html")])
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"written: {tmp_path / 'out.html'}" in done.stderr
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    assert not (study / "report").exists()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--html", "nowhere/out.html"], "the report cannot be written"),
        (["--html", "picture.png"], "whose name ends in .html"),
        (["--html", "out.html", "--accounting"], "leave --accounting out"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused(study: Path, monkeypatch, options: list[str], hint: str) -> None:
    monkeypatch.chdir(study.parent)
    done = CliRunner().invoke(app, ["report", str(study), *options])
    assert done.exit_code == 1
    assert hint in str(done.exception)
    assert not (study.parent / "out.html").exists()


def test_without_its_packages_the_page_names_the_remedy_before_a_study_begins(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(beside, "find_spec", lambda name: None)
    with pytest.raises(shoal.ShoalError, match=r"Install them with: pip install starlette uvicorn"):
        shoal.tune(
            print,
            {"x": shoal.uniform(0.0, 1.0)},
            metric="loss",
            mode="min",
            algorithm=shoal.Random(1, epochs=1),
            directory=tmp_path / "study",
            page=True,
        )
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_page_quietly_also_while_a_browser_watches(study: Path, end: signal.Signals) -> None:
    program = "from shoal.__main__ import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "page", str(study)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    said = process.stderr.readline()
    page = Page(said.split()[-1], process.pid)
    events = page.events("study", page.json("/api/state?study=study")["position"])
    process.send_signal(end)
    _, rest = process.communicate(timeout=20)
    events.close()
    assert (process.returncode, rest) == (0 if end is signal.SIGINT else -signal.SIGTERM, "")
