from dataclasses import replace

import pytest
from planner_samples import (
    CONSTANT,
    FUSES,
    GB,
    A,
    B,
    C,
    KnownCosts,
    Turns,
    cluster,
    known,
    member,
    numbers,
    profile,
    slots,
    waiting,
)

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.errors import PolicyError
from shoal.core.job import Job, Purpose
from shoal.plan.schedule import WFD, Fifo, JobState, JobView, Plan, Policy, Refusal, Start, Suspend

BUSY = "waits for a free device: cpu/1:0 is busy"
MEASURING = "its model is being measured"


def planner(costs, policy=None):
    return Turns(policy or WFD(), costs)


def summary(placement):
    return [
        (
            job.id,
            str(job.purpose),
            job.arrays[0].key.structure,
            [held.trial.number for held in job.members],
            device.name,
        )
        for job, device in placement.starts
    ]


def test_arrays_with_profiles_start():
    placement = planner(known(A=FUSES)).plan(waiting((A, 4)), [], cluster(*slots(2)), 0.0)
    assert summary(placement) == [
        ("job-00001", "train", "A", [0, 1], "cpu/1:0"),
        ("job-00002", "train", "A", [2, 3], "cpu/1:1"),
    ]
    assert placement.refusals == {}


def test_a_refused_array_has_the_reason_of_the_policy_and_no_job():
    turns = planner(known(A=CONSTANT, B=CONSTANT))
    where = cluster(*slots(1))
    members = waiting((A, 2), (B, 2))
    first = turns.plan(members, [], where, 0.0)
    assert summary(first) == [("job-00001", "train", "A", [0, 1], "cpu/1:0")]
    assert first.refusals == {2: BUSY, 3: BUSY}
    second = turns.plan(members[2:], [], where, 1.0)
    assert summary(second) == [("job-00002", "train", "B", [2, 3], "cpu/1:0")]


def test_unknown_keys_are_profiled_first_in_one_job():
    profiles = {}
    turns = planner(KnownCosts(lambda key, kind: profiles.get((key, kind))))
    where = cluster(*slots(1))
    members = waiting((A, 20), (B, 1))
    first = turns.plan(members, [], where, 0.0)
    ((job, device),) = first.starts
    assert (job.purpose, device.name) == (Purpose.PROFILE, "cpu/1:0")
    assert [(each.key, numbers(each)) for each in job.arrays] == [(A, list(range(16))), (B, [20])]
    assert first.refusals == dict.fromkeys(range(21), MEASURING)
    second = turns.plan(members, first.starts, where, 1.0)
    assert (second.starts, second.refusals) == ((), first.refusals)
    profiles[A, "cpu/1"] = CONSTANT
    running = [(replace(job, arrays=job.arrays[1:]), device)]
    third = turns.plan(members, running, where, 2.0)
    assert third.refusals == dict.fromkeys(range(20), BUSY) | {20: MEASURING}
    profiles[B, "cpu/1"] = CONSTANT
    fourth = turns.plan(members, [], where, 3.0)
    assert summary(fourth) == [("job-00002", "train", "A", list(range(20)), "cpu/1:0")]


def test_without_fusion_one_member_is_profiled_once():
    members = waiting((A, 20))
    turns = Turns(WFD(), known(), fuse=False)
    ((job, _),) = turns.plan(members, [], cluster(*slots(1)), 0.0).starts
    assert (job.purpose, [numbers(each) for each in job.arrays]) == (Purpose.PROFILE, [[0]])
    turns = Turns(WFD(), known(A=replace(CONSTANT, measured_members=1)), fuse=False)
    ((job, _),) = turns.plan(members, [], cluster(*slots(1)), 1.0).starts
    assert (job.purpose, [numbers(each) for each in job.arrays]) == (Purpose.TRAIN, [[0]])


def test_idle_devices_divide_the_keys_to_profile():
    placement = planner(known()).plan(waiting((A, 1), (B, 2), (C, 1)), [], cluster(*slots(2)), 0.0)
    held = [([each.key for each in job.arrays], device.name) for job, device in placement.starts]
    assert held == [([A, C], "cpu/1:0"), ([B], "cpu/1:1")]


@pytest.mark.parametrize(("measured_members", "again"), [(16, False), (5, False), (4, True), (1, True)])
def test_a_key_profiled_for_few_members_is_profiled_again_for_many(measured_members, again):
    costs = known(A=replace(CONSTANT, measured_members=measured_members))
    placement = planner(costs).plan(waiting((A, 12)), [], cluster(*slots(1)), 0.0)
    assert [job.purpose for job, _ in placement.starts] == [Purpose.PROFILE if again else Purpose.TRAIN]


