"""Records are read back by the writer, by a reader, and after the file was opened again."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_samples import SPEC, create, group, job, report, trial
from support.recorded import RecordedJournal

from shoal.core.activity import Activity
from shoal.core.array import FusionKey
from shoal.core.errors import JournalError
from shoal.core.event import Proven, TurnStats
from shoal.core.job import Purpose
from shoal.core.objective import lower_is_better, merge_best, objectives
from shoal.core.rows import CheckRow, JobRow, Proposal, Reservation, TrialRow, Verdict
from shoal.core.trial import Budget, Check, Decision, Report, Trial, TrialGroup, TrialState
from shoal.journal.codec import metrics_of, metrics_text
from shoal.journal.statistics import StudyStatistics

PENDING, RUNNING, PAUSED = TrialState.PENDING, TrialState.RUNNING, TrialState.PAUSED
COMPLETE, STOPPED, FAILED = TrialState.COMPLETE, TrialState.STOPPED, TrialState.FAILED


@pytest.fixture
def journal(tmp_path):
    with create(tmp_path / "study") as journal:
        yield journal


def states(journal):
    return [row.state for row in journal.trials()]


def test_a_reader_sees_what_the_study_is(journal):
    with RecordedJournal.read(journal.directory) as view:
        assert view.spec == SPEC
        assert view.blob("task") == b"a task"
        assert view.blob("algorithm") == b"an algorithm"


def test_a_reader_cannot_write(journal):
    with RecordedJournal.read(journal.directory) as view, pytest.raises(JournalError, match="readonly"):
        view.tables.rows("DELETE FROM study")


def test_a_trial_from_proposal_to_promotion_to_its_end(journal):
    journal.record_proposal(4, [group([0, 1], 1, "rung 0")])
    assert states(journal) == [PENDING, PENDING]
    journal.record_job_start(job("1", [0, 1]), "cpu:0")
    assert states(journal) == [RUNNING, RUNNING]
    journal.record_reports("1", [report(0, 1, 0.5, PAUSED), report(1, 1, 0.25, PAUSED)])
    assert states(journal) == [PAUSED, PAUSED]
    journal.record_decisions([Decision(1, STOPPED, "rank 2 of 2")])
    journal.record_proposal(1, [group([0], 3, "rung 1")])
    assert states(journal) == [PENDING, STOPPED]
    journal.record_job_end("1", "finished", failed=False)
    journal.record_job_start(job("2", [0]), "cpu:1")
    journal.record_reports("2", [report(0, 2, 0.75), report(0, 3, 0.625, PAUSED)])
    journal.record_decisions([Decision(0, COMPLETE)])

    first, second = journal.trials()
    assert first.trial == trial(0)
    assert (first.state, first.epoch, first.target, first.seconds) == (COMPLETE, 3, 3, 0.75)
    assert (first.device, first.job) == ("cpu:1", "2")
    assert first.metrics == {"accuracy": 0.625, "valid_loss": 0.375}
    assert first.best == {"accuracy": 0.75, "valid_loss": 0.25}
    assert (first.objective, first.best_epoch) == (0.75, 2)
    assert (second.state, second.reason, second.epoch, second.target) == (STOPPED, "rank 2 of 2", 1, 1)
    assert [(seen.epoch, seen.state) for seen in journal.curve(0)] == [(1, PAUSED), (2, RUNNING), (3, PAUSED)]


def test_a_suspension_shows_in_the_rows_of_both_jobs(journal):
    journal.record_proposal(4, [group([0, 1], 3)])
    journal.record_job_start(job("1", [0, 1]), "cpu:0")
    journal.record_preemption("1", "suspended by the policy")
    (row,) = journal.jobs(running=True)
    assert (row.outcome, row.message) == ("", "suspended by the policy")
    assert journal.record_job_end("1", "suspended", failed=False) == {0: 0, 1: 0}
    assert states(journal) == [PENDING, PENDING]
    journal.record_job_start(replace(job("2", [0, 1]), resumes="1"), "cpu:1")
    assert states(journal) == [RUNNING, RUNNING]
    journal.record_preemption("2", "suspended by the policy")
    journal.record_job_end("2", "suspended", failed=False)
    journal.record_job_start(replace(job("3", [0, 1]), resumes="2"), "cpu:1")
    journal.record_job_end("3", "crashed", "killed", failed=True)
    assert [(row.outcome, row.message) for row in journal.jobs()] == [
        ("suspended", "suspended by the policy"),
        ("suspended", "continues with 1\nsuspended by the policy"),
        ("crashed", "continues with 2\nkilled"),
    ]


def test_turns_and_the_use_of_gpus_are_there_after_opening_again(journal):
    first, second = TurnStats(2.0, 1.0, 1.5, 3, 0.5), TurnStats(math.inf, math.inf, math.inf, 1, 0.5)
    journal.record_quantum("job-1", 0, first)
    journal.record_quantum("job-2", 1, second)
    for memory in (5, 5, 6):
        journal.record_telemetry({"cuda:0": (71, memory), "cuda:1": (None, 3)})
    journal.close()
    with RecordedJournal.open(journal.directory) as again:
        turns = [turn for job in ("job-1", "job-2") for turn in again.quanta()[job]]
        assert [(turn.job, turn.number, turn.losses) for turn in turns] == [("job-1", 0, first), ("job-2", 1, second)]
        assert [(x.device, x.utilisation, x.memory) for x in again.telemetry()] == [
            ("cuda:0", 71, 5),
            ("cuda:1", None, 3),
            ("cuda:0", 71, 6),
        ]


def test_checks_are_there_after_opening_again(journal):
    key = FusionKey("net", "d", 32)
    equal = (
        Check(0, 0, 1, "step, plain", 0.5),
        Check(0, 0, 2, "step, eager", 0.25),
        Check(0, 0, 40, "validation", 0.0),
    )
    journal.record_checks(Proven("job-1", key, {0: 0, 1: 0}, equal))
    journal.record_checks(Proven("job-2", key, {1: 3, 2: 4, 3: 4}, (), "differs\ud800", step=5))
    journal.close()
    with RecordedJournal.open(journal.directory) as again:
        assert again.checks() == [
            CheckRow("job-1", "net x 32", 0, 2, 0, 1, "step, plain", 0.5),
            CheckRow("job-1", "net x 32", 0, 2, 0, 2, "step, eager", 0.25),
            CheckRow("job-1", "net x 32", 0, 2, 0, 40, "validation", 0.0),
            CheckRow("job-1", "net x 32", 1, 2, 0, 0, ""),
            CheckRow("job-2", "net x 32", 1, 3, 3, 5, "refused", None, "differs\\ud800"),
            CheckRow("job-2", "net x 32", 2, 3, 4, 5, "refused", None, "differs\\ud800"),
            CheckRow("job-2", "net x 32", 3, 3, 4, 5, "refused", None, "differs\\ud800"),
        ]
        assert again.checks(1) == again.checks()[3:5]
        assert again.checks(7) == []
        assert again.verdicts() == [
            Verdict("net x 32", (0, 1, 2, 3), 3, 3, 0.5, "step, eager", "differs\\ud800", epoch=3, step=5)
        ]


def test_a_trial_of_an_array_is_recorded_once_without_a_check(journal):
    for _ in range(2):
        journal.record_checks(Proven("job-1", FusionKey("net", "d", 32), {0: 0, 1: 0}))
    assert journal.checks() == [CheckRow("job-1", "net x 32", number, 2, 0, 0, "") for number in (0, 1)]
    assert journal.verdicts("net x 32") == [Verdict("net x 32", (0, 1), members=2)]
    assert journal.verdicts("other") == []


def test_everything_is_there_after_opening_again(journal):
    journal.record_proposal(4, [group([0, 1], 1)])
    journal.record_job_start(job("1", [0, 1]), "cpu:0")
    journal.record_reports("1", [report(0, 1, math.nan, PAUSED)])
    before = journal.trials(), list(journal.events()), journal.jobs()
    journal.close()
    with RecordedJournal.open(journal.directory) as again:
        assert repr((again.trials(), list(again.events()), again.jobs())) == repr(before)


def test_the_newest_checkpoint_of_each_trial_is_there_after_opening_again(journal):
    journal.record_proposal(3, [group([0, 1, 2], 3)])
    named = [(0, 1, "000001-000000"), (1, 1, "000001-000000"), (0, 2, "000001-000007"), (0, 3, ""), (2, 1, "")]
    for number, epoch, name in named:
        journal.record_reports("1", [replace(report(number, epoch, 0.5), checkpoint=name)])
    journal.close()
    with RecordedJournal.open(journal.directory) as again:
        assert again.checkpoints() == {0: "000001-000007", 1: "000001-000000"}


def test_events_come_in_the_order_in_which_they_drove_the_algorithm(journal):
    first, second = [group([0, 1], 1, "rung 0")], [group([1], 3, "rung 1"), group([2], 2)]
    journal.record_proposal(5, first)
    journal.record_proposal(5, [])
    journal.record_reports("1", [report(1, 1, 0.5, PAUSED), report(0, 1, 0.25, PAUSED)])
    directory = journal.directory
    journal.close()
    with RecordedJournal.open(directory) as again:
        again.record_proposal(2, second)
        again.record_reports("2", [report(2, 1)])
        assert list(again.events()) == [
            Proposal(5, tuple(first)),
            report(1, 1, 0.5, PAUSED),
            report(0, 1, 0.25, PAUSED),
            Proposal(2, tuple(second)),
            report(2, 1),
        ]


@pytest.mark.parametrize(
    ("before", "again", "news"),
    [
        pytest.param([], report(0, 1), True, id="first"),
        pytest.param([report(0, 1)], report(0, 2), True, id="next epoch"),
        pytest.param([report(0, 1)], report(0, 1), False, id="repeated"),
        pytest.param([report(0, 1), report(0, 2)], report(0, 1), False, id="repeated after a later one"),
        pytest.param([report(0, 1)], report(0, 1, 0.9), False, id="repeated with other values"),
        pytest.param([report(0, 1)], report(0, 1, state=PAUSED), True, id="now paused there"),
        pytest.param([report(0, 1)], Report(0, 1, state=FAILED), True, id="now failed there"),
        pytest.param([report(0, 1, state=PAUSED)], report(0, 1, state=PAUSED), False, id="paused again"),
        pytest.param([report(0, 1, state=PAUSED)], report(0, 1), False, id="runs after it paused there"),
        pytest.param([Report(0, 1, state=FAILED)], report(0, 2), False, id="after it failed"),
    ],
)
def test_what_is_news_after_a_resume(journal, before, again, news):
    journal.record_proposal(1, [group([0], 3)])
    assert journal.record_reports("1", before) == before
    row = journal.trials()
    assert journal.record_reports("2", [again]) == ([again] if news else [])
    assert len(journal.curve(0)) == len(before) + news
    if not news:
        assert journal.trials() == row


def test_a_late_report_of_a_trial_that_was_stopped_changes_nothing(journal):
    journal.record_proposal(1, [group([0], 3)])
    journal.record_reports("1", [report(0, 1)])
    journal.record_decisions([Decision(0, STOPPED, "enough")])
    assert journal.record_reports("1", [report(0, 2)]) == []
    assert journal.trials()[0].reason == "enough"


def test_a_final_state_is_kept(journal):
    journal.record_proposal(1, [group([0], 3)])
    journal.record_reports("", [Report(0, 0, state=FAILED, reason="its model raised")])
    journal.record_decisions([Decision(0, COMPLETE)])
    assert (journal.trials()[0].state, journal.trials()[0].reason) == (FAILED, "its model raised")


@pytest.mark.parametrize(
    ("failed", "failures"), [pytest.param(True, 1, id="failed"), pytest.param(False, 0, id="stopped as asked")]
)
def test_trials_of_a_job_that_ended_early_wait_again(journal, failed, failures):
    journal.record_proposal(2, [group([0, 1], 2)])
    journal.record_job_start(job("1", [0, 1]), "cpu:0")
    journal.record_reports("1", [report(0, 2, state=PAUSED)])
    assert journal.record_job_end("1", "crashed", "killed by SIGKILL", failed=failed) == {1: failures}
    assert [(row.state, row.failures) for row in journal.trials()] == [(PAUSED, 0), (PENDING, failures)]
    ended = ("crashed", "killed by SIGKILL", Reservation(1003.0), {"s x 32": (0, 1)})
    assert journal.jobs() == [JobRow("1", Purpose.TRAIN, "cpu:0", (0, 1), 1003.0, 1005.0, *ended)]


def test_a_job_keeps_the_activities_that_it_reported(journal):
    journal.record_proposal(2, [group([0, 1], 2)])
    spent = {Activity.STEPS: 1.5, Activity.VALIDATION: 0.25}
    for name in ("1", "2"):
        journal.record_job_start(job(name, [0, 1]), "cpu:0")
    journal.record_job_end("1", "finished", failed=False, activities=spent)
    assert [row.activities for row in journal.jobs()] == [spent, {}]


def test_a_profile_job_leaves_its_trials_waiting(journal):
    journal.record_proposal(2, [group([0, 1], 2)])
    journal.record_job_start(job("1", [0, 1], purpose=Purpose.PROFILE), "cpu:0")
    assert states(journal) == [PENDING, PENDING]
    assert [row.purpose for row in journal.jobs(running=True)] == [Purpose.PROFILE]
    assert journal.record_job_end("1", "finished", failed=False) == {}
    assert journal.jobs(running=True) == []


def test_nothing_runs_after_requeue(journal):
    journal.record_proposal(2, [group([0, 1], 2)])
    journal.record_job_start(job("1", [0]), "cpu:0")
    journal.requeue_running()
    assert states(journal) == [PENDING, PENDING]
    assert [row.outcome for row in journal.jobs()] == ["orphaned"]
    assert journal.trials()[0].failures == 0


def test_reasons_of_waiting_are_written_only_for_trials_that_wait(journal):
    journal.record_proposal(3, [group([0, 1, 2], 2)])
    journal.record_job_start(job("1", [0]), "cpu:0")
    journal.record_waiting_reasons({0: "late", 1: "its model is being measured", 2: "its model is being measured"})
    assert StudyStatistics(journal).waiting() == {"its model is being measured": [1, 2]}
    assert journal.trials()[0].reason == ""
    changes = journal.tables.connection.total_changes
    journal.record_waiting_reasons({2: "all devices are busy"})
    assert StudyStatistics(journal).waiting() == {"all devices are busy": [2], "its model is being measured": [1]}
    assert journal.tables.connection.total_changes == changes + 1


LRS = ((0, 0.1), (1, object()))


def test_rows_of_which_one_cannot_be_stored_leave_nothing(journal):
    trials = [trial(number, lr=lr) for number, lr in LRS]
    rows = [TrialRow(new, PENDING, "", 0, 2, 0, "", "", 0.0, {}, {}, None) for new in trials]
    with pytest.raises(JournalError, match="the config of trial 1 cannot be stored"):
        journal.write([Proposal(1, (group([0], 2),), 1, 1.0), *trials, *rows])
    assert list(journal.events()) == []
    assert journal.trials() == []
    assert journal.jobs() == []
    journal.record_proposal(1, [group([0], 2)])
    assert states(journal) == [PENDING]


def test_a_row_of_a_trial_that_was_not_added_is_not_lost_in_silence(journal):
    rows = [TrialRow(trial(number), PENDING, "", 0, 2, 0, "", "", 0.0, {}, {}, None) for number in (0, 1)]
    with pytest.raises(JournalError, match="1 of 2 rows are of trials that it lacks"):
        journal.write([trial(0), *rows])
    assert journal.trials() == []


def test_a_reader_sees_a_step_when_it_is_whole(journal):
    with RecordedJournal.read(journal.directory) as view:
        with journal.transaction():
            journal.record_proposal(1, [group([0, 1], 2)])
            assert view.trials() == []
            journal.record_job_start(job("1", [0]), "cpu:0")
        assert states(view) == [RUNNING, PENDING]


def test_epochs_count_what_is_done_and_what_is_still_asked_for(journal):
    journal.record_proposal(4, [group([0, 1, 2, 3], 4)])
    journal.record_job_start(job("1", [0, 1, 2]), "cpu:0")
    journal.record_reports("1", [report(0, 4, state=PAUSED), report(1, 1), report(2, 2)])
    journal.record_decisions([Decision(2, STOPPED)])
    assert StudyStatistics(journal).epochs() == (7, 7 + 3 + 4)


def test_an_epoch_is_continued_if_another_job_reported_the_epoch_before(journal):
    journal.record_proposal(2, [group([0, 1], 4)])
    journal.record_job_start(job("1", [0, 1]), "cpu:0")
    journal.record_reports("1", [report(0, 1), report(1, 1), report(0, 2, state=PAUSED)])
    journal.record_reports("2", [report(0, 2)])
    journal.record_reports("3", [report(0, 3), report(0, 4)])
    statistics = StudyStatistics(journal)
    assert [statistics.continued_epochs(number) for number in (0, 1, 9)] == [{3}, set(), set()]


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 1)])
def test_the_best_is_finite_and_has_not_failed_and_is_the_oldest_of_equals(tmp_path, mode, best):
    with create(tmp_path, mode=mode) as journal:
        assert journal.best() is None
        journal.record_proposal(6, [group(range(6), 3)])
        journal.record_reports("1", [report(0, 1, math.nan), report(4, 1, 0.1), report(1, 1, 0.1), report(2, 1, 0.9)])
        journal.record_reports("1", [report(3, 1, 0.9), report(5, 1, 0.05 if mode == "min" else 0.99)])
        journal.record_reports("1", [Report(5, 1, state=FAILED)])
        assert journal.best().number == best
        assert journal.trials()[0].objective is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 5e-324, 0.1 + 0.2, 1.7976931348623157e308, -0.0])
def test_unusual_metrics_survive(journal, value):
    journal.record_proposal(1, [group([0], 1)])
    journal.record_reports("1", [report(0, 1, value)])
    (row,) = journal.trials()
    (seen,) = journal.curve(0)
    assert repr(row.metrics["accuracy"]) == repr(seen.metrics["accuracy"]) == repr(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(config=st.dictionaries(st.text(), json_values), seed=st.integers(0, 2**63 - 1))
def test_any_config_and_seed_survive(tmp_path_factory, config, seed):
    one = Trial(0, config, seed, seed)
    with create(tmp_path_factory.mktemp("study")) as journal:
        journal.record_proposal(1, [TrialGroup((one,), Budget(1))])
        assert journal.trials()[0].trial == one
        assert repr(journal.trials()[0].config) == repr(config)


def test_a_config_that_json_cannot_keep_is_refused(journal):
    with pytest.raises(JournalError, match=r"the config of trial 3 cannot be stored .*frozenset"):
        journal.record_proposal(1, [TrialGroup((trial(3, lr=frozenset()),), Budget(1))])


@pytest.mark.parametrize(
    ("name", "mode", "lower"),
    [
        ("accuracy", "max", False),
        ("accuracy", "min", True),
        ("valid_loss", "max", True),
        ("top5_error", "max", True),
        ("f1", "min", False),
    ],
)
def test_direction_of_a_metric(name, mode, lower):
    assert lower_is_better(name, objectives("accuracy", mode)) is lower


def test_best_values_pass_over_nan():
    goal = objectives("accuracy", "max")
    best = merge_best({"accuracy": 0.5}, {"accuracy": math.nan, "valid_loss": math.nan}, goal)
    assert best == {"accuracy": 0.5}
    assert merge_best(best, {"accuracy": 0.4, "valid_loss": 2.0}, goal) == {
        "accuracy": 0.5,
        "valid_loss": 2.0,
    }


def test_half_a_character_in_a_reason_is_kept_escaped(journal):
    journal.record_proposal(1, [group([0], 5)])
    journal.record_waiting_reasons({0: "a\udc80"})
    journal.record_job_start(job("1", [0]), "cpu:0")
    journal.record_job_end("1", "crashed", "b\udc80", failed=True)
    journal.record_reports("", [replace(report(0, 1, state=TrialState.FAILED), reason="c\udc80")])
    assert journal.trials()[0].reason == r"c\udc80"
    assert journal.jobs()[0].message == r"b\udc80"


@pytest.mark.parametrize(
    "metrics",
    [{"loss": 0.1}, {"loss": math.inf, "error": -math.inf}, {"steps": 2**70}, {"null": 1e-300, "mé": 3}, {}],
    ids=["number", "infinite", "beyond 64 bits", "names", "none"],
)
def test_metrics_are_read_as_they_are_written(metrics):
    assert metrics_of(metrics_text(metrics)) == metrics


def test_nan_is_read_as_it_is_written():
    assert math.isnan(metrics_of(metrics_text({"loss": math.nan}))["loss"])
