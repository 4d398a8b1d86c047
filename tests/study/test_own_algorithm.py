"""An algorithm of a script or a notebook: its classes and globals are the caller's, and its state is each study's."""

import math
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import tune

import shoal


def made(seen: list[int], **attributes: Any) -> shoal.Random:
    """An algorithm of a class that is pickled by value, as those of a script are; it says what it was asked."""

    class Own(shoal.Random):
        def next_groups(self, free: int) -> Any:
            seen.append(free)
            self.asked = [*getattr(self, "asked", []), free]
            return super().next_groups(free)

    algorithm = Own(3, epochs=1)
    for name, value in attributes.items():
        setattr(algorithm, name, value)
    return algorithm


@pytest.mark.usefixtures("eager")  # in both studies, as other ways round differently
def test_what_it_writes_to_a_global_reaches_the_caller_and_its_state_does_not(tmp_path: Path) -> None:
    seen: list[int] = []
    algorithm = made(seen)
    space = {"lr": shoal.loguniform(0.01, 0.1)}
    studies = [tune(tasks.Blobs(), space, tmp_path / name, algorithm=algorithm) for name in ("first", "second")]
    assert seen
    assert not hasattr(algorithm, "asked"), "one object serves several studies"
    first, second = ([(row.config, row.metrics) for row in study.trials] for study in studies)
    assert first == second


def test_a_resume_decides_as_it_would_have(tmp_path: Path) -> None:
    """Also one that counts in a global: that continues from what it was at the beginning."""
    count = [0]
    stop = tmp_path / "stop"

    class Counting(shoal.Random):
        def observe(self, report: Any) -> Any:
            if stop.exists() and count[0] > 2:
                raise RuntimeError("stopped")
            count[0] += 1
            return super().observe(report)

    space = {"lr": shoal.loguniform(0.01, 0.1)}
    rows = []
    for name in ("whole", "study"):
        count[0] = 0
        if name == "study":
            stop.touch()
            with pytest.raises(RuntimeError, match="stopped"):
                tune(tasks.Blobs(), space, tmp_path / name, algorithm=Counting(3, epochs=2))
            stop.unlink()
            study = shoal.resume(tmp_path / name, show_progress=False)
        else:
            study = tune(tasks.Blobs(), space, tmp_path / name, algorithm=Counting(3, epochs=2))
        rows.append([(row.config, str(row.state), row.epoch, row.metrics) for row in study.trials])
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]


def test_one_that_can_be_pickled_and_not_copied_serves_all_the_same(tmp_path: Path) -> None:
    study = tune(tasks.Blobs(), {"lr": 0.01}, tmp_path / "study", algorithm=made([], module=math))
    assert {str(row.state) for row in study.trials} == {"complete"}
