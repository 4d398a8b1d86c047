"""Steps use the threads of idle slots where these make them faster."""

from pathlib import Path

import pytest
from contract_samples import Planned, Small, trial, work

from shoal.core.array import Member
from shoal.core.job import JobUpdate
from shoal.train import step_threads
from shoal.train.step_threads import StepThreads


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

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now, self.torch = seconds, 0.0, step_threads.torch
        self.threads = StepThreads(lambda: self.now)
        self.threads.begin()

    def __call__(self) -> int:
        self.now += self.seconds[self.used]
        return self.used

    @property
    def used(self) -> int:
        return self.torch.get_num_threads()

    def take(self, count: int = 60) -> list[int]:
        """The threads of each of so many steps."""
        return [self.threads.take(self) for _ in range(count)]


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_threads, "torch", Torch())


CASES = {
    "twice as fast": ({1: 0.1, 2: 0.05}, 2),
    "short steps": ({1: 2e-4, 2: 1.5e-4}, 2),
    "no faster": ({1: 0.1, 2: 0.1}, 1),
    "faster by less than what is noise": ({1: 0.1, 2: 0.099}, 1),
    "slower": ({1: 1e-4, 2: 3e-4}, 1),
}


@pytest.mark.parametrize(("seconds", "fastest"), CASES.values(), ids=CASES)
def test_the_faster_threads_are_kept(seconds: dict[int, float], fastest: int) -> None:
    steps = Steps(seconds)
    assert set(steps.take()) == {1}
    steps.threads.allow(2)
    assert set(steps.take()) == {1, 2}, "both are timed"
    assert set(steps.take()) == {fastest}
    assert steps.used == fastest, "for validation as well"


def test_cores_that_are_taken_back_are_not_used() -> None:
    steps = Steps({1: 0.3, 2: 0.2, 3: 0.1})
    steps.threads.allow(3)
    assert 3 in steps.take(4)
    steps.threads.allow(1)
    assert set(steps.take()) == {1}, "although nothing was decided"
    steps.threads.allow(2)
    steps.take()
    assert set(steps.take()) == {2}
    steps.threads.allow(1)
    assert steps.used == 1


def test_a_step_that_raises_is_not_timed() -> None:
    steps = Steps({1: 0.1, 2: 0.05})
    steps.threads.allow(2)

    def fails() -> None:
        raise ValueError("a step")

    for _ in range(3):
        with pytest.raises(ValueError, match="a step"):
            steps.threads.take(fails)
    steps.take()
    assert set(steps.take()) == {2}


def test_a_job_gets_the_cores_of_idle_slots_within_the_limits_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[int] = []
    monkeypatch.setattr(StepThreads, "allow", lambda threads, count: allowed.append(count))
    plan = {1: JobUpdate(cores=8), 2: JobUpdate(memory_limit=0), 3: JobUpdate(cores=2)}
    monkeypatch.delenv("OMP_NUM_THREADS")
    work(Small(), tmp_path / "free", [Member(trial(0), 0, 2)], Planned(plan))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    work(Small(), tmp_path / "limited", [Member(trial(0), 0, 2)], Planned(plan))
    assert allowed == [8, 2, 4, 2]
