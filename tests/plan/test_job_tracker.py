"""What a job has been through, as policies are told, and who is suspended."""

from dataclasses import replace

import pytest
from planner_samples import A, B, KnownCosts, cluster, member, profile, slots

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.event import Ended, Outcome, Reported
from shoal.core.job import Job, Purpose
from shoal.core.trial import Budget, Report, TrialGroup
from shoal.plan.cache import PlanCache
from shoal.plan.cost.cost import Cost
from shoal.plan.job_history import EarlierJob
from shoal.plan.job_tracker import JobTracker, PreemptionRequest
from shoal.plan.plan_input import PlanInput
from shoal.plan.schedule import Fifo, JobState, TurnStats
from shoal.plan.views import JobViews

NEED = {"cpu/1": Demand(0.4, 10, 1.0, 5.0)}
(DEVICE,) = slots(1)
AWAY = PreemptionRequest(True, "as the test says")


def job(name="job-1", *members, resumes=""):
    return Job(name, (Array(A, members or (member(1), member(2))),), resumes=resumes)


def losses(*values, seconds=1.0):
    return TurnStats(max(values), min(values), values[-1], len(values), seconds)


def told(name="job-1", *values, seconds=1.0):
    return Reported(name, (Report(1, 1),), losses(*values, seconds=seconds) if values else None)


def views(tracker, now=0.0, known=lambda key, kind: None, groups=(), arrived=None):
    by_number = {x.number: group for group in groups for x in group.trials}
    given = PlanInput(Fifo(), KnownCosts(known), cluster(DEVICE), now, trial_groups=by_number, arrived=arrived or {})
    return JobViews(given, tracker, PlanCache())


def seen(tracker, one, now):
    return views(tracker, now).running(one, DEVICE, NEED["cpu/1"])


def refresh(tracker, there, now=0.0):
    """The suspended jobs if so many trials wait, each with its key."""
    tracker.refresh_suspended({each.trial.number: (each, key) for each, key in there}.get, now)
    return [job for job, _ in tracker.suspended.values()]


def suspend(tracker, one, now, left=(1, 2)):
    tracker.request_preemption(one.id, AWAY, now - 0.25)
    tracker.end(one, tracker.outcome(Ended(one.id, Outcome.STOPPED)), left, now)


def test_a_job_is_preemptible_from_its_first_report_to_a_preemption_request():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 10.0)
    assert not seen(tracker, job(), 11.0).preemptible
    tracker.on_report(told(), 12.0)
    assert seen(tracker, job(), 12.0).preemptible
    tracker.request_preemption("job-1", AWAY, 13.0)
    assert not seen(tracker, job(), 13.0).preemptible
    assert tracker.leaving == {"job-1": AWAY}
    suspend(tracker, job(), 14.0)
    tracker.begin(job("job-2", resumes="job-1"), "cpu/1:1", None, 20.0)
    assert not seen(tracker, job("job-2"), 21.0).preemptible, "each stretch leads further"


@pytest.mark.parametrize("purpose", [Purpose.PROFILE, Purpose.SIGNATURE])
def test_signature_and_profile_jobs_are_not_preemptible(purpose):
    tracker = JobTracker()
    one = Job("job-1", job().arrays, purpose)
    tracker.begin(one, "cpu/1:0", None, 0.0)
    tracker.on_report(told(), 1.0)
    assert not seen(tracker, one, 2.0).preemptible


