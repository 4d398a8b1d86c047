"""Handlers of job events: reports, measurements, failed arrays and ends of jobs."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import inf, isfinite

from shoal.core.array import Array, Member, remove_members
from shoal.core.cause import cause_of
from shoal.core.command import StopJob, UpdateJob
from shoal.core.constraint import Constraint, unreported
from shoal.core.errors import ShoalError, StorageFullError, TaskError, UnusableTaskError
from shoal.core.event import (
    NOT_TRIAL_FAILURES,
    ArrayFailed,
    Ended,
    MemoryMeasured,
    Outcome,
    Profiled,
    RelativeTimeMeasured,
    Reported,
    TeamMeasured,
    TurnStats,
)
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.objective import check_reported, metric_fault, metric_names, missing_metric
from shoal.core.rows import Quantum
from shoal.core.trial import FIRST_ADDED, Decision, Report, TrialState, numbers_text
from shoal.host.remedy import command, resume_remedy
from shoal.plan.cost.costs import OutOfMemoryObserved
from shoal.spec import StudySpec
from shoal.study.improvement import best_value
from shoal.study.retries import FailureContext
from shoal.study.state import StudyState
from shoal.study.teams import end_helper
from shoal.study.trials import TrialRecord, TrialTable

__all__ = [
    "OBJECTIVE_ENDED",
    "apply_decisions",
    "complete_reports",
    "completed_without_algorithm",
    "dropped",
    "end_at_target",
    "end_by_trial",
    "end_job",
    "end_study",
    "end_without_improvement",
    "equal_repeats",
    "fail_array",
    "handle_reports",
    "observe",
    "record_measurement",
    "stop",
    "stop_jobs",
    "stop_overdue",
    "write_quanta",
]

OBJECTIVE_ENDED = "trial {} stopped the study"
TARGET_REACHED = "trial {} reached the target of the study"
TRIAL_TIMED_OUT = "has trained as long as a trial may, {:.6g} s (trial_timeout)"


def handle_reports(state: StudyState, event: Reported, now: float) -> None:
    """Handle reports of a job: trials have finished an epoch, or failed."""
    state.tracker.on_report(_with_losses(state, event), now)
    observe(state, event.job, event.reports)
    job, device = state.running[event.job]
    state.signatures.count_epoch(report.trial for report in event.reports)
    if (times := state.crowding.epoch(event)) is not None:
        state.costs.observe(times, job, device)


def _with_losses(state: StudyState, event: Reported) -> Reported:
    """The event with the losses of a program, which reports them among its metrics: one for each report.

    A report without a finite loss has an infinite one, which counts only if a turn has no other.
    """
    job, _ = state.running[event.job]
    if not any(array.key.opaque for array in job.arrays):
        return event
    losses: TurnStats | None = None
    for report in event.reports:
        reported = report.metrics.get(state.config.spec.loss_metric or "", inf)
        loss = reported if isfinite(reported) else inf
        one = TurnStats(loss, loss, loss, 1, report.seconds)
        losses = one if losses is None else losses.followed_by(one)
    return replace(event, losses=losses)


def observe(state: StudyState, job: str, reports: Iterable[Report]) -> None:
    """Apply reports, and the decisions that follow; `job` is "" if the study itself fails a trial.

    If a metric of the study, that of `best_by` or its loss is missing before any trial has reported, or a value under a
    constraint is at the end of a budget before any trial has reported it, TaskError is raised and nothing kept.
    """
    sent = list(reports)
    valid = [_validated(report, state.config.spec, state.trials) for report in sent]
    _check_bounded(valid, state.config.spec.bounds, state.trials)
    if any(report.metrics for report in valid):
        state.retries.first_failures.reported()
    new_reports = [report for report in valid if state.trials.reported(report)]
    state.trials.left(job, {report.trial for report in sent if report.state is not TrialState.RUNNING})
    state.write_reports(job, new_reports)
    end_at_target(state, [report.trial for report in new_reports])
    leaving = apply_decisions(state, [decision for report in new_reports for decision in _decide(state, report)])
    failed = {report.trial for report in new_reports if report.state is TrialState.FAILED}
    if unknown := failed & {report.trial for report in sent if report.state is TrialState.RUNNING}:
        leaving[job] |= unknown  # the job does not know that they have failed
    for running, numbers in leaving.items():
        state.step.command(UpdateJob(running, JobUpdate(leave=frozenset(numbers))))
    stop_overdue(state, [report.trial for report in new_reports])


def end_at_target(state: StudyState, numbers: Iterable[int]) -> None:
    """End the study, unless it is to end already, if the configuration of one of these trials has reached the target
    with the value by which it ranks.
    """
    if (target := state.config.spec.target) is None or state.lifecycle.ended or state.lifecycle.ended_because:
        return
    objective, repetition = state.config.spec.objectives[0], state.config.spec.repetition
    best = {x: best_value(state.trials, repetition.configuration(x), state.config.spec) for x in numbers}
    reached = next((x for x, value in best.items() if value is not None and objective.reached(target, value)), None)
    if reached is not None and end_by_trial(state, TARGET_REACHED.format(reached)):
        stop_jobs(state)


def equal_repeats(state: StudyState, reports: Iterable[Report]) -> str:
    """A note for the user if the seeds of a configuration have reached their budget with equal values; else ""."""
    repetition = state.config.spec.repetition
    if repetition.seeds == 1:
        return ""
    for report in reports:
        if report.state is not TrialState.PAUSED or report.trial >= FIRST_ADDED:
            continue
        seeds = [state.trials[number] for number in repetition.seeds_of(report.trial)]
        if all(seed.epoch == report.epoch and seed.metrics == seeds[0].metrics for seed in seeds):
            numbers = numbers_text([seed.number for seed in seeds])
            return f"trials {numbers} have equal values; repeats tell nothing if no number of the task is random"
    return ""


def end_without_improvement(state: StudyState) -> None:
    """End the study, unless it is to end already, if its best value has not improved for as many trials as it sets."""
    if not state.lifecycle.end_requested and (why := state.improvement.stalled(state.trials)):
        end_by_trial(state, why)
        stop_jobs(state)


def end_by_trial(state: StudyState, why: str) -> bool:
    """End the study once its jobs have ended, unless it is to end already; return whether it was not."""
    if state.lifecycle.end_requested:
        return False
    state.lifecycle.request_end(why)
    return True


def end_study(state: StudyState) -> None:
    """Stop all jobs after a checkpoint; once none runs, `hold_study` ends the study."""
    state.lifecycle.request_end()
    stop_jobs(state)


def stop_jobs(state: StudyState) -> None:
    """Stop all jobs after a checkpoint."""
    state.wake = inf
    state.step.command(*map(StopJob, state.running))


def stop(state: StudyState, trials: Sequence[TrialRecord], reason: str) -> None:
    """Stop trials; running trials leave their jobs.

    The algorithm observes a failure of each. A PAUSED trial has reported all of its budget already: its failure is
    observed only if the algorithm promotes it.
    """
    failures = tuple(
        x.failed(reason)
        for x in trials
        if x.state is not TrialState.PAUSED and x.number not in state.trials.without_algorithm
    )
    running = [(x.job, x.number) for x in trials if x.state is TrialState.RUNNING]
    for record in trials:
        state.trials.move(record, TrialState.STOPPED, reason)
    state.write_reports("", failures)
    decisions = [x for report in failures for x in state.config.algorithm.observe(report)]
    leaving = apply_decisions(state, [x for x in decisions if x.trial not in state.trials.without_algorithm])
    for job, number in running:
        leaving[job].add(number)
    for job, numbers in leaving.items():
        state.step.command(UpdateJob(job, JobUpdate(leave=frozenset(numbers))))


def stop_overdue(state: StudyState, numbers: Iterable[int]) -> None:
    """Stop those of some trials that have trained as long as a trial may: by the seconds of their reports, which are
    a trial's share of the seconds of its arrays.
    """
    if (limit := state.config.spec.trial_timeout) is None:
        return
    overdue = [x for x in map(state.trials.__getitem__, numbers) if x.seconds >= limit and not x.state.final]
    if overdue:
        stop(state, overdue, TRIAL_TIMED_OUT.format(limit))


def apply_decisions(state: StudyState, decisions: Sequence[Decision]) -> defaultdict[str, set[int]]:
    """Apply decisions of the algorithm; return the trials that must leave each running job."""
    leaving: defaultdict[str, set[int]] = defaultdict(set)
    for decision in decisions:
        record = state.trials[decision.trial]
        if record.state is TrialState.RUNNING:
            leaving[record.job].add(decision.trial)
        if not record.state.final:
            state.trials.move(record, decision.state, decision.reason)
    return leaving


def _decide(state: StudyState, report: Report) -> list[Decision]:
    """The algorithm's decisions after a report; the algorithm does not observe reports of retried trials."""
    if report.trial in state.trials.without_algorithm:
        return [completed_without_algorithm(report.trial)] if report.state is TrialState.PAUSED else []
    return [x for x in state.config.algorithm.observe(report) if x.trial not in state.trials.without_algorithm]


