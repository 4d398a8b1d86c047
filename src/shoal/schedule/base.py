"""The contract of a placement policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.event import TurnStats
from shoal.cost.scaling import Scaling
from shoal.schedule.action import JobState, Plan

__all__ = ["Changes", "JobView", "Policy", "Session"]


@dataclass(frozen=True)
class JobView:
    """A job as a policy sees it.

    Args:
        id: unique in the study.
        demand: device kind -> what the job takes there, `seconds` being those that it still has before it; a kind that
            is absent cannot run it.
        state: waiting, running or suspended.
        devices: names of the devices it holds; empty unless it runs.
        share: compute it holds on its device, in units of `Demand.compute`; None: as much as its demand says.
        since: when it came into its state: arrived, was started or resumed, was suspended.
        ran: seconds that it has had devices for.
        group: name of its TrialGroup, whose makespan counts, or None.
        budget: epochs that it is to train for, in all; None if that is not known.
        epoch: epochs that it has trained for.
        quanta: what it has measured, turn by turn, the newest last.
        scaling: its run time by width.
        preemptible: whether it may be suspended, resized or moved.
        switch_seconds: what suspending and resuming it costs, together.
        home: the device that it holds or was on last, where its state lies; None if it has never had one alone.
        study: it belongs to; losses of different studies do not compare.
        best: the lowest training loss that a job of its study has measured, those that have ended included; None if
            there is none.
        critical_path: seconds from its start until the last training that may follow from some of it is expected to
            end, if nothing waits; 0 where nothing follows, or that is not known.
    """

    id: str
    demand: Mapping[str, Demand]
    state: JobState = JobState.WAITING
    devices: tuple[str, ...] = ()
    share: float | None = None
    since: float = 0.0
    ran: float = 0.0
    group: str | None = None
    budget: int | None = None
    epoch: int = 0
    quanta: tuple[TurnStats, ...] = ()
    scaling: Scaling = field(default_factory=Scaling)
    preemptible: bool = True
    switch_seconds: float = 0.0
    home: str | None = None
    study: str | None = None
    best: float | None = None
    critical_path: float = 0.0

    def compute(self, device: Device) -> float:
        """What it takes of a device's compute: its share; of one of several devices, all of it."""
        if len(self.devices) > 1:
            return device.capacity
        return self.demand[device.kind].compute if self.share is None else self.share


@dataclass(frozen=True)
class Changes:
    """What is different since a session was last asked.

    Args:
        jobs: those that are new, or that differ from when they were last given, in order of arrival.
        ended: ids of jobs that are there no more.
        cluster: as it is now, if it differs.
    """

    jobs: tuple[JobView, ...] = ()
    ended: tuple[str, ...] = ()
    cluster: Cluster | None = None


class Policy(ABC):
    """Decides which job runs where.

    The planner calls `plan`, once a turn: when something has changed (a job arrived or ended, a device came, went or
    changed), about once a second while jobs run, and at the time its last plan named as `wake`, such as the end of a
    quantum. It passes every job that is waiting, running or suspended, oldest first, and the cluster as it is. What it
    passes includes the jobs that measure a model; they run, and are not preemptible.

    A live job leaves its device at its next step. Until then it is shown as running and not preemptible, and what the
    plan wanted to place where it was is left to the policy's next plan. One that was moved is suspended at first.

    A policy is a pure function of the arguments of `plan`: no clock, no I/O, no state between calls, no randomness but
    a seed given to its constructor. The simulator calls the same object as the engine, with a virtual `now`.

    What it may return are legal plans, whose actions are taken in order:

    - Start names a waiting job, Resume a suspended one, Suspend and Resize a running one, Stop a running or suspended
      one; Suspend, Resize and Stop only a job that is `preemptible`.
    - Devices exist, are healthy, and of a kind in the job's demand. A job gets at most `Scaling.devices` of them, and a
      share only if its `Scaling.sharing` is above 1. One of several devices has each to itself, and no share.
    - The compute that jobs hold on a device sums to at most `Device.capacity`, their memory to at most `Device.memory`
      bytes, the cores of all jobs on a node to at most `Node.cores`.
    - Every job that holds no device after the plan has exactly one `Refusal`.
    - `wake` lies after `now`.

    `shoal.schedule.check_plan` holds a plan against these rules, and the planner runs it on every plan. An illegal plan
    is a `PolicyError`. That, or whatever `plan` raises, ends the run; all that was reported is recorded, and `resume`
    goes on, also with another policy.

    `shoal.testing.check_policy` checks this contract. It also checks that a job which fits an idle cluster is started.
    """

    @abstractmethod
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""

    def session(self, cluster: Cluster) -> "Session":
        """Begin with a cluster and no jobs, to be told only of what changes from then on."""
        return _Whole(self, cluster)


class Session(ABC):
    """A policy at work: it keeps books of its own, so that a decision costs what has changed, not all there is."""

    @abstractmethod
    def plan(self, changes: Changes, now: float) -> Plan:
        """Decide what to do at `now`; the same as `Policy.plan` decides of everything.

        What came of the plan is not assumed but told with the next changes: the jobs it started, as they are then.
        Refusals are made when they are looked at, which must be before the next call.
        """


class _Whole(Session):
    """Hands everything to the policy at every call."""

    def __init__(self, policy: Policy, cluster: Cluster) -> None:
        self._policy = policy
        self._cluster = cluster
        self._jobs: dict[str, JobView] = {}

    def plan(self, changes: Changes, now: float) -> Plan:
        for job in changes.jobs:
            self._jobs[job.id] = job
        for name in changes.ended:
            del self._jobs[name]
        if changes.cluster is not None:
            self._cluster = changes.cluster
        return self._policy.plan(list(self._jobs.values()), self._cluster, now)
