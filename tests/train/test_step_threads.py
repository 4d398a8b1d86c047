"""Steps use the threads of idle slots where these make them faster."""

from pathlib import Path
from typing import Any

import pytest
from contract_samples import Planned, Small, trial, work

from shoal.core.array import Member
from shoal.core.job import JobUpdate
from shoal.host.machine import ThisMachine
from shoal.train import step_threads
from shoal.train.step_threads import JobThreads, StepThreads


class Torch:
    """The threads of torch."""

    def __init__(self) -> None:
        self.used = 1

    def get_num_threads(self) -> int:
        return self.used

    def set_num_threads(self, count: int) -> None:
        self.used = count


class Steps:
    """Steps whose seconds depend on the threads, and the clock that shows them."""

    def __init__(self, seconds: dict[int, float], own: int = 1) -> None:
        self.seconds, self.now, self.torch = seconds, 0.0, step_threads.torch
        self.torch.set_num_threads(own)
        self.job = JobThreads()
        self.job.begin()
        self.threads = StepThreads(self.job, lambda: self.now)

    def step(self) -> int:
        used = self.torch.get_num_threads()
        self.now += self.seconds[used]
        return used

    def take(self, count: int = 80, settled: bool = True) -> list[int]:
        """The threads of each of so many steps."""
        found = []
        for _ in range(count):
            found.append(self.threads.take(self.step, 8, settled))
            assert self.torch.get_num_threads() == self.job.own, "of all that is no step"
        return found


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_threads, "torch", Torch())


CASES = {
    "twice as fast": ({1: 0.1, 2: 0.05}, 2),
    "short steps": ({1: 2e-4, 2: 1.5e-4}, 2),
    "no faster": ({1: 0.1, 2: 0.1}, 1),
    "faster by less than what is noise": ({1: 0.1, 2: 0.099}, 1),
    "slower": ({1: 1e-4, 2: 3e-4}, 1),
    "some are faster, all are not": ({1: 0.1, 2: 0.06, 4: 0.05, 7: 0.2}, 4),
}


@pytest.mark.parametrize(("seconds", "fastest"), CASES.values(), ids=CASES)
def test_the_fastest_threads_are_kept(seconds: dict[int, float], fastest: int) -> None:
    steps = Steps(seconds)
    assert set(steps.take()) == {1}
    steps.job.most = max(seconds)
    assert set(steps.take(200)) == set(seconds), "all are timed"
    assert set(steps.take()) == {fastest}


def test_threads_are_doubled_from_those_of_the_slot() -> None:
    steps = Steps(dict.fromkeys(range(1, 30), 0.1), own=3)
    steps.job.most = 24
    assert set(steps.take(200)) == {3, 6, 12, 24}


def test_cores_that_are_taken_back_are_not_used() -> None:
    steps = Steps({1: 0.3, 2: 0.2, 3: 0.1})
    steps.job.most = 3
    assert 3 in steps.take(6)
    steps.job.most = 1
    assert set(steps.take()) == {1}, "although nothing was decided"
    steps.job.most = 2
    steps.take()
    assert set(steps.take()) == {2}


def test_steps_of_which_the_kind_is_chosen_have_the_threads_of_the_slot() -> None:
    steps = Steps({1: 0.2, 2: 0.1})
    steps.job.most = 2
    assert set(steps.take(settled=False)) == {1}
    steps.take()
    assert set(steps.take()) == {2}
    assert set(steps.take(settled=False)) == {1}


def test_a_small_last_batch_does_not_decide() -> None:
    steps = Steps({1: 0.1, 2: 0.05})
    steps.job.most = 2
    for _ in range(20):
        for samples in (64, 64, 2):
            steps.seconds = {1: 0.1, 2: 0.05} if samples == 64 else {1: 0.01, 2: 0.01}
            steps.threads.take(steps.step, samples, True)
    steps.seconds = {1: 0.1, 2: 0.05}
    assert set(steps.take()) == {2}


def test_a_step_that_raises_leaves_the_threads_of_the_slot() -> None:
    steps = Steps({1: 0.1, 2: 0.05})
    steps.job.most = 2

    def fails() -> None:
        raise ValueError("a step")

    steps.take(3)
    for _ in range(3):
        with pytest.raises(ValueError, match="a step"):
            steps.threads.take(fails, 8, True)
        assert steps.torch.get_num_threads() == 1
    steps.take()
    assert set(steps.take()) == {2}


def test_a_job_gets_the_cores_of_idle_slots_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    own = StepThreads.take
    monkeypatch.setattr(ThisMachine, "cores", lambda machine: 8)

    def take(threads: StepThreads, *arguments: Any) -> Any:
        seen.append(threads._threads.most)
        return own(threads, *arguments)

    monkeypatch.setattr(StepThreads, "take", take)
    plan = {1: JobUpdate(cores=16), 2: JobUpdate(memory_limit=0), 3: JobUpdate(cores=2)}
    for name, allowed in (("free", None), ("limited", "4")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if allowed is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", allowed)
        work(Small(), tmp_path / name, [Member(trial(0), 0, 4)], Planned(plan))
    assert [*dict.fromkeys(seen)] == [1, 8, 2, 4]
