"""States and queue order of the trials of a study."""

from dataclasses import replace
from math import nan

from hypothesis import given
from hypothesis import strategies as st
from planner_samples import place

from shoal.core.array import Array, FusionKey, Member
from shoal.core.epoch_order import EpochOrder
from shoal.core.job import Job
from shoal.core.objective import Objective
from shoal.core.rows import TrialRow
from shoal.core.trial import Report, Trial, TrialState
from shoal.plan.waiting import OutOfMemoryLimit
from shoal.study.trials import TrialRecord, TrialTable


def test_a_late_report_of_a_trial_that_waits_leaves_it_to_the_end_of_its_job() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    trials.move(TrialRecord(trial, 9), TrialState.PENDING)
    trials.begin("job", "cpu:0", [Member(trial, 0, 9)])
    assert trials.requeue("job", {0}, failed=True) == {0}
    assert trials.reported(Report(0, 1, {"loss": 1.0}, 1.0, TrialState.RUNNING))
    assert trials[0].state is TrialState.RUNNING
    assert trials.requeue("job", None, failed=False) == {0}
    assert (trials[0].state, trials[0].epoch, trials[0].failures) == (TrialState.PENDING, 1, 1)


def test_a_report_is_news_once() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    trials.move(TrialRecord(trial, 2), TrialState.PENDING)
    trials.begin("job", "cpu:0", [Member(trial, 0, 2)])
    running, paused, failed = (
        Report(0, 2, {"loss": 1.0}, 1.0, state) for state in (TrialState.RUNNING, TrialState.PAUSED, TrialState.FAILED)
    )
    news = [trials.reported(report) for report in (running, running, paused, paused, running, failed, failed)]
    assert news == [True, False, True, False, False, True, False]


def test_a_trial_ranks_by_its_best_epoch_or_by_its_last() -> None:
    goals = (Objective("a", "max"), Objective("b", "min"))
    curve = [(1, 0.5, 2.0), (2, 0.75, 5.0), (3, 0.75, 1.0), (4, 0.25, 0.5), (5, nan, 0.1)]

    def record_of(*objectives: Objective) -> TrialRecord:
        trials = TrialTable(goals, (), EpochOrder(objectives))
        trials.move(TrialRecord(Trial(0, {}, 0, 0), 9), TrialState.PENDING)
        trials.begin("job", "cpu:0", [])
        for epoch, a, b in curve:
            trials.reported(Report(0, epoch, {"a": a, "b": b}))
        trials.reported(Report(0, 6, {"a": 1.0, "b": 0.0}, state=TrialState.FAILED))
        return trials[0]

    best = record_of(*goals)
    assert (best.best_epoch, best.objective, best.ranked) == (2, 0.75, {"a": 0.75, "b": 5.0})
    assert best.best == {"a": 1.0, "b": 0.0}, "the best of each, of any epoch"
    assert (record_of(*goals[::-1]).best_epoch, record_of(*goals[::-1]).ranked["a"]) == (4, 0.25)
    last = record_of()
    assert (last.best_epoch, last.objective, last.ranked) == (None, 1.0, last.metrics)
    assert TrialRecord.of(best.row, {}, "").row == best.row


def test_a_reason_is_told_when_it_changes_and_again_after_the_trial_ran() -> None:
    trials, some = TrialTable(), [Trial(number, {}, 0, 0) for number in (0, 1)]
    for trial in some:
        trials.move(TrialRecord(trial, 9), TrialState.PENDING)
    busy = dict.fromkeys((0, 1), "all devices are busy")

    def changed(reasons: dict[int, str]) -> dict[int, str]:
        trials.explain(reasons)
        return {row.number: row.reason for row in trials.take_rows() if isinstance(row, TrialRow)}

    assert changed(busy) == busy
    assert changed(busy) == {}
    assert changed(busy | {1: "is being measured"}) == {1: "is being measured"}
    trials.begin("job", "cpu:0", [Member(some[0], 0, 9)])
    trials.requeue("job", None, failed=False)
    assert changed(busy) == busy


