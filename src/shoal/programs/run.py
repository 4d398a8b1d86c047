"""Runs a job of a function or a command, each trial as a program in its own process.

The module imports no torch; the program imports what it needs.
"""

import math
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from shoal.core.array import Array
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.errors import TaskError
from shoal.core.event import Event, Outcome, Profiled, Reported
from shoal.core.job import Job, WorkerContext, log_path
from shoal.core.trial import Report, TrialState
from shoal.host.pickling import loaded
from shoal.programs.files import ProgramFiles
from shoal.programs.memory_limits import MemoryLimits
from shoal.programs.opaque import Command, Function, Opaque
from shoal.programs.process import ProgramProcess, UsageMonitor, program_environment
from shoal.programs.reports import OutputReports, ProgramChannel, ProgramReport, ProgramReports
from shoal.train.control import JobControl
from shoal.train.failures import ProgramFailedError, outcome_of

__all__ = ["run"]

GRACE_SECONDS = 10.0
"""Seconds for a program to reach its next report, and again to end after SIGTERM."""

_POLL_SECONDS = 0.05
_TAIL_LINES = 20
_CRASH = "Fatal Python error: "
"""Begins the output of `faulthandler`, whose first lines are the innermost frames."""
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: |$)")
"""The last line of a traceback."""


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Train the members of a job one after another. The planner gives each job one member."""
    training: Opaque = loaded(worker_context.task)
    path = log_path(worker_context.directory, job.id)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as log:
        for array in job.arrays:
            limits = MemoryLimits.of(job, device, worker_context.process_memory)
            yield from _ProgramRun(job.id, array, training, device, worker_context, control, log, limits).run()


class _Phase(IntEnum):
    RUNS = 0
    ENDS = 1
    """The answer to the next report tells the program to stop; a command is asked by SIGUSR1, if it handles that."""
    TERMINATED = 2
    KILLED = 3


@dataclass
class _Session:
    """A running program, with the beginning of its log and the `time.monotonic` of its last report or start."""

    child: ProgramProcess
    channel: ProgramChannel
    monitor: UsageMonitor
    log_began: int
    last_report: float
    awaits_answers: bool

    def close(self) -> None:
        self.child.kill_all()
        self.channel.close()
        self.monitor.close()


class _ProgramRun:
    """Runs the program of one trial, from its start to its end."""

    def __init__(
        self,
        job: str,
        array: Array,
        training: Opaque,
        device: Device,
        worker_context: WorkerContext,
        control: JobControl,
        log: BinaryIO,
        limits: MemoryLimits,
    ) -> None:
        self._job = job
        self._limits = limits
        self._key = array.key
        (self._member,) = array.members
        self._training = training
        self._device = device
        self._control = control
        self._log = log
        trial = self._member.trial
        self._files = ProgramFiles(worker_context.directory, trial.number, trial.start, worker_context.of_best)
        self._metrics = training.metrics if isinstance(training, Command) else ()
        self._reports = ProgramReports(self._member.trial.number, [], 0)  # all reports of the trial so far, by any run
        self._sent_epoch = self._member.start  # last epoch that was reported to the engine
        self._phase, self._deadline = _Phase.RUNS, math.inf
        self._reached = self._stopping = self._leaving = self._timed_out = False
        self._asked = False
        self._ahead_of_reports = False  # whether the saved state of the program is ahead of its reports
        self._failure: ProgramFailedError | None = None
        self._returning = False  # whether all of the budget is reported but for the value that the program returns
        self._returned = self._ended_study = False

    def run(self) -> Iterator[Event]:
        """Run the program; yield the reports of the trial, and profiles."""
        self._prepare()
        returning = self._files.returning
        for report in self._reports.reports:
            if not (returning and report.epoch == self._member.target):
                yield from self._reported(report)
        if self._reports.last >= self._member.target and not returning:
            return
        yield from self._run_program()
        if self._ahead_of_reports and not self._stopping and not self._leaving:
            self._ahead_of_reports, self._phase, self._deadline = False, _Phase.RUNS, math.inf
            self._files.reset()
            self._prepare()
            yield from self._run_program()

    def _prepare(self) -> None:
        files, trial = self._files, self._member.trial.number
        files.prepare(self._metrics)
        wanted = self._metrics or None
        self._reports = ProgramReports(
            trial, files.reports, files.step, wanted, self._sent_epoch, own_state=files.resumed
        )

    def _run_program(self) -> Iterator[Event]:
        channel = ProgramChannel()
        trial, live = self._member.trial, self._files.live
        output, log_began = self._log, self._log.tell()
        if self._metrics:
            output = self._files.output.open("ab")
            channel.read(OutputReports(self._files.output, self._metrics, self._log))
        environment = program_environment(trial, self._device, channel.address, live, self._files.step)
        try:
            child = ProgramProcess(self._training, trial, environment, output, self._log, live, self._limits)
        except BaseException:
            channel.close()
            raise
        finally:
            if output is not self._log:
                output.close()
        monitor = UsageMonitor(child.tree, self._device, child.inherited_memory)
        awaits_answers = not isinstance(self._training, Command)
        yield from self._run_session(_Session(child, channel, monitor, log_began, time.monotonic(), awaits_answers))

    def _run_session(self, session: _Session) -> Iterator[Event]:
        """Follow a running program to its end.

        A command's last report is yielded after its output is collected, since the trial's next job collects it, too.
        """
        last_events: list[Event] = []
        try:
            self._files.record_process(session.child.pid)
            for event in self._follow(session):
                if self._metrics and (last_events or _is_last(event)):
                    last_events.append(event)
                else:
                    yield event
        finally:
            session.close()
        if self._metrics:
            self._files.collect_output(self._metrics)
        yield from last_events

    def _follow(self, session: _Session) -> Iterator[Event]:
        child, channel = session.child, session.channel
        while child.status() is None:
            for message in channel.wait(_POLL_SECONDS):
                yield from self._handle_message(message, session)
            yield from self._end_of_study(channel)
            session.monitor.sample()
            self._control.beat(settled=False)  # a program that hangs is detected by its time limit
            self._poll_requests(session)
            self._advance_phase(session)
        for message in channel.finish():
            yield from self._handle_message(message, session)
        yield from self._end_of_study(channel)
        yield from self._finish(child.status() or 0, session)

    def _handle_message(self, message: ProgramReport | ProgramFailedError, session: _Session) -> Iterator[Event]:
        if isinstance(message, ProgramFailedError):
            self._failure = message
            return
        if self._reached or self._leaving or self._timed_out or self._ahead_of_reports:
            message.answer(go_on=False)
            return
        if message.returns:
            self._returned = True
            self._reports.replace_last(message)
            message.answer(go_on=True)
            return
        if self._returning:  # it trains on, beyond its budget
            yield from self._end_at_target(session)
            message.answer(go_on=False, reached=True)
            self._request_end(GRACE_SECONDS)
            return
        session.awaits_answers = session.awaits_answers or message.connection is not None
        error = self._reports.find_error(message)
        if error and message.connection is not None:
            message.answer(refused=error)
            return
        if error:
            raise TaskError(error)
        if self._reports.leaves_gap(message):
            self._ahead_of_reports = True
            self._request_end(0)
            message.answer(go_on=False)
            return
        now, stopping = time.monotonic(), self._stopping
        report = self._reports.add(message, now - session.last_report)
        session.last_report = now
        used = report.epoch == self._member.target
        self._returning = used and self._awaits_return(message)
        self._reached = used and not self._returning
        if self._returning:
            self._files.record_returning()
        if message.connection is not None:
            self._files.save_checkpoint(self._reports.reports)
        found = session.monitor.report(report.seconds)
        if self._reached:
            found = found or session.monitor.finish()
        if not self._returning:
            yield from self._reported(report)
        if found is not None:
            yield self._profiled(found)
        self._poll_requests(session)
        message.answer(go_on=self._phase is _Phase.RUNS and not self._reached, reached=used)
        if self._reached:
            self._request_end(GRACE_SECONDS if session.awaits_answers else 0)
        elif stopping and not session.awaits_answers and not self._asked:  # its state is that of its last report
            self._request_end(0)

    def _end_at_target(self, session: _Session) -> Iterator[Event]:
        """Yield the last report of a program that trains on instead of returning a value."""
        self._reached, self._returning = True, False
        self._files.record_returning(over=True)
        yield from self._reported(self._reports.reports[-1])
        if (found := session.monitor.finish()) is not None:
            yield self._profiled(found)

    def _profiled(self, found: Profile) -> Profiled:
        alone = isinstance(self._training, Function) and self._training.alone
        return Profiled(self._job, self._key, replace(found, compute=1.0) if alone else found)

    def _awaits_return(self, message: ProgramReport) -> bool:
        """Whether the value that the program returns, after the last report of the longest trials, is to be awaited."""
        longest = self._training.longest if isinstance(self._training, Function) else None
        return message.returns is False and (longest is None or self._member.target >= longest)

    def _end_of_study(self, channel: ProgramChannel) -> Iterator[Event]:
        asked, channel.ends_study = channel.ends_study, None
        self._ended_study = self._ended_study or asked is not None
        if asked:
            yield Reported(self._job, (), ended_by=self._member.trial.number)

    def _poll_requests(self, session: _Session) -> None:
        """Poll the requests to stop the job or to remove the trial."""
        stopping = self._control.stopping()  # before the changes: one that comes with it was sent first
        for change in self._control.changes():
            if self._member.trial.number in change.leave:
                self._leaving = True
                self._request_end(0)
        if stopping and not self._stopping:
            self._stopping = True
            self._request_end(GRACE_SECONDS)
            self._asked = not session.awaits_answers and session.child.request_end()

    def _request_end(self, seconds: float) -> None:
        """Tell the program to end at its next report; end it by signals if it has not ended after `seconds`."""
        self._phase = max(self._phase, _Phase.ENDS)
        if self._phase is _Phase.ENDS:
            self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _advance_phase(self, session: _Session) -> None:
        """Check the time limit, and send the next signal when it is due."""
        now, child = time.monotonic(), session.child
        if self._phase is _Phase.RUNS and now - session.last_report > self._training.time_limit:
            self._timed_out = True
            self._request_end(0)
        if now < self._deadline:
            return
        if self._phase is _Phase.ENDS:
            child.terminate()
            self._phase, self._deadline = _Phase.TERMINATED, now + GRACE_SECONDS
        elif self._phase is _Phase.TERMINATED:
            child.kill_all()
            self._phase, self._deadline = _Phase.KILLED, math.inf

    def _finish(self, status: int, session: _Session) -> Iterator[Event]:
        """Report how the program ended, or raise its error; its last report counts for the rest of the budget."""
        if self._reached or self._leaving:
            return
        number, target = self._member.trial.number, self._member.target
        if self._timed_out:
            said = "has never reported" if self._reports.awaits_first else "has not reported any more"
            reason = (
                f"{self._training.name} {said} for {self._training.time_limit:g} s, its time limit; "
                f"if it needs longer, raise that (time_limit=, --time-limit)\nLog: {self._log.name}"
            )
            yield self._failed_trial(reason)
            return
        if self._failure is not None:
            yield self._failed(self._failure)
            return
        if (self._stopping and not self._returned) or self._ahead_of_reports:
            return
        if status != 0:
            yield self._failed(self._exit_error(status, session))
            return
        if self._ended_study and self._reports.awaits_first:
            return
        if self._reports.awaits_first and self._files.resumed and not self._files.ended:
            self._ahead_of_reports = True  # the program may have been killed between saving and reporting its last step
            return
        if not self._reports.reports or (self._reports.awaits_first and not self._files.step and not self._files.ended):
            raise TaskError(
                f"{self._training.name} ended without a report; {self._remedy(session.channel.other_names)}"
            )
        self._files.record_end()
        if (found := session.monitor.finish()) is not None:
            yield self._profiled(found)
        last = self._reports.reports[-1]
        seconds = last.seconds if self._returning else 0.0  # else the engine has them
        yield Reported(self._job, (Report(number, target, last.metrics, seconds, TrialState.PAUSED),))

    def _failed(self, error: ProgramFailedError) -> Event:
        """Return the failure of a trial that has exceeded its own limit, at which no retry would help; else raise."""
        if (reason := self._limits.reason(self._training.name, error.outcome, str(error))) is None:
            raise error
        return self._failed_trial(f"{reason.rstrip()}\nLog: {self._log.name}")

    def _failed_trial(self, reason: str) -> Event:
        epoch = self._reports.last or self._member.start
        return Reported(self._job, (Report(self._member.trial.number, epoch, state=TrialState.FAILED, reason=reason),))

    def _exit_error(self, status: int, session: _Session) -> ProgramFailedError:
        """Return the error for an exit status but 0, with the last lines of the log, or the first of a crash."""
        how = f"exited with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
        self._log.flush()
        with Path(self._log.name).open("rb") as file:
            file.seek(session.log_began)
            lines = file.read().decode(errors="replace").splitlines()
        crashes = [number for number, line in enumerate(lines) if status < 0 and line.startswith(_CRASH)]
        begin = crashes[-1] if crashes else max(0, len(lines) - _TAIL_LINES)
        lines = lines[begin : begin + _TAIL_LINES]
        tail = "\n".join(lines)
        outcome = outcome_of(RuntimeError(tail))
        if outcome is Outcome.RAISED and any("OutOfMemoryError" in line or "MemoryError" in line for line in lines):
            outcome = Outcome.OUT_OF_MEMORY
        if outcome is Outcome.RAISED and status < 0:
            outcome = Outcome.CRASHED
        # Retries compare failures by the last line of the message, since the order of other lines may differ.
        raised = f": {lines[-1].strip()}" if _TRACEBACK in lines and _RAISED.match(lines[-1]) else ""
        return ProgramFailedError(
            outcome, f"the last output of {self._training.name}:\n{tail}\n{self._training.name} {how}{raised}"
        )

    def _remedy(self, printed: Sequence[str]) -> str:
        """Return what to do about a program without reports, which printed lines of JSON with these names."""
        if not isinstance(self._training, Command):
            return "call shoal.report({...}) in it; one that calls ray.tune.report, give to tune as ray_trainable(...)"
        if missing := [name for name in self._training.metrics if printed and name not in printed]:
            names, lacks = (", ".join(map(repr, each)) for each in (printed, missing))
            return f"its lines of JSON have {names} and lack the metric {lacks}; print it, or search by another metric"
        example = ", ".join(f'"{name}": 0.5' for name in self._training.metrics)
        return f"print lines such as {{{example}}}, or call shoal.report"

    def _reported(self, report: Report) -> Iterator[Event]:
        """Yield a report, unless the engine has it already or it is beyond the target."""
        if not self._sent_epoch < report.epoch <= self._member.target:
            return
        self._sent_epoch = report.epoch
        state = TrialState.PAUSED if report.epoch == self._member.target else TrialState.RUNNING
        sent = Report(report.trial, report.epoch, report.metrics, report.seconds, state)
        yield Reported(self._job, (sent,))


def _is_last(event: Event) -> bool:
    """Whether an event says that a trial has reached its target, or has failed."""
    return isinstance(event, Reported) and any(report.state is not TrialState.RUNNING for report in event.reports)
