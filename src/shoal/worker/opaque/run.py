"""Runs a job of a function or a command, each trial as a program in a process of its own.

Imports no torch: the program imports what it needs.
"""

import math
import re
import signal
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from shoal.core.array import Array
from shoal.core.device import Device
from shoal.core.errors import TaskError
from shoal.core.event import Event, Outcome, Profiled, Reported
from shoal.core.job import Job, WorkerContext, log_path
from shoal.core.trial import Report, TrialState
from shoal.opaque import Command, Opaque
from shoal.pickling import loaded
from shoal.worker.control import JobControl
from shoal.worker.failures import EndedElsewhere, outcome_of
from shoal.worker.opaque.channel import OutputReports, ProgramChannel
from shoal.worker.opaque.child import ProgramProcess, surroundings
from shoal.worker.opaque.files import ProgramFiles
from shoal.worker.opaque.reports import ProgramReport, ProgramReports
from shoal.worker.opaque.usage_monitor import UsageMonitor

__all__ = ["run"]

GRACE_SECONDS = 10.0
"""Seconds for a program to reach its next report, and again to end after SIGTERM."""

_TURN_SECONDS = 0.05
_TAIL_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The last line of a traceback."""


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Train the members of a job, one after another; the planner gives a job one."""
    training: Opaque = loaded(worker_context.task)
    path = log_path(worker_context.directory, job.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        for array in job.arrays:
            yield from _ProgramRun(job.id, array, training, device, worker_context.directory, control, log).run()


class _Phase(IntEnum):
    """Phases of a program, up to its end."""

    RUNS = 0
    ENDS = 1
    """The answer to its next report tells the program to stop."""
    TERMINATED = 2
    KILLED = 3


class _ProgramRun:
    """Runs the program of one trial, from its start to its end."""

    def __init__(
        self,
        job: str,
        array: Array,
        training: Opaque,
        device: Device,
        directory: Path,
        control: JobControl,
        log: BinaryIO,
    ) -> None:
        self._job = job
        self._key = array.key
        (self._member,) = array.members
        self._training = training
        self._device = device
        self._control = control
        self._log = log
        self._log_began = log.tell()
        self._store = ProgramFiles(directory, self._member.trial.number)
        self._metrics = training.metrics if isinstance(training, Command) else ()
        self._reports = ProgramReports(self._member.trial.number, [], 0)  # all reports of the trial so far
        self._told = self._member.start  # last epoch that the engine has
        self._waits = not isinstance(training, Command)  # whether the program waits for answers to its reports
        self._last_report = 0.0
        self._phase, self._until = _Phase.RUNS, math.inf
        self._reached = self._stopping = self._leaving = self._silent = False
        self._lags = False  # whether the program's own state is ahead of its reports
        self._failure: EndedElsewhere | None = None

    def run(self) -> Iterator[Event]:
        """Yields the reports of the trial, and profiles.

        Raises:
            EndedElsewhere: The program failed.
            TaskError: The program ended without a report, or a report is invalid.
        """
        self._begin()
        for report in self._reports.reports:
            yield from self._reported(report)
        if self._reports.last >= self._member.target:
            return
        yield from self._run_program()
        if self._lags and not self._stopping and not self._leaving:
            self._lags, self._phase, self._until = False, _Phase.RUNS, math.inf
            self._store.start_over()
            self._begin()
            yield from self._run_program()

    def _begin(self) -> None:
        store, trial = self._store, self._member.trial.number
        store.begin(self._metrics)
        wanted = self._metrics or None
        self._reports = ProgramReports(trial, store.reports, store.step, wanted, self._told, own=store.went_on)

    def _run_program(self) -> Iterator[Event]:
        """Start the program and follow it to its end."""
        channel = ProgramChannel()
        try:
            if not self._metrics:
                yield from self._follow(channel, self._log)
                return
            with self._store.output.open("ab") as output:
                channel.read(OutputReports(self._store.output, self._metrics, self._log))
                yield from self._follow(channel, output)
        finally:
            channel.close()
        self._store.gather(self._metrics)

    def _follow(self, channel: ProgramChannel, output: BinaryIO) -> Iterator[Event]:
        trial, live = self._member.trial, self._store.live
        environment = surroundings(trial, self._device, channel.address, live, self._store.step)
        child = ProgramProcess(self._training, trial, environment, output, self._log, live)
        try:
            self._store.note_process(child.pid)
            watch = UsageMonitor(child.tree, self._device)
            self._last_report = time.monotonic()
            while child.status() is None:
                for message in channel.wait(_TURN_SECONDS):
                    yield from self._take(message, watch)
                watch.look()
                self._control.beat(settled=False)  # its time limit finds a program that hangs
                self._poll_requests()
                self._advance(child)
            for message in channel.finish():
                yield from self._take(message, watch)
            yield from self._conclude(child.status() or 0, watch)
        finally:
            child.clear()

    def _take(self, message: ProgramReport | EndedElsewhere, watch: UsageMonitor) -> Iterator[Event]:
        if isinstance(message, EndedElsewhere):
            self._failure = message
            return
        if self._reached or self._leaving or self._silent or self._lags:
            message.answer(go_on=False)
            return
        self._waits = self._waits or message.caller is not None
        fault = self._reports.fault(message)
        if fault and message.caller is not None:
            message.answer(refused=fault)
            return
        if fault:
            raise TaskError(fault)
        if self._reports.skips(message):
            self._lags = True
            self._end(0)
            message.answer(go_on=False)
            return
        now, stopping = time.monotonic(), self._stopping
        report = self._reports.add(message, now - self._last_report)
        self._last_report = now
        self._reached = report.epoch == self._member.target
        if message.caller is not None:
            self._store.put_aside(self._reports.reports)
        found = watch.report(report.seconds)
        if self._reached:
            found = found or watch.finish()
        yield from self._reported(report)
        if found is not None:
            yield Profiled(self._job, self._key, found)
        self._poll_requests()
        message.answer(go_on=self._phase is _Phase.RUNS and not self._reached, reached=self._reached)
        if self._reached:
            self._end(GRACE_SECONDS if self._waits else 0)
        elif stopping and not self._waits:  # its state is now as of its last report
            self._end(0)

    def _poll_requests(self) -> None:
        """Poll requests: to stop the job, or to remove the trial."""
        if self._control.stopping() and not self._stopping:
            self._stopping = True
            self._end(GRACE_SECONDS)
        for change in self._control.changes():
            if self._member.trial.number in change.leave:
                self._leaving = True
                self._end(0)

    def _end(self, seconds: float) -> None:
        """End the program at its next report, or by signals after so many seconds."""
        self._phase = max(self._phase, _Phase.ENDS)
        if self._phase is _Phase.ENDS:
            self._until = min(self._until, time.monotonic() + seconds)

    def _advance(self, child: ProgramProcess) -> None:
        """Check the time limit, and send the next signal when it is due."""
        now = time.monotonic()
        if self._phase is _Phase.RUNS and now - self._last_report > self._training.time_limit:
            self._silent = True
            self._end(0)
        if now < self._until:
            return
        if self._phase is _Phase.ENDS:
            child.terminate()
            self._phase, self._until = _Phase.TERMINATED, now + GRACE_SECONDS
        elif self._phase is _Phase.TERMINATED:
            child.clear()
            self._phase, self._until = _Phase.KILLED, math.inf

    def _conclude(self, status: int, watch: UsageMonitor) -> Iterator[Event]:
        """Report or raise how the program ended.

        If it ended by itself before its budget was used, its last report counts for the rest of the budget.
        """
        if self._reached or self._leaving:
            return
        number, target = self._member.trial.number, self._member.target
        if self._silent:
            said = "has never reported" if self._reports.begins else "has not reported any more"
            reason = (
                f"{self._training.name} {said} for {self._training.time_limit:g} s, its time limit; "
                f"if it needs longer, raise that (time_limit=, --time-limit)\nLog: {self._log.name}"
            )
            epoch = self._reports.last or self._member.start
            yield Reported(self._job, (Report(number, epoch, state=TrialState.FAILED, reason=reason),))
            return
        if self._failure is not None:
            raise self._failure
        if self._stopping or self._lags:
            return
        if status != 0:
            raise self._broken(status)
        if self._reports.begins and self._store.went_on and not self._store.ended:
            self._lags = True  # it may have been killed after it saved the last step and before it reported that
            return
        if not self._reports.reports or (self._reports.begins and not self._store.step and not self._store.ended):
            raise TaskError(f"{self._training.name} ended without a report; {self._remedy()}")
        self._store.note_end()
        if (found := watch.finish()) is not None:
            yield Profiled(self._job, self._key, found)
        last = self._reports.reports[-1]
        yield Reported(self._job, (Report(number, target, last.metrics, 0.0, TrialState.PAUSED),))

    def _broken(self, status: int) -> EndedElsewhere:
        """The error of a program with a status other than 0; its message shows the last lines of the log."""
        how = f"exited with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
        self._log.flush()
        with open(self._log.name, "rb") as file:
            file.seek(self._log_began)
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        tail = "\n".join(lines)
        outcome = outcome_of(RuntimeError(tail))
        if outcome is Outcome.RAISED and any("OutOfMemoryError" in line or "MemoryError" in line for line in lines):
            outcome = Outcome.OUT_OF_MEMORY
        if outcome is Outcome.RAISED and status < 0:
            outcome = Outcome.CRASHED
        # The last line says how it ended: retries compare failures by it, as the order of other lines may differ.
        raised = f": {lines[-1].strip()}" if _TRACEBACK in lines and _RAISED.match(lines[-1]) else ""
        return EndedElsewhere(
            outcome, f"the last output of {self._training.name}:\n{tail}\n{self._training.name} {how}{raised}"
        )

    def _remedy(self) -> str:
        if not isinstance(self._training, Command):
            return "call shoal.report({...}) in it"
        example = ", ".join(f'"{name}": 0.5' for name in self._training.metrics)
        return f"print lines such as {{{example}}}, or call shoal.report"

    def _reported(self, report: Report) -> Iterator[Event]:
        """Yields a report, unless the engine has it or it is beyond the target."""
        if not self._told < report.epoch <= self._member.target:
            return
        self._told = report.epoch
        state = TrialState.PAUSED if report.epoch == self._member.target else TrialState.RUNNING
        told = Report(report.trial, report.epoch, report.metrics, report.seconds, state)
        yield Reported(self._job, (told,))
