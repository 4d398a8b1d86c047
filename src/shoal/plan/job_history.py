"""Histories of jobs, also of those of an engine that has ended, and summaries of their members."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import TurnStats
from shoal.core.trial import TrialGroup

__all__ = ["EarlierJob", "JobHistory", "MemberSummary", "restored_arrays"]


@dataclass(frozen=True)
class EarlierJob:
    """A job of an engine that has ended: it was suspended, or was running when the engine ended.

    Args:
        arrays: Numbers of the trials of each of its arrays that wait.
        ran: Seconds on devices.
        waited: Seconds between its end and the end of the engine.
        age: Seconds between its first start and the end of the engine.
    """

    id: str
    suspended: bool
    arrays: tuple[frozenset[int], ...]
    device: str
    quanta: tuple[TurnStats, ...]
    preemptions: int
    ran: float
    waited: float
    age: float


@dataclass(frozen=True, slots=True)
class MemberSummary:
    """Properties of a job that are derived from its members.

    Args:
        budget: Target epoch of the member with the most epochs left; None without members.
        epoch: Number of epochs that this member has trained.
        with_follow_up: Arrays after which training may follow, each with pairs (epochs left, epochs of that training).
    """

    trial_group: str | None
    budget: int | None
    epoch: int
    with_follow_up: tuple[tuple[Array, AbstractSet[tuple[int, int]]], ...]

    @classmethod
    def of(cls, arrays: Sequence[Array], trial_groups: Mapping[int, TrialGroup]) -> "MemberSummary":
        """The summary of the members of some arrays, with the TrialGroups of trials by number."""
        names: set[str] = set()
        longest: Member | None = None
        with_follow_up: list[tuple[Array, AbstractSet[tuple[int, int]]]] = []
        for array in arrays:
            follow_ups: set[tuple[int, int]] = set()
            for member, epochs in zip(array.members, array.epochs, strict=True):
                group = trial_groups.get(member.trial.number)
                names.add("" if group is None else group.name)
                if group is not None and group.epochs_ahead:
                    follow_ups.add((epochs, group.epochs_ahead))
                if longest is None or epochs > longest.epochs:
                    longest = member
            if follow_ups:
                with_follow_up.append((array, follow_ups))
        return cls(
            (names.pop() or None) if len(names) == 1 else None,
            None if longest is None else longest.target,
            0 if longest is None else longest.start,
            tuple(with_follow_up),
        )


@dataclass(frozen=True)
class JobHistory:
    """History of one job.

    Args:
        arrived: Time at which its first trial began to wait.
        since: Time at which the job entered its current state.
        device: Current or last device, without those of helpers. The queue of the job belongs to it.
        share: Share of the compute of its device, or None.
        ran: Seconds on devices before the last start.
        turn_since: Start of the current turn; None in the first turn since `since`.
        preemption_requested_at: Time of the last request to leave its device.
        switch: Seconds that the last departure from its device took.
        may_grow: Whether it may get further devices since its last start.
    """

    arrived: float
    since: float
    device: str
    share: float | None = None
    ran: float = 0.0
    quanta: tuple[TurnStats, ...] = ()
    current_turn: TurnStats | None = None
    turn_since: float | None = None
    preemptions: int = 0
    has_reported: bool = False
    preemption_requested_at: float = 0.0
    switch: float | None = None
    may_grow: bool = True

    @classmethod
    def restored(cls, job: EarlierJob, now: float) -> "JobHistory":
        """The history of a job of an earlier engine, without the time between the two engines."""
        return cls(
            now - job.age,
            now - job.waited,
            job.device,
            ran=job.ran,
            quanta=job.quanta,
            preemptions=job.preemptions,
        )

    @property
    def view_fields(self) -> dict[str, Any]:
        """Fields of a view for policies that depend on the history of the job."""
        return {
            "since": self.since,
            "quanta": self.quanta,
            "preemptions": self.preemptions,
            "home": self.device,
        }


def restored_arrays(members: Sequence[tuple[Member, FusionKey]]) -> list[Array]:
    """Return the arrays of members that an earlier engine had in one array, or in several with equal steps."""
    keys = dict.fromkeys(key for _, key in members)
    families = {key.family_key for key in keys}
    if len(keys) > 1 and len(families) == 1 and all(key.family for key in keys):
        return [Array(families.pop(), tuple(member for member, _ in members))]
    return [Array(key, tuple(member for member, other in members if other == key)) for key in keys]
