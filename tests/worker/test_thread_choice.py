"""The number of threads of steps, on a clock that says how long a step takes with each number."""

from dataclasses import replace

import pytest
import torch
from planner_samples import LINEAR, A, B

from shoal.worker.thread_choice import MIN_STEPS, SLOW_STEPS, ThreadChoice


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
        self.delayed = 0.0
        self.choice = ThreadChoice(own, clock=lambda: self.now, delay=lambda: self.delayed)

    def take(self, count, *, key=A, members=1, left=1000, elements=1, delay=0.0):
        """Take steps, with a share of their time in which others have the core; return the threads of each."""
        taken = []
        for _ in range(count):
            with self.choice.chosen(key, self.profile, [torch.zeros(elements)] * members, left):
                taken.append(self.current)
                self.now += self.seconds[self.current] * elements
                self.delayed += delay * self.seconds[self.current] * elements
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


@pytest.mark.parametrize(
    ("gain", "members", "raced"),
    [
        pytest.param(0.5, 3, False, id="it loses"),
        pytest.param(1.01, 3, False, id="it gains too little"),
        pytest.param(1.6, 3, True, id="it gains, if the core is free now"),
        pytest.param(0.5, 16, True, id="four times the members are another size"),
    ],
)
def test_what_the_profile_says_to_be_slower_is_not_timed(steps, gain, members, raced):
    run = steps({1: 0.01, 2: 0.01}, profile=replace(LINEAR, thread_gain={2: {4: gain}}))
    run.choice.allow(2)
    assert set(run.take(20, members=members)) == ({1, 2} if raced else {1})


def test_a_thread_whose_core_another_program_takes_is_given_up(steps):
    run = steps({1: 0.01, 2: 0.006})
    run.choice.allow(2)
    run.take(MIN_STEPS // 2)
    run.seconds = {1: 0.015, 2: 0.1}
    assert run.take(SLOW_STEPS) == [2] * SLOW_STEPS
    run.take(MIN_STEPS // 2)
    assert set(run.take(20)) == {1}


@pytest.mark.parametrize(("delay", "kept"), [(0.0, {2: {1: 2.0}}), (0.5, {})])
def test_a_gain_that_was_measured_beside_other_programs_is_not_kept(steps, delay, kept):
    run = steps({1: 0.5, 2: 0.25})
    run.choice.allow(2)
    run.take(MIN_STEPS // 2, delay=delay)
    assert run.choice.gains(A) == kept


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


def test_new_steps_of_a_key_are_timed_anew(steps):
    run = steps({1: 0.01, 2: 0.005})
    run.choice.allow(2)
    run.take(30)
    run.take(30, key=B)
    run.choice.start_anew(A)
    assert run.current == 1
    run.seconds = {1: 0.01, 2: 0.02}
    assert set(run.take(5, key=B)) == {2}
    assert set(run.take(30)) == {1, 2}
    assert set(run.take(5)) == {1}