@pytest.mark.parametrize(
    ("expected", "wait", "done", "fuse", "again"),
    [
        pytest.param(None, 12, 0, True, False, id="nothing was too dear"),
        pytest.param(9, 12, 0, True, False, id="little more waits"),
        pytest.param(8, 12, 0, True, True, id="three times as much waits"),
        pytest.param(20, 12, 35, True, False, id="little more was trained or waits"),
        pytest.param(20, 12, 36, True, True, id="three times as much was trained or waits"),
        pytest.param(1, 4, 99, True, False, id="no more wait than were measured"),
        pytest.param(1, 12, 99, False, False, id="nothing is fused"),
    ],
)
def test_larger_sizes_are_profiled_once_many_epochs_are_expected(expected, wait, done, fuse, again):
    costs = known(A=replace(CONSTANT, step_seconds={1: 1.0, 4: 1.0}, measured_members=12, expected_epochs=expected))
    planned = Turns(WFD(), costs, fuse=fuse, trained_epochs=lambda key: done).plan(
        waiting((A, wait, {"target": 2})), [], cluster(*slots(1)), 0.0
    )
    assert planned.starts[0][0].purpose is (Purpose.PROFILE if again else Purpose.TRAIN)
    if again:
        assert [array.expected_epochs for array in planned.starts[0][0].arrays] == [2 * wait + done]


@pytest.mark.parametrize(
    ("step", "epoch_steps", "first_size", "again"),
    [
        pytest.param(0.05, 20, None, False, id="12 s on a GPU"),
        pytest.param(0.5, 20, None, True, id="120 s on a GPU"),
        pytest.param(0.05, 20, 8, False, id="too few steps for arrays on a CPU"),
        pytest.param(0.01, 100, 8, True, id="enough steps on a CPU"),
    ],
)
def test_little_work_is_not_measured_again(step, epoch_steps, first_size, again):
    """It is three times the members of the first profile, of 12 s or 120 s in 12 epochs."""
    seen = {"measured_members": 4, "expected_epochs": 4, "first_size": first_size}
    once = replace(CONSTANT, step_seconds={1: step}, epoch_steps=epoch_steps, **seen)
    placement = planner(known(A=once)).plan(waiting((A, 12, {"target": 1})), [], cluster(*slots(1)), 0.0)
    assert [job.purpose for job, _ in placement.starts] == [Purpose.PROFILE if again else Purpose.TRAIN]


def test_joins_of_a_turn_reduce_the_free_resources_of_later_joins():
    """A job on a device of 5 GB takes in one of its key; another structure would make it 6."""
    (device,) = slots(1, memory=5)
    short = replace(FUSES, step_seconds={1: 1e-3, 16: 4.75e-3}, fetch_seconds=0.01, sample_sharing="kept")
    costs = known(A=short, B=short)
    running = [(Job("runs", (Array(A, tuple(map(member, range(4)))),), demand=Demand(1.0, 4 * GB, 1.0, 60.0)), device)]
    some = [(member(10), A), (member(11), B)]
    placement = Turns(Fifo(), costs).plan(some, running, cluster(device), 0.0)
    assert [numbers(array) for array in placement.joins["runs"]] == [[10]]
    alone = Turns(Fifo(), costs).plan(some[1:], running, cluster(device), 0.0)
    assert [numbers(array) for array in alone.joins["runs"]] == [[11]]


def test_a_key_is_measured_once_per_kind_and_not_beside_another_job():
    where = cluster(*slots(2), *slots(1, "H200"))
    busy = [(Job("old", (Array(B, (member(90),)),)), where.device("cpu/1:0"))]
    turns = planner(known(B=profile({1: 1.0}, compute=0.1)))
    placement = turns.plan(waiting((A, 2)), busy, where, 0.0)
    assert [(job.arrays[0].key, device.name) for job, device in placement.starts] == [(A, "cpu/1:1"), (A, "H200:0")]


def test_nothing_runs_beside_a_profile_job():
    small = profile({1: 1.0}, compute=0.1, member_memory=0)
    placement = planner(known(A=small)).plan(waiting((A, 1), (B, 1)), [], cluster(*slots(1)), 0.0)
    assert summary(placement) == [("job-00001", "profile", "B", [1], "cpu/1:0")]
    assert placement.refusals == {0: BUSY, 1: MEASURING}


