"""What was measured of some configurations, alone and in company."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from shoal.core.array import Array
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.cost.estimate import memory, step_seconds
from shoal.dry_run.parts import Parts, epoch, job, saved, together, total

__all__ = ["Company", "Failed", "Measured", "Rehearsal", "Stream", "company_of", "in_company"]

WORTH = 0.05
"""Part of the time that sharing must save to be said to pay."""


@dataclass(frozen=True)
class Measured:
    """An array of trials, and what was measured of it.

    Args:
        array: the trials that are fused, perhaps one.
        profile: of their structure.
        switching_alone: seconds that a change to one of them costs beside its steps and samples.
        switching: the same of all of them as one.
    """

    array: Array
    profile: Profile
    switching_alone: float
    switching: float

    @property
    def members(self) -> int:
        """How many trials are one."""
        return len(self.array.members)

    @property
    def step_alone(self) -> float:
        """Seconds of a step of one trial by itself."""
        return step_seconds(self.profile, 1)

    @property
    def step_fused(self) -> float:
        """Seconds of a step of all at once, for each of them."""
        return step_seconds(self.profile, self.members) / self.members

    @property
    def gain(self) -> float:
        """How many times as fast a trial steps among the others."""
        return self.step_alone / self.step_fused

    @property
    def memory_alone(self) -> int:
        """Bytes at the peak of a process with one of the trials."""
        return memory(self.profile, 1)

    @property
    def memory(self) -> int:
        """Bytes at the peak of a process with all of them."""
        return memory(self.profile, self.members)

    @property
    def preprocessing(self) -> float:
        """Part of the time of a trial by itself in which samples are fetched and prepared, where they are not kept."""
        fetching = self.profile.fetch_seconds
        return fetching / (fetching + self.step_alone)

    @property
    def alone(self) -> list[Parts]:
        """An epoch of each trial by itself."""
        return [epoch(self.profile, 1, self.switching_alone)] * self.members

    @property
    def fused(self) -> Parts:
        """An epoch of all of them as one."""
        return epoch(self.profile, self.members, self.switching)


@dataclass(frozen=True)
class Company:
    """What real steps of several arrays in one process showed.

    Args:
        lanes: the arrays.
        way: in which they take turns, as `shoal.pack.turns` has it; None if time was up before one was chosen.
        pace: seconds of their steps in that way over those of array after array; at most 1, as that is one of the ways.
        sample_seconds: in which a sample goes through one of the lanes, fetching included; None if that is not known.
        fetches: how often a sample is fetched for all of them together.
        error: why it could not be measured; nothing else counts then.
    """

    lanes: tuple[Array, ...]
    way: str | None = None
    pace: float = 1.0
    sample_seconds: float | None = None
    fetches: float = 1.0
    error: str = ""

    @property
    def trials(self) -> tuple[int, ...]:
        """Numbers of all that are trained there, those of a lane together."""
        return tuple(member.trial.number for lane in self.lanes for member in lane.members)


@dataclass(frozen=True)
class Failed:
    """Trials that cannot be trained, or not measured, and why."""

    trials: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Stream:
    """Arrays that read the same data, and what their trials take for one epoch each, in seconds by part.

    Args:
        arrays: indices of them.
        apart: every trial by itself, one after another; T_s(Seq).
        packed: no two fused, as many as there is memory for in one process; T_s(Pack).
        fused: the arrays one after another.
        chosen: as a search would have them: fused, and packed where that pays; what is kept, one of them fetches.
    """

    arrays: tuple[int, ...]
    apart: Parts
    packed: Parts
    fused: Parts
    chosen: Parts


@dataclass(frozen=True)
class Rehearsal:
    """What a few configurations cost on a device, and what a search would do with them.

    Args:
        device: on which all was measured.
        arrays: as a search would fuse them, in the order of their first trials.
        groups: indices of arrays that a search would let share a process; each array is in one.
        decided: for each array, what becomes of it and why.
        companies: measured, of the groups of several arrays.
        unfused: the trials that nothing keeps from sharing one process, each by itself a lane; measured where there are
            several. Each trial of the arrays is in one.
        failed: trials that are in no array.
    """

    device: Device
    arrays: tuple[Measured, ...]
    groups: tuple[tuple[int, ...], ...]
    decided: tuple[str, ...]
    companies: tuple[Company, ...]
    unfused: tuple[Company, ...]
    failed: tuple[Failed, ...]

    @property
    def trials(self) -> int:
        """How many were measured."""
        return sum(each.members for each in self.arrays)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The arrays by their data."""
        by_data: dict[str, list[int]] = {}
        for index, each in enumerate(self.arrays):
            by_data.setdefault(each.array.key.data, []).append(index)
        return tuple(self._stream(tuple(indices)) for indices in by_data.values())

    def in_all(self, name: str) -> Parts:
        """All streams one after another; `name` is one of `Stream`'s: "apart", "packed", "fused", "chosen"."""
        return total(getattr(stream, name) for stream in self.streams)

    def saves(self, name: str) -> float:
        """Part of the time that is saved so, against every trial by itself; for `name` see `in_all`."""
        return saved(self.in_all("apart"), self.in_all(name))

    @property
    def pays(self) -> bool:
        """Whether a search that shares is clearly faster than one that does not."""
        return self.saves("chosen") >= WORTH

    def company(self, group: Sequence[int]) -> Company:
        """What was measured of a group of several arrays."""
        return company_of([self.arrays[index].array for index in group], self.companies)

    def _stream(self, indices: tuple[int, ...]) -> Stream:
        lone = {
            member.trial.number: parts
            for index in indices
            for member, parts in zip(self.arrays[index].array.members, self.arrays[index].alone, strict=True)
        }
        packs = [
            in_company([lone[number] for number in company.trials], company)
            for company in self.unfused
            if company.trials[0] in lone
        ]
        chosen = []
        for group in self.groups:
            if group[0] in indices:
                parts = [self.arrays[index].fused for index in group]
                chosen.append(in_company(parts, self.company(group)) if len(group) > 1 else job(parts[0]))
        choice = total(chosen)
        if all(self.arrays[index].profile.sharing == "kept" for index in indices):
            choice = replace(choice, preprocessing=max(parts.preprocessing for parts in chosen))
        return Stream(
            indices,
            apart=total(job(parts) for parts in chain.from_iterable(self.arrays[index].alone for index in indices)),
            packed=total(packs),
            fused=total(job(self.arrays[index].fused) for index in indices),
            chosen=choice,
        )


def company_of(lanes: Sequence[Array], companies: Iterable[Company]) -> Company:
    """What was measured of just these lanes; one of them is of these."""
    return next(each for each in companies if each.lanes == tuple(lanes))


def in_company(parts: Sequence[Parts], company: Company) -> Parts:
    """An epoch of arrays in one process; of what could not run so, one after another."""
    if company.error:
        return total(map(job, parts))
    return job(together(parts, company.pace, company.fetches))
