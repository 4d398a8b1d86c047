"""A worker's way through a job that a program of the user's does: a function or a command.

Imports no torch: the program brings what it needs, in a process of its own.
"""

import math
import re
import signal
import sys
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from shoal.cluster.device import Device
from shoal.errors import TaskError
from shoal.opaque import Command, Opaque
from shoal.pickling import loaded
from shoal.planner.event import Event, Outcome, Profiled, Reported
from shoal.planner.job import Array, Job, Workplace
from shoal.planner.orders import Orders
from shoal.trial import Report, TrialState
from shoal.worker.opaque_channel import Channel, Failed, Said
from shoal.worker.opaque_child import Child, surroundings
from shoal.worker.opaque_files import Store
from shoal.worker.opaque_watch import Watch
from shoal.worker.outcome import EndedElsewhere, log_path, outcome_of

__all__ = ["run"]

GRACE_SECONDS = 10.0
"""For a program to come to its next report, then to heed SIGTERM."""

_TURN_SECONDS = 0.05
_TAIL_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The last line of a traceback."""


def run(job: Job, device: Device, workplace: Workplace, orders: Orders) -> Iterator[Event]:
    """Train the members of a job, one after another: the planner gives it one."""
    training: Opaque = loaded(workplace.task)
    path = log_path(workplace.directory, job.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        for array in job.arrays:
            yield from _Course(job.id, array, training, device, workplace.directory, orders, log).run()


class _Phase(IntEnum):
    """How far the end of a program is."""

    RUNS = 0
    ENDS = 1
    """It is told to stop at its next report."""
    TERMINATED = 2
    KILLED = 3


class _Course:
    """A trial from the start of its program to the end of that."""

    def __init__(
        self,
        job: str,
        array: Array,
        training: Opaque,
        device: Device,
        directory: Path,
        orders: Orders,
        log: BinaryIO,
    ) -> None:
        self._job = job
        self._key = array.key
        (self._member,) = array.members
        self._training = training
        self._device = device
        self._orders = orders
        self._log = log
        self._log_began = log.tell()
        self._store = Store(directory, self._member.trial.number)
        self._reports: list[Report] = []  # all of the trial that are known here
        self._first = True  # whether the program has made no report since it was started
        self._waits = not isinstance(training, Command)  # whether it waits for an answer to its reports
        self._heard = 0.0
        self._phase, self._until = _Phase.RUNS, math.inf
        self._reached = self._stopping = self._leaving = self._silent = False
        self._failure: Failed | None = None

    def run(self) -> Iterator[Event]:
        """Yields the reports of the trial, and what was learnt of its cost.

        Raises:
            EndedElsewhere: the program failed.
            TaskError: it ended without a report, or its reports break their contract.
        """
        self._store.begin()
        self._reports = list(self._store.reports)
        missing = [x for x in self._reports if self._member.start < x.epoch <= self._member.target]
        yield from (Reported(self._job, (self._with_state(report),)) for report in missing)
        if self._reports and self._reports[-1].epoch >= self._member.target:
            return
        channel = Channel(self._training.metrics if isinstance(self._training, Command) else (), self._log)
        try:
            yield from self._through(channel)
        finally:
            channel.close()

    def _through(self, channel: Channel) -> Iterator[Event]:
        trial, live = self._member.trial, self._store.live
        environment = surroundings(trial, self._device, channel.address, live, self._store.step)
        child = Child(self._training, trial, environment, self._log, live)
        try:
            self._store.note_process(child.pid)
            if child.output is not None:
                channel.read(child.output)
            watch = Watch(child.tree, self._device)
            self._heard = time.monotonic()
            while child.status() is None:
                for message in channel.wait(_TURN_SECONDS):
                    yield from self._take(message, watch)
                watch.look()
                self._orders.beat(settled=False)  # how long it may be silent is its time limit
                self._listen()
                self._advance(child)
            for message in channel.finish():
                yield from self._take(message, watch)
            yield from self._conclude(child.status() or 0, watch)
        finally:
            child.clear()

    def _take(self, message: Said | Failed, watch: Watch) -> Iterator[Event]:
        if isinstance(message, Failed):
            self._failure = message
            return
        if self._reached or self._leaving or self._silent:
            message.answer(go_on=False)
            return
        self._waits = self._waits or message.caller is not None
        fault = self._fault(message)
        if fault and message.caller is not None:
            message.answer(refused=fault)
            return
        if fault:
            raise TaskError(fault)
        now = time.monotonic()
        report = Report(self._member.trial.number, self._step(message), _numbers(message), now - self._heard)
        self._heard = now
        self._first = False
        self._reports = [*(x for x in self._reports if x.epoch < report.epoch), report]
        self._reached = report.epoch == self._member.target
        if message.caller is not None:
            self._store.put_aside(self._reports)
        else:
            self._store.keeps_itself()
        found = watch.report(report.seconds)
        if self._reached:
            found = found or watch.finish()
        if report.epoch > self._member.start:  # else it repeats what it had reported before
            yield Reported(self._job, (self._with_state(report),))
        if found is not None:
            yield Profiled(self._job, self._key, found)
        self._listen()
        message.answer(go_on=self._phase is _Phase.RUNS and not self._reached)
        if self._reached:
            self._end(GRACE_SECONDS if self._waits else 0)

    def _fault(self, message: Said) -> str:
        """What is wrong with a report; "" if nothing is."""
        for name, value in message.metrics.items():
            wanted = not isinstance(self._training, Command) or name in self._training.metrics
            if wanted and (isinstance(value, bool) or not isinstance(value, (int, float))):
                return f"the metric {name!r} must be a number, got {value!r}"
            if wanted and isinstance(value, int) and abs(value) > sys.float_info.max:
                return f"the metric {name!r} is an integer too large for a float, of {len(str(abs(value)))} digits"
        step = message.step
        if step is None:
            return ""
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            return f"`step` of a report must be a whole number, at least 1, got {step!r}"
        expected = self._next()
        if step != expected and not (self._first and (self._store.went_on or step <= self._member.start + 1)):
            return (
                f"`step` counts the reports of a trial, as its budget does: 1, 2, 3, ...; after {expected - 1} came "
                f"{step}. Report at every step that is counted, or leave `step` out"
            )
        return ""

    def _step(self, message: Said) -> int:
        step: int = self._next() if message.step is None else message.step
        return min(step, self._member.target)

    def _next(self) -> int:
        """The step of a report that does not say it."""
        if self._first:
            return self._store.step + 1
        return self._reports[-1].epoch + 1

    def _listen(self) -> None:
        """Whether the trial is to stop now, or is over."""
        if self._orders.stopping() and not self._stopping:
            self._stopping = True
            self._end(GRACE_SECONDS if self._waits else 0)
        for change in self._orders.changes():
            if self._member.trial.number in change.leave:
                self._leaving = True
                self._end(0)

    def _end(self, seconds: float) -> None:
        """The program is to end; from so many seconds on it is told so by signals."""
        self._phase = max(self._phase, _Phase.ENDS)
        if self._phase is _Phase.ENDS:
            self._until = min(self._until, time.monotonic() + seconds)

    def _advance(self, child: Child) -> None:
        """Go on with the end of the program when it is time."""
        now = time.monotonic()
        if self._phase is _Phase.RUNS and now - self._heard > self._training.time_limit:
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

    def _conclude(self, status: int, watch: Watch) -> Iterator[Event]:
        """The program has ended.

        One that ends by itself before its budget is used has no more to learn: its last report stands for the rest.
        """
        if self._reached or self._leaving:
            return
        number, target = self._member.trial.number, self._member.target
        if self._silent:
            said = "has never reported" if self._first else "has not reported any more"
            reason = (
                f"{self._training.name} {said} for {self._training.time_limit:g} s, its time limit; "
                f"if it needs longer, raise that (time_limit=, --time-limit)\nLog: {self._log.name}"
            )
            epoch = self._reports[-1].epoch if self._reports else self._member.start
            yield Reported(self._job, (Report(number, epoch, state=TrialState.FAILED, reason=reason),))
            return
        if self._failure is not None:
            raise EndedElsewhere(Outcome(self._failure.outcome), self._failure.message)
        if self._stopping:
            return
        if status != 0:
            raise self._broken(status)
        if not self._reports:
            raise TaskError(f"{self._training.name} ended without a report; {self._remedy()}")
        if (found := watch.finish()) is not None:
            yield Profiled(self._job, self._key, found)
        last = self._reports[-1]
        yield Reported(self._job, (Report(number, target, last.metrics, 0.0, TrialState.PAUSED),))

    def _broken(self, status: int) -> EndedElsewhere:
        """A program that ended with another status than 0 has its last lines shown."""
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
        # The way it ended comes last: two alike are known by it, whatever the order of its last lines.
        raised = f": {lines[-1].strip()}" if _TRACEBACK in lines and _RAISED.match(lines[-1]) else ""
        return EndedElsewhere(
            outcome, f"the last output of {self._training.name}:\n{tail}\n{self._training.name} {how}{raised}"
        )

    def _remedy(self) -> str:
        if not isinstance(self._training, Command):
            return "call shoal.report({...}) in it"
        example = ", ".join(f'"{name}": 0.5' for name in self._training.metrics)
        return f"it is to print lines such as {{{example}}}, or to call shoal.report"

    def _with_state(self, report: Report) -> Report:
        state = TrialState.PAUSED if report.epoch >= self._member.target else TrialState.RUNNING
        return Report(report.trial, report.epoch, report.metrics, report.seconds, state)


def _numbers(message: Said) -> dict[str, float]:
    """The metrics of a report; what else a line of output holds is left out."""
    values = message.metrics.items()
    return {name: float(x) for name, x in values if isinstance(x, (int, float)) and not isinstance(x, bool)}
