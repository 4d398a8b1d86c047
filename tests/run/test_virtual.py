"""The virtual back end says of jobs what a worker would, when it would, and without waiting."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand, Profile
from shoal.core.device import Device
from shoal.core.errors import BackendError, CheckpointError
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import Origin, Report, Trial, TrialState
from shoal.run.base import (
    ArrayFailed,
    Backend,
    Ended,
    Event,
    MembersLeft,
    Outcome,
    Reported,
    SignaturesFound,
    WorkerContext,
)
from shoal.run.virtual import Virtual, Workload

GPU = Device("gpu:0", "gpu", 2**30)
KEY, OTHER = FusionKey("net", "data", 32), FusionKey("other net", "data", 32)
PROFILE = Profile({1: 0.1}, 10, 0, base_memory=0, member_memory=1, compute=0.5, cores=1.0)
"""An epoch of a trial takes a second."""


@dataclass(frozen=True)
class Plain(Workload):
    """Trials of two structures by turns; one may raise in its second epoch.

    Args:
        raising: number of that one.
    """

    raising: int = -1

    def key(self, trial: Trial) -> FusionKey:
        return OTHER if trial.number % 2 else KEY

    def profile(self, key: FusionKey, kind: str) -> Profile:
        return PROFILE

    def report(self, trial: Trial, epoch: int) -> Report:
        return Report(trial.number, epoch, {"loss": 1.0 / epoch})

    def error(self, trial: Trial, epoch: int) -> str:
        return "ValueError: no" if (trial.number, epoch) == (self.raising, 2) else ""


def virtual(raising: int = -1, checkpoints: dict[int, int] | None = None, seconds: float = 100.0) -> Virtual:
    return Virtual(WorkerContext(Path(), b"", checkpoint_seconds=seconds), Plain(raising), checkpoints)


def job(*numbers: int, name: str = "job", target: int = 3, start: int = 0, demand: Demand | None = None) -> Job:
    members = [Member(Trial(number, {}, 0, 0), start, target) for number in numbers]
    arrays = [Array(key, tuple(m for m in members if Plain().key(m.trial) == key)) for key in (KEY, OTHER)]
    return Job(name, tuple(array for array in arrays if array.members), demand=demand)


def told(backend: Virtual) -> list[Event]:
    """All that is said until nothing more is."""
    said: list[Event] = []
    while more := backend.poll(1e6):
        said += more
    return said


def epochs(said: list[Event]) -> list[tuple[int, int, TrialState]]:
    return [(x.trial, x.epoch, x.state) for event in said if isinstance(event, Reported) for x in event.reports]


def test_a_job_trains_its_members_to_their_targets_in_the_seconds_that_these_take() -> None:
    backend = virtual()
    backend.start(job(0), GPU)
    said = told(backend)
    running, paused = TrialState.RUNNING, TrialState.PAUSED
    assert epochs(said) == [(0, 1, running), (0, 2, running), (0, 3, paused)]
    assert said[-1] == Ended("job", Outcome.FINISHED)
    assert [event for event in said if isinstance(event, Ended)] == said[-1:]


def test_the_clock_goes_on_by_the_timeout_at_most() -> None:
    backend = virtual()
    backend.start(job(0), GPU)
    assert backend.poll(0.01) == []
    assert backend.clock() == pytest.approx(0.01)
    assert backend.poll(100.0), "what is said next"
    assert backend.clock() < 1.0


def test_jobs_that_ask_for_more_than_a_device_has_slow_each_other_down() -> None:
    seconds = []
    for company in (0, 1):
        backend = virtual()
        backend.start(job(0, demand=Demand(1.0, 0, 0.0, 3.0)), GPU)
        for number in range(company):
            backend.start(job(2, name=f"other-{number}", demand=Demand(1.0, 0, 0.0, 3.0)), GPU)
        while backend.jobs:
            backend.poll(1e6)
        seconds.append(backend.clock())
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.1)


def test_a_job_that_is_stopped_goes_on_where_it_was() -> None:
    checkpoints: dict[int, int] = {}
    backend = virtual(checkpoints=checkpoints)
    backend.start(job(0), GPU)
    while not epochs(backend.poll(1.0)):
        pass
    backend.stop("job")
    assert told(backend) == [Ended("job", Outcome.STOPPED)]
    assert checkpoints == {0: 1}
    backend.start(job(0, name="later", start=1), GPU)
    assert [epoch for _, epoch, _ in epochs(told(backend))] == [2, 3]


@pytest.mark.parametrize(
    ("checkpoint", "start", "expected"),
    [(0, 2, [1, 2, 3]), (2, 0, [1, 2, 3]), (3, 1, [2, 3])],
    ids=["an older one: epochs are trained again", "a newer one: they are told again", "of its target"],
)
def test_a_trial_goes_on_from_its_checkpoint(checkpoint: int, start: int, expected: list[int]) -> None:
    backend = virtual(checkpoints={0: checkpoint})
    backend.start(job(0, start=start), GPU)
    said = told(backend)
    assert [epoch for _, epoch, _ in epochs(said)] == expected
    seconds = [report.seconds for event in said if isinstance(event, Reported) for report in event.reports]
    assert seconds == [pytest.approx(seconds[-1])] * len(expected)
    assert seconds[0] > 0


def test_a_job_that_is_killed_has_saved_nothing_and_ends_once() -> None:
    checkpoints: dict[int, int] = {}
    backend = virtual(checkpoints=checkpoints)
    backend.start(job(0), GPU)
    backend.poll(1.5)
    backend.kill("job")
    backend.kill("job")
    assert [event.job for event in told(backend) if isinstance(event, Ended)] == ["job"]
    assert not checkpoints


def test_a_job_that_hangs_says_nothing_until_it_is_killed() -> None:
    backend = virtual()
    backend.start(job(0), GPU)
    backend.hang("job")
    backend.stop("job")
    assert told(backend) == []
    backend.kill("job")
    assert [type(event) for event in told(backend)] == [Ended]


def test_members_leave_at_once_and_join_at_the_end_of_an_epoch() -> None:
    backend = virtual()
    backend.start(job(0, 2), GPU)
    backend.poll(0.2)
    backend.change("job", JobUpdate(leave=frozenset({0}), join=job(4).arrays, find_signatures=(Trial(7, {}, 0, 0),)))
    said = told(backend)
    assert SignaturesFound("job", {7: OTHER}) in said
    assert MembersLeft("job", frozenset({0})) in said
    assert {trial for trial, _, _ in epochs(said)} == {2, 4}
    assert said[-1] == Ended("job", Outcome.FINISHED)


@pytest.mark.parametrize("numbers", [(0,), (0, 1)], ids=["the only array", "one of two"])
def test_an_error_takes_its_array_along_and_no_other(numbers: tuple[int, ...]) -> None:
    backend = virtual(raising=0)
    backend.start(job(*numbers), GPU)
    said = told(backend)
    assert [event for event in said if isinstance(event, ArrayFailed)] == (
        [ArrayFailed("job", frozenset({0}), Outcome.RAISED, "ValueError: no")] if len(numbers) > 1 else []
    )
    assert {(trial, epoch) for trial, epoch, _ in epochs(said) if trial == 0} == {(0, 1)}
    assert isinstance(said[-1], Ended)
    assert said[-1].outcome is (Outcome.FINISHED if len(numbers) > 1 else Outcome.RAISED)


def test_signature_and_profile_jobs_find_what_the_workload_says() -> None:
    backend = virtual()
    for purpose in (Purpose.SIGNATURE, Purpose.PROFILE):
        backend.start(Job(str(purpose), job(0, 1).arrays, purpose), GPU)
    said = told(backend)
    assert SignaturesFound("signature", {0: KEY, 1: OTHER}) in said
    assert {event.key for event in said if event.job == "profile" and not isinstance(event, Ended)} == {KEY, OTHER}


def test_a_copy_begins_with_the_checkpoint_of_its_origin_or_not_at_all() -> None:
    checkpoints = {0: 2}
    backend: Backend = virtual(checkpoints=checkpoints)
    backend.copy_checkpoint(Path(), Trial(1, {}, 0, 0, Origin(0, 2)))
    assert checkpoints == {0: 2, 1: 2}
    with pytest.raises(CheckpointError, match="trial 2 was to continue from trial 0 at epoch 1"):
        backend.copy_checkpoint(Path(), Trial(2, {}, 0, 0, Origin(0, 1)))


def test_no_job_is_started_twice() -> None:
    backend = virtual()
    backend.start(job(0), GPU)
    told(backend)
    with pytest.raises(BackendError, match="started before"):
        backend.start(job(0), GPU)
