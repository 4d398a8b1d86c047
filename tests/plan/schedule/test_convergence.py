from dataclasses import replace
from math import inf

import pytest
from schedule_samples import LOW, cluster, decide, gpu, needs, refused, running, suspended, turn, waiting

from shoal.core.errors import PolicyError
from shoal.plan.schedule import Convergence, Resume, Start, Suspend
from shoal.plan.schedule.convergence import convergence

ONE = cluster(gpu(0))
TWO = cluster(gpu(0), gpu(1))

CONVERGENCE = {
    "first quantum: from the highest to the lowest": ([turn(2.0, 1.5, 1.6, 1.0)], 0.25),
    "first quantum of a loss that rises: as if it fell": ([turn(1.0, 2.0)], 0.5),
    "then: between the middles": ([turn(2.0, 1.0), turn(1.2, 0.6)], (1.5 - 0.9) / 2),
    "per loss of the newest quantum": ([turn(2.0, 1.0), turn(1.2, 1.0, 0.8, 0.6)], (1.5 - 0.9) / 4),
    "only the last two count": ([turn(9.0), turn(2.0, 1.0), turn(1.2, 0.6)], (1.5 - 0.9) / 2),
    "the middle of the fluctuation, not the mean": ([turn(3.0, 1.0, 1.0, 1.0), turn(1.0)], 1.0),
    "a loss that rises converges negatively": ([turn(1.0), turn(2.0)], -1.0),
    "a single loss": ([turn(1.0)], 0.0),
    "negative losses": ([turn(-1.0), turn(-2.0, -4.0)], 1.0),
    "a turn without a finite loss is left out": ([turn(4.0), turn(inf), turn(2.0)], 2.0),
    "a first turn without one, too": ([turn(inf), turn(4.0, 1.0)], 1.5),
}


@pytest.mark.parametrize("name", CONVERGENCE)
def test_convergence_of_given_losses(name):
    quanta, expected = CONVERGENCE[name]
    assert convergence(quanta) == pytest.approx(expected)


def test_convergence_per_second():
    quanta = [turn(2.0, 1.0, seconds=10.0), turn(1.2, 0.6, seconds=4.0)]
    assert convergence(quanta, per_second=True) == pytest.approx((1.5 - 0.9) / 4)


UNEQUAL = [
    running("few long steps", turn(4.0), turn(3.0), turn_since=10.0),
    suspended("many short steps", turn(4.0), turn(*[2.0] * 10)),
]


@pytest.mark.parametrize(("per_second", "expected"), [(False, {}), (True, {"few long steps": Suspend})])
def test_unequal_iteration_times(per_second, expected):
    """Per loss, 1.0 against 0.2; per second, 0.1 against 0.2."""
    actions, _ = decide(Convergence(per_second=per_second), UNEQUAL)
    assert {name: action for name, action in actions.items() if action is Suspend} == expected


def test_the_steepest_runs():
    jobs = [running("flat", turn(1.0), turn(0.9)), suspended("steep", turn(5.0), turn(4.0))]
    assert decide(Convergence(), jobs)[0] == {"flat": Suspend, "steep": Resume}


def test_a_bad_start_is_rewarded():
    """As published: who begins with a loss of 9 and never gets below 3 goes before who nears 0."""
    jobs = [running("good", turn(1.0), turn(0.2), turn_since=10.0), suspended("bad", turn(9.0), turn(4.0))]
    assert decide(Convergence(), jobs)[0] == {"good": Suspend, "bad": Resume}


