"""The contract of a placement policy: `Policy`, the views of jobs, and plans with their actions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.event import TurnStats
from shoal.core.resources import ROUNDING
from shoal.plan.cost.scaling import Scaling

__all__ = [
    "QUANTUM",
    "Action",
    "JobState",
    "JobView",
    "Plan",
    "Policy",
    "Refusal",
    "Resize",
    "Resume",
    "Start",
    "Stop",
    "Suspend",
]

QUANTUM = 10.0
"""Default seconds of a turn (Hermes, section 3.2)."""


class JobState(StrEnum):
    """State of a job, as shown to policies."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class JobView:
    """View of a job for a policy.

    Args:
        id: Id of the job, unique in the study.
        demand: Device kind -> demand of the job there, with its remaining `seconds`. It cannot run on other kinds.
        state: Waiting, running or suspended.
        devices: Names of its devices, first the one that holds its state; empty unless it runs.
        share: Compute of the job on its device, in units of `Demand.compute`; None: as in its demand.
        since: Time at which it entered its state: arrival, start or resumption, suspension.
        turn_since: Start of the current turn of a running job, which is the time of the plan if a turn has just ended;
            None in the first turn since `since`.
        ran: Seconds on devices so far.
        trial_group: Name of its TrialGroup, whose makespan counts, or None.
        budget: Target epoch; None if unknown.
        epoch: Epochs trained so far.
        quanta: Losses measured in each turn, the newest last.
        preemptions: Number of its suspensions.
        scaling: Run time by width.
        preemptible: Whether it may be suspended, resized or moved.
        switch_seconds: Cost of suspending and resuming it.
        home: The current or last device, which holds its state; None if it never had a single device.
        study: Study of the job; losses of different studies are not comparable.
        best: Lowest training loss of any job of its study, ended jobs included; None if there is none.
        critical_path: Expected seconds from its start to the end of the last training that may follow from its
            members, if nothing waits; 0 if nothing follows, or if unknown.
    """

    id: str
    demand: Mapping[str, Demand]
    state: JobState = JobState.WAITING
    devices: tuple[str, ...] = ()
    share: float | None = None
    since: float = 0.0
    turn_since: float | None = None
    ran: float = 0.0
    trial_group: str | None = None
    budget: int | None = None
    epoch: int = 0
    quanta: tuple[TurnStats, ...] = ()
    preemptions: int = 0
    scaling: Scaling = field(default_factory=Scaling)
    preemptible: bool = True
    switch_seconds: float = 0.0
    home: str | None = None
    study: str | None = None
    best: float | None = None
    critical_path: float = 0.0

    def compute(self, device: Device) -> float:
        """Return the compute of the job on a device: its share or its demand; all of each device if it has several."""
        if len(self.devices) > 1:
            return device.capacity
        return self.demand[device.kind].compute if self.share is None else self.share

    def after(self, action: "Action") -> "JobView":
        """Return the view of the job after an action on it; after a stop its trials wait."""
        if isinstance(action, (Suspend, Stop)):
            return replace(self, state=JobState.SUSPENDED, devices=(), share=None)
        return replace(self, state=JobState.RUNNING, devices=action.devices, share=action.share)

    def turn_start(self, now: float) -> float:
        """Return the start of the current turn of a running job: of its first turn, after the switch if it has run
        before.
        """
        if self.turn_since is not None:
            return self.turn_since
        resumed = self.ran > (now - self.since) * (1 + ROUNDING)
        return self.since + (self.switch_seconds if resumed else 0.0)


@dataclass(frozen=True)
class Start:
    """Start a waiting job.

    Args:
        job: Id of the job.
        devices: Names of one device, or of several devices that the job has to itself.
        share: Share of the compute of a single device; None: as in the demand of the job.
    """

    job: str
    devices: tuple[str, ...]
    share: float | None = None


@dataclass(frozen=True)
class Suspend:
    """Suspend a running job: free its devices, and keep its state."""

    job: str


@dataclass(frozen=True)
class Resume:
    """Resume a suspended job; fields as in `Start`."""

    job: str
    devices: tuple[str, ...]
    share: float | None = None


