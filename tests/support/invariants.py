"""Invariants of a simulated study after each step of its state machine, and at its end."""

from collections.abc import Collection, Mapping
from typing import Any

from shoal.core.job import Purpose
from shoal.core.trial import FIRST_ADDED, Decision, TrialState
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.run.virtual_job import VirtualJob
from shoal.study.event import Due, Event
from shoal.study.recovery import replay
from shoal.study.retention import below_rank
from shoal.study.state import StudyState
from support.audit import faults_of_teams, overcommitments
from support.random_studies import ORDER_INDEPENDENT, UNLIMITED_RETRIES, RandomStudy

__all__ = ["InvariantViolation", "check_end", "check_step"]


class InvariantViolation(BaseException):
    """An invariant is broken; no code of the study may catch this."""


def check_step(state: StudyState, event: Event, jobs: Mapping[str, VirtualJob], open_jobs: Collection[str]) -> None:
    """Check the invariants after a step.

    Args:
        state: State of the study after the step.
        event: Event of the step.
        jobs: Jobs of the back end, by id.
        open_jobs: Ids of the jobs whose `Ended` the state machine has not received.

    Raises:
        InvariantViolation: an invariant is broken.
    """
    if state.running.keys() != open_jobs:
        job = min(state.running.keys() ^ set(open_jobs))
        raise InvariantViolation(
            f"job {job} has ended, but the state machine keeps its device"
            if job in state.running
            else f"job {job} runs, but the state machine does not know it"
        )
    _check_devices(state, jobs)
    _check_teams(state)
    if state.lifecycle.shutdown is not None:
        return
    most, training = state.config.spec.max_concurrent, [x for x in state.trials if x.state is TrialState.RUNNING]
    if most is not None and len(training) > most:
        raise InvariantViolation(f"{len(training)} trials train, and at most {most} may")
    for record in state.trials:
        if record.state is TrialState.RUNNING:
            holder, _ = state.running.get(record.job, (None, None))
            if holder is None or holder.purpose is not Purpose.TRAIN:
                raise InvariantViolation(f"trial {record.number} is lost: {record.job} does not train it any more")
            if not any(member.trial.number == record.number for member in holder.members):
                raise InvariantViolation(f"trial {record.number} is lost: it is not a member of {record.job}")
        unexplained = record.state is TrialState.PENDING and not record.reason
        if unexplained and (
            event is Due.PLAN or record.number not in state.trials.unexplained
        ):  # the next plan gives the reason
            raise InvariantViolation(f"trial {record.number} waits without a reason")


def _check_devices(state: StudyState, jobs: Mapping[str, VirtualJob]) -> None:
    """No device holds more than its memory, and no node has more cores reserved than it has."""
    used_memory: dict[str, int] = {}
    for job in jobs.values():
        used_memory[job.device.name] = used_memory.get(job.device.name, 0) + job.memory
    reserved_cores: dict[str, float] = {}
    for placed, device in state.running.values():
        began = jobs.get(placed.id)
        known = began is not None and began.job.demand is not None and began.job.demand.cores
        if placed.demand is not None and known:  # other jobs had no demand when they were admitted
            reserved_cores[device.name] = reserved_cores.get(device.name, 0.0) + placed.demand.cores
    for node in state.fleet.found.nodes:
        for device in node.devices:
            if used_memory.get(device.name, 0) > device.memory:
                raise InvariantViolation(
                    f"{device.name} has {device.memory} bytes, and its jobs hold {used_memory[device.name]}"
                )
        cores = sum(reserved_cores.get(device.name, 0.0) for device in node.devices)
        if cores > node.cores * (1 + 1e-9):
            raise InvariantViolation(f"{node.name} has {node.cores:g} cores, and {cores:g} are reserved")


def _check_teams(state: StudyState) -> None:
    """A helper has its device to itself, and assists a running job on another device until it is asked to leave."""
    for job, device in state.running.values():
        if job.purpose is not Purpose.ASSIST:
            continue
        if state.running.on(device.name) > 1:
            raise InvariantViolation(f"{job.id} shares {device.name} with another job")
        if state.lifecycle.shutdown is not None or state.is_leaving(job.id):
            continue
        leader, home = state.running.get(job.assists, (None, None))
        if leader is None or home == device:
            raise InvariantViolation(f"{job.id} on {device.name} assists {job.assists}, which is on {home}")
        if job.id not in state.running.teams.get(job.assists, ()):
            raise InvariantViolation(f"{job.assists} does not know that {job.id} assists it")
    for leader_id, team in state.running.teams.items() if state.lifecycle.shutdown is None else ():
        if lost := team - state.running.keys():
            raise InvariantViolation(f"{leader_id} is to train with {min(lost)}, which has ended")


