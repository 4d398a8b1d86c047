"""How far a trial that was trained again is from its record."""

import math
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow, Verdict
from shoal.core.trial import Origin, Report, Trial, TrialState
from shoal.look.rerun import (
    Difference,
    Rerun,
    check_rerun,
    rerun_json,
    rerun_notes,
    rerun_table,
    rerun_verdict,
)
from shoal.look.snapshot import TaskEdit
from shoal.look.text import printable

TRIAL = Trial(2, {"lr": 0.1}, seed=1, data_seed=2)
ROW = TrialRow(TRIAL, TrialState.COMPLETE, "", 3, 3, 0, "cpu:0", "job", 1.0, {"loss": 1.0}, {"loss": 1.0}, 1.0)


NONE = {"repeated": [], "perturbed": []}


def reports(metrics: list[dict[str, float]]) -> list[Report]:
    return [Report(2, epoch, each) for epoch, each in enumerate(metrics, 1)]


def compared(recorded: list[dict[str, float]], found: list[dict[str, float]]) -> Rerun:
    return Rerun.of(TRIAL, "cpu:0", reports(recorded), reports(found), tolerance=1e-4, perturbation=4e-6)


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
    assert rerun.differences["loss"] == Difference("loss", 0.5, 1, 2.0, 1.0)
    assert {name: each.relative for name, each in rerun.differences.items()} == {
        "loss": 0.5,
        "old": math.inf,
        "new": math.inf,
    }
    assert rerun_json(rerun)["largest"] is None, "JSON knows no infinity"
    assert (
        rerun_json(rerun)["metrics"]["new"] == {"relative": None, "epoch": 1, "recorded": [None], "found": [1.0]} | NONE
    )


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


def losses(*values: float) -> list[dict[str, float]]:
    return [{"loss": value} for value in values]


@pytest.mark.parametrize(
    ("recorded", "found", "perturbed", "expected", "words"),
    [
        pytest.param(losses(1, 1), losses(1, 1), None, True, ["equal to the last bit at every epoch"], id="equal"),
        pytest.param(
            losses(1, 1),
            losses(1, 1 + 5e-5),
            None,
            True,
            ["equal to 5e-5 at every epoch, which rounding explains"],
            id="rounding of a step",
        ),
        pytest.param(
            losses(1, 1, 1, 1),
            losses(1, 1, 0.999, 0.9),
            losses(1, 1, 0.9985, 0.94),
            True,
            [
                "equal to 1e-4 up to epoch 2; differs from epoch 3 on: loss by 0.1 % at epoch 3; the largest "
                "difference is loss by 10 % at epoch 4",
                "expected, as training amplifies rounding: a change of its initial weights by 4e-6 moves the trial by "
                "4.3 %",
            ],
            id="amplified",
        ),
        pytest.param(
            losses(1, 1),
            losses(0.7, 0.7),
            losses(0.7014, 0.3),
            False,
            [
                "differs from the first epoch on: loss by 30 % at epoch 1",
                "not expected, rounding does not explain loss by 30 % at epoch 1: a change of its initial weights "
                "by 4e-6 moves the trial by 0.2 % by then",
                "possible causes: an edit",
            ],
            id="a jump at once",
        ),
        pytest.param(
            losses(1, 1, 1),
            losses(1, 1, 0.5),
            losses(1, 1, 0.5),
            False,
            [
                "equal to 1e-4 up to epoch 2; differs from epoch 3",
                "not expected, rounding does not explain loss by 50 % at epoch 3: a change of its initial weights "
                "by 4e-6 does not move the trial by then",
                "possible causes: state that its checkpoints lack, as another job continued it in epoch 3; an edit",
            ],
            id="a jump where another job continued",
        ),
        pytest.param(
            losses(1, 1),
            losses(1),
            losses(1),
            False,
            [
                "equal to 1e-4 up to epoch 1; differs from epoch 2 on: loss at epoch 2, finite in only one",
                "not expected, rounding does not explain loss at epoch 2, finite in only one",
                "possible causes",
            ],
            id="all reruns diverge",
        ),
        pytest.param(
            losses(1, 1),
            losses(1),
            losses(1, 0.9),
            True,
            [
                "equal to 1e-4 up to epoch 1; differs from epoch 2 on: loss at epoch 2, finite in only one",
                "expected, as training amplifies rounding: a change of its initial weights by 4e-6 decides whether",
            ],
            id="rounding decides about a divergence",
        ),
        pytest.param(
            [{"loss": 1.0, "accuracy": 0.5}],
            [{"loss": 1.001, "accuracy": 0.501}],
            [{"loss": 1.002, "accuracy": 0.501}],
            True,
            ["differs from the first epoch on: accuracy by 0.2 % at epoch 1", "expected"],
            id="a count of samples that has not moved yet",
        ),
    ],
)
def test_rounding_explains_what_a_change_of_the_initial_weights_does(
    recorded: list[dict[str, float]],
    found: list[dict[str, float]],
    perturbed: list[dict[str, float]] | None,
    expected: bool,
    words: list[str],
) -> None:
    rerun = replace(compared(recorded, found), continued=frozenset({3}))
    if perturbed is not None:
        rerun = rerun.with_further(reports(found)).with_further(reports(perturbed))
    check_verdict(rerun, expected, words)


