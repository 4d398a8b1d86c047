"""Planning steps of a study: ask the algorithm for trials, survey their models, place them in jobs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from shoal.core.array import Array, FusionKey, Member, add_members, remove_members
from shoal.core.command import (
    CopyCheckpoint,
    GroupsProposed,
    JobJoined,
    JobLeaving,
    JobStarted,
    ReservationsChanged,
    StartJob,
    StopJob,
    UpdateJob,
    Waiting,
)
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.errors import AlgorithmError, DeviceError
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import FIRST_ADDED, TrialState
from shoal.planner.planner import Placement, Planner
from shoal.remedy import command
from shoal.schedule.ledger import no_device
from shoal.study.interventions import PAUSED, STOPPED, stop
from shoal.study.job_events import observe
from shoal.study.signatures import surveyed
from shoal.study.state import StudyState
from shoal.study.trials import TrialRecord

__all__ = ["ask", "check_alive", "place", "survey"]

SEEN_A_DEVICE = 32
"""Number of further trials in a plan for each idle device."""

BEHIND = "waits for those before it"
"""Waiting reason of trials behind the horizon of the plan."""


def ask(state: StudyState) -> None:
    """Ask the algorithm for the next groups of trials."""
    if state.given.algorithm.finished:
        return
    idle = len(state.idle())
    groups = tuple(state.given.algorithm.next_groups(idle))
    if added := [trial.number for group in groups for trial in group.trials if trial.is_added]:
        raise AlgorithmError(
            f"{state.given.algorithm!r} proposes trial {added[0]}; the numbers from {FIRST_ADDED} on are of trials "
            "that users add"
        )
    if groups:
        state.step.record(GroupsProposed(idle, groups))
    state.tracker.enlist(groups)
    over: list[TrialRecord] = []
    for group in groups:
        for trial in group.trials:
            record = state.trials.get(trial.number) or TrialRecord(trial, 0, trial.start)
            if record.state is TrialState.STOPPED:  # by a user, after it had reached its budget
                over.append(record)
            record.target = group.budget.epochs
            state.trials.move(record, TrialState.PENDING)
            state.step.command(CopyCheckpoint(trial))
    if over:
        stop(state, over, STOPPED)
        ask(state)  # the algorithm may propose others in their places


def survey(state: StudyState) -> None:
    """Survey the models of new trials, so that the planner knows their fusion keys.

    Survey jobs run on all idle devices, so that user code that crashes does not end the engine. If no device is idle,
    training jobs survey between two steps.
    """
    table, known = state.trials, state.signatures.keys
    table.unknown = {number for number in table.unknown if number not in known}
    if not table.unknown:
        return
    asked = surveyed(job for job, _ in state.running.values())
    unknown = [record.member for record in table.in_order(table.unknown - asked)]
    if (key := state.given.key) is not None:
        known.update((member.trial.number, key(member.trial)) for member in unknown)
    elif idle := state.idle():
        shares = zip(state.signatures.shares(unknown, len(idle)), idle, strict=False)
        _start(state, [(Job(state.new_id(), (share,), Purpose.SIGNATURE), device) for share, device in shares])
    elif state.given.elastic:
        training = [job.id for job, _ in state.running.values() if job.purpose is Purpose.TRAIN]
        for job, trials in state.signatures.looks([member.trial for member in unknown], training).items():
            state.step.command(UpdateJob(job, JobUpdate(look=trials)))


def place(state: StudyState, now: float) -> None:
    """Plan arrays and jobs for the waiting trials once all are surveyed, and record why the others wait."""
    cluster = state.interference.cluster(state.fleet.cluster)
    held = {x.number: f"{PAUSED}{_company(state, x)}" for x in state.trials.held_back()}
    situation = _situation(state), cluster, held
    if situation == state.placed and now < min(state.placed_at + state.given.replan_seconds, state.planner.wake):
        return
    idle = len(state.idle())
    most = state.horizon + SEEN_A_DEVICE * idle
    everyone = state.trials.waiting(most)
    keys = state.signatures.keys
    unknown = [x for x in everyone if x.number not in keys]
    looked_at = any(device.healthy for _, device in cluster)
    why = "its model has to be looked at first" if looked_at else no_device(cluster)
    reasons = {**held, **{x.number: why for x in unknown}}
    asked = surveyed(job for job, _ in state.running.values()) if unknown else set()
    if any(x.number in asked for x in unknown):
        looked = "waits for those whose models are looked at"
        _explain(state, {**{x.number: looked for x in everyone}, **reasons})
        _explain(state, dict.fromkeys(state.trials.untold, BEHIND))
        state.placed = None
        return
    waiting = [(x.member, keys[x.number]) for x in everyone if x.number in keys]
    placement = _plan(state, state.planner, waiting, cluster, now)
    _explain(state, {**reasons, **placement.refusals})
    state.placed, state.placed_at = None if placement.starts or placement.joins else situation, now
    for job, leave in placement.leaves.items():
        state.step.record(JobLeaving(job, leave.reason))
        state.step.command(StopJob(job))
    _promise(state, placement.reservations)
    _start(state, placement.starts)
    for job, arrays in placement.joins.items():
        _let_join(state, job, arrays)
    _explain(state, dict.fromkeys(state.trials.untold, BEHIND))
    if idle and len(everyone) == most and not placement.starts:  # trials behind the horizon may fit where these do not
        state.horizon, state.placed = 2 * state.horizon, None


def _company(state: StudyState, held: TrialRecord) -> str:
    """The trials of its group that wait for a paused trial, in words; "" if there are none."""
    group = state.tracker.group(held.member)
    if group is None or not group.epochs_ahead:
        return ""
    others = [state.trials.get(trial.number) for trial in group.trials]
    waiting = sum(x is not None and x.state is TrialState.PAUSED and x.target == held.target for x in others)
    if not waiting:
        return ""
    return f"; {waiting} {'trial waits' if waiting == 1 else 'trials wait'} for it at epoch {held.target}"


def _explain(state: StudyState, reasons: Mapping[int, str]) -> None:
    """Record changed waiting reasons."""
    if changed := state.trials.explain(reasons):
        state.step.record(Waiting(changed))


def _plan(
    state: StudyState,
    planner: Planner,
    waiting: Sequence[tuple[Member, FusionKey]],
    cluster: Cluster,
    now: float,
) -> Placement:
    """The plan for all waiting trials with known keys."""
    return planner.plan(
        waiting,
        [(state.trials.present(job), cluster.device(device.name)) for job, device in state.running.values()],
        cluster,
        now,
        alone=state.trials.alone,
        unmeasurable=state.signatures.unmeasurable,
        limits=state.trials.limits,
    )


def _situation(state: StudyState) -> object:
    """Version of all that a plan depends on, except devices, time and the progress of running trials.

    It changes when a trial changes its state, a job begins or ends, or a profile, key or limit is learnt.
    """
    trials, signatures = state.trials, state.signatures
    changes = trials.changes, state.running.changes, state.tracker.changes, state.profiles.learnt
    return *changes, len(trials.alone), len(signatures.keys), len(signatures.unmeasurable)


def _promise(state: StudyState, reservations: Mapping[str, Demand]) -> None:
    """Record new reservations of running jobs, before other jobs get what these give back."""
    if reservations:
        state.step.record(ReservationsChanged(reservations))
    for number, demand in reservations.items():
        state.running.change(replace(state.running[number][0], demand=demand))


def _let_join(state: StudyState, number: str, arrays: tuple[Array, ...]) -> None:
    """Add trials to a running job."""
    job, device = state.running[number]
    members = [member for array in arrays for member in array.members]
    state.step.record(JobJoined(job.id, device.name, arrays))
    state.step.command(UpdateJob(job.id, JobUpdate(join=arrays)))
    held = remove_members(state.trials.present(job).arrays, {member.trial.number for member in members})
    job = replace(job, arrays=add_members(held, arrays))  # without members that have left
    state.running.change(job)
    state.interference.change(job)
    state.trials.begin(job.id, members)


def _start(state: StudyState, starts: Iterable[tuple[Job, Device]]) -> None:
    for job, device in starts:
        state.step.record(JobStarted(job, device.name))
        state.step.command(StartJob(job, device))
        state.running.begin(job, device)
        state.interference.begin(job, device)
        state.given.devices.begin(job)
        if job.purpose is Purpose.TRAIN:
            state.trials.begin(job.id, job.members)


def check_alive(state: StudyState, now: float) -> None:
    """End a study in which no job runs and no waiting trial can ever start.

    The study goes on if trials could start once lost devices come back or programs of others end. A trial that ran out
    of memory and waits for a larger device fails, and the study goes on, unless users have removed devices.

    Raises:
        AlgorithmError: the algorithm neither proposes trials nor has finished.
        DeviceError: the waiting trials can never start; names the most frequent reason.
    """
    if state.running or state.finished or state.planner.sleeps:
        return
    if not state.trials.has_waiting():
        if state.trials.held_back():
            return
        raise AlgorithmError(f"{state.given.algorithm!r} neither proposes trials nor has finished")
    if state.fleet.emptied:
        return
    waiting = state.trials.waiting()
    reasons = Counter(x.reason for x in waiting)
    reason, trials = min(reasons.items(), key=lambda each: (-each[1], each[0]))
    if state.fleet.diminished:
        hopeful = state.fleet.hopeful
        ids = map("hoped-for-{}".format, count())
        keys = state.signatures.keys
        known = [(x.member, keys[x.number]) for x in waiting if x.number in keys]
        at_best = _plan(state, state.make_planner(ids.__next__), known, hopeful, now)
        unknown = len(known) < len(waiting)
        if at_best.starts or (unknown and any(device.healthy for _, device in hopeful)):
            return
        reason = next(iter(at_best.refusals.values()), reason)
    short = [x for x in waiting if (limit := state.trials.limits.get(x.number)) and limit.memory]
    if short and not state.fleet.reduced:
        observe(state, "", [x.failed(f"no device that may run it has more memory: {x.reason}") for x in short])
        return
    raise DeviceError(
        f"{trials} trials can never start: {reason}. Everything is saved; choose devices that suffice, such "
        f"as fewer CPU slots: {command('resume', state.given.directory, '--devices ...')}"
    )
