"""What the planner makes of trials: arrays, the jobs that carry them, and what a worker is told of its study."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from pathlib import Path

from shoal.cost.demand import Demand, Profile
from shoal.trial import Trial

__all__ = ["Array", "ArrayKey", "Change", "Job", "Member", "Purpose", "Workplace", "with_more", "without"]


@dataclass(frozen=True)
class ArrayKey:
    """Trials that agree on this can be one model.

    Args:
        structure: digest of modules, shapes, dtypes, and of the optimizer's class if it is none of those whose members
            can be one array with others'; not of anything fusible.
        data: digest of the values that the task's `data` read from the config.
        batch_size: samples per step and member.
        order: seed of the order of samples; what a trial costs does not depend on it.
        opaque: whether a program of the user's trains it, of which only reports are seen: it is measured while it runs,
            and shares no process. `order` is then the number of the trial, so that no two have one key.
    """

    structure: str
    data: str
    batch_size: int
    order: int = 0
    opaque: bool = False

    @property
    def steps(self) -> str:
        """What the time of a step depends on."""
        return f"{self.structure} x {self.batch_size}"


@dataclass(frozen=True)
class Member:
    """A trial with the stretch it is to train: from after `start` epochs up to `target` epochs."""

    trial: Trial
    start: int
    target: int

    @property
    def epochs(self) -> int:
        """That it is to train."""
        return self.target - self.start


@dataclass(frozen=True)
class Array:
    """Trials of one structure, trained as one model, each from where it stands to its own target.

    Args:
        key: of all members.
        members: at least one, but none of a job all of whose members are done.
        profile: what is known of the key where the array runs.
        pending: epochs that trials of the key have trained and are to train, which bounds what measuring it may take.
        apart: where it joins a job, it stays an array of its own, though there may be one of its key.
    """

    key: ArrayKey
    members: tuple[Member, ...]
    profile: Profile | None = None
    pending: float = inf
    apart: bool = False

    @property
    def epochs(self) -> tuple[int, ...]:
        """That each member is to train."""
        return tuple([member.epochs for member in self.members])


class Purpose(StrEnum):
    """Why a job runs."""

    TRAIN = "train"
    SURVEY = "survey"
    """Looks at the models of its members and finds their array keys."""
    PROFILE = "profile"
    """A few iterations at several sizes; measures and trains nothing."""


@dataclass(frozen=True)
class Job:
    """Arrays that share one process, its data and a device.

    Args:
        id: unique in the study.
        arrays: at least one.
        purpose: why it runs.
        demand: what it is promised on its device; None where nothing is known of it.
        resumes: id of the suspended job that it goes on with; "" of a new one.
    """

    id: str
    arrays: tuple[Array, ...]
    purpose: Purpose = Purpose.TRAIN
    demand: Demand | None = None
    resumes: str = ""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all arrays, in order."""
        return tuple(member for array in self.arrays for member in array.members)


def without(arrays: Iterable[Array], trials: Collection[int]) -> tuple[Array, ...]:
    """Arrays without the members of some trials; those that then have none are left out."""
    rest = (replace(x, members=tuple(m for m in x.members if m.trial.number not in trials)) for x in arrays)
    return tuple(array for array in rest if array.members)


def with_more(arrays: Iterable[Array], more: Iterable[Array]) -> tuple[Array, ...]:
    """Arrays with the members of others: in the first of the same key, or as a further one, as `Change` has it."""
    held = list(arrays)
    for array in more:
        place = next((place for place, mine in enumerate(held) if mine.key == array.key), None)
        if place is None or array.apart:
            held.append(array)
        else:
            held[place] = replace(held[place], members=(*held[place].members, *array.members))
    return tuple(held)


@dataclass(frozen=True)
class Change:
    """Surgery on a job that is being trained: some of its members leave, others join.

    Args:
        leave: numbers of trials that are over; they leave before the next step and report no more.
        join: members by their keys; they come into the job's first array of that key when it ends an epoch, or are a
            new one, which they always are if they are to be apart.
        look: trials whose array keys are to be found before the next step.
    """

    leave: frozenset[int] = frozenset()
    join: tuple[Array, ...] = ()
    look: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class Workplace:
    """What every worker of a study needs to know.

    Args:
        directory: the study's directory; workers write checkpoints and logs below it.
        task: the user's task, as pickled by cloudpickle.
        runner: "module:function" of the `Runner` that does the work, resolved in the process that runs it.
        checkpoint_seconds: longest wall time between two checkpoints of a running trial.
        sharing: how jobs share a GPU: "auto", "mps" or "plain".
    """

    directory: Path
    task: bytes
    runner: str = "shoal.worker.run:run"
    checkpoint_seconds: float = 30.0
    sharing: str = "auto"
