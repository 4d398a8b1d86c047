"""Studies that are made up from seeds, disturbed at random moments, and looked at after each step.

A seed gives an algorithm, a space, devices of several kinds and nodes, a policy, what trials cost and report, and what
goes wrong: the engine is killed between any two steps of commit and action, disks are full, jobs crash, hang and run
out of memory, devices are lost and come back, events come late, twice and in another order, and people intervene: they
also pin trials, change what is kept and extend the search. The engine, state machine and journal are those of every
study. What has to hold is in `tests/support/invariants.py`: no trial is lost or trained twice at a time, no device is
over its memory and no node over its cores, every waiting trial has a reason, no checkpoint is deleted that is pinned,
kept or needed, the journal says what the state machine says, the algorithm decides what it decides undisturbed, and
the study ends. A seed that fails gives the same failure again: `--first SEED --seeds 1`.

Six deliberate faults are then put, one at a time, into the engine and the state machine, and the seeds counted until
each is found; `--faults` does that alone.

    python benchmarks/simulation_fuzz.py [--seeds 10000] [--first 0] [--faults] [--quick]
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shoal.core.array import Member
from shoal.core.command import Step
from shoal.core.event import Ended, Outcome
from shoal.core.rows import ReportRow, Row, TrialRow
from shoal.core.trial import TrialState
from shoal.journal.writer import Journal
from shoal.study import core
from shoal.study.engine import Engine
from shoal.study.retention import Retention
from shoal.study.state import StudyState
from shoal.study.trials import TrialTable

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.simulation import SimulationOutcome, simulate

QUICK = 20
FAULTY = 200
"""Seeds within which each deliberate fault has to be found."""
AT_ONCE = 20
"""Seeds that a process takes at a time."""


@dataclass(frozen=True)
class Deliberate:
    """A fault that is put in on purpose.

    Args:
        place: the class or module that has the function.
        name: of the function.
        wrong: of the function as it is, makes one that is wrong.
    """

    place: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]

    @contextmanager
    def put_in(self) -> Iterator[None]:
        with patch.object(self.place, self.name, self.wrong(getattr(self.place, self.name))):
            yield


def lost_on_commit(write: Callable[..., None]) -> Callable[..., None]:
    """Of the second epochs of every third trial nothing is written."""

    def wrong(self: Journal, rows: Iterable[Row]) -> None:
        write(self, [row for row in rows if not second_epoch(row)])

    def second_epoch(row: Row) -> bool:
        match row:
            case ReportRow():
                return row.report.trial % 3 == 0 and row.report.epoch == 2
            case TrialRow():
                return row.number % 3 == 0 and row.epoch == 2
        return False

    return wrong


def carried_out_before_commit(do: Callable[..., None]) -> Callable[..., None]:
    """Jobs are started, changed and ended before the journal knows of it."""

    def wrong(self: Engine, step: Step) -> None:
        do(self, Step(step.time, [], step.commands))
        do(self, Step(step.time, step.rows, []))

    return wrong


def started_twice(begin: Callable[..., None]) -> Callable[..., None]:
    """The last of several members of a job goes on waiting."""

    def wrong(self: TrialTable, job: str, device: str, members: Iterable[Member]) -> None:
        some = list(members)
        begin(self, job, device, some[:-1] or some)

    return wrong


def retry_forgotten(requeue: Callable[..., set[int]]) -> Callable[..., set[int]]:
    """Of the trials of a job that failed, one does not wait again."""

    def wrong(self: TrialTable, job: str, trials: Iterable[int] | None, *, failed: bool) -> set[int]:
        left = requeue(self, job, trials, failed=failed)
        if failed and left:
            self.move(self[max(left)], TrialState.RUNNING)
        return left

    return wrong


def reservation_kept(end: Callable[..., None]) -> Callable[..., None]:
    """A job that has run out of memory keeps its device."""

    def wrong(state: StudyState, ended: Ended, now: float) -> None:
        held = state.running[ended.job]
        end(state, ended, now)
        if ended.outcome is Outcome.OUT_OF_MEMORY:
            state.running.begin(*held, state.step.time)

    return wrong


def nothing_needed(needed: Callable[..., bool]) -> Callable[..., bool]:
    """Checkpoints of ended trials are deleted though they are pinned, or others begin with them."""
    return lambda self, state, record: False


DELIBERATE = {
    "an event is lost on commit": Deliberate(Journal, "write", lost_on_commit),
    "a command is carried out before it is committed": Deliberate(Engine, "_apply", carried_out_before_commit),
    "a trial is started twice": Deliberate(TrialTable, "begin", started_twice),
    "a retry is forgotten": Deliberate(TrialTable, "requeue", retry_forgotten),
    "a reservation is not given back": Deliberate(core, "end_job", reservation_kept),
    "a checkpoint that is needed is deleted": Deliberate(Retention, "_needed", nothing_needed),
}


def found_within(fault: Deliberate, first: int, most: int) -> tuple[int, str]:
    """Seeds until a deliberate fault is found, and as what; 0 if it is not within so many."""
    with fault.put_in():
        for number in range(most):
            if violation := simulate(first + number).violation:
                return number + 1, violation
    return 0, ""


def several(seeds: Sequence[int]) -> list[SimulationOutcome]:
    return [simulate(seed) for seed in seeds]


def run(first: int, seeds: int) -> tuple[list[SimulationOutcome], float]:
    """What came of each seed, on all cores, and the seconds that it took."""
    shares = [range(begin, min(begin + AT_ONCE, first + seeds)) for begin in range(first, first + seeds, AT_ONCE)]
    began = time.perf_counter()
    found: list[SimulationOutcome] = []
    with ProcessPoolExecutor() as pool:
        for some in pool.map(several, shares):
            found += some
            for each in some:
                if each.violation:
                    print(f"seed {each.seed}: {each.violation}", flush=True)
    return found, time.perf_counter() - began


def print_runs(found: Sequence[SimulationOutcome], seconds: float) -> None:
    injected: Counter[str] = Counter()
    for each in found:
        injected += each.faults
    steps, engines = sum(each.steps for each in found), sum(each.engines for each in found)
    print(f"{len(found)} studies, {engines} engines, {steps} steps of the state machine, in {seconds:.1f} s: "
          f"{60 * len(found) / seconds:.0f} seeds a minute")  # fmt: skip
    for kind, times in injected.most_common():
        print(f"  {kind:<20} {times:>8}")
    print(f"failing seeds: {sum(bool(each.violation) for each in found)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", action="store_true", help="the deliberate faults, and no seeds without them")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} seeds, and one deliberate fault")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    figures: dict[str, Any] = {}
    missed: list[str] = []
    if not options.faults:
        found, seconds = run(options.first, QUICK if options.quick else options.seeds)
        print_runs(found, seconds)
        failing = [each.seed for each in found if each.violation]
        figures |= {"seeds": len(found), "failing": failing, "seeds_a_minute": round(60 * len(found) / seconds)}
        missed += [f"seed {each.seed}: {each.violation}" for each in found if each.violation]
    figures["found_within"] = {}
    print(f"\n{'deliberate fault':<50} {'seeds':>5}  found as")
    for name, fault in list(DELIBERATE.items())[: 1 if options.quick else None]:
        within, violation = found_within(fault, options.first, FAULTY)
        print(f"{name:<50} {within or 'never':>5}  {violation}", flush=True)
        figures["found_within"][name] = within
        missed += [] if within else [f"{name}: not found within {FAULTY} seeds"]
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
