"""A page beside a study that runs: its changes in order, requests, and what goes wrong meanwhile."""

import errno
import itertools
import json
import os
import pwd
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_studies import lively_study
from serving import Page, served

from shoal.core.errors import ShoalError
from shoal.core.trial import Report
from shoal.journal.requests import pending_requests
from shoal.journal.schema import FILE_NAME
from shoal.look.page.app import PageServer
from shoal.look.page.feed import StudyFeed, find_studies
from shoal.look.page.server import serve
from shoal.look.page.views import snapshot_view, summary_view
from shoal.look.snapshot import snapshot

USER = pwd.getpwuid(os.geteuid()).pw_name

PROGRAM = """
import sys, time
import shoal

def train(config):
    for step in range(1, 2001):
        time.sleep(0.02)
        shoal.report({"loss": config["x"] / step}, step=step)

if __name__ == "__main__":
    shoal.tune(train, {"x": shoal.uniform(1.0, 2.0)}, metric="loss", mode="min", algorithm=shoal.Random(3, epochs=2000),
               devices="cpu:1", directory=sys.argv[1], show_progress=False, page=True)
"""


FAULTY = """
import sys
from pathlib import Path
from shoal.look.page.feed import StudyFeed
from shoal.look.page.server import serve

def look(feed, own=StudyFeed.look):
    if (feed.directory / "fault").exists():
        raise RuntimeError("a fault of the page itself")
    return own(feed)

StudyFeed.look = look
serve(Path(sys.argv[1]), announce=lambda address: print(address, flush=True))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of studies, each of one test."""
    place = tmp_path_factory.mktemp("live")
    lively_study(place / "first", trials=16).close()
    return place


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Page]:
    with served(folder) as page:
        yield page


def test_changes_come_in_order_and_each_once(page: Page, folder: Path) -> None:
    with lively_study(folder / "ordered") as journal:
        state = page.json("/api/state?study=ordered")
        assert len(state["trials"]) == 48
        one, other = (page.events("ordered", state["position"]) for _ in range(2))
        position = state["position"]
        for epoch in (13, 14):
            journal.record_reports("job-00005", [Report(32, epoch, {"accuracy": 0.5 + epoch / 100}, 0.1)])
            for events in (one, other):
                reports, trials = [], []
                while not (reports and trials):  # a look between the two finds them one after the other
                    event = events.next()
                    reports += event["reports"]
                    trials += event["trials"]
                assert [report[:2] for report in reports] == [[32, epoch]]
                assert [trial["epochs"] for trial in trials if trial["trial"] == 32] == [epoch]
            assert event["position"] != position
            position = event["position"]
        late = page.events("ordered", state["position"])  # one that was away gets both at once
        assert [report[:2] for report in late.next()["reports"]] == [[32, 13], [32, 14]]
        curves = page.json("/api/curves?study=ordered&metric=accuracy")["curves"]
        assert curves["32"][0][-2:] == [13, 14]
        assert len(page.json("/api/trial?study=ordered&trial=32")["reports"]) == 14
        for events in (one, other, late):
            events.close()


@pytest.mark.parametrize("position", ["", "x", "0-0", "00000000-1", "{run}-99999", "{run}--1", "{run}-1²"])
def test_a_position_that_is_not_known_loads_the_study_again(tmp_path: Path, position: str) -> None:
    lively_study(tmp_path).close()
    feed = StudyFeed("study", tmp_path)
    feed.look()
    found = feed.delta(position.format(run=feed.position.partition("-")[0]))
    assert found == (feed.position, '{"reload":true}')
    assert feed.delta(feed.position) is None


def test_a_journal_that_is_damaged_or_deleted_is_told_of(page: Page, folder: Path) -> None:
    lively_study(folder / "damaged").close()
    state = page.json("/api/state?study=damaged")
    events = page.events("damaged", state["position"])
    for name in os.listdir(folder / "damaged"):
        if name.startswith(FILE_NAME):
            (folder / "damaged" / name).unlink()
    assert "there is no study" in events.until(lambda event: event["error"])["error"]
    (folder / "damaged" / FILE_NAME).write_bytes(b"no database at all" * 1000)
    assert "cannot be used" in events.until(lambda event: "there is no study" not in event["error"])["error"]
    assert page.ask("GET", "/api/overview?study=damaged")[0] == 404
    (listed,) = (each for each in page.json("/api/studies")["studies"] if each["name"] == "damaged")
    assert listed["study"]["error"]
    events.close()


