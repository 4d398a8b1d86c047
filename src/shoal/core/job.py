"""Jobs, their updates while they run, and the context of the workers that run them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from shoal.core.array import Array, Member
from shoal.core.demand import Demand
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.trial import Trial

__all__ = ["HANG_SECONDS", "Job", "JobUpdate", "Purpose", "WorkerContext", "job_id", "log_path"]

HANG_SECONDS = 300.0
"""Default limit, in seconds without progress, of a job that takes steps."""


class Purpose(StrEnum):
    """Purpose of a job."""

    TRAIN = "train"
    SIGNATURE = "signature"
    """Builds the models of its members and finds their fusion keys."""
    PROFILE = "profile"
    """Measures a few iterations at several sizes, and keeps no training."""
    ASSIST = "assist"
    """Computes gradients for another job on a further device, and has no training of its own."""


@dataclass(frozen=True)
class Job:
    """Arrays that share one process, its data and a device.

    Args:
        demand: Reservation on its device; None if its demand is unknown.
        resumes: Id of the suspended job that it continues; "" of a new job.
        compute_limit: Largest part of the compute of its device that its process may use, by MPS; None: all of it.
        memory_limit: Bytes of its GPU that it may use; 0: no limit.
        assists: Id of the job for which a job with the purpose `ASSIST` computes gradients; "" of other jobs.
    """

    id: str
    arrays: tuple[Array, ...]
    purpose: Purpose = Purpose.TRAIN
    demand: Demand | None = None
    resumes: str = ""
    compute_limit: float | None = None
    memory_limit: int = 0
    assists: str = ""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all arrays, in order."""
        return tuple(member for array in self.arrays for member in array.members)


@dataclass(frozen=True)
class JobUpdate:
    """Change of a training job: members leave or join, or it finds fusion keys of other trials.

    Args:
        leave: Numbers of trials that leave before the next step and send no further reports.
        join: Arrays whose members join the job's first array of the same key when it ends an epoch. Without such an
            array, or if `Array.separate` is set, they are a new array.
        find_signatures: Trials whose fusion keys the job finds before the next step.
        team: Ids of the jobs that are to compute gradients for it, from the first step at which they are ready. None:
            as before.
        memory_limit: Bytes of its GPU that it may use from the next step on; 0: no limit. None: as before.
        cores: CPU cores that it may use as threads from the next step on, with those of idle slots. None: as before.
    """

    leave: frozenset[int] = frozenset()
    join: tuple[Array, ...] = ()
    find_signatures: tuple[Trial, ...] = ()
    team: frozenset[str] | None = None
    memory_limit: int | None = None
    cores: int | None = None


@dataclass(frozen=True)
class WorkerContext:
    """Settings of a study for all its workers.

    Args:
        directory: Directory of the study; workers write checkpoints and logs below it.
        runner: "module:function" of the `Runner`, resolved in the process that runs it.
        sharing: Method by which jobs share a GPU: "auto", "mps" or "plain".
        fork: Whether workers may have the modules that the calling process has imported.
        devices: Devices of the study, as its user wrote them, for back ends that find them on several nodes.
        host: Address at which workers of other machines reach those of this one.
        settings: Settings of torch in its workers; see `shoal.host.process_settings`.
        trains: Whether the study trains; else it only measures.
        process_memory: Bytes of main memory that each process of a function or command may allocate; 0: no limit.
        of_best: Which epoch of a trial is its best, whose weights are kept.
    """

    directory: Path
    task: bytes
    runner: str = "shoal.train.run:run"
    checkpoint_seconds: float = 30.0
    sharing: str = "auto"
    fork: bool = True
    devices: str | Sequence[str] = "auto"
    host: str = "127.0.0.1"
    hang_seconds: float = HANG_SECONDS
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)
    trains: bool = True
    process_memory: int = 0
    of_best: EpochOrder = LAST_EPOCHS


def job_id(number: int) -> str:
    """Id of the job with a number, which counts the jobs of a study from 1 on."""
    return f"job-{number:05d}"


def log_path(directory: Path, job: str) -> Path:
    """Path of the file with a job's output and, if it failed, its full traceback."""
    return directory / "logs" / f"{job}.log"
