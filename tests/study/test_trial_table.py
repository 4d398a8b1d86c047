"""Where the trials of a study stand."""

from shoal.core.array import Member
from shoal.core.trial import Report, Trial, TrialState
from shoal.study.trials import TrialRecord, TrialTable


def test_a_late_report_of_a_trial_that_waits_leaves_it_to_the_end_of_its_job() -> None:
    trials, trial = TrialTable(), Trial(0, {}, 0, 0)
    trials.move(TrialRecord(trial, 9), TrialState.PENDING)
    trials.begin("job", [Member(trial, 0, 9)])
    assert trials.wait_again("job", {0}, failed=True) == {0}
    assert trials.reported(Report(0, 1, {"loss": 1.0}, 1.0, TrialState.RUNNING))
    assert trials[0].state is TrialState.RUNNING
    assert trials.wait_again("job", None, failed=False) == {0}
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
