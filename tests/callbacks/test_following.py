"""Callbacks of real studies: all that is recorded is told, in order, whatever is killed."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import told
from processes import gone, wait_for
from told import Raises, Told, processes, read, train

import shoal
from shoal.core.errors import ShoalError
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView

RUN = "import sys, told; told.run(*sys.argv[1:])"


def tune(directory: Path, *callbacks: shoal.Callback, **arguments: Any) -> shoal.Study:
    given = {"algorithm": shoal.Grid(epochs=2), "devices": "cpu:1", "backend": "inline"} | arguments
    space = {"x": shoal.grid([1.0, 2.0])}
    return shoal.tune(
        train,
        space,
        metric="loss",
        mode="min",
        directory=directory,
        callbacks=callbacks,
        show_progress=False,
        **given,
    )


def recorded(directory: Path) -> list[list[Any]]:
    """The reports of a study's journal as callbacks are told of them."""
    with JournalView.read(directory) as journal:
        return [["report", x.trial, x.epoch, x.metrics["loss"]] for _, _, x in journal.reports_after(0, 10_000)]


def of_trials(lines: list[list[Any]]) -> dict[int, list[list[Any]]]:
    found = defaultdict(list)
    for line in lines:
        if not line[0].startswith("study"):
            found[line[1]].append([line[0], *line[2:]])
    return found


def check_order(lines: list[list[Any]], study: shoal.Study) -> None:
    """Each trial begins once, then has its epochs in order, then ends as it did."""
    found = of_trials(lines)
    assert found.keys() == {row.number for row in study.trials}
    for row in study.trials:
        first, *reports, last = found[row.number]
        assert first == ["begins", row.config["x"]]
        assert [report[:2] for report in reports] == [["report", epoch + 1] for epoch in range(row.epoch)]
        assert last == ["ends", row.state, row.epoch]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts the study of `told.run` in a process; trials have their fourth report when the gate is opened."""
    started: list[subprocess.Popen[bytes]] = []
    os.mkfifo(tmp_path / "gate")

    def begin(backend: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(Path(told.__file__).parent), *sys.path])
        line = [sys.executable, "-c", RUN, str(tmp_path / "study"), str(tmp_path / "told"), backend]
        started.append(subprocess.Popen(line, env={**os.environ, "PYTHONPATH": path, "GATE": str(tmp_path / "gate")}))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("backend", [pytest.param("inline", marks=pytest.mark.thorough), "local"])
def test_a_killed_engine_costs_and_repeats_nothing(
    backend: str, tmp_path: Path, begun: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    file, directory = tmp_path / "told", tmp_path / "study"
    engine = begun(backend)
    wait_for(lambda: len(read(file)) > 3)
    (follower,) = processes(file)
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    assert gone(follower)
    so_far = recorded(directory)
    assert [line for line in read(file) if line[0] == "report"] == so_far, "what was recorded is told after the kill"
    assert read(file)[-1] == ["study ends", False]
    study = shoal.resume(directory, show_progress=False)
    lines = read(file)
    assert [line for line in lines if line[0] == "report"] == recorded(directory)
    assert len(recorded(directory)) > len(so_far)
    check_order(lines, study)
    assert [line for line in lines if line[0].startswith("study")] == [
        ["study begins", False],
        ["study ends", False],
        ["study begins", True],
        ["study ends", True],
    ]
    assert os.getpid() not in processes(file)


def test_a_killed_follower_is_said_and_costs_nothing_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begun: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    file, directory = tmp_path / "told", tmp_path / "study"
    engine = begun("local")
    wait_for(lambda: len(read(file)) > 3)
    (follower,) = processes(file)
    os.kill(follower, signal.SIGKILL)
    assert gone(follower)
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    assert engine.wait() == 0, "the study continues"
    os.close(gate)
    told_before = read(file)
    assert len([line for line in told_before if line[0] == "report"]) < len(recorded(directory))
    study = shoal.resume(directory, show_progress=False)
    lines = [json.loads(line) for line in dict.fromkeys(map(json.dumps, read(file)))]  # at least once
    assert [line for line in lines if line[0] == "report"] == recorded(directory)
    check_order(lines, study)


def test_a_callback_that_raises_is_left_out_until_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mended, directory = tmp_path / "mended", tmp_path / "study"
    study = tune(directory, Raises(mended, tmp_path / "raised"), Told(tmp_path / "told"))
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "shoal.callbacks"]
    assert warning.startswith(
        "callback Raises is left out until the study is resumed, and the study continues: "
        f"ZeroDivisionError: planted in a callback ({told.__file__}, line "
    )
    assert "in on_report" in warning
    assert str(directory / "logs" / "callbacks.log") in warning
    assert "Traceback" in (directory / "logs" / "callbacks.log").read_text()
    check_order(read(tmp_path / "told"), study)
    mended.touch()
    shoal.resume(directory, show_progress=False)
    assert [line for line in read(tmp_path / "raised") if line[0] == "report"] == recorded(directory)
    check_order(read(tmp_path / "told"), study)


class Forgotten(shoal.Callback):
    """Cannot be loaded again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (__import__, ("no_such_module_anywhere",))


