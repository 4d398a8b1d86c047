"""What jobs report and measure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.core.command import Decided, TrialsReported, UpdateJob
from shoal.core.event import MemoryMeasured, PackSpeedMeasured, Profiled, Reported
from shoal.core.job import JobUpdate, Purpose
from shoal.core.objective import Objective, check_reported, metric_fault, missing, named
from shoal.core.trial import Decision, Report, TrialState
from shoal.study.state import StudyState
from shoal.study.trials import TrialTable, retried_through

__all__ = ["complete_reports", "learn", "observe", "report", "settle"]


def report(state: StudyState, event: Reported, now: float) -> None:
    """Trials of a job have finished an epoch, or failed."""
    state.tracker.on_report(event, now)
    observe(state, event.job, event.reports)
    job, device = state.running[event.job]
    state.signatures.count(report.trial for report in event.reports)
    if (seen := state.interference.epoch(event, state.trials.has_waiting)) is not None:
        state.profiles.observe(seen, job, device)


def observe(state: StudyState, job: str, reports: Iterable[Report]) -> None:
    """Take over reports, and what the algorithm decides after them.

    Args:
        state: of the study.
        job: that they came from; "" where the study itself says that a trial failed.
        reports: in the order in which they came.

    Raises:
        TaskError: they lack a metric of the study, which no trial has reported so far; nothing is recorded.
    """
    reports = [_validated(report, state.given.objectives, state.trials) for report in reports]
    if any(report.metrics for report in reports):
        state.retries.first.reported()
    news = [report for report in reports if state.trials.reported(report)]
    if news:
        state.step.record(TrialsReported(job, tuple(news)))
    leaving = settle(state, [decision for report in news for decision in _decide(state, report)])
    for report in reports:
        if job and report.state is TrialState.FAILED and report.metrics:  # its worker may not know
            leaving[job].add(report.trial)
    for running, numbers in leaving.items():
        state.step.command(UpdateJob(running, JobUpdate(leave=frozenset(numbers))))


def settle(state: StudyState, decisions: Sequence[Decision]) -> defaultdict[str, set[int]]:
    """Take over decisions of the algorithm.

    Returns:
        Id of a running job -> numbers of those that are to leave it.
    """
    if decisions:
        state.step.record(Decided(tuple(decisions)))
    leaving: defaultdict[str, set[int]] = defaultdict(set)
    for decision in decisions:
        record = state.trials[decision.trial]
        if record.state is TrialState.RUNNING:
            leaving[record.job].add(decision.trial)
        if not record.state.final:
            state.trials.move(record, decision.state)
    return leaving


def _decide(state: StudyState, report: Report) -> list[Decision]:
    """The algorithm's decisions after a report; reports of retried trials are kept from it."""
    if report.trial in state.trials.retried:
        return [retried_through(report.trial)] if report.state is TrialState.PAUSED else []
    return [x for x in state.given.algorithm.observe(report) if x.trial not in state.trials.retried]


def learn(state: StudyState, found: Profiled | PackSpeedMeasured | MemoryMeasured) -> None:
    """A job has measured something."""
    job, device = state.running[found.job]
    state.profiles.observe(found, job, device)
    if isinstance(found, Profiled) and job.purpose is Purpose.PROFILE:
        still_to_come = tuple(array for array in job.arrays if array.key != found.key)
        state.running.change(replace(job, arrays=still_to_come))


def complete_reports(reports: Iterable[Report], objectives: Sequence[Objective]) -> list[Report]:
    """Those that lack no metric of the study, and hold nothing else than numbers by name."""
    return [report for report in reports if _lacks(report, objectives) is None and not _malformed(report)]


def _validated(report: Report, objectives: Sequence[Objective], trials: TrialTable) -> Report:
    """A report with all metrics of the study, or one that its trial has failed since it lacks one, or holds what is no
    metric. That is left out: the journal could not keep it, or not give it back.

    Raises:
        TaskError: no trial has reported it so far, so it is the task's fault or the study's.
    """
    if malformed := _malformed(report):
        sound = {name: value for name, value in report.metrics.items() if not metric_fault(name, value)}
        reason = report.reason or f"at epoch {report.epoch} {malformed}"
        return replace(report, state=TrialState.FAILED, reason=reason, metrics=sound)
    metric = _lacks(report, objectives)
    if metric is None:
        return report
    if not any(x.epoch > x.trial.start for x in trials):
        check_reported(objectives, report.metrics)
    reason = f"metric {metric!r} is missing at epoch {report.epoch}; the trial reports {named(report.metrics)}"
    return replace(report, state=TrialState.FAILED, reason=reason)


def _lacks(report: Report, objectives: Sequence[Objective]) -> str | None:
    """A metric of the study that a report should have and lacks."""
    return None if report.state is TrialState.FAILED else missing(objectives, report.metrics)


def _malformed(report: Report) -> str:
    """What a report holds that is no metric, in words; "" if there is nothing."""
    return next((fault for name, value in report.metrics.items() if (fault := metric_fault(name, value))), "")
