"""The jobs that carry arrays, how they are changed while they run, and what a worker is told of its study."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shoal.core.array import Array, Member
from shoal.core.demand import Demand
from shoal.core.trial import Trial

__all__ = ["Job", "JobUpdate", "Purpose", "WorkerContext", "log_path"]


class Purpose(StrEnum):
    """Why a job runs."""

    TRAIN = "train"
    SURVEY = "survey"
    """Looks at the models of its members and finds their array keys."""
    PROFILE = "profile"
    """A few iterations at several sizes; measures and trains nothing."""


@dataclass(frozen=True)
class Job:
    """Arrays that share one process, its data and a device.

    Args:
        id: unique in the study.
        arrays: at least one.
        purpose: why it runs.
        demand: what it is promised on its device; None where nothing is known of it.
        resumes: id of the suspended job that it goes on with; "" of a new one.
        helpers: names of further devices that it has to itself, beside the one that it is on.
    """

    id: str
    arrays: tuple[Array, ...]
    purpose: Purpose = Purpose.TRAIN
    demand: Demand | None = None
    resumes: str = ""
    helpers: tuple[str, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of all arrays, in order."""
        return tuple(member for array in self.arrays for member in array.members)


@dataclass(frozen=True)
class JobUpdate:
    """Surgery on a job that is being trained: some of its members leave, others join.

    Args:
        leave: numbers of trials that are over; they leave before the next step and report no more.
        join: members by their keys; they come into the job's first array of that key when it ends an epoch, or are a
            new one, which they always are if they are to be apart.
        look: trials whose array keys are to be found before the next step.
    """

    leave: frozenset[int] = frozenset()
    join: tuple[Array, ...] = ()
    look: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class WorkerContext:
    """What every worker of a study needs to know.

    Args:
        directory: the study's directory; workers write checkpoints and logs below it.
        task: the user's task, as pickled by cloudpickle.
        runner: "module:function" of the `Runner` that does the work, resolved in the process that runs it.
        checkpoint_seconds: longest wall time between two checkpoints of a running trial.
        sharing: how jobs share a GPU: "auto", "mps" or "plain".
    """

    directory: Path
    task: bytes
    runner: str = "shoal.worker.run:run"
    checkpoint_seconds: float = 30.0
    sharing: str = "auto"


def log_path(directory: Path, job: str) -> Path:
    """The file with a job's output and, if it failed, its full traceback.

    Args:
        directory: of the study.
        job: its id.
    """
    return directory / "logs" / f"{job}.log"
