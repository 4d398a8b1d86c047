"""What devices do, and what becomes of trials that failed, in the words of `shoal status`."""

from collections.abc import Sequence
from typing import Any

from shoal.core.cause import Cause
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.reporting.snapshot import DeviceUse, Failing, JobUse
from shoal.reporting.text import numbers_text, rate_text, shortened, shown, state_name, trials_text
from shoal.schedule.ledger import bytes_text

__all__ = [
    *("cause_json", "cause_line", "cause_lines", "cause_text", "device_json", "device_lines"),
    *("failing_json", "failing_lines", "failing_text", "unmeasured_lines"),
]

_VERBS = {Purpose.SURVEY: "looks at", Purpose.PROFILE: "measures", Purpose.TRAIN: "trains"}
_TIMES = {1: "once", 2: "twice"}
_CAUSES = 4
"""So many causes are named, a line each."""
_TRIALS = 12
"""So many trials of a cause are named."""
_JOBS = 8
"""So many jobs of a device are shown, a line each, those that began first."""
_FAILING = 4
"""So many trials that failed are told of, a line each."""


def device_lines(use: DeviceUse, unit: str) -> list[str]:
    """What a device is, how much of it is promised and what it runs; its jobs below if they are several.

    Args:
        use: of the device.
        unit: see `Snapshot`.
    """
    jobs = [_job_text(job, unit) for job in use.jobs]
    if others := use.jobs[_JOBS:]:
        jobs[_JOBS:] = [f"{len(others)} more jobs, with {trials_text(sum(job.members for job in others))}"]
    head = f"{use.device.kind}, {_state(use)}"
    return [f"{head}: {jobs[0]}"] if len(jobs) == 1 else [head, *jobs]


def cause_lines(found: Sequence[Cause]) -> list[str]:
    """A line a cause, the first ones: "3 failed: ValueError: x (trials 1, 4, 7; log: logs/job-00003.log)"."""
    lines = [f"{len(cause.trials)} failed: {cause_line(cause)}" for cause in found[:_CAUSES]]
    if rest := found[_CAUSES:]:
        lines.append(f"{sum(len(cause.trials) for cause in rest)} failed of {len(rest)} other causes, see shoal trials")
    return lines


def cause_line(cause: Cause) -> str:
    """ "ValueError: x (trials 1, 4, 7; log: logs/job-00003.log)"."""
    more = ", …" if len(cause.trials) > _TRIALS else ""
    named = f"{'trial' if len(cause.trials) == 1 else 'trials'} {numbers_text(cause.trials[:_TRIALS])}{more}"
    log = f"; log: {cause.log}" if cause.log else ""
    return f"{shown(shortened(cause.text))} ({named}{log})"


def cause_json(cause: Cause) -> dict[str, Any]:
    """A cause as plain values."""
    return {
        "cause": cause.text,
        "count": len(cause.trials),
        "trials": list(cause.trials),
        "log": cause.log or None,
    }


def unmeasured_lines(found: Sequence[Cause]) -> list[str]:
    """A line for each cause that profiles failed of, the first ones; the trials train unfused."""
    return [f"measuring failed: {cause_line(cause)}" for cause in found[:_CAUSES]]


def failing_lines(failing: Sequence[Failing]) -> list[str]:
    """What becomes of trials that failed, a line each, the first ones."""
    lines = [failing_text(each) for each in failing[:_FAILING]]
    if len(failing) > _FAILING:
        lines.append(f"{trials_text(len(failing) - _FAILING)} more, see shoal report")
    return lines


def failing_text(failing: Failing) -> str:
    """ "trial 7 failed twice (out of memory), waits to be tried again alone (try 3 of 3); log: ..."."""
    trial, job = failing.trial, failing.job
    times = _TIMES.get(trial.failures, f"{trial.failures} times")
    most = None if failing.retries is None else max(failing.retries, trial.failures) + 1
    count = f" (try {trial.failures + 1} of {most})" if most is not None else ""
    if trial.state is TrialState.RUNNING:
        then = f"{'is' if failing.runs else 'was being'} tried again in {trial.job} on {trial.device}{count}"
    elif job is not None and job.outcome == Outcome.OUT_OF_MEMORY and len(job.trials) > 1:
        then = f"waits to be tried again in a smaller array or alone{count}"
    else:
        then = f"waits to be tried again alone{count}"
    log = f"; log: {job.log}" if job is not None and job.log else ""
    cause = "the array that it was in" if job is None else cause_text(job.outcome, job.cause)
    return f"trial {trial.number} failed {times} ({cause}), {then}{log}"


def cause_text(outcome: str, cause: str) -> str:
    """How a job ended and why, as far as a line has room; that memory ran out says enough."""
    if outcome == Outcome.OUT_OF_MEMORY or not cause:
        return outcome
    return f"{outcome}: {shortened(cause)}"


def device_json(use: DeviceUse) -> dict[str, Any]:
    """A device with its jobs as plain values; None for what is not known."""
    device = use.device
    return {
        "device": device.name,
        "kind": device.kind,
        "node": device.node,
        "healthy": device.healthy,
        "reason": device.reason,
        "memory": device.memory,
        "promised": use.promised,
        "occupancy": use.occupancy,
        "jobs": [
            {
                "job": job.job,
                "purpose": str(job.purpose),
                "members": job.members,
                "compute": job.compute,
                "memory": job.memory,
                "cores": job.cores,
                "epochs_per_second": job.rate,
            }
            for job in use.jobs
        ],
    }


def failing_json(failing: Failing) -> dict[str, Any]:
    """A trial that failed as plain values, with what happens next in words."""
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


def _state(use: DeviceUse) -> str:
    if not use.device.healthy:
        return f"not in use ({use.device.reason or 'not healthy'})"
    if not use.jobs:
        return "idle"
    memory = "" if use.promised is None else f" and {_of_bytes(use.promised, use.device.memory)}"
    return f"{use.occupancy:.0%} of it{memory} promised"


def _of_bytes(part: int, whole: int) -> str:
    return f"{bytes_text(part)} of {bytes_text(whole)}"


def _job_text(job: JobUse, unit: str) -> str:
    rate = "" if job.rate is None else f", {rate_text(job.rate, unit)}"
    return f"{job.job} {_VERBS[job.purpose]} {trials_text(job.members)}{rate}"