@dataclass(frozen=True)
class Resize:
    """Continue a running job with these devices and this share; fields as in `Start`.

    A job that keeps its first device trains on meanwhile; it gets and gives back the others between two steps. With
    another first device it is moved: suspended, and resumed there.
    """

    job: str
    devices: tuple[str, ...]
    share: float | None = None


@dataclass(frozen=True)
class Stop:
    """End a job after a checkpoint; its trials wait again."""

    job: str
    reason: str


Action = Start | Suspend | Resume | Resize | Stop


@dataclass(frozen=True)
class Refusal:
    """Reason for which a job waits, in words a person can act on: "needs 9.1 GB, cuda:0 has 4.2 GB free"."""

    job: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The actions of a policy, and the reasons of all jobs without a device.

    Args:
        actions: Actions in order.
        refusals: One refusal for each job that waits or is suspended after the plan; may be computed on access.
        wake: Latest time of the next plan, in seconds of the same clock as `now`; None: only after a change.
    """

    actions: tuple[Action, ...] = ()
    refusals: Sequence[Refusal] = ()
    wake: float | None = None


class Policy(ABC):
    """Decides which job runs on which device.

    The planner calls `plan` once per turn: after a change (a job arrived or ended, a device was added, removed or
    changed), about once a second while jobs run, and at the time `wake` of the last plan, such as the end of a quantum.
    It passes the first waiting jobs, in the order of the queue (those that failed least, then by number), all running
    and suspended ones, oldest first, and the current cluster. Of many waiting jobs that are alike it passes some more
    than could start; of many that differ it passes more while a device is idle and the plan starts nothing. Profile
    jobs are included; they run, and are not preemptible.

    A live job leaves its device at its next step. Until then its view is running and not preemptible, and a job that
    the plan placed on the same device is left to the next plan. A moved job is suspended first. A device that a job of
    several gives back has a view of its own until it is free.

    A policy is a pure function of the arguments of `plan`: no clock, no I/O, no state between calls, no randomness but
    a seed given to its constructor. The simulator calls the same object as the engine, with a virtual `now`.

    A policy may return any legal plan, whose actions are taken in order:

    - Start names a waiting job, Resume a suspended one, Suspend and Resize a running one, Stop a running or suspended
      one; Suspend, Resize and Stop only a job that is `preemptible`.
    - Devices exist, are healthy, and of a kind in the job's demand. A job gets at most `Scaling.max_devices` of them,
      and a share only if its `Scaling.may_share`. A job on several devices has each to itself, and no share.
    - The compute that jobs hold on a device sums to at most `Device.capacity`, their memory to at most `Device.memory`
      bytes, the cores of all jobs on a node to at most `Node.cores`.
    - Every job that holds no device after the plan has exactly one `Refusal`.
    - `wake` lies after `now`.

    The planner checks every plan with `shoal.plan.schedule.check_plan`, which raises a `PolicyError` for an illegal
    one. This error, and any error of `plan`, ends the run. All reports are recorded, and `resume` continues, also with
    another policy.

    `shoal.testing.check_policy` checks this contract. It also checks that a job which fits an idle cluster is started.
    """

    needs_losses: ClassVar[bool] = False
    """Whether the policy compares losses. A study of a function or command without a loss refuses such a policy."""

    @abstractmethod
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""

    def with_deadline(self, deadline: float) -> "Policy":
        """Return the policy for a study whose timeout expires at `deadline`, a time of the clock of `now`; by default
        the policy itself, which then does not consider it.
        """
        return self

    def turn(self, job: JobView) -> float:
        """Return the seconds of a turn of a running job. The losses of each turn become one of `JobView.quanta`."""
        return QUANTUM

    def turn_is_over(self, job: JobView, now: float) -> bool:
        """Return whether a running job has had its turn: a turn has just ended, or has lasted long enough."""
        start = job.turn_start(now)
        return job.turn_since == now or now - start >= self.turn(job) * (1 - ROUNDING)
