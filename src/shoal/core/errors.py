"""Error classes: one base class, and one class for each kind of remedy; and the interrupt of a study."""

from pathlib import Path

__all__ = [
    "AlgorithmError",
    "BackendError",
    "CheckpointError",
    "DeviceError",
    "FusionError",
    "JournalError",
    "MetricNameError",
    "MpsError",
    "PackError",
    "PolicyError",
    "ScenarioError",
    "ShoalError",
    "SpaceError",
    "StorageFullError",
    "StudyExistsError",
    "StudyFailedError",
    "StudyInterrupted",
    "StudyMovedError",
    "TaskChangedError",
    "TaskError",
    "UnusableTaskError",
]


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""


class SpaceError(ShoalError, ValueError):
    """A search space that cannot be sampled; names the parameter and the value."""


class AlgorithmError(ShoalError, ValueError):
    """A setting of an algorithm, or a request to it, is impossible."""


class PolicyError(ShoalError, ValueError):
    """A placement policy is unknown or returned an illegal plan."""


class PackError(ShoalError, ValueError):
    """Models, arrays or a batch that a pack cannot take, or an invalid packing; names it and the remedy."""


class ScenarioError(ShoalError, ValueError):
    """A scenario that cannot be simulated; names the file, the line and the key."""


class DeviceError(ShoalError, ValueError):
    """A requested device is not available on this machine."""


class BackendError(ShoalError, RuntimeError):
    """A back end is unknown or could not start its workers."""


class MpsError(ShoalError, RuntimeError):
    """The MPS daemon of a GPU cannot be started, belongs to another user or does not answer; names the remedy."""


class TaskError(ShoalError, ValueError):
    """A task breaks its contract, as by a loss that is not a scalar, a missing metric, or no data."""


class MetricNameError(TaskError):
    """A program gives a metric a name that is not a string; its trial fails, others may succeed."""


class TaskChangedError(TaskError):
    """The files of a task have changed since its study last ran; names the changes and the remedy."""


class UnusableTaskError(TaskError):
    """A task cannot be loaded, or does not fit a trial's checkpoint; no trial can continue, and none is lost."""


class FusionError(ShoalError, ValueError):
    """Models or optimizers that cannot be fused; names the member, the module path and the remedy."""


class CheckpointError(ShoalError, RuntimeError):
    """A checkpoint cannot be read or does not belong to its trial."""


class JournalError(ShoalError, RuntimeError):
    """A directory holds no study, or one that this version cannot read."""


class StudyMovedError(JournalError):
    """The directory of a study was moved or removed while the study ran; what was recorded until then is intact."""


class StudyExistsError(JournalError):
    """The directory already holds a study; resume it or choose another directory."""


class StorageFullError(ShoalError, OSError):
    """No space is left for the journal or a checkpoint; all records are intact."""


class StudyFailedError(ShoalError):
    """All trials of a study failed, or the first trials failed with one cause. The message names causes, logs and
    remedy.

    The journal stays, and `resume` continues the trials that have not failed for good.

    Attributes:
        directory: Directory of the study, for `Study`; None if it is unknown.
    """

    def __init__(self, message: str, directory: Path | None = None) -> None:
        super().__init__(message)
        self.directory = directory


class StudyInterrupted(KeyboardInterrupt):
    """The study was stopped by Ctrl-C or SIGTERM after a checkpoint; it can be resumed.

    It is no ShoalError: code that continues after a failed study (`except Exception`) does not continue after this.
    """
