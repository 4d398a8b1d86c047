"""The live benchmarks of sharing say how many jobs shared a slot, and what they lack."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import groups_live
from groups_live import IN_MEMORY, PROGRAM, STORED, WITH, WITHOUT, Setting, other_values, task_of, too_slow
from placed.sharing import busy_seconds, gap, side_by_side

import shoal
from shoal.core.job import Purpose
from shoal.core.rows import JobRow


def row(device: str, started: float, ended: float | None, purpose: Purpose = Purpose.TRAIN) -> JobRow:
    return JobRow("job", purpose, device, (0,), started, ended, "finished", "")


@pytest.mark.parametrize(
    ("jobs", "most", "busy"),
    [
        pytest.param([], 0, 0, id="none"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:1", 1, 3)], 1, 6, id="a slot each"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 4, 6)], 1, 6, id="one after the other"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, 6), row("cpu:0", 2, 3)], 3, 6, id="side by side"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, None)], 1, 4, id="one that runs does not count"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, 3, Purpose.PROFILE)], 1, 4, id="nor does one that measures"),
    ],
)
def test_jobs_side_by_side_are_counted(jobs: list[JobRow], most: int, busy: float) -> None:
    assert side_by_side(jobs) == most
    assert busy_seconds(jobs) == busy


def test_the_time_between_two_jobs_of_a_device() -> None:
    assert gap([]) == gap([row("cpu:0", 0, 4), row("cpu:1", 5, 6)]) == 0
    assert gap([row("cpu:0", 0, 4), row("cpu:0", 4.5, 6), row("cpu:0", 5, 9), row("cpu:0", 10.5, None)]) == 1.0


def test_what_a_search_lacks_is_said() -> None:
    found = {(IN_MEMORY, "grid"): 0.96, (IN_MEMORY, "SHA"): 0.9, (STORED, "grid"): 1.2, (PROGRAM, "PBT"): 1.0}
    assert too_slow(found) == [
        "in memory, SHA: 0.90x with Fluid's policy, asked 0.95x",
        "stored, a program, PBT: 1.00x with Fluid's policy, asked 1.1x",
    ]


def test_other_values_are_a_miss_where_order_is_nothing_to_a_search() -> None:
    def runs(one: float, other: float) -> dict[str, Any]:
        return {WITHOUT: [SimpleNamespace(best=one)], WITH: [SimpleNamespace(best=other)]}

    found = {(STORED, "grid"): runs(0.9, 0.8), (STORED, "SHA"): runs(0.9, 0.9), (STORED, "ASHA"): runs(0.9, 0.8)}
    assert other_values(found) == ["stored, grid: the policies found other accuracies"]


@pytest.mark.thorough
@pytest.mark.parametrize("training", [STORED, PROGRAM])
def test_a_training_from_storage_is_the_same_with_each_policy(
    training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))  # restored at the end, since a run sets another one
    setting = Setting(task_of(training, tmp_path / "missing", quick=True), 2, tmp_path)
    setting.fill_history()
    runs = [setting.run(shoal.PBT(2, epochs=4, interval=2), groups_live.RATE, x, x) for x in (WITHOUT, WITH)]
    assert runs[0].best == runs[1].best
    assert all(0 <= run.idle < 1 and run.side_by_side >= 1 for run in runs)
