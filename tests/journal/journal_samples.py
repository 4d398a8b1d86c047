"""Small studies for the tests of the journal."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.recorded import RecordedJournal

from shoal.core.array import Array, FusionKey, Member
from shoal.core.job import Job, Purpose
from shoal.core.space import Space
from shoal.core.trial import Budget, Report, Trial, TrialGroup, TrialState
from shoal.spec import StudySpec

SPEC = StudySpec(metric="accuracy", mode="max", devices=["cpu:0"], space=Space({"lr": 0.1}).to_json())


class Clock:
    """Time that passes by one second a look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def create(directory: Path, **changes: Any) -> RecordedJournal:
    return RecordedJournal.create(
        directory, replace(SPEC, **changes), task=b"a task", algorithm=b"an algorithm", clock=Clock()
    )


def trial(number: int, **config: object) -> Trial:
    return Trial(number, config or {"lr": 0.1 / (number + 1)}, seed=2**63 - 1 - number, data_seed=7)


def group(numbers: Sequence[int], epochs: int, name: str = "") -> TrialGroup:
    return TrialGroup(tuple(trial(number) for number in numbers), Budget(epochs), name)


def job(name: str, numbers: Sequence[int], target: int = 3, purpose: Purpose = Purpose.TRAIN) -> Job:
    members = tuple(Member(trial(number), 0, target) for number in numbers)
    return Job(name, (Array(FusionKey("s", "d", 32), members),), purpose)


def report(number: int, epoch: int, accuracy: float = 0.5, state: TrialState = TrialState.RUNNING) -> Report:
    return Report(number, epoch, {"accuracy": accuracy, "valid_loss": 1.0 - accuracy}, 0.25, state)
