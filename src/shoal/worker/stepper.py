"""The contract of what takes training steps of several runtimes and validates them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shoal.core.demand import Profile
from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["MixedEpochsError", "StepRefusedError", "Stepper"]


class MixedEpochsError(Exception):
    """Runtimes at different epochs cannot be one array.

    Args:
        reason: why.
        spoilt: whether a step was done before that was known, with wrong numbers; else nothing is changed.
    """

    def __init__(self, reason: object, spoilt: bool = False) -> None:
        super().__init__(str(reason))
        self.spoilt = spoilt


class StepRefusedError(Exception):
    """A step did what runtimes must not do as they are trained, and is left half done.

    They go back to their checkpoints, and train in plain PyTorch from there.

    Args:
        reason: in words.
        trial: that cannot draw numbers of its own, even by itself and looked at; None: another reason.
    """

    def __init__(self, reason: str, trial: int | None = None) -> None:
        super().__init__(reason)
        self.trial = trial


class Stepper(ABC):
    """Trains runtimes that are at the same step of an epoch, batch by batch; the epochs may be different ones."""

    runtimes: list[TrialRuntime]
    refusal = ""
    """Why runtimes of one structure are no array; "" if they are, or a step of theirs has yet to show it."""

    @property
    def finding(self) -> Profile | None:
        """What is newly known of the structure's cost."""
        return None

    @property
    def gain(self) -> float | None:
        """How many times as fast steps of all at once were as of one after another; None if not both were timed."""
        return None

    @property
    def settled(self) -> bool:
        """Whether steps are taken in the way that was found the fastest."""
        return True

    @abstractmethod
    def train_step(self, batches: Sequence[Any], ticks: Sequence[int]) -> Tensor:
        """One step of every runtime.

        Args:
            batches: of each runtime; those that are shared are one object.
            ticks: steps each runtime has done since it began; with its seed that determines its random numbers.

        Returns:
            The losses, shape [B].

        Raises:
            MixedEpochsError: the runtimes are at different epochs.
            StepRefusedError: they cannot go on as they are trained.
        """

    @abstractmethod
    def validate(self, batches: Iterable[Any]) -> list[dict[str, float]]:
        """Each runtime's metrics and `valid_loss`, averaged over the samples.

        Random numbers of a runtime are those of its seed and of ticks -1, -2, ...: the same at every epoch.

        Raises:
            StepRefusedError: they cannot go on as they are trained.
        """
