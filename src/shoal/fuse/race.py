"""Online benchmark that finds the fastest of several candidates by running them in turns.

It chooses between lowerings of a function, between step modes of an array, and between interleavings of arrays in one
process. It also times the sizes of an array. `Race` names the next candidate and records its time, for runs that are
real work. `choose_fastest` runs candidates that can be called at any time.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Generic, TypeVar

__all__ = ["Race", "RaceRules", "choose_fastest"]

C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True)
class RaceRules:
    """Duration and decision rule of a race.

    Args:
        enough_seconds: Total time of counted runs that suffices between `min_runs` and `max_runs`.
        burst: Consecutive runs of a candidate. The first run of a burst does not count, since another candidate has
            left the caches; with bursts of 1 all runs count.
        long_seconds: Duration from which a run counts even as the first of a burst, and ends the burst.
        drop_ratio: Factor over the fastest candidate's shortest run from which a candidate is dropped.
        drop_after_seconds: Least total time of the counted runs of a candidate before it is dropped.
        margin: Least speed-up over the first candidate; less is noise.
        budget_seconds: Total time of all runs; after it, one run of each candidate suffices.
    """

    min_runs: int = 3
    max_runs: int = 20
    enough_seconds: float = 0.05
    burst: int = 4
    long_seconds: float = 0.02
    drop_ratio: float = 1.5
    drop_after_seconds: float = 1.0
    margin: float = 1.0
    budget_seconds: float = inf


@dataclass
class _CandidateRuns:
    margin: float
    run_count: int = 0
    bursts: int = 0
    costs: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def has_enough_runs(self, rules: RaceRules) -> bool:
        if len(self.costs) < rules.min_runs:
            return False
        return len(self.costs) >= rules.max_runs or self.seconds >= rules.enough_seconds


class Race(Generic[C]):
    """Times candidates in turns, until the fastest one is known.

    The very first run of a candidate never counts, since it builds kernels and fills caches. The cost of a candidate is
    its shortest run, since disturbances only lengthen runs; but it replaces the incumbent only if its median is lower,
    too.

    Args:
        candidates: Candidates, at least one; the first wins unless another one beats it by the margin.
    """

    def __init__(self, candidates: Iterable[C], rules: RaceRules | None = None) -> None:
        self._rules = RaceRules() if rules is None else rules
        self._remaining = list(candidates)
        if not self._remaining:
            raise ValueError("a race must have at least one candidate")
        self._incumbent = self._remaining[0]
        self._timed = {each: _CandidateRuns(self._rules.margin) for each in self._remaining}
        self._timed[self._incumbent].margin = 1.0
        self._open = list(self._remaining)
        self._current = self._open[0]
        self._burst_runs = 0
        self._spent = 0.0
        self._begin_burst()

    @property
    def winner(self) -> C | None:
        """The fastest candidate; None while the race is open."""
        return None if self._open else self.leader

    @property
    def leader(self) -> C:
        """The fastest candidate so far; the first one before any was timed."""
        timed = [each for each, runs in self._timed.items() if runs.costs]
        if not timed:
            return self._remaining[0]
        best = min(timed, key=lambda each: min(self._timed[each].costs) * self._timed[each].margin)
        incumbent_costs = self._timed[self._incumbent].costs
        return (
            best
            if not incumbent_costs or median(self._timed[best].costs) < median(incumbent_costs)
            else self._incumbent
        )

    @property
    def seconds(self) -> dict[C, float]:
        """Seconds per unit of work of the shortest counted run, by timed candidate."""
        return {each: min(runs.costs) for each, runs in self._timed.items() if runs.costs}

    @property
    def next(self) -> C:
        """The next candidate to run; the winner once there is one."""
        return self._current if self._open else self.leader

    def note(self, seconds: float, work: float = 1.0) -> None:
        """Record a run of the `next` candidate; no effect after the race is over.

        Args:
            work: Work of the run, in one unit for all candidates.
        """
        if not self._open:
            return
        runs, is_long = self._timed[self._current], seconds >= self._rules.long_seconds
        if runs.run_count:
            self._spent += seconds
            if is_long or self._burst_runs or self._rules.burst == 1:
                runs.costs.append(seconds / work)
                runs.seconds += seconds
        runs.run_count += 1
        self._burst_runs += 1
        self._close_finished()
        if is_long or self._burst_runs >= self._rules.burst or self._current not in self._open:
            self._begin_burst()

    def add(self, candidate: C, margin: float | None = None) -> None:
        """Add a candidate that races against the leader, which is timed again: first runs of a process are slower."""
        leader = self._incumbent = self.leader
        self._timed[leader] = _CandidateRuns(self._timed[leader].margin)
        self._timed[candidate] = _CandidateRuns(self._rules.margin if margin is None else margin)
        self._remaining = [leader, candidate]
        self._open = list(self._remaining)
        self._begin_burst()

    def drop(self, candidate: C) -> None:
        """Remove a candidate that cannot run."""
        self._timed[candidate].costs.clear()
        self._remaining.remove(candidate)
        self._open = [each for each in self._open if each != candidate]
        self._close_finished()
        self._begin_burst()

    def stop(self) -> None:
        """End the race: the leader wins."""
        self._open.clear()

    def _close_finished(self) -> None:
        """Drop candidates that are slower by `drop_ratio`, and close candidates with enough runs."""
        rules = self._rules
        fastest = min(self.seconds.values(), default=inf)
        for each in list(self._open):
            runs = self._timed[each]
            if not runs.costs:
                continue
            if min(runs.costs) > rules.drop_ratio * fastest and runs.seconds >= rules.drop_after_seconds:
                self._remaining.remove(each)
                self._open.remove(each)
            elif runs.has_enough_runs(rules) or self._spent > rules.budget_seconds:
                self._open.remove(each)
        if len(self._remaining) == 1 < len(self._timed):
            self._open.clear()

    def _begin_burst(self) -> None:
        """Give the turn to the open candidate with the fewest turns."""
        if not self._open:
            return
        last, self._current = self._current, min(self._open, key=lambda each: self._timed[each].bursts)
        warm = last == self._current and self._timed[last].run_count > 0
        self._timed[self._current].bursts += 1
        self._burst_runs = int(warm)


def choose_fastest(
    candidates: Mapping[C, Callable[[], float]],
    rules: RaceRules | None = None,
    expected_errors: tuple[type[Exception], ...] = (),
) -> Race[C]:
    """Run candidates until the fastest is known.

    Args:
        candidates: Name -> function that runs the candidate once and returns its seconds; the first is the default.
        expected_errors: Exceptions for which a candidate is dropped, unless it is the first.
    """
    race, first = Race(candidates, rules), next(iter(candidates))
    while race.winner is None:
        name = race.next
        try:
            seconds = candidates[name]()
        except expected_errors:
            if name == first:
                raise
            race.drop(name)
        else:
            race.note(seconds)
    return race