def test_changes_count_what_a_plan_depends_on() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    seen = [trials.changes]
    trials.move(TrialRecord(trial, 2), TrialState.PENDING)
    seen.append(trials.changes)
    trials.begin("job", "cpu:0", [Member(trial, 0, 2)])
    seen.append(trials.changes)
    assert seen == sorted(set(seen))
    trials.reported(Report(0, 1, {"loss": 1.0}, 1.0, TrialState.RUNNING))
    assert trials.changes == seen[-1]  # how far it is says nothing new
    trials.reported(Report(0, 2, {"loss": 1.0}, 1.0, TrialState.PAUSED))
    assert trials.changes > seen[-1]


def test_a_job_is_shown_with_the_members_that_it_has_now() -> None:
    trials, some = TrialTable(), [Trial(number, {}, 0, 0) for number in (0, 1)]
    for trial in some:
        trials.move(TrialRecord(trial, 3), TrialState.PENDING)
    members = tuple(Member(trial, 0, 3) for trial in some)
    job = Job("job", (Array(FusionKey("net", "data", 32), members),))
    trials.begin("job", "cpu:0", members)
    assert trials.present(job) == job
    trials.reported(Report(0, 1, {"loss": 1.0}, 1.0, TrialState.RUNNING))
    assert [member.start for member in trials.present(job).members] == [1, 0]
    trials.reported(Report(1, 3, {"loss": 1.0}, 1.0, TrialState.PAUSED))
    trials.left("job", {1})
    assert [member.trial.number for member in trials.present(job).members] == [0]
    assert trials.present(replace(job, arrays=())).members == ()


def test_an_ended_trial_is_a_member_of_its_job_until_the_job_lets_it_go() -> None:
    trials, some = TrialTable(), [Trial(number, {}, 0, 0) for number in range(3)]
    for trial in some:
        trials.move(TrialRecord(trial, 3), TrialState.PENDING)
    members = tuple(Member(trial, 0, 3) for trial in some)
    job = Job("job", (Array(FusionKey("net", "data", 32), members),))
    trials.begin("job", "cpu:0", members)

    def present() -> list[int]:
        return [member.trial.number for member in trials.present(job).members]

    trials.move(trials[0], TrialState.STOPPED)
    assert present() == [0, 1, 2]
    before = trials.changes
    assert trials.requeue("job", {0}, failed=False) == set()
    assert present() == [1, 2]
    assert trials.changes > before  # a plan may use the memory
    for number in (1, 2):
        trials.move(trials[number], TrialState.STOPPED)
    assert present() == []  # the job is about to end
    assert trials.requeue("job", None, failed=False) == set()


def test_the_first_that_wait_are_those_that_failed_least_then_by_number() -> None:
    trials, some = TrialTable(), [Trial(number, {}, 0, 0) for number in range(6)]
    for trial in reversed(some):
        trials.move(TrialRecord(trial, 9), TrialState.PENDING)
    assert [x.number for x in trials.waiting()] == [0, 1, 2, 3, 4, 5]
    trials.begin("job", "cpu:0", [Member(trial, 0, 9) for trial in some[:2]])
    assert [x.number for x in trials.waiting()] == [2, 3, 4, 5]
    trials.requeue("job", {0}, failed=True)
    trials.requeue("job", {1}, failed=False)
    trials.pause({2}, "ada")
    assert [x.number for x in trials.waiting()] == [1, 3, 4, 5, 0]
    trials.release({2})
    assert [x.number for x in trials.in_order({0, 5, 2})] == [2, 5, 0]
    assert [x.number for x in trials.waiting()] == [1, 2, 3, 4, 5, 0]


KEYS = [FusionKey("one", "", 1), FusionKey("other", "", 1)]
NUMBERS = st.integers(0, 4)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("waits", "runs", "reports", "is promoted", "fails", "is paused", "continues"),
                *("has a key", "is alone", "is limited", "is suspended"),
            )
        ),
        NUMBERS,
    ),
    max_size=30,
)


