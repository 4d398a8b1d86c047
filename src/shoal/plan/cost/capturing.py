"""Whether capturing a step of an array pays: recording it as a CUDA graph, or compiling it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from shoal.core.demand import Profile

__all__ = ["EXPECTED_COMPILE_SECONDS", "EXPECTED_GAINS", "EXPECTED_STEPS_TO_RECORD", "Capture", "capturing_pays"]

Capture = Literal["captured", "compiled"]
"""How a step is captured: recorded as a CUDA graph, or compiled (and on a GPU recorded as well)."""

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
        ahead: Whether another process compiles it while steps continue, so that it costs tracing the step twice.
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
