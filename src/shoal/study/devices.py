"""Monitoring of a study's devices, and removal of jobs from lost or removed devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core.command import KillJob, ReleaseDevice, Step, StopJob
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.core.event import Ended, Event, Outcome
from shoal.core.job import Job, Purpose, log_path
from shoal.core.rows import DeviceRow, Kill, StudyValue, Telemetry
from shoal.host.fleet import Finder, Fleet
from shoal.host.monitor import Condition, Monitor
from shoal.study.hangs import HangDetector
from shoal.study.jobs import RunningJobs

__all__ = ["DEATH_OUTCOMES", "DeviceConditions", "DeviceTracker", "DeviceWatch", "device_row"]

MONITOR_SECONDS = 3.0
"""Seconds between two polls of the device monitor."""

DISCOVERY_SECONDS = 30.0
"""Seconds between two searches for new GPUs, each of which reads all GPUs of the machine."""

DEATH_OUTCOMES = frozenset({Outcome.CRASHED, Outcome.RAISED, Outcome.OUT_OF_MEMORY})
"""Outcomes of a job whose device may be lost."""


@dataclass(frozen=True)
class DeviceConditions:
    """The device monitor has polled the devices; one without a condition is unchanged since its discovery.

    `discovered` is all devices that the study's setting stands for, if some of them are new; else None.
    """

    conditions: Mapping[str, Condition]
    discovered: Cluster | None = None


class DeviceTracker:
    """Tracks the devices, and ends jobs that hang or whose device is lost or removed.

    Jobs that hang and jobs on a lost device are killed, if the back end can kill jobs (else there is no
    `hang_detector`). Jobs on a removed device are stopped after a checkpoint.
    """

    def __init__(self, fleet: Fleet, find: Finder, hang_detector: HangDetector | None, directory: Path) -> None:
        self.fleet = fleet
        self._find = find
        self._hang_detector = hang_detector
        self._directory = directory
        self._rows: dict[str, DeviceRow] = {}
        self._usage: dict[str, tuple[int | None, int | None]] = {}
        self._stopped: set[str] = set()
        self._released: set[str] = set()

    def change(self, names: Sequence[str], step: Step, *, add: bool) -> None:
        """Add or remove devices at a user's request; on a DeviceError nothing is changed."""
        if add:
            self.fleet.add(names, self._find)
        else:
            self.fleet.remove(names)
        step.write(StudyValue("fleet", self.fleet.record()))
        self.write_changes(step)

    def write_changes(self, step: Step) -> None:
        """Write the rows of devices that are new or have changed."""
        rows = {device.name: device_row(node, device) for node, device in self.fleet.with_held_memory}
        step.write(*(replace(row, time=step.time) for name, row in rows.items() if self._rows.get(name) != row))
        self._rows = rows

    def apply_conditions(self, seen: DeviceConditions, step: Step) -> str:
        """Apply the conditions that the monitor reported; return a note for the user about new devices, or ""."""
        self.fleet.apply(seen.conditions)
        new = () if seen.discovered is None else self.fleet.add_discovered(seen.discovered)
        self.write_changes(step)
        usage = {name: (x.utilisation, x.memory_used) for name, x in seen.conditions.items()}
        for name, used in usage.items():
            if used not in ((None, None), self._usage.get(name)):
                step.write(Telemetry(step.time, name, *used))
                self._usage[name] = used
        named = ", ".join(f"{device.name} ({device.kind})" for device in new)
        return f"new, and used by the study from now on: {named}" if new else ""

    def end_lost_jobs(self, running: RunningJobs, now: float, step: Step) -> None:
        """End jobs that hang, and jobs on lost or removed devices. Call this before placing jobs."""
        if self._hang_detector is not None:
            for job, seconds in self._hang_detector.poll(now):
                self._kill(
                    running, job, Kill(Outcome.HUNG, f"showed no progress for {seconds:.0f} s and was killed"), step
                )
        unusable = self.fleet.unusable
        busy: set[str] = set()
        for job, (held, device) in running.items() if unusable else ():
            if device.name not in unusable:
                continue
            busy.add(device.name)
            if self.fleet.is_lost(device.name):
                note = f"{device.name} {self.fleet.cluster.device(device.name).note}"
                self._kill(running, job, Kill(Outcome.LOST, note), step)
            elif job not in self._stopped:
                self._stopped.add(job)
                if held.purpose is not Purpose.ASSIST:  # `update_teams` stops it once its leader continues without it
                    step.command(StopJob(job))
        step.command(*map(ReleaseDevice, sorted(unusable - busy - self._released)))
        self._released = set(unusable - busy)

    def has_stopped(self, job: str) -> bool:
        """Whether a running job was asked to stop, as its device was removed."""
        return job in self._stopped

    def begin(self, job: Job) -> None:
        """Start to watch a job."""
        if self._hang_detector is not None:
            self._hang_detector.begin(job)

    def with_true_outcome(self, event: Event, running: RunningJobs) -> Event:
        """The event with its outcome corrected to HUNG or LOST if the job was killed or its device is lost."""
        if self._hang_detector is not None:
            self._hang_detector.on_event(event)
        if not isinstance(event, Ended):
            return event
        if self._hang_detector is not None:
            self._hang_detector.end(event.job)
        self._stopped.discard(event.job)
        if event.outcome not in DEATH_OUTCOMES:
            return event
        if (kill := running.killed(event.job)) is not None:
            message = f"{kill.reason}\nLog: {log_path(self._directory, event.job)}"
            return replace(event, outcome=kill.outcome, message=message)
        _, device = running[event.job]
        if self.fleet.is_lost(device.name):
            note = self.fleet.cluster.device(device.name).note
            return replace(event, outcome=Outcome.LOST, message=f"{device.name} {note}\n{event.message}")
        return event

    def _kill(self, running: RunningJobs, job: str, kill: Kill, step: Step) -> None:
        if running.killed(job) is None:
            running.kill(job, kill)
            step.command(KillJob(job))


