"""Optuna objectives as opaque trainings, with define-by-run spaces."""

import os
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.trial import TrialState

from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.core.trial import Config
from shoal.programs.trainable import TrainingStopped, end_study, report, report_before_return, report_returned

__all__ = ["optuna_objective"]

_KEY = "shoal"
"""User attribute of an Optuna trial that names its Shoal trial."""


def optuna_objective(objective: Callable[[optuna.Trial], float], study: optuna.Study) -> Callable[..., None]:
    """An opaque training of an Optuna objective, for `shoal.tune` with an empty space and the metric "value".

    Each Shoal trial asks the Optuna study for a trial in its own process, so the sampler, the pruner and the space may
    be any that Optuna has. The parameters are in the storage of the Optuna study (`study.trials`, `study.best_params`);
    Shoal's journal has the values, and empty configurations.

    `trial.report` reports to both, and budgets count its calls. The value that the objective returns is the value of
    the trial in both, in the place of its last report: after the last report of its budget the objective runs to its
    end, and only a further report ends it. Optuna records a trial that would report on, or that an algorithm ends at a
    smaller budget than its largest, as COMPLETE with its last value, and one that Shoal stopped or suspended as PRUNED.
    `trial.study.stop()`, called by the objective or by a sampler whose space is used up, ends Shoal's study after the
    trials in training.

    A killed process continues its Optuna trial, and a promoted, resumed or retried Shoal trial continues in a further
    Optuna trial: both have the parameters of the first one. An objective that saves to `shoal.checkpoint()` and begins
    at `shoal.step()` continues from there; any other begins anew.

    Limits:
        Proposals follow the order in which trials end, and each process draws its own random numbers, so a study cannot
        be repeated from a seed, as with `study.optimize(n_jobs=...)`. Trials of BruteForceSampler and GridSampler train
        one at a time on each device, others as many as it has room for. A process that is killed before its first
        proposal is recorded leaves a RUNNING Optuna trial. Shoal fuses no objectives; for that, write a `Task` and use
        `OptunaSearch`.

    Args:
        objective: Function of an `optuna.Trial` that returns the value of the trial, or raises `optuna.TrialPruned`.
        study: Study in a storage that all processes can open, such as
            `JournalStorage(JournalFileBackend("optuna.log"))` or "sqlite:///optuna.db". Its direction must be `mode`.

    Raises:
        TaskError: An argument is of another type, or the study is in memory or has several directions.
    """
    if not callable(objective) or not isinstance(study, optuna.Study):
        raise TaskError(
            "optuna_objective takes a function of an optuna.Trial and an Optuna study, as by "
            f"optuna.create_study(storage='sqlite:///optuna.db'), got {objective!r} and {study!r}"
        )
    storage = study._storage
    if isinstance(storage, optuna.storages.InMemoryStorage):
        raise TaskError(
            f"the Optuna study {study.study_name!r} is in memory, and each trial runs in a process of its own; create "
            "it with storage='sqlite:///optuna.db'"
        )
    if len(study.directions) > 1:
        raise TaskError(
            f"the Optuna study {study.study_name!r} has {len(study.directions)} directions, and trial.report takes one "
            "value; use shoal.tune(function, space, metric=[...], algorithm=OptunaSearch(...))"
        )
    return _OptunaTraining(objective, study, uuid.uuid4().hex)


