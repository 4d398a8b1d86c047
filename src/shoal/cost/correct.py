"""Profiles that were wrong, made right by what jobs really took."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from shoal.core.demand import Profile

__all__ = ["OFF", "after_running_out", "with_memory", "with_seconds"]

OFF = 1.25
"""A profile is wrong that is off by more than this factor."""

MORE = 1.5
"""So many times as much is expected of a member after its array ran out of memory, if nothing better is known."""


def after_running_out(profile: Profile, members: int, memory: int, peak: int = 0) -> Profile:
    """After an array ran out of memory: half as much again for each member, or what it had taken by then if more.

    It is never more than lets one member fit on the device: whether that fits is found out by trying.

    Args:
        profile: that was believed.
        members: of the array.
        memory: bytes of the device.
        peak: bytes that the process was seen to hold; 0 where that is not known.
    """
    wanted = max(ceil(profile.member_memory * MORE), (peak - profile.base_memory) // members, 1)
    return replace(profile, member_memory=max(profile.member_memory, min(wanted, memory - profile.base_memory)))


def with_memory(arrays: Sequence[tuple[Profile, int]], peak: int, memory: int) -> list[Profile] | None:
    """The profiles of arrays in one process that took more than they say, all of them raised in proportion.

    Args:
        arrays: of each the profile, and its members when they were most.
        peak: bytes that the process was seen to hold.
        memory: bytes of the device; more is not believed, as then nothing would fit there.

    Returns:
        One for each array; None if the profiles are right, or say too much.
    """
    peak = min(peak, memory)
    members = sum(count * profile.member_memory for profile, count in arrays)
    expected = max(profile.base_memory for profile, _ in arrays) + members
    if peak <= OFF * expected or not expected:
        return None
    factor = peak / expected
    return [
        replace(x, base_memory=ceil(x.base_memory * factor), member_memory=ceil(x.member_memory * factor))
        for x, _ in arrays
    ]


def with_seconds(profile: Profile, expected: float, measured: float) -> Profile | None:
    """A profile whose steps took longer or shorter than it says, at all sizes in proportion.

    Args:
        profile: that was believed.
        expected: seconds, by the profile.
        measured: seconds that were seen.

    Returns:
        None if the profile is right.
    """
    factor = measured / expected
    if 1 / OFF <= factor <= OFF:
        return None
    return replace(profile, step_seconds=_times(profile.step_seconds, factor))


def _times(seconds: Mapping[int, float], factor: float) -> dict[int, float]:
    return {members: value * factor for members, value in seconds.items()}
