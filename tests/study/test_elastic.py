"""Studies whose jobs hang or run out of memory, and whose devices are changed while they run; real processes."""

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tasks
import typer
from plain import array_sizes, check_equal, curves, jobs, plain_loop, tune
from typer.testing import CliRunner

import shoal
from shoal.cli import interventions
from shoal.core.device import Cluster
from shoal.core.errors import DeviceError, JournalError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.host.monitor import Condition
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.plan.cost.history import History, environment
from shoal.run.local import Local

app = typer.Typer(pretty_exceptions_enable=False)
app.command("add")(interventions.add_devices)
app.command("remove")(interventions.remove_devices)


def check_all(study: shoal.Study, task: shoal.Task, epochs: int = 4) -> None:
    """All trials are complete and equal plain loops."""
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    check_equal(curves(study.directory), {row.number: plain_loop(task, row.trial, epochs) for row in study.trials})


def test_a_job_that_hangs_is_killed_and_its_trials_are_trained_alone(tmp_path: Path) -> None:
    marker = tmp_path / "happened"
    space = {"lr": 0.01, "harm": shoal.grid(["none", "hang once"]), "after": 30}
    arguments: dict[str, Any] = {"backend": "local", "hang_seconds": 8.0, "algorithm": shoal.Grid(epochs=6)}
    study = tune(tasks.Disturbed(str(marker)), space, tmp_path / "study", **arguments)
    assert marker.exists()
    check_all(study, tasks.Disturbed(str(marker)), epochs=6)
    (hung,) = [job for job in jobs(study.directory) if job.outcome == "hung"]
    assert hung.message.startswith("showed no progress for ")
    assert Path(hung.message.partition("Log: ")[2]).exists()


