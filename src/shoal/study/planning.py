"""Planning steps of a study: ask the algorithm for trials, find their signatures, place them in jobs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.core.array import Array, add_members, remove_members
from shoal.core.command import CopyCheckpoint, StartJob, StopJob, UpdateJob
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.errors import AlgorithmError, DeviceError
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.resources import no_device
from shoal.core.rows import Proposal
from shoal.core.trial import FIRST_ADDED, TrialState
from shoal.host.remedy import command
from shoal.plan.plan_input import Placement, PlanInput
from shoal.plan.planner import plan
from shoal.plan.shares import memory_limit
from shoal.study.job_events import observe, stop, write_quanta
from shoal.study.signatures import in_signature_jobs
from shoal.study.state import StudyState
from shoal.study.trials import TrialRecord

__all__ = ["ask_algorithm", "check_progress", "find_signatures", "place"]

HORIZON = 128
"""Number of classes of waiting trials that a plan considers at first, in queue order. It looks further while a device
is idle, but not to fill one that jobs share already, like the limits of backfilling of other schedulers."""

CLASSES_PER_DEVICE = 8
"""Number of classes of waiting trials that a plan considers beyond the horizon, for each idle device."""

AWAITS_SIGNATURES = "waits for the fusion signatures of other trials"
"""Waiting reason of trials whose keys are known, while a job finds those of others."""

BEHIND = "waits for trials ahead of it in the queue"
"""Waiting reason of trials behind those that a plan considers."""

AT_LIMIT = "waits for others to end, as at most {} trials train at a time (max_concurrent)"
"""Waiting reason of trials that could start but for the limit."""


def ask_algorithm(state: StudyState) -> None:
    """Ask the algorithm for the next groups of trials; instead of trials that are stopped it may propose others."""
    while stopped := _propose(state):
        for reason, records in stopped.items():
            stop(state, records, reason)


def _propose(state: StudyState) -> dict[str, list[TrialRecord]]:
    """Add the groups of trials that the algorithm proposes; return those that were stopped after they had reached an
    earlier budget, by the reason.
    """
    if state.config.algorithm.finished:
        return {}
    idle = len(state.idle())
    groups = tuple(state.config.algorithm.next_groups(idle))
    if added := [trial.number for group in groups for trial in group.trials if trial.is_added]:
        raise AlgorithmError(
            f"{state.config.algorithm!r} proposes trial {added[0]}; numbers from {FIRST_ADDED} on are "
            "reserved for trials that users add"
        )
    if groups:  # without any, the algorithm has not changed
        state.step.write(Proposal(idle, groups, state.next_seq(), state.step.time))
    state.trials.register_trial_groups(groups)
    stopped: dict[str, list[TrialRecord]] = {}
    for group in groups:
        for trial in group.trials:
            record = state.trials.get(trial.number) or TrialRecord(trial, 0, trial.start)
            if record.state is TrialState.STOPPED:
                stopped.setdefault(record.reason, []).append(record)
            record.target = group.budget.epochs
            state.trials.move(record, TrialState.PENDING)
            if trial.origin is not None:
                state.step.command(CopyCheckpoint(trial))
    return stopped


def find_signatures(state: StudyState) -> None:
    """Start jobs that find the fusion keys of new trials.

    These signature jobs run on all idle devices, in worker processes, so that a crash of user code does not end the
    engine. If no device is idle, training jobs find the keys between two steps.
    """
    table = state.trials
    if not table.without_key:
        return
    asked = in_signature_jobs(job for job, _ in state.running.values())
    unknown = [record.member for record in table.in_order(table.without_key - asked)]
    if (key := state.config.key) is not None:
        table.set_keys({member.trial.number: key(member.trial) for member in unknown})
    elif idle := state.idle():
        shares = zip(state.signatures.split(unknown, len(idle)), idle, strict=False)
        _start(state, [(Job(state.running.new_id(), (share,), Purpose.SIGNATURE), device) for share, device in shares])
    elif state.config.elastic:
        training = [job.id for job, _ in state.running.values() if job.purpose is Purpose.TRAIN]
        for job, trials in state.signatures.assign_to_training([member.trial for member in unknown], training).items():
            state.step.command(UpdateJob(job, JobUpdate(find_signatures=trials)))


def place(state: StudyState, now: float) -> None:
    """Plan arrays and jobs for the waiting trials once their keys are known, and record why the other trials wait."""
    if any(job.purpose is Purpose.PROFILE and not job.arrays for job, _ in state.running.values()):
        # The job is about to end, and its process, which has built trials, is then free to train them.
        state.trials.explain(dict.fromkeys(state.trials.unexplained, "waits for the end of a measurement"))
        return
    cluster = state.fleet.cluster
    held = {x.number: f"paused by {x.paused_by}{_group_waiting_text(state, x)}" for x in state.trials.paused_waiting()}
    version = _plan_version(state), cluster, held
    if version == state.last_plan and now < min(state.last_plan_time + state.config.replan_seconds, state.wake):
        return
    unknown = state.trials.without_key - state.trials.paused
    reasons = held | _unknown_reasons(unknown, cluster)
    if unknown and not unknown.isdisjoint(in_signature_jobs(job for job, _ in state.running.values())):
        state.trials.explain(dict.fromkeys([x.number for x in state.trials.waiting()], AWAITS_SIGNATURES) | reasons)
        state.last_plan = None
        return
    placement = _plan_within_horizon(state, cluster, now, look_further=version != state.last_plan)
    reasons |= placement.refusals
    state.tracker, state.running.next_job, state.wake = placement.history, placement.next_job, placement.wake
    write_quanta(state)
    state.trials.explain(reasons)
    state.last_plan, state.last_plan_time = None if placement.starts or placement.joins else version, now
    for job, leave in placement.preemptions.items():
        state.running.note(job, leave.reason)
        if state.running[job][0].purpose is Purpose.ASSIST:
            continue  # `update_teams` stops it once its leader continues without it
        state.step.command(StopJob(job))
    _change_reservations(state, placement.reservations)
    _start(state, placement.starts if _limits_memory(state) else _unlimited(placement.starts))
    _limit_memory(state)
    for job, arrays in placement.joins.items():
        _join(state, job, arrays)
    most = state.config.spec.max_concurrent
    state.trials.explain_others(reasons, AT_LIMIT.format(most) if placement.held_back else BEHIND)


def _plan_within_horizon(state: StudyState, cluster: Cluster, now: float, *, look_further: bool) -> Placement:
    """Plan for the first classes of waiting trials, and for twice as many while a device stays idle, if that may help.

    A suspended job gets its present members before.
    """
    given, idle, horizon = _plan_input(state, cluster, now), len(state.idle()), HORIZON
    while True:
        most = horizon + CLASSES_PER_DEVICE * idle
        waiting = state.trials.classes(now, most)
        placement = plan(replace(given, waiting=waiting), state.cache)
        if placement.starts or placement.held_back or not idle or len(waiting) < most or not look_further:
            return placement
        horizon *= 2


def _unknown_reasons(unknown: Iterable[int], cluster: Cluster) -> dict[int, str]:
    """Return why trials without a key wait, by number."""
    can_run = any(device.healthy for _, device in cluster)
    return dict.fromkeys(sorted(unknown), "its fusion signature is not known yet" if can_run else no_device(cluster))


def _group_waiting_text(state: StudyState, held: TrialRecord) -> str:
    group = state.trials.trial_groups.get(held.number)
    if group is None or not group.epochs_ahead:
        return ""
    others = [state.trials.get(trial.number) for trial in group.trials]
    waiting = sum(x is not None and x.state is TrialState.PAUSED and x.target == held.target for x in others)
    if not waiting:
        return ""
    return f", which keeps {waiting} {'trial' if waiting == 1 else 'trials'} waiting at epoch {held.target}"


def _plan_input(state: StudyState, cluster: Cluster, now: float) -> PlanInput:
    """Return what a plan follows from, but for the waiting trials; suspended jobs get their present members before."""
    state.tracker.refresh_suspended(state.trials.waits, now)
    state.trials.suspend([job for job, _ in state.tracker.suspended.values()])
    running = [(state.trials.present(job), cluster.device(device.name)) for job, device in state.running.values()]
    return replace(state.plan_input(cluster, now), running=running)


def _plan_version(state: StudyState) -> object:
    """A value that changes with the inputs of a plan, except devices, time and the progress of running trials."""
    trials, signatures = state.trials, state.signatures
    changes = trials.changes, state.running.changes, state.tracker.changes, state.costs.version
    return *changes, len(trials.own_job_trials), len(trials.without_key), len(signatures.unmeasurable)


def _change_reservations(state: StudyState, reservations: Mapping[str, Demand]) -> None:
    """Record new reservations of running jobs before other jobs get the freed resources."""
    for number, demand in reservations.items():
        before = state.running[number][0].demand
        job = state.running.reserve(state.running[number][0], demand, state.step.time)
        if before is not None and before.compute != demand.compute:
            state.crowding.change(job)


def _limits_memory(state: StudyState) -> bool:
    """Whether jobs that share a GPU have a limit of memory."""
    return state.config.spec.memory_limit is not None


def _unlimited(starts: Iterable[tuple[Job, Device]]) -> list[tuple[Job, Device]]:
    return [(replace(job, memory_limit=0), device) for job, device in starts]


def _limit_memory(state: StudyState) -> None:
    """Limit the memory of jobs that others have joined on their GPUs, and lift the limits of jobs left alone there."""
    if not _limits_memory(state):
        return
    for job, device in list(state.running.values()):
        limit = memory_limit(job, device, state.running.on(device.name))
        if limit != job.memory_limit:
            state.running.change(replace(job, memory_limit=limit))
            state.step.command(UpdateJob(job.id, JobUpdate(memory_limit=limit)))


def _join(state: StudyState, number: str, arrays: tuple[Array, ...]) -> None:
    job, device = state.running[number]
    members = [member for array in arrays for member in array.members]
    state.running.join(job.id, arrays)
    state.step.command(UpdateJob(job.id, JobUpdate(join=arrays)))
    held = remove_members(state.trials.present(job).arrays, {member.trial.number for member in members})
    job = replace(job, arrays=add_members(held, arrays))  # without members that have left
    state.running.change(job)
    state.crowding.change(job)
    state.trials.begin(job.id, device.name, members)


def _start(state: StudyState, starts: Iterable[tuple[Job, Device]]) -> None:
    for job, device in starts:
        state.step.command(StartJob(job, device))
        state.running.begin(job, device, state.step.time)
        state.config.devices.begin(job)
        if job.purpose is Purpose.ASSIST:
            continue
        state.crowding.begin(job, device)
        if job.purpose is Purpose.TRAIN:
            state.trials.begin(job.id, device.name, job.members)


def check_progress(state: StudyState, now: float) -> None:
    """End a study in which no job runs and no waiting trial can ever start, or that does not train.

    The study continues if trials could start once lost devices come back or others' programs end. A trial that ran out
    of memory and waits for a larger device fails, and the study continues, unless users have removed devices.
    """
    if state.running or state.finished or state.has_wake_time:
        return
    if not state.config.trains:
        state.lifecycle.end()
        return
    if not state.trials.has_waiting():
        if state.trials.paused_waiting():
            return
        raise AlgorithmError(f"{state.config.algorithm!r} neither proposes trials nor has finished")
    if state.fleet.all_removed:
        return
    waiting = state.trials.waiting()
    reasons = Counter(x.reason for x in waiting if x.number in state.trials.explained)
    reason, trials = min(reasons.items(), key=lambda each: (-each[1], each[0]))
    trials += len(waiting) - reasons.total()  # those behind them
    if state.fleet.can_recover:
        best_case = state.fleet.best_case
        given = _plan_input(state, best_case, now)
        at_best = plan(replace(given, waiting=state.trials.classes(now)))
        unknown = any(x.key is None for x in waiting)
        if at_best.starts or (unknown and any(device.healthy for _, device in best_case)):
            return
        reason = next(iter(at_best.refusals.values()), reason)
    short = [x for x in waiting if (limit := state.trials.oom_limits.get(x.number)) and limit.memory]
    if short and not state.fleet.any_removed:
        observe(state, "", [x.failed(f"no device that may run it has more memory: {x.reason}") for x in short])
        return
    raise DeviceError(
        f"{trials} trials can never start: {reason}. Everything is saved; choose devices that suffice, such "
        f"as fewer CPU slots: {command('resume', state.config.directory, '--devices ...')}"
    )
