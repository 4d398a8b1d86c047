"""The progress within epochs: what a study keeps of the events of its jobs, and writes into its journal."""

from typing import Any

import pytest
from machine import JOB, Machine

from shoal.core.event import ArrayFailed, Ended, EpochProgress, Event, MembersLeft, Outcome, Reported
from shoal.core.rows import PROGRESS, StudyValue
from shoal.core.trial import Report


def steps(step: int, *trials: int) -> Event:
    return Reported(JOB, (), progress=EpochProgress(trials, 1, step, 100, 0.5, 10.0))


def ends_epoch(*trials: int) -> Event:
    return Reported(JOB, tuple(Report(number, 2, {"loss": 0.5}) for number in trials))


@pytest.mark.parametrize(
    ("events", "kept", "written"),
    [
        pytest.param([(2.0, steps(1, 0, 1))], [1], [[1]], id="the first is written at once"),
        pytest.param(
            [(float(second), steps(second, 0, 1)) for second in range(2, 10)],
            [9],
            [[2], [7]],
            id="those of each second every five seconds",
        ),
        pytest.param([(2.0, steps(1, 0)), (3.0, steps(2, 1))], [1, 2], [[1]], id="two arrays"),
        pytest.param([(2.0, steps(1, 0)), (9.0, steps(2, 1))], [1, 2], [[1], [1, 2]], id="both are written"),
        pytest.param([(2.0, steps(5, 0, 1)), (3.0, steps(6, 0))], [6], [[5]], id="fewer members"),
        pytest.param([(2.0, steps(1, 0, 1)), (3.0, ends_epoch(0, 1))], [], [[1], []], id="the end of an epoch"),
        pytest.param(
            [(2.0, steps(1, 0)), (3.0, steps(2, 1)), (4.0, ends_epoch(0))], [2], [[1], [2]], id="the end of one of two"
        ),
        pytest.param([(2.0, ends_epoch(0, 1))], [], [], id="a short epoch"),
        pytest.param([(2.0, steps(1, 0, 1)), (3.0, MembersLeft(JOB, frozenset({0, 1})))], [], [[1], []], id="all left"),
        pytest.param(
            [(2.0, steps(1, 0, 1)), (3.0, ArrayFailed(JOB, frozenset({0, 1}), Outcome.RAISED, "ValueError: x"))],
            [],
            [[1], []],
            id="the array failed",
        ),
        pytest.param(
            [(2.0, steps(1, 0, 1)), (3.0, Ended(JOB, Outcome.CRASHED, "x"))], [], [[1], []], id="the job ended"
        ),
    ],
)
def test_progress_is_kept_while_it_lasts_and_written_now_and_then(
    events: list[tuple[float, Event]], kept: list[int], written: list[list[int]]
) -> None:
    machine = Machine()
    values: list[Any] = []
    for now, event in events:
        rows, _ = machine.step(event, now)
        values += [row.value for row in rows if isinstance(row, StudyValue) and row.key == PROGRESS]
    found = machine.core.state.running.progress
    assert [each.step for some in found.values() for each in some] == kept
    assert [[each["step"] for some in value.values() for each in some] for value in values] == written
