"""The number of threads of steps, on a clock that says how long a step takes with each number."""

from dataclasses import replace

import pytest
import torch
from planner_samples import LINEAR, A, B

from shoal.worker.thread_choice import MIN_STEPS, ThreadChoice


class Steps:
    """Takes steps on a clock of its own.

    Args:
        seconds: Threads -> seconds of a step for each element of the batch.
        profile: Profile of the structure.
    """

    def __init__(self, seconds, profile=LINEAR, own=1):
        self.seconds = seconds
        self.profile = profile
        self.now = 0.0
        self.current = own
        self.choice = ThreadChoice(own, clock=lambda: self.now)

    def take(self, count, *, key=A, members=1, left=1000, elements=1):
        """Take steps; return the threads of each."""
        taken = []
        for _ in range(count):
            with self.choice.chosen(key, self.profile, [torch.zeros(elements)] * members, left):
                taken.append(self.current)
                self.now += self.seconds[self.current] * elements
        return taken


@pytest.fixture
def steps(monkeypatch):
    """A maker of steps; threads are only counted."""
    made = []

    def make(*given, **settings):
        made.append(Steps(*given, **settings))
        return made[-1]

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: setattr(made[-1], "current", threads))
    return make


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        pytest.param({1: 0.010, 2: 0.006}, 2, id="a second thread gains"),
        pytest.param({1: 0.010, 2: 0.020}, 1, id="it loses"),
        pytest.param({1: 0.010, 2: 0.0098}, 1, id="it gains too little"),
        pytest.param({1: 1.0, 2: 0.6}, 2, id="long steps"),
    ],
)
def test_the_faster_number_of_threads_is_kept(steps, seconds, fastest):
    run = steps(seconds)
    assert set(run.take(5)) == {1}, "nothing is lent yet"
    run.choice.allow(2)
    raced = run.take(MIN_STEPS // 2)
    assert set(raced) == {1, 2}
    assert set(run.take(20)) == {fastest}
    assert run.choice.gains(A) == {2: {1: pytest.approx(seconds[1] / seconds[2])}}
    run.choice.allow(1)
    assert set(run.take(5)) == {1}, "they were taken back"
    run.choice.allow(2)
    assert set(run.take(5)) == {fastest}, "it is known now"


def test_batches_of_different_lengths_are_compared_by_their_elements(steps):
    run = steps({1: 0.001, 2: 0.0007})
    run.choice.allow(2)
    for elements in (2, 9, 4, 7, 3) * 10:
        run.take(1, elements=elements)
    assert run.choice.gains(A) == {2: {1: pytest.approx(1 / 0.7)}}


@pytest.mark.parametrize(("gain", "threads"), [(1.6, 2), (1.01, 1), (0.5, 1)])
def test_a_gain_in_the_profile_is_not_measured_again(steps, gain, threads):
    run = steps({1: 0.01, 2: 0.01}, profile=replace(LINEAR, thread_gain={2: {4: gain}}))
    run.choice.allow(2)
    assert set(run.take(20, members=3, left=5)) == {threads}, "however few steps are left"
    assert run.choice.gains(A) == {}
    assert set(run.take(20, members=16)) == {1, 2}, "four times the members are another size"


def test_too_few_steps_for_a_race_are_not_raced(steps):
    run = steps({1: 0.01, 2: 0.005})
    run.choice.allow(2)
    assert set(run.take(20, left=MIN_STEPS - 1)) == {1}
    assert set(run.take(20, left=MIN_STEPS)) == {1, 2}


def test_structures_are_raced_apart(steps):
    run = steps({1: 0.01, 2: 0.005})
    run.choice.allow(2)
    run.take(30)
    assert run.choice.gains(B) == {}
    assert set(run.take(30, key=B)) == {1, 2}
    run.choice.use_own()
    assert run.current == 1
