"""The simulator: a live study's state machine in a world of which all times are known."""

from dataclasses import replace
from functools import partial

import pytest
from baselines import BatchSize
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_samples import GB, cluster, simulation, structure

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import PolicyError
from shoal.core.job import Purpose
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule import (
    WFD,
    Auto,
    Fifo,
    JobState,
    Plan,
    Policy,
    Refusal,
    Resize,
    Resume,
    Start,
    Suspend,
)
from shoal.run.virtual import START_SECONDS, STOP_SECONDS, Virtual
from shoal.simulate.run import ClusterEvent, Simulation
from shoal.simulate.slowdown import SLOWDOWNS
from shoal.simulate.workload import SimulatedStudy, SimulatedWorkload


def node(name="n0", devices=1, kind="A100", cores=8):
    return Node(name, cores, tuple(Device(f"{name}/{i}", kind, 80 * GB) for i in range(devices)))


def jobs(*seconds, **amounts):
    """One of each of these numbers of seconds an epoch."""
    return [structure(str(number), seconds=each, **amounts) for number, each in enumerate(seconds)]


class Scripted(Policy):
    """Does at the times of a table what that says of the one job there is."""

    def __init__(self, script):
        self.script = dict(script)
        self.seen = {}

    def plan(self, jobs, cluster, now):
        for job in jobs:
            self.seen.setdefault(now, job)
        action = self.script.pop(now, None)
        actions = [action(job.id) for job in jobs if action]
        off = [job.id for job in jobs if bool(job.devices) == any(isinstance(x, Suspend) for x in actions)]
        off = [] if any(isinstance(x, Start | Resume | Resize) for x in actions) else off
        later = [at for at in self.script if at > now]
        return Plan(tuple(actions), tuple(Refusal(name, "scripted") for name in off), min(later, default=None))


def halved(device, jobs):
    """Everybody on a device at 1/n of the speed."""
    return [1 / len(jobs)] * len(jobs)


def outcome(given, where=None, policy=None, **settings):
    packer = ArrayPacker(make_packing("none"))
    where = where or Cluster((node(),))
    return simulation(given, where, policy or Fifo(), packer=packer, **settings).run()


def start(*devices):
    return lambda job: Start(job, devices)


TWO = Cluster((node(devices=2),))
NODES = Cluster((node(), node("n1")))
TEN = {"given": jobs(1), "epochs": 10}
"""One job of ten epochs of a second."""
WIDE = [
    replace(each, profiles={kind: replace(takes, spreading={2: 0.6}) for kind, takes in each.profiles.items()})
    for each in jobs(1)
]
CASES = {
    "one after the other": ({"given": jobs(10, 5)}, [10, 15]),
    "one job a device": ({"given": jobs(10, 5), "where": TWO}, [10, 5]),
    "a later arrival": ({"given": jobs(10, 5), "arrivals": [3, 20]}, [13, 25]),
    "shared without harm": ({"given": jobs(10, 5, compute=0.5), "policy": WFD()}, [10, 5]),
    "shared at half speed: b's 5 s take 10, then a has 5 s left": (
        {"given": jobs(10, 5, compute=0.5), "policy": WFD(), "slowdown": halved},
        [15, 10],
    ),
    "start costs": ({"given": jobs(10, start_seconds=2.0)}, [12]),
    "suspended for 3 s, resumed for 1 s": (
        {
            "given": jobs(1, switch_seconds=1.0),
            "epochs": 10,
            "policy": Scripted({0: start("n0/0"), 4: Suspend, 7: lambda job: Resume(job, ("n0/0",))}),
        },
        [14],
    ),
    "suspended within an epoch, of which nothing is lost": (
        {
            "given": jobs(1),
            "epochs": 10,
            "policy": Scripted({0: start("n0/0"), 4.5: Suspend, 7: lambda job: Resume(job, ("n0/0",))}),
        },
        [12.5],
    ),
    "two devices: an epoch takes 0.6 of that on one, once the helper takes part": (
        {"given": WIDE, "epochs": 10, "where": TWO, "policy": Scripted({0: start("n0/0", "n0/1")})},
        [START_SECONDS + 0.6 * (10 - START_SECONDS)],
    ),
    "its device fails: from the last checkpoint on another": (
        {**TEN, "where": TWO, "checkpoint_seconds": 3.0, "events": [ClusterEvent(8.5, failed=("n0/0",))]},
        [12.5],
    ),
    "its device fails without a checkpoint": (
        {**TEN, "where": TWO, "events": [ClusterEvent(8.5, failed=("n0/0",))]},
        [18.5],
    ),
    "its node is removed: it is saved, and continues elsewhere": (
        {**TEN, "where": NODES, "events": [ClusterEvent(8.0, removed=("n0/0",))]},
        [10 + STOP_SECONDS],
    ),
    "all devices are lost and one comes back": (
        {
            "given": jobs(10, 1),
            "events": [ClusterEvent(5.0, failed=("n0/0",)), ClusterEvent(20.0, restored=("n0/0",))],
        },
        [30, 31],
    ),
    "a node joins": ({"given": jobs(10, 10), "events": [ClusterEvent(4.0, added=(node("n1"),))]}, [10, 14]),
}


