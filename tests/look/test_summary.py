"""The lines at the start of a run say what is trained, how much, with which batches and where."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.algorithms.base import Totals
from shoal.core.space import Space, choice, randint
from shoal.look.progress import summary
from shoal.look.text import batch_text
from shoal.spec import StudySpec

SPEC = StudySpec(
    task="Digits",
    algorithm="Hyperband(9)",
    metric="accuracy",
    mode="max",
    totals=Totals(17, 69, 69),
    batches="batch size 64",
)


DEFAULT = "batch size 32 (default: the config has no batch_size), or the DataLoader's"


@pytest.mark.parametrize(
    ("space", "task", "text"),
    [
        pytest.param({"lr": 0.1}, None, DEFAULT, id="default"),
        pytest.param({"data": {"batch_size": 8}}, None, DEFAULT, id="nested"),
        pytest.param({"batch_size": 64}, None, "batch size 64", id="constant"),
        pytest.param({"batch_size": choice([32, 64])}, None, "batch sizes 32, 64", id="choice"),
        pytest.param({"batch_size": randint(8, 65)}, None, "batch size randint(8, 65)", id="domain"),
        pytest.param({"batch_size": 64}, "Digits", "batch size as Digits.batch_size says", id="own"),
    ],
)
def test_batches(space, task, text):
    assert batch_text(Space(space), task) == text


@pytest.mark.parametrize(
    ("changes", "done", "lines"),
    [
        pytest.param(
            {},
            "",
            [
                "Digits: 17 trials, 69 epochs in all, by Hyperband(9); maximises accuracy",
                "batch size 64; cpu:0, cpu:1; directory runs/one",
            ],
            id="new",
        ),
        pytest.param(
            {"chosen_because": "9 trials suffice"},
            "",
            [
                "Digits: 17 trials, 69 epochs in all, by Hyperband(9); maximises accuracy",
                "Hyperband(9) is chosen, as 9 trials suffice",
                "batch size 64; cpu:0, cpu:1; directory runs/one",
            ],
            id="chosen",
        ),
        pytest.param(
            {"totals": Totals(40, 90, 360)},
            "25 of 90 to 360 epochs",
            [
                "Digits: 40 trials, 90 to 360 epochs in all, by Hyperband(9); maximises accuracy",
                "batch size 64; cpu:0, cpu:1; resumes after 25 of 90 to 360 epochs; directory runs/one",
            ],
            id="bounds, gone on with",
        ),
        pytest.param(
            {
                "opaque": "opaque train 0123456789abcdef",
                "totals": None,
                "batches": "",
                "metric": ["a", "b"],
                "mode": ["max", "min"],
            },
            "",
            ["Digits: Hyperband(9); maximises a and minimises b", "cpu:0, cpu:1; directory runs/one"],
            id="program",
        ),
    ],
)
def test_summary(changes, done, lines):
    assert summary(replace(SPEC, **changes), ["cpu:0", "cpu:1"], Path("runs/one"), done) == lines


def test_what_is_unknown_is_left_out():
    unknown = replace(SPEC, totals=None, batches="")
    assert summary(unknown, [], Path("one")) == ["Digits: Hyperband(9); maximises accuracy", "no device; directory one"]
