"""Activities that take the time of a device."""

from collections.abc import Mapping
from enum import StrEnum

__all__ = ["MEASURING", "TRAINING_STEPS", "Activity", "seconds_of"]


class Activity(StrEnum):
    """Workers report the members up to ENGINE, the journal shows the others."""

    START = "start"
    """A process starts: fork, imports, context of the device, load of the task."""
    DATA = "data"
    """`Task.data` loads data sets."""
    SIGNATURE = "comparing models"
    """Models are built for their fusion keys."""
    PROFILE = "measuring"
    """A profile job measures steps."""
    BUILD = "build"
    """Models, optimizers and arrays are made, or restored from checkpoints."""
    COMPILE = "compile"
    """Steps are traced, compiled or recorded as CUDA graphs."""
    AUTOTUNE = "autotune"
    """The autotuner times lowerings of one function."""
    TIMED_STEPS = "timed steps"
    """Training steps of an array whose fastest kind of step is not found yet; some steps use a slower kind."""
    STEPS = "steps"
    """Training steps with their batches, and the rest of the training loop."""
    CHECKS = "checks"
    """Copies of trials of an array train in plain PyTorch beside it, and are compared with them."""
    END_EPOCH = "end_epoch"
    """`Task.end_epoch` is called for one trial after another."""
    VALIDATION = "validation"
    CHECKPOINTS = "checkpoints"
    """Trials are saved, and kept in memory for later jobs."""
    ENGINE = "planning"
    """The device waits for the engine: events and commands are on their way, or the engine plans."""
    WAITS_FOR_MEASURING = "waits for measuring"
    """The device has no job, while other devices find fusion keys or profile."""
    WAITS_FOR_TRIALS = "waits for trials"
    """The device has no job, while other devices train: the algorithm or the policy waits for their results."""
    FINISHED = "finished"
    """The device has had its last job, and other devices continue."""
    UNREPORTED = "running or killed jobs"
    """A job that still runs, or that was killed before it could report its activities."""


MEASURING = (Activity.SIGNATURE, Activity.PROFILE, Activity.AUTOTUNE)
"""Activities of jobs that decide how trials are grouped and stepped."""
TRAINING_STEPS = (Activity.STEPS, Activity.TIMED_STEPS)


def seconds_of(activities: tuple[Activity, ...], spent: Mapping[Activity, float]) -> float:
    """Return the seconds of some activities together."""
    return sum(spent.get(activity, 0.0) for activity in activities)