def test_a_study_that_was_begun_again_at_the_same_path_is_another_one(tmp_path: Path) -> None:
    feed = StudyFeed("study", tmp_path / "study")
    lively_study(tmp_path / "study").close()
    feed.look()
    position = feed.position
    shutil.rmtree(tmp_path / "study")
    lively_study(tmp_path / "study", trials=16, running=False).close()
    assert feed.look()
    assert feed.delta(position) == (feed.position, '{"reload":true}')
    assert [trial["trial"] for trial in json.loads(feed.state())["trials"]] == list(range(16))


def test_an_unexpected_error_ends_the_streams_and_the_server_with_its_traceback(tmp_path: Path) -> None:
    lively_study(tmp_path / "study").close()
    command = [sys.executable, "-c", FAULTY, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    page = Page(process.stdout.readline().strip(), process.pid)
    events = page.events("study", page.json("/api/state?study=study")["position"])
    (tmp_path / "study" / "fault").touch()
    with pytest.raises(AssertionError, match="the stream has ended"):
        events.next()
    _, said = process.communicate(timeout=20)
    events.close()
    assert process.returncode == 1
    assert "RuntimeError: a fault of the page itself" in said
    assert "has ended by the error above" in said


def test_a_journal_that_is_being_created_is_told_of_until_it_is_there(tmp_path: Path) -> None:
    lively_study(tmp_path / "study").close()
    feed = StudyFeed("study", tmp_path / "study")
    with sqlite3.connect(tmp_path / "study" / FILE_NAME) as connection:
        runs = connection.execute("SELECT * FROM runs").fetchall()
        connection.execute("DELETE FROM runs")
    connection.close()
    assert feed.look()
    assert "no process has run the study" in json.loads(feed.state())["error"]
    assert "no process has run the study" in summary_view(tmp_path / "study", time.time())["error"]
    with sqlite3.connect(tmp_path / "study" / FILE_NAME) as connection:
        connection.executemany(f"INSERT INTO runs VALUES ({', '.join('?' * len(runs[0]))})", runs)
    connection.close()
    assert feed.look()
    found = json.loads(feed.state())
    assert (found["error"], len(found["trials"])) == ("", 48)


def test_a_view_with_an_age_is_computed_again_though_no_file_has_changed(tmp_path: Path) -> None:
    page, counts = PageServer(tmp_path, token="x", port=1), itertools.count()

    def view(*key: str, seconds: float = 0.0) -> str:
        return page._cached(key, tmp_path, lambda: next(counts), seconds)

    first = view("studies", "one", seconds=1e-6)
    assert any(view("studies", "one", seconds=1e-6) != first for _ in range(100_000))
    assert view("curves", "one") == view("curves", "one")
    kept = [view("studies", str(number), seconds=1e6) for number in range(200)]
    for number in range(200):
        view("curves", str(number))
    assert [view("studies", str(number), seconds=1e6) for number in range(200)] == kept
    assert sum(key[0] == "curves" for key in page._cache) == 64


@pytest.mark.parametrize(("finished", "ended"), [(False, False), (True, True)])
def test_a_study_whose_trials_have_all_ended_may_go_on(tmp_path: Path, finished: bool, ended: bool) -> None:
    with lively_study(tmp_path, trials=16, running=False) as journal:
        journal.put("finished", finished)
        assert snapshot_view(journal, snapshot(journal, time.time()))["ended"] is ended


def test_a_browser_that_never_reads_holds_up_nothing(page: Page, folder: Path) -> None:
    with lively_study(folder / "deaf") as journal:
        state = page.json("/api/state?study=deaf")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.connect(("127.0.0.1", page.port))
            path = f"/api/events?study=deaf&position={state['position']}"
            deaf.sendall(
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nCookie: {page.cookie}\r\n\r\n".encode()
            )
            events = page.events("deaf", state["position"])
            values, sent = {"accuracy": 0.5, "long" * 10_000: 1.0}, 0
            for epoch in range(13, 24):
                journal.record_reports("job-00005", [Report(x, epoch, values, 0.1) for x in range(32, 40)])
                found = events.until(lambda event, epoch=epoch: any(report[1] == epoch for report in event["reports"]))
                sent += len(json.dumps(found))
            assert sent > 8_000_000  # the buffers of a connection hold less
            events.close()


@pytest.mark.thorough  # fast, test_steering.py steers one from a browser
def test_a_study_that_runs_is_paused_resumed_and_ended_from_its_page(tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, "search.py", "study"], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "the page is at" in line)
        page = Page(re.search(r"http://\S+", said)[0], 0)
        state = page.json("/api/state?study=study")
        events = page.events("study", state["position"])
        events.until(lambda event: event["reports"])
        for verb, reached in (
            ("pause study", lambda found: found["paused"]["study"]),
            (
                "resume study",
                lambda found: not found["paused"]["study"] and found["requests"][-1]["verb"] == "resume study",
            ),
        ):
            status, text, _ = page.ask("POST", "/api/request?study=study", body={"verb": verb})
            assert status == 202, text
            found = events.until(lambda event, reached=reached: reached(event["snapshot"]))["snapshot"]
            assert (found["requests"][-1]["verb"], found["requests"][-1]["user"]) == (verb, USER)
        assert page.ask("POST", "/api/request?study=study", body={"verb": "pause", "trials": [2]})[0] == 202
        events.until(lambda event: event["snapshot"]["paused"]["trials"] == [2])
        events.close()
        assert page.ask("POST", "/api/request?study=study", body={"verb": "pause", "trials": [2]})[0] == 409
        assert page.ask("POST", "/api/request?study=study", body={"verb": "end study"})[0] == 202
        process.communicate(timeout=60)
        assert process.returncode == 0
        with pytest.raises(ConnectionRefusedError):
            page.ask("GET", "/")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_the_page_ends_after_its_study_was_killed(tmp_path: Path) -> None:
    (tmp_path / "search.py").write_text(PROGRAM)
    process = subprocess.Popen([sys.executable, "search.py", "study"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = next(line for line in process.stderr if "the page is at" in line)
    page = Page(re.search(r"http://\S+", said)[0], 0)
    process.kill()
    process.wait()
    process.stderr.close()
    for _ in range(200):
        try:
            page.ask("GET", "/")
        except OSError:
            return
        time.sleep(0.1)
    pytest.fail("the page is still there after 20 seconds")


def test_a_request_to_a_study_without_a_process_is_kept(page: Page, folder: Path) -> None:
    lively_study(folder / "asked").close()
    assert page.ask("POST", "/api/request?study=asked", body={"verb": "pause", "trials": [33]})[0] == 202
    pending = page.json("/api/state?study=asked")["snapshot"]["pending"]
    assert pending == [{"user": USER, "said": "pause trial 33"}]
    assert [(each.verb, each.trials) for each in pending_requests(folder / "asked")] == [("pause", (33,))]


def test_what_cannot_be_served_is_refused_with_a_remedy(tmp_path: Path) -> None:
    lively_study(tmp_path / "study").close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShoalError, match="there is no study in"):
        serve(tmp_path / "empty", announce=print)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ShoalError, match=f"port {port} of 127.0.0.1 cannot be used .*--port"):
            serve(tmp_path, port=port, announce=print)


def test_a_study_that_this_user_may_not_read_is_named_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.sqlite").touch()

    def stat(path: Path, **keywords: Any) -> os.stat_result:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return os.stat(path, **keywords)

    monkeypatch.setattr(Path, "stat", stat)
    found = find_studies(tmp_path)
    assert list(found) == ["mine", "theirs"]
    assert "theirs cannot be read: " in summary_view(found["theirs"], 0.0)["error"]
    assert "Permission denied" in summary_view(found["theirs"], 0.0)["error"]
