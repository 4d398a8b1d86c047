"""An in-memory Optuna study whose trials can change state and values after `Study.tell`."""

import copy
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

import optuna
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

__all__ = ["ProjectedStorage", "ProjectedStudy"]


class ProjectedStorage(InMemoryStorage):
    """Stores each trial as RUNNING with its sampler's attributes; readers get the state set by `show`.

    Optuna itself refuses to change a trial after `Study.tell`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[int, FrozenTrial] = {}  # by number of the trial

    def show(
        self,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None = None,
        excesses: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Set the state, the values and the constraints that readers get for a trial."""
        shown = copy.copy(super().get_trial(trial._trial_id))
        shown.system_attrs = dict(shown.system_attrs)
        for name, excess in excesses.items():
            shown.set_constraint(name, excess)
        shown.state = state
        shown.values = values if values is None else list(values)
        shown.datetime_complete = trial.datetime_start if state.is_finished() else None
        self._shown[trial.number] = shown

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """The trial as set by `show`."""
        kept = super().get_trial(trial_id)
        return self._shown.get(kept.number, kept)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials as set by `show`."""
        kept = super().get_all_trials(study_id, deepcopy=False)
        shown = [self._shown.get(trial.number, trial) for trial in kept]
        seen = [trial for trial in shown if states is None or trial.state in states]
        return copy.deepcopy(seen) if deepcopy else seen

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """The best of the trials that readers get as COMPLETE."""
        complete = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        if not complete:
            raise ValueError("No trials are completed yet.")
        lowest = self.get_study_directions(study_id)[0] is StudyDirection.MINIMIZE
        return (min if lowest else max)(complete, key=lambda trial: trial.value or 0.0)


class ProjectedStudy(optuna.Study):
    """A study whose sampler cannot stop it: the algorithm decides the number of trials."""

    def stop(self) -> None:
        """Do nothing: Optuna's method would raise outside `optimize`."""
