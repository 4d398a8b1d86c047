"""`tune` without an algorithm: Shoal chooses one, says why, and keeps it."""

from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import tune

import shoal
from shoal.journal.view import JournalView


@pytest.mark.parametrize(
    ("space", "arguments", "algorithm", "why"),
    [
        pytest.param(
            {"lr": shoal.grid([0.01, 0.1])}, {"trials": 64, "epochs": 1}, "Grid(epochs=1)",
            "the space has 2 points, and 64 trials try them all", id="grid",
        ),
        pytest.param(
            {"lr": shoal.loguniform(0.01, 0.1)}, {"trials": 3, "epochs": 2, "stop": [shoal.Threshold(below=-1)]},
            "Random(n=3, epochs=2) with Threshold(below=-1)", "3 trials are too few to learn from each other", id="few",
        ),
    ],
)  # fmt: skip
def test_the_choice_is_said_and_kept(
    space: dict[str, Any],
    arguments: dict[str, Any],
    algorithm: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = tune(tasks.Blobs(), space, tmp_path / "study", **{"algorithm": None, "show_progress": True} | arguments)
    with JournalView.read(study.directory) as journal:
        assert (journal.spec.algorithm, journal.spec.chosen_because) == (algorithm, why)
    assert f"shoal: {algorithm} is chosen, as {why}\n" in capsys.readouterr().err
    again = shoal.resume(study.directory, show_progress=False)
    assert [row.config for row in again.trials] == [row.config for row in study.trials]
