"""The state machine of a study. Each event changes the state and returns records and commands."""

import re
from collections.abc import Collection, Iterable

from shoal.core.command import ArrayLeft, CopyCheckpoint, JobEnded, Step, StopJob, StudyChanged, TrialsReported
from shoal.core.event import (
    ArrayFailed,
    Ended,
    MembersLeft,
    MemoryMeasured,
    Noted,
    Outcome,
    Profiled,
    Proven,
    RelativeTimeMeasured,
    Reported,
    SignaturesFound,
    TeamMeasured,
)
from shoal.core.event import Event as JobEvent
from shoal.core.job import Purpose
from shoal.core.request import Request
from shoal.core.trial import Decision, TrialGroup, TrialState
from shoal.planner.job_history import EarlierJob
from shoal.study.devices import DeviceConditions
from shoal.study.event import Due, Event, Shutdown, TrialFailed
from shoal.study.interventions import handle_members_left, hold_study, intervene
from shoal.study.job_events import (
    OBJECTIVE_ENDED,
    apply_decisions,
    complete_reports,
    end_at_target,
    end_by_trial,
    end_job,
    fail_array,
    handle_reports,
    handle_team,
    observe,
    record_measurement,
)
from shoal.study.planning import ask_algorithm, check_progress, find_signatures, place
from shoal.study.state import CoreConfig, StudyState
from shoal.study.teams import update_teams
from shoal.study.trials import TrialRecord, completed_without_algorithm

__all__ = ["MOST_NOTES", "StudyCore"]

MOST_NOTES = 3
"""Maximum number of notes from workers that the user is shown."""


