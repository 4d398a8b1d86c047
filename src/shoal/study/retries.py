"""Retries: which trials of a failed job are tried again, and how; which have failed for good."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.core.array import Array
from shoal.core.cause import Cause, cause_of, causes, log_of
from shoal.core.device import Device
from shoal.core.event import ArrayFailed, Ended, Outcome
from shoal.planner.partition import ResourceLimit
from shoal.schedule.ledger import bytes_text
from shoal.study.trials import TrialRecord, TrialTable

__all__ = ["ALIKE", "FailureContext", "FirstFailures", "RetryPolicy"]

ALIKE = 5
"""Number of trials that end a study by failing alone with one cause, while no trial has reported."""


@dataclass(frozen=True)
class FailureContext:
    """Circumstances of a failure.

    Args:
        arrays: The failed arrays.
        device: Device on which they ran.
        company: Whether they had more than one member, including members that left before.
        shared: Whether other jobs, or other arrays of the same job, are on the device.
        largest: Bytes of the largest device on which the arrays may run.
    """

    arrays: tuple[Array, ...]
    device: Device
    company: bool
    shared: bool = False
    largest: int = 0


class RetryPolicy:
    """Decides how trials go on after a failure.

    - Trials that failed together are tried again alone: any of them may be at fault, so each gets one try by itself.
    - After an out-of-memory error a trial is tried again in an array of at most half the size. A trial alone in its
      array gets a device to itself, then a larger device; if there is none, it has failed for good.
    - A trial that has failed alone more often than `retries` has failed for good. So has a trial whose code raised the
      same error, by type and message, at the same epoch twice in a row, both times alone.

    Args:
        trials: Trials of the study, in which the decisions are noted.
        retries: Number of retries of a trial after its first failure.
    """

    def __init__(self, trials: TrialTable, retries: int) -> None:
        self._trials = trials
        self._retries = retries
        self.first = FirstFailures(trials)
        """Detector of a common failure of the first trials."""

    def judge(self, failed: Ended | ArrayFailed, scene: FailureContext, left: Collection[int]) -> Mapping[int, str]:
        """Decide how trials go on, and note the decisions.

        Args:
            failed: End of the job, or failure of some of its arrays.
            scene: Circumstances of the failure.
            left: Numbers of the trials that wait again.

        Returns:
            Number of each trial that has failed for good -> reason.
        """
        given_up: dict[int, str] = {}
        cause = cause_of(failed.message) or "no reason was given"
        log = log_of(failed.message)
        for array in scene.arrays:
            present = [self._trials[m.trial.number] for m in array.members if m.trial.number in left]
            for record in present:
                if failed.outcome is Outcome.OUT_OF_MEMORY:
                    why, then = self._short_of_memory(record, len(present), scene)
                else:
                    why, then = self._again(record, failed.outcome, cause, scene.company, isinstance(failed, Ended))
                if why is not None:
                    given_up[record.number] = f"{failed.outcome} {why}:\n{failed.message}"
                if why is not None or not (scene.company or failed.outcome is Outcome.OUT_OF_MEMORY):
                    self.first.note(record.number, failed.message)  # after an out-of-memory error it may run elsewhere
                where = f"; log: {log}" if log else ""
                record.story = f"failed before ({failed.outcome}: {cause}), is tried again {then}{where}"
        return given_up

    def _again(
        self, record: TrialRecord, outcome: Outcome, cause: str, company: bool, with_job: bool
    ) -> tuple[str | None, str]:
        """The reason why a trial has failed for good, or None; and the way in which it is tried again.

        Args:
            record: Record of the trial.
            outcome: Outcome of its array.
            cause: Cause of the failure, in a line.
            company: Whether the array had more members.
            with_job: Whether the whole job failed, and not one of its arrays.
        """
        self._trials.alone.add(record.number)
        tries = 0 if outcome is Outcome.REJECTED else self._retries
        then = f"by itself (try {record.failures + 1} of {max(record.failures, tries) + 1})"
        before, record.cause = record.cause, None
        if company:
            return None, then
        if with_job and outcome is Outcome.RAISED:
            record.cause = (record.epoch, cause)
        same = record.cause is not None and record.cause == before
        after = f"after {record.failures - 1} retries"
        if record.failures > tries:
            return after, then
        return (f"{after}, twice alike at epoch {record.epoch}" if same else None), then

    def _short_of_memory(self, record: TrialRecord, size: int, scene: FailureContext) -> tuple[str | None, str]:
        """As `_again`, for a trial whose array ran out of memory."""
        limits, number, device = self._trials.limits, record.number, scene.device
        if size > 1:
            limits[number] = ResourceLimit(size // 2)
            return None, f"among at most {size // 2}"
        if scene.shared or len(scene.arrays) > 1:
            limits[number] = ResourceLimit(1, 0)
            return None, "with a device to itself"
        if scene.largest > device.memory:
            limits[number] = ResourceLimit(1, device.memory + 1)
            return None, f"on a device of more than {bytes_text(device.memory)}"
        limits[number] = ResourceLimit(1, 0)
        if record.failures <= self._retries:  # other programs may have held memory, and freed it since
            return None, "with a device to itself"
        return (
            f"by itself on {device.name}, which has {bytes_text(device.memory)}; a smaller batch or model, or a "
            "device with more memory, would help"
        ), ""


class FirstFailures:
    """Detects that the first `ALIKE` trials of a study fail with one cause, each alone.

    It counts nothing once a trial has reported a value: then retries deal with failures. Nor does it count trials whose
    failure ended an earlier run.

    Args:
        trials: Trials of the study.
    """

    def __init__(self, trials: TrialTable) -> None:
        self._trials = trials
        self._failures: dict[int, str] = {}
        self._over = False

    def reported(self) -> None:
        """Note that a trial has reported a value, so not all fail."""
        self._over = True
        self._failures.clear()

    def note(self, number: int, message: str) -> None:
        """Count a failure that only the trial itself can have caused.

        Args:
            number: Number of the trial.
            message: Whole message of the failure.
        """
        if not self._over and number not in self._trials.tried:
            self._failures[number] = message

    def alike(self) -> Cause | None:
        """The common cause that ends the study; None if the study goes on."""
        most = next(iter(causes(sorted(self._failures.items()))), None)
        return most if most is not None and len(most.trials) >= ALIKE else None
