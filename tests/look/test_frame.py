"""`study.dataframe()`: the columns of the contract, in order."""

import math
import sys

import pytest
from report_samples import row

from shoal.core.errors import ShoalError
from shoal.core.rows import Verdict
from shoal.core.trial import Trial, TrialState
from shoal.look.frame import dataframe

pd = pytest.importorskip("pandas")


def test_one_row_a_trial():
    rows = [row(0, accuracy=0.5), row(1, TrialState.FAILED, accuracy=None, reason="its model raised", epoch=0)]
    expected = pd.DataFrame(
        {
            "trial": [0, 1],
            "state": ["complete", "failed"],
            "config.lr": [0.00123456, 0.00246912],
            "config.optimizer.name": ["sgd", "sgd"],
            "accuracy": [0.5, math.nan],
            "accuracy.best": [0.625, math.nan],
            "valid_loss": [0.25, math.nan],
            "valid_loss.best": [0.125, math.nan],
            "best_epoch": [2, math.nan],
            "epochs": [3, 0],
            "seconds": [1.25, 1.25],
            "device": ["cpu:0", "cpu:0"],
            "job": ["12", "12"],
            "proof": ["", "fused: equal at 1 check, largest difference 0"],
            "reason": ["", "its model raised"],
        }
    )
    proof = {1: Verdict("a x 32", (1,), members=4, checks=1)}
    pd.testing.assert_frame_equal(dataframe(rows, proof=proof), expected)


def test_what_ran_when_the_engine_was_killed_is_interrupted():
    rows = [row(0, TrialState.RUNNING), row(1, TrialState.PENDING)]
    assert dataframe(rows, runs=False)["state"].tolist() == ["interrupted", "waiting"]
    assert dataframe(rows, runs=True)["state"].tolist() == ["running", "waiting"]


def test_states_are_in_the_words_of_the_table():
    rows = [row(0, TrialState.PENDING), row(1, TrialState.PENDING, paused_by="ada"), row(2, TrialState.PAUSED)]
    assert dataframe(rows)["state"].tolist() == ["waiting", "paused", "waiting for others"]


def test_conditional_values_are_nan_where_they_do_not_apply():
    rows = [row(0, trial=Trial(0, {"a": 1}, 0, 0)), row(1, trial=Trial(1, {"b": [1, 2]}, 0, 0))]
    frame = dataframe(rows)
    assert frame["config.a"].isna().tolist() == [False, True]
    assert frame.loc[1, "config.b"] == [1, 2]


def test_a_metric_with_the_name_of_a_column_keeps_both():
    frame = dataframe([row(0, metrics={"seconds": 9.0, "state": 8.0}, best={"seconds": 7.0})])
    assert frame.loc[0, "seconds"] == 1.25
    assert frame.loc[0, "state"] == "complete"
    assert frame.loc[0, ["metric.seconds", "metric.seconds.best", "metric.state"]].tolist() == [9.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["a", "a.best"], {"a": "a", "a.best": "metric.a.best"}),
        (["a.best", "a"], {"a": "a", "a.best": "metric.a.best"}),
        (["a.best", "b"], {"a.best": "a.best", "b": "b"}),
        (
            ["a", "a.best", "a.best.best"],
            {"a": "a", "a.best": "metric.a.best", "a.best.best": "metric.metric.a.best.best"},
        ),
        (["metric.a", "a.best", "a"], {"metric.a": "metric.a", "a": "a", "a.best": "metric.metric.a.best"}),
        (["seconds", "metric.seconds"], {"seconds": "metric.seconds", "metric.seconds": "metric.metric.seconds"}),
        (["config.lr", "config.lr.best"], {"config.lr": "metric.config.lr"}),
    ],
    ids=str,
)
def test_a_metric_with_the_name_of_the_best_of_another_keeps_both(names, columns):
    values = {name: float(place) for place, name in enumerate(names)}
    frame = dataframe([row(0, metrics=values, best={name: -value for name, value in values.items()})])
    assert len(frame.columns) == 11 + 2 * len(names)
    assert frame.columns.is_unique
    for name, column in columns.items():
        assert frame.loc[0, [column, f"{column}.best"]].tolist() == [values[name], -values[name]]


def test_no_trials():
    columns = ["trial", "state", "best_epoch", "epochs", "seconds", "device", "job", "proof", "reason"]
    assert dataframe([]).columns.tolist() == columns


def test_without_pandas_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ShoalError, match=r"needs pandas\. Install it with: pip install pandas"):
        dataframe([])
