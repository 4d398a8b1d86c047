"""Failed trials: their causes, their retries, and the error of a study that failed."""

from collections.abc import Sequence
from typing import Any

from shoal.core.cause import Cause, causes
from shoal.core.errors import StudyFailedError
from shoal.core.event import Outcome
from shoal.core.trial import TrialState, numbers_text, state_name
from shoal.host.remedy import command, resume_remedy
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.snapshot import Failing
from shoal.look.text import printable, shortened, trials_text

__all__ = [
    *("cause_json", "cause_line", "cause_lines", "cause_text", "check_results"),
    *("failing_json", "failing_lines", "failing_text", "first_failed", "unmeasured_lines"),
]

_COUNT_WORDS = {1: "once", 2: "twice"}
_MAX_CAUSES = 4
_MAX_TRIALS = 12
"""Most trials of a cause that are named."""
_MAX_FAILING = 4
"""Most trials to be retried that are named, one line each."""


def cause_lines(found: Sequence[Cause]) -> list[str]:
    """Return a line for each of the first causes: "3 failed: ValueError: x (trials 1, 4; log: logs/x.log)"."""
    lines = [f"{len(cause.trials)} failed: {cause_line(cause)}" for cause in found[:_MAX_CAUSES]]
    if rest := found[_MAX_CAUSES:]:
        lines.append(f"{sum(len(cause.trials) for cause in rest)} failed of {len(rest)} other causes, see shoal trials")
    return lines


def cause_line(cause: Cause) -> str:
    """Return a cause with its trials and its log: "ValueError: x (trials 1, 4, 7; log: logs/job-00003.log)"."""
    more = ", …" if len(cause.trials) > _MAX_TRIALS else ""
    named = f"{'trial' if len(cause.trials) == 1 else 'trials'} {numbers_text(cause.trials[:_MAX_TRIALS])}{more}"
    log = f"; log: {cause.log}" if cause.log else ""
    return f"{printable(shortened(cause.text))} ({named}{log})"


def cause_json(cause: Cause) -> dict[str, Any]:
    """Return a cause as plain values."""
    return {
        "cause": cause.text,
        "count": len(cause.trials),
        "trials": list(cause.trials),
        "log": cause.log or None,
    }


def unmeasured_lines(found: Sequence[Cause]) -> list[str]:
    """Return a line for each of the first causes of failed profiles; their trials train unfused."""
    return [f"measuring failed: {cause_line(cause)}" for cause in found[:_MAX_CAUSES]]


def failing_lines(failing: Sequence[Failing]) -> list[str]:
    """Return a line for each of the first trials to be retried."""
    lines = [failing_text(each) for each in failing[:_MAX_FAILING]]
    if len(failing) > _MAX_FAILING:
        lines.append(f"{trials_text(len(failing) - _MAX_FAILING)} more, see shoal report")
    return lines


def failing_text(failing: Failing) -> str:
    """Return the failure and the next try: "trial 7 failed twice (out of memory), waits to be tried again ..."."""
    trial, job = failing.trial, failing.job
    times = _COUNT_WORDS.get(trial.failures, f"{trial.failures} times")
    count = f" (try {trial.failures + 1} of {max(failing.retries, trial.failures) + 1})"
    if trial.state is TrialState.RUNNING:
        next_step = f"{'is' if failing.runs else 'was being'} tried again in {trial.job} on {trial.device}{count}"
    elif job is not None and job.outcome == Outcome.OUT_OF_MEMORY and len(job.trials) > 1:
        next_step = f"waits to be tried again in a smaller array or alone{count}"
    else:
        next_step = f"waits to be tried again alone{count}"
    log = f"; log: {job.log}" if job is not None and job.log else ""
    cause = "the array that it was in" if job is None else cause_text(job.outcome, job.cause)
    return f"trial {trial.number} failed {times} ({cause}), {next_step}{log}"


def cause_text(outcome: str, cause: str) -> str:
    """Return the outcome of a job and a shortened cause; for out of memory the outcome is enough."""
    if outcome == Outcome.OUT_OF_MEMORY or not cause:
        return outcome
    return f"{outcome}: {shortened(cause)}"


def failing_json(failing: Failing) -> dict[str, Any]:
    """Return a trial to be retried as plain values, with the next step in words."""
    trial, job = failing.trial, failing.job
    return {
        "trial": trial.number,
        "state": state_name(trial.state, failing.runs),
        "failures": trial.failures,
        "job": job and job.id,
        "outcome": job and job.outcome,
        "cause": job and job.cause,
        "log": (job and job.log) or None,
        "next": failing_text(failing),
    }


def check_results(journal: JournalView) -> None:
    """Refuse to return a study without results."""
    states = StudyStatistics(journal).states()
    count = states[TrialState.FAILED]
    if not count or count < sum(states.values()):
        return
    found = causes(journal.failed())
    lines = "\n".join(f"  {line}" for line in cause_lines(found))
    raise _study_error(
        journal,
        f"{'the only trial' if count == 1 else f'all {count} trials'} failed:\n{lines}",
        found[0],
        f"Look at all of them with: {command('trials', journal.directory)}",
        lost=True,
    )


def first_failed(cause: Cause, journal: JournalView) -> StudyFailedError:
    """Return the error of a study whose first trials fail alike."""
    return _study_error(
        journal,
        f"{len(cause.trials)} trials failed alike, and no trial has reported anything:\n  {cause_line(cause)}",
        cause,
        "Nothing is lost: the other trials stay open. The study tries those first when it continues, and ends so again "
        "if as many of them fail alike.",
        lost=StudyStatistics(journal).states()[TrialState.FAILED] > 0,
    )


def _study_error(journal: JournalView, what: str, cause: Cause, next_step: str, *, lost: bool) -> StudyFailedError:
    remedy = resume_remedy(journal.directory, kept=journal.spec.kept, lost=lost)
    first = f"Trial {cause.trials[0]}: {cause.reason}"
    return StudyFailedError(f"{what}\n\n{first}\n\n{next_step}\n{remedy}", journal.directory)
