"""Has an algorithm do again what a journal says that it did."""

from collections.abc import Callable, Sequence

from shoal.algorithms.base import Algorithm
from shoal.core.errors import JournalError
from shoal.core.trial import Decision, TrialGroup
from shoal.journal.rows import Proposal
from shoal.journal.view import JournalView

__all__ = ["replay"]


def replay(
    journal: JournalView, algorithm: Algorithm, enlist: Callable[[Sequence[TrialGroup]], object]
) -> list[Decision]:
    """Bring a new algorithm to where the journal is.

    Args:
        journal: of the study.
        algorithm: as it was when the study began.
        enlist: is told of all groups, in the order in which they were proposed.

    Returns:
        What it has decided.

    Raises:
        JournalError: it does not do again what it did.
    """
    decisions: list[Decision] = []
    for event in journal.events():
        if not isinstance(event, Proposal):
            decisions += algorithm.observe(event)
            continue
        groups = tuple(algorithm.next_groups(event.free))
        if groups != event.groups:
            raise JournalError(
                f"the algorithm of the study in {journal.directory} proposes other trials than it did; "
                "go on with the version of shoal that began it, and with a sampler that does the same again"
            )
        enlist(groups)
    return decisions
