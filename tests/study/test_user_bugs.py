"""An algorithm or a policy of a user's with a bug: the study ends with what it raises, and has lost nothing."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tasks
from plain import curves, tune
from test_engine import Scripted, Stage, nothing, side_by_side, well

import shoal
from shoal.algorithms.base import Algorithm
from shoal.algorithms.hyperband import Hyperband
from shoal.core.device import Cluster
from shoal.core.job import Job
from shoal.core.trial import Decision, Report, TrialGroup
from shoal.plan.schedule.base import JobView, Plan, Policy
from shoal.plan.schedule.knapsack import Fifo
from shoal.run.base import Event, Reported


@dataclass
class Heard(Scripted):
    """Keeps what it has told the engine of trials."""

    said: list[tuple[int, int]] = field(default_factory=list)

    def poll(self, timeout: float) -> list[Event]:
        events = super().poll(timeout)
        self.said += [(x.trial, x.epoch) for each in events if isinstance(each, Reported) for x in each.reports]
        return events


class Broken(Hyperband):
    """Divides by zero at its third report, or when it is asked after that."""

    where = ""
    seen = 0

    def observe(self, report: Report) -> list[Decision]:
        self.seen += 1
        if self.where == "observe":
            1 // (3 - self.seen)
        return super().observe(report)

    def next_groups(self, free: int) -> Sequence[TrialGroup]:
        if self.where == "next_groups":
            1 // max(3 - self.seen, 0)
        return super().next_groups(free)


@dataclass(frozen=True)
class BrokenPlan(Policy):
    """Divides by zero when it plans after the third report."""

    said: Sequence[tuple[int, int]]

    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        1 // max(3 - len(self.said), 0)
        return Fifo().plan(jobs, cluster, now)


def broken(where: str) -> Callable[[], Algorithm]:
    def make() -> Algorithm:
        algorithm = Broken(9, brackets=1)
        algorithm.where = where
        return algorithm

    return make


def recorded(stage: Stage) -> list[tuple[int, int]]:
    """Each epoch of each trial that was reported, as often as it was, sorted."""
    with closing(stage.open()) as journal:
        numbers = [row.number for row in journal.trials()]
        return sorted((number, report.epoch) for number in numbers for report in journal.curve(number))


@pytest.mark.pairwise
@pytest.mark.parametrize("at_once", [False, True], ids=["event by event", "all at once"])
@pytest.mark.parametrize("script", [well, side_by_side], ids=["one by one", "side by side"])
@pytest.mark.parametrize("where", ["observe", "next_groups", "plan"])
def test_what_was_reported_before_a_bug_is_recorded_and_goes_on(
    where: str, script: Callable[[Job], Sequence[Event]], at_once: bool, tmp_path: Path
) -> None:
    undisturbed = Stage(tmp_path / "undisturbed")
    undisturbed.run(Heard(script, at_once, nothing))
    stage, carrier = Stage(tmp_path / "study", broken(where)), Heard(script, at_once, nothing)
    with pytest.raises(ZeroDivisionError):
        stage.run(carrier, BrokenPlan(carrier.said) if where == "plan" else None)
    assert recorded(stage) == sorted(carrier.said)
    assert len(carrier.said) >= 3
    with closing(stage.open()) as journal:
        assert not journal.jobs(running=True), "all jobs were let save their trials and end"
    stage.make, mended = undisturbed.make, Heard(script, at_once, nothing)
    stage.run(mended)
    assert stage.outcome() == undisturbed.outcome()
    assert recorded(stage) == recorded(undisturbed), "nothing was reported twice"
    assert not set(carrier.said) & set(mended.said), "nothing was trained twice"


class Unsound(shoal.Grid):
    """Divides by zero at its third report, while it is not mended."""

    seen, sound = 0, False

    def observe(self, report: Report) -> list[Decision]:
        self.seen += 1
        if not self.sound:
            1 // (3 - self.seen)
        return super().observe(report)


def test_a_resume_with_a_mended_algorithm_ends_as_if_it_had_never_been_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = {"lr": shoal.grid([0.01, 0.1])}
    undisturbed = tune(tasks.Blobs(), space, tmp_path / "undisturbed", algorithm=shoal.Grid(4))
    with pytest.raises(ZeroDivisionError) as raised:
        tune(tasks.Blobs(), space, tmp_path / "study", algorithm=Unsound(4))
    assert f"resume with: shoal resume {tmp_path / 'study'}" in "".join(raised.value.__notes__)
    assert len([report for curve in curves(tmp_path / "study").values() for report in curve]) >= 3
    monkeypatch.setattr(Unsound, "sound", True)
    study = shoal.resume(tmp_path / "study", show_progress=False)
    mended, whole = curves(study.directory), curves(undisturbed.directory)
    assert {number: list(curve) for number, curve in mended.items()} == {number: list(x) for number, x in whole.items()}
    for number, curve in whole.items():
        assert [mended[number][epoch] for epoch in curve] == [pytest.approx(each, rel=1e-9) for each in curve.values()]
