"""How many threads a job has for its arithmetic."""

import os

__all__ = ["threads"]


def threads(cores: int) -> int:
    """As many as a device has cores, but no more than `OMP_NUM_THREADS` allows, read as torch itself reads it."""
    allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores, max(1, int(allowed))) if allowed.isdecimal() else cores
