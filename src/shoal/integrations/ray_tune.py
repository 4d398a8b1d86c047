"""Ray Tune's function trainables as opaque trainings, and its searchers as an algorithm."""

import functools
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algorithms.base import Problem, Totals, check_integer
from shoal.algorithms.concurrent import ConcurrentAlgorithm
from shoal.core.domain import Choice, Domain, LogRandInt, LogUniform, QUniform, RandInt, Uniform
from shoal.core.errors import AlgorithmError, TaskError
from shoal.core.plain import plain_fields
from shoal.core.score import Score
from shoal.core.trial import Config, Decision, Report, TrialState
from shoal.integrations.optional import check_installed, numbers
from shoal.programs.trainable import checkpoint, report

if TYPE_CHECKING:
    from ray.tune.search import Searcher

__all__ = ["RaySearch", "ray_trainable"]

_MOST_ATTEMPTS = 100
"""Most proposals in a row that the conditions of the space may refuse."""

_CHECKPOINT = "ray_checkpoint"
"""Directory below that of the trial, with the contents of the last Ray checkpoint."""


def ray_trainable(function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """An opaque training of a Ray Tune function trainable, which runs without Ray's actors.

    In it `ray.tune.report(metrics, checkpoint=...)` reports the numbers among the metrics to the study and copies the
    checkpoint to the directory of the trial; `ray.tune.get_checkpoint()` returns the last one, or None. Budgets count
    reports. If the trial must stop, `ray.tune.report` ends the function. A returned dict is a report, too.
    The methods of `ray.tune.get_context()` raise `TaskError`. Class trainables, and trainers of `ray.train` in the
    function, are not supported.

    Args:
        function: Function of a config. It is started without `tune.with_resources` and `tune.with_parameters`.

    Raises:
        TaskError: `function` is a class or no function.
        ShoalError: Ray is not installed.
    """
    check_installed("ray", "ray_trainable")
    if isinstance(function, type) or not callable(function):
        raise TaskError(
            f"ray_trainable takes a function of a config, got {function!r}; of a class trainable, call setup and step "
            "in a function that reports"
        )
    return functools.partial(_run_trainable, function)


def _run_trainable(function: Callable[[dict[str, Any]], Any], config: Mapping[str, Any]) -> None:
    """Call a function trainable with the session that Ray's functions look up."""
    from ray.train._internal import session

    before = session._session
    session._session = _ShoalSession()  # type: ignore[assignment]  # Ray's own needs a Tuner
    try:
        returned = function(dict(config))
        if isinstance(returned, Mapping):
            report(numbers(returned))
    finally:
        session._session = before


class _ShoalSession:
    """Stands for Ray's session in the process of a trial: `ray.tune.report` and `ray.tune.get_checkpoint` use it."""

    world_rank = None
    """None in a session of Ray Tune, a number in one of Ray Train."""

    @property
    def loaded_checkpoint(self) -> Any:
        """The last checkpoint of the trial; None if there is none."""
        from ray.tune import Checkpoint

        path = checkpoint() / _CHECKPOINT
        return Checkpoint.from_directory(path) if path.is_dir() else None

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Copy the checkpoint, then report."""
        if checkpoint is not None:
            _keep(checkpoint)
        report(numbers(metrics))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"the function asks Ray's session for {name!r}, which a trial of Shoal does not have; it has "
            "ray.tune.report and ray.tune.get_checkpoint"
        )


def _keep(made: Any) -> None:
    """Replace the checkpoint of the trial by a Ray checkpoint, which may be that one itself."""
    target = checkpoint() / _CHECKPOINT
    with made.as_directory() as source:
        if Path(source).resolve() == target.resolve():
            return
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


@dataclass(eq=False)
class RaySearch(ConcurrentAlgorithm):
    """Trains the proposals of a Ray Tune searcher to the end, and gives the searcher their values.

    The searcher gets each report (`on_trial_result`) and the end of each trial (`on_trial_complete`); a trial that
    fails, or whose last value is NaN, ended with an error to it. All parameters of a space are proposed, and those of
    an option that was not chosen are ignored. Of choices and integers the searcher sees positions: 0, 1, 2, ...

    Args:
        searcher: Function that makes a new searcher of a seed, without a space, a metric and a mode, such as
            `lambda seed: HyperOptSearch(random_state_seed=seed)`. With the same seed and the same values it must repeat
            its proposals, or the study cannot be resumed.
        n: Most trials; a searcher may end the search before.
        epochs: Epochs of each trial.
        concurrency: Most trials in training at a time, whatever devices there are.

    Raises:
        AlgorithmError: A setting is not an integer, or out of range, or `searcher` is not a function.
    """

    searcher: "Callable[[int], Searcher]"
    n: int
    epochs: int
    concurrency: int = 8

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("n", self.n)
        check_integer("epochs", self.epochs)
        check_integer("concurrency", self.concurrency)
        if not callable(self.searcher):
            raise AlgorithmError(
                f"`searcher` must be a function that makes one of a seed, got {self.searcher!r}; write "
                f"lambda seed: {type(self.searcher).__name__}(...)"
            )

    def begin(self, problem: Problem) -> None:
        """Begin with a searcher without values.

        Raises:
            AlgorithmError: The function returns no searcher, or the searcher refuses the space.
        """
        from ray.tune.search import Searcher

        super().begin(problem)
        self._ended = False
        self._worst: float | None = None  # what a proposal counts that the conditions of the space refuse
        self._names: list[str] = []  # id of each trial for the searcher
        self._reported: dict[int, int] = {}
        self._searcher = self.searcher(problem.seed % 2**32)
        if not isinstance(self._searcher, Searcher):
            raise AlgorithmError(f"`searcher` must make a ray.tune.search.Searcher, {self._searcher!r} is none")
        space = {path: _ray_domain(domain) for path, (domain, _) in problem.space.domains().items()}
        if not self._searcher.set_search_properties(problem.metric, problem.mode, space):
            raise AlgorithmError(
                f"{type(self._searcher).__name__} did not take the space, the metric and the mode of the study; make "
                "it without its own"
            )

    @property
    def totals(self) -> Totals | None:
        """Not known: the searcher may end the search."""
        return None

    def next_training(self) -> tuple[int, int] | None:
        """A new trial that the searcher proposes; None if it proposes none now.

        Raises:
            AlgorithmError: It proposes none although no trial is in training, leaves out a parameter, or proposes only
                what the conditions of the space refuse.
        """
        from ray.tune.search import Searcher

        if self._ended or len(self.trials) == self.n:
            return None
        number = len(self.trials)
        for attempt in range(_MOST_ATTEMPTS):
            name = _name(number) if attempt == 0 else f"{_name(number)}_{attempt}"
            proposal: Any = self._searcher.suggest(name)
            if proposal == Searcher.FINISHED:
                self._ended = True
                return None
            if proposal is None:
                if not self.training:
                    raise AlgorithmError(
                        f"{type(self._searcher).__name__} proposes nothing although no trial is in training; let it "
                        "return Searcher.FINISHED to end the search"
                    )
                return None
            config = self._config(number, proposal)
            if config is not None:
                self._names.append(name)
                return self.begin_trial(config), self.epochs
            if self._worst is None:
                self._searcher.on_trial_complete(name, error=True)
            else:
                self._searcher.on_trial_complete(name, self._result(self.epochs, self._worst))
        raise AlgorithmError(
            f"{type(self._searcher).__name__} made {_MOST_ATTEMPTS} proposals that the conditions of the space refuse; "
            "use OptunaSearch, or give domains in which more configurations meet the conditions"
        )

    def observe(self, report: Report) -> list[Decision]:
        """Process a report as the base class does, and give it to the searcher once."""
        self.check_begun(report.trial, len(self.trials))
        number = report.trial
        if report.state is not TrialState.FAILED:
            value = self.problem.value(report)
            if number in self.training and self._reported.get(number, 0) < report.epoch < self.epochs:
                self._reported[number] = report.epoch
                self._searcher.on_trial_result(self._names[number], self._result(report.epoch, value))
        return super().observe(report)

    def reached(self, report: Report, score: Score) -> list[Decision]:
        """Give the searcher the value of a trial."""
        number = report.trial
        if score.is_nan:
            self._searcher.on_trial_complete(self._names[number], error=True)
        else:
            value, loss = self.problem.value(report), self.problem.objectives[0].loss
            if math.isfinite(value) and (self._worst is None or loss(value) > loss(self._worst)):
                self._worst = value
            self._searcher.on_trial_complete(self._names[number], self._result(report.epoch, value))
        return [Decision(number, TrialState.COMPLETE)]

    def failed(self, number: int) -> list[Decision]:
        """Report a failed trial to the searcher."""
        self._searcher.on_trial_complete(self._names[number], error=True)
        return []

    @property
    def finished(self) -> bool:
        """Whether all trials have ended and the searcher proposes no more."""
        self.check_bound()
        return not self.training and (self._ended or len(self.trials) == self.n)

    def _result(self, epoch: int, value: float) -> dict[str, Any]:
        return {self.problem.metric: value, "training_iteration": epoch}

    def _config(self, number: int, proposal: Mapping[str, Any]) -> Config | None:
        def picked(path: str, domain: Domain) -> Any:
            if path not in proposal:
                raise AlgorithmError(
                    f"{type(self._searcher).__name__} proposes {dict(proposal)!r}, without a value of `{path}`"
                )
            value = proposal[path]
            match domain:
                case QUniform():
                    return domain.nearest(float(value))
                case RandInt():
                    return domain.low + domain.step * int(value)
                case Choice() | LogRandInt():
                    return int(value)
                case Uniform() | LogUniform():
                    return float(value)
            return domain.value_at(float(value))

        return self.problem.draw(number, picked)


def _name(number: int) -> str:
    """The id of a trial for the searcher."""
    return f"{number:08d}"


def _ray_domain(domain: Domain) -> Any:
    """A domain as one of Ray Tune: of a choice and of integers with a step, the positions; of one that Ray Tune lacks,
    the quantile.
    """
    from ray import tune

    match domain:
        case Choice():
            return tune.choice(list(range(len(domain.options))))
        case RandInt():
            return tune.randint(0, domain.count())
        case LogRandInt():
            return tune.lograndint(domain.low, domain.high)
        case LogUniform():
            return tune.loguniform(domain.low, domain.high)
        case Uniform() | QUniform():
            return tune.uniform(domain.low, domain.high)
    return tune.uniform(0.0, 1.0)
