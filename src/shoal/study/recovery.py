"""Brings a state machine to where the journal of its study is."""

from shoal.core.command import Step
from shoal.journal.replay import replay
from shoal.journal.writer import Journal
from shoal.study.core import StudyCore
from shoal.study.trials import TrialRecord

__all__ = ["recovered"]


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
    standings = [
        TrialRecord(x.trial, x.target, x.epoch, x.state, x.failures, seen=seen.get(x.number, {})) for x in rows
    ]
    return core.restore(
        standings,
        decisions,
        reported=any(row.metrics for row in rows),
        retried=journal.retried,
        requests=[x.request for x in journal.interventions()],
    )
