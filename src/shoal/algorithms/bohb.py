"""BOHB: Hyperband whose configurations come from a kernel density of the good ones."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, final

from shoal.algorithms.base import Problem, Totals, check_integer, check_more_trials, check_number
from shoal.algorithms.bracket import Bracket, BracketedAlgorithm, Rung, check_halving, totals_of
from shoal.algorithms.hyperband import deepest_bracket, rungs
from shoal.core.domain import Choice, Domain
from shoal.core.errors import AlgorithmError
from shoal.core.plain import plain_fields
from shoal.core.score import Score, order, score_of
from shoal.core.trial import Config, Trial, derive_seed

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BOHB", "Density", "SyncBOHB"]

_Point = Sequence[float]
"""A configuration, D numbers: a place in [0, 1], or the position of an option; NaN for a missing parameter."""


@dataclass(eq=False)
class SyncBOHB(BracketedAlgorithm):
    """Hyperband's brackets one after the other, their configurations from a model (Falkner, Klein and Hutter 2018).

    The model uses the longest budget at which at least `min_points` + 2 trials were measured: a density l of the best
    of them and a density g of the others. Of `samples` draws from l, spread out by `bandwidth_factor`, the one with the
    greatest l / g is tried. Trials that failed or measured NaN are the worst of the budget they were to reach,
    trials that violate constraints the worst of the others.

    Spaces with parameters within options need nothing more: a configuration adds nothing to the density of a parameter
    it lacks, and a draw from it takes a random value for that parameter.

    Args:
        max_epochs: Longest training of a trial.
        eta: Factor by which each rung has fewer trials, and more epochs.
        min_epochs: Epochs of the shortest first rung.
        brackets: Number of brackets; after the brackets of one round of Hyperband comes another round. None is one
            round.
        random_fraction: Fraction of random trials, whatever the model proposes.
        good_fraction: Fraction of the trials at a budget that count as good, `min_points` at least; q in the paper.
        samples: Candidates for each proposal; N_s in the paper.
        min_points: Fewest trials in either density, which may share some; None is one more than there are parameters.
        bandwidth_factor: Factor by which the bandwidths are widened for the candidates.
        min_bandwidth: Least bandwidth of either density, all values lying between 0 and 1.
        group_by: Parameters by which configurations are ordered, see `Problem.group_by`.

    Raises:
        AlgorithmError: a setting is not a number, or out of range.
    """

    takes_several_metrics = False

    max_epochs: int
    eta: int = 3
    min_epochs: int = 1
    brackets: int | None = None
    random_fraction: float = 1 / 3
    good_fraction: float = 0.15
    samples: int = 64
    min_points: int | None = None
    bandwidth_factor: float = 3.0
    min_bandwidth: float = 1e-3
    group_by: Sequence[str] = ()

    def __post_init__(self) -> None:
        plain_fields(self)
        check_halving(self.min_epochs, self.max_epochs, self.eta)
        if self.max_epochs < self.min_epochs * self.eta:
            raise AlgorithmError(
                f"`max_epochs` must be at least min_epochs · eta, {self.min_epochs * self.eta}, or there is nothing to "
                f"halve; got {self.max_epochs}"
            )
        for name in ("brackets", "min_points"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        check_integer("samples", self.samples)
        for name, least, most in (
            ("random_fraction", 0.0, 1.0),
            ("good_fraction", 0.0, 1.0),
            ("bandwidth_factor", 1e-3, 1e3),
            ("min_bandwidth", 1e-6, 1.0),
        ):
            check_number(name, getattr(self, name), least, most)

    def may_begin(self, training: int) -> bool:
        """Whether the previous bracket has ended."""
        return training == 0

    def brackets_for(self, problem: Problem) -> Iterator[Bracket]:
        """From the bracket with the most trials to the one with the longest, and again."""
        return self._brackets_of(problem, range(self._count))

    def further_brackets(self, trials: int) -> Iterator[Bracket]:
        """As many more as one round of Hyperband has, and again; the model knows all results."""
        known, before = totals_of(self._tables(range(self._count))).trials, self._count
        check_more_trials(self, trials, known)
        while totals_of(self._tables(range(self._count))).trials < trials:
            self.brackets = self._count + self._deepest + 1
        return self._brackets_of(self.problem, range(before, self._count))

    def _brackets_of(self, problem: Problem, indices: range) -> Iterator[Bracket]:
        """Make each bracket when it begins, after those before it."""
        for table in self._tables(indices):
            first = sum(len(bracket.trials) for bracket in self._brackets)
            trials = self._proposed(problem, range(first, first + table[0].trials), self._brackets)
            yield Bracket(f"bracket {len(table) - 1}", table, trials, problem)

    @property
    def modelled_budgets(self) -> Sequence[int]:
        """Epochs of all rungs of a round."""
        return sorted({rung.epochs for table in self._tables(range(self._deepest + 1)) for rung in table})

    @property
    def totals(self) -> Totals | None:
        """Sums over all brackets: the model decides their first configurations, not their sizes."""
        return totals_of(self._tables(range(self._count)))

    @property
    def _deepest(self) -> int:
        """Number of halvings of the bracket with the most trials."""
        return deepest_bracket(self.max_epochs // self.min_epochs, self.eta)

    @property
    def _count(self) -> int:
        """Number of brackets."""
        return self._deepest + 1 if self.brackets is None else self.brackets

    def _tables(self, indices: range) -> Iterator[list[Rung]]:
        """The rungs of brackets, which are counted from 0."""
        for index in indices:
            yield rungs(self.max_epochs, self.eta, self._deepest - index % (self._deepest + 1), self.min_epochs)

    def _proposed(self, problem: Problem, numbers: range, began: Sequence[Bracket]) -> list[Trial]:
        """Trials with configurations from the model; random ones without a model, and for `random_fraction` of the
        trials.
        """
        model = self._model(problem, began)
        configs: dict[int, Config] = {}
        if model is not None:
            for number in range(max(numbers.start, len(problem.initial)), numbers.stop):
                rng = Random(derive_seed(problem.seed, "bohb", number))
                if rng.random() >= self.random_fraction:
                    config = model.proposal(number, self.samples, self.bandwidth_factor, rng)
                    if config is not None:
                        configs[number] = config
        others = [number for number in numbers if number not in configs]
        configs |= zip(others, problem.samples(others), strict=True)
        return [problem.trial(number, configs[number]) for number in numbers]

    def _model(self, problem: Problem, began: Sequence[Bracket]) -> "_Model | None":
        """A model of the longest budget with enough measurements (Falkner et al. 2018, Algorithm 2 and equation 4)."""
        axes = _Axes(problem)
        least = axes.count + 1 if self.min_points is None else self.min_points
        configs = {trial.number: trial.config for bracket in began for trial in bracket.trials}
        measured: dict[int, dict[int, Score]] = {}
        for bracket in began:
            for epochs, results in bracket.results.items():
                measured.setdefault(epochs, {}).update(results)
        for number, earlier in enumerate(problem.earlier, start=1):  # -1, -2 ...: numbers that no trial has
            configs[-number] = earlier.config
            for epochs in earlier.metrics.keys() & set(self.modelled_budgets):
                metrics = earlier.metrics[epochs]
                values = [metrics[goal.metric] for goal in problem.objectives]
                score = score_of(values, metrics, problem.objectives, problem.constraints)
                measured.setdefault(epochs, {})[-number] = score
        known = {epochs: trials for epochs, trials in measured.items() if len(trials) >= least + 2}
        if not known:
            return None
        ranking = [axes.point(configs[number]) for number in order(known[max(known)])]
        good = max(least, int(self.good_fraction * len(ranking)))
        bad = max(least, len(ranking) - good)
        return _Model(
            axes,
            Density(ranking[:good], axes.options, self.min_bandwidth),
            Density(ranking[-bad:], axes.options, self.min_bandwidth),
        )


@final
@dataclass(eq=False)
class BOHB(SyncBOHB):
    """`SyncBOHB` whose next bracket begins as soon as fewer than `concurrency` trials are to be trained.

    So no device waits for the last trials of a bracket. A rung still waits for all its trials, and the model uses the
    trials measured when a bracket begins. Falkner et al. 2018, section 3.4, ask the model anew for each trial of a
    bracket, as workers become free; here a bracket begins whole, so that its trials can be fused.

    Args:
        concurrency: Number of trials to be trained below which the next bracket begins; about as many as the devices
            train at a time. All other settings are those of `SyncBOHB`.

    Raises:
        AlgorithmError: a setting is not a number, or out of range.
    """

    concurrency: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("concurrency", self.concurrency)

    def may_begin(self, training: int) -> bool:
        """Whether fewer than `concurrency` trials are to be trained."""
        return training < self.concurrency


class _Axes:
    """The parameters of a space with more than one value, as dimensions of a density."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.space = problem.space
        domains = [
            (path, domain)
            for path, (domain, _) in self.space.domains().items()
            if domain.value_at(0) != domain.value_at(1)
        ]
        self.dimension = {path: index for index, (path, _) in enumerate(domains)}
        self.options = [len(domain.options) if isinstance(domain, Choice) else 0 for _, domain in domains]

    @property
    def count(self) -> int:
        """Number of dimensions; d in the paper."""
        return len(self.options)

    def point(self, config: Config) -> list[float]:
        point = [math.nan] * self.count
        for path, (domain, value) in self.space.parameters(config).items():
            if path in self.dimension:
                point[self.dimension[path]] = value if isinstance(domain, Choice) else domain.quantile_of(value)
        return point


