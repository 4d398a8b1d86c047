"""Base class of steppers, which take training steps of several trials and validate them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shoal.core.demand import Profile
from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["MixedEpochsError", "StepRefusedError", "Stepper"]


class MixedEpochsError(Exception):
    """Trials at different epochs cannot be one array.

    Args:
        reason: Reason in words.
        spoilt: Whether a step with wrong results was taken before this was found; if not, nothing has changed.
    """

    def __init__(self, reason: object, spoilt: bool = False) -> None:
        super().__init__(str(reason))
        self.spoilt = spoilt


class StepRefusedError(Exception):
    """A step did something that this stepper does not support, and is left half done.

    The trials go back to their checkpoints, and train in plain PyTorch from there.

    Args:
        reason: Reason in words.
        trial: Number of the trial, if the reason is that it cannot draw its own random numbers even alone; else None.
    """

    def __init__(self, reason: str, trial: int | None = None) -> None:
        super().__init__(reason)
        self.trial = trial


class Stepper(ABC):
    """Trains trials at the same step of an epoch, batch by batch; their epochs may differ.

    `ArrayTrainer` calls `train_step` for each step of an epoch, then `validate`, until the trials of the array change.
    """

    runtimes: list[TrialRuntime]
    refusal = ""
    """Why trials of one structure cannot be an array; "" if they can, or if no step has shown it yet."""

    @property
    def finding(self) -> Profile | None:
        """The profile with new measurements of the structure; None if there are none."""
        return None

    @property
    def gain(self) -> float | None:
        """How many times as fast fused steps were as plain ones; None if not both were timed."""
        return None

    @property
    def settled(self) -> bool:
        """Whether the search for the fastest kind of step is over."""
        return True

    @abstractmethod
    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """Take one step of every trial.

        Args:
            batches: Batch of each trial; trials that share a batch have the same object.
            ticks: Steps of each trial so far, which determine its random numbers together with its seed.

        Returns:
            The losses, shape [B].

        Raises:
            MixedEpochsError: The trials are at different epochs, and cannot be one array.
            StepRefusedError: The stepper cannot train these trials.
        """

    @abstractmethod
    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Each trial's metrics and `valid_loss`, averaged over the samples.

        The random numbers of a trial are those of its seed and of ticks -1, -2, ...: the same at every epoch.

        Raises:
            StepRefusedError: The stepper cannot validate these trials.
        """
