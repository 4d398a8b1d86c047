"""Whether trials train as arrays or in plain PyTorch, and what was proven of it, from a study's journal."""

from shoal.core.rows import Verdict
from shoal.journal.view import JournalView

__all__ = ["trial_verdicts", "verdicts"]


def verdicts(journal: JournalView) -> tuple[Verdict, ...]:
    """Return the verdict of each structure of which several trials were an array or any was refused, these first."""
    found = [each for each in journal.verdicts() if each.members > 1 or each.refusal]
    return tuple(sorted(found, key=lambda each: (not each.refusal, not each.is_slower, each.trials)))


def trial_verdicts(journal: JournalView, trial: int | None = None) -> dict[int, Verdict]:
    """Number of each trial of an array -> its own verdict, or that of its structure if it was not compared itself.

    Args:
        trial: The trial to look up; None: all of them.
    """
    own: dict[int, Verdict] = {}
    for row in journal.checks(trial):
        own[row.trial] = own.get(row.trial, Verdict(row.key)).followed_by(row)
    of_structures = {each.key: each for each in journal.verdicts()}
    return {number: each if each.checks or each.refusal else of_structures[each.key] for number, each in own.items()}