def test_a_key_known_on_one_kind_runs_there_while_it_is_measured_on_another():
    where = cluster(*slots(1), *slots(1, "H200"))
    placement = planner(known(A={"cpu/1": CONSTANT})).plan(waiting((A, 3)), [], where, 0.0)
    assert summary(placement) == [
        ("job-00001", "profile", "A", [0, 1, 2], "H200:0"),
        ("job-00002", "train", "A", [0, 1, 2], "cpu/1:0"),
    ]
    assert placement.refusals == {}


def test_the_members_of_a_sample_start_at_the_same_epoch():
    members = [(member(0, start=3), A), (member(1), A), (member(2, start=3), A)]
    placement = planner(known()).plan(members, [], cluster(*slots(1)), 0.0)
    assert summary(placement) == [("job-00001", "profile", "A", [0, 2], "cpu/1:0")]


def test_unmeasurable_trials_run_alone_on_whole_devices():
    where = cluster(*slots(2, oversubscription=3.0))
    placement = planner(known()).plan(waiting((A, 3)), [], where, 0.0, unmeasurable={(A, "cpu/1")})
    assert summary(placement) == [
        ("job-00001", "train", "A", [0], "cpu/1:0"),
        ("job-00002", "train", "A", [1], "cpu/1:1"),
    ]
    assert placement.refusals == {2: "waits for a free device: all 2 are busy"}


def test_a_key_unmeasurable_on_one_kind_is_profiled_on_another():
    where = cluster(*slots(1), *slots(1, "H200"))
    placement = planner(known()).plan(waiting((A, 1)), [], where, 0.0, unmeasurable={(A, "cpu/1")})
    assert summary(placement) == [("job-00001", "profile", "A", [0], "H200:0")]
    assert placement.refusals == {0: MEASURING}


def test_trials_that_failed_before_are_alone_and_not_measured():
    where = cluster(*slots(1))
    turns = planner(known(A=CONSTANT))
    members = waiting((A, 3), (B, 1))
    placement = turns.plan(members, [], where, 0.0, own_job_trials={1, 3})
    assert summary(placement) == [("job-00001", "train", "A", [0, 2], "cpu/1:0")]
    assert placement.refusals == {1: BUSY, 3: BUSY}
    again = turns.plan([members[3]], [], where, 1.0, own_job_trials={1, 3})
    assert summary(again) == [("job-00002", "train", "B", [3], "cpu/1:0")]


@pytest.mark.parametrize(
    ("costs", "where"),
    [
        pytest.param(known(A=CONSTANT), cluster(*slots(2, healthy=False)), id="known"),
        pytest.param(known(), cluster(*slots(2, healthy=False)), id="unknown"),
        pytest.param(known(A=CONSTANT), cluster(), id="an empty cluster"),
    ],
)
def test_without_a_healthy_device_all_wait(costs, where):
    placement = planner(costs).plan(waiting((A, 2)), [], where, 0.0)
    assert placement.starts == ()
    assert placement.refusals == {0: "no healthy device", 1: "no healthy device"}


def test_a_trial_too_large_for_any_device_says_so_of_itself():
    placement = planner(known(A=FUSES)).plan(waiting((A, 4)), [], cluster(*slots(1, memory=0)), 0.0)
    assert placement.starts == ()
    assert set(placement.refusals.values()) == {
        "can never run here: needs 1.0 GB, the largest device cpu/1:0 has 0 MB",
    }


def test_all_slots_are_used_if_measured_cores_exceed_a_slot():
    hungry = profile({1: 1.0, 16: 16.0}, cores=1.1, compute=1.05)
    where = cluster(*slots(64))
    placement = planner(known(A=hungry)).plan(waiting((A, 64)), [], where, 0.0)
    assert len(placement.starts) == 64


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        pytest.param(1, [4, 5, 6, 7], id="just started: no use in waiting for it"),
        pytest.param(10, [4, 5], id="done: it will take its share"),
    ],
)
def test_time_left_of_running_jobs_decides_how_finely_is_cut(epoch, expected):
    """The running job takes 100 s for ten epochs, the four that wait 17.5 s in one array and 12.5 s in two."""
    steady = profile({1: 0.1, 4: 0.175})
    turns = planner(known(A=steady, B=profile({1: 1.0})))
    where = cluster(*slots(2))
    first = turns.plan([(member(0), B)], [], where, 0.0)
    assert summary(first) == [("job-00001", "train", "B", [0], "cpu/1:0")]
    members = [(member(number), A) for number in range(4, 8)]
    ((job, device),) = first.starts
    now_there = replace(job, arrays=(replace(job.arrays[0], members=(member(0, start=epoch),)),))
    placement = turns.plan(members, [(now_there, device)], where, 10.0)
    assert summary(placement) == [("job-00002", "train", "A", expected, "cpu/1:1")]
    waiting_numbers = {4, 5, 6, 7} - set(expected)
    assert placement.refusals == dict.fromkeys(waiting_numbers, "waits for a free device: all 2 are busy")


