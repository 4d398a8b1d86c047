"""Plans of a policy: actions, refusals, and the states of a job."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Action", "JobState", "Plan", "Refusal", "Resize", "Resume", "Start", "Stop", "Suspend"]


class JobState(StrEnum):
    """State of a job, as shown to policies."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"


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
    """Continue a running job with these devices and this share; fields as in `Start`."""

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