def check_verdict(rerun: Rerun, expected: bool | None, words: list[str]) -> None:
    verdict = rerun_verdict(rerun)
    assert len(verdict) == len(words)
    assert [line[: len(start)] for line, start in zip(verdict, words, strict=True)] == words
    shown = rerun_json(rerun)
    assert (shown["expected"], shown["verdict"]) == (expected, verdict)


TWO = [{"loss": 1.0, "latency": 3.0}, {"loss": 1.0, "latency": 4.0}]
NOISE = [{"loss": 1.0, "latency": 5.0}, {"loss": 1.0, "latency": 4.0}]
UNEQUAL = "this task is not reproducible: two equal reruns differ in "


@pytest.mark.parametrize(
    ("recorded", "found", "further", "expected", "words"),
    [
        pytest.param(
            losses(1, 1),
            losses(0.5, 1),
            [losses(0.5, 0.8)],
            None,
            [f"{UNEQUAL}loss by 20 % at epoch 2"],
            id="unseeded numbers",
        ),
        pytest.param(
            losses(1, 1),
            losses(0.5, 1),
            [losses(0.5)],
            None,
            [f"{UNEQUAL}loss at epoch 2, finite in only one"],
            id="unseeded numbers decide about a divergence",
        ),
        pytest.param(
            TWO,
            NOISE,
            [TWO],
            True,
            [f"{UNEQUAL}latency by 40 % at epoch 1", "the other metrics are equal to the last bit at every epoch"],
            id="a latency",
        ),
        pytest.param(
            [{"loss": 1.0, "latency": 3.0}],
            [{"loss": 0.9, "latency": 5.0}],
            [[{"loss": 0.9, "latency": 4.0}], [{"loss": 0.95, "latency": 1.0}]],
            True,
            [
                f"{UNEQUAL}latency by 20 % at epoch 1",
                "differs from the first epoch on: loss by 10 %",
                "expected, as training amplifies rounding: a change of its initial weights by 4e-6 moves the trial by "
                "5.3 %",
            ],
            id="a latency beside amplified rounding",
        ),
        pytest.param(
            [{"loss": 1.0, "latency": 3.0}],
            [{"loss": 0.9, "latency": 5.0}],
            [[{"loss": 0.9, "latency": 4.0}], [{"loss": 0.9, "latency": 1.0}]],
            False,
            [
                f"{UNEQUAL}latency by 20 % at epoch 1",
                "differs from the first epoch on: loss by 10 %",
                "not expected, rounding does not explain loss by 10 % at epoch 1: a change of its initial weights by "
                "4e-6 does not move",
                "possible causes",
            ],
            id="a latency stands for no other metric",
        ),
    ],
)
def test_a_metric_in_which_two_equal_reruns_differ_is_not_judged(
    recorded: list[dict[str, float]],
    found: list[dict[str, float]],
    further: list[list[dict[str, float]]],
    expected: bool | None,
    words: list[str],
) -> None:
    rerun = compared(recorded, found)
    assert rerun.expected is False, "so it is trained again"
    for curve in further:
        rerun = rerun.with_further(reports(curve))
    check_verdict(rerun, expected, words)
    assert rerun_json(rerun)["irreproducible"] == list(rerun.irreproducible) == list(recorded[0])[-1:]


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"changed": ("task.py",)}, id="since the study last ran"),
        pytest.param({"edits": (TaskEdit(0.0, {"task.py": ""}, (2,), 3),)}, id="before it continued"),
    ],
)
def test_of_an_edited_task_nothing_can_be_told_but_that_it_is_equal(edit: dict[str, Any]) -> None:
    words = [
        "differs from the first epoch on: loss by 50 %",
        "cannot tell whether that is expected: the task was edited",
    ]
    check_verdict(replace(compared(losses(1), losses(0.5)), **edit), None, words)
    check_verdict(replace(compared(losses(1), losses(1)), **edit), True, ["equal to the last bit"])


@pytest.mark.parametrize("name", ["valid_loss", "[red]", "a\nb", "\x1b", "m" * 200])
@pytest.mark.parametrize("width", [40, 80])
def test_the_table_folds(name: str, width: int) -> None:
    console = Console(width=width, file=StringIO())
    with console.capture() as captured:
        console.print(rerun_table(compared([{name: 0.15531}], [{name: 0.17652}])))
    head, *lines = captured.get().splitlines()
    assert head.split() == ["metric", "differs", "epoch", "recorded", "rerun"]
    first, *values = lines[0].split()
    assert values == ["0.12", "1", "0.1553", "0.1765"]
    assert first + "".join(map(str.strip, lines[1:])) == printable(name)


def test_a_long_name_of_control_characters_stays_a_short_line() -> None:
    (first, *_) = rerun_verdict(compared([{"\x1b" * 200: 1.0}], [{"\x1b" * 200: 2.0}]))
    assert len(first) < 200
    assert "\x1b" not in first


def test_what_was_proven_while_the_study_trained_it_is_a_note() -> None:
    rerun = replace(compared(losses(1), losses(1)), proof=Verdict("k", (2,), 4, 3, 2e-7, "step, eager"))
    assert rerun_notes(rerun) == ["while the study trained it: fused: equal at 3 checks, largest difference 2e-7"]
