"""What an array will cost, from the profile of its structure."""

from collections.abc import Mapping, Sequence

from shoal.core.demand import Demand, Profile

__all__ = [
    "EXPECTED_COMPILE_SECONDS",
    "EXPECTED_GAIN",
    "TURN_SECONDS",
    "best_size",
    "compute",
    "fetching",
    "first_fetching",
    "fitting",
    "fuse_seconds",
    "fused_gain",
    "job_demand",
    "memory",
    "packed_demand",
    "repays",
    "seconds",
    "step_seconds",
]

VALIDATION_COST = 1 / 3
"""A validation step is a forward pass; a training step is about three (forward, and twice that for backward)."""

TURN_SECONDS = 2.5e-4
"""That each turn of an array takes beside the step, whatever its size: to hand out the batch, to note the losses. It
counts where arrays of several sizes are compared."""


EXPECTED_COMPILE_SECONDS = 20.0
"""Assumed cost of compiling a structure that was never compiled: a transformer's step on two cores."""

EXPECTED_GAIN = 1.25
"""Assumed speed-up by compiling where none was measured for a structure."""


def step_seconds(profile: Profile, members: int) -> float:
    """Seconds of one training step of `members` trained together.

    Linear between the measured sizes. Above them the line through the last two goes on; below them the smallest one's
    time is an upper bound. A single measurement says nothing of a gain: time is taken to be proportional to members.

    Args:
        profile: what was measured.
        members: B, at least 1.
    """
    return _at(profile.step_seconds, members)


def fuse_seconds(profile: Profile, members: int) -> float:
    """Seconds in which `members` are built and made one array; 0 if that was never measured."""
    return _at(profile.fuse_seconds, members) if profile.fuse_seconds else 0.0


def _at(measured: Mapping[int, float], members: int) -> float:
    if members in measured:
        return measured[members]
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


def seconds(profile: Profile, epochs: Sequence[int], turn: float = 0.0) -> float:
    """Expected seconds in which members that begin together finish, validation included.

    Args:
        profile: what was measured.
        epochs: that each member trains; it leaves when it has done them, and the others go on without it.
        turn: seconds that are added to each step.
    """
    steps = profile.epoch_steps + VALIDATION_COST * profile.validation_steps
    ordered = sorted(epochs)
    if ordered and ordered[0] == ordered[-1]:  # as most arrays are
        return (step_seconds(profile, len(ordered)) + turn) * steps * ordered[0] if ordered[0] > 0 else 0.0
    total, done = 0.0, 0
    for left, length in zip(range(len(ordered), 0, -1), ordered, strict=True):
        if length > done:
            total += (step_seconds(profile, left) + turn) * steps * (length - done)
            done = length
    return total


def fetching(profile: Profile, epochs: Sequence[int]) -> float:
    """Expected seconds in which the samples for members that begin together are fetched and prepared.

    None for samples that are kept: a process fetches them once, whichever job is the first there.

    Args:
        profile: what was measured.
        epochs: that each member trains.
    """
    return 0.0 if profile.sharing == "kept" else first_fetching(profile) * max(epochs)


def first_fetching(profile: Profile) -> float:
    """Expected seconds in which all samples are fetched and prepared once; 0 where they lie on the device anyway."""
    if profile.sharing == "resident":
        return 0.0
    return profile.fetch_seconds * (profile.epoch_steps + profile.validation_steps)


def fused_gain(profile: Profile, members: int) -> float | None:
    """How many times as fast steps of `members` at once are as one after another; None if that was never measured.

    What was measured counts for sizes from half of it to twice of it.
    """
    near = [size for size in profile.fused_gain if members <= 2 * size and size <= 2 * members]
    return profile.fused_gain[min(near, key=lambda size: abs(size - members))] if near else None


def best_size(profile: Profile, at_most: int) -> int:
    """The B of least seconds per member; the larger one of equals.

    What a turn takes beside the step counts as well. Between two measured sizes the time per member rises or falls
    throughout, so only measured sizes and `at_most` itself can be best. Where a size is slower per member than a
    smaller one, the smaller one is taken: fusing is never slower than not fusing.

    Args:
        profile: what was measured.
        at_most: the largest B that memory or the number of trials allows, at least 1.
    """
    sizes = {size for size in profile.step_seconds if size <= at_most} | {at_most}
    per_member = {size: (step_seconds(profile, size) + TURN_SECONDS) / size for size in sizes}
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


def job_demand(profile: Profile, epochs: Sequence[int], *, cores: float = float("inf")) -> Demand:
    """What an array takes of the kind of device that was profiled, in a process of its own.

    Args:
        profile: what was measured.
        epochs: that each of its members still has to train; at least one member.
        cores: CPU cores a job may use there. A process measured alone can show a little more than its threads allow;
            charged with that, a job on every slot would not fit on the node.
    """
    return packed_demand([(profile, epochs)], cores=cores)


def packed_demand(arrays: Sequence[tuple[Profile, Sequence[int]]], *, cores: float = float("inf")) -> Demand:
    """What arrays on one data set take in one process, where they take turns.

    Args:
        arrays: of each what was measured, and the epochs that each of its members still has to train.
        cores: see `job_demand`.
    """
    fetched = [fetching(profile, epochs) for profile, epochs in arrays]
    return Demand(
        compute=max(compute(profile) for profile, _ in arrays),
        memory=max(profile.base_memory for profile, _ in arrays)
        + sum(len(epochs) * profile.member_memory for profile, epochs in arrays),
        cores=min(max(profile.cores for profile, _ in arrays), cores),
        seconds=sum(seconds(profile, epochs) for profile, epochs in arrays) + max(fetched),
    )


def repays(profile: Profile | None, members: int, eager_seconds: float, steps: int) -> bool:
    """Whether compiling now saves more time over the steps that are left than it takes.

    Args:
        profile: what is known of the structure; where it was compiled before, at this size or else at the nearest, the
            gain measured then decides.
        members: B.
        eager_seconds: of one step, measured now.
        steps: left to do.
    """
    saved = eager_seconds * (1 - 1 / _compiled_gain(profile, members)) * steps
    return saved > (profile.compile_seconds if profile and profile.compile_seconds else EXPECTED_COMPILE_SECONDS)


def _compiled_gain(profile: Profile | None, members: int) -> float:
    if profile is None or not profile.compiled_gain:
        return EXPECTED_GAIN
    return profile.compiled_gain[min(profile.compiled_gain, key=lambda size: abs(size - members))]