@final
class Density:
    """The mean of one product kernel around each point (Falkner et al. 2018, section 3.2).

    In a continuous dimension the kernel is a normal density cut off at 0 and 1; in one of c options it is that of
    Aitchison and Aitken 1976: 1 - h for equal options, h / (c - 1) for different ones. For a point without a parameter,
    the kernel of that parameter is 1, or 1 / c.

    Bandwidths follow the normal reference rule, h = 1.06 sigma n^(-1 / (4 + D)) for n points that have the parameter.
    For options, sigma^2 is half the probability that two draws from the points differ: for two options that is their
    variance as 0 and 1, and it does not depend on the order of the options.

    Args:
        points: N points, at least one.
        options: Number of options in each of the D dimensions, 0 for a continuous one.
    """

    def __init__(self, points: Sequence[_Point], options: Sequence[int], least: float) -> None:
        import numpy as np

        self._points = np.asarray(points, dtype=float).reshape(len(points), len(options))
        self._options = options
        scale = 1.06
        self.bandwidths: list[float] = []
        for column, count in zip(self._points.T, options, strict=True):
            own = column[~np.isnan(column)]
            sigma = (_categorical_sigma(own, count) if count else float(own.std())) if len(own) else 0.0
            bandwidth = max(scale * sigma * max(len(own), 1) ** (-1 / (4 + len(options))), least)
            self.bandwidths.append(min(bandwidth, _uniform_bandwidth(count)) if count else bandwidth)

    def log(self, points: Sequence[_Point]) -> "NDArray[Any]":
        """The logarithm of the density at M points. Shape [M]."""
        import numpy as np

        at = np.asarray(points, dtype=float).reshape(len(points), len(self._options))
        total = np.zeros((len(at), len(self._points)))
        for dimension, (count, width) in enumerate(zip(self._options, self.bandwidths, strict=True)):
            centres, values = self._points[:, dimension], at[:, dimension, None]
            if count:
                differ = math.log(width / (count - 1)) if count > 1 else 0.0
                kernel = np.where(values == centres, math.log1p(-width) if count > 1 else 0.0, differ)
                unknown = -math.log(count)
            else:
                inside = [_normal_cdf((1 - centre) / width) - _normal_cdf(-centre / width) for centre in centres]
                kernel = -0.5 * ((values - centres) / width) ** 2 - np.log(
                    np.sqrt(2 * np.pi) * width * np.array(inside)
                )
                unknown = 0.0
            kernel = np.where(np.isnan(centres), unknown, kernel)
            total += np.where(np.isnan(values), 0.0, kernel)
        greatest = total.max(axis=1)
        result: NDArray[Any] = greatest + np.log(np.exp(total - greatest[:, None]).mean(axis=1))
        return result

    def centre(self, rng: Random) -> list[float]:
        """One of the points."""
        chosen: list[float] = self._points[rng.randrange(len(self._points))].tolist()
        return chosen

    def near(self, centre: _Point, dimension: int, factor: float, rng: Random) -> float:
        """One coordinate of a draw from the kernel around a point, with the bandwidth times a factor."""
        own, count = centre[dimension], self._options[dimension]
        width = factor * self.bandwidths[dimension]
        if math.isnan(own):
            return rng.randrange(count) if count else rng.random()
        if count:
            if rng.random() >= min(width, _uniform_bandwidth(count)):
                return own
            other = rng.randrange(count - 1)
            return other + (other >= own)
        while not 0 <= (value := rng.gauss(own, width)) <= 1:
            pass
        return value


