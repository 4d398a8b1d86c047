"""What is known of the models of trials, and whose have still to be looked at."""

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
    """Keeps array keys, deals out who is to be looked at, and knows whom no job could look at.

    Args:
        kinds: of all devices.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self.keys: dict[int, FusionKey] = {}
        """By the number of the trial."""
        self.unmeasurable: set[tuple[FusionKey, str]] = set()
        """Keys that cannot be measured on a kind of device."""
        self._kinds = frozenset(kinds)
        self._trained: Counter[FusionKey] = Counter()
        self._looks: dict[str, list[set[int]]] = {}  # job -> trials that it was asked to look at beside its training
        self._unseen: set[int] = set()  # trials that no job can look at beside its training
        self._suspects: set[int] = set()  # trials of a survey that crashed

    def shares(self, unknown: Sequence[Member], jobs: int) -> list[Array]:
        """Who is to be looked at by so many survey jobs, some of each; after a crash one suspect by each."""
        suspects = [member for member in unknown if member.trial.number in self._suspects]
        chosen = suspects[:jobs] or unknown
        return [Array(_NO_KEY, tuple(share)) for place in range(jobs) if (share := chosen[place::jobs])]

    def looks(self, trials: Sequence[Trial], jobs: Sequence[str]) -> Mapping[str, tuple[Trial, ...]]:
        """Job -> trials that it is to look at beside its training; those that were not asked for yet."""
        asked = self._unseen.union(self._suspects, *chain(*self._looks.values()))
        trials = [trial for trial in trials if trial.number not in asked]
        shares = {job: tuple(trials[place :: len(jobs)]) for place, job in enumerate(jobs)}
        for job, share in shares.items():
            if share:
                self._looks.setdefault(job, []).append({trial.number for trial in share})
        return {job: share for job, share in shares.items() if share}

    def count(self, trials: Iterable[int]) -> None:
        """Trials have finished an epoch."""
        self._trained.update(replace(self.keys[number], order=0) for number in trials if number in self.keys)

    def trained(self, key: FusionKey) -> int:
        """Epochs that trials of a key have trained, whatever their order of samples."""
        return self._trained[replace(key, order=0)]

    def note(self, found: SignaturesFound) -> None:
        """Take over what a job found."""
        self.keys.update(found.keys)
        if looks := self._looks.get(found.job):
            self._unseen |= looks.pop(0) - found.keys.keys()
        self._give_up_measuring(found.keys[number] for number in found.alone)

    def end(self, job: Job, kind: str, *, failed: bool) -> None:
        """A job is over; if it failed, one that it was still to look at, or to measure, may be why.

        Args:
            job: with the arrays that it still had.
            kind: of its device.
            failed: whether it did.
        """
        left = set(chain(*self._looks.pop(job.id, [])))
        if not failed:
            return
        self._suspects |= left
        if job.purpose is Purpose.PROFILE:
            self.unmeasurable.update((array.key, kind) for array in job.arrays[:1])
        elif job.purpose is Purpose.SURVEY:
            self._crashed(job)

    def _crashed(self, survey: Job) -> None:
        """After a survey that crashed: one trial after another, and not again one that crashes alone."""
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
    """The trials that surveys among running jobs are looking at."""
    return {member.trial.number for job in jobs if job.purpose is Purpose.SURVEY for member in job.members}