def test_a_job_on_a_device_that_is_lost_is_killed_and_its_trial_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job stops in the middle of a step, as those of a lost device do."""
    marker = tmp_path / "happened"

    class Watching:
        """The first device that trains is lost as soon as its job stands still."""

        def watch(self, cluster: Cluster) -> None:
            """Both devices."""

        def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
            lost = [job.device for job in jobs(tmp_path / "study") if job.purpose is Purpose.TRAIN][:1]
            gone = Condition(healthy=False, reason="has fallen off the bus")
            return dict.fromkeys(lost, gone) if marker.exists() else {}

    monkeypatch.setattr(Local, "monitor", lambda backend, cluster: Watching())
    monkeypatch.setattr("shoal.study.devices.MONITOR_SECONDS", 0.1)
    task = tasks.Disturbed(str(marker))
    space = {"lr": 0.01, "harm": "hang once", "after": 20}
    study = tune(task, space, tmp_path / "study", backend="local", devices="cpu:2")
    check_all(study, task)
    assert {row.failures for row in study.trials} == {0}
    lost, other = [job for job in jobs(study.directory) if job.purpose is Purpose.TRAIN]
    assert (lost.outcome, other.outcome) == ("device lost", "finished")
    assert lost.message.startswith(f"{lost.device} is lost: has fallen off the bus")
    assert other.device != lost.device


class Unchecked(tasks.Disturbed):
    """Its trials are counted, and so would be copies of them."""

    exact = False


def test_arrays_that_run_out_of_memory_are_halved_until_they_fit(tmp_path: Path, fusing_pays: None) -> None:
    space = {"lr": shoal.grid([0.01, 0.02, 0.03, 0.04]), "harm": "memory in company", "after": 20}
    tune(Unchecked(), {**space, "harm": "none"}, tmp_path / "measured", algorithm=shoal.Grid(epochs=1))
    study = tune(Unchecked(), space, tmp_path / "study", retries=0)
    check_all(study, Unchecked())
    assert array_sizes(study.directory) == [4, 2, 2]
    assert [job.outcome for job in jobs(study.directory) if job.purpose is Purpose.TRAIN] == [
        "out of memory",
        "finished",
        "finished",
    ]


@pytest.mark.thorough
def test_a_third_of_memory_and_time_in_the_history_is_corrected_within_the_study(tmp_path: Path) -> None:
    space = {"lr": shoal.grid([0.01, 0.02, 0.03])}
    tune(tasks.Lingering(), space, tmp_path / "first", backend="local")
    history = History(environment=environment())
    ((key, true),) = history.all().items()
    wrong = replace(
        true,
        base_memory=true.base_memory // 3,
        member_memory=true.member_memory // 3,
        step_seconds=dict.fromkeys(true.step_seconds, tasks.LINGER_SECONDS / 3),
    )
    history.put(*key, wrong)
    study = tune(tasks.Lingering(), space, tmp_path / "study", backend="local", policy="fifo")
    check_all(study, tasks.Lingering())
    assert [job.purpose for job in jobs(study.directory)].count(Purpose.PROFILE) == 0, "it was believed at first"
    corrected = History(environment=environment()).get(*key)
    assert corrected is not None
    assert corrected.base_memory > 1.5 * wrong.base_memory, "a process that shares less with its server has more"
    assert corrected.step_seconds[1] > 0.75 * tasks.LINGER_SECONDS, "no step is shorter than its sleep"


@contextmanager
def running(directory: Path, **arguments: Any) -> Iterator[threading.Thread]:
    """A study in a thread, once a job trains; it takes its time until the end of the context."""
    released = directory.with_name("released")
    space = {"lr": shoal.grid([0.01, 0.02]), "width": shoal.grid([8, 9])}
    given = {"algorithm": shoal.Grid(epochs=40), "devices": "cpu:2", "backend": "local", **arguments}
    thread = threading.Thread(target=tune, args=(tasks.Held(released), space, directory), kwargs=given)
    thread.start()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and thread.is_alive() and not _trains(directory):
        time.sleep(0.05)
    yield thread
    released.touch()
    thread.join(300)
    assert not thread.is_alive()


def _trains(directory: Path) -> bool:
    if not (directory / "journal.sqlite").exists():
        return False
    with suppress(JournalError), JournalView.read(directory) as journal:  # it may just be made
        return any(job.purpose is Purpose.TRAIN for job in journal.jobs(running=True))
    return False


def test_devices_are_removed_from_a_running_study_and_come_back(tmp_path: Path) -> None:
    directory = tmp_path / "study"
    call = CliRunner().invoke
    with running(directory) as thread:
        removed = call(app, ["remove", "--study", str(directory), "cpu:1"])
        assert removed.exit_code == 0, removed.output
        assert "has cpu:0 now" in " ".join(removed.output.split())
        with JournalView.read(directory) as journal:
            assert journal.study["fleet"]["removed"] == ["cpu:1"]
        twice = call(app, ["remove", "--study", str(directory), "cpu:1"])
        assert isinstance(twice.exception, DeviceError)
        assert "device 'cpu:1' was removed before; the study has cpu:0" in str(twice.exception)
        added = call(app, ["add", "--study", str(directory), "cpu:1", "--json"])
        assert added.output.strip() == f'{{"directory": "{directory}", "devices": ["cpu:0", "cpu:1"], "runs": true}}'
        assert thread.is_alive(), "the study continued meanwhile"
    study = shoal.Study(directory)
    assert {row.state for row in study.trials} == {TrialState.COMPLETE}
    assert {row.failures for row in study.trials} == {0}
    nobody = call(app, ["remove", "--study", str(directory), "cpu:1"])
    assert isinstance(nobody.exception, DeviceError)
    assert "has ended, and needs no other devices" in str(nobody.exception)


def test_a_device_that_was_removed_stays_away_after_a_resume(tmp_path: Path) -> None:
    directory = tmp_path / "study"
    interrupted = tasks.InterruptedAfter(5, str(tmp_path / "count"))
    space = {"lr": shoal.grid([0.01, 0.02]), "momentum": 0.9, "step_size": 2}
    with pytest.raises(shoal.StudyInterrupted):
        tune(interrupted, space, directory, devices="cpu:2")
    with JournalView.read(directory) as journal:
        before = len(journal.jobs())
    writer = Journal.open(directory)
    writer.put("fleet", {"devices": "cpu:2", "added": [], "removed": ["cpu:0"]})
    writer.close()
    shoal.resume(directory, show_progress=False)
    assert {job.device for job in jobs(directory)[before:]} == {"cpu:1"}
