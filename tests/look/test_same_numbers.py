"""What is best, the time, the states and the gain are the same wherever they are shown, of a study that was killed."""

import html
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.activity import MEASURING, seconds_of
from shoal.core.trial import TrialState
from shoal.journal.schema import FILE_NAME
from shoal.look.page.files import frozen_page
from shoal.look.text import number_text

TESTS = Path(__file__).parents[1]
GAP = 3600.0
"""Seconds between the last event of the killed run and the resume, about."""
PLAIN_LINE = 10_000
"""A width of the terminal at which no line is folded."""

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from finished import search
from shoal import ASHA
from shoal.core.rows import ReportRow, TrialRow
from shoal.journal.writer import Journal

torch.set_num_threads(1)
write, reports = Journal.write, []

def write_and_die(self, rows):
    write(self, rows)
    reports.extend(row for row in rows if isinstance(row, ReportRow))
    if len(reports) >= 9 and any(isinstance(row, TrialRow) and row.state == "paused" for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)

Journal.write = write_and_die
search(Path(sys.argv[1]), ASHA)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What each place says of a study that was killed; and after it was resumed and has ended, with its last line."""
    folder = tmp_path_factory.mktemp("killed")
    directory = folder / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(folder / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *sys.path]))
        patch.setenv("COLUMNS", str(PLAIN_LINE))
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        done = subprocess.run([sys.executable, "-c", KILLED, str(directory)], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        put_back(directory, GAP)
        killed = shown(directory)
        last = CliRunner().invoke(app, ["resume", str(directory)])
        assert last.exit_code == 0, last.output
        return killed, shown(directory), last.stderr.splitlines()


def put_back(directory: Path, seconds: float) -> None:
    """Let all that is recorded have been earlier."""
    with sqlite3.connect(directory / FILE_NAME) as journal:
        for table, column in [("reports", "time"), ("proposals", "time"), ("jobs", "started"), ("jobs", "ended"),
                              ("reservations", "time"), ("runs", "started"), ("devices", "time")]:  # fmt: skip
            journal.execute(f"UPDATE {table} SET {column} = {column} - ?", (seconds,))
    journal.close()


def shown(directory: Path) -> dict[str, Any]:
    """What each place shows."""

    def asked(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [arguments[0], str(directory), *arguments[1:]])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in arguments else done.stdout

    study = shoal.Study(directory)
    frozen = re.search(r'id="frozen">(.*?)</script>', frozen_page(directory, time.time()))
    assert frozen is not None
    return {
        "python": study.best_trial,
        "trials": study.trials,
        "frame": study.dataframe(),
        "notebook": html.unescape(study._repr_html_()),
        "status": asked("status"),
        "best": asked("best"),
        "status json": asked("status", "--json"),
        "best json": asked("best", "--json"),
        "trials json": asked("trials", "--json"),
        "report json": asked("report", "--json"),
        "accounting": asked("report", "--accounting"),
        "accounting json": asked("report", "--accounting", "--json"),
        "page": json.loads(frozen[1]),
    }


@pytest.mark.parametrize("when", [0, 1], ids=["killed", "resumed and ended"])
def test_the_best_trial_is_the_same_everywhere(places: Any, when: int) -> None:
    found = places[when]
    best = found["python"]
    last = best.metrics["valid_loss"]
    page = found["page"]["state"]["snapshot"]
    for shown_best in (found["status json"]["best"], page["best"]):
        assert (shown_best["trial"], shown_best["value"]) == (best.number, best.objective)
        assert (shown_best["epoch"], shown_best["last"]) == (best.best_epoch, last)
    for row in (found["best json"], found["trials json"][0]):
        ranked = row["trial"], row["ranked"]["valid_loss"], row["best_epoch"], row["metrics"]["valid_loss"]
        assert ranked == (best.number, best.objective, best.best_epoch, last)
    assert found["report json"]["best"][0] == best.number
    for overview in (found["report json"], found["page"]["overview"]):
        assert overview["curve"][-1]["value"] == best.objective
        falls = [point["value"] for point in overview["curve"]]
        assert falls == sorted(falls, reverse=True), "the best got worse"
    value = number_text(best.objective)
    newest = "" if last == best.objective else f"; last {number_text(last)}"
    where = f"(trial {best.number}, epoch {best.best_epoch}{newest})"
    line = re.compile(rf"valid_loss {re.escape(value)} ± \S+ {re.escape(where)} with lr=")
    for name, text in [("status", found["status"]), ("notebook", found["notebook"]), ("page", page["text"]["best"])]:
        assert line.search(text), f"{name} shows another best than {line.pattern}: {text}"
    assert re.search(rf"^valid_loss +{re.escape(value)} ", found["best"], re.MULTILINE)
    frame = found["frame"].set_index("trial").loc[best.number]
    assert (frame["best_epoch"], frame["valid_loss"]) == (best.best_epoch, last)


@pytest.mark.parametrize("when", [0, 1], ids=["killed", "resumed and ended"])
def test_the_time_is_the_same_everywhere(places: Any, when: int) -> None:
    found = places[when]
    status, page = found["status json"], found["page"]
    running, span = status["elapsed"], status["span"]
    assert (status["runs"], running < GAP / 2) == (1 + when, True)
    assert span == pytest.approx(running + GAP * when, abs=60.0 if when else 1e-6)
    assert (page["state"]["snapshot"]["elapsed"], page["state"]["snapshot"]["span"]) == (running, span)
    for overview in (found["report json"], page["overview"]):
        assert (overview["seconds"], overview["span"]) == (running, span)
    assert page["overview"]["total"] == running
    for spent in (found["accounting json"], page["overview"]["accounting"]):
        assert spent["wall_seconds"] == running
        assert sum(spent["seconds"].values()) == pytest.approx(running * spent["slots"], rel=0.05)
    text = page["state"]["snapshot"]["text"]["time"]
    assert text in found["notebook"]
    assert (text in found["status"]) == (when == 1), "with one run, its time stands in the line of progress alone"
    assert page["state"]["snapshot"]["text"]["elapsed"] in found["status"]


@pytest.mark.parametrize("when", [0, 1], ids=["killed", "resumed and ended"])
def test_the_states_are_the_same_everywhere(places: Any, when: int) -> None:
    found = places[when]
    page = found["page"]["state"]
    names = [row["state"] for row in found["trials json"]]
    counts = {name: names.count(name) for name in names}
    assert {name: count for name, count in found["status json"]["trials"].items() if count} == counts
    assert page["snapshot"]["states"] == counts
    assert sorted(row["state"] for row in page["trials"]) == sorted(names)
    words = [row["status"] for row in found["trials json"]]
    assert found["status json"]["status"] == {word: words.count(word) for word in words}
    assert found["frame"]["state"].value_counts().to_dict() == found["status json"]["status"]
    for key, each in [("trials", counts), ("status", found["status json"]["status"])]:
        grid = Counter[str]()
        for cell in found["status json"]["grid"]["cells"]:
            grid.update(cell[key])
        assert grid == each, f"the grid has other {key}"
    text = page["snapshot"]["text"]["states"]
    assert text in found["status"]
    assert text in found["notebook"]
    for row in found["trials"]:
        waits = row.state in (TrialState.PENDING, TrialState.PAUSED)
        assert not waits or row.reason, f"trial {row.number} waits without a reason"
    held = [row for row in found["trials"] if row.state is TrialState.PAUSED]
    assert [row.reason for row in held] == [f"waiting for others at epoch {row.epoch}" for row in held]
    assert bool(held) == (when == 0)


@pytest.mark.parametrize("when", [0, 1], ids=["killed", "resumed and ended"])
def test_the_gain_is_the_same_everywhere(places: Any, when: int) -> None:
    found = places[when]
    gain = found["status json"]["savings"]
    assert (gain is not None) == (when == 1), "it is known at the end of a run"
    for place in (found["page"]["state"]["snapshot"], found["page"]["overview"], found["report json"]):
        assert place["savings"] == gain
    for text in (found["status"], found["notebook"], *["\n".join(places[2])] * when):
        assert gain["text"] in text if gain else " of measuring" not in text


def test_measuring_is_the_same_everywhere(places: Any) -> None:
    _, found, _ = places
    spent, saved = found["accounting json"]["seconds"], found["status json"]["savings"]
    assert saved["measuring"] == pytest.approx(seconds_of(MEASURING, spent))
    assert saved["measuring"] > 0
    for diagnosis in (found["accounting json"]["diagnosis"], found["page"]["overview"]["diagnosis"]):
        named = [loss["seconds"] for loss in diagnosis["losses"] if loss["name"] == "measuring"]
        assert named in ([], [pytest.approx(saved["measuring"])]), "it may be no large loss"


def test_the_last_lines_of_a_run_say_the_same(places: Any) -> None:
    _, found, lines = places
    text = found["page"]["state"]["snapshot"]["text"]
    end = next(line for line in lines if "best:" in line)
    assert text["states"] in end
    assert text["best"] in end
    assert text["time"].split(",")[0] in end