@dataclass(frozen=True)
class _OptunaTraining:
    """The function that the process of a trial calls."""

    objective: Callable[[optuna.Trial], float]
    study: optuna.Study
    token: str

    def __post_init__(self) -> None:
        kind, name = type(self.objective), getattr(self.objective, "__qualname__", None)
        module = getattr(self.objective, "__module__", kind.__module__)
        sampler = type(self.study.sampler).__name__
        object.__setattr__(self, "__qualname__", f"{module}.{sampler}.{name or kind.__qualname__}")

    @property
    def alone(self) -> bool:
        """Whether no other trial may train on the same device: the sampler would repeat values of trials in training,
        and stop the study only when they have ended.
        """
        return isinstance(self.study.sampler, (BruteForceSampler, GridSampler))

    def __call__(self, config: Mapping[str, Any]) -> None:
        self.study.sampler.reseed_rng()  # else each process would propose the same
        self.study._thread_local.in_optimize_loop = True  # so that `stop` may be called
        self.study.stop = partial(self._stop, self.study.stop)  # type: ignore[method-assign]
        if self._stopped in self.study._storage.get_study_system_attrs(self.study._study_id):
            end_study(before=True)
            return
        trial = self._trial()
        try:
            value = _number(self.objective(trial))
        except TrainingStopped as stopped:
            if stopped.reached:
                self.study.tell(trial, trial.last[-1])
            else:
                self.study.tell(trial, state=TrialState.PRUNED)
            raise
        except optuna.TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            if not trial.last:
                raise TaskError(
                    f"the objective pruned Optuna's trial {trial.number} before it reported; call trial.report first"
                ) from None
        except Exception:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        else:
            self.study.tell(trial, value)
            (report_returned if trial.last else report)({"value": value})

    @property
    def _stopped(self) -> str:
        """System attribute of the Optuna study that says that a trial has stopped it."""
        return f"{_KEY}/{self.token}/stopped"

    def _stop(self, stop: Callable[[], None]) -> None:
        """Stop both studies."""
        stop()
        self.study._storage.set_study_system_attr(self.study._study_id, self._stopped, True)
        end_study()

    def _study_warnings(self, objectives: Sequence[Objective], longest: int | None, config: Config) -> list[str]:
        """Refuse a `metric`, a `mode` or a space with which the two studies would search for different things."""
        name = self.study.study_name
        if [each.metric for each in objectives] != ["value"]:
            raise TaskError('an Optuna objective reports its values as "value"; pass metric="value"')
        direction, mode = self.study.direction.name.lower(), objectives[0].mode
        if not direction.startswith(mode):
            raise TaskError(
                f"the Optuna study {name!r} is to {direction} its values, and `mode` is {mode!r}; "
                f"pass mode={direction[:3]!r}, or create the Optuna study with direction='{mode}imize'"
            )
        if config:
            raise TaskError(
                f"the space of an Optuna objective is empty, {{}}: its trials ask the Optuna study {name!r} for their "
                f"parameters, and nothing reads {', '.join(map(repr, config))}"
            )
        return []

    def _trial(self) -> "_ReportingTrial":
        """The Optuna trial of this process: the last one of this Shoal trial if it is RUNNING, else a new one, with the
        parameters of the last one if there is one.
        """
        key = f"{self.token}/{os.environ.get('SHOAL_TRIAL', '')}"
        known = [each for each in self.study.get_trials(deepcopy=False) if each.user_attrs.get(_KEY) == key]
        if not known:
            trial = self.study.ask()
            trial.set_user_attr(_KEY, key)
            return _ReportingTrial(self.study, trial._trial_id)
        last = known[-1]
        if last.state is TrialState.RUNNING:
            return _ReportingTrial(self.study, last._trial_id)
        copied = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=last.params,
            distributions=last.distributions,
            user_attrs=last.user_attrs,
            system_attrs=last.system_attrs,
        )
        made = self.study._storage.create_new_trial(self.study._study_id, template_trial=copied)
        return _ReportingTrial(self.study, made)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TaskError(f"the objective must return the value of the trial, a number, got {value!r}") from None


class _ReportingTrial(optuna.Trial):
    """An Optuna trial whose reports go to the Shoal study as well."""

    def __init__(self, study: optuna.Study, trial_id: int) -> None:
        super().__init__(study, trial_id)
        self.last: list[float] = []
        """Values reported in this process."""
        self._budget_used = False

    def report(self, value: float, step: int) -> None:
        if not self._budget_used:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a restarted objective repeats steps, which Optuna ignores
                super().report(value, step)
            self.last.append(float(value))
        self._budget_used = report_before_return({"value": value})
