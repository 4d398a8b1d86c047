"""What is searched in a scenario: the algorithms at work, and what their trials take and measure."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from shoal.algorithms.base import Algorithm, Problem
from shoal.algorithms.registry import ALGORITHMS
from shoal.backends.virtual import START_SECONDS, Workload
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.job import Job
from shoal.core.space import Space, choice
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState, derive_seed
from shoal.simulate.curves import Curves, Decay

__all__ = ["ListedJobs", "SimulatedModel", "SimulatedStudy", "SimulatedWorkload", "TrialSource"]

_TOO_MUCH = 10**18
"""Bytes."""


@dataclass(frozen=True)
class SimulatedModel:
    """A model with a batch size in one study: what its trials agree on, so that they can share an array.

    Args:
        name: unique in the scenario.
        profiles: device kind -> what it costs there; it cannot run on others.
        workload: its row in the tables of a slow-down model, or empty.
        alpha: overhead of sharing a device (Fluid); None: a share costs nothing that is not below what it asks for.
        start_seconds: from when a job is started to its first step.
        switch_seconds: what suspending and resuming one costs together; paid when it is resumed.
    """

    name: str
    profiles: Mapping[str, Profile]
    workload: str = ""
    alpha: float | None = None
    start_seconds: float = START_SECONDS
    switch_seconds: float = START_SECONDS


class TrialSource(ABC):
    """Where trials come from: `name` and those of its structures are unique in the scenario.

    They minimise the last loss of their curves; `arrivals` are seconds from the start at which some of them come.
    """

    name: str
    structures: Sequence[SimulatedModel]
    arrivals: Sequence[float]
    curves: Curves

    @abstractmethod
    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        """At its beginning, bound; it is asked nothing before its first arrival."""

    def structure(self, trial: Trial) -> SimulatedModel:
        """What a trial is an instance of."""
        return self.structures[trial.config["structure"]]


@dataclass(frozen=True)
class SimulatedStudy(TrialSource):
    """One study: an algorithm, and the space that it searches.

    Args:
        name: of the study.
        structures: that the trials are drawn from.
        learning_rates: how many there are to each structure; they cost nothing but trials.
        settings: name and settings of the algorithm.
        arrivals: when it begins.
        curves: what the trials measure.
        seed: of the study.
    """

    name: str
    structures: Sequence[SimulatedModel]
    learning_rates: int
    settings: tuple[str, Mapping[str, Any]]
    arrivals: Sequence[float] = (0.0,)
    curves: Curves = field(default_factory=Decay)
    seed: int = 0

    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        """The algorithm, bound to models and learning rates."""
        name, settings = self.settings
        made = ALGORITHMS[name](**settings)
        structures, rates = range(len(self.structures)), range(self.learning_rates)
        space = Space({"structure": choice(structures), "learning_rate": choice(rates)})
        made.bind(space, metric="loss", mode="min", seed=self.seed)
        return made


@dataclass(frozen=True)
class ListedJobs(TrialSource):
    """Jobs without a search, each a trial with a structure of its own.

    Args:
        name: of all of them.
        structures: of each.
        arrivals: when each comes.
        group: name of the TrialGroup that those are that come together, or "" where each is by itself.
        curves: what they measure.
        epochs: that each is trained; at the end of one it reports.
    """

    name: str
    structures: Sequence[SimulatedModel]
    arrivals: Sequence[float]
    group: str = ""
    curves: Curves = field(default_factory=Decay)
    epochs: int = 1

    def algorithm(self, clock: Callable[[], float]) -> Algorithm:
        """One that asks for what has come."""
        return _FixedTrials(self, clock)


@final
class _FixedTrials(Algorithm):
    """Asks for what of a list has arrived."""

    def __init__(self, listed: ListedJobs, clock: Callable[[], float]) -> None:
        self._group, self._budget = listed.group, Budget(listed.epochs)
        self._clock, self._open = clock, len(listed.structures)
        self._coming = deque(sorted(zip(listed.arrivals, range(self._open), strict=True)))

    def begin(self, problem: Problem) -> None: ...

    def next_groups(self, free: int) -> list[TrialGroup]:
        trials: list[Trial] = []
        while self._coming and self._coming[0][0] <= self._clock():
            number = self._coming.popleft()[1]
            trials.append(Trial(number, {"structure": number}, derive_seed("listed", number), 0))
        together = [tuple(trials)] * bool(trials) if self._group else [(trial,) for trial in trials]
        return [TrialGroup(each, self._budget, self._group) for each in together]

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
    """All that is searched as one study: its algorithm, and what its trials take.

    Its trials have the numbers of the study in the order in which they are asked for, whichever source they come from.

    Args:
        sources: at their beginning.
    """

    def __init__(self, sources: Sequence[TrialSource]) -> None:
        self.now = 0.0
        """Seconds; what arrives later is not asked for."""
        self.sources = tuple(sources)
        """Where its trials come from."""
        self._algorithms = [source.algorithm(lambda: self.now) for source in sources]
        self._known: list[tuple[int, int]] = []  # number of a trial -> the place of its source, and its number there
        self._numbers: dict[tuple[int, int], int] = {}
        self._begin = [min(source.arrivals) for source in sources]
        self._structures = {each.name: each for source in sources for each in source.structures}
        self._keys = {name: FusionKey(name, "", 1) for name in self._structures}

    @property
    def keys(self) -> Mapping[FusionKey, SimulatedModel]:
        """The structures of all trials, by what those of one agree on."""
        return {self._keys[name]: structure for name, structure in self._structures.items()}

    def begin(self, problem: Problem) -> None:
        """Nothing to be got ready."""

    def next_groups(self, free: int) -> list[TrialGroup]:
        """What those want that have come."""
        groups: list[TrialGroup] = []
        for place, (source, algorithm) in enumerate(zip(self.sources, self._algorithms, strict=True)):
            if self._begin[place] <= self.now:
                for group in algorithm.next_groups(free):
                    trials = tuple([self._as_mine(trial, place) for trial in group.trials])
                    groups.append(replace(group, trials=trials, name=group.name and f"{source.name}: {group.name}"))
        return groups

    def observe(self, report: Report) -> list[Decision]:
        """What the one decides whose trial it is."""
        place, number = self._known[report.trial]
        decisions = self._algorithms[place].observe(replace(report, trial=number))
        return [replace(each, trial=self._numbers[place, each.trial]) for each in decisions]

    @property
    def finished(self) -> bool:
        """Whether all are."""
        return all(algorithm.finished for algorithm in self._algorithms)

    def source(self, trial: int) -> TrialSource:
        """Where a trial of the study comes from."""
        return self.sources[self._known[trial][0]]

    def label(self, trial: int) -> str:
        """A trial in words."""
        place, number = self._known[trial]
        return f"{self.sources[place].name}/{number}"

    def key(self, trial: Trial) -> FusionKey:
        """Its structure."""
        return self._keys[self.source(trial.number).structure(trial).name]

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """As the scenario says; on a kind that it does not name, more memory than any device has."""
        profiles = self._structures[key.structure].profiles
        return profiles.get(kind) or replace(next(iter(profiles.values())), member_memory=_TOO_MUCH)

    def report(self, trial: Trial, epoch: int) -> Report:
        """The last loss of the epoch."""
        return Report(trial.number, epoch, {"loss": self.losses(trial, epoch)[-1]})

    def losses(self, trial: Trial, epoch: int) -> Sequence[float]:
        """Those of the epoch on the trial's curve."""
        place, number = self._known[trial.number]
        return self.sources[place].curves.losses(replace(trial, number=number), epoch - 1, epoch)

    def start_seconds(self, job: Job) -> float:
        """Of a job of several arrays, the most that one takes."""
        mine: Iterable[SimulatedModel] = [self._structures[array.key.structure] for array in job.arrays]
        return max(each.switch_seconds if job.resumes else each.start_seconds for each in mine)

    def _as_mine(self, trial: Trial, place: int) -> Trial:
        """A trial of the source at a place, under its number in the study."""
        number = self._numbers.setdefault((place, trial.number), len(self._known))
        if number == len(self._known):
            self._known.append((place, trial.number))
        origin = trial.origin and replace(trial.origin, trial=self._numbers[place, trial.origin.trial])
        return replace(trial, number=number, origin=origin)
