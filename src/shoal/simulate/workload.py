"""The workload of a scenario: its algorithms, and the costs and losses of their trials, from a formula or recorded."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, final

from shoal.algorithms.base import Algorithm, Problem
from shoal.algorithms.registry import ALGORITHMS
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.errors import ScenarioError
from shoal.core.job import Job
from shoal.core.space import Space, choice
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState, derive_seed
from shoal.plan.cost.cost import Cost
from shoal.run.virtual import START_SECONDS, Workload
from shoal.simulate.reader import reading

__all__ = [
    "CurveSet",
    "Curves",
    "ListedJobs",
    "PowerLawCurves",
    "RecordedCurves",
    "SimulatedModel",
    "SimulatedStudy",
    "SimulatedWorkload",
    "TrialSource",
    "read_task",
]

CURVES_FILE = "taskset_curves_8.npz"
STEPS_PER_EPOCH = 10
"""Number of losses in an epoch; of recorded curves, in the interval between two losses."""


class Curves(ABC):
    """The losses of the trials of a search; `target` is the loss to reach, or None."""

    target: float | None = None

    @abstractmethod
    def losses(self, trial: Trial, begin: int, end: int) -> Sequence[float]:
        """Return `STEPS_PER_EPOCH` losses for each epoch after `begin`, up to and with `end`."""


@final
@dataclass(frozen=True)
class PowerLawCurves(Curves):
    """loss(t) = floor + (start - floor) (1 + t)^-rate, t in epochs; floor and rate are drawn for each trial.

    A power law, as usual for learning curves (Domhan et al. 2015); floors uniform in [0, start/2], rates in [0.2, 1].
    """

    start: float = 2.3

    def losses(self, trial: Trial, begin: int, end: int) -> Sequence[float]:
        """Return the losses of the trial's own curve."""
        rng = Random(derive_seed(trial.seed, "curve"))
        floor, rate = rng.uniform(0, self.start / 2), rng.uniform(0.2, 1.0)
        steps = range(begin * STEPS_PER_EPOCH + 1, end * STEPS_PER_EPOCH + 1)
        return [floor + (self.start - floor) * (1 + step / STEPS_PER_EPOCH) ** -rate for step in steps]


@final
class RecordedCurves(Curves):
    """Recorded curves, one for each trial, with one recorded interval an epoch; after the end the last loss stays.

    Args:
        trials: Number of trials of the search, if `good` is given.
        good: Number of trials that reach the target, in random order (Hermes's bins); None: each draws any curve.
    """

    def __init__(self, task: "CurveSet", seed: int, trials: int | None = None, good: int | None = None) -> None:
        self.target, self._task, self._seed = task.target, task, seed
        self._assignment: list[int] = []
        if good is not None:
            reaching = [index for index, curve in enumerate(task.curves) if min(curve) <= task.target]
            missing_target = [index for index in range(len(task.curves)) if index not in reaching]
            if trials is None or not (good <= len(reaching) and 0 <= trials - good <= len(missing_target)):
                available = f"{len(reaching)} curves reach the target and {len(missing_target)} do not"
                raise ScenarioError(f"`good` is {good}, of {trials or 'an unknown number of'} trials; {available}")
            rng = Random(derive_seed(seed, "bin"))
            self._assignment = [*rng.sample(reaching, good), *rng.sample(missing_target, trials - good)]
            rng.shuffle(self._assignment)

    def losses(self, trial: Trial, begin: int, end: int) -> Sequence[float]:
        """Return the losses of the trial's curve, linear between recorded losses."""
        if self._assignment:
            curve = self._task.curves[self._assignment[trial.number % len(self._assignment)]]
        else:
            curve = Random(derive_seed(self._seed, "curve", trial.number)).choice(self._task.curves)
        last, losses = len(curve) - 1, []
        for step in range(begin * STEPS_PER_EPOCH + 1, end * STEPS_PER_EPOCH + 1):
            interval, part = divmod(min(step, last * STEPS_PER_EPOCH), STEPS_PER_EPOCH)
            losses.append(curve[interval] + (curve[min(interval + 1, last)] - curve[interval]) * part / STEPS_PER_EPOCH)
        return losses


@dataclass(frozen=True)
class CurveSet:
    """The usable training curves of a task, and a target at 90 % of the best reduction of the loss.

    Args:
        curves: Curves of finite losses below 5 that begin below 10.
        target: start - 0.9 (start - best), where start is the median first loss, best the 1st percentile of minima.
    """

    curves: Sequence[Sequence[float]]
    target: float

    @classmethod
    def of(cls, curves: Sequence[Sequence[float]]) -> "CurveSet":
        """Make the set from usable curves."""
        minima = sorted(min(curve) for curve in curves)
        best = minima[round(0.01 * (len(minima) - 1))]
        start = median(curve[0] for curve in curves)
        return cls(curves, start - 0.9 * (start - best))


def read_task(data: Path, number: int) -> CurveSet:
    """Read a task of TaskSet from `taskset_curves_8.npz`."""
    import numpy as np

    path = data / CURVES_FILE
    with reading(path), np.load(path) as file:
        train = file["train"]
    if not 0 <= number < len(train):
        raise ScenarioError(f"{path} has the tasks 0 to {len(train) - 1}, not {number}")
    curves = train[number].astype(float)
    usable = np.isfinite(curves).all(axis=1) & (curves[:, 0] < 10) & (np.nan_to_num(curves, nan=np.inf) < 5).all(axis=1)
    return CurveSet.of(curves[usable].tolist())


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
