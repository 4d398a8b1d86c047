"""States and queue order of the trials of a study."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.array import Array, FusionKey, Member
from shoal.core.job import Job
from shoal.core.trial import Report, Trial, TrialState
from shoal.study.trials import TrialRecord, TrialTable


def test_a_late_report_of_a_trial_that_waits_leaves_it_to_the_end_of_its_job() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    trials.move(TrialRecord(trial, 9), TrialState.PENDING)
    trials.begin("job", [Member(trial, 0, 9)])
    assert trials.requeue("job", {0}, failed=True) == {0}
    assert trials.reported(Report(0, 1, {"loss": 1.0}, 1.0, TrialState.RUNNING))
    assert trials[0].state is TrialState.RUNNING
    assert trials.requeue("job", None, failed=False) == {0}
    assert (trials[0].state, trials[0].epoch, trials[0].failures) == (TrialState.PENDING, 1, 1)


def test_a_report_is_news_once() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    trials.move(TrialRecord(trial, 2), TrialState.PENDING)
    trials.begin("job", [Member(trial, 0, 2)])
    running, paused, failed = (
        Report(0, 2, {"loss": 1.0}, 1.0, state) for state in (TrialState.RUNNING, TrialState.PAUSED, TrialState.FAILED)
    )
    news = [trials.reported(report) for report in (running, running, paused, paused, running, failed, failed)]
    assert news == [True, False, True, False, False, True, False]


def test_a_reason_is_told_when_it_changes_and_again_after_the_trial_ran() -> None:
    trials, some = TrialTable(), [Trial(number, {}, 0, 0) for number in (0, 1)]
    for trial in some:
        trials.move(TrialRecord(trial, 9), TrialState.PENDING)
    busy = dict.fromkeys((0, 1), "all devices are busy")
    assert trials.explain(busy) == busy
    assert trials.explain(busy) == {}
    assert trials.explain(busy | {1: "is being measured"}) == {1: "is being measured"}
    trials.begin("job", [Member(some[0], 0, 9)])
    trials.requeue("job", None, failed=False)
    assert trials.explain(busy) == busy


def test_changes_count_what_a_plan_depends_on() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    seen = [trials.changes]
    trials.move(TrialRecord(trial, 2), TrialState.PENDING)
    seen.append(trials.changes)
    trials.begin("job", [Member(trial, 0, 2)])
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
    trials.begin("job", members)
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
    trials.begin("job", members)

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
    assert [x.number for x in trials.waiting(2)] == [0, 1]
    trials.begin("job", [Member(trial, 0, 9) for trial in some[:2]])
    assert [x.number for x in trials.waiting(3)] == [2, 3, 4]
    trials.requeue("job", {0}, failed=True)
    trials.requeue("job", {1}, failed=False)
    trials.paused = {2}
    assert [x.number for x in trials.waiting(2)] == [1, 3]
    assert [x.number for x in trials.waiting()] == [1, 3, 4, 5, 0]
    trials.paused = set()
    assert [x.number for x in trials.waiting(3)] == [1, 2, 3]
    assert [x.number for x in trials.in_order({0, 5, 2})] == [2, 5, 0]
    assert [x.number for x in trials.waiting(99)] == [1, 2, 3, 4, 5, 0]


NUMBERS = st.integers(0, 4)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["waits", "runs", "fails", "is paused", "goes on"]), NUMBERS),
        st.tuples(st.sampled_from(["the first", "all"]), st.integers(0, 6)),
    ),
    max_size=30,
)


def waiting_in(trials: TrialTable) -> set[int]:
    return {x.number for x in trials if x.state is TrialState.PENDING} - trials.paused


@given(CHANGES)
def test_the_first_that_wait_are_those_of_all_that_wait(changes: list[tuple[str, int]]) -> None:
    trials = TrialTable()
    for number in range(5):
        trials.move(TrialRecord(Trial(number, {}, 0, 0), 9), TrialState.PENDING)
    for what, number in [*changes, ("the first", 5)]:
        match what:
            case "waits":
                trials.move(trials[number], TrialState.PENDING)
            case "runs":
                trials.begin("job", [Member(trials[number].trial, 0, 9)])
            case "fails":
                trials.requeue("job", {number}, failed=True)
            case "is paused":
                trials.paused.add(number)
            case "goes on":
                trials.paused.discard(number)
            case "the first":
                expected = sorted((trials[x].failures, x) for x in waiting_in(trials))[:number]
                assert [(x.failures, x.number) for x in trials.waiting(number)] == expected
            case "all":
                assert {x.number for x in trials.waiting()} == waiting_in(trials)