def test_times_and_losses_add_up_over_suspensions():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", 0.5, 10.0)
    tracker.on_report(told("job-1", 5.0, 4.0), 12.0)
    tracker.on_report(told("job-1", 4.5, 3.0), 13.0)
    view = seen(tracker, job(), 14.0)
    assert (view.since, view.ran, view.share, view.home, view.quanta) == (10.0, 4.0, 0.5, "cpu/1:0", ())
    suspend(tracker, job(), 15.0)
    first = TurnStats(5.0, 3.0, 3.0, 4, 2.0)
    view = views(tracker, 99.0).suspended(job(), NEED)
    assert (view.state, view.devices, view.share) == (JobState.SUSPENDED, (), None)
    assert (view.since, view.ran, view.home, view.quanta, view.best) == (15.0, 5.0, "cpu/1:0", (first,), 3.0)
    again = job("job-2", resumes="job-1")
    tracker.begin(again, "cpu/1:1", None, 20.0)
    tracker.on_report(told("job-2", 2.0), 23.0)
    tracker.end_turn("job-2", 24.0)
    view = seen(tracker, again, 25.0)
    assert (view.since, view.ran, view.home, view.best) == (20.0, 10.0, "cpu/1:1", 2.0)
    assert view.quanta == (first, TurnStats(2.0, 2.0, 2.0, 1, 1.0))
    assert not tracker.suspended


def test_a_turn_without_a_loss_goes_on():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    tracker.end_turn("job-1", 1.0)
    assert seen(tracker, job(), 1.0).turn_since is None
    tracker.on_report(told("job-1", 3.0), 1.5)
    tracker.end_turn("job-1", 2.0)
    view = seen(tracker, job(), 2.0)
    assert (view.quanta, view.turn_since) == ((losses(3.0),), 2.0)
    tracker.end_turn("job-1", 9.0)
    view = seen(tracker, job(), 9.0)
    assert (view.quanta, view.turn_since) == ((losses(3.0),), 2.0)
    assert tracker.take_quanta() == [("job-1", 0, losses(3.0))]
    assert tracker.take_quanta() == []


def test_what_comes_between_a_turn_and_the_departure_counts_in_the_next_turn():
    """So that the losses by which the policy decided are those that are recorded."""
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    tracker.on_report(told("job-1", 3.0), 1.0)
    tracker.end_turn("job-1", 10.0)
    tracker.request_preemption("job-1", AWAY, 10.0)
    tracker.on_report(told("job-1", 2.0), 10.5)
    tracker.end(job(), Outcome.SUSPENDED, (1, 2), 11.0)
    view = views(tracker, 99.0).suspended(job(), NEED)
    assert (view.quanta, view.preemptions) == ((losses(3.0),), 1)
    again = job("job-2", resumes="job-1")
    tracker.begin(again, "cpu/1:0", None, 20.0)
    tracker.on_report(told("job-2", 1.0), 21.0)
    tracker.end_turn("job-2", 30.0)
    assert seen(tracker, again, 30.0).quanta == (losses(3.0), losses(2.0, 1.0, seconds=2.0))
    assert [each[:2] for each in tracker.take_quanta()] == [("job-1", 0), ("job-2", 1)]


def earlier(name="job-1", arrays=(frozenset({1, 2}),), *, suspended=True):
    return EarlierJob(name, suspended, arrays, "cpu/1:0", (losses(3.0),), 2, 7.0, 1.0, 9.0)


def test_a_job_that_was_suspended_under_an_earlier_engine_is_suspended():
    tracker = JobTracker()
    tracker.restore([earlier(), earlier("job-2", (frozenset({3}), frozenset({4})))])
    there = [(member(1, start=4), A), (member(2), A), (member(4), B), (member(5), A)]
    suspended = refresh(tracker, there, 100.0)
    assert suspended == [job("job-1", member(1, start=4), member(2)), Job("job-2", (Array(B, (member(4),)),))]
    view = views(tracker, 99.0).suspended(suspended[0], NEED)
    assert (view.quanta, view.preemptions, view.ran, view.since, view.home) == (
        (losses(3.0),),
        2,
        7.0,
        99.0,
        "cpu/1:0",
    )


def test_members_of_which_the_keys_differ_now_are_arrays_of_their_own():
    tracker = JobTracker()
    tracker.restore([earlier()])
    (one,) = refresh(tracker, [(member(1), A), (member(2), B)])
    assert one.arrays == (Array(A, (member(1),)), Array(B, (member(2),)))


