"""The trials of a study as a study of Optuna's, for its dashboard and its plots."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algorithms.sampler import directions, quiet
from shoal.core.domain import Choice
from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.space import Space
from shoal.core.trial import Report, TrialState
from shoal.journal.rows import TrialRow
from shoal.journal.schema import FILE_NAME
from shoal.reporting.ranking import values

if TYPE_CHECKING:
    import optuna

__all__ = ["attributes", "created", "curve", "frozen", "metrics", "opened", "optuna_study", "state"]


def optuna_study(
    trials: Iterable[tuple[TrialRow, Iterable[Report]]],
    space: Space,
    objectives: Sequence[Objective],
    name: str,
    storage: "str | optuna.storages.BaseStorage | None" = None,
) -> "optuna.Study":
    """A new study of Optuna's with all trials that have ended, in the order of their numbers; see `frozen`.

    What has not ended is left out.

    Args:
        trials: each with its reports.
        space: that they come from.
        objectives: to be compared by; their metrics are an attribute of the new study.
        name: of the new study.
        storage: as of `opened`; None: in memory.

    Raises:
        ShoalError: the storage cannot be used.
        optuna.exceptions.DuplicatedStudyError: the storage has a study of that name.
    """
    study = created(None if storage is None else opened(storage), name, objectives)
    study.set_user_attr("metric", metrics(objectives))
    for row, reports in trials:
        if row.state.final:
            study.add_trial(frozen(row, reports, space, objectives))
    return study


def opened(storage: "str | optuna.storages.BaseStorage") -> "optuna.storages.BaseStorage":
    """The storage of an address or a path.

    Args:
        storage: an address such as "sqlite:///optuna.db", the path of a file for Optuna's JournalStorage, or one of
            Optuna's storages.

    Raises:
        ShoalError: it cannot be used.
    """
    from optuna.storages import BaseStorage, JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str):
        raise ShoalError(
            "`storage` must be an address such as 'sqlite:///optuna.db', the path of a file as a string, or one of "
            f"Optuna's storages, got {storage!r}"
        )
    with _usable(storage), quiet():
        if "://" in storage:
            _check_address(storage)
            return RDBStorage(storage)
        _check_file(storage)
        return JournalStorage(JournalFileBackend(storage))


def created(
    storage: "optuna.storages.BaseStorage | None",
    name: str,
    objectives: Sequence[Objective],
    *,
    load_if_exists: bool = False,
) -> "optuna.Study":
    """A study of Optuna's, without trials if it is new.

    Raises:
        ShoalError: the storage cannot be used.
        optuna.exceptions.DuplicatedStudyError: it has a study of that name, and that is not to be loaded.
    """
    import optuna

    with _usable(storage), quiet():
        return optuna.create_study(
            study_name=name, storage=storage, directions=directions(objectives), load_if_exists=load_if_exists
        )


@contextmanager
def _usable(storage: object) -> Iterator[None]:
    """Within, a storage that cannot be opened, or is something else, is an error of ours.

    Optuna raises what its database, its parser of a file, or a missing package does.
    """
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
    """Optuna would put its tables beside ours.

    Raises:
        ValueError: it is a study's journal.
    """
    from sqlalchemy.engine import make_url

    if Path(make_url(address).database or "").name == FILE_NAME:
        raise ValueError(f"{FILE_NAME} is the name of the journal of a study of Shoal's")


def _check_file(path: str) -> None:
    """Optuna would go on writing at the end of a file whose only line it cannot read.

    Raises:
        OSError: it cannot be read.
        ValueError: it is there and none of Optuna's.
    """
    if not Path(path).exists():
        return
    with Path(path).open("rb") as file:
        line = file.readline()
    record = json.loads(line) if line else {"op_code": None}
    if not isinstance(record, dict) or "op_code" not in record:
        raise ValueError("the file is none of Optuna's")


def metrics(objectives: Sequence[Objective]) -> str | list[str]:
    """Their names as an attribute of a study."""
    names = [objective.metric for objective in objectives]
    return names if len(names) > 1 else names[0]


def state(row: TrialRow, objectives: Sequence[Objective]) -> "optuna.trial.TrialState":
    """Where a trial stands, in Optuna's words.

    One that was stopped is PRUNED, one that failed, or whose last value is NaN, is FAIL. One that has begun and not
    ended is RUNNING, also while it is paused or waits to go on: Optuna has no other word that it can come back from.
    One that has not begun is WAITING.
    """
    from optuna.trial import TrialState as There

    if row.state.final and values(row, objectives) is None:
        return There.FAIL
    if row.state is TrialState.PENDING and not row.epoch:
        return There.WAITING
    return {TrialState.COMPLETE: There.COMPLETE, TrialState.STOPPED: There.PRUNED}.get(row.state, There.RUNNING)


def curve(reports: Iterable[Report], objectives: Sequence[Objective]) -> dict[int, float]:
    """The metric at the end of each epoch; empty for several metrics, of which Optuna knows no curves."""
    if len(objectives) > 1:
        return {}
    metric = objectives[0].metric
    return {report.epoch: report.metrics[metric] for report in reports if metric in report.metrics}


def attributes(row: TrialRow) -> Mapping[str, Any]:
    """What else there is to say of a trial: user attributes there."""
    return {
        "number": row.number,
        "state": str(row.state),
        "epochs": row.epoch,
        "reason": row.reason,
        "seconds": row.seconds,
    }


def frozen(
    row: TrialRow, reports: Iterable[Report], space: Space, objectives: Sequence[Objective]
) -> "optuna.trial.FrozenTrial":
    """A trial as Optuna has it.

    Its values at the end of each epoch are intermediate values; parameters are called by their paths, and a choice
    whose options are no plain values is the position of one. A trial whose config is none of the space, as its user
    wanted, has no parameters there, but its config as an attribute.

    Args:
        row: the trial.
        reports: of it.
        space: that it comes from.
        objectives: of the study.
    """
    import optuna

    outside = bool(space.faults(row.config))  # a user has added it
    parameters = {} if outside else space.parameters(row.config)
    there = state(row, objectives)
    shown = values(row, objectives) if there.is_finished() else None
    return optuna.trial.create_trial(
        state=there,
        values=None if shown is None else list(shown),
        params={
            path: domain.shown(value) if isinstance(domain, Choice) else value
            for path, (domain, value) in parameters.items()
        },
        distributions={path: domain.to_optuna() for path, (domain, _) in parameters.items()},
        intermediate_values=curve(reports, objectives),
        user_attrs={**attributes(row), **({"config": dict(row.config)} if outside else {})},
    )
