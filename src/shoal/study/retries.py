"""What becomes of the trials of a job that failed: who is tried again, how, and who has failed for good."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.core.array import Array
from shoal.core.cause import Cause, cause_of, causes, log_of
from shoal.core.device import Device
from shoal.core.event import ArrayFailed, Ended, Outcome
from shoal.planner.resource_limit import ResourceLimit
from shoal.schedule.ledger import bytes_text
from shoal.study.trials import TrialRecord, TrialTable

__all__ = ["ALIKE", "FailureContext", "FirstFailures", "RetryPolicy"]

ALIKE = 5
"""So many trials that fail of one cause, each by itself, end a study in which no trial has reported anything."""


@dataclass(frozen=True)
class FailureContext:
    """Where a job failed.

    Args:
        arrays: that failed.
        device: where they ran.
        company: whether they had more than one member, those that left before included.
        shared: whether other jobs, or other arrays of this one, are on the device.
        largest: bytes of the largest device that there is.
    """

    arrays: tuple[Array, ...]
    device: Device
    company: bool
    shared: bool = False
    largest: int = 0


class RetryPolicy:
    """Judges failures.

    - Who failed in company is tried again alone: who is at fault is unknown, so each gets at least one try by itself.
    - Who ran out of memory is tried again in an array of half the size at most; one that is alone in its array gets a
      device to itself, then a larger one; where there is none, it has failed.
    - A trial that has failed by itself more often than it may be retried has failed for good. So has one whose own code
      raised the same error, by its type and message, at the same epoch twice in a row, both times by itself: it would
      a third time.

    Args:
        trials: of the study; what is decided is noted there.
        retries: how often a trial whose job failed is tried again.
    """

    def __init__(self, trials: TrialTable, retries: int) -> None:
        self._trials = trials
        self._retries = retries
        self.first = FirstFailures(trials)
        """Knows whether there is any use in going on."""

    def judge(self, failed: Ended | ArrayFailed, scene: FailureContext, left: Collection[int]) -> Mapping[int, str]:
        """Decide how trials go on, and note it.

        Args:
            failed: what was said of the job, or of some of its arrays.
            scene: where it was.
            left: numbers of the trials that wait again.

        Returns:
            Number of each trial that has failed for good -> why.
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
                    self.first.note(record.number, failed.message)  # one that ran out of memory may do well elsewhere
                where = f"; log: {log}" if log else ""
                record.story = f"failed before ({failed.outcome}: {cause}), is tried again {then}{where}"
        return given_up

    def _again(
        self, record: TrialRecord, outcome: Outcome, cause: str, company: bool, with_job: bool
    ) -> tuple[str | None, str]:
        """Why a trial has failed for good, None if it has not; and how it is tried again.

        Args:
            record: the trial's.
            outcome: of its array.
            cause: of that, in a line.
            company: whether the array had more members.
            with_job: whether there was no other array in its process.
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
        """As `_again`, of a trial whose array ran out of memory."""
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
        if record.failures <= self._retries:  # others may have held some of it, and let go
            return None, "with a device to itself"
        return (
            f"by itself on {device.name}, which has {bytes_text(device.memory)}; a smaller batch or model, or a "
            "device with more memory, would help"
        ), ""


class FirstFailures:
    """Notices that the first trials of a study fail of one cause: `ALIKE` of them, each by itself.

    Once any trial of the study has reported anything it notices nothing more, and failures are a matter of retries. So
    are those of trials that it has ended an earlier run on.

    Args:
        trials: of the study.
    """

    def __init__(self, trials: TrialTable) -> None:
        self._trials = trials
        self._failures: dict[int, str] = {}
        self._over = False

    def reported(self) -> None:
        """A trial has reported a value, so not all fail."""
        self._over = True
        self._failures.clear()

    def note(self, number: int, message: str) -> None:
        """A trial has failed, and nothing but the trial itself can be to blame.

        Args:
            number: the trial's.
            message: all that was said of it.
        """
        if not self._over and number not in self._trials.tried:
            self._failures[number] = message

    def alike(self) -> Cause | None:
        """What the study is to end of; None if it is to go on."""
        most = next(iter(causes(sorted(self._failures.items()))), None)
        return most if most is not None and len(most.trials) >= ALIKE else None