def test_a_job_that_ran_under_an_earlier_engine_leaves_its_losses_to_a_job_of_the_same_trials():
    tracker = JobTracker()
    tracker.restore([earlier(suspended=False)])
    there = [(member(1), A), (member(2), A)]
    assert refresh(tracker, there) == []
    whole, part = [Array(A, (member(1), member(2)))], [Array(A, (member(1),))]
    assert views(tracker).waiting("w", NEED, whole).quanta == (losses(3.0),)
    assert views(tracker).waiting("w", NEED, part).quanta == ()
    profiled = replace(job("job-8"), purpose=Purpose.PROFILE)
    tracker.begin(profiled, "cpu/1:0", None, 1.0)
    assert seen(tracker, profiled, 1.0).quanta == (), "only a training job inherits them"
    tracker.begin(job("job-9"), "cpu/1:0", None, 2.0)
    view = seen(tracker, job("job-9"), 3.0)
    assert (view.state, view.quanta, view.preemptions, view.ran) == (JobState.RUNNING, (losses(3.0),), 2, 8.0)


def test_a_nonfinite_loss_is_not_the_best():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    tracker.on_report(told("job-1", float("inf")), 1.0)
    tracker.end_turn("job-1", 2.0)
    assert seen(tracker, job(), 2.0).best is None


def test_the_cost_of_a_switch_is_measured_up_to_the_first_step():
    tracker = JobTracker()
    assumed = tracker.switch_seconds
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    suspend(tracker, job(), 5.0)
    tracker.begin(job("job-2", resumes="job-1"), "cpu/1:0", None, 7.0)
    assert tracker.switch_seconds == assumed
    tracker.on_report(told("job-2", 1.0, seconds=2.0), 9.5)
    assert tracker.switch_seconds == 0.25 + 0.5
    view = seen(tracker, job("job-2"), 10.0)
    assert (view.switch_seconds, view.scaling.resize_seconds) == (0.75, 0.75)


@pytest.mark.parametrize(
    ("outcome", "leave", "ends"),
    [
        (Outcome.STOPPED, AWAY, Outcome.SUSPENDED),
        (Outcome.STOPPED, PreemptionRequest(False, "over"), Outcome.STOPPED),
        (Outcome.STOPPED, None, Outcome.STOPPED),
        (Outcome.FINISHED, AWAY, Outcome.FINISHED),
        (Outcome.CRASHED, AWAY, Outcome.CRASHED),
    ],
)
def test_only_a_stopped_job_with_an_open_request_is_suspended(outcome, leave, ends):
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    if leave is not None:
        tracker.request_preemption("job-1", leave, 1.0)
    assert tracker.outcome(Ended("job-1", outcome)) is ends
    tracker.end(job(), ends, (1, 2), 2.0)
    assert tuple(tracker.suspended) == (("job-1",) if ends is Outcome.SUSPENDED else ())
    assert tracker.leaving == {}


def test_a_suspended_job_has_the_members_that_wait():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    suspend(tracker, job(), 1.0)
    there = [(member(1, start=4), A), (member(2), A), (member(3), B)]
    assert refresh(tracker, there) == [job("job-1", member(1, start=4), member(2))]
    assert refresh(tracker, there[1:]) == [job("job-1", member(2))]
    assert (refresh(tracker, there[2:]), tracker.suspended) == ([], {})


def test_a_changed_copy_leaves_the_history_as_it_is():
    tracker = JobTracker()
    for name in ("job-1", "job-2", "job-3"):
        tracker.begin(job(name), "cpu/1:0", None, 0.0)
    suspend(tracker, job("job-3"), 1.0)
    tracker.on_report(told("job-2", 3.0), 1.0)
    tracker.restore([earlier("job-8"), earlier("job-9", (frozenset({3}),), suspended=False)])
    before = vars(tracker.copy())
    changed = tracker.copy()
    changed.begin(job("job-4", resumes="job-3"), "cpu/1:0", 0.5, 2.0)
    changed.set_share("job-1", 0.25)
    changed.request_preemption("job-1", AWAY, 2.0)
    changed.end_turn("job-2", 3.0)
    changed.refuse_teams(A, "cpu/1")
    changed.end_helper(replace(job("job-5"), assists="job-2"), DEVICE, Outcome.FINISHED)
    changed.end(job("job-1"), Outcome.SUSPENDED, (1, 2), 4.0)
    changed.dissolve("job-1")
    changed.refresh_suspended(lambda number: (member(number), A), 5.0)
    assert vars(tracker) == before != vars(changed)
    assert tracker.take_quanta() == []


