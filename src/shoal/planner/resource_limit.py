"""What a trial that ran out of memory is held to when it is tried again."""

from dataclasses import dataclass

__all__ = ["ResourceLimit"]


@dataclass(frozen=True)
class ResourceLimit:
    """Of one trial; its array has a job of its own.

    Args:
        most: members of the array that it is in.
        memory: it has a device to itself, of at least so many bytes; None: it is promised what its array is expected to
            take.
    """

    most: int
    memory: int | None = None
