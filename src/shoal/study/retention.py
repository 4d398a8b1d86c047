"""Retention: which checkpoints of ended trials a study deletes."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from shoal.core.command import DeleteCheckpoints
from shoal.core.ranking import front, ranked
from shoal.core.rows import Deletion, TrialRow
from shoal.spec import StudySpec
from shoal.study.trials import TrialRecord

if TYPE_CHECKING:
    from shoal.study.state import StudyState

__all__ = ["Retention", "below_rank"]


def below_rank(rows: Sequence[TrialRow], spec: StudySpec, keep: int | str) -> set[int]:
    """Numbers of the trials whose weights a study does not keep, in the order that ranks its trials.

    All trials of a configuration stay or go together. A configuration with a trial that has not ended, or has failed,
    has no rank yet.

    Args:
        rows: Trials that are COMPLETE or STOPPED and have weights.
        keep: Number of configurations that keep their weights; "best": one, or of several metrics the front; "all".
    """
    if keep == "all":
        return set()
    objectives = spec.objectives
    whole = [row for row in spec.configurations(rows) if spec.repetition.is_whole(row)]
    best = ranked(whole, objectives)
    kept = {row.number for row in best[: keep if isinstance(keep, int) else 1]}
    if keep == "best" and len(objectives) > 1:
        kept = front(whole, objectives) or kept
    return {each.number for row in best if row.number not in kept for each in row.members}


class Retention:
    """Deletes checkpoints of ended trials: the state of optimizers always, weights by the rule of the study.

    Files of open and of failed trials stay, and those of an ended one while something may need them: its job, until the
    job has let it go; a trial that begins with its checkpoint and has not reported; the algorithm, if it copies trials;
    and a user, who has pinned it.

    Args:
        keep: As in `below_rank`.
        pins: Numbers of the trials that users have pinned.
    """

    def __init__(self, keep: int | str, pins: Collection[int]) -> None:
        self.keep = keep
        self.pins = set(pins)
        self._known: set[int] = set()  # ended trials
        self._with_state: set[int] = set()  # those with a state of optimizers
        self._with_weights: set[int] = set()
        self._repeated: set[int] = set()  # those whose deletion is to be repeated
        self._due = False
        self._seen = -1  # `TrialTable.changes` at the last look

    def restore(self, deleted: Mapping[int, bool], last: Collection[int]) -> None:
        """Restore what was deleted before.

        Args:
            deleted: Number of each trial of which checkpoints were deleted -> whether its weights were.
            last: Those of the last step with deletions, which a kill may have cut short.
        """
        self._known = set(deleted)
        self._with_weights = {number for number, weights in deleted.items() if not weights}
        self._repeated = set(last)

    def change(self, keep: int | str) -> None:
        """Keep the weights of more or fewer trials from now on; deleted ones do not come back."""
        self.keep, self._due, self._seen = keep, True, -1

    def repeat(self, trial: int) -> None:
        """Repeat the deletion of a trial's checkpoints, which had to wait for a clone that begins with them."""
        self._repeated.add(trial)

    def has_weights(self, trial: int) -> bool:
        """Whether the weights of a trial were not deleted."""
        return trial not in self._known or trial in self._with_weights

    def delete(self, state: "StudyState") -> None:
        """Record what is not needed any more, and command its deletion."""
        self._repeat(state)
        trials = state.trials
        new, trials.ended = trials.ended - self._known, set()
        self._known |= new
        self._with_weights |= new
        if not state.config.spec.opaque:  # a program's files are one
            self._with_state |= new
        if not new and not (self._due and trials.changes != self._seen):
            return
        self._seen = trials.changes
        rows = [] if self.keep == "all" else [trials[number].row for number in sorted(self._with_weights)]
        weights = below_rank(rows, state.config.spec, self.keep)
        needed = {number for number in weights | self._with_state if self._needed(state, trials[number])}
        self._due = bool(needed)
        self._with_weights -= weights - needed
        gone = dict.fromkeys(self._with_state - needed, False) | dict.fromkeys(weights - needed, True)
        self._with_state &= needed
        for number, both in sorted(gone.items()):
            state.step.write(Deletion(number, both, state.step.time))
            state.step.command(DeleteCheckpoints(number, both))

    def _repeat(self, state: "StudyState") -> None:
        repeated, self._repeated = sorted((self._repeated & self._known) - self._with_state), set()
        state.step.command(*(DeleteCheckpoints(number, number not in self._with_weights) for number in repeated))

    def _needed(self, state: "StudyState", record: TrialRecord) -> bool:
        algorithm, number = state.config.algorithm, record.number
        if number in self.pins or state.trials.has_member(record):
            return True
        copies = state.trials.copies.get(number, ())
        if any(x.epoch == x.trial.start and (x.has_failed or not x.state.final) for x in copies):
            return True
        asks = algorithm.copies_trials and not (algorithm.finished or state.lifecycle.ended)
        return asks and not record.trial.is_added and algorithm.may_return(number)