def completed_without_algorithm(number: int) -> Decision:
    """The decision on a retried or added trial that has reached its target."""
    if number >= FIRST_ADDED:
        return Decision(number, TrialState.COMPLETE, "added by a user, and has reached its budget")
    return Decision(
        number, TrialState.COMPLETE, "failed before, was retried and has reached the budget at which it failed"
    )


def record_measurement(
    state: StudyState, found: Profiled | RelativeTimeMeasured | MemoryMeasured | TeamMeasured
) -> None:
    """Handle a measurement of a job."""
    job, device = state.running[found.job]
    state.costs.observe(found, job, device)
    if isinstance(found, Profiled) and job.purpose is Purpose.PROFILE:
        unprofiled = tuple(array for array in job.arrays if array.key != found.key)
        state.running.change(replace(job, arrays=unprofiled))


def handle_team(state: StudyState, found: TeamMeasured) -> None:
    """Handle the times of a job on several devices, or why its steps cannot be divided, which holds for this study."""
    if found.note:
        _, device = state.running[found.job]
        state.tracker.refuse_teams(found.key, device.kind)
    else:
        record_measurement(state, found)


def end_job(state: StudyState, ended: Ended, now: float) -> None:
    """Handle the end of a job; its trials below their targets wait again."""
    outcome = state.tracker.outcome(ended)
    job, device = state.running.end(ended, outcome, state.step.time)
    if job.purpose is Purpose.ASSIST:
        end_helper(state, job, device, ended, now)
        return
    state.crowding.end(job.id)
    error = _fatal_error(state, ended, job.purpose, job.members)
    failed = ended.outcome not in NOT_TRIAL_FAILURES and error is None
    reason = ended.outcome if ended.outcome is Outcome.OUT_OF_MEMORY else cause_of(ended.message) or ended.outcome
    state.signatures.end(job, device.kind, failed=failed, reason=reason)
    arrays = state.trials.present(job).arrays if job.purpose is Purpose.TRAIN else job.arrays
    left = state.trials.requeue(job.id, None, failed=failed)
    state.tracker.end(job, outcome, left, now)
    write_quanta(state)
    if error is not None:
        raise error
    if failed:
        if job.purpose is Purpose.PROFILE and ended.outcome is Outcome.RAISED:
            for member in job.members[:1]:  # the same code would raise in training
                state.retries.first_failures.note(member.trial.number, ended.message)
        _retry_or_fail(state, ended, job, FailureContext(arrays, device, shared_array=len(job.members) > 1), left)
    state.costs.end(job.id)