PLACES = {
    "the device with the fewest jobs, in order": (
        [waiting("a"), waiting("b"), waiting("c")],
        {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0"},
    ),
    "those that are there count": (
        [running("a", LOW), suspended("b", LOW), waiting("c"), waiting("d")],
        {"b": "cuda:0", "c": "cuda:1", "d": "cuda:1"},
    ),
    "suspended jobs stay where their state lies": (
        [suspended("a", LOW, home="cuda:1"), suspended("b", LOW, home="cuda:1"), waiting("c")],
        {"a": "cuda:1", "b": "cuda:1", "c": "cuda:0"},
    ),
    "who lost its device finds another": ([suspended("a", LOW, home="cuda:9")], {"a": "cuda:0"}),
    "four a device at most": (
        [waiting(name) for name in "abcdefghij"],
        {name: f"cuda:{index % 2}" for index, name in enumerate("abcdefgh")},
    ),
    "a kind on which it does not run does not count": (
        [replace(waiting("a"), demand={"H100": needs()})],
        {},
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_global_placement(name):
    jobs, expected = PLACES[name]
    assert Convergence().homes(jobs, TWO) == expected


def test_a_job_in_the_queue_of_a_busy_device_takes_no_other_device():
    jobs = [running("a", turn(5.0), turn(1.0)), suspended("b", LOW, home="cuda:0")]
    plan = Convergence().plan(jobs, TWO, 10.0)
    assert plan.actions == ()
    assert refused(plan) == {"b": "waits for its turn on cuda:0"}


def test_a_job_without_a_queue_waits_for_one():
    jobs = [running("a", LOW), waiting("b"), waiting("c")]
    plan = Convergence(jobs_per_device=2).plan(jobs, ONE, 5.0)
    assert refused(plan) == {"b": "waits for its turn on cuda:0", "c": "waits for a device with fewer than 2 jobs"}


def test_a_turn_without_a_finite_loss_comes_last():
    jobs = [running("a", turn(2.0), turn(inf)), suspended("rises", turn(1.0), turn(9.0))]
    assert decide(Convergence(), jobs)[0] == {"a": Suspend, "rises": Resume}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((1.0, 0.9), 10.0),
        ((1.0, 0.7), 20.0),
        ((1.0, 0.5), 30.0),
        ((1.0, 0.1), 30.0),
        ((1.0, 1.5), 10.0),
        ((1.0, 0.5, 0.9), 30.0),
        ((-1.0, -1.3), 20.0),
        ((-1.0, -5.0), 30.0),
        ((-1.0, -0.5), 10.0),
        ((0.25, -0.25), 30.0),
        ((0.0, -1.0), 10.0),
        ((inf, 1.0, 0.5), 30.0),
    ],
)
def test_milestones_lengthen_the_turns(losses, expected):
    policy = Convergence(milestones=(0.25, 0.5), growth=0.0)
    assert policy.turn(waiting("a", *map(turn, losses))) == expected


def test_turns_grow_with_milestones_and_preemptions_unless_asked_otherwise():
    job = waiting("a", turn(1.0), turn(0.4), preemptions=3)
    assert Convergence().turn(waiting("a")) == 10.0
    assert Convergence().turn(job) == pytest.approx(10.0 + 2 * 10.0 + 3 * 1.0)
    assert Convergence(milestones=(), growth=0.5).turn(job) == pytest.approx(25.0)


def test_a_longer_turn_is_not_interrupted():
    policy = Convergence(milestones=(0.5,), growth=0.0)
    jobs = [running("a", turn(1.0), turn(0.4), since=0.0), suspended("b", turn(9.0), turn(1.0))]
    assert decide(policy, jobs, now=10.0) == ({}, 20.0)
    assert decide(policy, jobs, now=20.0)[0] == {"a": Suspend, "b": Resume}


def test_first_turns_for_all_of_a_queue():
    jobs = [running("a", turn(9.0, 1.0)), waiting("b"), suspended("c", turn(8.0, 1.0))]
    assert decide(Convergence(), jobs)[0] == {"a": Suspend, "b": Start}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"jobs_per_device": 0}, "`jobs_per_device` must be an integer of at least 1, got 0"),
        ({"jobs_per_device": 1.5}, "`jobs_per_device` must be an integer of at least 1, got 1.5"),
        ({"milestones": (0.5, 0.5)}, "`milestones` must rise and lie between 0 and 1"),
        ({"milestones": (1.0,)}, "`milestones` must rise and lie between 0 and 1"),
        ({"milestones": (0.0,)}, "`milestones` must rise and lie between 0 and 1"),
        ({"growth": -0.1}, "`growth` must be at least 0 and finite, got -0.1"),
        ({"growth": inf}, "`growth` must be at least 0 and finite, got inf"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(PolicyError, match=words):
        Convergence(**settings)
