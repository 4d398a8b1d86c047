"""Short names for members, arrays, profiles and clusters in tables."""

from dataclasses import replace

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.resources import Ledger, Share
from shoal.core.trial import Trial
from shoal.plan.cost.costs import Costs
from shoal.plan.cost.history import History
from shoal.plan.job_tracker import JobTracker
from shoal.plan.plan_input import Placement, PlanInput
from shoal.plan.planner import plan
from shoal.plan.waiting import WaitingClass

GB = 10**9
A, B, C = (FusionKey(name, "", 32) for name in "ABC")


def member(number, start=0, target=10, data_seed=0):
    return Member(Trial(number, {}, seed=number, data_seed=data_seed), start, target)


def array(key, *trials, start=0, target=10):
    return Array(key, tuple(member(number, start=start, target=target) for number in trials))


def waiting(*groups):
    """`(key, count, changes)` after each other, numbered from 0."""
    members = []
    for key, count, *changes in groups:
        for _ in range(count):
            members.append((member(len(members), **(changes[0] if changes else {})), key))
    return members


def profile(step, **changes):
    """Ten steps an epoch, no validation; a member takes 1 GB, the process none; different epochs cost nothing."""
    fields = {
        "epoch_steps": 10,
        "validation_steps": 0,
        "base_memory": 0,
        "member_memory": GB,
        "compute": 1.0,
        "cores": 1.0,
        "mixing": 1.0,
    }
    return Profile(step, **fields | changes)


LINEAR = profile({1: 1.0, 16: 16.0})
"""Fusing neither gains nor loses."""
LITTLE = profile({1: 1.0, 16: 14.0})
"""Fusing gains a little."""
FUSES = profile({1: 1.0, 16: 4.75})
"""A quarter of a second for every further member."""
CONSTANT = profile({1: 1.0, 16: 1.0})
"""Members are free."""
SLOWER = profile({1: 1.0, 16: 20.0})
"""Fusing loses."""
FETCHES = replace(LINEAR, step_seconds={1: 0.001}, fetch_seconds=0.01, sample_sharing="window")
"""Samples take ten times as long to make as a step."""
KEPT = replace(FETCHES, sample_sharing="kept")
BY_BATCH = replace(FETCHES, sample_sharing="batch")


class KnownCosts(Costs):
    """Costs by a function of a key and a kind of device, which returns a profile or None."""

    def __init__(self, profile):
        super().__init__(History(""))
        self.profile = profile


def known(**profiles):
    """Costs: the structure's profile on every kind of device, or by kind."""

    def look_up(key, kind):
        found = profiles.get(key.structure)
        return found.get(kind) if isinstance(found, dict) else found

    return KnownCosts(look_up)


def slots(count, kind="cpu/1", memory=100, **changes):
    return [Device(f"{kind}:{index}", kind, memory * GB, **changes) for index in range(count)]


def cluster(*devices):
    return Cluster((Node("n0", 64, tuple(devices)),))


def room(free, cores=64.0):
    """So many bytes are left of each device, and so many cores of their node."""
    devices = tuple(Device(name, "cpu/1", 10**15) for name in free)
    left = Ledger(Cluster((Node("n0", 64, devices),)))
    for name, memory in free.items():
        left.add("others", left[name], Share(memory=10**15 - memory))
    left.add("others", left[devices[0].name], Share(cores=64.0 - cores))
    return left


def numbers(array):
    return [member.trial.number for member in array.members]


def classes_of(members, own_job_trials=frozenset(), oom_limits=None):
    """The classes of waiting members with their keys, in the order of their first members."""
    found, oom_limits = {}, oom_limits or {}
    for each, key in members:
        number = each.trial.number
        alike = key, each.start, each.target, number in own_job_trials, oom_limits.get(number)
        found.setdefault(alike, []).append(each)
    return [
        WaitingClass(key, tuple(sorted(some, key=lambda each: each.trial.number)), 0, own_job, oom_limit)
        for (key, _, _, own_job, oom_limit), some in found.items()
    ]


def place(waiting):
    """Place of its first trial in the queue."""
    return waiting.rank, waiting.members[0].trial.number


class Turns:
    """Plans in turns, as the state machine makes them: the history and the arrivals of one are given to the next."""

    def __init__(self, policy, costs, **settings):
        self.given = PlanInput(policy, costs, cluster(), **settings)
        self.tracker, self.wake, self.arrived = JobTracker(), None, {}

    def plan(self, members, running, where, now, **changes) -> Placement:
        """Each waiting member comes with its key."""
        keys = {each.trial.number: (each, key) for each, key in members}
        self.tracker.refresh_suspended(keys.get, now)
        in_jobs = {each.trial.number for job, _ in self.tracker.suspended.values() for each in job.members}
        free = [(each, key) for each, key in members if each.trial.number not in in_jobs]
        self.arrived = {each.trial.number: self.arrived.get(each.trial.number, now) for each, _ in free}
        classes = classes_of(free, changes.get("own_job_trials", frozenset()), changes.get("oom_limits", {}))
        given = replace(
            self.given,
            cluster=where,
            now=now,
            waiting=sorted(classes, key=place),
            running=running,
            history=self.tracker,
            arrived=self.arrived,
            **changes,
        )
        placement = plan(given)
        self.tracker, self.wake = placement.history, placement.wake
        self.given = replace(self.given, next_job=placement.next_job)
        return placement
