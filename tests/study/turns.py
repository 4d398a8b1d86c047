"""The turns of a study as its journal has them, and what the rule of each policy makes of the recorded losses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path

from shoal.core.event import Outcome, TurnStats
from shoal.core.job import Purpose
from shoal.core.rows import JobRow, Quantum
from shoal.journal.view import JournalView

ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


@dataclass
class Stretch:
    """A job on its device, from its start to its end, with the turns that it had there."""

    job: JobRow
    turns: list[Quantum]

    @property
    def trials(self) -> frozenset[int]:
        return frozenset(self.job.trials)

    @property
    def suspended(self) -> bool:
        return self.job.outcome == Outcome.SUSPENDED


def stretches(directory: Path) -> list[Stretch]:
    with JournalView.read(directory) as journal:
        quanta = journal.quanta()
        return [Stretch(job, quanta.get(job.id, [])) for job in journal.jobs() if job.purpose is Purpose.TRAIN]


def middle(turn: TurnStats) -> float:
    return (turn.highest + turn.lowest) / 2


def convergence(turns: Sequence[TurnStats], waited: float) -> float:
    """Hermes, section 3.3."""
    if len(turns) == 1:
        return (turns[0].highest - turns[0].lowest) / turns[0].steps
    return (middle(turns[-2]) - middle(turns[-1])) / turns[-1].steps


@dataclass
class Decision:
    """What was known when a turn ended, and what followed.

    Args:
        running: trials of the job whose turn ended.
        chosen: trials of the job that has the device next.
        turns: trials of each job that competes -> losses of its turns so far; nothing for one that never ran.
        waited: trials of each job that competes -> seconds since its last turn, or its arrival; -1 of the running one.
    """

    running: frozenset[int]
    chosen: frozenset[int]
    turns: dict[frozenset[int], list[TurnStats]] = field(default_factory=dict)
    waited: dict[frozenset[int], float] = field(default_factory=dict)

    def best(self, rule: Callable[[Sequence[TurnStats], float], float]) -> set[frozenset[int]]:
        """The jobs that the rule would choose: jobs that never ran first, the oldest of them."""
        if new := [trials for trials, turns in self.turns.items() if not turns]:
            return {min(new, key=min)}
        priority = {trials: rule(turns, self.waited[trials]) for trials, turns in self.turns.items()}
        priority = {trials: each if isfinite(each) else -inf for trials, each in priority.items()}
        return {trials for trials, each in priority.items() if each == max(priority.values())}


def decisions(found: Sequence[Stretch]) -> list[Decision]:
    """The decisions at the ends of turns on the only device of a study, as long as any job waits."""
    everyone = dict.fromkeys(stretch.trials for stretch in found)
    turns: dict[frozenset[int], list[TurnStats]] = {trials: [] for trials in everyone}
    left_at = dict.fromkeys(everyone, found[0].job.started)
    done: set[frozenset[int]] = set()
    made = []
    for stretch, after in pairwise([*found, None]):
        assert stretch is not None
        for turn in stretch.turns:
            turns[stretch.trials].append(turn.losses)
            last = turn is stretch.turns[-1]
            leaves = last and stretch.suspended
            if last and not leaves:  # it may have been told to leave, and have come to its end before it could
                continue
            chosen = after.trials if leaves and after is not None else stretch.trials
            open_ = [trials for trials in everyone if trials not in done]
            made.append(
                Decision(
                    stretch.trials,
                    chosen,
                    {trials: list(turns[trials]) for trials in open_},
                    {trials: -1.0 if trials == stretch.trials else turn.time - left_at[trials] for trials in open_},
                )
            )
        left_at[stretch.trials] = stretch.job.ended or inf
        if all(other.trials != stretch.trials for other in found[found.index(stretch) + 1 :]):
            done.add(stretch.trials)  # it may have come to its end between its turn and its departure
    return [each for each in made if len(each.turns) > 1]


def check_rule(found: Sequence[Stretch], rule: Callable[[Sequence[TurnStats], float], float]) -> int:
    """Every decision is the one of the rule; returns how many there were."""
    made = decisions(found)
    for each in made:
        best = each.best(rule)
        assert each.chosen in best, f"after a turn of {each.running} came {each.chosen}, not one of {best}: {each}"
        if each.running in best and all(each.turns.values()):
            assert each.chosen == each.running, "of equals the running one stays"
    return len(made)


def check_lengths(found: Sequence[Stretch], seconds: Callable[[Sequence[TurnStats], int], float]) -> None:
    """No turn is shorter than the policy says.

    Args:
        found: all stretches.
        seconds: function from the turns of a job so far and the number of its suspensions to the length of the next.
    """
    so_far: dict[frozenset[int], list[TurnStats]] = {}
    suspensions: dict[frozenset[int], int] = {}
    for stretch in found:
        before = so_far.setdefault(stretch.trials, [])
        start = stretch.job.started
        for turn in stretch.turns:
            least = seconds(before, suspensions.get(stretch.trials, 0))
            assert turn.time - start >= least - ROUNDING, f"{turn} began at {start} and should take {least} s"
            before.append(turn.losses)
            start = turn.time
        suspensions[stretch.trials] = suspensions.get(stretch.trials, 0) + stretch.suspended


def check_losses(directory: Path, found: Sequence[Stretch]) -> None:
    """The turns hold the losses that were reported in them, each once, in order."""
    with JournalView.read(directory) as journal:
        for number in sorted({number for stretch in found for number in stretch.trials}):
            reported = [report.metrics["loss"] for report in journal.curve(number)]
            for turn in [turn.losses for stretch in found if number in stretch.trials for turn in stretch.turns]:
                part, reported = reported[: turn.steps], reported[turn.steps :]
                assert (turn.highest, turn.lowest, turn.last) == (max(part), min(part), part[-1])