def test_a_callback_that_cannot_be_loaded_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tune(tmp_path / "study", Forgotten(), Told(tmp_path / "told"))
    assert "callback Forgotten is left out" in caplog.text
    assert "it cannot be loaded: No module named 'no_such_module_anywhere'" in caplog.text
    assert read(tmp_path / "told")[-1] == ["study ends", True]


def test_a_study_without_callbacks_has_no_follower(tmp_path: Path) -> None:
    tune(tmp_path / "study")
    assert not (tmp_path / "study" / "callbacks.json").exists()
    assert not (tmp_path / "study" / "logs" / "callbacks.log").exists()


def test_damaged_positions_are_said_with_a_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "study"
    tune(directory, Told(tmp_path / "told"))
    (directory / "callbacks.json").write_text("[{}]")
    shoal.resume(directory, show_progress=False)
    assert f"{directory / 'callbacks.json'} is damaged (KeyError: 'seq')" in caplog.text


def test_a_retried_trial_goes_on_and_ends_again(tmp_path: Path) -> None:
    directory, file = tmp_path / "study", tmp_path / "told"
    mended = tmp_path / "mended"

    def once(config: dict[str, float]) -> None:
        for step in range(shoal.step(), 3):
            if step == 1 and config["x"] == 2.0 and not mended.exists():
                raise ZeroDivisionError("planted in a trial")
            shoal.report({"loss": 1.0}, step=step + 1)

    space, algorithm = {"x": shoal.grid([1.0, 2.0])}, shoal.Grid(epochs=3)
    study = shoal.tune(
        once,
        space,
        metric="loss",
        mode="min",
        algorithm=algorithm,
        directory=directory,
        devices="cpu:1",
        backend="inline",
        retries=0,
        callbacks=[Told(file)],
        show_progress=False,
    )
    failed = next(row.number for row in study.trials if row.state is TrialState.FAILED)
    mended.touch()
    study.retry()
    shoal.resume(directory, show_progress=False)
    assert [line[:2] for line in of_trials(read(file))[failed]] == [
        ["begins", 2.0],
        ["report", 1],
        ["ends", "failed"],
        ["report", 2],
        ["report", 3],
        ["ends", "complete"],
    ]


class Unpicklable(shoal.Callback):
    def __init__(self, file: Path) -> None:
        self.file = file.open("w")


def test_what_is_not_a_list_of_callbacks_is_refused_before_a_directory_is_made(tmp_path: Path) -> None:
    for wrong in (Told(tmp_path / "told"), [Told], ["tensorboard"], 3):
        with pytest.raises(ShoalError, match="`callbacks` must be a list of objects of subclasses of shoal"):
            shoal.tune(
                train,
                {"x": 1.0},
                metric="loss",
                mode="min",
                algorithm=shoal.Random(1, epochs=1),
                directory=tmp_path / "study",
                callbacks=wrong,  # type: ignore[arg-type]
            )
    callback = Unpicklable(tmp_path / "file")
    with pytest.raises(ShoalError, match="the callback Unpicklable cannot be pickled for its process"):
        tune(tmp_path / "study", callback)
    callback.file.close()
    assert not (tmp_path / "study").exists()