@dataclass(frozen=True)
class _Model:
    """Densities of the good and of the bad configurations."""

    axes: _Axes
    good: Density
    bad: Density

    def proposal(self, number: int, samples: int, factor: float, rng: Random) -> Config | None:
        """The candidate with the greatest ratio of the good density to the bad one; None if the conditions of the space
        refuse all of them.
        """
        drawn = [self._candidate(number, factor, rng) for _ in range(samples)]
        candidates = [config for config in drawn if config is not None]
        if not candidates:
            return None
        points = [self.axes.point(config) for config in candidates]
        ratios = self.good.log(points) - self.bad.log(points)
        return candidates[int(ratios.argmax())]

    def _candidate(self, number: int, factor: float, rng: Random) -> Config | None:
        centre = self.good.centre(rng)

        def pick(path: str, domain: Domain) -> object:
            if path not in self.axes.dimension:
                return domain.value_at(0)
            place = self.good.near(centre, self.axes.dimension[path], factor, rng)
            return int(place) if isinstance(domain, Choice) else domain.value_at(place)

        return self.axes.problem.draw(number, pick)


def _categorical_sigma(positions: "NDArray[Any]", count: int) -> float:
    """Sigma of the positions of options."""
    import numpy as np

    shares = np.bincount(positions.astype(int), minlength=count) / len(positions)
    return math.sqrt((1 - float((shares**2).sum())) / 2)


def _uniform_bandwidth(count: int) -> float:
    """The bandwidth at which all `count` options are equally likely."""
    return (count - 1) / count


def _normal_cdf(z: float) -> float:
    """The cumulative normal distribution."""
    return 0.5 * math.erfc(-z / math.sqrt(2))
