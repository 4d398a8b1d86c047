"""Trials of a program of the user's: never fused or packed, never measured before, and placed by what was learnt."""

from planner_samples import KnownCosts, Turns

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Job, Purpose
from shoal.core.trial import Trial
from shoal.plan.schedule.registry import make_policy
from shoal.programs.process import program_profile
from shoal.study.config import opaque_key


def cluster(devices: int) -> Cluster:
    slots = tuple(Device(f"cpu:{i}", "cpu/4", memory=1000, cores=4) for i in range(devices))
    return Cluster((Node("here", 4.0 * devices, slots),))


def planner(profile: Profile | None) -> Turns:
    return Turns(make_policy("ffd"), KnownCosts(lambda key, kind: profile))


def waiting(count: int) -> list[tuple[Member, FusionKey]]:
    members = [Member(Trial(number, {}, 0, 0), 0, 4) for number in range(count)]
    return [(member, opaque_key("opaque train 1", member.trial)) for member in members]


def test_all_trials_of_a_program_have_one_key() -> None:
    assert len({key for _, key in waiting(3)}) == 1


def test_an_opaque_key_without_a_profile_gets_a_whole_device() -> None:
    placement = planner(None).plan(waiting(3), [], cluster(2), 0.0)
    assert [(job.purpose, len(job.members), device.name) for job, device in placement.starts] == [
        (Purpose.TRAIN, 1, "cpu:0"),
        (Purpose.TRAIN, 1, "cpu:1"),
    ]
    assert placement.refusals.keys() == {2}


def test_opaque_keys_with_profiles_share_a_device_in_separate_processes() -> None:
    placement = planner(program_profile(1.0, 300, 0.3, 1.0)).plan(waiting(5), [], cluster(1), 0.0)
    assert [len(job.arrays) for job, _ in placement.starts] == [1, 1, 1]
    assert [job.demand.memory for job, _ in placement.starts if job.demand] == [300, 300, 300]
    assert placement.refusals.keys() == {3, 4}
    assert placement.joins == {}


def test_no_member_joins_a_running_program() -> None:
    profile = program_profile(1.0, 900, 0.9, 1.0)
    (first, key), *others = waiting(3)
    device = cluster(1).device("cpu:0")
    running = [(Job("job-running", (Array(key, (first,), profile),)), device)]
    placement = planner(profile).plan(others, running, cluster(1), 0.0)
    assert placement.starts == ()
    assert placement.joins == {}
    assert placement.refusals.keys() == {1, 2}
