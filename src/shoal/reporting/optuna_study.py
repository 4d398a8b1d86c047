"""Export of a study to Optuna, once or continuously, for Optuna's dashboard and plots."""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algorithms.sampler import directions, without_optuna_info
from shoal.core.domain import Choice
from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.space import Space
from shoal.core.trial import Report, TrialState
from shoal.journal.rows import TrialRow
from shoal.journal.schema import FILE_NAME
from shoal.journal.view import JournalView
from shoal.reporting.ranking import values

if TYPE_CHECKING:
    import optuna

__all__ = ["mirror", "optuna_study"]

_ORIGIN_ATTRIBUTE = "shoal"
"""The attribute by which a mirror recognises its study."""


def optuna_study(
    trials: Iterable[tuple[TrialRow, Iterable[Report]]],
    space: Space,
    objectives: Sequence[Objective],
    name: str,
    storage: "str | optuna.storages.BaseStorage | None" = None,
) -> "optuna.Study":
    """Return a new Optuna study with all trials that have ended, in the order of their numbers.

    Open trials are left out.

    Args:
        trials: Trials, each with its reports.
        space: Search space of the study.
        objectives: Objectives of the study; their metrics become an attribute of the new study.
        name: Name of the new study.
        storage: Storage as for `_open_storage`; None: in memory.

    Raises:
        ShoalError: the storage cannot be used.
        optuna.exceptions.DuplicatedStudyError: the storage has a study of that name.
    """
    study = _create_study(None if storage is None else _open_storage(storage), name, objectives)
    study.set_user_attr("metric", _metrics(objectives))
    for row, reports in trials:
        if row.state.final:
            study.add_trial(_frozen_trial(row, reports, space, objectives))
    return study


def mirror(
    directory: Path | str, storage: "str | optuna.storages.BaseStorage", name: str | None = None, interval: float = 1.0
) -> "optuna.Study":
    """Poll a study's journal, and write changes to an Optuna study, until no process runs the study.

    Trials have the same numbers there, so those added by users are left out. All state of a mirror is in the storage,
    so a new mirror can replace a killed one. There must be one at a time. A failed trial stays failed there, also when
    it is retried: Optuna changes no trial that has ended.

    Args:
        directory: Directory of the study.
        storage: Storage as for `_open_storage`.
        name: Name of the study there; by default the name of the directory.
        interval: Seconds between two polls.

    Raises:
        JournalError: there is no study.
        ShoalError: the storage cannot be used, or has another study of that name.
    """
    directory = Path(directory)
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0 < interval <= threading.TIMEOUT_MAX:
        raise ShoalError(f"`interval` must be a number of seconds above 0, got {interval!r}")
    with JournalView.read(directory) as journal:
        optuna_mirror = _OptunaMirror(journal, _open_storage(storage), name or directory.resolve().name)
        while True:
            running = journal.writer() is not None  # checked first, so that this call sees the last writes
            optuna_mirror.update()
            if not running:
                return optuna_mirror.study
            time.sleep(interval)


def _open_storage(storage: "str | optuna.storages.BaseStorage") -> "optuna.storages.BaseStorage":
    """Return the storage at an address or a path."""
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


def _create_study(
    storage: "optuna.storages.BaseStorage | None",
    name: str,
    objectives: Sequence[Objective],
    *,
    load_if_exists: bool = False,
) -> "optuna.Study":
    """Return an Optuna study, without trials if it is new."""
    import optuna

    with _translated_errors(storage), without_optuna_info():
        return optuna.create_study(
            study_name=name, storage=storage, directions=directions(objectives), load_if_exists=load_if_exists
        )


