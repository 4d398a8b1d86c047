"""Trials of one structure that are trained as one model."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from shoal.core.demand import Profile
from shoal.core.trial import Trial

__all__ = ["Array", "FusionKey", "Member", "add_members", "remove_members"]


@dataclass(frozen=True, slots=True)
class FusionKey:
    """Trials that agree on this can be one model.

    Trials that differ in `structure` alone and are of one `family` can be one partially fused array, in which the
    submodules where they differ run member by member.

    Args:
        structure: digest of modules, shapes, dtypes, and of the optimizer's class if it is none of those whose members
            can be one array with others'; not of anything fusible.
        data: digest of the values that the task's `data` read from the config.
        batch_size: samples per step and member.
        order: seed of the order of samples; what a trial costs does not depend on it.
        opaque: whether a program of the user's trains it, of which only reports are seen: it is measured while it runs,
            and shares no process. `order` is then the number of the trial, so that no two have one key.
        family: digest of the model's class and its large parameters, which members of a partially fused array share;
            "" if there is nothing to share.
    """

    structure: str
    data: str
    batch_size: int
    order: int = 0
    opaque: bool = False
    family: str = ""

    @property
    def of_family(self) -> "FusionKey":
        """The key of an array of trials that agree in all of this but `structure`."""
        return replace(self, structure=self.family, family="")

    @property
    def steps(self) -> str:
        """What the time of a step depends on."""
        return f"{self.structure} x {self.batch_size}"


@dataclass(frozen=True, slots=True)
class Member:
    """A trial with the stretch it is to train: from after `start` epochs up to `target` epochs."""

    trial: Trial
    start: int
    target: int

    @property
    def epochs(self) -> int:
        """That it is to train."""
        return self.target - self.start


@dataclass(frozen=True, slots=True)
class Array:
    """Trials of one structure, trained as one model, each from where it stands to its own target.

    Args:
        key: of all members.
        members: at least one, but none of a job all of whose members are done.
        profile: what is known of the key where the array runs.
        pending: epochs that trials of the key have trained and are to train, which bounds what measuring it may take.
        apart: where it joins a job, it stays an array of its own, though there may be one of its key.

    Attributes:
        epochs: that each member is to train.
    """

    key: FusionKey
    members: tuple[Member, ...]
    profile: Profile | None = None
    pending: float = inf
    apart: bool = False
    epochs: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", tuple([member.epochs for member in self.members]))


def remove_members(arrays: Iterable[Array], trials: Collection[int]) -> tuple[Array, ...]:
    """Arrays without the members of some trials; those that then have none are left out."""
    rest = (replace(x, members=tuple(m for m in x.members if m.trial.number not in trials)) for x in arrays)
    return tuple(array for array in rest if array.members)


def add_members(arrays: Iterable[Array], more: Iterable[Array]) -> tuple[Array, ...]:
    """Arrays with the members of others: in the first of the same key, or as a further one, as `JobUpdate` has it."""
    held = list(arrays)
    for array in more:
        place = next((place for place, mine in enumerate(held) if mine.key == array.key), None)
        if place is None or array.apart:
            held.append(array)
        else:
            held[place] = replace(held[place], members=(*held[place].members, *array.members))
    return tuple(held)
