"""Short names for candidates and scenes in tables, and groupings tried one by one."""

from planner_samples import GB

from shoal.core.array import Array, FusionKey, Member
from shoal.core.trial import Trial
from shoal.plan.packing import Candidate, PackingContext, predicted
from shoal.plan.packing.prediction import makespan


def candidate(
    number,
    seconds=10.0,
    fetching=0.0,
    memory=1,
    base=0,
    data="",
    batch_size=32,
    structure=None,
    config=(),
    epochs=1,
    tail=0.0,
):
    """One array of one trial, by default of a structure of its own; gigabytes."""
    key = FusionKey(f"S{number}" if structure is None else structure, data, batch_size)
    trial = Trial(number, dict(config), seed=0, data_seed=0)
    return Candidate(Array(key, (Member(trial, 0, epochs),)), seconds, fetching, memory * GB, base * GB, tail)


def context(devices=1, memory=100, **changes):
    return PackingContext(**{"loads": (0.0,) * devices, "memory": memory * GB} | changes)


def relative_times(candidates, **measured):
    """`_01=0.8` is the relative time of the candidates at 0 and 1."""
    return {
        frozenset(candidates[int(digit)].key for digit in name.strip("_")): relative_time
        for name, relative_time in measured.items()
    }


def numbers(groups):
    return [[candidate.array.members[0].trial.number for candidate in group] for group in groups]


def together(groups, where):
    """Expected seconds until all groups are done."""
    return makespan([predicted(group, where).together for group in groups], where.loads)


def groupings(items):
    """Every way to put things into groups."""
    if not items:
        yield []
        return
    first, *others = items
    for groups in groupings(others):
        yield [[first], *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], [first, *group], *groups[index + 1 :]]
