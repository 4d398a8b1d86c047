"""What a job asks of a device, and the measurements it is computed from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, Literal

__all__ = ["ABREAST", "Demand", "Profile", "Sharing"]

Sharing = Literal["resident", "kept", "window", "batch"]
"""What trainings on one data set can share in a process.

resident: all of it lies on the device. kept: a sample is decoded once, and lies there from then on. window: it is
decoded once in an epoch for lanes that keep abreast. batch: only lanes of the same batch size share, whole batches.
"""

ABREAST: Final = frozenset[Sharing]({"window", "batch"})
"""Of these, what is shared only by those who are at the same place in the data at the same time."""


@dataclass(frozen=True)
class Demand:
    """What one job takes of one kind of device (HyperSack: c_p, d_p, q_p).

    Args:
        compute: fraction of the device's compute, 1.0 = all of it.
        memory: peak bytes on the device (of a CPU slot: of the process).
        cores: CPU cores of the node.
        seconds: expected run time alone on the device.
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
    """What a short run of one structure showed on one kind of device.

    Args:
        step_seconds: members trained together (B) -> least seconds of one training step of all B.
        epoch_steps: training steps of one epoch.
        validation_steps: validation steps of one epoch.
        base_memory: bytes the process holds before any member.
        member_memory: bytes each member adds at the peak of a step.
        compute: fraction of the device in use while it ran.
        cores: CPU seconds per second of wall time, but for that in which other programs had the core.
        fuse_seconds: members -> what it takes to build them and make them one array, beside its steps.
        mixing: how many times as long a step takes in which every member has a batch of its own, because they are at
            different epochs; None where that cannot be, or was never measured.
        fused_gain: members -> how many times as fast a step of all at once is as one of member after member.
        compiled_gain: members -> how many times as fast a compiled step is, measured in one run; of the sizes that were
            ever compiled, 1 where it could not be.
        compile_seconds: what compiling took when it was last done; 0 if it never was.
        crowding: jobs on a device -> how many times as long as alone an epoch took of one of this key among them.
        spreading: devices -> how many times as long as on one an epoch takes of a job that has them all; of each number
            up to the most that it may have. Empty where that was not measured: it may have one.
        fetch_seconds: what it takes to fetch and prepare the samples of a batch that are not at hand.
        sharing: who can use the samples that were fetched.
        sample: members for whose sake it was measured; it says little of arrays that are many times as large.
        pending: epochs that waited for it, if they were too few for measuring all sizes; else None.
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
    crowding: Mapping[int, float] = field(default_factory=dict)
    spreading: Mapping[int, float] = field(default_factory=dict)
    fetch_seconds: float = 0.0
    sharing: Sharing = "resident"
    sample: int = 16
    pending: float | None = None
