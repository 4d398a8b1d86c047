"""The live benchmarks of sharing say how many jobs shared a slot, and what they lack."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from placed.sharing import gap, side_by_side

from shoal.core.job import Purpose
from shoal.core.rows import JobRow


def row(device: str, started: float, ended: float | None, purpose: Purpose = Purpose.TRAIN) -> JobRow:
    return JobRow("job", purpose, device, (0,), started, ended, "finished", "")


@pytest.mark.parametrize(
    ("jobs", "most"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:1", 1, 3)], 1, id="a slot each"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 4, 6)], 1, id="one after the other"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, 6), row("cpu:0", 2, 3)], 3, id="side by side"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, None)], 1, id="one that runs does not count"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, 3, Purpose.PROFILE)], 1, id="nor does one that measures"),
    ],
)
def test_jobs_side_by_side_are_counted(jobs: list[JobRow], most: int) -> None:
    assert side_by_side(jobs) == most


def test_the_time_between_two_jobs_of_a_device() -> None:
    assert gap([]) == gap([row("cpu:0", 0, 4), row("cpu:1", 5, 6)]) == 0
    assert gap([row("cpu:0", 0, 4), row("cpu:0", 4.5, 6), row("cpu:0", 5, 9), row("cpu:0", 10.5, None)]) == 1.0
