from dataclasses import replace
from math import inf, nan

import pytest
from baselines import RoundRobin, Slaq
from schedule_samples import HIGH, LOW, cluster, decide, gpu, needs, refused, running, suspended, turn, waiting

from shoal.core.device import Cluster, Node
from shoal.core.errors import PolicyError
from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule import Convergence, ExpectedFinish, Fifo, Resume, Start, Suspend

ONE = cluster(gpu(0))
TWO = cluster(gpu(0), gpu(1))
ALL = {
    "convergence": Convergence(),
    "expected_finish": ExpectedFinish(),
    "round_robin": RoundRobin(10.0),
    "slaq": Slaq(10.0),
}


TURNS = {
    "who never ran goes first, oldest first": (
        [running("a", HIGH), waiting("b"), waiting("c")],
        {"a": Suspend, "b": Start},
    ),
    "a first turn is not interrupted": ([running("a"), waiting("b")], {}),
    "a turn is not interrupted before its end": ([running("a", LOW, since=1.0), suspended("b", HIGH)], {}),
    "of equals the running one stays": ([suspended("a", LOW), running("b", LOW)], {}),
    "of equals that wait the oldest is next": (
        [running("a", LOW), suspended("b", HIGH), suspended("c", HIGH)],
        {"a": Suspend, "b": Resume},
    ),
    "the highest has the device": (
        [running("a", LOW), suspended("b", LOW), suspended("c", HIGH)],
        {"a": Suspend, "c": Resume},
    ),
    "when one has ended the highest follows": ([suspended("a", LOW), suspended("b", HIGH)], {"b": Resume}),
    "who cannot be suspended stays": ([running("a", LOW, preemptible=False), suspended("b", HIGH)], {}),
    "who holds a share stays": (
        [running("a", LOW, share=0.5, scaling=Scaling(1.2, max_jobs=2)), suspended("b", HIGH)],
        {},
    ),
    "a loss that is not a number comes last": (
        [running("a", turn(nan)), suspended("b", LOW)],
        {"a": Suspend, "b": Resume},
    ),
    "a loss that is not finite comes last, too": (
        [running("a", turn(inf)), suspended("b", LOW)],
        {"a": Suspend, "b": Resume},
    ),
    "who competes at the end of a turn does not at other times": (
        [running("a", LOW, since=-100.0, turn_since=5.0), suspended("b", HIGH)],
        {},
    ),
    "at the end of a later turn": (
        [running("a", LOW, since=-100.0, turn_since=0.0), suspended("b", HIGH)],
        {"a": Suspend, "b": Resume},
    ),
    "at a turn that has ended just now": (
        [running("a", LOW, turn_since=10.0), suspended("b", HIGH)],
        {"a": Suspend, "b": Resume},
    ),
    "who does not fit does not take the device": ([running("a", LOW), suspended("b", HIGH, demand={})], {}),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns(name):
    jobs, expected = TURNS[name]
    actions, _ = decide(Slaq(10.0), jobs)
    assert actions == expected


CONSTANT, FALLING, NO_LOSS = (turn(2.0), turn(2.0)), (turn(2.0), turn(1.0)), turn(inf)
BAD_LOSSES = {
    "of two that stand still the running one stays": (CONSTANT, CONSTANT, set()),
    "one that falls goes before one that stands still": (CONSTANT, FALLING, {"convergence", "expected_finish"}),
    "one that stands still stays behind one that falls": (FALLING, CONSTANT, {"slaq"}),
    "one whose last turn had no loss comes last": (
        (turn(2.0), NO_LOSS),
        CONSTANT,
        {"convergence", "expected_finish", "slaq"},
    ),
    "a loss that was missing before counts for nothing": (
        (turn(2.0), turn(2.0)),
        (turn(2.0), NO_LOSS, turn(1.0)),
        {"convergence", "expected_finish"},
    ),
    "nor at the beginning": (CONSTANT, (NO_LOSS, turn(2.0), turn(1.0)), {"convergence", "expected_finish"}),
    "of two that never had a loss the running one stays": ((NO_LOSS, NO_LOSS), (NO_LOSS, NO_LOSS), set()),
}
"""Turns of the running job and of the suspended one, and the policies under which the other one has the device next."""


@pytest.mark.parametrize("name", ["convergence", "expected_finish", "slaq"])
@pytest.mark.parametrize("case", BAD_LOSSES)
def test_losses_that_are_constant_or_missing(case, name):
    one, other, changes = BAD_LOSSES[case]
    actions, _ = decide(ALL[name], [running("a", *one), suspended("b", *other)], now=1000.0)
    assert actions == ({"a": Suspend, "b": Resume} if name in changes else {})


def test_no_wake_time_if_no_job_waits():
    assert decide(Slaq(10.0), [running("a", LOW), running("b", LOW, on="cuda:1")], TWO) == ({}, None)


WAKES = {
    "at the end of the first turn": ([running("a", since=3.0), waiting("b")], 10.0, 13.0),
    "at the end of the next whole turn": ([running("a", HIGH, since=3.0), suspended("b", LOW)], 24.0, 33.0),
    "a turn after a new one begins": ([waiting("a"), waiting("b")], 10.0, 20.0),
    "at the first of two ends": (
        [running("a", since=3.0), running("b", since=1.0, on="cuda:1"), waiting("c")],
        10.0,
        11.0,
    ),
    "never, when nobody can be suspended": ([running("a", LOW, preemptible=False), waiting("b")], 10.0, None),
}


@pytest.mark.parametrize("name", WAKES)
def test_wakes(name):
    jobs, now, expected = WAKES[name]
    _, wake = decide(Slaq(10.0), jobs, TWO if len(jobs) > 2 else ONE, now)
    assert wake == expected


def test_on_two_devices_the_lowest_yields():
    jobs = [running("a", turn(3.0)), running("b", LOW, on="cuda:1"), suspended("c", HIGH), suspended("d", LOW)]
    plan = Slaq(10.0).plan(jobs, TWO, 10.0)
    assert plan.actions == (Suspend("b"), Resume("c", ("cuda:1",)))


def test_an_idle_device_is_taken_before_anybody_yields():
    jobs = [running("a", LOW), suspended("b", HIGH)]
    assert Slaq(10.0).plan(jobs, TWO, 10.0).actions == (Resume("b", ("cuda:1",)),)


def test_the_fastest_idle_device_is_taken():
    where = cluster(gpu(0), gpu(1, kind="H100"))
    fast = replace(waiting("a"), demand={"A100": needs(seconds=10), "H100": needs(seconds=5)})
    assert RoundRobin().plan([fast], where, 0.0).actions == (Start("a", ("cuda:1",)),)


def test_jobs_beside_others_are_left_where_they_are():
    beside = [running(name, LOW, demand={"A100": needs(compute=0.3)}) for name in "ab"]
    assert decide(Slaq(10.0), [*beside, suspended("c", HIGH)]) == ({}, None)


def test_cores_of_a_suspended_job_are_free_for_the_next():
    where = Cluster((Node("n0", 4, (gpu(0), gpu(1))),))
    jobs = [
        running("a", LOW, demand={"A100": needs(cores=3)}),
        running("b", HIGH, on="cuda:1", demand={"A100": needs(cores=1)}),
        suspended("c", turn(3.0), demand={"A100": needs(cores=3)}),
    ]
    assert decide(Slaq(10.0), jobs, where)[0] == {"a": Suspend, "c": Resume}


def test_round_robin_takes_who_has_waited_longest():
    jobs = [running("a", LOW), suspended("b", LOW, since=5.0), suspended("c", LOW, since=2.0), waiting("d", since=8.0)]
    assert decide(RoundRobin(10.0), jobs)[0] == {"a": Suspend, "c": Resume}


def test_round_robin_needs_no_losses():
    assert decide(RoundRobin(10.0), [running("a"), waiting("b")])[0] == {"a": Suspend, "b": Start}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("quantum", [0.0, -1.0, float("inf"), nan])
def test_a_quantum_is_a_time(name, quantum):
    with pytest.raises(PolicyError, match="`quantum` must be above 0 s and finite"):
        replace(ALL[name], quantum=quantum)


@pytest.mark.parametrize("name", ALL)
def test_of_jobs_that_stay_where_they_are_the_oldest_is_next(name):
    """Live, nobody can be suspended yet: first in, first out."""
    jobs = [running("a", LOW, preemptible=False), waiting("b"), waiting("c")]
    for where in (ONE, TWO):
        plan, expected = ALL[name].plan(jobs, where, 10.0), Fifo().plan(jobs, where, 10.0)
        assert plan.actions == expected.actions
        assert set(refused(plan)) == set(refused(expected))
