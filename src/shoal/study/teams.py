"""Jobs on several devices: a leader trains, and a helper on each further device computes gradients for it.

A helper is a job of its own for the back end and the journal. This module keeps leaders and helpers in step: a leader
gets the names of its helpers, and a helper whose leader does not need it any more is stopped.
"""

from shoal.core.command import StopJob, UpdateJob
from shoal.core.device import Device
from shoal.core.event import Ended, Outcome
from shoal.core.job import Job, JobUpdate
from shoal.plan.job_tracker import PreemptionRequest
from shoal.study.state import StudyState

__all__ = ["end_helper", "update_teams"]


def update_teams(state: StudyState, now: float) -> None:
    """Send changed teams to their leaders, and stop helpers that are in none. Call this at the end of each step.

    A team has the running helpers of a leader, without those about to leave; none if the leader is about to leave or
    has ended. Leaders and helpers leave for many reasons, so this compares what should be with what was commanded.
    """
    running = state.running
    for leader in sorted(running.helpers.keys() | running.teams.keys()):
        helpers = running.helpers.get(leader, set())
        runs = leader in running
        goes_on = runs and not state.is_leaving(leader)
        team = frozenset(helper for helper in helpers if goes_on and not state.is_leaving(helper))
        before = running.teams.pop(leader, frozenset())
        if team:
            running.teams[leader] = team
        if runs and team != before:
            state.step.command(UpdateJob(leader, JobUpdate(team=team)))
            _measure(state, leader, alone=not team)
        for helper in sorted(helpers - team - running.dismissed):
            _dismiss(state, helper, f"{leader} {'is about to leave its device' if runs else 'has ended'}", now)


def _measure(state: StudyState, leader: str, *, alone: bool) -> None:
    """Let epochs of a job count as those of one device only while it has one."""
    if alone:
        state.crowding.begin(*state.running[leader])
    else:
        state.crowding.end(leader)


def _dismiss(state: StudyState, helper: str, reason: str, now: float) -> None:
    """Stop a helper, with this reason if there is no other yet."""
    if not state.is_leaving(helper):
        state.running.note(helper, reason)
    if helper not in state.tracker.leaving:
        state.tracker.request_preemption(helper, PreemptionRequest(False, reason), now)
    state.running.dismissed.add(helper)
    state.step.command(StopJob(helper))


def end_helper(state: StudyState, helper: Job, device: Device, ended: Ended, now: float) -> None:
    """Handle the end of a helper. Its failure is none of a trial: the leader continues with the others."""
    if ended.outcome is not Outcome.FINISHED or helper.id not in state.running.dismissed:
        state.tracker.end_helper(helper, device, ended.outcome)
    state.running.dismissed.discard(helper.id)
    state.tracker.end(helper, ended.outcome, (), now)
