"""Recovery: restores a state machine and its algorithm from the journal of a study.

Requests of users, proposals of the algorithm and reports of trials are one sequence in the journal. The algorithm is
restored by the same calls in the same order. The rest of the state is read from the rows of trials, requests and the
study, for three reasons:

- The rows are the state, committed with each step. So after a kill at any moment they are complete, and a study of a
  million trials is resumed without all its events.
- Steps cannot be repeated. A plan depends on the clock, the devices and the profiles of other studies, and the journal
  holds none of them.
- Jobs end with their process, and so do their reservations and their measured epochs. Their trials wait again, as after
  any lost job. Suspended jobs are suspended again, and the losses of all turns are known. Where a device is gone or of
  another kind now, the trials of its jobs just wait: nothing was measured for them there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from shoal.algorithms.base import Algorithm
from shoal.core.command import CopyCheckpoint, Step
from shoal.core.errors import JournalError
from shoal.core.event import NOT_TRIAL_FAILURES, Outcome
from shoal.core.job import Purpose
from shoal.core.rows import Extension, JobRow, Proposal, Quantum
from shoal.core.trial import Decision, TrialGroup, TrialState
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.plan.job_history import EarlierJob
from shoal.study.job_events import apply_decisions, completed_without_algorithm, end_at_target, stop_overdue
from shoal.study.jobs import ended_with_engine
from shoal.study.state import StudyState
from shoal.study.trials import TrialRecord

__all__ = ["replay", "restore"]

_KEPT = (Outcome.SUSPENDED, Outcome.ORPHANED, Outcome.STOPPED)
"""Outcomes of jobs that leave their history to a next job of their trials."""


def restore(state: StudyState, journal: JournalView, time: float) -> Step:
    """Restore the state and the algorithm of a study from its journal; return the step to commit and carry out.

    Call this before any step; `time` are seconds since 1970. The jobs of the last engine have ended with it. A job that
    was about to be killed gets the outcome of the kill, so that trials of a job that hung count a failure.
    """
    config, study, trials, step = state.config, state.config.study, state.trials, Step(time)
    statistics = StudyStatistics(journal)
    state.step = step
    decisions = replay(journal, config.algorithm, trials.register_trial_groups)
    rows, seen, checkpoints = journal.trials(), journal.reported_states(), journal.checkpoints()
    jobs = {row.id: row for row in journal.jobs()}
    ended = {name: ended_with_engine(row, time) for name, row in jobs.items() if row.ended is None}
    step.write(*ended.values())
    jobs |= ended
    trials.without_algorithm = {*journal.retried, *(row.number for row in rows if row.trial.is_added)}
    trials.common_failures = set(study.get("common_failure_trials", ()))
    trials.paused = {row.number for row in rows if row.paused_by}
    trials.restore(
        (TrialRecord.of(row, seen.get(row.number, {}), checkpoints.get(row.number, "")) for row in rows),
        {row.id for row in ended.values() if row.outcome not in NOT_TRIAL_FAILURES},
    )
    state.best.restore([value for _, value in journal.best_values()])
    state.requests = {x.request for x in journal.interventions()}
    state.checks.restore(journal.verdicts(), statistics.checked())
    kinds = {row.name: row.kind for row in journal.devices(all_runs=True)}
    present = {device.name for _, device in state.fleet.cluster if kinds.get(device.name) == device.kind}
    waiting = {x.number: x.job for x in trials if x.state is TrialState.PENDING}
    state.tracker.restore(x for x in _earlier_jobs(jobs.values(), journal.quanta(), waiting) if x.device in present)
    own = trials.without_algorithm
    paused = [x.number for x in trials if x.number in own and x.state is TrialState.PAUSED]
    kept = [decision for decision in decisions if decision.trial not in own]
    apply_decisions(state, [*kept, *map(completed_without_algorithm, paused)])
    if any(row.metrics for row in rows):
        state.retries.first_failures.reported()
    numbers = [x.number for x in trials]  # some may have reported while the study was shutting down
    end_at_target(state, numbers)
    stop_overdue(state, numbers)
    step.command(*(CopyCheckpoint(record.trial) for record in trials.waiting()))
    state.retention.restore(statistics.deleted(), statistics.last_deleted())
    state.write_changes()
    return step


def _earlier_jobs(
    jobs: Iterable[JobRow], quanta: Mapping[str, Sequence[Quantum]], waiting: Mapping[int, str]
) -> list[EarlierJob]:
    """The jobs that were suspended or running when their engine ended, oldest first.

    Args:
        quanta: Id of a job -> its turns.
        waiting: Number of each trial that waits -> id of its last job.
    """
    rows = {job.id: job for job in jobs if job.purpose is Purpose.TRAIN}
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
    """Replay the proposals, reports and extensions of a journal on an algorithm in its first state; return all its
    decisions.

    `enlist` is called with all groups, in the order of their proposal. Raises JournalError if the algorithm proposes
    other trials than before.
    """
    decisions: list[Decision] = []
    for event in journal.events():
        if isinstance(event, Extension):
            algorithm.extend(event.trials)
            continue
        if not isinstance(event, Proposal):
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
