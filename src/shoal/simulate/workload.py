"""The workload of a scenario: its algorithms, and the costs and losses of their trials."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

from shoal.algorithms.base import Algorithm, Problem
from shoal.algorithms.registry import ALGORITHMS
from shoal.backends.virtual import START_SECONDS, Workload
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.job import Job
from shoal.core.space import Space, choice
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState, derive_seed
from shoal.cost.cost import Cost
from shoal.simulate.curves import Curves, PowerLawCurves

__all__ = ["ListedJobs", "SimulatedModel", "SimulatedStudy", "SimulatedWorkload", "TrialSource"]

_EXCESSIVE_MEMORY = 10**18
"""Memory above that of any device, in bytes."""


@dataclass(frozen=True)
class SimulatedModel:
    """A model with a batch size in one study; its trials can share an array.

    Args:
        profiles: Costs by kind of device; it cannot run on other kinds.
        workload: Its row in the table of a slow-down model, or empty.
        alpha: Overhead of sharing a device (Fluid); None: only a share below its demand has a cost.
        start_seconds: Seconds from the start of a job to its first step.
        switch_seconds: Seconds of a suspension and resumption together, spent at the resumption.
    """

    name: str
    profiles: Mapping[str, Profile]
    workload: str = ""
    alpha: float | None = None
    start_seconds: float = START_SECONDS
    switch_seconds: float = START_SECONDS


class TrialSource(ABC):
    """A source of trials: its `name` and the names of its structures are unique in the scenario.

    Trials minimise the last loss of their curves; `arrivals` are the seconds from the start at which some arrive.
    """

    name: str
    structures: Sequence[SimulatedModel]
    arrivals: Sequence[float]
    curves: Curves

    @abstractmethod
    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        """Return a new, bound algorithm; it is not called before the first arrival."""

    def structure(self, trial: Trial) -> SimulatedModel:
        """Return the structure of a trial."""
        return self._structures[trial.config["structure"]]

    @cached_property
    def _structures(self) -> Mapping[str, SimulatedModel]:
        return {each.name: each for each in self.structures}

    def group_name(self, name: str) -> str:
        """Return the name in the scenario of a group that the algorithm proposed as `name`."""
        return name and f"{self.name}: {name}"


@dataclass(frozen=True)
class SimulatedStudy(TrialSource):
    """One study: an algorithm and its search space.

    Args:
        learning_rates: Number of learning rates of each structure; they only multiply the trials.
        arrivals: Start of the study, in seconds.
    """

    name: str
    structures: Sequence[SimulatedModel]
    learning_rates: int
    settings: tuple[str, Mapping[str, Any]]
    arrivals: Sequence[float] = (0.0,)
    curves: Curves = field(default_factory=PowerLawCurves)
    seed: int = 0

    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        """Return the algorithm, bound to structures and learning rates."""
        name, settings = self.settings
        algorithm = ALGORITHMS[name](**settings)
        names = [each.name for each in self.structures]
        space = Space({"structure": choice(names), "learning_rate": choice(range(self.learning_rates))})
        algorithm.bind(space, metric="loss", mode="min", seed=self.seed)
        return algorithm


@dataclass(frozen=True)
class ListedJobs(TrialSource):
    """Jobs without a search, each a trial with a structure of its own.

    Args:
        arrivals: Arrival of each job, in seconds.
        group: Name of the TrialGroup of the jobs, which may be shared with other lists; "" for a group of each job.
    """

    name: str
    structures: Sequence[SimulatedModel]
    arrivals: Sequence[float]
    group: str = ""
    curves: Curves = field(default_factory=PowerLawCurves)
    epochs: int = 1

    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        """Return an algorithm that proposes the jobs at their arrivals."""
        return _FixedTrials(self, clock)

    def group_name(self, name: str) -> str:
        """Return the name as it is: jobs of several lists may be one group."""
        return name


@final
class _FixedTrials(Algorithm):
    """Proposes the jobs of a list that have arrived."""

    def __init__(self, listed: ListedJobs, clock: Callable[[], float]) -> None:
        self._group, self._budget = listed.group, Budget(listed.epochs)
        self._names = [each.name for each in listed.structures]
        self._clock, self._open = clock, len(self._names)
        self._arrivals = deque(sorted(zip(listed.arrivals, range(self._open), strict=True)))

    def begin(self, problem: Problem) -> None: ...

    def next_groups(self, free: int) -> list[TrialGroup]:
        trials: list[Trial] = []
        while self._arrivals and self._arrivals[0][0] <= self._clock():
            number = self._arrivals.popleft()[1]
            trials.append(Trial(number, {"structure": self._names[number]}, derive_seed("listed", number), 0))
        groups = [tuple(trials)] * bool(trials) if self._group else [(trial,) for trial in trials]
        return [TrialGroup(each, self._budget, self._group) for each in groups]

    def observe(self, report: Report) -> list[Decision]:
        if report.state is TrialState.RUNNING:
            return []
        self._open -= 1
        return [Decision(report.trial, TrialState.COMPLETE)] if report.state is TrialState.PAUSED else []

    @property
    def finished(self) -> bool:
        return self._open == 0


@final
class SimulatedWorkload(Algorithm, Workload):
    """All sources of trials as the algorithm and the workload of one study.

    Trials are numbered in the order of their proposals, over all sources."""

    def __init__(self, sources: Sequence[TrialSource]) -> None:
        self.now = 0.0
        """Seconds; sources that arrive later are not called."""
        self.sources = tuple(sources)
        self._algorithms = [source.algorithm(lambda: self.now) for source in sources]
        self._sources_by_trial: list[
            tuple[int, int]
        ] = []  # number of a trial -> index of its source, and its number there
        self._numbers: dict[tuple[int, int], int] = {}
        self._begin = [min(source.arrivals) for source in sources]
        self.keys = {FusionKey(each.name, "", 1): each for source in sources for each in source.structures}
        """The structures of all trials by fusion key."""
        self._keys = {key.structure: key for key in self.keys}

    def begin(self, problem: Problem) -> None:
        """Do nothing: the algorithms are bound already."""

    def next_groups(self, free: int) -> list[TrialGroup]:
        """Return the groups of the algorithms that have arrived."""
        groups: list[TrialGroup] = []
        for index, (source, algorithm) in enumerate(zip(self.sources, self._algorithms, strict=True)):
            if self._begin[index] <= self.now:
                for group in algorithm.next_groups(free):
                    trials = tuple([self._renumbered(trial, index) for trial in group.trials])
                    groups.append(replace(group, trials=trials, name=source.group_name(group.name)))
        return groups

    def observe(self, report: Report) -> list[Decision]:
        """Return the decisions of the algorithm of the trial."""
        index, number = self._sources_by_trial[report.trial]
        decisions = self._algorithms[index].observe(replace(report, trial=number))
        return [replace(each, trial=self._numbers[index, each.trial]) for each in decisions]

    @property
    def finished(self) -> bool:
        """Whether all algorithms are finished."""
        return all(algorithm.finished for algorithm in self._algorithms)

    def source(self, trial: int) -> TrialSource:
        """Return the source of a trial of the study."""
        return self.sources[self._sources_by_trial[trial][0]]

    def label(self, trial: int) -> str:
        """Return the label of a trial: its source and its number there."""
        index, number = self._sources_by_trial[trial]
        return f"{self.sources[index].name}/{number}"

    def key(self, trial: Trial) -> FusionKey:
        """Return the key of the structure of a trial."""
        return self._keys[self.source(trial.number).structure(trial).name]

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """Return the cost from the scenario; on a kind without one, more memory than any device has.

        A device more than the scenario has times for saves nothing, which is known as well.
        """
        profiles = self.keys[key].profiles
        profile = profiles.get(kind) or replace(next(iter(profiles.values())), member_memory=_EXCESSIVE_MEMORY)
        most = max(profile.spreading, default=1)
        return replace(profile, spreading={**profile.spreading, most + 1: Cost(profile).time_on(most)})

    def report(self, trial: Trial, epoch: int) -> Report:
        """Return a report with the last loss of the epoch."""
        return Report(trial.number, epoch, {"loss": self.losses(trial, epoch)[-1]})

    def losses(self, trial: Trial, epoch: int) -> Sequence[float]:
        """Return the losses of the epoch on the trial's curve."""
        index, number = self._sources_by_trial[trial.number]
        return self.sources[index].curves.losses(replace(trial, number=number), epoch - 1, epoch)

    def start_seconds(self, job: Job) -> float:
        """Return the maximum over the arrays of the job."""
        models = [self.keys[array.key] for array in job.arrays]
        return max(each.switch_seconds if job.resumes else each.start_seconds for each in models)

    def _renumbered(self, trial: Trial, index: int) -> Trial:
        number = self._numbers.setdefault((index, trial.number), len(self._sources_by_trial))
        if number == len(self._sources_by_trial):
            self._sources_by_trial.append((index, trial.number))
        origin = trial.origin and replace(trial.origin, trial=self._numbers[index, trial.origin.trial])
        return replace(trial, number=number, origin=origin)
