"""Reports that lack a metric of their study."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.objective import Objective, check_reported, missing, named
from shoal.planner.standings import Standings
from shoal.trial import Report, TrialState

__all__ = ["checked", "whole"]


def whole(reports: Iterable[Report], objectives: Sequence[Objective]) -> list[Report]:
    """Those that lack no metric of the study."""
    return [report for report in reports if _lacks(report, objectives) is None]


def checked(report: Report, objectives: Sequence[Objective], trials: Standings) -> Report:
    """A report with all metrics of the study, or one that its trial has failed since it lacks one.

    Raises:
        TaskError: no trial has reported it so far, so it is the task's fault or the study's.
    """
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
