"""The contract of a placement policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.cluster.device import Cluster
from shoal.cost.demand import Demand

__all__ = [
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


class JobState(StrEnum):
    """What a policy may know of a job's life."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class JobView:
    """A job as a policy sees it.

    Args:
        id: unique in the study.
        demand: device kind -> what the job takes there; a kind that is absent cannot run it.
        state: waiting, running or suspended.
        devices: names of the devices it holds; empty while it waits.
    """

    id: str
    demand: Mapping[str, Demand]
    state: JobState = JobState.WAITING
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """Start a waiting job on a device."""

    job: str
    device: str


@dataclass(frozen=True)
class Suspend:
    """Take a running job off its devices and keep its state."""

    job: str


@dataclass(frozen=True)
class Resume:
    """Continue a suspended job on a device."""

    job: str
    device: str


@dataclass(frozen=True)
class Resize:
    """Let a running job go on with these devices."""

    job: str
    devices: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """End a job after a checkpoint; its trials wait again."""

    job: str
    reason: str


Action = Start | Suspend | Resume | Resize | Stop


@dataclass(frozen=True)
class Refusal:
    """Why a job waits, in words a person can act on: "needs 9.1 GB, cuda:0 has 4.2 GB free"."""

    job: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What to do now, in order, and why every job that stays off the devices does."""

    actions: tuple[Action, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class Policy(ABC):
    """Decides which job runs where.

    The engine calls `plan` whenever something has changed: a job arrived or ended, a device came or went. It passes
    every job that is waiting, running or suspended, oldest first, and the cluster as it is. A policy is a pure
    function of these arguments: no clock, no I/O, no state between calls, no randomness but a seed given to its
    constructor. The simulator calls the same object with a virtual `now`.

    Only Start is carried out so far; a plan with another action is refused with a `PolicyError`.

    Legal plans: Start names a waiting job and a healthy device of a kind in the job's demand; the demands of all jobs
    on a device sum to at most `Device.capacity` in compute and `Device.memory` in bytes, and the cores of all jobs on a
    node to at most `Node.cores`; every waiting job that is not started has exactly one `Refusal`.
    `shoal.schedule.check_plan` holds a plan against these rules, and the engine runs it on every plan.
    """

    @abstractmethod
    def plan(self, jobs: Sequence[JobView], cluster: Cluster, now: float) -> Plan:
        """Decide what to do at `now` (seconds)."""
