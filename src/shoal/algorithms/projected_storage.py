"""A study of Optuna's that shows its sampler other states and values than were told."""

import copy
from collections.abc import Container, Sequence

import optuna
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

__all__ = ["ProjectedStorage", "ProjectedStudy"]


class ProjectedStorage(InMemoryStorage):
    """Keeps every trial as it was asked for, RUNNING, with its sampler's notes; readers see what `show` says.

    So what a sampler is shown of a trial can change, which Optuna refuses for a trial that was told.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[int, FrozenTrial] = {}  # by number

    def show(self, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None = None) -> None:
        """From now on a trial has this state, and these values."""
        shown = copy.copy(trial)
        shown.state = state
        shown.values = values if values is None else list(values)
        shown.datetime_complete = trial.datetime_start if state.is_finished() else None
        self._shown[trial.number] = shown

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """As it is shown."""
        kept = super().get_trial(trial_id)
        return self._shown.get(kept.number, kept)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """As they are shown."""
        kept = super().get_all_trials(study_id, deepcopy=False)
        shown = [self._shown.get(trial.number, trial) for trial in kept]
        seen = [trial for trial in shown if states is None or trial.state in states]
        return copy.deepcopy(seen) if deepcopy else seen

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Of those that are shown as COMPLETE.

        Raises:
            ValueError: there is none.
        """
        complete = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        if not complete:
            raise ValueError("No trials are completed yet.")
        lowest = self.get_study_directions(study_id)[0] is StudyDirection.MINIMIZE
        return (min if lowest else max)(complete, key=lambda trial: trial.value or 0.0)


class ProjectedStudy(optuna.Study):
    """How many trials there are is for an algorithm to say, also where a sampler has nothing new to propose."""

    def stop(self) -> None:
        """Nothing: Optuna's would raise outside `optimize`."""
