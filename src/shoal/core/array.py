"""Arrays: trials of one structure that are trained as one model, and their fusion keys."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from shoal.core.demand import Profile
from shoal.core.trial import Trial

__all__ = ["Array", "FusionKey", "Member", "add_members", "remove_members"]


@dataclass(frozen=True, slots=True)
class FusionKey:
    """Trials with equal keys can be trained as one model, unless they are opaque.

    Trials that differ only in `structure` and have the same `family` can form one partially fused array. Submodules
    that differ between its members run member by member.

    Args:
        structure: Digest of modules, shapes and dtypes, and of the optimizer's class unless it can be fused with
            other classes. Differences that fusion supports are not part of it.
        data: Digest of the values that the task's `data` read from the config.
        batch_size: Samples per step and member.
        order: Seed of the order of samples; the cost of a trial does not depend on it.
        opaque: Whether a user's program trains it. Shoal then sees only reports, measures it while it runs, and
            gives each trial a process of its own.
        family: Digest of the model's class and its large parameters, which members of a partially fused array share;
            "" if there are none.
    """

    structure: str
    data: str
    batch_size: int
    order: int = 0
    opaque: bool = False
    family: str = ""

    @property
    def family_key(self) -> "FusionKey":
        """Key of a partially fused array, in which members differ in `structure`."""
        return replace(self, structure=self.family, family="")

    @property
    def steps(self) -> str:
        """The part of the key on which the time of a step depends, as a text."""
        return f"{self.structure} x {self.batch_size}"


@dataclass(frozen=True, slots=True)
class Member:
    """A trial to be trained from epoch `start` to epoch `target`.

    Args:
        checkpoint: Beginning of the name of the oldest checkpoint it may continue from, as in `Report`; "" for any.
    """

    trial: Trial
    start: int
    target: int
    checkpoint: str = field(default="", compare=False)

    @property
    def epochs(self) -> int:
        """Number of epochs to train."""
        return self.target - self.start


@dataclass(frozen=True, slots=True)
class Array:
    """Trials of one structure, trained as one model, each from its present epoch to its own target.

    Args:
        members: At least one, but none if all members of the job are done.
        profile: Profile of the key on the device of the array; None if unknown.
        expected_epochs: Trained and remaining epochs of all trials of the key, which bound what profiling may cost.
        separate: Whether it stays a separate array when it joins a job with an array of the same key.
        later: Epochs -> expected number of other arrays of this key and size that train as many epochs later, on any
            device; they can reuse what this array compiles. Equality ignores it.

    Attributes:
        epochs: Number of epochs that each member shall train.
    """

    key: FusionKey
    members: tuple[Member, ...]
    profile: Profile | None = None
    expected_epochs: float = inf
    separate: bool = False
    later: Mapping[int, float] = field(default_factory=dict, compare=False, repr=False)
    epochs: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", tuple([member.epochs for member in self.members]))


def remove_members(arrays: Iterable[Array], trials: Collection[int]) -> tuple[Array, ...]:
    """Arrays without the members of some trials; arrays without members are left out."""
    remaining = (replace(x, members=tuple(m for m in x.members if m.trial.number not in trials)) for x in arrays)
    return tuple(array for array in remaining if array.members)


def add_members(arrays: Iterable[Array], more: Iterable[Array]) -> tuple[Array, ...]:
    """Arrays with further members: each in the first array of its key, or in a new array, as in `JobUpdate`."""
    held = list(arrays)
    for array in more:
        index = next((index for index, other in enumerate(held) if other.key == array.key), None)
        if index is None or array.separate:
            held.append(array)
        else:
            held[index] = replace(held[index], members=(*held[index].members, *array.members))
    return tuple(held)