@contextmanager
def _translated_errors(storage: object) -> Iterator[None]:
    """Within this context, errors of an unusable storage become a `ShoalError`.

    Optuna passes on the errors of its database, its parser of a file, or a missing package.
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


def _metrics(objectives: Sequence[Objective]) -> str | list[str]:
    """Return the names of the metrics as an attribute of an Optuna study."""
    names = [objective.metric for objective in objectives]
    return names if len(names) > 1 else names[0]


def _state(row: TrialRow, objectives: Sequence[Objective]) -> "optuna.trial.TrialState":
    """Return the state of a trial in Optuna.

    A stopped trial is PRUNED; a failed trial, or one whose last value is NaN, is FAIL. A trial that has begun and not
    ended is RUNNING, also while it is paused or pending: no other state of Optuna's can be left again. A trial that has
    not begun is WAITING.
    """
    from optuna.trial import TrialState as OptunaState

    if row.state.final and values(row, objectives) is None:
        return OptunaState.FAIL
    if row.state is TrialState.PENDING and not row.epoch:
        return OptunaState.WAITING
    return {TrialState.COMPLETE: OptunaState.COMPLETE, TrialState.STOPPED: OptunaState.PRUNED}.get(
        row.state, OptunaState.RUNNING
    )


def _intermediate_values(reports: Iterable[Report], objectives: Sequence[Objective]) -> dict[int, float]:
    """Return the metric at the end of each epoch; empty for several metrics, for which Optuna has no intermediate
    values.
    """
    if len(objectives) > 1:
        return {}
    metric = objectives[0].metric
    return {report.epoch: report.metrics[metric] for report in reports if metric in report.metrics}


def _attributes(row: TrialRow) -> Mapping[str, Any]:
    """Return the further facts of a trial, which become user attributes."""
    return {
        "number": row.number,
        "state": str(row.state),
        "epochs": row.epoch,
        "reason": row.reason,
        "seconds": row.seconds,
    }


def _frozen_trial(
    row: TrialRow, reports: Iterable[Report], space: Space, objectives: Sequence[Objective]
) -> "optuna.trial.FrozenTrial":
    """Return a trial as Optuna stores it.

    Its values at the end of each epoch are intermediate values. Parameters are named by their paths; a choice whose
    options are not plain values becomes the position of an option. A trial with a config outside the space, added by a
    user, has no parameters there, but its config as an attribute."""
    import optuna

    outside = bool(space.faults(row.config))  # a trial that a user has added
    parameters = {} if outside else space.parameters(row.config)
    stored = _state(row, objectives)
    final_values = values(row, objectives) if stored.is_finished() else None
    return optuna.trial.create_trial(
        state=stored,
        values=None if final_values is None else list(final_values),
        params={
            path: domain.optuna_value(value) if isinstance(domain, Choice) else value
            for path, (domain, value) in parameters.items()
        },
        distributions={path: domain.to_optuna() for path, (domain, _) in parameters.items()},
        intermediate_values=_intermediate_values(reports, objectives),
        user_attrs={**_attributes(row), **({"config": dict(row.config)} if outside else {})},
    )


class _OptunaMirror:
    """Writes the changes of a study to the storage."""

    def __init__(self, journal: JournalView, storage: "optuna.storages.BaseStorage", name: str) -> None:
        self._journal = journal
        self._objectives = journal.objectives
        self._space = journal.space
        self._storage = storage
        first = journal.runs()[0]
        origin = f"{first.started:.6f} {first.pid}"
        self.study = _create_study(storage, name, self._objectives, load_if_exists=True)
        same_directions = self.study.directions == directions(self._objectives)
        attributes = self.study.user_attrs
        if same_directions and _ORIGIN_ATTRIBUTE not in attributes and not self.study.get_trials(deepcopy=False):
            self.study.set_user_attr("metric", _metrics(self._objectives))
            self.study.set_user_attr(_ORIGIN_ATTRIBUTE, origin)
        elif attributes.get(_ORIGIN_ATTRIBUTE) != origin:
            raise ShoalError(f"the storage holds another study named {name!r}; choose another name for the mirror")
        self._id = storage.get_study_id_from_name(name)
        self._written: dict[int, tuple[Any, ...]] = {}  # number of a trial -> its facts when it was last written

    def update(self) -> None:
        """Write the changes since the last call."""
        rows = (row for row in self._journal.trials() if not row.trial.is_added)
        changed = [row for row in rows if self._written.get(row.number) != _progress_of(row)]
        stored = self.study.get_trials(deepcopy=False) if changed else []
        for row in changed:
            if row.number < len(stored):
                self._update_trial(row, stored[row.number])
            else:
                self.study.add_trial(_frozen_trial(row, self._journal.curve(row.number), self._space, self._objectives))
            self._written[row.number] = _progress_of(row)

    def _update_trial(self, row: TrialRow, stored: "optuna.trial.FrozenTrial") -> None:
        """Update a trial in the storage; its state comes last, since an ended trial cannot be changed."""
        from optuna.trial import TrialState as OptunaState

        if stored.state.is_finished():
            return
        trial, storage = self._storage.get_trial_id_from_study_id_trial_number(self._id, row.number), self._storage
        now = _state(row, self._objectives)
        if stored.state is OptunaState.WAITING and now is not OptunaState.WAITING:
            storage.set_trial_state_values(trial, OptunaState.RUNNING)
        for epoch, value in _intermediate_values(self._journal.curve(row.number), self._objectives).items():
            if epoch not in stored.intermediate_values:
                storage.set_trial_intermediate_value(trial, epoch, value)
        for name, value in _attributes(row).items():
            if stored.user_attrs.get(name) != value:
                storage.set_trial_user_attr(trial, name, value)
        if now.is_finished():
            storage.set_trial_state_values(trial, now, values(row, self._objectives))


def _progress_of(row: TrialRow) -> tuple[Any, ...]:
    """Return the facts of a trial whose change is written."""
    return row.state, row.epoch, row.reason