def test_finished_trials_leave_a_suspended_job():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    suspend(tracker, job(), 1.0, left=(2,))
    assert refresh(tracker, [(member(2), A)]) == [job("job-1", member(2))]


def test_trials_of_a_dissolved_job_wait_individually():
    tracker = JobTracker()
    tracker.begin(job(), "cpu/1:0", None, 0.0)
    suspend(tracker, job(), 1.0)
    tracker.dissolve("job-1")
    assert refresh(tracker, [(member(1), A), (member(2), A)]) == []


def test_an_array_waits_since_the_arrival_of_its_first_trial():
    shown = views(JobTracker(), 9.0, arrived={1: 3.0, 2: 5.0})
    assert shown.waiting("w", NEED, [Array(A, (member(2), member(1)))]).since == 3.0
    assert shown.waiting("w", NEED, [Array(A, (member(2),))]).since == 5.0
    assert shown.waiting("w", NEED, [Array(A, (member(3),))]).since == 9.0, "it has not waited yet"


def test_a_view_describes_the_members_of_a_job():
    one, two, three = (member(number) for number in (1, 2, 3))
    groups = [TrialGroup((one.trial, two.trial), Budget(9), "rung 1"), TrialGroup((three.trial,), Budget(9))]
    shown = views(JobTracker(), groups=groups)
    view = shown.waiting("w", NEED, [Array(A, (member(1, start=2, target=9), member(2, start=5, target=9)))])
    assert (view.trial_group, view.epoch, view.budget) == ("rung 1", 2, 9)
    assert (view.scaling.max_jobs, view.scaling.devices) == (2, 1), "0.4 of a device: two of them side by side"
    assert shown.waiting("w", NEED, [Array(A, (one, three))]).trial_group is None
    assert shown.waiting("w", NEED, [Array(A, (three,))]).trial_group is None
    whole = {"cpu/1": Demand(1.0, 10, 1.0, 5.0), "other": Demand(0.2, 10, 1.0, 5.0)}
    assert shown.waiting("w", whole, [Array(A, (one,))]).scaling.max_jobs == 1


def test_the_critical_path_includes_follow_up_training():
    fast, slow = profile({1: 0.5}, epoch_steps=4), profile({1: 50.0}, epoch_steps=4)
    known = {(A, "cpu/1"): fast, (A, "slow"): slow}
    needs = NEED | {"slow": NEED["cpu/1"]}
    low, high, last, unknown = (member(number) for number in range(4))
    groups = [
        TrialGroup((low.trial, unknown.trial), Budget(1), "0", epochs_ahead=8),
        TrialGroup((high.trial,), Budget(3), "1", epochs_ahead=6),
        TrialGroup((last.trial,), Budget(9), "2"),
    ]

    def path(key, *members):
        shown = views(JobTracker(), known=lambda key, kind: known.get((key, kind)), groups=groups)
        return shown.waiting("w", needs, [Array(key, members)]).critical_path

    own, epoch = NEED["cpu/1"].seconds, Cost(fast).seconds([1])
    assert path(A, low) == pytest.approx(own + 8 * epoch)
    assert path(A, low, high, last) == pytest.approx(own + 8 * epoch), "the longest that anybody waits for"
    assert path(A, last) == 0.0
    assert path(B, unknown) == 0.0
    groups.append(TrialGroup((low.trial,), Budget(9), "2"))
    assert path(A, low) == 0.0, "it has come to the last rung"