def device_row(node: Node, device: Device) -> DeviceRow:
    """The row of a device on a node, but for its time."""
    amounts = device.memory, device.cores, device.compute, device.healthy
    reason = "" if device.healthy else device.note
    return DeviceRow(device.name, node.name, node.cores, device.kind, *amounts, reason)


class DeviceWatch:
    """Polls the device monitor every `MONITOR_SECONDS`, and at once after devices were added; looks for new GPUs.

    The monitor does not count the memory of the process `pid` as use by other programs.
    """

    def __init__(
        self,
        fleet: Fleet,
        find: Finder,
        make_monitor: Callable[[Cluster], Monitor] | None,
        clock: Callable[[], float],
        pid: int,
    ) -> None:
        self._fleet = fleet
        self._find = find
        self._found = fleet.found
        self._monitor = make_monitor(self._found) if make_monitor is not None else None
        self._clock = clock
        self._pid = pid
        self._due = clock()
        self._discovery_due = self._due + DISCOVERY_SECONDS

    def poll(self, *, at_once: bool = False) -> DeviceConditions | None:
        """The conditions of all devices; None until the next poll is due."""
        if self._monitor is None:
            return None
        if self._found is not self._fleet.found:
            self._found, at_once = self._fleet.found, True
            self._monitor.watch(self._found)
        if not at_once and self._clock() < self._due:
            return None
        self._due = self._clock() + MONITOR_SECONDS
        return DeviceConditions(self._monitor.conditions({self._pid}), self._discover())

    def _discover(self) -> Cluster | None:
        """Return all devices that the study's setting stands for, if a search is due and finds new ones; else None."""
        if not self._fleet.grows or (self._fleet.found.nodes and self._clock() < self._discovery_due):
            return None  # without any device, a search is due at each poll
        self._discovery_due = self._clock() + DISCOVERY_SECONDS
        try:
            discovered = self._find(self._fleet.setting)
        except DeviceError:  # all GPUs are lost, which the monitor reports
            return None
        return discovered if self._fleet.new_in(discovered) else None
