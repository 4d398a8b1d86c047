"""Which of several candidates is the fastest, found by running them in turns.

Everything that Shoal chooses by measurement is chosen here: lowerings of a function, ways to take a training step, ways
for arrays to take turns; and several sizes of an array are timed so. `Race` says which candidate runs next and is told
how long it took, for runs that are real work. `choose_fastest` runs candidates that can be called at any time.
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
    """How long candidates are timed, and what decides.

    Args:
        rounds: runs of each candidate that count, at least.
        most: at most.
        enough_seconds: between these, runs are counted until they have taken so long.
        burst: runs of a candidate in a row. The first one finds caches as another candidate has left them, and does not
            count; with bursts of 1 all count.
        long_seconds: a run of so long counts even as the first of a burst, and ends the burst.
        hopeless: a candidate is dropped whose shortest run is longer than the fastest one's by this factor.
        hopeless_seconds: but not before its runs have taken so long.
        margin: how many times as fast as the first candidate another one has to be: less is noise.
        budget_seconds: of all runs; when they are spent, one run of each candidate has to do.
    """

    rounds: int = 3
    most: int = 20
    enough_seconds: float = 0.05
    burst: int = 4
    long_seconds: float = 0.02
    hopeless: float = 1.5
    hopeless_seconds: float = 1.0
    margin: float = 1.0
    budget_seconds: float = inf


@dataclass
class _Candidate:
    """Runs of a candidate.

    Args:
        margin: by which it has to be faster than the one it is held against.
        begun: runs, also those that do not count.
        turns: bursts.
        costs: seconds per unit of work, of the runs that count.
        seconds: that these took.
    """

    margin: float
    begun: int = 0
    turns: int = 0
    costs: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def is_enough(self, rules: RaceRules) -> bool:
        """Whether it needs no more runs."""
        if len(self.costs) < rules.rounds:
            return False
        return len(self.costs) >= rules.most or self.seconds >= rules.enough_seconds


class Race(Generic[C]):
    """Times candidates in turns, until it is known which is the fastest.

    A candidate's very first run never counts: it makes kernels and fills caches. A candidate costs what its shortest
    run did, since what disturbs a run only makes it longer; but it takes the first one's place only where its median is
    the lower one as well.

    Args:
        candidates: to choose from, at least one; the first wins unless another one beats it by the margin.
        rules: what decides.
    """

    def __init__(self, candidates: Iterable[C], rules: RaceRules | None = None) -> None:
        self._rules = RaceRules() if rules is None else rules
        self._rivals = list(candidates)
        if not self._rivals:
            raise ValueError("a race must have at least one candidate")
        self._incumbent = self._rivals[0]
        self._timed = {each: _Candidate(self._rules.margin) for each in self._rivals}
        self._timed[self._incumbent].margin = 1.0
        self._open = list(self._rivals)
        self._turn = self._open[0]
        self._in_turn = 0
        self._spent = 0.0
        self._begin_turn()

    @property
    def winner(self) -> C | None:
        """The fastest candidate, None while that is open."""
        return None if self._open else self.leader

    @property
    def leader(self) -> C:
        """The fastest candidate so far; the first one while none was timed."""
        timed = [each for each, runs in self._timed.items() if runs.costs]
        if not timed:
            return self._rivals[0]
        best = min(timed, key=lambda each: min(self._timed[each].costs) * self._timed[each].margin)
        held = self._timed[self._incumbent].costs
        return best if not held or median(self._timed[best].costs) < median(held) else self._incumbent

    @property
    def seconds(self) -> dict[C, float]:
        """Seconds of the shortest run that counts, per unit of work, by candidate that was timed."""
        return {each: min(runs.costs) for each, runs in self._timed.items() if runs.costs}

    @property
    def next(self) -> C:
        """The candidate that is to run next; once there is a winner, that one."""
        return self._turn if self._open else self.leader

    def note(self, seconds: float, work: float = 1.0) -> None:
        """Note a run of the `next` candidate; after the race is over, nothing.

        Args:
            seconds: that it took.
            work: that it did, in a unit that is the same for all candidates.
        """
        if not self._open:
            return
        runs, long = self._timed[self._turn], seconds >= self._rules.long_seconds
        if runs.begun:
            self._spent += seconds
            if long or self._in_turn or self._rules.burst == 1:
                runs.costs.append(seconds / work)
                runs.seconds += seconds
        runs.begun += 1
        self._in_turn += 1
        self._close()
        if long or self._in_turn >= self._rules.burst or self._turn not in self._open:
            self._begin_turn()

    def add(self, candidate: C, margin: float | None = None) -> None:
        """Let another candidate run against the leader, which is timed anew: first runs of a process are slower.

        Args:
            candidate: that was not in the race before.
            margin: how many times as fast it has to be; by default as the rules say.
        """
        rival = self._incumbent = self.leader
        self._timed[rival] = _Candidate(self._timed[rival].margin)
        self._timed[candidate] = _Candidate(self._rules.margin if margin is None else margin)
        self._rivals = [rival, candidate]
        self._open = list(self._rivals)
        self._begin_turn()

    def drop(self, candidate: C) -> None:
        """Take a candidate out of the race that cannot run."""
        self._timed[candidate].costs.clear()
        self._rivals.remove(candidate)
        self._open = [each for each in self._open if each != candidate]
        self._close()
        self._begin_turn()

    def stop(self) -> None:
        """End the race: the leader wins."""
        self._open.clear()

    def _close(self) -> None:
        """Drop the hopeless, and time those no more that are known well enough."""
        rules = self._rules
        fastest = min(self.seconds.values(), default=inf)
        for each in list(self._open):
            runs = self._timed[each]
            if not runs.costs:
                continue
            if min(runs.costs) > rules.hopeless * fastest and runs.seconds >= rules.hopeless_seconds:
                self._rivals.remove(each)
                self._open.remove(each)
            elif runs.is_enough(rules) or self._spent > rules.budget_seconds:
                self._open.remove(each)
        if len(self._rivals) == 1 < len(self._timed):
            self._open.clear()

    def _begin_turn(self) -> None:
        """Give the turn to the open candidate with the fewest turns."""
        if not self._open:
            return
        last, self._turn = self._turn, min(self._open, key=lambda each: self._timed[each].turns)
        warm = last == self._turn and self._timed[last].begun > 0
        self._timed[self._turn].turns += 1
        self._in_turn = int(warm)


def choose_fastest(
    candidates: Mapping[C, Callable[[], float]],
    rules: RaceRules | None = None,
    refusals: tuple[type[Exception], ...] = (),
) -> Race[C]:
    """Run candidates until the fastest is known.

    Args:
        candidates: by name what runs each once, and returns the seconds it took; the first one is the default.
        rules: what decides.
        refusals: a candidate that raises one of these is dropped, unless it is the first.

    Returns:
        The race, which is over.
    """
    race, first = Race(candidates, rules), next(iter(candidates))
    while race.winner is None:
        name = race.next
        try:
            seconds = candidates[name]()
        except refusals:
            if name == first:
                raise
            race.drop(name)
        else:
            race.note(seconds)
    return race
