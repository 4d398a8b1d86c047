"""The proof finds small faults that are planted into Shoal, one at a time.

Searches with a fault train small programs in float64, four trials as one array, whose step modes change in bursts of
four: eager, plain, eager, ..., or eager and a traced graph. The trials have to go back to plain steps, with a reason.
The clock of the proof counts a millisecond for each step of a member or a copy, or thirty where steps are slow, so that
fewer members are compared; so the result does not depend on the machine.
"""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import planted_programs
import pytest
import torch
from corpus_harness import forked
from planted_faults import FAULTS
from planted_programs import Program

import shoal
from shoal.core.demand import Profile
from shoal.fuse.capture import CapturedStep
from shoal.fuse.step import StepMode, TrainingStep
from shoal.train import array_trainer, fused_stepper, plain_copy, run
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.proof import Proof, ProofCost, ProofRecord

RATES = (0.03, 0.05, 0.07, 0.1)
BURST = 4
MOST_STEPS = 9
"""Steps of an array within which a fault has to be found."""

CHEAP_STEP, SLOW_STEP = 1e-3, 30e-3
"""Seconds that a step of a member, or of its copy, takes by the clock of the proof."""

PROFILE = Profile({1: 1.0, len(RATES): 1.0}, 4, 2, 2**28, 2**21, 1.0, 1.0, {1: 0.01}, 1.0)
"""In place of measurements, so that all trials become one array."""

PROGRAMS = [
    name for name, kind in vars(planted_programs).items() if isinstance(kind, type) and issubclass(kind, Program)
]
TOO_LATE = pytest.mark.xfail(strict=True, reason="too rare or too late for the checks of so few steps")
MISSED = ["every_twenty_fifth_update_skipped"]
"""It shows in single steps between the windows of the proof."""
MISSED_SLOW = [
    *MISSED,
    "graph_of_the_first_batch",
    "graph_of_the_first_random_numbers",
    "a_neighbours_optimizer_state",
]
"""With the few checks that slow steps allow."""


class Bursts(TrainingStep):
    """Takes the step modes in bursts, as a race does, and never chooses one."""

    order: ClassVar[tuple[StepMode, ...]]
    taken = 0

    @property
    def next_mode(self) -> StepMode:
        return self.order[self.taken // BURST % len(self.order)]

    def _timed(self, batch: Any) -> torch.Tensor:
        mode = self.next_mode
        self.taken += 1
        if mode == "captured" and mode not in self._runs:
            step = CapturedStep(self.array, self._optimizer, self.loss, batch, False, max_norms=self._max_norms)
            self._runs[mode] = lambda batch: self._captured(step, batch)
        return self._run(mode, batch)


class Clock:
    """Counts the steps of members and of their copies.

    Args:
        step_seconds: that each of them takes.
    """

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def count(self, owner: type, name: str, members: Callable[[Any], int]) -> None:
        step = getattr(owner, name)

        def counted(self_: Any, *arguments: Any) -> Any:
            self.now += self.step_seconds * members(self_)
            return step(self_, *arguments)

        setattr(owner, name, counted)


def search(program: str, fault: str, step_seconds: float, directory: Path) -> list[tuple[str, int]]:
    """Search a program, in a process that ends: each reason for plain steps, and the array's steps until then."""
    refused: list[tuple[str, int]] = []
    clock, kind, fall_back = Clock(step_seconds), getattr(planted_programs, program), ArrayTrainer._fall_back_to_plain

    def refuse(self: Any, reason: Exception) -> None:
        refused.append((str(reason), self._state.proofs[self.key].steps if self._proof else 0))
        fall_back(self, reason)

    torch.set_num_threads(1)
    os.environ["SHOAL_CACHE"] = str(directory / "cache")
    Bursts.order = kind.modes
    ArrayTrainer._fall_back_to_plain = refuse
    fused_stepper.TrainingStep = Bursts
    run.measure = lambda *arguments: PROFILE
    clock.count(Bursts, "__call__", lambda step: len(step.array))
    clock.count(fused_stepper.CustomStep, "__call__", lambda step: len(step._array))
    clock.count(plain_copy.PlainCopy, "step", lambda copy: 1)
    array_trainer.Proof = functools.partial(Proof, clock=clock)
    array_trainer.ProofRecord = lambda cost: ProofRecord(ProofCost(clock()))
    if fault:
        FAULTS[fault].plant()
    shoal.tune(
        kind(),
        {"lr": shoal.grid(list(RATES))},
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs=kind.epochs),
        backend="inline",
        devices="cpu:1",
        directory=directory / "study",
        retries=0,
        show_progress=False,
    )
    return refused


def examine(*arguments: Any) -> list[tuple[str, int]]:
    return forked(functools.partial(search, *arguments))


@pytest.mark.in_turns
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_not_refused_without_a_fault(program: str, process: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert process.submit(examine, program, "", CHEAP_STEP, tmp_path).result() == []


def planted() -> Iterator[pytest.param]:
    """Each fault in the first of its programs; thorough, in all of them, and in the first one where steps are slow."""
    for name, fault in FAULTS.items():
        cases = [(program, CHEAP_STEP) for program in fault.programs] + [(fault.programs[0], SLOW_STEP)]
        for program, seconds in cases:
            slow = seconds == SLOW_STEP
            missed = name in (MISSED_SLOW if slow else MISSED)
            marks = [TOO_LATE] if missed else []
            marks += [pytest.mark.thorough] if slow or missed or program is not fault.programs[0] else []
            title = f"{name}-{program.__name__}{'-slow' if slow else ''}"
            yield pytest.param(name, program.__name__, seconds, marks=marks, id=title)


@pytest.mark.in_turns
@pytest.mark.parametrize(("fault", "program", "seconds"), list(planted()))
def test_a_planted_fault_is_found(
    fault: str, program: str, seconds: float, process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    refused = process.submit(examine, program, fault, seconds, tmp_path).result()
    assert refused
    reason, steps = refused[0]
    assert reason
    assert steps <= MOST_STEPS
