"""The planner with policies that suspend, resume, resize and stop: what starts, who is to leave, who waits why."""

import pytest
from baselines import RoundRobin
from planner_samples import CONSTANT, GB, A, B, Turns, cluster, known, profile, slots, waiting

from shoal.core.event import Ended, Outcome, Reported
from shoal.core.trial import Report
from shoal.plan.job_tracker import PreemptionRequest
from shoal.plan.schedule import JobState, Plan, Policy, Refusal, Resize, Resume, Start, TurnStats, WaterFilling


class Scene:
    """A planner, and a stage on which its jobs do what the test says."""

    def __init__(self, policy, costs, where, members):
        self.planner = Turns(policy, costs)
        self.where, self.members = where, members
        self.running = {}

    def plan(self, now):
        busy = {member.trial.number for job, _ in self.running.values() for member in job.members}
        wait = [(member, key) for member, key in self.members if member.trial.number not in busy]
        placement = self.planner.plan(wait, list(self.running.values()), self.where, now)
        self.running |= {job.id: (job, device) for job, device in placement.starts}
        return placement

    def tells(self, name, now):
        self.planner.tracker.on_report(Reported(name, (Report(0, 1),), TurnStats(2.0, 1.0, 1.0, 3, 0.5)), now)

    def preemptions(self, name, now):
        job, _ = self.running.pop(name)
        tracker = self.planner.tracker
        outcome = tracker.outcome(Ended(name, Outcome.STOPPED))
        tracker.end(job, outcome, {member.trial.number for member in job.members}, now)


def starts(placement):
    return [(job.id, job.resumes, [m.trial.number for m in job.members], d.name) for job, d in placement.starts]


def test_two_jobs_take_turns_on_a_device():
    context = Scene(
        RoundRobin(quantum=10.0), known(A=CONSTANT, B=CONSTANT), cluster(*slots(1)), waiting((A, 2), (B, 1))
    )
    assert starts(context.plan(0.0)) == [("job-00001", "", [0, 1], "cpu/1:0")]
    assert context.planner.wake == 10.0
    assert context.plan(10.0).preemptions == {}, "it has not taken a step yet"
    context.tells("job-00001", 11.0)
    placement = context.plan(12.0)
    assert placement.preemptions == {"job-00001": PreemptionRequest(True, "suspended by the policy")}
    assert placement.starts == ()
    assert placement.refusals == {2: "waits until job-00001 has left cpu/1:0"}
    assert context.plan(12.5).preemptions == {}, "it is asked once"
    context.preemptions("job-00001", 13.0)
    placement = context.plan(13.0)
    assert starts(placement) == [("job-00002", "", [2], "cpu/1:0")]
    assert placement.refusals.keys() == {0, 1}
    context.tells("job-00002", 14.0)
    context.plan(23.0)
    context.preemptions("job-00002", 23.5)
    assert starts(context.plan(23.5)) == [("job-00003", "job-00001", [0, 1], "cpu/1:0")]


def test_no_member_joins_a_suspended_or_leaving_job():
    context = Scene(
        RoundRobin(quantum=10.0), known(A=CONSTANT, B=CONSTANT), cluster(*slots(1)), waiting((A, 2), (B, 1))
    )
    context.plan(0.0)
    context.tells("job-00001", 1.0)
    context.members += waiting((B, 3), (A, 1))[3:]
    assert context.plan(2.0).joins.keys() == {"job-00001"}
    assert context.plan(11.0).preemptions.keys() == {"job-00001"}
    assert context.plan(11.5).joins == {}
    context.preemptions("job-00001", 12.0)
    assert context.plan(12.0).joins == {}


class Seeing(Policy):
    """Another policy, and what it is shown."""

    def __init__(self, policy):
        self.policy = policy

    def plan(self, jobs, cluster, now):
        self.seen = {job.id: job for job in jobs}
        return self.policy.plan(jobs, cluster, now)


def test_water_filling_gives_shares_and_takes_them_back():
    small = profile({1: 1.0, 16: 16.0}, compute=0.4)
    policy = Seeing(WaterFilling())
    context = Scene(policy, known(A=small, B=small), cluster(*slots(1)), waiting((A, 1)))
    ((first, _),) = context.plan(0.0).starts
    assert first.demand.compute == 0.4
    context.tells("job-00001", 1.0)
    context.members += waiting((A, 1), (B, 1))[1:]
    placement = context.plan(2.0)
    ((second, device),) = placement.starts
    assert (second.demand.compute, device.name, placement.preemptions) == (0.5, "cpu/1:0", {})
    context.plan(3.0)
    assert {name: job.share for name, job in policy.seen.items()} == {"job-00001": 0.5, "job-00002": 0.5}


class Scripted(Policy):
    """Answers with one list of actions after another; all else stays off the devices."""

    def __init__(self, *answers):
        self.answers, self.seen = list(answers), []

    def plan(self, jobs, cluster, now):
        self.seen.append({job.id: job for job in jobs})
        actions = self.answers.pop(0)
        placed = {action.job for action in actions}
        off = [job.id for job in jobs if job.state is not JobState.RUNNING and job.id not in placed]
        return Plan(tuple(actions), tuple(Refusal(name, "not now") for name in off))


def test_a_job_moves_by_way_of_being_suspended():
    policy = Scripted(
        [Start("waiting-0", ("cpu/1:0",))],
        [Resize("job-00001", ("cpu/1:1",))],
        [],
        [Resume("job-00001", ("cpu/1:1",))],
    )
    context = Scene(policy, known(A=CONSTANT), cluster(*slots(2)), waiting((A, 1)))
    context.plan(0.0)
    context.tells("job-00001", 1.0)
    assert context.plan(2.0).preemptions == {
        "job-00001": PreemptionRequest(True, "suspended by the policy, to move to cpu/1:1")
    }
    context.preemptions("job-00001", 3.0)
    assert context.plan(3.0).refusals == {0: "not now"}
    assert starts(context.plan(4.0)) == [("job-00002", "job-00001", [0], "cpu/1:1")]
    assert policy.seen[3]["job-00001"].home == "cpu/1:0"
    assert policy.seen[3]["job-00001"].ran == pytest.approx(3.0)


def test_a_job_on_a_share_is_shown_with_it():
    small = profile({1: 1.0, 16: 16.0}, compute=0.2, member_memory=GB)
    policy = Scripted([Start("waiting-0", ("cpu/1:0",), 0.25)], [Resize("job-00001", ("cpu/1:0",), 0.75)], [])
    context = Scene(policy, known(A=small), cluster(*slots(1)), waiting((A, 1)))
    ((job, _),) = context.plan(0.0).starts
    assert job.demand.compute == 0.25
    context.tells("job-00001", 1.0)
    assert context.plan(2.0).preemptions == {}
    context.plan(3.0)
    assert [seen["job-00001"].share for seen in policy.seen[1:]] == [0.25, 0.75]
    assert policy.seen[0]["waiting-0"].scaling.max_jobs == 5