def fail_array(state: StudyState, failed: ArrayFailed) -> None:
    """Handle a failed array of a job; its trials wait again."""
    job, device = state.running[failed.job]
    present = state.trials.present(job).arrays
    members = [member for member in job.members if member.trial.number in failed.trials]
    others = remove_members(job.arrays, failed.trials)
    error = _fatal_error(state, failed, job.purpose, members)
    state.running.note(job.id, dropped(failed.trials, f"{failed.outcome}: {failed.message}"))
    left = state.trials.requeue(job.id, failed.trials, failed=error is None)
    if error is not None:
        raise error
    job = replace(job, arrays=others)
    state.running.change(job)
    state.crowding.change(job)
    gone = remove_members(present, {member.trial.number for array in others for member in array.members})
    _retry_or_fail(state, failed, job, FailureContext(gone, device, shared_array=len(members) > 1), left)


def dropped(trials: Iterable[int], why: str) -> str:
    """A line for the message of a job that does not train some of its trials any more."""
    return f"dropped trials {', '.join(map(str, sorted(trials)))}: {why}"


def write_quanta(state: StudyState) -> None:
    """Write the turns of jobs that have ended."""
    for job, number, losses in state.tracker.take_quanta():
        state.step.write(Quantum(job, number, state.step.time, losses))


def _retry_or_fail(
    state: StudyState, failed: Ended | ArrayFailed, job: Job, context: FailureContext, left: Collection[int]
) -> None:
    """Retry failed trials or fail them for good; after an out-of-memory error correct their memory estimate."""
    device = state.fleet.cluster.device(context.device.name)
    if failed.outcome is Outcome.OUT_OF_MEMORY:
        state.costs.observe(OutOfMemoryObserved(tuple(context.arrays)), job, device)
    shared = state.running.on(device.name) > 0
    context = replace(
        context, device=device, shared_device=shared, largest_memory=_largest_memory(state, context.arrays)
    )
    spent = state.retries.decide(failed, context, left)
    observe(state, "", [state.trials[number].failed(why) for number, why in spent.items()])
    if (cause := state.retries.first_failures.common_cause()) is not None:
        state.trials.clear_all_failures()
        state.lifecycle.stop(cause, sorted({*state.trials.common_failures, *cause.trials}))


