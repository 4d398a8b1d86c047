"""What a program calls, outside of a study and in one."""

import json
import math
import socket
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import shoal
import shoal.study
from shoal.core.errors import ShoalError, TaskError
from shoal.programs import trainable


@pytest.fixture(autouse=True)
def own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainable, "_report_count", None)
    for name in ("SHOAL_REPORT", "SHOAL_CHECKPOINT", "SHOAL_STEP"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], list[Any]]]:
    """Somebody who hears reports, and answers them in turn."""
    heard: list[Any] = []
    answers: list[Any] = []
    listener = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)
    listener.bind("report")
    listener.listen()
    monkeypatch.setenv("SHOAL_REPORT", "report")

    def serve() -> None:
        while True:
            caller, _ = listener.accept()
            with caller, caller.makefile("rwb") as stream:
                message = json.loads(stream.readline())
                if message is None:
                    return
                heard.append(message)
                if answers:
                    stream.write(json.dumps(answers.pop(0)).encode() + b"\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield heard, answers
    with socket.socket(socket.AF_UNIX) as last:
        last.connect(str(tmp_path / "report"))
        last.sendall(b"null\n")
    thread.join()
    listener.close()


def test_a_report_waits_whatever_timeout_the_program_sets(worker: tuple[list[Any], list[Any]]) -> None:
    heard, answers = worker
    answers.append({"go_on": True})
    socket.setdefaulttimeout(60.0)
    try:
        with trainable.connected("report") as connection:
            assert connection.gettimeout() is None
            connection.sendall(b'{"step": 1}\n')
            assert json.loads(connection.makefile("rb").readline()) == {"go_on": True}
    finally:
        socket.setdefaulttimeout(None)
    assert heard == [{"step": 1}]


def test_outside_of_a_study_reports_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shoal.report({"loss": 0.5})
    shoal.report({"loss": torch.tensor(0.25), "error": np.float32(2)})
    shoal.report({"loss": math.nan}, step=7)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [{"loss": 0.5, "step": 1}, {"loss": 0.25, "error": 2.0, "step": 2}]
    assert math.isnan(lines[2]["loss"])
    assert shoal.step() == 7


@pytest.mark.parametrize(
    "value",
    [
        *(0.25, Decimal("0.25"), Fraction(1, 4)),
        *(np.float16(0.25), np.float32(0.25), np.longdouble(0.25), np.array(0.25), np.array([[0.25]])),
        *(torch.tensor(0.25), torch.tensor([0.25], dtype=torch.bfloat16), torch.tensor(0.25, requires_grad=True)),
    ],
    ids=repr,
)
def test_what_is_a_number_is_reported_as_its_float(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shoal.report({"loss": value})
    assert json.loads(capsys.readouterr().out) == {"loss": 0.25, "step": 1}


@pytest.mark.parametrize("value", [np.int64(3), np.uint8(3), torch.tensor(3), 3], ids=repr)
def test_integers_too(value: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shoal.report({"loss": value})
    assert json.loads(capsys.readouterr().out) == {"loss": 3.0, "step": 1}


def test_outside_of_a_study_there_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShoalError, match=r"outside of a study; start the program with .*SHOAL_CHECKPOINT"):
        shoal.checkpoint()
    monkeypatch.setenv("SHOAL_CHECKPOINT", str(tmp_path / "mine"))
    assert shoal.checkpoint() == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize(
    ("metrics", "step", "words"),
    [
        pytest.param({"loss": "0.5"}, None, "the metric 'loss' must be a number, got '0.5'", id="a string"),
        pytest.param({"loss": None}, None, "the metric 'loss' must be a number, got None", id="nothing"),
        pytest.param({"loss": torch.zeros(2)}, None, "the metric 'loss' must be a number", id="two"),
        pytest.param(
            {"loss": 10**400}, None, "'loss' is an integer too large for a float; report its logarithm", id="10**400"
        ),
        pytest.param({"loss": Decimal("sNaN")}, None, "the metric 'loss' must be a number", id="a signalling NaN"),
        pytest.param({"loss": 1j}, None, "the metric 'loss' must be a number, got 1j", id="complex"),
        pytest.param({3: 0.5}, None, "a metric is named 3; names must be strings", id="a name"),
        pytest.param({"loss": 0.5}, 0, "`step` of shoal.report must be a whole number, at least 1, got 0", id="step 0"),
        pytest.param({"loss": 0.5}, 1.5, "`step` of shoal.report must be .*got 1.5", id="half a step"),
    ],
)
def test_a_report_that_is_none(metrics: Any, step: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        shoal.report(metrics, step=step)
    assert shoal.step() == 0


def test_a_report_waits_for_its_answer(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, answers = worker
    monkeypatch.setenv("SHOAL_STEP", "4")
    answers += [{"go_on": True}, {"refused": "no such step"}, {"go_on": False}]
    assert shoal.step() == 4
    shoal.report({"loss": 1})
    with pytest.raises(TaskError, match="no such step"):
        shoal.report({"loss": 1}, step=9)
    with pytest.raises(SystemExit) as stop:
        shoal.report({"loss": 2})
    assert stop.value.code == 0
    assert [message["step"] for message in heard] == [5, 9, 6]
    assert heard[0]["metrics"] == {"loss": 1.0}


def test_a_study_that_is_gone(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShoalError, match="is gone; resume it"):
        shoal.report({"loss": 1})  # nobody answers
    monkeypatch.setenv("SHOAL_REPORT", "nowhere")
    with pytest.raises(ShoalError, match=r"is gone .*resume it"):
        shoal.report({"loss": 1})


def test_the_package_of_that_name_does_not_hide_what_programs_call() -> None:
    from shoal import report
    from shoal.look.text import __all__ as names

    assert names
    assert shoal.report is report is trainable.report
    assert cloudpickle.loads(cloudpickle.dumps(shoal)) is shoal
