"""What the time of a study's slots was spent on: the seconds sum to its running time, and each goes to its cause."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.recorded import RecordedJournal
from timeline_samples import Clock, machines, training, trial
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.activity import Activity
from shoal.core.job import Job, Purpose
from shoal.core.trial import Budget, Report, TrialGroup
from shoal.journal.view import JournalView
from shoal.look.accounting import Accounting, account
from shoal.look.overview import timed_jobs
from shoal.spec import StudySpec

FIRST, SECOND = "cuda:0", "cuda:1"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Path, clock: Clock) -> Iterator[RecordedJournal]:
    study = StudySpec(metric="accuracy", mode="max")
    with RecordedJournal.create(tmp_path / "study", study, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_devices(machines(2))
        journal.record_proposal(9, [TrialGroup(tuple(map(trial, range(8))), Budget(3))])
        yield journal


def signature_job(name: str) -> Job:
    return replace(training(name, [0]), purpose=Purpose.SIGNATURE)


def accounting(journal: JournalView, now: float) -> Accounting:
    return account(journal, *timed_jobs(journal, now))


def spent(journal: RecordedJournal, device: str) -> dict[Activity, float]:
    """What took time on a device, without what took none."""
    found = accounting(journal, 2000.0)
    check_sum(found)
    return {activity: pytest.approx(seconds) for activity, seconds in found.devices[device].items() if seconds}


def check_sum(found: Accounting) -> None:
    for slot in found.devices.values():
        assert sum(slot.values()) == pytest.approx(found.wall, rel=0.02)
    assert sum(found.seconds.values()) == pytest.approx(found.total, rel=0.02)


def test_a_study_of_two_slots_from_its_call_to_its_end(journal: RecordedJournal, clock: Clock) -> None:
    clock.now = 1001.0
    journal.record_job_start(signature_job("1"), FIRST)
    clock.now = 1005.0
    journal.record_job_end("1", "finished", failed=False, activities={Activity.START: 2.0, Activity.SIGNATURE: 1.5})
    clock.now = 1006.0
    journal.record_job_start(training("2", [0, 1]), FIRST)
    journal.record_job_start(training("3", [2]), SECOND)
    clock.now = 1010.0
    journal.record_job_end("3", "finished", failed=False, activities={Activity.STEPS: 3.0, Activity.BUILD: 1.0})
    clock.now = 1012.0
    journal.record_reports("2", [Report(0, 1, {"accuracy": 0.5}, 1.0)])
    clock.now = 1013.0
    journal.record_job_start(training("4", [3]), SECOND)
    clock.now = 1015.0
    journal.record_job_end("4", "finished", failed=False, activities={Activity.STEPS: 2.0})
    clock.now = 1026.0
    journal.record_job_end("2", "finished", failed=False, activities={Activity.STEPS: 15.0, Activity.VALIDATION: 4.0})
    journal.close()
    with JournalView.read(journal.directory) as view:
        assert accounting(view, 2000.0).wall == 26.0
        assert spent(view, FIRST) == {
            Activity.START: 3.0,  # of which 1 s before the job was started
            Activity.SIGNATURE: 1.5,
            Activity.ENGINE: 0.5 + 1.0 + 1.0,
            Activity.STEPS: 15.0,
            Activity.VALIDATION: 4.0,
        }
        assert spent(view, SECOND) == {
            Activity.START: 3.0,
            Activity.WAITS_FOR_MEASURING: 2.0,
            Activity.ENGINE: 1.0 + 1.0,
            Activity.STEPS: 5.0,
            Activity.BUILD: 1.0,
            Activity.WAITS_FOR_TRIALS: 2.0,
            Activity.FINISHED: 11.0,
        }


def test_jobs_side_by_side_share_the_time(journal: RecordedJournal, clock: Clock) -> None:
    journal.record_job_start(training("1", [0]), FIRST)
    clock.now = 1010.0
    journal.record_job_start(training("2", [1]), FIRST)
    clock.now = 1020.0
    journal.record_job_end("1", "finished", failed=False, activities={Activity.STEPS: 20.0})
    journal.record_job_end("2", "finished", failed=False, activities={Activity.VALIDATION: 10.0})
    journal.close()
    with JournalView.read(journal.directory) as view:
        assert spent(view, FIRST) == {Activity.STEPS: 15.0, Activity.VALIDATION: 5.0}
        assert spent(view, SECOND) == {Activity.FINISHED: 20.0}


def test_jobs_that_reported_nothing_are_told_apart(journal: RecordedJournal, clock: Clock) -> None:
    journal.record_job_start(training("1", [0]), FIRST)
    clock.now = 1010.0
    journal.record_job_end("1", "crashed", "killed", failed=True)
    journal.record_job_start(training("2", [0]), SECOND)
    found = accounting(journal, 1030.0)  # this process holds the writer's lock: the study runs
    check_sum(found)
    assert found.devices[FIRST][Activity.UNREPORTED] == 10.0
    assert found.devices[FIRST][Activity.WAITS_FOR_TRIALS] == 20.0
    assert found.devices[SECOND][Activity.UNREPORTED] == 20.0


def test_a_resumed_study_starts_its_processes_again(journal: RecordedJournal, clock: Clock) -> None:
    ended = {Activity.START: 2.0, Activity.STEPS: 8.0}
    journal.record_job_start(training("1", [0]), FIRST)
    clock.now = 1010.0
    journal.record_job_end("1", "finished", failed=False, activities=ended)
    clock.now = 5000.0
    journal.begin_run()
    journal.record_job_start(training("2", [1]), FIRST)
    clock.now = 5010.0
    journal.record_job_end("2", "finished", failed=False, activities=ended)
    journal.close()
    with JournalView.read(journal.directory) as view:
        assert accounting(view, 9000.0).wall == 20.0
        assert spent(view, FIRST) == {Activity.START: 4.0, Activity.STEPS: 16.0}
        assert spent(view, SECOND) == {Activity.START: 4.0, Activity.FINISHED: 16.0}


class Halves(shoal.Task):
    def data(self, config):
        x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
        y = (x.sum(1) > 0).long()
        return TensorDataset(x, y), TensorDataset(x, y)

    def model(self, config):
        return nn.Linear(4, 2)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)


def test_the_activities_of_a_study_in_one_process_sum_to_the_time_of_its_slots(finished: shoal.Study) -> None:
    check_activities(finished.directory)


def test_the_activities_of_a_study_in_several_processes_sum_to_the_time_of_its_slots(tmp_path: Path) -> None:
    shoal.tune(
        Halves(), {"lr": shoal.loguniform(1e-3, 1e-1), "batch_size": shoal.choice([16, 32])},
        metric="valid_loss", mode="min", algorithm=shoal.SuccessiveHalving(n=8, max_epochs=4, eta=2), devices="cpu:2",
        backend="local", directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    check_activities(tmp_path / "study")


def check_activities(study: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(study), "--accounting", "--json"])
    shown = json.loads(done.stdout)
    total = shown["wall_seconds"] * shown["slots"]
    assert (shown["slots"], list(shown["devices"])) == (2, ["cpu:0", "cpu:1"])
    assert sum(shown["seconds"].values()) == pytest.approx(total, rel=0.02)
    for slot in shown["devices"].values():
        assert sum(slot.values()) == pytest.approx(shown["wall_seconds"], rel=0.02)
    assert shown["seconds"]["running or killed jobs"] == 0.0
    for activity in ("start", "data", "comparing models", "build", "steps", "validation", "checkpoints", "planning"):
        assert shown["seconds"][activity] > 0.0, f"no time was spent on {activity}"
    table = CliRunner().invoke(app, ["report", str(study), "--accounting"]).stdout
    assert "validation" in table
    assert set(shown["diagnosis"]["summary"].split()) <= set(table.split()), "the losses follow the table"
    assert all(loss["remedy"].split()[-1] in table for loss in shown["diagnosis"]["losses"])
    assert "running or killed jobs" not in table
    assert not (study / "report").exists()
