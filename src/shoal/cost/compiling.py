"""Whether compiling a training step repays itself within a budget."""

from shoal.core.demand import Profile

__all__ = ["EXPECTED_COMPILE_SECONDS", "EXPECTED_GAIN", "repays"]

EXPECTED_COMPILE_SECONDS = 20.0
"""What compiling is taken to cost before it was ever done for a structure: a transformer's step on two cores."""

EXPECTED_GAIN = 1.25
"""How much faster a compiled step is taken to be before it was ever measured for a structure."""


def repays(profile: Profile | None, members: int, eager_seconds: float, steps: int) -> bool:
    """Whether compiling now saves more time over the steps that are left than it takes.

    Args:
        profile: what is known of the structure; where it was compiled before, at this size or else at the nearest, the
            gain measured then decides.
        members: B.
        eager_seconds: of one step, measured now.
        steps: left to do.
    """
    saved = eager_seconds * (1 - 1 / _gain(profile, members)) * steps
    return saved > (profile.compile_seconds if profile and profile.compile_seconds else EXPECTED_COMPILE_SECONDS)


def _gain(profile: Profile | None, members: int) -> float:
    if profile is None or not profile.compiled_gain:
        return EXPECTED_GAIN
    return profile.compiled_gain[min(profile.compiled_gain, key=lambda size: abs(size - members))]
