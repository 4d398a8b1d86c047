"""A search as it went: who was on which rung, and what every trial showed after every epoch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import shoal
from packs.tasks import SPACE
from shoal.algorithms.base import Algorithm
from shoal.core.array import Member
from shoal.core.space import Space
from shoal.core.trial import Report, derive_seed

__all__ = ["METRIC", "Rung", "Search", "driven", "hyperband", "replayed"]

METRIC = "valid_loss"
"""What the paper's Hyperband halves by. Accuracies on 1000 pictures are full of ties, which rounding would break."""


@dataclass(frozen=True)
class Rung:
    """The trials that got to a rung of a bracket, and the epochs up to which it trains them."""

    bracket: str
    epochs: int
    trials: frozenset[int]


@dataclass
class Search:
    """How a search went.

    Args:
        rungs: in the order in which they began.
        reports: by (trial, epoch).
    """

    rungs: list[Rung] = field(default_factory=list)
    reports: dict[tuple[int, int], Report] = field(default_factory=dict)

    def value(self, trial: int, epoch: int) -> float:
        return self.reports[trial, epoch].metrics[METRIC]

    def best(self) -> Report:
        """The one of the least loss."""
        finite = [report for report in self.reports.values() if report.metrics[METRIC] < float("inf")]
        return min(finite, key=lambda report: (report.metrics[METRIC], report.trial))


def hyperband(most: int, seed: int) -> Algorithm:
    """Hyperband on the paper's space, as a study of this seed binds it."""
    algorithm = shoal.Hyperband(max_epochs=most, eta=3)
    algorithm.bind(Space(SPACE), metric=METRIC, mode="min", seed=seed, data_seed=derive_seed(seed, "data"))
    return algorithm


def driven(
    algorithm: Algorithm, train: Callable[[Member], Iterable[Report]], over: Callable[[int], object] | None = None
) -> Search:
    """Train what an algorithm asks for, one trial after another.

    Args:
        algorithm: bound to its problem.
        train: a member from where it stands up to its target; gives a report for each epoch.
        over: is told of a trial that will not come again.
    """
    search = Search()
    waiting: deque[Member] = deque()
    done: dict[int, int] = {}
    while not algorithm.finished:
        for group in algorithm.next_groups(1):
            numbers = frozenset(trial.number for trial in group.trials)
            search.rungs.append(Rung(group.name.split(",")[0], group.budget.epochs, numbers))
            waiting += (Member(trial, done.get(trial.number, 0), group.budget.epochs) for trial in group.trials)
        for report in train(waiting.popleft()):
            search.reports[report.trial, report.epoch] = report
            done[report.trial] = report.epoch
            for decision in algorithm.observe(report):
                if over is not None:
                    over(decision.trial)
    return search


def replayed(algorithm: Algorithm, reports: Iterable[Report]) -> Search:
    """The search that led to these reports, which the algorithm is told once more."""
    known = {(report.trial, report.epoch): report for report in reports}

    def train(member: Member) -> Iterator[Report]:
        for epoch in range(member.start + 1, member.target + 1):
            report = known[member.trial.number, epoch]
            yield report
            if report.state.final:
                return

    return driven(algorithm, train)
