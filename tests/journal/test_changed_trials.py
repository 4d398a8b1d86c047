"""What has changed of the trials, and the values of one metric: as if all were read again."""

import pytest
from journal_samples import create, group, job, report

from shoal.core.command import Intervened
from shoal.core.trial import TrialState
from shoal.journal.codec import metric_values
from shoal.journal.statistics import StudyStatistics


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
        journal.record_intervention(Intervened("r", "retry", (1,)))
        journal.requeue_failed([1])
        assert changed(journal) == [(1, "pending")]
        journal.record_reports("2", [report(1, 2, state=TrialState.FAILED)])
        assert changed(journal) == [(1, "failed")]
        journal.record_intervention(Intervened("s", "retry", (1,)))
        journal.requeue_failed([1])
        journal.record_reports("3", [report(1, 3, state=TrialState.FAILED)])  # between two calls
        assert changed(journal) == [(1, "failed")]
        journal.record_proposal(1, [group([2], 3)])  # a number between those that are known and those that users add
        assert changed(journal) == [(2, "pending")]
        assert journal.changed_trials({}) == journal.trials()


def test_values_of_a_metric_are_those_of_all_reports(tmp_path) -> None:
    with create(tmp_path) as journal:
        journal.record_proposal(2, [group(range(2), 3000)])
        for epoch in range(1, 1502):
            journal.record_reports("1", [report(0, epoch, epoch / 4000), report(1, epoch, epoch / 2000)])
        values = [value for _, value in StudyStatistics(journal).values()]
    assert values == [epoch / size for epoch in range(1, 1502) for size in (4000, 2000)]


@pytest.mark.parametrize(
    ("texts", "hint"),
    [
        (['{"a": 1}', '{"a": "x"}'], "metric 'a' is 'x'"),
        (['{"a": 1}, {"a": 2}'], "not one JSON object"),
        (['{"a": 1}', "[]"], "Expected `object`, got `array`"),
        (['{"a": 1}', "{"], "Expecting"),
    ],
)
def test_metrics_that_are_damaged_are_refused(texts, hint) -> None:
    with pytest.raises(ValueError, match=hint):
        metric_values(texts, "a")


def test_a_metric_may_be_missing_or_not_a_number() -> None:
    found = metric_values(['{"a": NaN}', '{"b": 1}', '{"a": -Infinity}'], "a")
    assert [str(value) for value in found] == ["nan", "None", "-inf"]
