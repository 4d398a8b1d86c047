"""A mutation test of the proof: small faults are planted into Shoal one by one, and it says which the proof finds.

A fault changes one function that only arrays use (`mutation_faults.py`): a neighbour's row, a forgotten buffer, a
stale batch, a skipped update. Searches with it train small programs in float64 (`mutation_programs.py`), four trials as
one array, whose step modes change in bursts of four: eager, plain, eager, ..., or eager and a traced graph. With the
proof, the trials should go back to plain steps with a reason; the steps until then are counted. Without the proof, the
fault must change a training loss or a metric by more than ten times what rounding does, else it does not count for the
program; rounding is the difference between the array and the same trials in plain PyTorch, both without the fault. The
clock of the proof counts a millisecond for each step of a member or a copy, or thirty with `--slow`, so that fewer
members are compared; so the result does not depend on the machine.

The copies of the proof train by code that plain trials use as well (`PlainStepper`, averages of weights, the random
keys of one trial): the proof cannot find a fault in that, so none is planted there.

    python benchmarks/mutations.py [--programs 1] [--quick] [--slow] [--faults NAME ...]

With `--programs 1` each fault is tried with the first of its programs, and what it changes is measured only if it is
not found; a quick run does so with every tenth fault.
"""

import argparse
import contextlib
import functools
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from mutation_faults import FAULTS, Fault
from mutation_programs import PROGRAMS
from torch import Tensor

import shoal
from shoal.core.demand import Profile
from shoal.fuse.capture import CapturedStep
from shoal.fuse.step import StepMode, TrainingStep
from shoal.train import array_trainer, fused_stepper, plain_copy, run
from shoal.train.array_members import ArrayMembers, LossTracker
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.proof import Proof, ProofCost, ProofRecord

RATES = (0.03, 0.05, 0.07, 0.1)
EPOCHS, BURST = 6, 4
FACTOR = 10.0
"""A fault counts if it changes a value by more than this factor over what rounding does."""

CHEAP_STEP, SLOW_STEP = 1e-3, 30e-3
"""Seconds that a step of a member, or of its copy, takes by the clock of the proof."""

PROFILE = Profile({1: 1.0, len(RATES): 1.0}, 4, 2, 2**28, 2**21, 1.0, 1.0, {1: 0.01}, 1.0)
"""In place of measurements, so that all trials become one array."""


@dataclass
class Seen:
    """What a search has computed, and what the proof has found."""

    values: dict[Any, float] = field(default_factory=dict)
    reason: str = ""
    steps: int = 0
    failure: str = ""