@pytest.mark.parametrize(("given", "expected"), CASES.values(), ids=CASES)
def test_ends(given, expected):
    ends = outcome(**given).completion
    assert [ends.get(f"job/{number}") for number in range(len(expected))] == pytest.approx(expected, abs=1e-6)


def test_what_a_policy_is_told():
    policy = Scripted({0: start("n0/0"), 4: Suspend, 7: lambda job: Resume(job, ("n0/0",)), 9.5: Suspend})
    outcome(**TEN, policy=policy)
    seen = [policy.seen[at] for at in (0, 4, 7, 9.5)]
    assert [view.state for view in seen] == [
        JobState.WAITING, JobState.RUNNING, JobState.SUSPENDED, JobState.RUNNING,
    ]  # fmt: skip
    assert [view.demand["A100"].seconds for view in seen] == pytest.approx([10, 6, 6, 4])
    assert [view.epoch for view in seen] == [0, 4, 4, 6]


def test_sums():
    found = outcome(jobs(10, 5, 5, compute=0.5), TWO, arrivals=[0, 0, 2])
    assert found.completion == {"job/0": 10, "job/1": 5, "job/2": 10}
    assert (found.makespan, found.mean_completion, found.p95_completion) == (10, pytest.approx(23 / 3), 10)
    assert found.device_seconds == 20
    assert found.mean_occupancy == pytest.approx(0.5)
    stays = [(stay.trial, stay.trials, stay.begin, stay.end, stay.compute) for stay in found.intervals]
    assert sorted(stays) == [("job/0", 1, 0, 10, 0.5), ("job/1", 1, 0, 5, 0.5), ("job/2", 1, 5, 10, 0.5)]


REFUSED = {
    "memory": ({"memory": 90}, "needs 90.0 GB, the largest device n0/0 has 80.0 GB"),
}


