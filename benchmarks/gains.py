"""What initial points, repeats and earlier studies gain on noisy problems: `python benchmarks/regret.py --gains`.

The problems are those of `surrogates.py` with noise: a number that follows from the seed of a trial is added to all
losses of its curve. Its standard deviation is a part of the spread of good configurations: the standard deviation of
the least losses of the best twentieth. A study returns the configuration that is first by its best epoch
(`rank_by="best"`), of repeats by the mean; regret is that of this configuration's least loss without noise.

- Initial points: the five best configurations of `Random(64)` on another task. The others take turns over the seeds.
- Repeats: with as many epochs in all, so of fewer configurations, and of as many configurations. All studies end by
  themselves; what ASHA trains depends on the results, so its epochs are about as many.
- Earlier studies: `Random(64)` on another task, chosen as above, and on the same task with another seed. Its values are
  given to a model as `tune(warm_start=)` copies them; its own epochs are not counted.

Each is compared with the search that has nothing of it, by the same seeds. With ten seeds this takes six minutes of a
core.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random as Generator
from statistics import fmean, stdev

from paper_searches import Place
from surrogates import BEYOND, EPOCHS, ETA, WORKERS, Difference, Ours, Table, trained

from shoal.algorithms import ASHA, BOHB, Algorithm, OptunaSearch, Random
from shoal.algorithms.repeated import Repeated
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.objective import Objective
from shoal.core.repeats import Repeats
from shoal.core.trial import Config, EarlierTrial, Report, derive_seed

NOISE = (0.25, 1.0)
"""Standard deviations, as parts of the spread of good configurations; the first is that of all but repeats."""

GOOD = 1 / 20
"""Part of a task's configurations that are good."""

BUDGETS = (135, 270)
"""Epochs after which searches with points or earlier studies are compared: of 5 and of 10 whole trainings."""

EARLIER = 64
"""Trials of an earlier study."""

POINTS = 5
REPEATS = (3, 5)
REPEATED: dict[str, Callable[[int], Algorithm]] = {
    "Random": lambda n: Random(n, EPOCHS),
    "ASHA": lambda n: ASHA(n, EPOCHS, ETA, concurrency=WORKERS),
}
CONFIGURATIONS = {"Random": 30, "ASHA": 150}
"""With one repeat; both are divisible by all numbers of repeats."""

