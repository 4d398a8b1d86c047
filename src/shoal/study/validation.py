"""Reports that lack a metric of their study, or hold what is none."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.core.objective import Objective, check_reported, metric_fault, missing, named
from shoal.core.trial import Report, TrialState
from shoal.study.trials import TrialTable

__all__ = ["complete_reports", "validated"]


def complete_reports(reports: Iterable[Report], objectives: Sequence[Objective]) -> list[Report]:
    """Those that lack no metric of the study, and hold nothing else than numbers by name."""
    return [report for report in reports if _lacks(report, objectives) is None and not _malformed(report)]


def validated(report: Report, objectives: Sequence[Objective], trials: TrialTable) -> Report:
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
