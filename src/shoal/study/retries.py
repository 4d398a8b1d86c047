"""The retry policy: decides which trials of a failed job are retried, and which have failed for good."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.core.array import Array
from shoal.core.cause import Cause, cause_of, causes, log_of
from shoal.core.device import Device
from shoal.core.event import ArrayFailed, Ended, Outcome
from shoal.core.resources import bytes_text
from shoal.plan.waiting import OutOfMemoryLimit
from shoal.study.trials import TrialRecord, TrialTable

__all__ = ["COMMON_FAILURES", "FailureContext", "FirstFailures", "RetryPolicy"]

COMMON_FAILURES = 5
"""A study ends if this many trials fail alone with one cause before any trial has reported."""


@dataclass(frozen=True)
class FailureContext:
    """Circumstances of a failure.

    Args:
        shared_array: Whether the arrays had more than one member, including members that have left.
        shared_device: Whether other jobs, or other arrays of the same job, are on the device.
        largest_memory: Bytes of the largest device on which the arrays may run.
    """

    arrays: tuple[Array, ...]
    device: Device
    shared_array: bool
    shared_device: bool = False
    largest_memory: int = 0


class RetryPolicy:
    """Decides how trials continue after a failure.

    - Trials that failed together are each retried alone, since any of them may be at fault.
    - After an out-of-memory error a trial is retried in an array of at most half the size. A trial alone in its array
      is retried on a device without other jobs, then on a larger device. If there is none, the trial has failed for
      good.
    - A trial that has failed alone more often than `retries` has failed for good. So has a trial that failed alone
      twice in a row at the same epoch with the same error type and message.
    """

    def __init__(self, trials: TrialTable, retries: int) -> None:
        self._trials = trials
        self._retries = retries
        self.first_failures = FirstFailures(trials)

    def decide(self, failed: Ended | ArrayFailed, context: FailureContext, left: Collection[int]) -> Mapping[int, str]:
        """Decide about the trials of a failure, in the trial table; return why each trial that failed for good did."""
        given_up: dict[int, str] = {}
        cause = cause_of(failed.message) or "no reason was given"
        log = log_of(failed.message)
        for array in context.arrays:
            present = [self._trials[m.trial.number] for m in array.members if m.trial.number in left]
            for record in present:
                if failed.outcome is Outcome.OUT_OF_MEMORY:
                    why, how = self._retry_after_out_of_memory(record, len(present), context)
                else:
                    why, how = self._retry(
                        record, failed.outcome, cause, context.shared_array, isinstance(failed, Ended)
                    )
                if why is not None:
                    given_up[record.number] = f"{failed.outcome} {why}:\n{failed.message}"
                if why is not None or not (context.shared_array or failed.outcome is Outcome.OUT_OF_MEMORY):
                    self.first_failures.note(
                        record.number, failed.message
                    )  # after an out-of-memory error a retry may succeed elsewhere
                where = f"; log: {log}" if log else ""
                record.failure_note = f"failed before ({failed.outcome}: {cause}), is tried again {how}{where}"
        return given_up

    def _retry(
        self, record: TrialRecord, outcome: Outcome, cause: str, shared_array: bool, with_job: bool
    ) -> tuple[str | None, str]:
        """The reason why a trial has failed for good, or None; and a text on how it is retried."""
        self._trials.isolate(record)
        tries = 0 if outcome is Outcome.REJECTED else self._retries
        how = f"by itself (try {record.failures + 1} of {max(record.failures, tries) + 1})"
        before, record.last_cause = record.last_cause, None
        if shared_array:
            return None, how
        if with_job and outcome is Outcome.RAISED:
            record.last_cause = (record.epoch, cause)
        same = record.last_cause is not None and record.last_cause == before
        retries = record.failures - 1
        after = f"after {retries} {'retry' if retries == 1 else 'retries'}"
        if record.failures > tries:
            return after, how
        return (f"{after}, twice alike at epoch {record.epoch}" if same else None), how

    def _retry_after_out_of_memory(
        self, record: TrialRecord, size: int, context: FailureContext
    ) -> tuple[str | None, str]:
        """As `_retry`, for a trial whose array ran out of memory."""
        device = context.device
        if size > 1:
            self._trials.set_oom_limit(record, OutOfMemoryLimit(size // 2))
            return None, f"among at most {size // 2}"
        if context.shared_device or len(context.arrays) > 1:
            self._trials.set_oom_limit(record, OutOfMemoryLimit(1, 0))
            return None, "with a device to itself"
        if context.largest_memory > device.memory:
            self._trials.set_oom_limit(record, OutOfMemoryLimit(1, device.memory + 1))
            return None, f"on a device of more than {bytes_text(device.memory)}"
        self._trials.set_oom_limit(record, OutOfMemoryLimit(1, 0))
        if record.failures <= self._retries:  # other programs may have freed memory since
            return None, "with a device to itself"
        return (
            f"by itself on {device.name}, which has {bytes_text(device.memory)}; a smaller batch or model, or a "
            "device with more memory, would help"
        ), ""


class FirstFailures:
    """Detects that the first `COMMON_FAILURES` trials of a study fail with one cause, each alone.

    No failure counts once a trial has reported, nor one that ended an earlier run.
    """

    def __init__(self, trials: TrialTable) -> None:
        self._trials = trials
        self._failures: dict[int, str] = {}
        self._over = False

    def reported(self) -> None:
        """Record that a trial has reported a value, so that failures no longer end the study."""
        self._over = True
        self._failures.clear()

    def note(self, number: int, message: str) -> None:
        """Count a failure of a trial that failed alone."""
        if not self._over and number not in self._trials.common_failures:
            self._failures[number] = message

    def common_cause(self) -> Cause | None:
        """The common cause that ends the study; None if the study continues."""
        cause = next(iter(causes(sorted(self._failures.items()))), None)
        return cause if cause is not None and len(cause.trials) >= COMMON_FAILURES else None
