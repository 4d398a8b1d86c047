"""A search as a source of jobs: the algorithm proposes, the simulated trials report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from shoal.algorithms.registry import ALGORITHMS
from shoal.backend.simulated import SimulatedJob, Source
from shoal.core.demand import Demand
from shoal.core.space import Space, choice
from shoal.core.trial import Report, Trial, TrialGroup, TrialState
from shoal.simulate.curves import Curves, Decay

__all__ = ["Search", "Structure"]


@dataclass(frozen=True)
class Structure:
    """A model with a batch size, which together decide what a trial takes.

    Args:
        model: name.
        batch_size: samples a step.
        demand: device kind -> what a trial takes there, `seconds` being those of one epoch alone.
        workload: its row in the tables of a slow-down model, or empty.
    """

    model: str
    batch_size: int
    demand: Mapping[str, Demand]
    workload: str = ""


@dataclass(frozen=True)
class Search:
    """One study: an algorithm, and the space that it searches. Every trial is a job of its own.

    Args:
        name: of the study, unique in the scenario.
        structures: that the trials are drawn from.
        learning_rates: how many there are to each structure; they cost nothing but trials.
        algorithm: its name and settings.
        template: what all its jobs have in common; its demand is replaced.
        curves: what the trials measure; they minimise their last loss.
        seed: of the study.
    """

    name: str
    structures: tuple[Structure, ...]
    learning_rates: int
    algorithm: tuple[str, Mapping[str, Any]]
    template: SimulatedJob
    curves: Curves = field(default_factory=Decay)
    seed: int = 0

    def source(self) -> Source:
        """The search at its beginning."""
        return _Run(self)


@final
class _Run(Source):
    """The algorithm at work; bound, asked and told as by the engine."""

    def __init__(self, search: Search) -> None:
        name, settings = search.algorithm
        self._search = search
        self._algorithm = ALGORITHMS[name](**settings)
        space = Space(
            {
                "structure": choice(range(len(search.structures))),
                "learning_rate": choice(range(search.learning_rates)),
            }
        )
        self._algorithm.bind(space, metric="loss", mode="min", seed=search.seed)
        self._epochs: dict[int, int] = {}
        self._demands: dict[tuple[int, int], Mapping[str, Demand]] = {}
        self._under_way: dict[str, tuple[Trial, int, int]] = {}

    def begin(self) -> Sequence[SimulatedJob]:
        return self._asked(self._search.template.arrival)

    def ended(self, job: str, now: float) -> Sequence[SimulatedJob]:
        """Report every epoch of a trial, and ask for what follows.

        A live study hears of an epoch when it ends; the algorithms here decide at the end of budgets only, which is
        when they are told.
        """
        trial, begin, end = self._under_way.pop(job)
        losses = self._search.curves.losses(trial, begin, end)
        steps = len(losses) // (end - begin)
        for epoch in range(begin + 1, end + 1):
            state = TrialState.PAUSED if epoch == end else TrialState.RUNNING
            metrics = {"loss": losses[(epoch - begin) * steps - 1]}
            self._algorithm.observe(Report(trial.number, epoch, metrics, state=state))
        return self._asked(now)

    def _asked(self, now: float) -> list[SimulatedJob]:
        return [self._job(trial, group, now) for group in self._algorithm.next_groups(free=0) for trial in group.trials]

    def _demand(self, structure: int, epochs: int) -> Mapping[str, Demand]:
        """One mapping for all trials that take the same, by which policies know them for alike at once."""
        if (structure, epochs) not in self._demands:
            of_one = self._search.structures[structure].demand
            self._demands[structure, epochs] = {
                kind: replace(demand, seconds=demand.seconds * epochs) for kind, demand in of_one.items()
            }
        return self._demands[structure, epochs]

    def _job(self, trial: Trial, group: TrialGroup, now: float) -> SimulatedJob:
        search = self._search
        begin, end = self._epochs.get(trial.number, 0), group.budget.epochs
        self._epochs[trial.number] = end
        name = f"{search.name}/{trial.number}" + (f"@{end}" if begin else "")
        self._under_way[name] = trial, begin, end
        structure = search.structures[trial.config["structure"]]
        return replace(
            search.template,
            id=name,
            demand=self._demand(trial.config["structure"], end - begin),
            arrival=now,
            group=f"{search.name}: {group.name}",
            curve=search.curves.losses(trial, begin, end),
            target=search.curves.target,
            epoch=begin,
            budget=end,
            workload=structure.workload,
            study=search.name,
        )