@pytest.mark.parametrize(("amounts", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_job_that_fits_nowhere_waits_with_its_reason(amounts, reason):
    found = outcome([structure("large", **amounts), structure("small", seconds=5)])
    assert found.completion == {"job/1": 5}
    assert reason in found.waiting["job/0"]


def test_jobs_wait_where_all_devices_are_lost():
    found = outcome(jobs(10, 10), events=[ClusterEvent(4.0, failed=("n0/0",))])
    assert found.completion == {}
    assert sorted(found.waiting) == ["job/0", "job/1"]


def test_trials_alike_share_an_array_and_later_ones_join_it():
    """Arrays of eight take 2.5 times as long: 4 trials one after the other are 40 s, joined on the way fewer."""
    alike = structure("alike", seconds=1.0, fused={8: 2.5})
    later = SimulatedStudy("later", [alike], 4, ("grid", {"epochs": 4}), arrivals=[2.0])
    first = SimulatedStudy("first", [alike], 4, ("grid", {"epochs": 10}))
    slowdown = SLOWDOWNS["none"]({"alike": alike}, None)
    run = partial(Simulation, cluster=cluster(), policy=Fifo(), slowdown=slowdown)
    fused, alone = (run(SimulatedWorkload([first, later]), fuse=fuse).run() for fuse in (True, False))
    assert max(stay.trials for stay in fused.intervals) > 1
    assert len(fused.intervals) < len(alone.intervals) == 8
    assert fused.makespan < alone.makespan / 2


class Trained:
    """The jobs that train, as they are started: of each the numbers of its trials, array by array."""

    def __init__(self, monkeypatch):
        self.jobs, started = [], Virtual.start

        def start(world, job, device):
            if job.purpose is Purpose.TRAIN:
                self.jobs.append([[member.trial.number for member in array.members] for array in job.arrays])
            started(world, job, device)

        monkeypatch.setattr(Virtual, "start", start)


def searched(structures, trials, epochs, **more):
    """A grid of so many trials of each structure."""
    search = SimulatedStudy("s", structures, trials, ("grid", {"epochs": epochs}))
    slowdown = SLOWDOWNS["none"]({each.name: each for each in structures}, None)
    return Simulation(SimulatedWorkload([search]), policy=Fifo(), slowdown=slowdown, **more).run()


def test_arrays_of_several_structures_are_packed_into_a_job_and_take_turns(monkeypatch):
    """Each array's epoch of 2 s is followed by one of the other: 4 epochs of both are 16 s, of one process."""
    trained = Trained(monkeypatch)
    both = [structure(name, seconds=1.0, fused={4: 2.0}, start_seconds=1.0) for name in "ab"]
    found = searched(both, 4, 4, cluster=cluster(), packer=ArrayPacker(BatchSize()))
    assert [[len(array) for array in job] for job in trained.jobs] == [[4, 4]]
    assert found.makespan == pytest.approx(1 + 16)
    assert [stay.trials for stay in found.intervals] == [8]
    apart = searched(both, 4, 4, cluster=cluster(), packer=ArrayPacker(make_packing("none")))
    assert apart.makespan == pytest.approx(2 * (1 + 8)), "one process after the other"


def test_trials_that_were_fused_go_back_to_their_last_checkpoints_when_their_device_fails(monkeypatch):
    """Epochs of 2 s, of which every second one is saved: what was trained of the fifth is trained again."""
    trained = Trained(monkeypatch)
    alike = structure("alike", seconds=1.0, fused={4: 2.0})
    events = [ClusterEvent(9.0, failed=("gpu0",)), ClusterEvent(20.0, restored=("gpu0",))]
    found = searched([alike], 4, 8, cluster=cluster(), checkpoint_seconds=4.0, events=events)
    assert trained.jobs == [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]
    assert [(stay.begin, stay.end) for stay in found.intervals] == [(0, 9), (20, pytest.approx(20 + 2 * (8 - 4)))]
    assert found.completion.keys() == {"s/0", "s/1", "s/2", "s/3"}
    assert found.switches == 1


def test_what_is_not_known_beforehand_is_looked_at_and_measured_first():
    known, found = (outcome(jobs(10, 5), measured=measured) for measured in (True, False))
    assert found.completion.keys() == known.completion.keys()
    assert min(stay.begin for stay in known.intervals) == 0 < min(stay.begin for stay in found.intervals)


def test_a_job_that_stands_still_is_named():
    found = outcome(jobs(10), slowdown=lambda device, jobs: [0.0] * len(jobs))
    assert found.waiting == {"job/0": "makes no progress"}


def test_a_policy_that_only_wakes_comes_to_an_end():
    class Sleepy(Policy):
        def plan(self, jobs, cluster, now):
            return Plan((), tuple(Refusal(job.id, "not now") for job in jobs), now + 1.0)

    assert outcome(jobs(10), policy=Sleepy()).waiting == {"job/0": "not now"}


def test_an_illegal_plan_is_an_error():
    with pytest.raises(PolicyError, match="does not exist"):
        outcome(jobs(10), policy=Scripted({0: start("n7/0")}))


@settings(database=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 20), st.sampled_from((0.2, 0.5, 1.0))), min_size=1, max_size=12
    ),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=4),
    st.sampled_from((Fifo(), WFD())),
)
def test_every_job_ends_and_all_is_the_same_again(amounts, devices, changes, policy):
    given = [structure(f"j{i}", seconds=s, compute=c) for i, (_, s, c) in enumerate(amounts)]
    events = [ClusterEvent(float(at), **{"failed" if bad else "restored": ("n0/0",)}) for at, bad in changes]
    events.append(ClusterEvent(40.0, restored=("n0/0",)))
    where, arrivals = Cluster((node(devices=devices, cores=64),)), [float(at) for at, *_ in amounts]
    one, again = (outcome(given, where, policy, arrivals=arrivals, slowdown=halved, events=events) for _ in range(2))
    assert one.completion.keys() == {f"job/{number}" for number in range(len(amounts))}
    assert one == again


@pytest.mark.parametrize("concurrency", [3, 32])
def test_asha_fills_idle_slots_at_once(concurrency):
    """No device is idle while a trial waits, though every trial takes another time."""
    structures = [structure(str(number), seconds=1.0 + number) for number in range(5)]
    settings = {"n": 20, "max_epochs": 9, "eta": 3, "concurrency": concurrency}
    search = SimulatedStudy("s", structures, 4, ("asha", settings))
    slowdown = SLOWDOWNS["none"]({each.name: each for each in structures}, None)
    found = Simulation(SimulatedWorkload([search]), cluster(3), Auto(), slowdown, fuse=False).run()
    begins, ends = ([getattr(stay, name) for stay in found.intervals] for name in ("begin", "end"))
    assert len(begins) == len(found.arrivals) > 20, "some are promoted"
    for now in begins + ends + [*found.arrivals.values()]:
        started = sum(begin <= now for begin in begins)
        waiting = sum(arrival <= now for arrival in found.arrivals.values()) - started
        assert not waiting or started - sum(end <= now for end in ends) == 3, now
