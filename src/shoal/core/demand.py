"""Demands of jobs on devices, and the profiles from which they are computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

__all__ = ["LOCKSTEP", "Demand", "Profile", "SampleSharing"]

SampleSharing = Literal["resident", "kept", "window", "batch"]
"""Method by which arrays in one process share the samples of a data set.

"resident": all samples are on the device. "kept": each sample is decoded once and stays on the device. "window": each
sample is decoded once per epoch, for lanes at the same position. "batch": lanes of equal batch size share batches.
"""

LOCKSTEP: Final = frozenset[SampleSharing]({"window", "batch"})
"""Sample sharing that requires all lanes to be at the same position of the data."""


@dataclass(frozen=True)
class Demand:
    """Demand of one job on one kind of device (HyperSack: c_p, d_p, q_p).

    Args:
        compute: Fraction of the device's compute, 1.0 = all of it.
        memory: Peak bytes on the device (of a CPU slot: of the process).
    """

    compute: float
    memory: int
    cores: float
    seconds: float

    def __post_init__(self) -> None:
        if 0 <= self.compute < inf and 0 <= self.memory < inf and 0 <= self.cores < inf and 0 <= self.seconds < inf:
            return
        for name in ("compute", "memory", "cores", "seconds"):
            value = getattr(self, name)
            if not 0 <= value < inf:  # also refuses NaN
                raise ValueError(f"a demand's {name} must be finite and not negative, got {value!r}")


@dataclass(frozen=True)
class Profile:
    """Measurements of a short run of one structure on one kind of device.

    Args:
        step_seconds: Members trained together (B) -> least seconds of one training step of all B.
        base_memory: Bytes of the process before any member.
        member_memory: Bytes that each member adds at the peak of a step.
        compute: Fraction of the device in use, averaged over the run. On a GPU it counts the time in which any kernel
            runs, so it is an upper bound.
        cores: CPU seconds per second of wall time, excluding time in which other programs used the core.
        fuse_seconds: Members -> seconds to build and fuse them, excluding the steps.
        mixing: Slowdown of a step in which every member has a batch of its own, because members are at different
            epochs; None if that is impossible or was not measured.
        fused_gain: Members -> speedup of a fused step over steps of one member after another.
        compiled_gain: Members -> speedup of a compiled step, measured in one run; only sizes that were compiled, 1 if
            compilation failed.
        compile_seconds: Seconds of the last compilation of a step that the machine had not compiled before; 0 if there
            was none.
        reload_seconds: Seconds of the last compilation of a step that the machine had compiled before, so that its code
            was there; 0 if there was none.
        recorded_gain: Members -> speedup of a step recorded as a CUDA graph, measured in one run; only sizes that were
            recorded, 1 if recording failed.
        record_seconds: Seconds of the last recording of a step; 0 if there was none.
        share_speeds: Members -> part of the compute of the device -> throughput of a process limited to it, relative to
            the whole device. Empty if not measured, as without MPS.
        crowding: Jobs on a device -> slowdown of an epoch of this key among them, compared with alone.
        spreading: Devices -> duration of a step on all of them, relative to one device. 1 for two devices says that
            steps cannot be divided. The least number that was not measured may be tried, if all below have paid.
        fetch_seconds: Seconds to fetch and prepare the samples of a batch that are not in memory.
        sample: Number of members for which it was measured; it does not extrapolate to much larger arrays.
        pending: Epochs that waited for the measurement, if they were too few to measure all sizes; else None.
        first_size: Largest size of the first array if only single members were timed; None: no limit.

    Raises:
        ValueError: There is no time of a step, or a time, a memory or a fraction is negative or not finite.
    """

    step_seconds: Mapping[int, float]
    epoch_steps: int
    validation_steps: int
    base_memory: int
    member_memory: int
    compute: float
    cores: float
    fuse_seconds: Mapping[int, float] = field(default_factory=dict)
    mixing: float | None = None
    fused_gain: Mapping[int, float] = field(default_factory=dict)
    compiled_gain: Mapping[int, float] = field(default_factory=dict)
    compile_seconds: float = 0.0
    reload_seconds: float = 0.0
    recorded_gain: Mapping[int, float] = field(default_factory=dict)
    record_seconds: float = 0.0
    share_speeds: Mapping[int, Mapping[float, float]] = field(default_factory=dict)
    crowding: Mapping[int, float] = field(default_factory=dict)
    spreading: Mapping[int, float] = field(default_factory=dict)
    fetch_seconds: float = 0.0
    sample_sharing: SampleSharing = "resident"
    sample: int = 16
    pending: float | None = None
    first_size: int | None = None

    def __post_init__(self) -> None:
        if not self.step_seconds:
            raise ValueError("a profile needs the seconds of a step of at least one size")
        amounts = {name: (getattr(self, name),) for name in _AMOUNTS}
        for name, values in {**amounts, **{name: getattr(self, name).values() for name in _AMOUNTS_BY_SIZE}}.items():
            for value in values:
                if not 0 <= value < inf:  # also refuses NaN
                    raise ValueError(f"a profile's {name} must be finite and not negative, got {value!r}")


_AMOUNTS = ("base_memory", "member_memory", "compute", "cores", "fetch_seconds")
_AMOUNTS_BY_SIZE = ("step_seconds", "fuse_seconds")
