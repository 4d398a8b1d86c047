"""A study of Optuna's that follows one of ours while it runs."""

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.algorithms.sampler import directions
from shoal.core.errors import ShoalError
from shoal.journal.rows import TrialRow
from shoal.journal.view import JournalView
from shoal.reporting.optuna_study import attributes, created, curve, frozen, metrics, opened, state
from shoal.reporting.ranking import values

if TYPE_CHECKING:
    import optuna

__all__ = ["mirror"]

_MARK = "shoal"
"""The attribute by which a mirror knows its study again."""


def mirror(
    directory: Path | str, storage: "str | optuna.storages.BaseStorage", name: str | None = None, interval: float = 1.0
) -> "optuna.Study":
    """Read a study's journal again and again, and write what is new to a study of Optuna's, until nobody runs it.

    The trials there have the same numbers, so those that users have added are left out. What is in the storage is the
    only memory, so that a mirror that was killed is followed by another. There must be one at a time. A trial that has
    failed there stays so, also when it is tried again: Optuna changes no trial that has ended.

    Args:
        directory: of the study.
        storage: as of `opened`.
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
        follower = _Follower(journal, opened(storage), name or directory.resolve().name)
        while True:
            running = journal.writer() is not None  # asked first: what it writes last is then seen by this look
            follower.look()
            if not running:
                return follower.study
            time.sleep(interval)


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
        self.study = created(storage, name, self._goals, load_if_exists=True)
        alike = self.study.directions == directions(self._goals)
        if alike and _MARK not in self.study.user_attrs and not self.study.get_trials(deepcopy=False):
            self.study.set_user_attr("metric", metrics(self._goals))
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
                self.study.add_trial(frozen(row, self._journal.curve(row.number), self._space, self._goals))
            self._seen[row.number] = _standing(row)

    def _update(self, row: TrialRow, there: "optuna.trial.FrozenTrial") -> None:
        """Bring a trial in the storage up to date; its state comes last, for what has ended cannot be changed."""
        from optuna.trial import TrialState as There

        if there.state.is_finished():
            return
        trial, storage = self._storage.get_trial_id_from_study_id_trial_number(self._id, row.number), self._storage
        now = state(row, self._goals)
        if there.state is There.WAITING and now is not There.WAITING:
            storage.set_trial_state_values(trial, There.RUNNING)
        for epoch, value in curve(self._journal.curve(row.number), self._goals).items():
            if epoch not in there.intermediate_values:
                storage.set_trial_intermediate_value(trial, epoch, value)
        for name, value in attributes(row).items():
            if there.user_attrs.get(name) != value:
                storage.set_trial_user_attr(trial, name, value)
        if now.is_finished():
            storage.set_trial_state_values(trial, now, values(row, self._goals))


def _standing(row: TrialRow) -> tuple[Any, ...]:
    """What there is to be written anew of a trial when it changes."""
    return row.state, row.epoch, row.reason
