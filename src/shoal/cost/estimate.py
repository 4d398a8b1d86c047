"""What an array will cost, from the profile of its structure."""

from collections.abc import Mapping

from shoal.cost.demand import Demand, Profile

__all__ = ["best_size", "compute", "fitting", "job_demand", "memory", "seconds", "step_seconds"]

VALIDATION_COST = 1 / 3
"""A validation step is a forward pass; a training step is about three (forward, and twice that for backward)."""


def step_seconds(profile: Profile, members: int) -> float:
    """Seconds of one training step of `members` trained together.

    Linear between the measured sizes. Above them the line through the last two goes on; below them the smallest one's
    time is an upper bound. A single measurement says nothing of a gain: time is taken to be proportional to members.

    Args:
        profile: what was measured.
        members: B, at least 1.
    """
    measured = profile.step_seconds
    sizes = sorted(measured)
    if len(sizes) == 1:
        return measured[sizes[0]] * members / sizes[0]
    if members <= sizes[0]:
        return measured[sizes[0]]
    above = next((index for index, size in enumerate(sizes) if size >= members), len(sizes) - 1)
    return _on_line(measured, sizes[above - 1], sizes[above], members)


def _on_line(measured: Mapping[int, float], low: int, high: int, members: int) -> float:
    """The value at `members` of the line through two measured sizes; beyond `high`, noise never makes it fall."""
    slope = (measured[high] - measured[low]) / (high - low)
    if members > high:
        return measured[high] + max(slope, 0.0) * (members - high)
    return measured[low] + slope * (members - low)


def seconds(profile: Profile, members: int, epochs: float) -> float:
    """Expected seconds in which `members` trained together finish `epochs`, validation included."""
    steps = profile.epoch_steps + VALIDATION_COST * profile.validation_steps
    return step_seconds(profile, members) * steps * epochs


def best_size(profile: Profile, at_most: int) -> int:
    """The B of least seconds per member; the larger one of equals.

    Between two measured sizes the time per member rises or falls throughout, so only measured sizes and `at_most`
    itself can be best. Where a size was measured to be slower per member than a smaller one, the smaller one is taken:
    fusing is never slower than not fusing.

    Args:
        profile: what was measured.
        at_most: the largest B that memory or the number of trials allows, at least 1.
    """
    sizes = {size for size in profile.step_seconds if size <= at_most} | {at_most}
    per_member = {size: step_seconds(profile, size) / size for size in sizes}
    least = min(per_member.values())
    return max(size for size, cost in per_member.items() if cost <= least * (1 + 1e-9))


def compute(profile: Profile) -> float:
    """Fraction of a device that an array asks for; a counter may show a little more than there is."""
    return min(profile.compute, 1.0)


def memory(profile: Profile, members: int) -> int:
    """Peak bytes of a process that trains `members` together."""
    return profile.base_memory + members * profile.member_memory


def fitting(profile: Profile, available: int, at_most: int) -> int:
    """The largest B up to `at_most` whose peak is within `available` bytes; 0 if not even one member fits."""
    if memory(profile, at_most) <= available:
        return at_most
    room = max(0, available - profile.base_memory)
    return room // profile.member_memory if profile.member_memory else 0


def job_demand(profile: Profile, members: int, epochs: float, *, cores: float = float("inf")) -> Demand:
    """What a job of `members` over `epochs` takes of the kind of device that was profiled.

    Args:
        profile: what was measured.
        members: B, at least 1.
        epochs: how far the member that goes furthest still has to train.
        cores: CPU cores a job may use there. A process measured alone can show a little more than its threads allow;
            charged with that, a job on every slot would not fit on the node.
    """
    return Demand(
        compute=compute(profile),
        memory=memory(profile, members),
        cores=min(profile.cores, cores),
        seconds=seconds(profile, members, epochs),
    )
