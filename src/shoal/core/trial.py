"""Trials: configurations with their states, budgets, reports, groups and decisions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    *("FIRST_ADDED", "Budget", "Check", "Config", "Decision", "EarlierTrial", "Origin", "Report", "Trial"),
    *("TrialGroup", "TrialState"),
    *("derive_seed", "numbers_text", "state_name", "step_seed"),
]

Config = Mapping[str, Any]
"""One point of a search space: names to plain values, nested as the space is."""


FIRST_ADDED = 1_000_000
"""Least number of trials that users add to a study; trials of its algorithm have smaller numbers."""


class TrialState(StrEnum):
    """State of a trial; the last three are final."""

    PENDING = "pending"
    """It was proposed or promoted, and waits for a device."""
    RUNNING = "running"
    PAUSED = "paused"
    """It has reached its budget, and waits for its algorithm to decide or to grant a larger budget."""
    COMPLETE = "complete"
    STOPPED = "stopped"
    """Its algorithm or a user ended it early."""
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether a trial in this state never runs again."""
        return self in (TrialState.COMPLETE, TrialState.STOPPED, TrialState.FAILED)


def state_name(state: TrialState, runs: bool) -> str:
    """A state for programs: a running trial without a process is "interrupted"."""
    return "interrupted" if state is TrialState.RUNNING and not runs else str(state)


def numbers_text(numbers: Sequence[int]) -> str:
    """Return whole numbers, ascending and in ranges: "0-7, 9"."""
    ranges: list[list[int]] = []
    for value in sorted(numbers):
        if ranges and value == ranges[-1][-1] + 1:
            ranges[-1][1:] = [value]
        else:
            ranges.append([value])
    return ", ".join("-".join(map(str, each)) for each in ranges)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63), a function of the parts alone, equal on all machines.

    Example:
        The trial with number 7 of a study with seed 0 starts from ``torch.manual_seed(derive_seed(0, "trial", 7))``.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def step_seed(seed: int, tick: int) -> int:
    """The seed of torch's, Python's and NumPy's generators as a step begins."""
    return derive_seed(seed, "step", tick)


@dataclass(frozen=True, slots=True)
class Budget:
    """Number of epochs that a trial may train, counted from its start."""

    epochs: int

    def __post_init__(self) -> None:
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise ValueError(f"a budget is a whole number of epochs, at least 1, got {self.epochs!r}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Checkpoint of another trial with which a trial begins."""

    trial: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration under a number that is unique in its study."""

    number: int
    config: Config
    seed: int
    data_seed: int
    origin: Origin | None = None

    @property
    def start(self) -> int:
        """Number of epochs that its initial weights were trained."""
        return 0 if self.origin is None else self.origin.epoch

    @property
    def is_added(self) -> bool:
        """Whether a user has added it to the study; the algorithm does not decide about it."""
        return self.number >= FIRST_ADDED


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """Trials that an algorithm requests up to one budget, in any order and in any arrays (Fluid, section 3).

    A trial that already ran continues from its checkpoint."""

    trials: tuple[Trial, ...]
    budget: Budget
    name: str = ""
    epochs_ahead: int = field(default=0, compare=False)
    work_ahead: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a trial at the end of an epoch, or of its failure.

    Args:
        errors: Name of a metric -> standard error of its mean over the validation set, where it is known; it is shown,
            and algorithms do not read it.
    """

    trial: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    state: TrialState = TrialState.RUNNING
    reason: str = ""
    checkpoint: str = field(default="", compare=False)
    errors: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class EarlierTrial:
    """A finished trial of an earlier study, of which the model of a search takes the values.

    Args:
        config: Its configuration, which is in the space of the search.
        metrics: Epochs -> the values reported then, of the metrics and of the constraints of the search.
        stopped: Whether it was stopped; else it was to end at its last epoch, whatever its values.
    """

    config: Config
    metrics: Mapping[int, Mapping[str, float]]
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison of a trial in an array with the same trial in plain PyTorch.

    Args:
        epoch: Epochs that the trial had finished.
        step: Steps of the epoch that the trial had taken.
        what: What was compared: "step, eager" (the step mode) or "validation".
        difference: Largest relative difference of the tensors compared.
    """

    trial: int
    epoch: int
    step: int
    what: str
    difference: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of an algorithm that a trial is COMPLETE or STOPPED, with the reason."""

    trial: int
    state: TrialState
    reason: str = ""
