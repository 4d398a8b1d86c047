"""Estimates of an array from its profile: seconds, memory, best size, demand, and whether compiling pays."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from shoal.core.demand import Demand, Profile

__all__ = [
    "EXPECTED_COMPILE_SECONDS",
    "EXPECTED_GAINS",
    "EXPECTED_STEPS_TO_RECORD",
    "MIN_WORK_TO_MEASURE",
    "STEP_OVERHEAD_SECONDS",
    "Capture",
    "best_size",
    "capturing_pays",
    "compute",
    "fetching",
    "first_fetching",
    "fuse_seconds",
    "fused_gain",
    "is_untried",
    "largest_fitting",
    "memory",
    "packed_demand",
    "seconds",
    "share_to_measure",
    "step_seconds",
    "time_on",
]

Capture = Literal["captured", "compiled"]
"""How a step is captured: recorded as a CUDA graph, or compiled (and on a GPU recorded as well)."""

VALIDATION_COST = 1 / 3
"""A validation step is a forward pass; a training step is about three (forward, and twice that for backward)."""

STEP_OVERHEAD_SECONDS = 2.5e-4
"""Overhead of a step that does not depend on the size of the array: handing out the batch, recording the losses. It
counts in comparisons of arrays of different sizes."""


MIN_WORK_TO_MEASURE = 60.0
"""Seconds of all pending epochs, one trial after another, from which several array sizes are measured before training
on a GPU. With less work, an array of all that wait has gained more by the time that the measurements would take."""

EXPECTED_COMPILE_SECONDS = 20.0
"""Assumed cost of compiling a structure that was never compiled: a transformer's step on two cores."""

MIN_SAVED_BY_CAPTURING = 2.0
"""Least saving by recording or compiling a step, relative to its cost. The cost is paid at once, but trials may be
stopped before they have saved as much as expected."""

EXPECTED_STEPS_TO_RECORD = 125
"""Assumed cost of recording a step as a CUDA graph, in steps that are not recorded: a ResNet-18's on an H200, 0.9 s."""

EXPECTED_RELOAD_SHARE = 0.2
"""Assumed time to compile a step whose code is there already, as a fraction of the first compilation: measured 0.1 for
a transformer and 0.2 for an MLP. The compiler is imported, and the step traced again."""

EXPECTED_GAINS: Mapping[Capture, float] = MappingProxyType({"captured": 2.0, "compiled": 1.25})
"""Assumed speed-up by recording and by compiling where none was measured for a structure."""


ENOUGH = 0.95
"""Part of its throughput on the whole device that an array must reach with its demand of compute."""


def step_seconds(profile: Profile, members: int) -> float:
    """Return the seconds of one training step of `members` trained together.

    Linear between the measured sizes, and extrapolated above them by the line through the last two. Below them the time
    of the smallest size is returned, an upper bound. With a single measurement the time is proportional to the members.

    Args:
        members: B, at least 1.
    """
    return _interpolated(profile.step_seconds, members)


def fuse_seconds(profile: Profile, members: int) -> float:
    """Return the seconds for building and fusing `members`; 0 if never measured."""
    return _interpolated(profile.fuse_seconds, members) if profile.fuse_seconds else 0.0


def _interpolated(measured: Mapping[int, float], members: int) -> float:
    if members in measured:
        return measured[members]
    sizes = sorted(measured)
    if len(sizes) == 1:
        return measured[sizes[0]] * members / sizes[0]
    if members <= sizes[0]:
        return measured[sizes[0]]
    above = min(bisect_left(sizes, members), len(sizes) - 1)
    return _on_line(measured, sizes[above - 1], sizes[above], members)


def _on_line(measured: Mapping[int, float], low: int, high: int, members: int) -> float:
    """Return the value at `members` of the line through two measured sizes; beyond `high` the slope is at least 0."""
    slope = (measured[high] - measured[low]) / (high - low)
    if members > high:
        return measured[high] + max(slope, 0.0) * (members - high)
    return measured[low] + slope * (members - low)


