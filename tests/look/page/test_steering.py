"""Each control of the page in a browser, on a study that runs, and its effect in the journal; `shoal run --page`."""

import os
import pwd
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import Page
from tabs import filled, go, opened, wait

from shoal.core.rows import Intervention, TrialRow
from shoal.core.trial import FIRST_ADDED
from shoal.journal.view import JournalView

USER = pwd.getpwuid(os.geteuid()).pw_name
SEARCH = """
import sys, time
import shoal

def train(config):
    file = shoal.checkpoint() / "step"
    done = int(file.read_text()) if file.exists() else 0
    for step in range(done + 1, 100001):
        time.sleep(0.05)
        file.write_text(str(step))
        shoal.report({"loss": 1 / step, "began": done}, step=step)

if __name__ == "__main__":
    shoal.tune(train, {"lr": shoal.loguniform(1e-4, 1e-1), "batch_size": 8}, metric="loss", mode="min",
               algorithm=shoal.Random(2, epochs=100000), devices="cpu:2", directory="study")
"""


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Page]]:
    """A study that runs in a process of its own, and its page."""
    (folder / "search.py").write_text(SEARCH)
    process = subprocess.Popen(
        [sys.executable, "-c", "from shoal.__main__ import main; main()", "run", "search.py", "--page"],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "the page is at" in line)
        yield process, Page(re.search(r"http://\S+", said)[0], 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finished(process: subprocess.Popen[str]) -> None:
    """Wait until the study has ended."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said


def reached(tab: Any, directory: Path, condition: Callable[[list[Intervention], dict[int, TrialRow]], bool]) -> None:
    """Wait until the journal says so; the tab continues meanwhile."""
    for _ in range(600):
        with JournalView.read(directory) as journal:
            requests, trials = journal.interventions(), {row.number: row for row in journal.trials()}
        if condition(requests, trials):
            return
        tab.wait_for_timeout(100)
    pytest.fail(f"not so after a minute: {requests}")


def pressed(tab: Any, button: str) -> None:
    """Press a button and confirm."""
    tab.locator(button).first.click()
    tab.click("#ask-yes")


def test_a_study_that_runs_is_steered_from_its_page(browser, tmp_path: Path) -> None:
    study, added = tmp_path / "study", FIRST_ADDED
    with running(tmp_path) as (process, page), opened(browser, page.address) as tab:
        reached(tab, study, lambda _, trials: all(row.epoch for row in trials.values()) and len(trials) == 2)
        go(tab, "study", "trials")
        filled(tab, "Add a trial", {"lr": "0.05", "train": "2"})
        reached(tab, study, lambda _, trials: added in trials and trials[added].epoch == 2)
        go(tab, "study", f"trial/{added}")
        tab.wait_for_selector(".badge >> text=complete")
        filled(tab, "Clone", {"lr": "0.001", "train up to": "5"}, "from its weights")
        reached(tab, study, lambda _, trials: added + 1 in trials and trials[added + 1].epoch == 5)
        go(tab, "study", "trial/0")
        filled(tab, "Clone", {"lr": "0.01", "train up to": "3"}, "anew")
        reached(tab, study, lambda _, trials: added + 2 in trials and trials[added + 2].epoch == 3)
        pressed(tab, "[data-verb=pause]")
        reached(tab, study, lambda _, trials: trials[0].state == "pending")
        wait(tab, f"document.getElementById('why')?.innerText === 'It waits: paused by {USER}'")
        pressed(tab, "[data-verb=resume]")
        reached(tab, study, lambda _, trials: trials[0].state == "running")
        go(tab, "study", "trial/1")
        pressed(tab, "[data-verb=stop]")
        reached(tab, study, lambda _, trials: trials[1].state == "stopped")
        tab.wait_for_selector(".badge >> text=stopped")
        go(tab, "study", "overview")
        filled(tab, "Change the policy", {"policy": "fifo"})
        tab.wait_for_selector("text=policy: fifo")
        pressed(tab, "[data-device='cpu:0'][data-verb='remove devices']")
        tab.wait_for_selector("[data-device='cpu:0'][data-verb='add devices']")
        reached(tab, study, lambda _, trials: trials[0].device == "cpu:1" and trials[0].state == "running")
        filled(tab, "Add a device", {"device": "cpu:0"})
        tab.wait_for_selector("[data-device='cpu:0'][data-verb='remove devices']")
        text = tab.inner_text(".requests")
        pressed(tab, "[data-verb='end study']")
        finished(process)
    with JournalView.read(study) as journal:
        requests, trials = journal.interventions(), {row.number: row for row in journal.trials()}
    assert [each.verb for each in requests] == [
        *("add trial", "clone", "clone", "pause", "resume", "stop", "policy", "remove devices", "add devices"),
        "end study",
    ]
    assert {(each.user, each.refused) for each in requests} == {(USER, ())}
    assert trials[added].config == {"lr": 0.05, "batch_size": 8}
    assert (
        trials[added + 1].config["lr"],
        trials[added + 1].trial.origin.trial,
        trials[added + 1].trial.origin.epoch,
    ) == (*(0.001, added, 2),)
    assert [trials[number].metrics["began"] for number in (added, added + 1, added + 2)] == [0, 2, 0]
    assert (trials[added + 2].config["lr"], trials[added + 2].trial.origin) == (0.01, None)
    assert text.count(USER) >= 9
    for said in (
        "add trial 1000000",
        "clone 1000001 of trial 1000000",
        "pause trial 0",
        "fifo",
        "remove devices cpu:0",
    ):
        assert said in text


@pytest.mark.thorough  # fast, the test above has the same page
def test_shoal_run_serves_the_page_of_its_study_until_it_ends(browser, tmp_path: Path) -> None:
    with running(tmp_path) as (process, page), opened(browser, page.address, javascript_faults=True) as tab:
        reached(tab, tmp_path / "study", lambda _, trials: any(row.epoch for row in trials.values()))
        tab.wait_for_selector("#state >> text=running")
        tab.wait_for_selector(".figure >> text=/of 200000/")
        go(tab, "study", "space")
        tab.wait_for_selector("#picked >> text=2 of 2 trials")
        pressed(tab, "[data-verb='end study']")
        finished(process)
        tab.wait_for_selector("text=no connection to the page")
        tab.wait_for_selector("#state >> text=last seen: ")
        assert not tab.locator("[data-verb]:visible, [data-form]:visible, .banner.fault:visible").count()
