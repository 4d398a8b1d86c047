"""Recovery: restores a state machine and its algorithm from the journal of a study.

Requests of users, proposals of the algorithm and reports of trials are one sequence in the journal. The algorithm is
restored by the same calls in the same order. The rest of the state is read from the rows of trials, requests and the
study, for three reasons:

- The rows are the fold of all steps. `commit` applies each record of a step to the rows in one transaction. So after a
  kill at any moment the rows are complete, and a study of a million trials is resumed without all its events. Every
  simulated study checks that the rows agree with the state machine (`tests/support/simulation.py`).
- Steps cannot be repeated. A plan depends on the clock, the devices and the profiles of other studies, and the journal
  holds none of them.
- Jobs end with their process, and so do their reservations and their measured epochs. Their trials wait again, as after
  any lost job. Suspended jobs are suspended again, and the losses of all turns are known. Where a device is gone or of
  another kind now, the trials of its jobs just wait: nothing was measured for them there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.algorithms.base import Algorithm
from shoal.core.command import GroupsProposed, Step
from shoal.core.errors import JournalError
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.core.trial import Decision, TrialGroup, TrialState
from shoal.journal.rows import TrialRow
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.planner.job_history import EarlierJob
from shoal.study.core import StudyCore
from shoal.study.state import CoreConfig
from shoal.study.trials import TrialRecord

__all__ = ["replay", "restore"]

_KEPT = (Outcome.SUSPENDED, Outcome.ORPHANED, Outcome.STOPPED)
"""Outcomes of jobs that leave their history to a next job of their trials."""


def restore(core: StudyCore, journal: Journal) -> Step:
    """Restore a new state machine and its algorithm from the journal; return the step to commit and carry out."""
    journal.requeue_running()
    decisions = replay(journal, core.state.config.algorithm, core.register_groups)
    rows, seen, checkpoints = journal.trials(), journal.reported_states(), journal.checkpoints()
    kinds = {row.name: row.kind for row in journal.devices(all_runs=True)}
    present = {device.name for _, device in core.state.fleet.cluster if kinds.get(device.name) == device.kind}
    earlier = _earlier_jobs(journal, {row.number: row.job for row in rows if row.state is TrialState.PENDING})
    records = [
        TrialRecord(
            x.trial,
            x.target,
            x.epoch,
            x.state,
            x.failures,
            reported_states=seen.get(x.number, {}),
            checkpoint=checkpoints.get(x.number, ""),
        )
        for x in rows
    ]
    return core.restore(
        records,
        decisions,
        reported=any(row.metrics for row in rows),
        retried=journal.retried,
        jobs=[job for job in earlier if job.device in present],
        requests=[x.request for x in journal.interventions()],
        reached=_trial_at_target(core.state.config, rows),
    )


def _trial_at_target(config: CoreConfig, rows: Iterable[TrialRow]) -> int | None:
    """Number of the first trial that has reported the target of the study and has not failed; None if there is none."""
    target, objective = config.spec.target, config.spec.objectives[0]
    if target is None:
        return None
    best = {row.number: row.best.get(objective.metric) for row in rows if row.state is not TrialState.FAILED}
    return next((x for x, value in best.items() if value is not None and objective.reached(target, value)), None)


def _earlier_jobs(journal: JournalView, waiting: Mapping[int, str]) -> list[EarlierJob]:
    """The jobs that were suspended or running when their engine ended, oldest first."""
    rows = {job.id: job for job in journal.jobs() if job.purpose is Purpose.TRAIN}
    quanta = journal.quanta()
    last = max((job.ended or job.started for job in rows.values()), default=0.0)
    found: list[EarlierJob] = []
    for job in rows.values():
        arrays = [frozenset(x for x in trials if waiting.get(x) == job.id) for trials in job.members.values()]
        if job.outcome not in _KEPT or not any(arrays):
            continue
        stretches = [job]
        while (before := rows.get(stretches[-1].resumes)) is not None:
            stretches.append(before)
        turns = {turn.number: turn.losses for x in reversed(stretches) for turn in quanta.get(x.id, ())}
        ends = [(x.started, x.ended or last) for x in stretches]
        found.append(
            EarlierJob(
                job.id,
                job.outcome == Outcome.SUSPENDED,
                tuple(filter(None, arrays)),
                job.device,
                tuple(turns[number] for number in sorted(turns)),
                sum(x.outcome == Outcome.SUSPENDED for x in stretches),
                sum(end - start for start, end in ends),
                last - ends[0][1],
                last - ends[-1][0],
            )
        )
    return sorted(found, key=lambda job: -job.age)


def replay(
    journal: JournalView, algorithm: Algorithm, enlist: Callable[[Sequence[TrialGroup]], object]
) -> list[Decision]:
    """Replay the proposals and reports of a journal on an algorithm in its first state; return all its decisions.

    `enlist` is called with all groups, in the order of their proposal. Raises JournalError if the algorithm proposes
    other trials than before.
    """
    decisions: list[Decision] = []
    for event in journal.events():
        if not isinstance(event, GroupsProposed):
            decisions += algorithm.observe(event)
            continue
        groups = tuple(algorithm.next_groups(event.free))
        if groups != event.groups:
            raise JournalError(
                f"the algorithm of the study in {journal.directory} proposes other trials than before; "
                "resume it with the version of Shoal that began it, and with a deterministic sampler"
            )
        enlist(groups)
    return decisions
