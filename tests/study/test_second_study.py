"""A second study of the same models finds in the job history what the first one measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import pytest
import tasks
from plain import check_equal, check_plain, curves, jobs, tune

import shoal
from shoal.core.device import Cluster
from shoal.core.job import Purpose
from shoal.cost.history import History, environment
from shoal.schedule.base import JobView, Plan, Policy
from shoal.schedule.knapsack import Fifo
from shoal.schedule.oversubscription import OversubscriptionTuner

SPACE = {"lr": shoal.grid([0.01, 0.03, 0.1]), "width": shoal.choice([6, 8])}


def purposes(study: shoal.Study) -> set[Purpose]:
    return {job.purpose for job in jobs(study.directory)}


@pytest.mark.parametrize(("backend", "devices"), [("inline", "cpu:1"), ("local", "cpu:2")])
def test_a_second_study_of_the_same_models_starts_without_profiling(backend: str, devices: str, tmp_path: Path) -> None:
    first = tune(tasks.Blobs(), SPACE, tmp_path / "first", backend=backend, devices=devices)
    second = tune(tasks.Blobs(), SPACE, tmp_path / "second", backend=backend, devices=devices)

    assert Purpose.PROFILE in purposes(first)
    assert Purpose.PROFILE not in purposes(second)
    assert Purpose.TRAIN in purposes(second)
    check_plain(first, tasks.Blobs())
    check_equal(curves(second.directory), curves(first.directory))


def test_a_second_study_measures_only_the_models_that_are_new(tmp_path: Path) -> None:
    tune(tasks.Blobs(), SPACE, tmp_path / "first")
    wider = {"lr": shoal.grid([0.01, 0.03]), "width": shoal.choice([6, 8, 10])}
    second = tune(tasks.Blobs(), wider, tmp_path / "second")

    widths = {row.number: row.config["width"] for row in second.trials}
    measured = [job for job in jobs(second.directory) if job.purpose is Purpose.PROFILE]
    assert {widths[number] for job in measured for number in job.trials} == {10}
    check_plain(second, tasks.Blobs())


@final
class Look(Policy):
    """Keeps the oversubscription of the devices at each plan."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        self.seen.extend(device.oversubscription for _, device in cluster)
        return Fifo().plan(jobs, cluster, now)


def test_a_second_study_begins_with_the_oversubscription_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU slots are tuned here as GPUs are elsewhere; how far a ratio moves depends on measured times, and not here."""

    class Tuner(OversubscriptionTuner):
        def __init__(self, *, known: Mapping[str, float], **settings: object) -> None:
            super().__init__(known=known)

    monkeypatch.setattr("shoal.api.OversubscriptionTuner", Tuner)

    def ratios(name: str, width: int) -> list[float]:
        policy, space = Look(), {"lr": shoal.grid([0.01, 0.03]), "width": width}
        tune(tasks.Blobs(), space, tmp_path / name, policy=policy, fuse=False)
        return policy.seen

    assert ratios("first", 6)[0] == 1.0
    History(environment=environment()).put_ratio("cpu/1", 2.5)  # as a longer study would have found it
    assert 1.0 not in ratios("second", 6)
    assert ratios("third", 10)[0] == 2.5
    assert ratios("fourth", 12)[-1] == 1.0
