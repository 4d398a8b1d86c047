"""Demands of jobs on devices, and the profiles from which they are computed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

__all__ = ["LOCKSTEP", "Demand", "MergeRule", "Profile", "SampleSharing"]

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


MergeRule = Literal["newest", "known", "measured", "mean", "largest", "least", "added"]
"""How a new value of a measurement merges with the known one.

"newest": the new value replaces it. "known": it stays. "measured": the new value replaces it, unless it is 0 or empty.
"mean": weighted mean, size by size. "largest": the larger value. "least": the smaller value, size by size. "added":
the sizes that the job did not know at its start are added or replaced.
"""


def _merge(
    profiling: MergeRule = "newest", training: MergeRule = "known", program: MergeRule = "known"
) -> Mapping[str, MergeRule]:
    """Return the rules by which a measurement merges with what is known of its key, as metadata of its field.

    Args:
        profiling: Rule for a profile job, which measures the structure anew.
        training: Rule for a training job, which refines the profile with which it began.
        program: Rule for a program, whose runs differ in their configurations: the larger demand counts, since it must
            fit; the shorter time counts, since it was least disturbed by other jobs.
    """
    return {"profiling": profiling, "training": training, "program": program}


@dataclass(frozen=True)
class Profile:
    """Measurements of a short run of one structure on one kind of device.

    Each field says how it merges with what is known of its key.

    Args:
        step_seconds: Members trained together (B) -> least seconds of one training step of all B.
        base_memory: Bytes of the process before any member.
        member_memory: Bytes that each member adds at the peak of a step.
        compute: Fraction of the device in use, averaged over the run. On a GPU it counts the time in which any kernel
            runs, so it is an upper bound.
        cores: CPU seconds per second of wall time, excluding time in which other programs used the core.
        fuse_seconds: Members -> seconds to build them, and to fuse several, excluding the steps.
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
        measured_members: Number of members for which it was measured; it does not extrapolate to much larger arrays.
        expected_epochs: `Array.expected_epochs` when it was measured, if too few to measure all sizes; else None.
        first_size: Largest size of the first array if only single members were timed; None: no limit.

    Raises:
        ValueError: There is no time of a step, or a time, a memory or a fraction is negative or not finite.
    """

    step_seconds: Mapping[int, float] = field(metadata=_merge(training="added", program="least"))
    epoch_steps: int = field(metadata=_merge())
    validation_steps: int = field(metadata=_merge())
    base_memory: int = field(metadata=_merge(program="largest"))
    member_memory: int = field(metadata=_merge("largest"))
    compute: float = field(metadata=_merge(program="largest"))
    cores: float = field(metadata=_merge(program="largest"))
    fuse_seconds: Mapping[int, float] = field(default_factory=dict, metadata=_merge())
    mixing: float | None = field(default=None, metadata=_merge())
    fused_gain: Mapping[int, float] = field(default_factory=dict, metadata=_merge(training="mean"))
    compiled_gain: Mapping[int, float] = field(default_factory=dict, metadata=_merge("mean", "mean"))
    compile_seconds: float = field(default=0.0, metadata=_merge("measured", "measured"))
    reload_seconds: float = field(default=0.0, metadata=_merge("measured", "measured"))
    recorded_gain: Mapping[int, float] = field(default_factory=dict, metadata=_merge("mean", "mean"))
    record_seconds: float = field(default=0.0, metadata=_merge("measured", "measured"))
    share_speeds: Mapping[int, Mapping[float, float]] = field(default_factory=dict, metadata=_merge("known"))
    crowding: Mapping[int, float] = field(default_factory=dict, metadata=_merge("known"))
    spreading: Mapping[int, float] = field(default_factory=dict, metadata=_merge("measured"))
    fetch_seconds: float = field(default=0.0, metadata=_merge())
    sample_sharing: SampleSharing = field(default="resident", metadata=_merge())
    measured_members: int = field(default=16, metadata=_merge("largest"))
    expected_epochs: float | None = field(default=None, metadata=_merge())
    first_size: int | None = field(default=None, metadata=_merge())

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
