"""Export of a study to Optuna, for Optuna's dashboard and plots."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algorithms.sampler import directions, varying_domains, without_optuna_info
from shoal.core.constraint import Constraint
from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.rows import TrialRow, values
from shoal.core.space import Space
from shoal.core.trial import Config, Report, TrialState
from shoal.journal.schema import FILE_NAME
from shoal.journal.view import JournalView
from shoal.look.budget_values import BudgetValues

if TYPE_CHECKING:
    import optuna

__all__ = ["journal_optuna_study", "optuna_study", "optuna_study_at"]


def journal_optuna_study(
    journal: JournalView, name: str, storage: "str | optuna.storages.BaseStorage | None" = None
) -> "optuna.Study":
    """Return a new Optuna study of a study's configurations, see `optuna_study`."""
    spec, goals = journal.spec, journal.objectives
    directions = spec.of_best.directions(goals, spec.bounds)
    trials = ((row, spec.repetition.curve_of(row, journal.curve, directions)) for row in journal.configurations())
    return optuna_study(trials, journal.space, goals, name, storage, spec.bounds)


def optuna_study(
    trials: Iterable[tuple[TrialRow, Iterable[Report]]],
    space: Space,
    objectives: Sequence[Objective],
    name: str,
    storage: "str | optuna.storages.BaseStorage | None" = None,
    constraints: Sequence[Constraint] = (),
) -> "optuna.Study":
    """Return a new Optuna study with all trials that have ended, in the order of their numbers.

    It is in memory by default. A storage that has the name is a DuplicatedStudyError, an unusable one a ShoalError.
    """
    import optuna

    opened = None if storage is None else _open_storage(storage)
    with _translated_errors(opened), without_optuna_info():
        study = optuna.create_study(study_name=name, storage=opened, directions=directions(objectives))
    names = [objective.metric for objective in objectives]
    study.set_user_attr("metric", names if len(names) > 1 else names[0])
    for row, reports in trials:
        if row.state.final:
            study.add_trial(_frozen_trial(row, reports, space, objectives, constraints))
    return study


def optuna_study_at(found: BudgetValues) -> "optuna.Study":
    """Return an Optuna study in memory of trials at one budget, all COMPLETE.

    Infinite values and parameters with one value, which are of no use in a comparison, are left out.
    """
    import optuna

    with without_optuna_info():
        study = optuna.create_study(directions=directions([found.objective]))
    varying = varying_domains(found.space)
    for number, value in found.values.items():
        if isfinite(value):
            parameters = _parameters(found.space, found.configs[number], varying)
            study.add_trial(optuna.trial.create_trial(value=value, user_attrs={"number": number}, **parameters))
    return study


def _open_storage(storage: "str | optuna.storages.BaseStorage") -> "optuna.storages.BaseStorage":
    from optuna.storages import BaseStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str):
        raise ShoalError(
            "`storage` must be an address such as 'sqlite:///optuna.db', the path of a file as a string, or one of "
            f"Optuna's storages, got {storage!r}"
        )
    with _translated_errors(storage), without_optuna_info():
        if "://" in storage:
            _check_address(storage)
            return RDBStorage(storage)
        _check_file(storage)
        return JournalStorage(JournalFileBackend(storage))


@contextmanager
def _translated_errors(storage: object) -> Iterator[None]:
    """Within this context, errors of an unusable storage, of any library, become a `ShoalError`."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError, OSError, ImportError, ValueError, KeyError, RuntimeError) as error:
        raise ShoalError(
            f"the storage {storage!r} cannot be used ({type(error).__name__}: {error}); give an address such as "
            "sqlite:///optuna.db, or the path of a file"
        ) from error


def _check_address(address: str) -> None:
    """Refuse a study's journal, to which Optuna would add its tables."""
    from sqlalchemy.engine import make_url

    if Path(make_url(address).database or "").name == FILE_NAME:
        raise ValueError(f"{FILE_NAME} is the name of a journal of Shoal")


def _check_file(path: str) -> None:
    """Refuse a file that is not Optuna's: it would append to a file whose only line it cannot read."""
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        line = file.readline()
    record = json.loads(line) if line else {"op_code": None}
    if not isinstance(record, dict) or "op_code" not in record:
        raise ValueError("the file was not written by Optuna")


def _frozen_trial(
    row: TrialRow,
    reports: Iterable[Report],
    space: Space,
    objectives: Sequence[Objective],
    constraints: Sequence[Constraint],
) -> "optuna.trial.FrozenTrial":
    """Return an ended trial as Optuna stores it: a stopped one is PRUNED, one that failed or has no value is FAIL.

    The metric at the end of each epoch is an intermediate value, which Optuna has for one metric only. Parameters are
    named by their paths; a choice whose options are not plain values becomes the position of an option, as does
    a value of an `ordinal` or a `logrange`; of a normal distribution or a domain with computed bounds there is the
    quantile. A trial with a config outside the space, added by a user, has no parameters there, but its config as an
    attribute.
    """
    import optuna

    outside = bool(space.faults(row.config))  # a trial that a user has added
    final_values = values(row, objectives)
    ended = optuna.trial.TrialState.PRUNED if row.state is TrialState.STOPPED else optuna.trial.TrialState.COMPLETE
    metric = objectives[0].metric
    curve = {each.epoch: each.metrics[metric] for each in reports if len(objectives) == 1 and metric in each.metrics}
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.FAIL if final_values is None else ended,
        values=None if final_values is None else list(final_values),
        **({} if outside else _parameters(space, row.config, space.domains())),
        intermediate_values=curve,
        constraints={str(each): each.excess(row.ranked.get(each.metric)) for each in constraints},
        user_attrs={
            "number": row.number,
            "state": str(row.state),
            "epochs": row.epoch,
            "reason": row.reason,
            "seconds": row.seconds,
            **({"config": dict(row.config)} if outside else {}),
        },
    )


def _parameters(space: Space, config: Config, paths: Collection[str]) -> dict[str, Any]:
    """Return some parameters of a config of the space and their distributions, as arguments of `create_trial`."""
    picks = {path: pick for path, pick in space.parameters(config).items() if path in paths}
    return {
        "params": {path: domain.optuna_value(value) for path, (domain, value) in picks.items()},
        "distributions": {path: domain.to_optuna() for path, (domain, _) in picks.items()},
    }
