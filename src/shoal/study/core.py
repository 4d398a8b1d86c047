"""The state machine of a study: an event changes the state and gives records and commands."""

import re
from collections.abc import Collection, Iterable

from shoal.core.command import ArrayLeft, CopyCheckpoint, JobEnded, Step, StopJob, StudyChanged, TrialsReported
from shoal.core.event import (
    ArrayFailed,
    Ended,
    MembersLeft,
    MemoryMeasured,
    Outcome,
    PackSpeedMeasured,
    Profiled,
    Reported,
    SignaturesFound,
)
from shoal.core.event import Event as JobEvent
from shoal.core.request import Request
from shoal.core.trial import Decision, TrialGroup, TrialState
from shoal.study.devices import DevicesSeen
from shoal.study.event import Due, Event, TrialFailed, WindUp
from shoal.study.interventions import intervene, let_go, rest
from shoal.study.job_events import complete_reports, drop, end, learn, observe, report, settle
from shoal.study.planning import ask, check_alive, place, survey
from shoal.study.state import Given, StudyState
from shoal.study.trials import TrialRecord, retried_through

__all__ = ["MOST_NOTES", "StudyCore"]

MOST_NOTES = 3
"""Number of findings of workers that the user is shown."""


class StudyCore:
    """The state machine of a study.

    It has no clock, thread or process. `step` returns records, and commands to carry out once the records are
    committed. The same events give the same steps.

    Args:
        given: Settings and collaborators.
    """

    def __init__(self, given: Given) -> None:
        self.state = StudyState(given)
        """State of the study; read only."""

    def step(self, event: Event, now: float) -> Step:
        """Apply an event to the state.

        Args:
            event: The event.
            now: Time of a monotonic clock, in seconds.

        Returns:
            Records to commit, then commands to carry out. If `state.stopped` is set afterwards, the study ends.

        Raises:
            ShoalError: the study ends with this error; `state.step` must be committed and carried out before.
            Exception: any error of the algorithm or the policy, with the same rule.
        """
        state = self.state
        state.step = Step()
        (_act if state.ending is None else _note)(state, event, now)
        return state.step

    def enlist(self, groups: Iterable[TrialGroup]) -> None:
        """Register groups that the algorithm proposed in an earlier run."""
        self.state.tracker.enlist(groups)

    def restore(
        self,
        records: Iterable[TrialRecord],
        decisions: Iterable[Decision],
        *,
        reported: bool,
        retried: Collection[int] = (),
        requests: Iterable[str] = (),
    ) -> Step:
        """Restore the state that a study had when its engine ended. Call it before any step.

        Args:
            records: Records of all trials, none of them RUNNING.
            decisions: All decisions of the algorithm.
            reported: Whether any trial has reported a metric.
            retried: Numbers of the trials that were retried after they had failed.
            requests: Names of the user requests that were carried out or refused.
        """
        state, study = self.state, self.state.given.study
        state.step = Step()
        apart, state.requests = set(retried), set(requests)
        state.trials.retried, state.trials.tried = apart, set(study.get("common_failure_trials", ()))
        state.trials.held = set(study.get("paused_trials", ()))
        state.paused, state.end_requested, state.ended = (
            study.get(key, False) for key in ("paused", "end_requested", "ended")
        )
        for record in records:
            state.trials.restore(record)
            if record.trial.is_added:
                apart.add(record.number)
        paused = [x.number for x in state.trials if x.number in apart and x.state is TrialState.PAUSED]
        kept = [decision for decision in decisions if decision.trial not in apart]
        settle(state, [*kept, *map(retried_through, paused)])
        if reported:
            state.retries.first.reported()
        state.step.command(*(CopyCheckpoint(record.trial) for record in state.trials.waiting()))
        return state.step


def _act(state: StudyState, event: Event, now: float) -> None:
    devices, step = state.given.devices, state.step
    match event:
        case WindUp():
            state.ending = event
            devices.kill_again()
            step.command(*map(StopJob, state.running))
        case Due.LOOK:
            devices.look(state.running, now, step)
        case Due.ASK:
            if not (state.paused or state.end_requested):
                ask(state)
        case Due.PLAN if state.rests:
            rest(state)
        case Due.PLAN:
            survey(state)
            place(state, now)
            check_alive(state, now)
        case DevicesSeen():
            devices.see(event, step)
        case Request():
            intervene(state, event)
        case TrialFailed():
            observe(state, "", [state.trials[event.trial].failed(event.reason)])
        case _:
            _on_job_event(state, devices.understood(event, state.running), now)


def _add_note(state: StudyState, note: str) -> None:
    """Record a finding of a worker as one line for the user.

    Only the first `MOST_NOTES` are recorded, and of findings that differ only in numbers one.
    """
    said, line = state.given.study.get("note", "").splitlines(), " ".join(note.split())
    if note and len(said) < MOST_NOTES and _worded(line) not in map(_worded, said):
        state.step.record(StudyChanged("note", "\n".join([*said, line])))


def _worded(line: str) -> str:
    return re.sub(r"\d[\d.e+-]*", "", line)


def _on_job_event(state: StudyState, event: JobEvent, now: float) -> None:
    """Handle an event of a job."""
    match event:
        case Reported():
            report(state, event, now)
        case SignaturesFound():
            state.signatures.note(event)
            _add_note(state, event.note)
        case Profiled() | PackSpeedMeasured() | MemoryMeasured():
            learn(state, event)
            if isinstance(event, Profiled):
                _add_note(state, event.note)
        case ArrayFailed():
            drop(state, event)
        case MembersLeft():
            let_go(state, event)
        case Ended():
            end(state, event, now)


def _note(state: StudyState, event: Event, now: float) -> None:
    """Record an event while the study is wound up; nothing is asked for, planned or retried."""
    match event:
        case Due.LOOK:
            state.given.devices.look(state.running, now, state.step)
        case DevicesSeen():
            state.given.devices.see(event, state.step)
        case Due() | Request() | TrialFailed() | WindUp():
            pass  # requests stay pending until the study is resumed
        case _:
            _note_of_job(state, state.given.devices.understood(event, state.running))
    if state.ending is not None and not state.ending.record:
        state.step.records.clear()


def _note_of_job(state: StudyState, event: JobEvent) -> None:
    match event:
        case Profiled() | PackSpeedMeasured():
            learn(state, event)
        case ArrayFailed():
            state.step.record(ArrayLeft(event.job, event.trials, event.message, failed=False))
        case Reported():
            state.step.record(TrialsReported(event.job, tuple(complete_reports(event.reports, state.given.objectives))))
        case Ended():
            state.running.end(event.job)
            state.step.record(JobEnded(event.job, event.outcome, event.message, failed=False))
            if event.outcome not in (Outcome.FINISHED, Outcome.STOPPED):
                state.unsaved.append(f"{event.job} {event.outcome}")
