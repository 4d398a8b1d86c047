"""How far a trial that was trained again is from its record."""

import math
from dataclasses import replace

import pytest

from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow
from shoal.core.trial import Origin, Report, Trial, TrialState
from shoal.look.rerun import Difference, Rerun, check_rerun, rerun_json

TRIAL = Trial(2, {"lr": 0.1}, seed=1, data_seed=2)
ROW = TrialRow(TRIAL, TrialState.COMPLETE, "", 3, 3, 0, "cpu:0", "job", 1.0, {"loss": 1.0}, {"loss": 1.0}, 1.0)


def compared(recorded: list[dict[str, float]], found: list[dict[str, float]]) -> Rerun:
    sides = ([Report(2, epoch, metrics) for epoch, metrics in enumerate(side, 1)] for side in (recorded, found))
    return Rerun.of(TRIAL, "cpu:0", *sides)


@pytest.mark.parametrize(
    ("recorded", "found", "largest", "epoch"),
    [
        pytest.param([1.0, 2.0], [1.0, 2.0], 0.0, 1, id="equal"),
        pytest.param([1.0, 2.0, 4.0], [1.0, 1.0, 3.0], 0.5, 2, id="the farthest, not the last"),
        pytest.param([0.0], [1e-300], 1.0, 1, id="relative also to nothing"),
        pytest.param([math.nan], [math.nan], 0.0, 1, id="no number in both"),
        pytest.param([math.inf], [math.inf], 0.0, 1, id="infinite in both"),
        pytest.param([1.0, math.nan], [1.0, 2.0], math.inf, 2, id="no number in one"),
        pytest.param([1.0, 2.0], [1.0], math.inf, 2, id="an epoch less"),
    ],
)
def test_differences(recorded: list[float], found: list[float], largest: float, epoch: int) -> None:
    rerun = compared([{"loss": value} for value in recorded], [{"loss": value} for value in found])
    assert rerun.largest == rerun.differences["loss"].relative == largest
    assert rerun.differences["loss"].epoch == epoch


def test_each_metric_has_its_own_difference_and_one_that_is_missing_is_not_a_number() -> None:
    rerun = compared([{"loss": 2.0, "old": 1.0}], [{"loss": 1.0, "new": 1.0}])
    assert rerun.differences["loss"] == Difference(0.5, 1, 2.0, 1.0)
    assert {name: each.relative for name, each in rerun.differences.items()} == {
        "loss": 0.5,
        "old": math.inf,
        "new": math.inf,
    }
    assert rerun_json(rerun)["largest"] is None, "JSON knows no infinity"
    assert rerun_json(rerun)["metrics"]["new"] == {"relative": None, "epoch": 1, "recorded": [None], "found": [1.0]}


@pytest.mark.parametrize(
    ("row", "opaque", "words"),
    [
        pytest.param(ROW, "train.py", "trained by a program of yours", id="a program"),
        pytest.param(
            replace(ROW, trial=replace(TRIAL, origin=Origin(1, 4))),
            "",
            "trial 2 began from the checkpoint of trial 1 at epoch 4",
            id="an heir",
        ),
        pytest.param(replace(ROW, state=TrialState.FAILED, reason="boom"), "", "trial 2 failed.*boom", id="failed"),
        pytest.param(replace(ROW, epoch=0), "", "has not reported an epoch yet", id="no epoch"),
    ],
)
def test_what_cannot_be_compared_is_refused(row: TrialRow, opaque: str, words: str) -> None:
    with pytest.raises(ShoalError, match=words):
        check_rerun(row, opaque)


def test_other_trials_can_be_trained_again() -> None:
    for state in (TrialState.COMPLETE, TrialState.STOPPED, TrialState.PAUSED, TrialState.RUNNING, TrialState.PENDING):
        check_rerun(replace(ROW, state=state), "")
