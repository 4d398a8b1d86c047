"""One base class, and one class for each thing a user can act on."""

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
    "TaskChangedError",
    "TaskError",
    "UnusableTaskError",
]


class ShoalError(Exception):
    """Base of all errors that Shoal raises on purpose."""


class SpaceError(ShoalError, ValueError):
    """A search space that cannot be sampled; names the parameter and the value."""


class AlgorithmError(ShoalError, ValueError):
    """An algorithm's setting, or what it was asked to do, is impossible."""


class PolicyError(ShoalError, ValueError):
    """A placement policy is unknown or returned an illegal plan."""


class PackError(ShoalError, ValueError):
    """Models, arrays or a batch that a pack cannot take, or a packing that is none; names which and the remedy."""


class ScenarioError(ShoalError, ValueError):
    """A scenario that cannot be simulated; names the file, the line and the key."""


class DeviceError(ShoalError, ValueError):
    """A device was asked for that this machine does not have."""


class BackendError(ShoalError, RuntimeError):
    """A back end is unknown or could not start its workers."""


class MpsError(ShoalError, RuntimeError):
    """The MPS daemon of a GPU cannot be started, is someone else's or does not answer; names the remedy."""


class TaskError(ShoalError, ValueError):
    """A task breaks its contract: a loss that is no scalar, a metric it never reports, no data."""


class MetricNameError(TaskError):
    """A program names a metric by what is no string; its trial has failed, and others may do well."""


class TaskChangedError(TaskError):
    """The files of a task have changed since its study last ran; names what changed and the remedy."""


class UnusableTaskError(TaskError):
    """A task that cannot be loaded, or does not fit what a trial has learnt; no trial can go on, and none is lost."""


class FusionError(ShoalError, ValueError):
    """Models or optimizers that cannot be fused; names the member, the module path and the remedy."""


class CheckpointError(ShoalError, RuntimeError):
    """A checkpoint that cannot be read or does not belong to its trial."""


class JournalError(ShoalError, RuntimeError):
    """A directory that holds no study, or one that this version cannot read."""


class StudyExistsError(JournalError):
    """The directory already holds a study; resume it or choose another directory."""


class StorageFullError(ShoalError, OSError):
    """No space is left for the journal or a checkpoint; what is recorded is intact."""


class StudyFailedError(ShoalError):
    """All trials of a study failed, or the first ones did, all of one cause; names causes, counts, logs, the remedy.

    What is recorded stays, and trials that have not failed for good stay open: `resume` goes on with them.

    Attributes:
        directory: of the study, which `Study` can look at; None where it is not known.
    """

    def __init__(self, message: str, directory: Path | None = None) -> None:
        super().__init__(message)
        self.directory = directory


class StudyInterrupted(ShoalError):  # noqa: N818  (an event, not a fault)
    """The study was stopped by the user after a checkpoint; it can be resumed."""