def seconds(profile: Profile, epochs: Sequence[int], step_overhead: float = 0.0) -> float:
    """Return the expected seconds until all members that begin together finish, including validation.

    Args:
        epochs: Epochs of each member; the others continue after a member has finished.
        step_overhead: Seconds added to each step.
    """
    steps = profile.epoch_steps + VALIDATION_COST * profile.validation_steps
    ordered = sorted(epochs)
    if ordered and ordered[0] == ordered[-1]:  # the common case
        return (step_seconds(profile, len(ordered)) + step_overhead) * steps * ordered[0] if ordered[0] > 0 else 0.0
    total, done = 0.0, 0
    for remaining, length in zip(range(len(ordered), 0, -1), ordered, strict=True):
        if length > done:
            total += (step_seconds(profile, remaining) + step_overhead) * steps * (length - done)
            done = length
    return total


def fetching(profile: Profile, epochs: Sequence[int]) -> float:
    """Return the expected seconds for fetching and preparing the samples of members that begin together.

    It is 0 for kept samples, which the first job of a process fetches once.
    """
    return 0.0 if profile.sample_sharing == "kept" else first_fetching(profile) * max(epochs)


def first_fetching(profile: Profile) -> float:
    """Return the expected seconds for fetching and preparing all samples once; 0 if they reside on the device."""
    if profile.sample_sharing == "resident":
        return 0.0
    return profile.fetch_seconds * (profile.epoch_steps + profile.validation_steps)


def fused_gain(profile: Profile, members: int) -> float | None:
    """Return the speed-up of fused steps of `members` over steps one after another; None if never measured.

    A measurement counts for sizes from half to twice its own.
    """
    return _of_similar_size(profile.fused_gain, members)


def time_on(profile: Profile, devices: int) -> float:
    """Return the time of a step on so many devices over that on one; beyond the measured ones no device saves time."""
    if devices == 1 or not profile.spreading:
        return 1.0
    return profile.spreading.get(devices, profile.spreading[max(profile.spreading)])


def _of_similar_size(measured: Mapping[int, float], members: int) -> float | None:
    candidates = [size for size in measured if members <= 2 * size and size <= 2 * members]
    return measured[min(candidates, key=lambda size: abs(size - members))] if candidates else None


def is_untried(profile: Profile) -> bool:
    """Return whether members were only timed alone, so that training tries how fast they are together.

    An array finds out in its first steps whether fused steps are faster than plain ones, and takes plain ones if not.
    So trying costs next to nothing, where measuring before training would cost more than it could save.
    """
    return profile.pending is not None and set(profile.step_seconds) == {1}


def best_size(profile: Profile, at_most: int) -> int:
    """Return the B with the least seconds per member, including `STEP_OVERHEAD_SECONDS`; the largest one of a tie.

    Between two measured sizes the time per member is monotonic, so only measured sizes and `at_most` can be best. Since
    size 1 can win, fusing is never slower than not fusing. If several members were never timed together, it is the
    profile's `first_size`.

    Args:
        at_most: Largest B that memory or the number of trials allows, at least 1.
    """
    if is_untried(profile):
        return at_most if profile.first_size is None else min(profile.first_size, at_most)
    sizes = {size for size in profile.step_seconds if size <= at_most} | {at_most}
    per_member = {size: (step_seconds(profile, size) + STEP_OVERHEAD_SECONDS) / size for size in sizes}
    least = min(per_member.values())
    return max(size for size, cost in per_member.items() if cost <= least * (1 + 1e-9))


def compute(profile: Profile, members: int = 1) -> float:
    """Return the compute demand of an array as a fraction of a device (HyperSack: c_p).

    It is the least measured share with 95 % of the throughput of the whole device; 1 if a smaller share has less. If no
    share was measured, it is the fraction of the device in use, an upper bound; capped at 1, since counters can show
    slightly more.
    """
    if speeds := _share_speeds(profile, members):
        return min((share for share, speed in speeds.items() if speed >= ENOUGH), default=1.0)
    return min(profile.compute, 1.0)


def share_to_measure(profile: Profile) -> float | None:
    """Return the next share of a device to measure: a half, then a quarter or three quarters; None if all is known.

    A quarter tells something if half of the device suffices, three quarters if it does not. Two shares of a
    structure are measured, whatever the sizes that they were measured with.
    """
    measured = {share for speeds in profile.share_speeds.values() for share in speeds}
    if not measured:
        return 0.5
    if len(measured) > 1:
        return None
    return 0.25 if _share_speeds(profile, max(profile.step_seconds)).get(0.5, 0.0) >= ENOUGH else 0.75


