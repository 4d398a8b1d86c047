"""The fusion keys of trials, and the trials whose keys are not known yet."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import SignaturesFound
from shoal.core.job import Job, Purpose
from shoal.core.trial import Trial
from shoal.study.trials import TrialTable

__all__ = ["SignatureRegistry", "in_signature_jobs"]

_NO_KEY = FusionKey("unknown", "", 1)


class SignatureRegistry:
    """Distributes trials over signature jobs, sets the keys that these find, and isolates trials that crash them."""

    def __init__(self, trials: TrialTable, kinds: Collection[str]) -> None:
        self._trials = trials
        self.unmeasurable: set[tuple[FusionKey, str]] = set()
        self.reasons: dict[FusionKey, str] = {}
        self._kinds = frozenset(kinds)
        self._trained: Counter[FusionKey] = Counter()
        self._requested: dict[str, list[set[int]]] = {}  # training job -> trials of each request
        self._failed_in_training: set[int] = set()  # trials whose keys training jobs could not find
        self._suspects: set[int] = set()  # trials of signature jobs that crashed

    def split(self, unknown: Sequence[Member], jobs: int) -> list[Array]:
        """Split trials over a number of signature jobs; after a crash, each job gets one suspect."""
        suspects = [member for member in unknown if member.trial.number in self._suspects]
        chosen = suspects[:jobs] or unknown
        return [Array(_NO_KEY, tuple(share)) for index in range(jobs) if (share := chosen[index::jobs])]

    def assign_to_training(self, trials: Sequence[Trial], jobs: Sequence[str]) -> Mapping[str, tuple[Trial, ...]]:
        """Assign trials without a request to training jobs: id of the job -> trials whose keys the job must find."""
        requested = self._failed_in_training.union(self._suspects, *chain(*self._requested.values()))
        trials = [trial for trial in trials if trial.number not in requested]
        shares = {job: tuple(trials[index :: len(jobs)]) for index, job in enumerate(jobs)}
        for job, share in shares.items():
            if share:
                self._requested.setdefault(job, []).append({trial.number for trial in share})
        return {job: share for job, share in shares.items() if share}

    def count_epoch(self, trials: Iterable[int]) -> None:
        """Count an epoch that trials have finished."""
        keys = (self._trials[number].key for number in trials)
        for key, epochs in Counter(key for key in keys if key is not None).items():
            self._trained[replace(key, order=0)] += epochs

    def trained(self, key: FusionKey) -> int:
        """Number of epochs that trials of a key have trained, with any sample order."""
        return self._trained[replace(key, order=0)]

    def add_keys(self, found: SignaturesFound) -> None:
        """Store the keys that a job found."""
        self._trials.set_keys(found.keys)
        if requested := self._requested.get(found.job):
            self._failed_in_training |= requested.pop(0) - found.keys.keys()
        self._mark_unmeasurable({found.keys[number]: reason for number, reason in found.alone.items()})

    def end(self, job: Job, kind: str, *, failed: bool, reason: str = "") -> None:
        """Handle the end of a job, given with the arrays that it has not finished.

        After a failure, the trials whose keys the job had still to find become suspects, and the key of the first array
        of a profile job becomes unmeasurable on the kind of device.
        """
        left = set(chain(*self._requested.pop(job.id, [])))
        if not failed:
            return
        self._suspects |= left
        if job.purpose is Purpose.PROFILE:
            self.unmeasurable.update((array.key, kind) for array in job.arrays[:1])
            self.reasons.update((array.key, reason) for array in job.arrays[:1])
        elif job.purpose is Purpose.SIGNATURE:
            self._handle_crash(job, reason)

    def _handle_crash(self, job: Job, reason: str) -> None:
        """Retry the trials of a crashed signature job one by one; a trial that crashes alone gets a key of its own."""
        numbers = {member.trial.number for member in job.members}
        if len(numbers) > 1:
            self._suspects |= numbers
            return
        keys = {number: replace(_NO_KEY, structure=f"trial {number}") for number in numbers}
        self._trials.set_keys(keys)
        self._mark_unmeasurable(dict.fromkeys(keys.values(), reason))

    def _mark_unmeasurable(self, reasons: Mapping[FusionKey, str]) -> None:
        self.unmeasurable.update((key, kind) for key in reasons for kind in self._kinds)
        self.reasons.update(reasons)


def in_signature_jobs(jobs: Iterable[Job]) -> set[int]:
    """Numbers of the trials in running signature jobs."""
    return {member.trial.number for job in jobs if job.purpose is Purpose.SIGNATURE for member in job.members}