@given(CHANGES)
def test_the_classes_are_those_of_all_trials_that_wait(changes: list[tuple[str, int]]) -> None:
    """They are what filing every trial anew would give, in the order of the queue."""
    trials, suspended = TrialTable(), set[int]()
    for number in range(5):
        trials.move(TrialRecord(Trial(number, {}, 0, 0), 9), TrialState.PENDING)
    for now, (what, number) in enumerate(changes):
        record = trials[number]
        match what:
            case "waits":
                trials.move(record, TrialState.PENDING)
            case "runs":
                trials.begin("job", "cpu:0", [Member(record.trial, 0, 9)])
            case "reports":
                trials.reported(Report(number, record.epoch + 1, {"loss": 1.0}, 1.0, TrialState.PAUSED))
            case "is promoted" if record.state is TrialState.PAUSED:
                record.target += 9
                trials.move(record, TrialState.PENDING)
            case "fails":
                trials.requeue("job", {number}, failed=True)
            case "is paused":
                trials.pause({number}, "ada")
            case "continues":
                trials.release({number})
            case "has a key":
                trials.set_keys({number: KEYS[number % 2]})
            case "is alone":
                trials.isolate(record)
            case "is limited":
                trials.set_oom_limit(record, OutOfMemoryLimit(2))
            case "is suspended":
                suspended ^= {number}
                members = tuple(trials[each].member for each in sorted(suspended))
                trials.suspend([Job("suspended", (Array(KEYS[0], members),))])
        found = trials.classes(float(now))
        expected = [x for x in trials.waiting() if x.key is not None and x.number not in suspended]
        assert {m.trial.number for each in found for m in each.members} == {x.number for x in expected}
        assert [*map(place, found)] == sorted(map(place, found))
        for each in found:
            records = [trials[member.trial.number] for member in each.members]
            assert [x.number for x in records] == sorted(x.number for x in records)
            assert {(2 * x.failures, x.key, x.number in trials.own_job_trials) for x in records} == {
                (each.rank, each.key, each.own_job)
            }
            assert {trials.oom_limits.get(x.number) for x in records} == {each.oom_limit}
            assert {(x.epoch, x.target - x.epoch) for x in records} == {(each.start, each.epochs)}
            assert each.members == tuple(x.member for x in records)
        assert trials.arrived.keys() == {x.number for x in expected}
        waits = {x.number for x in trials if x.state is TrialState.PENDING and x.key is None}
        assert trials.without_key == waits


def test_a_trial_has_waited_since_it_was_first_in_a_class() -> None:
    trials = TrialTable()
    for number in range(2):
        trials.move(TrialRecord(Trial(number, {}, 0, 0), 9), TrialState.PENDING)
    trials.set_keys({0: KEYS[0]})
    trials.classes(1.0)
    trials.set_keys({1: KEYS[0]})
    trials.classes(2.0)
    assert trials.arrived == {0: 1.0, 1: 2.0}
    trials.begin("job", "cpu:0", [Member(trials[0].trial, 0, 9)])
    trials.requeue("job", None, failed=False)
    trials.classes(3.0)
    assert trials.arrived == {0: 3.0, 1: 2.0}


def test_a_trial_that_waits_says_for_whom() -> None:
    """A trial at the end of a budget waits for the algorithm, one that a user has paused for that user."""
    trials = TrialTable((Objective("accuracy", "max"),))
    trials.move(TrialRecord(Trial(3, {}, 0, 0), 9), TrialState.PENDING)
    trials.reported(Report(3, 9, {"accuracy": 0.5}, state=TrialState.PAUSED))
    record = trials[3]
    assert record.reason == "waiting for others at epoch 9"
    trials.pause([3], "ada")
    assert (record.row.reason, record.row.paused_by) == ("waiting for others at epoch 9, then paused by ada", "ada")
    assert trials.take_rows() == [record.trial, record.row]
    trials.release([3])
    assert (record.row.reason, record.row.paused_by) == ("waiting for others at epoch 9", "")
    assert trials.take_rows() == [record.row]
    trials.move(record, TrialState.PENDING)
    assert record.reason == ""
