"""What is tried: a trial, its budget, what it reports, and the groups an algorithm asks for."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    *("FIRST_ADDED", "Budget", "Config", "Decision", "Origin", "Report", "Trial", "TrialGroup", "TrialState"),
    *("derive_seed", "step_seed"),
]

Config = Mapping[str, Any]
"""One point of a search space: names to plain values, nested as the space is."""


FIRST_ADDED = 1_000_000
"""Trials that users add to a study are numbered from here on; those of its algorithm have smaller numbers."""


class TrialState(StrEnum):
    """Where a trial stands; the last three are final."""

    PENDING = "pending"
    """Proposed or promoted, waiting for a device."""
    RUNNING = "running"
    PAUSED = "paused"
    """Has reached the budget it was given; its algorithm has not yet said how it goes on."""
    COMPLETE = "complete"
    STOPPED = "stopped"
    """Ended early by its algorithm."""
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether a trial in this state never runs again."""
        return self in (TrialState.COMPLETE, TrialState.STOPPED, TrialState.FAILED)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on every part and on nothing else, on any machine.

    Example:
        The trial with number 7 of a study with seed 0 starts from ``torch.manual_seed(derive_seed(0, "trial", 7))``.
    """
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def step_seed(seed: int, tick: int) -> int:
    """The seed of torch's, Python's and NumPy's generators as a step begins.

    Args:
        seed: of the order of samples; where torch's own numbers are drawn, of the trial.
        tick: steps done since the trial began; -1, -2, ... for the batches of a validation.
    """
    return derive_seed(seed, "step", tick)


@dataclass(frozen=True, slots=True)
class Budget:
    """How far a trial may train, counted from its start: whole passes over its training data."""

    epochs: int

    def __post_init__(self) -> None:
        if isinstance(self.epochs, bool) or not isinstance(self.epochs, int) or self.epochs < 1:
            raise ValueError(f"a budget is a whole number of epochs, at least 1, got {self.epochs!r}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a trial begins that is no new one: with what another trial had learnt.

    Args:
        trial: number of that one.
        epoch: how many epochs it had done; the new trial's count from there.
    """

    trial: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration under a number that is unique in its study.

    Args:
        number: 0, 1, 2, ... in the order of proposal; from `FIRST_ADDED` on of those that users add.
        config: what the task's methods get.
        seed: of initial weights and dropout.
        data_seed: of the order of samples; trials that share it can share their batches.
        origin: None for a trial that begins with weights of its own.
    """

    number: int
    config: Config
    seed: int
    data_seed: int
    origin: Origin | None = None

    @property
    def start(self) -> int:
        """Epochs that its weights have behind them when it begins."""
        return 0 if self.origin is None else self.origin.epoch

    @property
    def is_added(self) -> bool:
        """Whether a user has added it to the study, so that no algorithm decides about it."""
        return self.number >= FIRST_ADDED


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """Trials that an algorithm wants trained up to the same budget, in any order and company (Fluid, section 3).

    A trial that already ran goes on from its checkpoint.

    Args:
        trials: of the group.
        budget: of each, counted from its start.
        name: unique in the study, or empty.
        epochs_ahead: that the best of them will be trained for beyond the budget, once all of them have got there.
        work_ahead: that all of them together will be trained for then. No journal has these; groups that differ in
            nothing else are equal.
    """

    trials: tuple[Trial, ...]
    budget: Budget
    name: str = ""
    epochs_ahead: int = field(default=0, compare=False)
    work_ahead: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Report:
    """What a trial showed at the end of an epoch, or that it failed.

    Args:
        trial: its number.
        epoch: epochs finished since the trial began.
        metrics: name to value, NaN allowed; empty when the trial failed before it measured anything.
        seconds: this trial's share of the wall time since its previous report.
        state: RUNNING while it trains on, PAUSED when its budget is reached, FAILED when it ended by itself.
        reason: why it failed.
    """

    trial: int
    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    state: TrialState = TrialState.RUNNING
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """An algorithm's word on a trial: it is COMPLETE or STOPPED, and why."""

    trial: int
    state: TrialState
    reason: str = ""
