"""The contract of a packing: which arrays share a process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import final

from shoal.core.array import Array, FusionKey

__all__ = ["Candidate", "NoPacking", "Packing", "PackingContext"]


@dataclass(frozen=True)
class Candidate:
    """An array that may share a process with others.

    Args:
        array: An array with at least one member.
        seconds: Expected seconds in a process of its own, without the start; including the training that follows, if
            that returns to the process.
        fetching: Part of these seconds for fetching and preparing samples.
        memory: Bytes that the array adds to a process.
        base: Bytes of the process before any array; the largest value of a pack counts.
        tail: Seconds of training that follows the array on any device (the delivery time of J. Carlier, 1982).

    Raises:
        ValueError: An amount is negative, or `fetching` exceeds `seconds`.
    """

    array: Array
    seconds: float
    fetching: float
    memory: int
    base: int
    tail: float = 0.0

    def __post_init__(self) -> None:
        if not self.array.members:
            raise ValueError("a candidate's array must have a member, it has none; leave out arrays that are done")
        for name in ("seconds", "tail"):
            if not (getattr(self, name) >= 0 and isfinite(getattr(self, name))):
                raise ValueError(f"a candidate's `{name}` must be finite and not negative, got {getattr(self, name)!r}")
        if not 0 <= self.fetching <= self.seconds:
            raise ValueError(
                f"a candidate's `fetching` must be at least 0 and at most its seconds, {self.seconds!r}, "
                f"got {self.fetching!r}"
            )
        for name in ("memory", "base"):
            if getattr(self, name) < 0:
                raise ValueError(f"a candidate's `{name}` must not be negative, got {getattr(self, name)!r}")

    @property
    def key(self) -> FusionKey:
        """Key of the array."""
        return self.array.key


@dataclass(frozen=True)
class PackingContext:
    """The devices for the candidates, and measurements of pairs of them.

    Args:
        loads: Expected seconds until each healthy device is free, 0 for an idle one; at least one.
        memory: Bytes of the smallest device.
        start: Fixed overhead of a job in seconds (dispatch, first batch).
        relative_times: Two keys, or one key for two arrays of it -> measured relative time: seconds of the steps of
            both arrays in one process, divided by the seconds of running one after another; below 1 is a gain.
            Unmeasured pairs are absent.
        axes: Name of a parameter with ordered values, such as "optimizer.momentum" -> its values in order. The values
            of other parameters are sorted if all are numbers; else they are only equal or different.
        seed: Seed of random choices.

    Raises:
        ValueError: There is no device, or an amount is impossible.
    """

    loads: tuple[float, ...]
    memory: int
    start: float = 0.0
    relative_times: Mapping[frozenset[FusionKey], float] = field(default_factory=dict)
    axes: Mapping[str, Sequence[object]] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.loads:
            raise ValueError(
                "`loads` names no device; give the seconds until each is free, (0.0,) for one that is idle"
            )
        for name, values in (("loads", self.loads), ("start", (self.start,))):
            if not all(value >= 0 and isfinite(value) for value in values):
                raise ValueError(f"`{name}` must be finite seconds and not negative, got {getattr(self, name)!r}")
        if self.memory < 0:
            raise ValueError(f"`memory` must not be negative, got {self.memory!r}")
        for pair, relative_time in self.relative_times.items():
            if not (relative_time > 0 and isfinite(relative_time)):
                raise ValueError(
                    f"a relative time must be finite and above 0, got {relative_time!r} of {sorted(map(str, pair))}"
                )

    def relative_time(self, one: FusionKey, other: FusionKey) -> float | None:
        """Return the relative time of an array of each key; None if it was never measured."""
        return self.relative_times.get(frozenset((one, other)))


class Packing(ABC):
    """Decides which arrays share a process, before a policy decides which process runs where (pack_opt of Pack).

    The planner calls `pack` before it asks the policy: in each turn once for each set of waiting arrays that read the
    same data and have profiles on the same kinds of devices. Arrays that must run alone are left out: arrays without a
    profile, opaque arrays, and arrays that failed in a shared job. After the policy has answered, the planner calls
    `admits` for arrays without a device and running jobs with room.

    A packing is a pure function of the arguments of `pack`: no clock, no I/O, no state between calls, no randomness but
    `PackingContext.seed`.

    What `pack` may return:

    - Every candidate is in exactly one pack, in the given order; packs are in the order of their first candidates.
    - All arrays of a pack have the same `key.data`, since one stream feeds them.
    - The largest `base` of a pack plus the sum of its `memory` is at most `PackingContext.memory`, unless it has one
      candidate.

    The planner checks every answer with `check_packs`, which raises a `PackError` for an illegal one. This error, and
    any error of `pack` or `admits`, ends the run. All reports are recorded, and `resume` continues, also with another
    packing.

    `shoal.testing.check_packing` checks this contract.
    """

    @abstractmethod
    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Put candidates that are to share a process into one pack; there may be no candidates."""

    def admits(self, incoming: Candidate, present: Sequence[Candidate], context: PackingContext) -> bool:
        """Return whether a running process admits a waiting candidate.

        By default, whether `pack` puts it into a pack with a present candidate.

        Args:
            incoming: The waiting candidate.
            present: The candidates that the process still trains, at least one.
            context: The context with the device of the process.
        """
        packs = self.pack([*present, incoming], context)
        return any(len(pack) > 1 and any(each is incoming for each in pack) for pack in packs)


@final
@dataclass(frozen=True)
class NoPacking(Packing):
    """Puts every array into a process of its own."""

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Return one pack per candidate."""
        return [(candidate,) for candidate in candidates]
