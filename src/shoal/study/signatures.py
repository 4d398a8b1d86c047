"""Signatures: the fusion keys of trials, and the trials that must still be surveyed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import SignaturesFound
from shoal.core.job import Job, Purpose
from shoal.core.trial import Trial

__all__ = ["SignatureRegistry", "surveyed"]

_NO_KEY = FusionKey("not looked at", "", 1)


class SignatureRegistry:
    """Keeps fusion keys, distributes trials over surveys, and remembers the trials that crash them.

    Args:
        kinds: Kinds of all devices.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self.keys: dict[int, FusionKey] = {}
        """Number of a trial -> its fusion key."""
        self.unmeasurable: set[tuple[FusionKey, str]] = set()
        """Pairs of a key and a kind of device on which it cannot be measured."""
        self._kinds = frozenset(kinds)
        self._trained: Counter[FusionKey] = Counter()
        self._looks: dict[str, list[set[int]]] = {}  # job -> trials that it surveys beside its training, by request
        self._unseen: set[int] = set()  # trials that training jobs could not survey
        self._suspects: set[int] = set()  # trials of surveys that crashed

    def shares(self, unknown: Sequence[Member], jobs: int) -> list[Array]:
        """The trials of each of so many survey jobs; after a crash, one suspect for each job."""
        suspects = [member for member in unknown if member.trial.number in self._suspects]
        chosen = suspects[:jobs] or unknown
        return [Array(_NO_KEY, tuple(share)) for place in range(jobs) if (share := chosen[place::jobs])]

    def looks(self, trials: Sequence[Trial], jobs: Sequence[str]) -> Mapping[str, tuple[Trial, ...]]:
        """Training job -> trials that it shall survey beside its training, without those already requested."""
        asked = self._unseen.union(self._suspects, *chain(*self._looks.values()))
        trials = [trial for trial in trials if trial.number not in asked]
        shares = {job: tuple(trials[place :: len(jobs)]) for place, job in enumerate(jobs)}
        for job, share in shares.items():
            if share:
                self._looks.setdefault(job, []).append({trial.number for trial in share})
        return {job: share for job, share in shares.items() if share}

    def count(self, trials: Iterable[int]) -> None:
        """Count an epoch that trials have finished."""
        self._trained.update(replace(self.keys[number], order=0) for number in trials if number in self.keys)

    def trained(self, key: FusionKey) -> int:
        """Epochs that trials of a key have trained, with any order of samples."""
        return self._trained[replace(key, order=0)]

    def note(self, found: SignaturesFound) -> None:
        """Store the keys that a job found."""
        self.keys.update(found.keys)
        if looks := self._looks.get(found.job):
            self._unseen |= looks.pop(0) - found.keys.keys()
        self._give_up_measuring(found.keys[number] for number in found.alone)

    def end(self, job: Job, kind: str, *, failed: bool) -> None:
        """Handle the end of a job. After a failure, the trials or keys that it had left are suspects.

        Args:
            job: The job, with the arrays that it had left.
            kind: Kind of its device.
            failed: Whether it failed.
        """
        left = set(chain(*self._looks.pop(job.id, [])))
        if not failed:
            return
        self._suspects |= left
        if job.purpose is Purpose.PROFILE:
            self.unmeasurable.update((array.key, kind) for array in job.arrays[:1])
        elif job.purpose is Purpose.SIGNATURE:
            self._crashed(job)

    def _crashed(self, survey: Job) -> None:
        """After a crashed survey, survey its trials one by one; give up a trial that crashes alone."""
        numbers = {member.trial.number for member in survey.members}
        if len(numbers) > 1:
            self._suspects |= numbers
            return
        keys = {number: replace(_NO_KEY, structure=f"trial {number}") for number in numbers}
        self.keys.update(keys)
        self._give_up_measuring(keys.values())

    def _give_up_measuring(self, keys: Iterable[FusionKey]) -> None:
        self.unmeasurable.update((key, kind) for key in keys for kind in self._kinds)


def surveyed(jobs: Iterable[Job]) -> set[int]:
    """Numbers of the trials in running survey jobs."""
    return {member.trial.number for job in jobs if job.purpose is Purpose.SIGNATURE for member in job.members}
