"""The contract of a packing: which arrays share a process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from shoal.core.array import Array, FusionKey

__all__ = ["Candidate", "Packing", "PackingContext"]


@dataclass(frozen=True)
class Candidate:
    """An array that may share a process with others.

    Args:
        array: with at least one member.
        seconds: expected in a process of its own, without starting it; with what is expected to follow, where that
            comes back to the process.
        fetching: of these, spent on fetching and preparing samples.
        memory: bytes that it adds to a process.
        base: bytes of the process itself, before any array; of several candidates the most counts.
        tail: seconds of what can only follow it, wherever that is done (the delivery time of J. Carlier, 1982).

    Raises:
        ValueError: an amount is negative, or more seconds are spent on fetching than there are.
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
                f"a candidate's `fetching` is a part of its seconds, {self.seconds!r}, got {self.fetching!r}; "
                "give at least 0 and at most that"
            )
        for name in ("memory", "base"):
            if getattr(self, name) < 0:
                raise ValueError(f"a candidate's `{name}` must not be negative, got {getattr(self, name)!r}")

    @property
    def key(self) -> FusionKey:
        """Of its array."""
        return self.array.key


@dataclass(frozen=True)
class PackingContext:
    """Where the candidates are to run, and what is known of them together.

    Args:
        loads: expected seconds until each healthy device is free, 0 for an idle one; at least one.
        memory: bytes of the smallest device.
        start: seconds that any job costs beside its steps (dispatch, first batch).
        pack_speeds: two keys, or one for two arrays of it -> steps of both in one process over the sum of each by
            itself, as measured; below 1 is a gain. Pairs that were never measured are absent.
        axes: name of a parameter whose values have an order, such as "optimizer.momentum" -> its values in that order.
            Of a parameter that is not there the values that candidates have are put in order if all are numbers, else
            they are equal or not.
        seed: of whatever is drawn at random.

    Raises:
        ValueError: there is no device, or an amount is impossible.
    """

    loads: tuple[float, ...]
    memory: int
    start: float = 0.0
    pack_speeds: Mapping[frozenset[FusionKey], float] = field(default_factory=dict)
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
        for pair, pack_speed in self.pack_speeds.items():
            if not (pack_speed > 0 and isfinite(pack_speed)):
                raise ValueError(f"a pace must be finite and above 0, got {pack_speed!r} of {sorted(map(str, pair))}")

    def pack_speed(self, one: FusionKey, other: FusionKey) -> float | None:
        """Of an array of each in one process; None if that was never measured."""
        return self.pack_speeds.get(frozenset((one, other)))


class Packing(ABC):
    """Decides which arrays share a process, before a policy decides which process runs where (pack_opt of Pack).

    The planner calls `pack` before it asks the policy: in each turn once for each set of arrays that wait, read the
    same data and are known on the same kinds of devices. Arrays that must run by themselves are left out: they were
    never measured, train by themselves, or failed in company. After the policy has answered, the planner calls `suits`
    for arrays that found no device and running jobs that have room.

    A packing is a pure function of the arguments of `pack`: no clock, no I/O, no state between calls, no randomness but
    `PackingContext.seed`.

    What `pack` may return:

    - Every candidate is in exactly one group, in the order in which it was given; groups come in the order of their
      first candidates.
    - All arrays of a group have the same `key.data`: they are fed by one stream.
    - The most `base` of a group and the sum of its `memory` are at most `PackingContext.memory`, unless it has one
      candidate.

    `check_groups` holds an answer against these rules, and the planner runs it on every answer. An illegal answer is a
    `PackError`. That, or whatever `pack` or `suits` raises, ends the run; all that was reported is recorded, and
    `resume` goes on, also with another packing.

    `shoal.testing.check_packing` checks this contract.
    """

    @abstractmethod
    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Put candidates that are to share a process into one group; any number of candidates, none included."""

    def suits(self, incoming: Candidate, present: Sequence[Candidate], context: PackingContext) -> bool:
        """Whether a candidate is to come into a process in which others are.

        By default, if it would have been put together with one of them.

        Args:
            incoming: that waits.
            present: what the process still trains, at least one.
            context: of its device.
        """
        groups = self.pack([*present, incoming], context)
        return any(len(group) > 1 and any(each is incoming for each in group) for group in groups)