@pytest.mark.parametrize(
    ("left", "sharing", "wanted"),
    [
        (4, "kept", 5.0 + 8 * 2.0),
        (4, "window", 5.0 + 8 * (2.0 + 0.4)),
        (1, "kept", 5.0 * 1 / 4 + 8 * 2.0),
        (1, "window", 5.0 * 1 / 4 + 8 * (2.0 + 0.4)),
    ],
    ids=["as long as the job", "with samples to fetch", "done before the job is", "and samples to fetch"],
)
def test_follow_up_training_begins_at_the_end_of_its_trial(left, sharing, wanted):
    known = replace(profile({1: 0.5}, epoch_steps=4), fetch_seconds=0.1, sample_sharing=sharing)
    rung, long = member(1, target=left), member(2, target=4)
    groups = [TrialGroup((rung.trial,), Budget(left), "0", epochs_ahead=8), TrialGroup((long.trial,), Budget(4))]
    assert NEED["cpu/1"].seconds == 5.0
    shown = views(JobTracker(), known=lambda key, kind: known, groups=groups)
    found = shown.waiting("w", NEED, [Array(A, (rung,)), Array(B, (long,))]).critical_path
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("crowding", "arrays", "max_jobs", "alpha"),
    [
        ({}, 1, 2, 1.0),
        ({2: 1.0, 3: 1.0}, 1, 4, 1.0),
        ({2: 1.2, 3: 3.0}, 1, 2, 1.2),
        ({2: 2.0}, 1, 1, 2.0),
        ({2: 2.0}, 2, 2, 1.0),
    ],
    ids=["not seen", "one more may be tried", "a third does not pay", "nor does a second", "not of a pack"],
)
def test_sharing_follows_measured_crowding(crowding, arrays, max_jobs, alpha):
    known = profile({1: 1.0}, compute=0.4, crowding=crowding)
    some = [Array(A, (member(number),)) for number in range(arrays)]
    view = views(JobTracker(), known=lambda key, kind: known).waiting("w", NEED, some)
    assert (view.scaling.max_jobs, view.scaling.alpha) == (max_jobs, pytest.approx(alpha))


@pytest.mark.parametrize(
    ("known", "arrays", "target", "trial"),
    [
        ({"compute": 0.9}, 1, 10, True),
        ({"compute": 0.5}, 1, 10, False),
        ({"compute": 0.9, "crowding": {2: 2.5}}, 1, 10, False),
        ({"compute": 0.9, "crowding": {2: 1.2}}, 1, 10, False),
        ({"compute": 0.9}, 2, 10, False),
        ({"compute": 0.9}, 1, 4, False),
        (None, 1, 10, False),
    ],
    ids=["c is 1", "two fit", "two were slow", "two were fast", "a pack", "it ends too soon", "no profile"],
)
def test_one_more_may_be_tried_where_nothing_is_known(known, arrays, target, trial):
    found = None if known is None else profile({1: 1.0}, **known)
    need = {"cpu/1": Demand(0.9 if known is None else known["compute"], 10, 1.0, 5.0)}
    some = [Array(A, (member(number, target=target),)) for number in range(arrays)]
    view = views(JobTracker(), known=lambda key, kind: found).waiting("w", need, some)
    assert view.scaling.trial == trial


def test_harm_is_known_once_two_were_measured():
    known = profile({1: 1.0}, compute=0.9, crowding={2: 2.5})
    view = views(JobTracker(), known=lambda key, kind: known).waiting("w", NEED, [Array(A, (member(1),))])
    assert (view.scaling.max_jobs, view.scaling.alpha) == (1, pytest.approx(2.5))


def test_the_oldest_job_comes_first_whether_it_runs_or_is_suspended():
    tracker = JobTracker()
    older, younger = job("older", member(1)), job("younger", member(2))
    where = cluster(*slots(2))
    running = [(younger, where.device("cpu/1:0")), (older, where.device("cpu/1:1"))]
    tracker.register_running(running, 3.0, views(tracker, 3.0, arrived={1: 1.0, 2: 2.0}).arrived)
    suspend(tracker, older, 9.0)
    shown = views(tracker, 10.0)
    found = shown.by_arrival([seen(tracker, younger, 10.0), shown.suspended(older, NEED)])
    assert [view.id for view in found] == ["older", "younger"]
