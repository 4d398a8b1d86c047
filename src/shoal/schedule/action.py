"""What a plan is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Action", "JobState", "Plan", "Refusal", "Resize", "Resume", "Start", "Stop", "Suspend"]


class JobState(StrEnum):
    """What a policy may know of a job's life."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class Start:
    """Start a waiting job.

    Args:
        job: its id.
        devices: on one device, or on several which it then has to itself.
        share: of the one device's compute; None: what its demand says.
    """

    job: str
    devices: tuple[str, ...]
    share: float | None = None


@dataclass(frozen=True)
class Suspend:
    """Take a running job off its devices and keep its state."""

    job: str


@dataclass(frozen=True)
class Resume:
    """Continue a suspended job, as `Start` would begin it."""

    job: str
    devices: tuple[str, ...]
    share: float | None = None


@dataclass(frozen=True)
class Resize:
    """Let a running job go on with these devices and this share, as `Start` would begin it."""

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
    """Why a job waits, in words a person can act on: "needs 9.1 GB, cuda:0 has 4.2 GB free"."""

    job: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """What to do now, and why every job that stays off the devices does.

    Args:
        actions: in order.
        refusals: one for each job that waits or is suspended after it; may be made only when they are looked at.
        wake: when to ask again at the latest, in seconds of the same clock as `now`; None: when something has changed.
    """

    actions: tuple[Action, ...] = ()
    refusals: Sequence[Refusal] = ()
    wake: float | None = None
