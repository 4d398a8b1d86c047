"""Whether two searches let the same trials survive, and by how little where they did not.

A trial that is trained with others rounds differently from one that is trained alone, and wild training enlarges that:
the first step of Adagrad and Adam is the learning rate times the sign of the gradient, so where a gradient is nothing
but rounding a weight goes one way or the other. At a rate of 0.1 Adagrad is 1e-2 apart after one epoch of MLP-3, even
in float64, when the samples of each batch come in another order. So two ways of training can differ in who comes last
among those promoted, and a bracket that has parted once goes other ways from there. What can be asked is this: every
rung up to there has the same trials, and those exchanged differ by no more than other roundings of the reference move
them. How many of its own cuts the reference makes again with another rounding says how much may be expected.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packs.search import Rung, Search

__all__ = ["SLACK", "Comparison", "Parting", "compared", "cut_again"]

SLACK = 2.0
"""Times as far as the other roundings that were tried, one more may move a loss."""


@dataclass(frozen=True)
class Parting:
    """The first cut of a bracket where two searches differ.

    Args:
        bracket: its name.
        epochs: where the cut was made.
        ours: who survived only in ours.
        theirs: who survived only in the reference.
        margin: how much worse than one that ours dropped, one that it kept was, by the reference's losses; relative.
        moved: how far other roundings of the reference move their losses; relative, the largest.
    """

    bracket: str
    epochs: int
    ours: frozenset[int]
    theirs: frozenset[int]
    margin: float
    moved: float

    @property
    def explained(self) -> bool:
        """Whether rounding can be the cause; each of the two losses may have moved."""
        return self.margin <= 2 * SLACK * self.moved

    def __str__(self) -> str:
        word = "as rounding does" if self.explained else "MORE THAN ROUNDING DOES"
        return (
            f"{self.bracket}, epoch {self.epochs}: {sorted(self.ours)} for {sorted(self.theirs)}, apart by "
            f"{self.margin:.1e}; other roundings move them by {self.moved:.1e}: {word}"
        )


@dataclass(frozen=True)
class Comparison:
    """What came of comparing two searches.

    Args:
        rungs: how many there are.
        equal: of how many the trials are the same.
        partings: one for each bracket that has others; its later rungs have them too.
    """

    rungs: int
    equal: int
    partings: tuple[Parting, ...]

    @property
    def exact(self) -> bool:
        return self.equal == self.rungs

    @property
    def explained(self) -> bool:
        return all(parting.explained for parting in self.partings)

    def __str__(self) -> str:
        return f"{self.equal} of {self.rungs} rungs have the same trials" + "".join(f"\n  {p}" for p in self.partings)


def compared(ours: Search, reference: Search, rounded: Sequence[Search]) -> Comparison:
    """Hold a search against the reference.

    Args:
        ours: of the same algorithm, bound to the same problem.
        reference: the trials trained alone.
        rounded: the reference's trials trained alone with other roundings, see `again`.

    Raises:
        ValueError: they do not begin with the same trials.
    """
    pairs = list(_pairs(ours, reference))
    partings = []
    for before, mine, theirs in pairs:
        if mine.trials == theirs.trials or (before is not None and before[0].trials != before[1].trials):
            continue
        if before is None:
            raise ValueError(f"{mine.bracket} begins with other trials; compare searches of one seed and one space")
        partings.append(_parting(before[1], mine, theirs, reference, rounded))
    return Comparison(len(pairs), sum(mine.trials == theirs.trials for _, mine, theirs in pairs), tuple(partings))


def cut_again(reference: Search, rounded: Sequence[Search]) -> tuple[int, int]:
    """How many of the reference's cuts come out the same with other roundings of it, and how many there are."""
    same = count = 0
    for before, rung, _ in _pairs(reference, reference):
        if before is None:
            continue
        for other in rounded:
            values = {number: _value(other, number, before[0].epochs) for number in before[0].trials}
            best = sorted(values, key=lambda number: (values[number], number))[: len(rung.trials)]
            same += rung.trials == frozenset(best)
            count += 1
    return same, count


def _pairs(ours: Search, reference: Search) -> Iterator[tuple[tuple[Rung, Rung] | None, Rung, Rung]]:
    """Each rung in both searches, after the pair of the rung before it in its bracket; a rung not reached is empty."""
    for bracket in dict.fromkeys(rung.bracket for rung in reference.rungs):
        mine, theirs = ({r.epochs: r for r in search.rungs if r.bracket == bracket} for search in (ours, reference))
        before = None
        for epochs in sorted(mine.keys() | theirs.keys()):
            empty = Rung(bracket, epochs, frozenset())
            pair = mine.get(epochs, empty), theirs.get(epochs, empty)
            yield before, *pair
            before = pair


def _parting(cut: Rung, mine: Rung, theirs: Rung, reference: Search, rounded: Sequence[Search]) -> Parting:
    kept, dropped = mine.trials - theirs.trials, theirs.trials - mine.trials
    values = {number: _value(reference, number, cut.epochs) for number in kept | dropped}
    best = min((values[number] for number in dropped), default=-math.inf)
    worst = max((values[number] for number in kept), default=math.inf)
    moved = max(
        _relative(_value(other, number, cut.epochs) - value, value)
        for other in rounded
        for number, value in values.items()
    )
    return Parting(cut.bracket, cut.epochs, kept, dropped, _relative(worst - best, best), moved)


def _value(search: Search, number: int, epoch: int) -> float:
    """A trial's loss; infinite if it failed before, or measured NaN."""
    report = search.reports.get((number, epoch))
    if report is None or report.state.final:
        return math.inf
    value = search.value(number, epoch)
    return math.inf if math.isnan(value) else value


def _relative(difference: float, value: float) -> float:
    """Infinite where one of two values is; 0 where both are."""
    if math.isnan(difference):
        return 0.0
    return abs(difference) / abs(value) if math.isfinite(difference) and value else math.inf
