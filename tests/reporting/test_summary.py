"""The lines at the start of a run say what is trained, how much, with which batches and where."""

from pathlib import Path

import pytest

from shoal.core.space import Space, choice, randint
from shoal.reporting.progress import summary
from shoal.reporting.text import batch_text

STUDY = {
    "task": "Digits",
    "opaque": "",
    "algorithm": "Hyperband(9)",
    "metric": "accuracy",
    "mode": "max",
    "totals": {"trials": 17, "least": 69, "most": 69},
    "batches": "batch size 64",
}


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
            {"totals": {"trials": 40, "least": 90, "most": 360}},
            "25 of 90 to 360 epochs",
            [
                "Digits: 40 trials, 90 to 360 epochs in all, by Hyperband(9); maximises accuracy",
                "batch size 64; cpu:0, cpu:1; goes on after 25 of 90 to 360 epochs; directory runs/one",
            ],
            id="bounds, gone on with",
        ),
        pytest.param(
            {"opaque": "train", "totals": None, "batches": "", "metric": ["a", "b"], "mode": ["max", "min"]},
            "",
            ["Digits: Hyperband(9); maximises a and minimises b", "cpu:0, cpu:1; directory runs/one"],
            id="program",
        ),
    ],
)
def test_summary(changes, done, lines):
    assert summary({**STUDY, **changes}, ["cpu:0", "cpu:1"], Path("runs/one"), done) == lines


def test_studies_of_old_journals_have_one_too():
    old = {name: value for name, value in STUDY.items() if name not in ("totals", "batches")}
    assert summary(old, [], Path("one")) == ["Digits: Hyperband(9); maximises accuracy", "no device; directory one"]
