"""Brings a state machine to where the journal of its study is.

What people asked for, what the algorithm proposed and what trials reported is one sequence in the journal. By that the
algorithm is brought to where it was: it is given the same calls again. The rest of the state is read from the rows of
trials, requests and the study, for three reasons:

- The rows are the fold. `commit` applies each record of a step to them in the transaction that keeps it, so at any kill
  they are what all steps so far have led to, and a study of a million trials is resumed without all its events. That
  they say what the state machine says is looked at in every simulated study (`shoal.testing.simulation`).
- Steps cannot be taken again. A plan depends on the clock, on devices and on profiles that other studies have
  measured since, none of which is in the journal; another plan than the one that was carried out would be of no use.
- Nothing of jobs outlives their process. Which ran, what they were promised and how they slowed each other down ends
  with it; their trials wait again, as after any job that was lost, and the planner begins anew.
"""

from collections.abc import Callable, Sequence

from shoal.algorithms.base import Algorithm
from shoal.core.command import Step
from shoal.core.errors import JournalError
from shoal.core.trial import Decision, TrialGroup
from shoal.journal.rows import Proposal
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.study.core import StudyCore
from shoal.study.trials import TrialRecord

__all__ = ["recovered", "replay"]


def recovered(core: StudyCore, journal: Journal) -> Step:
    """Have a new state machine, and its algorithm, go on where a study is; the algorithm does again what it did.

    Args:
        core: in which nothing has happened.
        journal: of the study.

    Returns:
        What follows.

    Raises:
        JournalError: the algorithm does something else.
    """
    journal.requeue_running()
    decisions = replay(journal, core.state.given.algorithm, core.enlist)
    rows, seen = journal.trials(), journal.reported_states()
    records = [TrialRecord(x.trial, x.target, x.epoch, x.state, x.failures, seen=seen.get(x.number, {})) for x in rows]
    return core.restore(
        records,
        decisions,
        reported=any(row.metrics for row in rows),
        retried=journal.retried,
        requests=[x.request for x in journal.interventions()],
    )


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