class Bursts(TrainingStep):
    """Takes the step modes in bursts, as a race does, and never chooses one."""

    order: ClassVar[tuple[StepMode, ...]]
    taken = 0

    @property
    def next_mode(self) -> StepMode:
        return self.order[self.taken // BURST % len(self.order)]

    def _timed(self, batch: Any) -> Tensor:
        mode = self.next_mode
        self.taken += 1
        if mode == "captured" and mode not in self._runs:
            step = CapturedStep(self.array, self._optimizer, self.loss, batch, False, max_norms=self._max_norms)
            self._runs[mode] = lambda batch: self._captured(step, batch)
        return self._run(mode, batch)


class Clock:
    """Counts the steps of members and of their copies."""

    step_seconds = CHEAP_STEP

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def counting(self, owner: type, name: str, members: Callable[[Any], int]) -> None:
        step = getattr(owner, name)

        def counted(self_: Any, *arguments: Any) -> Any:
            self.now += self.step_seconds * members(self_)
            return step(self_, *arguments)

        setattr(owner, name, counted)


def watched(seen: Seen) -> None:
    """Have losses, metrics, refusals and the number of steps noted."""
    add, end_epoch, fall_back = LossTracker.add, ArrayMembers.end_epoch, ArrayTrainer._fall_back_to_plain

    def losses(self: Any, runtimes: Any, values: Tensor) -> None:
        for runtime, value in zip(runtimes, values.tolist(), strict=True):
            seen.values[runtime.trial.number, runtime.epoch, runtime.step] = value
        add(self, runtimes, values)

    def metrics(self: Any, group: Any, found: Any, seconds: float) -> Any:
        for runtime, values in zip(group, found, strict=True):
            seen.values |= {(runtime.trial.number, runtime.epoch, name): value for name, value in values.items()}
        return end_epoch(self, group, found, seconds)

    def refused(self: Any, reason: Exception) -> None:
        if not seen.reason:
            seen.reason, seen.steps = str(reason), self._state.proofs[self.key].steps if self._proof else 0
        fall_back(self, reason)

    LossTracker.add, ArrayMembers.end_epoch = losses, metrics  # type: ignore[method-assign]
    ArrayTrainer._fall_back_to_plain = refused  # type: ignore[method-assign]


def search(program: str, fault: Fault | None, exact: bool, modes: tuple[StepMode, ...] = ()) -> Seen:
    """Search a program in a process of its own, with or without a fault and the proof."""

    def searched() -> Seen:
        seen, clock, kind = Seen(), Clock(), PROGRAMS[program]
        kind.exact = exact
        Bursts.order = modes or kind.modes
        fused_stepper.TrainingStep = Bursts  # type: ignore[misc]
        run.measure = lambda *arguments: PROFILE  # type: ignore[assignment]
        clock.counting(Bursts, "__call__", lambda step: len(step.array))
        clock.counting(fused_stepper.CustomStep, "__call__", lambda step: len(step._array))
        clock.counting(plain_copy.PlainCopy, "step", lambda copy: 1)
        array_trainer.Proof = functools.partial(Proof, clock=clock)  # type: ignore[misc, assignment]
        array_trainer.ProofRecord = lambda cost: ProofRecord(ProofCost(clock()))  # type: ignore[misc, assignment]
        logging.disable(logging.WARNING)
        watched(seen)
        with tempfile.TemporaryDirectory() as folder, fault.planted() if fault else contextlib.nullcontext():
            os.environ["SHOAL_CACHE"] = str(Path(folder) / "cache")
            try:
                shoal.tune(
                    kind(),
                    {"lr": shoal.grid(list(RATES))},
                    metric="valid_loss",
                    mode="min",
                    algorithm=shoal.Grid(epochs=kind.epochs),
                    backend="inline",
                    devices="cpu:1",
                    directory=Path(folder) / "study",
                    retries=0,
                    show_progress=False,
                )
            except shoal.StudyFailedError as error:
                seen.failure = str(error)
            study = shoal.Study(Path(folder) / "study")
            failed = [row.reason for row in study.trials if row.failures]
            seen.failure = seen.failure or (failed[0] if failed else "")
        return seen

    return forked(searched)


def forked(call: Callable[[], Any]) -> Any:
    """What a function returns in a child of this process."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        try:
            try:
                found = call()
            except BaseException:
                found = Seen(failure=traceback.format_exc())
            writer.send(found)
        finally:
            os._exit(0)
    writer.close()
    try:
        return reader.recv()
    finally:
        os.waitpid(child, 0)


def difference(seen: Seen, other: Seen) -> float:
    """The largest relative difference of a loss or metric."""
    off = 0.0
    for key in seen.values.keys() | other.values.keys():
        a, b = seen.values.get(key, math.nan), other.values.get(key, math.nan)
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        off = max(off, abs(a - b) / max(abs(a), abs(b), 1e-3) if math.isfinite(a - b) else math.inf)
    return off


@functools.cache
def faultless(program: str) -> tuple[Seen, float]:
    """What a program computes without faults, and the part of it that rounding changes."""
    seen = search(program, None, exact=False)
    return seen, max(difference(seen, search(program, None, False, ("plain",))), 2.0**-52)


def change(program: str, fault: Fault) -> float:
    """How much a fault changes a loss or metric of a program, as a multiple of what rounding does."""
    seen, (right, rounding) = search(program, fault, exact=False), faultless(program)
    return math.inf if seen.failure != right.failure else difference(seen, right) / rounding


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, help="each fault with the first so many of its programs, none rare")
    parser.add_argument("--quick", action="store_true", help="every tenth fault, with one program")
    parser.add_argument("--slow", action="store_true", help="steps take long, so fewer members are compared")
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="only these; prints the reasons")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.slow:
        Clock.step_seconds = SLOW_STEP
    if options.quick:
        options.programs = 1
    chosen = [fault for fault in FAULTS if not (options.programs and fault.rare)]
    if options.faults:
        chosen = [fault for fault in chosen if fault.name in options.faults]
    elif options.quick:
        chosen = chosen[::10]
    missed = []
    programs = sorted({name for fault in chosen for name in _programs(fault, options.programs)})
    for program in programs:
        if (seen := search(program, None, exact=True)).reason or seen.failure:
            missed.append(f"{program} is refused without a fault: {seen.reason or seen.failure}")
    print(f"{'fault':<40} {'changes':>8} {'found in':>8}  steps")
    changing, steps = 0, []
    for fault in chosen:
        found, unfound = [], []
        for program in _programs(fault, options.programs):
            seen = search(program, fault, exact=True)
            if not options.programs or not seen.reason:
                if (factor := change(program, fault)) <= FACTOR:
                    continue
                if not seen.reason:
                    unfound.append(f"{fault.name} in {program}: {factor:.1g} times rounding {seen.failure[-200:]}")
                    continue
            found.append(seen)
            if options.faults:
                print(f"    {program}: {seen.reason}")
        taken = sorted({seen.steps for seen in found})
        changed = len(found) + len(unfound)
        print(f"{fault.name:<40} {changed:>8} {len(found):>8}  {' '.join(map(str, taken))}", flush=True)
        missed += unfound
        changing += changed > 0
        steps += taken
    figures = {
        "faults": len(chosen),
        "change_a_loss": changing,
        "programs": len(programs),
        "most_steps": max(steps, default=0),
    }
    print()
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def _programs(fault: Fault, most: int | None) -> Iterator[str]:
    yield from fault.programs[:most]


if __name__ == "__main__":
    sys.exit(main())
