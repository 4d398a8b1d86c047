"""What has changed of the trials, and the best values: as if all were read again."""

import math

from journal_samples import create, group, job, report

from shoal.core.rows import Intervention
from shoal.core.trial import TrialState


def test_each_change_of_a_trial_is_returned_once(tmp_path) -> None:
    known: dict[int, int] = {}

    def changed(journal):
        return [(row.number, str(row.state)) for row in journal.changed_trials(known)]

    with create(tmp_path) as journal:
        assert changed(journal) == []
        journal.record_proposal(2, [group(range(2), 3)])
        assert changed(journal) == [(0, "pending"), (1, "pending")]
        assert changed(journal) == []
        journal.record_job_start(job("1", [0]), "cpu:0")
        assert changed(journal) == [(0, "running")]
        journal.record_reports("1", [report(0, 3, state=TrialState.COMPLETE), report(1, 1, state=TrialState.FAILED)])
        assert changed(journal) == [(0, "complete"), (1, "failed")]
        assert changed(journal) == []
        journal.record_intervention(Intervention("r", "retry", (1,)))
        journal.requeue_failed([1])
        assert changed(journal) == [(1, "pending")]
        journal.record_reports("2", [report(1, 2, state=TrialState.FAILED)])
        assert changed(journal) == [(1, "failed")]
        journal.record_intervention(Intervention("s", "retry", (1,)))
        journal.requeue_failed([1])
        journal.record_reports("3", [report(1, 3, state=TrialState.FAILED)])  # between two calls
        assert changed(journal) == [(1, "failed")]
        journal.record_proposal(1, [group([2], 3)])  # a number between those that are known and those that users add
        assert changed(journal) == [(2, "pending")]
        assert journal.changed_trials({}) == journal.trials()


def test_best_values_are_those_of_the_best_trial_where_they_have_changed(tmp_path) -> None:
    with create(tmp_path) as journal:
        journal.record_proposal(2, [group(range(2), 9)])
        for epoch, values in enumerate([(0.5, 0.25), (math.nan, 0.5), (0.625, 0.75), (0.625, 0.5)], start=1):
            journal.record_reports("1", [report(number, epoch, value) for number, value in enumerate(values)])
        assert [value for _, value in journal.best_values()] == [0.5, 0.625, 0.75]
        times = [time for time, _ in journal.best_values()]
    with create(tmp_path / "min", mode="min") as journal:
        journal.record_proposal(2, [group(range(2), 9)])
        for epoch, value in enumerate([0.5, math.inf, -math.inf, 0.25], start=1):
            journal.record_reports("1", [report(0, epoch, value)])
        assert [value for _, value in journal.best_values()] == [0.5, -math.inf]
    assert times == sorted(times)
    assert times[1] == times[2]