class Recording(Policy):
    """Keeps what it was shown, and starts nothing."""

    def plan(self, jobs, cluster, now):
        self.jobs, self.cluster, self.now = jobs, cluster, now
        return Plan((), tuple(Refusal(job.id, "no") for job in jobs if job.state is JobState.WAITING))


def test_the_policy_sees_running_jobs_first_then_waiting_ones_with_demands_by_kind():
    policy = Recording()
    where = cluster(*slots(1, oversubscription=2.0), *slots(1, "H200"))
    running = [
        (Job("train", (Array(A, (member(8), member(9, target=20))),)), where.device("cpu/1:0")),
        (Job("profile", (Array(C, (member(7),)),), Purpose.PROFILE), where.device("H200:0")),
    ]
    costs = known(A=FUSES, B={"cpu/1": FUSES, "H200": CONSTANT})
    planner(costs, policy).plan(waiting((B, 1)), running, where, 42.0)
    train, measure, wait = policy.jobs
    assert (policy.cluster, policy.now) == (where, 42.0)
    assert (train.id, train.state, train.devices) == ("train", JobState.RUNNING, ("cpu/1:0",))
    assert train.demand["cpu/1"].seconds == pytest.approx(1.25 * 10 * 10 + 1.0 * 10 * 10)
    assert train.demand["cpu/1"].memory == 2 * 10**9
    assert (measure.devices, measure.demand["H200"].compute) == (("H200:0",), 1.0)
    assert (wait.state, wait.devices) == (JobState.WAITING, ())
    assert {kind: demand.seconds for kind, demand in wait.demand.items()} == {"cpu/1": 100.0, "H200": 100.0}


class Illegal(Recording):
    def plan(self, jobs, cluster, now):
        return Plan(tuple(Start(job.id, ("nowhere",)) for job in jobs))


class Suspending(Recording):
    def plan(self, jobs, cluster, now):
        return Plan(tuple(Suspend(job.id) for job in jobs if isinstance(job, JobView)))


def test_an_illegal_plan_is_refused():
    with pytest.raises(PolicyError, match="'nowhere'"):
        planner(known(A=FUSES), Illegal()).plan(waiting((A, 1)), [], cluster(*slots(1)), 0.0)


def test_a_plan_that_does_more_than_start_is_refused_by_name():
    where = cluster(*slots(1))
    running = [(Job("old", (Array(A, (member(1),)),)), where.device("cpu/1:0"))]
    with pytest.raises(PolicyError, match=r"Suspend\(job='old'\) names a job that is not preemptible"):
        planner(known(A=FUSES), Suspending()).plan([], running, where, 0.0)


@pytest.mark.parametrize("policy", [Fifo(), WFD()])
def test_a_study_is_played_to_its_end(policy):
    """Every trial is trained once, whatever is measured on the way, and never two jobs share a slot."""
    profiles, waits = {}, waiting((A, 9), (B, 5), (C, 1))
    turns, where, running, done = planner(KnownCosts(lambda *at: profiles.get(at)), policy), cluster(*slots(2)), [], []
    for now in range(100):
        placement = turns.plan(waits, running, where, float(now))
        running.extend(placement.starts)
        trained = [held for job, _ in running if job.purpose is Purpose.TRAIN for held in job.members]
        waits = [(held, key) for held, key in waits if held not in trained]
        assert set(placement.refusals) == {held.trial.number for held, _ in waits}
        assert len({device.name for _, device in running}) == len(running)
        if not running:
            break
        job, device = running.pop(0)
        if job.purpose is Purpose.PROFILE:
            profiles[job.arrays[0].key, device.kind] = FUSES
        else:
            done.extend(numbers(job.arrays[0]))
    assert sorted(done) == list(range(15))