def _largest_memory(state: StudyState, arrays: Collection[Array]) -> int:
    """Bytes of the largest device of a kind with profiles of the arrays, or that can get them unless they
    train alone.
    """
    healthy = [device for _, device in state.fleet.cluster if device.healthy]
    known = {x.kind for x in healthy if all(state.costs.of(array.key, x.kind) for array in arrays)}
    never = {kind for key, kind in state.signatures.unmeasurable if any(key == array.key for array in arrays)}
    if any(member.trial.number in state.trials.own_job_trials for array in arrays for member in array.members):
        never |= {x.kind for x in healthy}
    return max((x.memory for x in healthy if not known or x.kind in known or x.kind not in never), default=0)


def _fatal_error(
    state: StudyState, failed: Ended | ArrayFailed, purpose: Purpose, members: Sequence[Member]
) -> ShoalError | None:
    """The error that ends the study, or None.

    If no trial has trained an epoch, a task that breaks its contract is assumed to break it for all trials. Failures
    of trials that users added do not count, because their configs may be outside the space."""
    directory, kept = state.config.directory, state.config.spec.kept
    if failed.outcome is Outcome.STORAGE_FULL:
        return StorageFullError(
            f"{failed.message}\nEverything recorded is intact; free some space, then: {command('resume', directory)}"
        )
    added = [member.trial for member in members if member.trial.is_added]
    if failed.outcome is Outcome.UNUSABLE and not any(trial.origin for trial in added):
        return UnusableTaskError(f"{failed.message}\nNothing is lost. {resume_remedy(directory, kept=kept)}")
    for_all = purpose is Purpose.SIGNATURE or not any(x.epoch for x in state.trials)
    if failed.outcome is Outcome.REJECTED and for_all and members and not added:
        first, *others = members
        others_text = f" and {len(others)} more" if others else ""
        config = dict(first.trial.config)
        return TaskError(f"{failed.message}\nIt occurred with trial {first.trial.number}{others_text}: {config}")
    return None


def complete_reports(reports: Iterable[Report], spec: StudySpec) -> list[Report]:
    """The reports with all metrics that the study needs and no invalid metric."""
    return [report for report in reports if _missing_metric(report, spec) is None and not _invalid_metric(report)]


def _validated(report: Report, spec: StudySpec, trials: TrialTable) -> Report:
    """The report itself if it is valid, else a report that its trial has failed.

    A report is invalid if it lacks a metric that the study needs or holds an invalid metric. Invalid metrics are left
    out, because the journal cannot store them."""
    if fault := _invalid_metric(report):
        valid_metrics = {name: value for name, value in report.metrics.items() if not metric_fault(name, value)}
        reason = report.reason or f"at epoch {report.epoch} {fault}"
        return replace(report, state=TrialState.FAILED, reason=reason, metrics=valid_metrics)
    metric, others = _missing_metric(report, spec), {"best_by": spec.of_best.metric, "loss": spec.loss}
    failed = report.state is TrialState.FAILED
    others_missing = not failed and any(name not in (None, *report.metrics) for name in others.values())
    if (metric is not None or others_missing) and not any(x.epoch > x.trial.start for x in trials):
        check_reported(spec.objectives, report.metrics, **others)
    if metric is None:
        return report
    reason = f"metric {metric!r} is missing at epoch {report.epoch}; the trial reports {metric_names(report.metrics)}"
    return replace(report, state=TrialState.FAILED, reason=reason)


def _check_bounded(reports: Sequence[Report], bounds: Sequence[Constraint], trials: TrialTable) -> None:
    """Raise an error if a trial is at the end of its budget and no trial has reported a value under a constraint."""
    if not bounds:
        return
    for report in reports:
        missing = unreported(bounds, report.metrics) if report.state is TrialState.PAUSED else None
        if missing is None or any(missing.metric in (x.metrics.keys() | x.best.keys()) for x in trials):
            continue
        if not any(missing.metric in each.metrics for each in reports):
            raise TaskError(
                f"the constraint {str(missing)!r} is on a value that no trial has reported by epoch {report.epoch}, "
                f"the end of a budget; the task reports {metric_names(report.metrics)}. Name one of these in "
                "constraints="
            )


def _missing_metric(report: Report, spec: StudySpec) -> str | None:
    return None if report.state is TrialState.FAILED else missing_metric(spec.objectives, report.metrics)


def _invalid_metric(report: Report) -> str:
    return next((fault for name, value in report.metrics.items() if (fault := metric_fault(name, value))), "")
