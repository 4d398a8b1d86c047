"""Looks after the devices and the jobs of a running study: what a monitor sees, what users ask for, what hangs."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.backend.base import Backend
from shoal.cluster.monitor import Monitor
from shoal.core.device import Cluster, Device
from shoal.core.errors import DeviceError
from shoal.core.event import Ended, Event, Outcome
from shoal.core.job import Job
from shoal.journal.requests import Request, answer
from shoal.journal.writer import Journal
from shoal.planner.fleet import Finder, Fleet
from shoal.planner.silence import Silence
from shoal.worker.outcome import log_path

__all__ = ["MONITOR_SECONDS", "Upkeep"]

MONITOR_SECONDS = 3.0
"""Between two looks at the devices."""

Running = Mapping[str, tuple[Job, Device]]
"""Id of each running job -> the job and its device."""

_DIED = frozenset({Outcome.CRASHED, Outcome.RAISED, Outcome.OUT_OF_MEMORY})
"""How a job may end because its device is lost."""


class Upkeep:
    """Says which devices there are now, and ends jobs that must not go on where they are.

    Jobs on a device that is lost, and jobs that hang, are killed; those on a device that was removed are stopped, after
    a checkpoint. What becomes of their trials is the engine's business.

    Args:
        fleet: the devices.
        backend: runs the jobs.
        journal: of the study; users are answered in its directory.
        find: finds devices that a user adds.
        make_monitor: makes what looks at the devices; None: nobody does.
        silence: knows which jobs hang.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        fleet: Fleet,
        backend: Backend,
        journal: Journal,
        find: Finder,
        make_monitor: Callable[[Cluster], Monitor] | None = None,
        silence: Silence | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = fleet
        self._backend = backend
        self._journal = journal
        self._find = find
        self._monitor = make_monitor(fleet.given) if make_monitor is not None else None
        self._silence = silence or Silence()
        self._clock = clock
        self._due = clock()
        self._killed: dict[str, tuple[Outcome, str]] = {}
        self._stopped: set[str] = set()
        self._vacated: set[str] = set()
        self._unrecorded = False

    def change(self, request: Request) -> None:
        """Change the devices as a user asks, and say so; or say why not.

        What was recorded and not answered before the engine was killed is only answered.
        """
        fleet, error = self.fleet, ""
        if request.name != self._journal.study.get("fleet", {}).get("request"):
            try:
                if request.verb == "add":
                    fleet.add(request.devices, self._find)
                else:
                    fleet.remove(request.devices)
            except DeviceError as refused:
                error = str(refused)
            else:
                self._journal.put("fleet", {**fleet.record(), "request": request.name})
                self._journal.devices_are(fleet.whole)
                self._renew()
        answer(self._journal.directory, request, fleet.used, error)

    def watch(self, running: Running, *, record: bool = True) -> None:
        """Look at the devices and the jobs, and end those that must not go on where they are.

        It is to be called before anything is placed, and after all that came of jobs was heard.

        Args:
            running: the jobs.
            record: whether the journal is told of the devices; false where it has no room.
        """
        if self._clock() >= self._due:
            self._look()
        if self._backend.concurrent:  # else nobody is there to kill one that hangs
            for job, seconds in self._silence.look(self._clock()):
                self._kill(job, Outcome.HUNG, f"showed no progress for {seconds:.0f} s and was killed")
        self._clear(running)
        if record and self._unrecorded:
            self._journal.devices_are(self.fleet.whole)
            self._unrecorded = False

    def begin(self, job: Job) -> None:
        """A job starts."""
        self._silence.begin(job)

    def hear(self, event: Event, running: Running) -> Event:
        """An event as it is to be understood: a job that died may have been killed, or its device may be lost."""
        self._silence.hear(event)
        if not isinstance(event, Ended):
            return event
        self._silence.end(event.job)
        self._stopped.discard(event.job)
        outcome, why = self._killed.pop(event.job, (event.outcome, ""))
        if event.outcome not in _DIED:
            return event
        if why:
            return replace(event, outcome=outcome, message=f"{why}\nLog: {self._log(event.job)}")
        _, device = running[event.job]
        self._look()
        if self.fleet.is_lost(device.name):
            note = self.fleet.cluster.device(device.name).note
            return replace(event, outcome=Outcome.LOST, message=f"{device.name} {note}\n{event.message}")
        return event

    def _renew(self) -> None:
        """Look at the devices that there are now."""
        if self._monitor is not None:
            self._monitor.watch(self.fleet.given)
            self._look()

    def _look(self) -> None:
        if self._monitor is not None:
            self.fleet.see(self._monitor.look({os.getpid()}))
            self._unrecorded = True
        self._due = self._clock() + MONITOR_SECONDS

    def _clear(self, running: Running) -> None:
        """Let no job be on a device that is gone, and nothing be kept there."""
        gone = self.fleet.gone
        busy: set[str] = set()
        for job, device in running.values():
            busy.add(device.name)
            if device.name not in gone:
                continue
            if self.fleet.is_lost(device.name):
                self._kill(job.id, Outcome.LOST, f"{device.name} {self.fleet.cluster.device(device.name).note}")
            elif job.id not in self._stopped:
                self._stopped.add(job.id)
                self._backend.stop(job.id)
        for name in gone - busy - self._vacated:
            self._backend.vacate(name)
        self._vacated = set(gone - busy)

    def _kill(self, job: str, outcome: Outcome, why: str) -> None:
        """Kill a job, once."""
        if job not in self._killed:
            self._killed[job] = outcome, why
            self._backend.kill(job)

    def _log(self, job: str) -> str:
        return str(log_path(self._journal.directory, job))
