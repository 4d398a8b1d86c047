"""The state machine of a study. Each event changes the state and returns rows and commands."""

import re

from shoal.core.command import KillJob, Step, StopJob
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
from shoal.core.rows import Intervention, StudyValue
from shoal.study.devices import DeviceConditions
from shoal.study.event import Due, Event, Shutdown, TrialFailed
from shoal.study.idle_cores import lend_idle_cores
from shoal.study.interventions import handle_members_left, hold_study, intervene
from shoal.study.job_events import (
    OBJECTIVE_ENDED,
    complete_reports,
    dropped,
    end_by_trial,
    end_job,
    end_without_improvement,
    equal_repeats,
    fail_array,
    handle_reports,
    handle_team,
    observe,
    record_measurement,
)
from shoal.study.planning import ask_algorithm, check_progress, find_signatures, place
from shoal.study.state import CoreConfig, StudyState
from shoal.study.teams import update_teams

__all__ = ["MOST_NOTES", "StudyCore"]

MOST_NOTES = 3
"""Maximum number of notes from workers that the user is shown."""


class StudyCore:
    """The state machine of a study.

    It has no clock, thread or process. `step` returns rows, and commands to carry out once the rows are committed. The
    same events give the same steps.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.state = StudyState(config)

    def step(self, event: Event, now: float, time: float | None = None) -> Step:
        """Apply an event to the state; return rows to commit, then commands to carry out.

        The study ends if `state.lifecycle.stopped` is set afterwards or an error is raised, also one of the algorithm
        or the policy: `state.step` must be committed and carried out before.

        Args:
            now: Seconds of a monotonic clock.
            time: Seconds since 1970, for the rows; None: `now`, of a study whose time is virtual.
        """
        state = self.state
        state.step = Step(now if time is None else time)
        try:
            (_handle if state.lifecycle.shutdown is None else _handle_during_shutdown)(state, event, now)
            if state.lifecycle.shutdown is None or state.lifecycle.shutdown.record:
                state.retention.delete(state)
        finally:
            state.write_changes()
            if (shutdown := state.lifecycle.shutdown) is not None and not shutdown.record:
                state.step.rows.clear()
        return state.step


def _handle(state: StudyState, event: Event, now: float) -> None:
    devices, step = state.config.devices, state.step
    match event:
        case Shutdown():
            state.lifecycle.shutdown = event
            state.running.forget_kills()
            state.lifecycle.record_time()
            end: type[StopJob | KillJob] = StopJob if event.save else KillJob
            step.command(*[end(job) for job in state.running])
        case Due.CHECK:
            devices.end_lost_jobs(state.running, now, step)
        case Due.PROPOSE:
            if not (state.lifecycle.paused or state.lifecycle.end_requested):
                ask_algorithm(state)
        case Due.PLAN if state.lifecycle.on_hold:
            hold_study(state)
        case Due.PLAN:
            find_signatures(state)
            place(state, now)
            check_progress(state, now)
            lend_idle_cores(state)
        case Due.TIME:
            _count_time(state, now)
        case DeviceConditions():
            _add_note(state, devices.apply_conditions(event, step))
        case Request():
            intervene(state, event)
        case TrialFailed():
            observe(state, "", [state.trials[event.trial].failed(event.reason)])
        case _:
            _on_job_event(state, devices.with_true_outcome(event, state.running), now)
    end_without_improvement(state)
    update_teams(state, now)


def _count_time(state: StudyState, now: float) -> None:
    """Count the time of a study that runs, which a paused one without jobs does not; note the end of its timeout."""
    if state.lifecycle.count_time(now, runs=bool(state.running) or not state.lifecycle.paused):
        final = [record.state.final for record in state.trials]
        text = f"has passed; {final.count(False)} of {len(final)} trials are open"
        state.step.write(Intervention("", "timeout", text=text, time=state.step.time, seq=state.next_seq()))


def _add_note(state: StudyState, note: str) -> None:
    """Record a note of a worker as a line for the user: the first `MOST_NOTES` that differ in more than numbers."""
    notes, line = state.config.study.get("note", "").splitlines(), " ".join(note.split())
    if note and len(notes) < MOST_NOTES and _without_numbers(line) not in map(_without_numbers, notes):
        state.step.write(StudyValue("note", "\n".join([*notes, line])))


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.e+-]*", "", line)


def _on_job_event(state: StudyState, event: JobEvent, now: float) -> None:
    if isinstance(event, Reported | MembersLeft | ArrayFailed):
        state.running.set_progress(event, state.step.time)
    match event:
        case Reported():
            handle_reports(state, event, now)
            _add_note(state, equal_repeats(state, event.reports))
            if event.ended_by is not None:
                end_by_trial(state, OBJECTIVE_ENDED.format(event.ended_by))
        case SignaturesFound():
            state.signatures.add_keys(event)
            _add_note(state, event.note)
        case Profiled() | RelativeTimeMeasured() | MemoryMeasured():
            record_measurement(state, event)
        case Proven():
            state.step.write(*state.checks.add(event))
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


def _handle_job_during_shutdown(state: StudyState, event: JobEvent) -> None:
    match event:
        case Profiled() | RelativeTimeMeasured():
            record_measurement(state, event)
        case TeamMeasured():
            handle_team(state, event)
        case ArrayFailed():
            state.running.note(event.job, dropped(event.trials, event.message))
            state.trials.requeue(event.job, event.trials, failed=False)
        case Proven():
            state.step.write(*state.checks.add(event))
        case Reported():
            complete = complete_reports(event.reports, state.config.spec)
            state.write_reports(event.job, [report for report in complete if state.trials.reported(report)])
            if event.ended_by is not None:
                end_by_trial(state, OBJECTIVE_ENDED.format(event.ended_by))
        case Ended():
            job, _ = state.running.end(event, event.outcome, state.step.time)
            state.trials.requeue(event.job, None, failed=False)
            shutdown, saved = state.lifecycle.shutdown, event.outcome in (Outcome.FINISHED, Outcome.STOPPED)
            if shutdown is not None and shutdown.save and job.purpose is not Purpose.ASSIST and not saved:
                state.unsaved_jobs.append(f"{event.job} {event.outcome}")
