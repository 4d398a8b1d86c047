"""Where one job of a simulation stands."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor, inf

from shoal.backend.simulated_job import SimulatedJob
from shoal.core.device import Device
from shoal.core.event import TurnStats
from shoal.schedule.action import JobState
from shoal.schedule.base import JobView

__all__ = ["Life"]

_ROUNDING = 1e-9


@dataclass(eq=False)
class Life:
    """A job on its way; its progress is a fraction of the whole job.

    Args:
        job: what it is.
        number: jobs arrived before it.
        since: when it came into its state, in seconds.
        state: waiting, running or suspended.
        devices: names of those that it holds.
        share: of its one device's compute, or None.
        compute: what it is promised of each device that it holds.
        progress: made up to `updated`.
        saved: progress that outlives the loss of its device.
        ran: seconds on devices up to `updated`.
        overhead: seconds before it makes progress again.
        pace: seconds for the whole job at its present speed; inf: it stands still.
        updated: when all this was true.
        began: when it came to its present devices.
        version: rises whenever its end is expected at another time.
        reached: when its loss came to the target; None: not yet.
        quanta: turns measured so far.
        turn_progress: at the beginning of the turn that is not measured yet.
        turn_ran: `ran` at that time.
        home: the device that it was on last, alone.
    """

    job: SimulatedJob
    number: int
    since: float
    state: JobState = JobState.WAITING
    devices: tuple[str, ...] = ()
    share: float | None = None
    compute: dict[str, float] = field(default_factory=dict)
    progress: float = 0.0
    saved: float = 0.0
    ran: float = 0.0
    overhead: float = 0.0
    pace: float = inf
    updated: float = 0.0
    began: float = 0.0
    version: int = 0
    reached: float | None = None
    quanta: tuple[TurnStats, ...] = ()
    turn_progress: float = 0.0
    turn_ran: float = 0.0
    home: str | None = None

    def advance(self, now: float) -> None:
        """Let a running job go on to `now`, at the speed it has had."""
        passed = now - self.updated
        self.updated = now
        if passed <= 0:
            return
        self.ran += passed
        idle = min(passed, self.overhead)
        self.overhead -= idle
        if passed > idle and self.pace < inf:
            before = self.progress
            self.progress = min(1.0, before + (passed - idle) / self.pace) if self.pace else 1.0
            if self.reached is None and self.progress >= self.job.goal - _ROUNDING:
                self.reached = now - max(0.0, self.progress - self.job.goal) * self.pace

    def end(self) -> float:
        """When it will have ended if its speed stays; inf if it stands still."""
        left = 1.0 - self.progress
        return self.updated + self.overhead + (left * self.pace if left > 0 else 0.0)

    def begin(self, devices: Sequence[Device], share: float | None, overhead: float, now: float) -> None:
        """Come to devices, on which it makes no progress for the first `overhead` seconds."""
        self.devices = tuple(device.name for device in devices)
        self.home = self.devices[0] if len(devices) == 1 else None
        self.share, self.pace = share, inf
        self.overhead += overhead  # what has not been paid before is still due
        if len(devices) > 1:
            self.compute = {device.name: device.capacity for device in devices}
        else:
            self.compute = {
                device.name: self.job.demand[device.kind].compute if share is None else share for device in devices
            }
        self.updated = self.began = now
        self.version += 1
        if self.state is not JobState.RUNNING:
            self.state, self.since = JobState.RUNNING, now
            self.turn_progress, self.turn_ran = self.progress, self.ran

    def leave(self, state: JobState, now: float) -> None:
        """Give up its devices with its state kept."""
        self.measure(0.0)
        self.saved = self.progress
        self._off(state, now)

    def lose(self, now: float) -> None:
        """Be thrown off its devices, back to the last checkpoint."""
        job = self.job
        if job.checkpoint_every < inf:
            alone = min(demand.seconds for demand in job.demand.values())
            kept = floor(self.progress * alone / job.checkpoint_every + _ROUNDING) * job.checkpoint_every
            self.saved = max(self.saved, kept / alone if alone else 0.0)
        self.progress = self.saved
        self._off(JobState.WAITING, now)

    def _off(self, state: JobState, now: float) -> None:
        self.state, self.since, self.devices, self.share = state, now, (), None
        if state is JobState.WAITING:
            self.overhead = 0.0
        self.version += 1

    def measure(self, least: float) -> None:
        """End a turn that has lasted at least so many seconds and seen a loss, and write it down."""
        steps = len(self.job.curve)
        if not steps or self.ran - self.turn_ran < least - _ROUNDING:
            return
        first, last = (floor(progress * steps + _ROUNDING) for progress in (self.turn_progress, self.progress))
        losses = self.job.curve[first:last]
        if not len(losses):
            return
        turn = TurnStats(
            float(max(losses)), float(min(losses)), float(losses[-1]), len(losses), self.ran - self.turn_ran
        )
        self.quanta = (*self.quanta, turn)
        self.turn_progress, self.turn_ran = self.progress, self.ran

    def view(self, best: float | None) -> JobView:
        """As a policy sees it, `best` being the lowest loss of its study."""
        job = self.job
        left = (1.0 - self.progress) * job.dilation
        epochs = 0 if job.budget is None else floor((job.budget - job.epoch) * self.progress + _ROUNDING)
        demand = job.demand
        if left != 1.0:
            demand = {kind: replace(whole, seconds=whole.seconds * left) for kind, whole in demand.items()}
        return JobView(
            job.id,
            demand,
            self.state,
            self.devices,
            self.share,
            self.since,
            self.ran,
            job.group,
            job.budget,
            job.epoch + epochs,
            self.quanta,
            job.scaling,
            job.preemptible,
            job.switch_seconds,
            self.home,
            job.study,
            best,
        )
