"""Short names for candidates and scenes in tables, and partitions tried one by one."""

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


def numbers(packs):
    return [[candidate.array.members[0].trial.number for candidate in pack] for pack in packs]


def together(packs, where):
    """Expected seconds until all packs are done."""
    return makespan([predicted(pack, where).together for pack in packs], where.loads)


def partitions(items):
    """Every partition of things into packs."""
    if not items:
        yield []
        return
    first, *others = items
    for packs in partitions(others):
        yield [[first], *packs]
        for index, pack in enumerate(packs):
            yield [*packs[:index], [first, *pack], *packs[index + 1 :]]