def _share_speeds(profile: Profile, members: int) -> Mapping[float, float]:
    """Return the speeds by share of the measured size nearest to `members`, the larger one of two."""
    if not profile.share_speeds:
        return {}
    return profile.share_speeds[min(profile.share_speeds, key=lambda size: (abs(size - members), -size))]


def memory(profile: Profile, members: int) -> int:
    """Return the peak bytes of a process with one array of `members`."""
    return profile.base_memory + members * profile.member_memory


def largest_fitting(profile: Profile, available: int, at_most: int) -> int:
    """Return the largest B up to `at_most` whose peak is within `available` bytes; 0 if no member fits."""
    if memory(profile, at_most) <= available:
        return at_most
    free = max(0, available - profile.base_memory)
    return free // profile.member_memory if profile.member_memory else 0


def packed_demand(arrays: Sequence[tuple[Profile, Sequence[int]]], *, cores: float = float("inf")) -> Demand:
    """Return the demand of arrays of one data set that take turns in one process.

    Args:
        arrays: Profile of each array, and the epochs left of each of its members.
        cores: Upper limit of CPU cores. A process measured alone can show slightly more cores than its threads allow;
            with that demand, a job on every slot would not fit on the node.
    """
    fetched = [fetching(profile, epochs) for profile, epochs in arrays]
    return Demand(
        compute=max(compute(profile, len(epochs)) for profile, epochs in arrays),
        memory=max(profile.base_memory for profile, _ in arrays)
        + sum(len(epochs) * profile.member_memory for profile, epochs in arrays),
        cores=min(max(profile.cores for profile, _ in arrays), cores),
        seconds=sum(seconds(profile, epochs) for profile, epochs in arrays) + max(fetched),
    )


def capturing_pays(
    how: Capture,
    profile: Profile | None,
    members: int,
    step_seconds: float,
    steps: int,
    later: Mapping[int, float] = MappingProxyType({}),
    compiled_before: bool = False,
    ahead: bool = False,
) -> bool:
    """Return whether capturing saves `MIN_SAVED_BY_CAPTURING` times the time that it costs, over the remaining steps.

    Compiled code is kept. So the first compilation also saves time in later arrays of this size, each of which only
    reloads the code, or takes steps that are not compiled if reloading takes longer than it saves there. Each array
    records its steps anew.

    Args:
        profile: Profile of the structure, or None. The measured gain of this size, or of the nearest one, decides.
        members: B.
        step_seconds: Measured seconds of one step that is not captured in this way.
        later: Number of steps -> expected number of later arrays of this size with as many steps.
        compiled_before: Whether the machine has compiled this step before, so that the code is only reloaded.
        ahead: Whether another process compiles it while steps go on, so that it costs tracing the step twice.
    """
    share = 1 - 1 / _captured_gain(how, profile, members)
    saved = step_seconds * share
    if how == "captured":
        measured = profile.record_seconds if profile is not None else 0.0
        return saved * steps > MIN_SAVED_BY_CAPTURING * (measured or EXPECTED_STEPS_TO_RECORD * step_seconds)
    cost = profile.compile_seconds if profile and profile.compile_seconds else EXPECTED_COMPILE_SECONDS
    reload = profile.reload_seconds if profile and profile.reload_seconds else EXPECTED_RELOAD_SHARE * cost
    if compiled_before:
        return saved * steps > MIN_SAVED_BY_CAPTURING * reload
    saved_later = sum(count * max(0.0, saved * each - reload) for each, count in later.items())
    if ahead:
        saved_here = share * max(0.0, step_seconds * steps - cost)
        return saved_here + saved_later > MIN_SAVED_BY_CAPTURING * 2 * reload
    return saved * steps + saved_later > MIN_SAVED_BY_CAPTURING * cost


def _captured_gain(how: Capture, profile: Profile | None, members: int) -> float:
    gains = {} if profile is None else profile.recorded_gain if how == "captured" else profile.compiled_gain
    return gains[min(gains, key=lambda size: abs(size - members))] if gains else EXPECTED_GAINS[how]
