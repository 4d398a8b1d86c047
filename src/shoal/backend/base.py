"""The contract of a back end: what carries jobs to processes and their reports back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from shoal.cluster.device import Device
from shoal.planner.event import Dropped, Ended, Event, Outcome, Paced, Profiled, Reported, Surveyed
from shoal.planner.job import Change, Job, Workplace
from shoal.planner.orders import Orders
from shoal.schedule.action import Refusal

__all__ = [
    "Backend",
    "Dropped",
    "Ended",
    "Event",
    "Orders",
    "Outcome",
    "Paced",
    "Profiled",
    "Reported",
    "Runner",
    "Surveyed",
    "Workplace",
]


Runner = Callable[[Job, Device, Workplace, Orders], Iterator[Event]]
"""Does a job: `run(job, device, workplace, orders)` yields events; exceptions are the back end's to translate.

It asks `orders.stopping()` between steps and, when that is true, checkpoints and returns. The back end adds `Ended`. It
may look for `orders.changes()`; a member of theirs that it has not reported on when it returns counts as not trained.
"""


class Backend(ABC):
    """Starts jobs on devices and says what became of them.

    The engine creates one per study, calls `start` for every `Start` of a plan, and `poll` in a loop until each job has
    `Ended`; then `close`. A failure of user code, of a process or of memory ends only the job it happened in and is an
    `Ended` with that outcome, never an exception of `poll`. A back end that cannot suspend, resume or resize says so
    with a `Refusal`; the engine then lets the job run on.
    """

    concurrent: ClassVar[bool] = True
    """Whether jobs run at the same time, so that those on one device slow each other down."""
    elastic: ClassVar[bool] = True
    """Whether `change` reaches the jobs, and arrays may hold members that stand at different epochs."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace

    @abstractmethod
    def start(self, job: Job, device: Device) -> None:
        """Begin a job on a device and return at once."""

    @abstractmethod
    def stop(self, job: str) -> None:
        """Ask a job to checkpoint and end; `Ended` follows. A job that has ended already is left alone."""

    @abstractmethod
    def change(self, job: str, change: Change) -> None:
        """Let members of a job leave, or others join. A job that has ended already is left alone."""

    @abstractmethod
    def suspend(self, job: str) -> Refusal | None:
        """Take a job off its device, keeping its state."""

    @abstractmethod
    def resume(self, job: str, device: Device) -> Refusal | None:
        """Continue a suspended job."""

    @abstractmethod
    def resize(self, job: str, devices: Sequence[Device]) -> Refusal | None:
        """Let a job go on with these devices."""

    @abstractmethod
    def poll(self, timeout: float) -> list[Event]:
        """Events since the last call, in the order they happened; waits up to `timeout` seconds for the first."""

    @abstractmethod
    def close(self) -> None:
        """End everything that still runs, without a checkpoint, and free all processes. May be called twice."""