class StudyCore:
    """The state machine of a study.

    It has no clock, thread or process. `step` returns records, and commands to carry out once the records are
    committed. The same events give the same steps.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.state = StudyState(config)

    def step(self, event: Event, now: float) -> Step:
        """Apply an event to the state; return records to commit, then commands to carry out.

        The study ends if `state.stopped` is set afterwards or an error is raised, also one of the algorithm or the
        policy: `state.step` must be committed and carried out before. `now` are seconds of a monotonic clock.
        """
        state = self.state
        state.step = Step()
        (_handle if state.shutdown is None else _handle_during_shutdown)(state, event, now)
        return state.step

    def register_groups(self, groups: Iterable[TrialGroup]) -> None:
        """Register groups that the algorithm proposed in an earlier run."""
        self.state.trials.register_groups(groups)

    def restore(
        self,
        records: Iterable[TrialRecord],
        decisions: Iterable[Decision],
        *,
        reported: bool,
        retried: Collection[int] = (),
        jobs: Iterable[EarlierJob] = (),
        requests: Iterable[str] = (),
        reached: int | None = None,
    ) -> Step:
        """Restore the state that a study had when its engine ended. Call this before any step.

        None of the records is RUNNING; the jobs were suspended or running, on devices that are still there.
        """
        state, study = self.state, self.state.config.study
        state.step = Step()
        without_algorithm = state.trials.without_algorithm = set(retried)
        state.requests = set(requests)
        state.trials.common_failures = set(study.get("common_failure_trials", ()))
        state.trials.paused = set(study.get("paused_trials", ()))
        state.paused, state.end_requested, state.ended = (
            study.get(key, False) for key in ("paused", "end_requested", "ended")
        )
        state.ended_because = study.get("ended_because", "")
        state.tracker.restore(jobs)
        for record in records:
            state.trials.restore(record)
            if record.trial.is_added:
                without_algorithm.add(record.number)
        paused = [x.number for x in state.trials if x.number in without_algorithm and x.state is TrialState.PAUSED]
        kept = [decision for decision in decisions if decision.trial not in without_algorithm]
        apply_decisions(state, [*kept, *map(completed_without_algorithm, paused)])
        if reported:
            state.retries.first_failures.reported()
        if reached is not None and not state.ended_because and not state.ended:  # reported while shutting down
            end_at_target(state, reached)
        state.step.command(*(CopyCheckpoint(record.trial) for record in state.trials.waiting()))
        return state.step


def _handle(state: StudyState, event: Event, now: float) -> None:
    devices, step = state.config.devices, state.step
    match event:
        case Shutdown():
            state.shutdown = event
            devices.forget_kills()
            step.command(*map(StopJob, state.running))
        case Due.CHECK:
            devices.end_lost_jobs(state.running, now, step)
        case Due.PROPOSE:
            if not (state.paused or state.end_requested):
                ask_algorithm(state)
        case Due.PLAN if state.on_hold:
            hold_study(state)
        case Due.PLAN:
            find_signatures(state)
            place(state, now)
            check_progress(state, now)
        case DeviceConditions():
            _add_note(state, devices.apply_conditions(event, step))
        case Request():
            intervene(state, event)
        case TrialFailed():
            observe(state, "", [state.trials[event.trial].failed(event.reason)])
        case _:
            _on_job_event(state, devices.with_true_outcome(event, state.running), now)
    update_teams(state, now)


def _add_note(state: StudyState, note: str) -> None:
    """Record a note of a worker as a line for the user: the first `MOST_NOTES` that differ in more than numbers."""
    notes, line = state.config.study.get("note", "").splitlines(), " ".join(note.split())
    if note and len(notes) < MOST_NOTES and _without_numbers(line) not in map(_without_numbers, notes):
        state.step.record(StudyChanged("note", "\n".join([*notes, line])))


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e+-]*", "", line)


def _on_job_event(state: StudyState, event: JobEvent, now: float) -> None:
    match event:
        case Reported():
            handle_reports(state, event, now)
            if event.ended_by is not None:
                end_by_trial(state, OBJECTIVE_ENDED.format(event.ended_by))
        case SignaturesFound():
            state.signatures.add_keys(event)
            _add_note(state, event.note)
        case Profiled() | RelativeTimeMeasured() | MemoryMeasured():
            record_measurement(state, event)
        case Proven():
            state.step.record(event)
        case TeamMeasured():
            handle_team(state, event)
            _add_note(state, event.note and f"a job has one device, since its steps cannot be divided: {event.note}")
        case Noted():
            _add_note(state, event.note)
        case ArrayFailed():
            fail_array(state, event)
        case MembersLeft():
            handle_members_left(state, event)
        case Ended():
            end_job(state, event, now)


def _handle_during_shutdown(state: StudyState, event: Event, now: float) -> None:
    """Record an event during shutdown. The algorithm is not asked, and nothing is planned or retried."""
    match event:
        case Due.CHECK:
            state.config.devices.end_lost_jobs(state.running, now, state.step)
        case DeviceConditions():
            state.config.devices.apply_conditions(event, state.step)
        case Due() | Request() | TrialFailed() | Shutdown():
            pass  # requests stay pending until the study is resumed
        case _:
            _handle_job_during_shutdown(state, state.config.devices.with_true_outcome(event, state.running))
    if state.shutdown is not None and not state.shutdown.record:
        state.step.records.clear()


def _handle_job_during_shutdown(state: StudyState, event: JobEvent) -> None:
    match event:
        case Profiled() | RelativeTimeMeasured():
            record_measurement(state, event)
        case TeamMeasured():
            handle_team(state, event)
        case ArrayFailed():
            state.step.record(ArrayLeft(event.job, event.trials, event.message, failed=False))
        case Proven():
            state.step.record(event)
        case Reported():
            state.step.record(
                TrialsReported(event.job, tuple(complete_reports(event.reports, state.config.spec.objectives)))
            )
            if event.ended_by is not None:
                end_by_trial(state, OBJECTIVE_ENDED.format(event.ended_by))
        case Ended():
            job, _ = state.running.end(event.job)
            state.step.record(JobEnded(event.job, event.outcome, event.message, False, event.activities))
            if job.purpose is not Purpose.ASSIST and event.outcome not in (Outcome.FINISHED, Outcome.STOPPED):
                state.unsaved_jobs.append(f"{event.job} {event.outcome}")
