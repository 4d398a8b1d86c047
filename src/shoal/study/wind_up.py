"""How a study is wound up: what its jobs still say is recorded, and leads to nothing else."""

from shoal.core.command import ArrayLeft, JobEnded, TrialsReported
from shoal.core.event import ArrayFailed, Ended, Outcome, PackSpeedMeasured, Profiled, Reported
from shoal.core.event import Event as JobEvent
from shoal.core.request import Request
from shoal.study.devices import DevicesSeen
from shoal.study.event import Due, Event, TrialFailed, WindUp
from shoal.study.reports import learn
from shoal.study.state import StudyState
from shoal.study.validation import complete_reports

__all__ = ["note"]


def note(state: StudyState, event: Event, now: float) -> None:
    """Record an event without acting on it."""
    match event:
        case Due.LOOK:
            state.given.devices.look(state.running, now, state.step)
        case DevicesSeen():
            state.given.devices.see(event, state.step)
        case Due() | Request() | TrialFailed() | WindUp():
            pass  # what was asked for is done when the study goes on
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
