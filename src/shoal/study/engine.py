"""The engine loop: takes events, steps the state machine, commits its rows and executes its commands."""

import os
from collections import deque
from collections.abc import Callable

from shoal.algorithms.base import Algorithm
from shoal.core.command import StartJob, Step
from shoal.core.errors import StudyFailedError, StudyInterrupted
from shoal.core.event import Ended, Outcome
from shoal.core.rows import StudyValue
from shoal.host.remedy import command
from shoal.journal.requests import pending_requests
from shoal.journal.writer import Journal
from shoal.run.base import Backend
from shoal.study.actuation import carry_out
from shoal.study.config import EngineConfig
from shoal.study.core import StudyCore
from shoal.study.devices import DEATH_OUTCOMES, DeviceWatch
from shoal.study.event import Due, Event, Shutdown
from shoal.study.recovery import restore

__all__ = ["Engine"]

POLL_SECONDS = 0.25
"""Longest wait for an event, in seconds. After it the display is updated and interrupts are handled."""


class Engine:
    """Runs one study to its end.

    Every change is committed to the journal before its commands are executed. After a kill at any moment, a new engine
    continues the study.

    Args:
        observe: Function that is called in each turn of the loop, such as `update` of a display.
    """

    def __init__(
        self,
        journal: Journal,
        algorithm: Algorithm,
        backend: Backend,
        config: EngineConfig,
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal, self._backend, self._observe = journal, backend, observe
        self._clock = config.clock
        self._core = StudyCore(config.core_config(journal, algorithm, backend))
        self.state = self._core.state
        self.fleet = self._core.state.fleet
        self._watch = DeviceWatch(self.fleet, config.find, config.monitor, config.clock, os.getpid())
        self._events: deque[Event] = deque()  # polled, not yet handled
        self._interrupted = False

    def begin(self) -> None:
        """Restore the algorithm and the state machine from the journal, and record the devices of this run."""
        step = restore(self.state, self._journal, self._journal.clock())
        self.state.config.devices.write_changes(step)
        step.write(StudyValue("stopped", None), StudyValue("finished", False))
        self._apply(step)

    def run(self) -> None:
        """Run the study, after `begin`, until the algorithm has finished or the study's timeout has expired.

        `interrupt` raises StudyInterrupted; a common failure of the first trials, which `state.lifecycle.stopped` has,
        StudyFailedError. Any other error ends it, too; all reports before it are recorded.
        """
        try:
            self._handle_requests()
            while not (self._core.state.finished or self._core.state.lifecycle.timed_out):
                self._run_turn()
        except (Exception, StudyInterrupted) as error:
            self._shut_down(Shutdown.after(error))
            if unsaved := self._core.state.unsaved_jobs:
                error.add_note(f"while stopping: {'; '.join(unsaved)}; these trials continue from older checkpoints")
            raise
        self._shut_down(Shutdown())
        self._journal.put("finished", self._core.state.finished)

    def interrupt(self) -> None:
        """Make `run` save everything and stop at its next turn. Safe to call from a signal handler."""
        self._interrupted = True

    def _run_turn(self) -> None:
        self._poll_devices()
        for due in Due:
            self._handle(due)
        self._poll_backend(self._core.state.wait_seconds(self._clock(), POLL_SECONDS))
        self._handle_requests()
        self._observe()
        if self._interrupted:
            remedy = command("resume", self._journal.directory)
            raise StudyInterrupted(f"stopped; everything is saved. Resume with: {remedy}")

    def _poll_backend(self, timeout: float) -> None:
        if not self._events:  # else some are left after an error
            self._events.extend(self._backend.poll(timeout))
        while self._events:
            event = self._events[0]
            if isinstance(event, Ended) and event.outcome in (*DEATH_OUTCOMES, Outcome.LOST):  # so may its device be
                self._poll_devices(at_once=True)
            self._handle(self._events.popleft())

    def _handle_requests(self) -> None:
        for request in pending_requests(self._journal.directory):
            self._handle(request)

    def _handle(self, event: Event) -> None:
        state = self._core.state
        try:
            step = self._step(event)
        except Exception:  # an error of the user's algorithm or policy, too: record what led to it
            self._apply(state.step)
            raise
        self._apply(step)
        if state.lifecycle.stopped is not None and state.lifecycle.shutdown is None:
            raise StudyFailedError(state.lifecycle.stopped.text, self._journal.directory)

    def _step(self, event: Event) -> Step:
        return self._core.step(event, self._clock(), self._journal.clock())

    def _apply(self, step: Step) -> None:
        """Commit a step, then execute its commands. After a failure, jobs that were not started end as ORPHANED."""
        if self._core.state.lifecycle.shutdown is None:  # once for each step, so several times a second
            self._journal.check_place()
        done = -1
        try:
            self._journal.write(step.rows)
            for done, each in enumerate(step.commands):  # noqa: B007  (it counts after the loop)
                if follows := carry_out(each, self._backend, self._journal.directory):
                    self._handle(follows)
        except Exception:
            never = [x.job.id for x in step.commands[max(done, 0) :] if isinstance(x, StartJob)]
            ends = [self._step(Ended(job, Outcome.ORPHANED, "was never started")) for job in never]
            if done >= 0:  # else the journal has no row of these jobs
                self._journal.write([row for end in ends for row in end.rows])
            raise

    def _poll_devices(self, *, at_once: bool = False) -> None:
        if (seen := self._watch.poll(at_once=at_once)) is not None:
            self._handle(seen)

    def _shut_down(self, shutdown: Shutdown) -> None:
        """Stop or kill all jobs, and wait for their ends."""
        self._handle(shutdown)
        while self._core.state.running:
            self._poll_devices()
            self._handle(Due.CHECK)
            self._poll_backend(POLL_SECONDS)
