"""The trials of a study as a study of Optuna's, for its dashboard and its plots."""

import json
import threading
import time
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
from shoal.journal.view import JournalView
from shoal.reporting.ranking import values

if TYPE_CHECKING:
    import optuna

__all__ = ["mirror", "optuna_study"]

_MARK = "shoal"
"""The attribute by which a mirror knows its study again."""


def optuna_study(
    trials: Iterable[tuple[TrialRow, Iterable[Report]]],
    space: Space,
    objectives: Sequence[Objective],
    name: str,
    storage: "str | optuna.storages.BaseStorage | None" = None,
) -> "optuna.Study":
    """A new study of Optuna's with all trials that have ended, in the order of their numbers; see `_frozen`.

    What has not ended is left out.

    Args:
        trials: each with its reports.
        space: that they come from.
        objectives: to be compared by; their metrics are an attribute of the new study.
        name: of the new study.
        storage: as of `_opened`; None: in memory.

    Raises:
        ShoalError: the storage cannot be used.
        optuna.exceptions.DuplicatedStudyError: the storage has a study of that name.
    """
    study = _created(None if storage is None else _opened(storage), name, objectives)
    study.set_user_attr("metric", _metrics(objectives))
    for row, reports in trials:
        if row.state.final:
            study.add_trial(_frozen(row, reports, space, objectives))
    return study


def mirror(
    directory: Path | str, storage: "str | optuna.storages.BaseStorage", name: str | None = None, interval: float = 1.0
) -> "optuna.Study":
    """Read a study's journal again and again, and write what is new to a study of Optuna's, until nobody runs it.

    The trials there have the same numbers, so those that users have added are left out. What is in the storage is the
    only memory, so that a mirror that was killed is followed by another. There must be one at a time. A trial that has
    failed there stays so, also when it is tried again: Optuna changes no trial that has ended.

    Args:
        directory: of the study.
        storage: as of `_opened`.
        name: of the study there; by default that of the directory.
        interval: seconds between two looks.

    Raises:
        JournalError: there is no study.
        ShoalError: the storage cannot be used, or has another study of that name.
    """
    directory = Path(directory)
    if isinstance(interval, bool) or not isinstance(interval, int | float) or not 0 < interval <= threading.TIMEOUT_MAX:
        raise ShoalError(f"`interval` must be a number of seconds above 0, got {interval!r}")
    with JournalView.read(directory) as journal:
        follower = _Follower(journal, _opened(storage), name or directory.resolve().name)
        while True:
            running = journal.writer() is not None  # asked first: what it writes last is then seen by this look
            follower.look()
            if not running:
                return follower.study
            time.sleep(interval)


def _opened(storage: "str | optuna.storages.BaseStorage") -> "optuna.storages.BaseStorage":
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


def _created(
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


def _metrics(objectives: Sequence[Objective]) -> str | list[str]:
    """Their names as an attribute of a study."""
    names = [objective.metric for objective in objectives]
    return names if len(names) > 1 else names[0]


def _state(row: TrialRow, objectives: Sequence[Objective]) -> "optuna.trial.TrialState":
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


def _curve(reports: Iterable[Report], objectives: Sequence[Objective]) -> dict[int, float]:
    """The metric at the end of each epoch; empty for several metrics, of which Optuna knows no curves."""
    if len(objectives) > 1:
        return {}
    metric = objectives[0].metric
    return {report.epoch: report.metrics[metric] for report in reports if metric in report.metrics}


def _attributes(row: TrialRow) -> Mapping[str, Any]:
    """What else there is to say of a trial: user attributes there."""
    return {
        "number": row.number,
        "state": str(row.state),
        "epochs": row.epoch,
        "reason": row.reason,
        "seconds": row.seconds,
    }


def _frozen(
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
    there = _state(row, objectives)
    shown = values(row, objectives) if there.is_finished() else None
    return optuna.trial.create_trial(
        state=there,
        values=None if shown is None else list(shown),
        params={
            path: domain.shown(value) if isinstance(domain, Choice) else value
            for path, (domain, value) in parameters.items()
        },
        distributions={path: domain.to_optuna() for path, (domain, _) in parameters.items()},
        intermediate_values=_curve(reports, objectives),
        user_attrs={**_attributes(row), **({"config": dict(row.config)} if outside else {})},
    )


class _Follower:
    """Knows what of a study is in the storage.

    Args:
        journal: of the study.
        storage: of Optuna's.
        name: of the study there.

    Raises:
        ShoalError: the storage has another study of that name.
    """

    def __init__(self, journal: JournalView, storage: "optuna.storages.BaseStorage", name: str) -> None:
        self._journal = journal
        self._goals = journal.objectives
        self._space = journal.space
        self._storage = storage
        first = journal.runs()[0]
        mark = f"{first.started:.6f} {first.pid}"
        self.study = _created(storage, name, self._goals, load_if_exists=True)
        alike = self.study.directions == directions(self._goals)
        if alike and _MARK not in self.study.user_attrs and not self.study.get_trials(deepcopy=False):
            self.study.set_user_attr("metric", _metrics(self._goals))
            self.study.set_user_attr(_MARK, mark)
        elif self.study.user_attrs.get(_MARK) != mark:
            raise ShoalError(f"the storage holds another study named {name!r}; choose another name for the mirror")
        self._id = storage.get_study_id_from_name(name)
        self._seen: dict[int, tuple[Any, ...]] = {}  # by number, how it stood when it was written last

    def look(self) -> None:
        """Write what is new."""
        rows = (row for row in self._journal.trials() if not row.trial.is_added)
        news = [row for row in rows if self._seen.get(row.number) != _standing(row)]
        there = self.study.get_trials(deepcopy=False) if news else []
        for row in news:
            if row.number < len(there):
                self._update(row, there[row.number])
            else:
                self.study.add_trial(_frozen(row, self._journal.curve(row.number), self._space, self._goals))
            self._seen[row.number] = _standing(row)

    def _update(self, row: TrialRow, there: "optuna.trial.FrozenTrial") -> None:
        """Bring a trial in the storage up to date; its state comes last, for what has ended cannot be changed."""
        from optuna.trial import TrialState as There

        if there.state.is_finished():
            return
        trial, storage = self._storage.get_trial_id_from_study_id_trial_number(self._id, row.number), self._storage
        now = _state(row, self._goals)
        if there.state is There.WAITING and now is not There.WAITING:
            storage.set_trial_state_values(trial, There.RUNNING)
        for epoch, value in _curve(self._journal.curve(row.number), self._goals).items():
            if epoch not in there.intermediate_values:
                storage.set_trial_intermediate_value(trial, epoch, value)
        for name, value in _attributes(row).items():
            if there.user_attrs.get(name) != value:
                storage.set_trial_user_attr(trial, name, value)
        if now.is_finished():
            storage.set_trial_state_values(trial, now, values(row, self._goals))


def _standing(row: TrialRow) -> tuple[Any, ...]:
    """What there is to be written anew of a trial when it changes."""
    return row.state, row.epoch, row.reason
