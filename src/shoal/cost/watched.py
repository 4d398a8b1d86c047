"""What was learnt of a program's cost by watching it run."""

from shoal.core.demand import Profile

__all__ = ["merged", "watched"]


def watched(seconds: float, memory: int, compute: float, cores: float) -> Profile:
    """The profile of a program: a report is a step, and an epoch.

    Args:
        seconds: from one report to the next.
        memory: peak bytes on the device.
        compute: fraction of the device in use.
        cores: CPU seconds per second.
    """
    return Profile({1: seconds}, 1, 0, base_memory=memory, member_memory=0, compute=compute, cores=cores, sample=1)


def merged(known: Profile, seen: Profile) -> Profile:
    """What holds for both of two runs of one program with different configurations.

    A device must have room for the larger one. A report took its least seconds where nobody else used the device.
    """
    return watched(
        min(known.step_seconds[1], seen.step_seconds[1]),
        max(known.base_memory, seen.base_memory),
        max(known.compute, seen.compute),
        max(known.cores, seen.cores),
    )
