"""Reservations of the jobs of a study are in its journal and never exceed the capacity."""

from pathlib import Path

import pytest
import tasks
from plain import tune
from support.audit import overcommitments

import shoal
from shoal.core.job import Purpose
from shoal.host.discover import discover
from shoal.journal.view import JournalView


def test_reservations_are_recorded_and_never_exceed_the_capacity(tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(0.003, 0.3), "width": shoal.choice([6, 8])}
    study = tune(tasks.Blobs(), space, tmp_path / "study", algorithm=shoal.Hyperband(9), devices="cpu:2")
    with JournalView.read(study.directory) as journal:
        jobs = [job for job in journal.jobs() if job.purpose is Purpose.TRAIN]
        devices, reservations = journal.devices(), journal.reservations()
        violations = overcommitments(journal, discover("cpu:2"))
    assert violations == []
    assert [(device.name, device.healthy) for device in devices] == [("cpu:0", True), ("cpu:1", True)]
    assert jobs
    for job in jobs:
        assert job.keys
        assert reservations[job.id][0].time == job.started
        for reservation in reservations[job.id]:
            assert reservation.memory is not None
            assert reservation.cores is not None
            assert 0 < reservation.memory <= devices[0].memory
            assert 0 < reservation.cores <= devices[0].cores


@pytest.mark.usefixtures("fusing_pays")
def test_a_reservation_shrinks_when_trials_leave(tmp_path: Path) -> None:
    rates = {"lr": shoal.loguniform(0.003, 0.3)}
    algorithm = shoal.SuccessiveHalving(8, max_epochs=8, eta=2)
    study = tune(tasks.Blobs(), rates, tmp_path / "study", algorithm=algorithm)
    with JournalView.read(study.directory) as journal:
        jobs = [job for job in journal.jobs() if job.purpose is Purpose.TRAIN]
        reservations = journal.reservations()
    most = {job.id: max(reservation.memory or 0 for reservation in reservations[job.id]) for job in jobs}
    by_size = sorted((len(job.trials), most[job.id]) for job in jobs)
    assert by_size[0][1] < by_size[-1][1]