RANDOM, MODEL, HALVING = "Random", 'OptunaSearch, "tpe"', 'ASHA, "tpe"'
SEARCHES: dict[str, Callable[[], Algorithm]] = {
    RANDOM: lambda: Random(BUDGETS[-1] // EPOCHS, EPOCHS),
    "ASHA": lambda: ASHA(BEYOND, EPOCHS, ETA, concurrency=WORKERS),
    MODEL: lambda: OptunaSearch(BUDGETS[-1] // EPOCHS, EPOCHS, "tpe", concurrency=WORKERS),
    HALVING: lambda: ASHA(BEYOND, EPOCHS, ETA, concurrency=WORKERS, sampler="tpe"),
    "BOHB": lambda: BOHB(EPOCHS, ETA, brackets=BEYOND, concurrency=WORKERS),
}
OTHER_BEST = "5 best of another task"
OTHER, SAME = "trials of another task", "trials of the same task"
AS_MANY_EPOCHS, AS_MANY_CONFIGURATIONS = "as many epochs", "as many configurations"
WITH_POINTS = (RANDOM, "ASHA", MODEL)
WITH_EARLIER = (MODEL, HALVING, "BOHB")
ONCE = Repeats()
OF_BEST = EpochOrder((Objective("loss", "min"),))


@dataclass(frozen=True)
class Problem:
    """A task with noise of a standard deviation, in units of its loss."""

    table: Table
    deviation: float

    @classmethod
    def of(cls, table: Table, noise: float) -> "Problem":
        """A task with noise relative to the spread of its good configurations."""
        least = sorted(float(table.curve(place)[1:].min()) for place in table.places)
        return cls(table, noise * stdev(least[: round(GOOD * len(least))]))


class NoisyStudy(Ours):
    """A search on a problem, as `tune` does it."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        seed: int,
        *,
        repeats: Repeats = ONCE,
        initial: Sequence[Config] = (),
        earlier: Sequence[EarlierTrial] = (),
    ) -> None:
        of_best = OF_BEST if algorithm.models_best_epochs else LAST_EPOCHS
        searched = algorithm if repeats.size == 1 else Repeated(algorithm, repeats)
        super().__init__(searched, seed, of_best=of_best, initial=initial, earlier=earlier)
        self._problem, self._seed, self._repeats = problem, seed, repeats
        self._exact: dict[int, Place] = {}
        self.losses: dict[int, list[float]] = {}
        """Number of a trial -> its losses, from the first epoch on."""

    def _curve(self, number: int, place: Place) -> Place:
        self._exact[number] = self._problem.table.curve(place)
        noise = Generator(derive_seed(self._seed, "noise", number)).gauss(0, self._problem.deviation)
        return self._exact[number] + noise

    def train(self, budget: int = BEYOND**2) -> Iterator[int]:
        """Train for a number of epochs of all trials, or to the end; yields how many there are after each."""
        for spent, (number, epoch, loss) in enumerate(trained(self, self._curve, WORKERS, budget), start=1):
            self.losses.setdefault(number, []).append(loss)
            if self._algorithm.models_best_epochs:  # the others do nothing before the end of a job
                self._algorithm.observe(Report(number, epoch, {"loss": loss}))
            yield spent

    def finish(self) -> int:
        """Train to the end; the epochs of all trials."""
        return max(self.train())

    def ranking(self) -> list[int]:
        """For each configuration, the best first, the number of its first trial; all its repeats stand at one epoch."""
        ranked = []
        for configuration in {self._repeats.configuration(number) for number in self.losses}:
            numbers = self._repeats.trials(configuration)
            curves = [self.losses.get(number, []) for number in numbers]
            if len({len(curve) for curve in curves}) == 1:
                ranked.append((fmean(min(curve) for curve in curves), numbers[0]))
        return [number for _, number in sorted(ranked)]

    def regret(self) -> float:
        """That of the configuration which the study returns."""
        number = self.ranking()[0]
        return self._problem.table.regret(float(self._exact[number][1 : len(self.losses[number]) + 1].min()))

    def regrets(self) -> list[float]:
        """After each of the budgets; the last one stays where the search ends before."""
        found = [self.regret() for spent in self.train(BUDGETS[-1]) if spent in BUDGETS]
        return found + [self.regret()] * (len(BUDGETS) - len(found))

    def top(self, k: int) -> list[Config]:
        """As `Study.top`."""
        return [self.configs[number] for number in self.ranking()[:k]]

    def earlier_for(self, algorithm: Algorithm) -> list[EarlierTrial]:
        """The trials as `tune(warm_start=)` gives them to an algorithm."""

        def value(losses: list[float], epochs: int) -> float:
            return min(losses[:epochs]) if algorithm.models_best_epochs else losses[epochs - 1]

        budgets = algorithm.modelled_budgets
        return [
            EarlierTrial(self.configs[number], {epochs: {"loss": value(losses, epochs)} for epochs in budgets})
            for number, losses in sorted(self.losses.items())
        ]


@dataclass(frozen=True)
class Row:
    """A search with something given beside the same search without it.

    Args:
        epochs: Of all trials together, on average over the studies.
    """

    part: str
    search: str
    given: str
    epochs: float
    found: Difference

    def __str__(self) -> str:
        return (
            f"{self.part:20} {self.search:19} {self.given:32} {self.epochs:7.0f} {self.found.other:8.4f} "
            f"{self.found.ours:8.4f} {self.found.relative:+10.1%} ± {self.found.error:.1%}"
        )

    def to_json(self) -> dict[str, str | float]:
        return {
            "part": self.part,
            "search": self.search,
            "given": self.given,
            "epochs": round(self.epochs),
            "without": round(self.found.other, 4),
            "with": round(self.found.ours, 4),
            "difference": round(self.found.relative, 4),
            "error": round(self.found.error, 4),
        }


@dataclass(frozen=True)
class Case:
    """A problem and a seed, with earlier studies on another task and on the same one."""

    problem: Problem
    seed: int
    other: NoisyStudy
    same: NoisyStudy


def cases(problems: Sequence[Problem], seeds: range) -> list[Case]:
    found = []
    for number, problem in enumerate(problems):
        for seed in seeds:
            neighbour = (number + 1 + seed % (len(problems) - 1)) % len(problems)
            earlier = [
                NoisyStudy(each, Random(EARLIER, EPOCHS), derive_seed(seed, "earlier"))
                for each in (problems[neighbour], problem)
            ]
            for study in earlier:
                study.finish()
            found.append(Case(problem, seed, *earlier))
    return found


def of_points(name: str, found: list[Case]) -> Iterator[Row]:
    make = SEARCHES[name]
    without = [NoisyStudy(case.problem, make(), case.seed).regrets() for case in found]
    given = [NoisyStudy(case.problem, make(), case.seed, initial=case.other.top(POINTS)).regrets() for case in found]
    yield from at_budgets("initial points", name, OTHER_BEST, given, without)


def of_earlier(name: str, found: list[Case]) -> Iterator[Row]:
    make = SEARCHES[name]
    without = [NoisyStudy(case.problem, make(), case.seed).regrets() for case in found]
    for what, study in ((OTHER, attrgetter("other")), (SAME, attrgetter("same"))):
        given = []
        for case in found:
            algorithm = make()
            earlier = study(case).earlier_for(algorithm)
            given.append(NoisyStudy(case.problem, algorithm, case.seed, earlier=earlier).regrets())
        yield from at_budgets("earlier study", name, what, given, without)


def at_budgets(part: str, name: str, given: str, ours: list[list[float]], without: list[list[float]]) -> Iterator[Row]:
    for epochs, own, other in zip(BUDGETS, zip(*ours, strict=True), zip(*without, strict=True), strict=True):
        yield Row(part, name, given, epochs, Difference.of(own, other))


def of_repeats(name: str, noise: float, problems: Sequence[Problem], seeds: range) -> Iterator[Row]:
    """Repeats on problems with a noise: as many epochs, and as many configurations, as with one repeat."""

    def studies(repeats: int, configurations: int) -> tuple[float, list[float]]:
        epochs, found = [], []
        for problem in problems:
            for seed in seeds:
                study = NoisyStudy(problem, REPEATED[name](configurations), seed, repeats=Repeats(repeats))
                epochs.append(study.finish())
                found.append(study.regret())
        return fmean(epochs), found

    part, most = f"repeats, noise {noise:g}", CONFIGURATIONS[name]
    epochs, without = studies(1, most)
    yield Row(part, name, "1", epochs, Difference.of(without, without))
    for what, divided in ((AS_MANY_EPOCHS, True), (AS_MANY_CONFIGURATIONS, False)):
        for repeats in REPEATS:
            epochs, own = studies(repeats, most // repeats if divided else most)
            yield Row(part, name, f"{repeats}, {what}", epochs, Difference.of(own, without))


def rows(tasks: Sequence[Table], seeds: range) -> Iterator[Row]:
    by_noise = {noise: [Problem.of(table, noise) for table in tasks] for noise in NOISE}
    found = cases(by_noise[NOISE[0]], seeds)
    for name in WITH_POINTS:
        yield from of_points(name, found)
    for noise, problems in by_noise.items():
        for name in REPEATED:
            yield from of_repeats(name, noise, problems, seeds)
    for name in WITH_EARLIER:
        yield from of_earlier(name, found)


def fault(row: Row) -> str:
    """What must hold and does not, or "".

    Earlier studies of the same task, points of another task for `Random`, and repeats of as many configurations must
    not raise regret by more than the standard error.
    """
    must = (
        row.given == SAME or (row.search == RANDOM and row.given == OTHER_BEST) or AS_MANY_CONFIGURATIONS in row.given
    )
    if not must or row.found.relative <= row.found.error:
        return ""
    where = f"{row.part}, {row.search}, {row.given}, {row.epochs:.0f} epochs"
    return f"{where}: regret {row.found.relative:+.1%} ± {row.found.error:.1%}"


def print_gains(tasks: Sequence[Table], seeds: range, *, judged: bool = True) -> int:
    """Print all rows and a JSON object; 1 if something that must hold does not."""
    logging.disable(logging.WARNING)
    print(f"mean over {len(tasks)} tasks and {len(seeds)} seeds; difference as a part of the regret without")
    print(f"{'':20} {'search':19} {'given':32} {'epochs':>7} {'without':>8} {'with':>8} {'difference':>18}")
    found = []
    missed: list[str] = []
    for row in rows(tasks, seeds):
        print(row, flush=True)
        found.append(row.to_json())
        if judged and (reason := fault(row)):
            missed.append(reason)
    print(json.dumps({"gains": found, "seeds": len(seeds), "missed": missed}))
    return 1 if missed else 0
