"""What jobs take that share a device, seen while they do, and how many of them it is to have (Fluid, section 4.2.2)."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.core.demand import Profile
from shoal.cost.marginal import measured_scaling
from shoal.cost.scaling import Scaling

__all__ = ["crowded_scaling", "spread_scaling", "with_crowding"]

NEWEST = 0.3
"""Weight of what was seen last: it depends on who the others were."""

NOTICED = 0.1
"""A factor is corrected when it changes by more than this part."""


def with_crowding(profile: Profile, jobs: int, factor: float) -> Profile | None:
    """A profile with what was seen of a job in company.

    Args:
        profile: that was believed.
        jobs: on the device, at least 2.
        factor: how many times as long as alone an epoch took.

    Returns:
        None if the profile says so already.
    """
    known = profile.crowding.get(jobs)
    mean = factor if known is None else known + NEWEST * (factor - known)
    if known is not None and abs(mean - known) <= NOTICED * NEWEST * known:
        return None
    return replace(profile, crowding={**profile.crowding, jobs: mean})


def crowded_scaling(profile: Profile, expected: int) -> Scaling | None:
    """A job's run time on a share of a device, and c, as jobs of its key have shown them.

    As long as each job more has paid, one more than was ever seen may be tried. Where it paid no more, that is the end.

    Args:
        profile: of its key.
        expected: c by what the jobs ask for, which holds until something else was seen.

    Returns:
        None where nothing was seen of jobs that share a device.
    """
    times = _seen(profile.crowding)
    if len(times) == 1:
        return None
    found = measured_scaling(times, {})
    if found.sharing < max(times):
        return found
    most = max(expected, found.sharing + 1)
    while most > found.sharing and found.alpha >= most / (most - 1):  # Lemma 4: h(w) is not worth its devices
        most -= 1
    return replace(found, sharing=most)


def spread_scaling(profile: Profile, scaling: Scaling) -> Scaling:
    """A job's scaling with how it does on several devices, as was measured of its key."""
    if not profile.spreading:
        return scaling
    wide = measured_scaling({1: (1.0,)}, {1: 1.0, **profile.spreading}, most=max(profile.spreading))
    return replace(scaling, beta=wide.beta, devices=wide.devices)


def _seen(crowding: Mapping[int, float]) -> dict[int, tuple[float]]:
    """Jobs -> the time of one of them, over its time alone; of numbers never seen as the next one lets expect by α."""
    times: dict[int, tuple[float]] = {1: (1.0,)}
    for jobs in sorted(crowding):
        alpha = crowding[jobs] ** (1 / (jobs - 1))
        times |= {fewer: (alpha ** (fewer - 1),) for fewer in range(len(times) + 1, jobs)}
        times[jobs] = (crowding[jobs],)
    return times