def check_end(journal: JournalView, study: RandomStudy, requests: Collection[str]) -> Mapping[int, Any]:
    """Check the invariants at the end of a study.

    Args:
        journal: Journal of the study.
        study: The random study, which can also be run without faults.
        requests: Names of all requests of users.

    Returns:
        Number of each trial -> its configuration, state, epochs and reports.

    Raises:
        InvariantViolation: an invariant is broken.
    """
    rows = {row.number: row for row in journal.trials()}
    if left := [number for number, row in rows.items() if not row.state.final]:
        raise InvariantViolation(f"trial {left[0]} is {rows[left[0]].state} though the study has ended")
    if (done := [each.request for each in journal.interventions() if each.request]) != sorted(requests):
        wrong = [*(set(done) ^ set(requests)), *(name for name in done if done.count(name) > 1)]
        raise InvariantViolation(
            f"{len(requests)} requests were made, and {len(done)} carried out or refused; "
            f"{min(wrong, default='the order')} is wrong"
        )
    unknown = {
        job for job, reservations in journal.reservations().items() if reservations and reservations[0].cores is None
    }
    if faults := faults_of_teams(journal):
        raise InvariantViolation(faults[0])
    if violations := [x for x in overcommitments(journal, study.cluster) if not unknown & set(x.jobs)]:
        raise InvariantViolation(str(violations[0]))
    _check_decisions(journal, study)
    _check_retention(journal)
    results = {}
    for number, row in rows.items():
        # the report of a retried trial's failure can be beyond its epoch
        curve = [
            x for x in journal.curve(number) if x.metrics and (x.epoch <= row.epoch or x.state is not TrialState.FAILED)
        ]
        reports = {report.epoch: dict(report.metrics) for report in curve}
        expected = range(row.trial.start + 1, row.epoch + 1)
        if sorted(reports) != list(expected):
            raise InvariantViolation(f"trial {number} is at epoch {row.epoch}, and has reported {sorted(reports)}")
        for epoch, metrics in reports.items():
            if metrics != study.workload.report(row.trial, epoch).metrics:
                raise InvariantViolation(f"trial {number} has reported {metrics} at epoch {epoch}")
        results[number] = (dict(row.config), row.state, row.epoch, reports)
    ended_by_user = _stopped(journal) or journal.study.get("ended")
    if type(study.algorithm()) in ORDER_INDEPENDENT and study.retries == UNLIMITED_RETRIES and not ended_by_user:
        faulty = {number: each[:3] for number, each in results.items() if number < FIRST_ADDED}
        faultless_results = study.results_without_faults(
            [each["trials"] for each in journal.study.get("extensions", ())]
        )
        faultless = {number: (dict(x[0]), *x[1:]) for number, x in faultless_results.items()}
        for number in sorted(faulty.keys() | faultless.keys()):
            if faulty.get(number) != faultless.get(number):
                why = rows[number].reason.replace("\n", " ") if number in rows else ""
                raise InvariantViolation(
                    f"trial {number} is {faulty.get(number)}, and {faultless.get(number)} without faults; {why}"
                )
    return results


def _check_retention(journal: JournalView) -> None:
    """Pinned trials have their weights, and of the others those that the rule of the study keeps."""
    deleted, pins = StudyStatistics(journal).deleted(), set(journal.study.get("pins", ()))
    gone = {number for number, weights in deleted.items() if weights}
    if lost := pins & gone:
        raise InvariantViolation(f"trial {min(lost)} is pinned, and its weights are deleted")
    ended = [row for row in journal.trials() if row.state in (TrialState.COMPLETE, TrialState.STOPPED)]
    if lost := gone - {row.number for row in ended}:
        raise InvariantViolation(f"the weights of trial {min(lost)} are deleted, and it has failed")
    keep = journal.study.get("keep", journal.spec.keep)
    unborn = [row.trial for row in journal.trials() if row.epoch == row.trial.start and row.state is TrialState.FAILED]
    needed = pins | {trial.origin.trial for trial in unborn if trial.origin}  # a retry begins with them
    spare = below_rank([row for row in ended if row.number not in gone], journal.spec, keep) - needed
    if spare and not journal.study.get("ended"):
        raise InvariantViolation(f"trial {min(spare)} has weights that keep={keep!r} does not keep")
    changed = any(each.verb == "keep" for each in journal.interventions())
    stable = keep == "best" or len(journal.objectives) == 1  # a new trial on a front may change the order of the others
    if not changed and stable and (lost := gone - below_rank(ended, journal.spec, keep)):
        raise InvariantViolation(f"the weights of trial {min(lost)} are deleted, and keep={keep!r} keeps them")


def _check_decisions(journal: JournalView, study: RandomStudy) -> None:
    """The recorded decisions are those of the algorithm in a replay of the reports."""
    algorithm = study.algorithm()
    decisions: dict[int, Decision] = {}
    for decision in replay(journal, algorithm, lambda groups: None):
        decisions.setdefault(decision.trial, decision)
    ended_early = journal.study.get("ended", False)
    if not (algorithm.finished or ended_early):
        raise InvariantViolation("the algorithm has not finished, though the study has")
    by_users = journal.retried.keys() | _stopped(journal)
    for row in journal.trials():
        decided = decisions.get(row.number)
        if (
            row.number in by_users
            or row.trial.is_added
            or row.state is TrialState.FAILED
            or (ended_early and not decided)
        ):
            continue
        if decided is None or decided.state is not row.state:
            raise InvariantViolation(f"trial {row.number} is {row.state}, and its algorithm decides {decided}")


def _stopped(journal: JournalView) -> set[int]:
    """Return the numbers of the trials that a user has stopped; the algorithm received a failure for each."""
    return {number for each in journal.interventions() if each.verb == "stop" for number in each.trials}
