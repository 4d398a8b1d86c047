"""Budgets in time of a study and of its trials, and the number of trials that train at a time."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import check_equal, curves, tune
from test_engine import (
    MAKERS,
    Killed,
    Scripted,
    Stage,
    backend,
    four,
    run_with_kills,
    side_by_side,
)

import shoal
from shoal.algorithms.base import Algorithm
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.errors import ShoalError
from shoal.core.job import Purpose
from shoal.core.rows import ReportRow
from shoal.core.space import Space, grid
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.look.snapshot import how_ended, snapshot, time_left
from shoal.look.text import left_text, timeout_text
from shoal.study.lifecycle import RECORD_SECONDS, Lifecycle

SYNCHRONOUS: dict[str, Callable[[], Algorithm]] = {
    "grid": lambda: Grid(2),
    "random": lambda: Random(5, 2),
    "halving": lambda: SuccessiveHalving(6, 4, eta=2),
    "hyperband": lambda: Hyperband(4, eta=2),
    "pbt": lambda: PBT(5, 4),
}
ALL = {**MAKERS, **SYNCHRONOUS}


def run(stage: Stage, carrier: Scripted, left: float | None = None) -> bool:
    """Run an engine whose clock continues by 0.1 s at each look; return whether its timeout ended it."""
    clock = (number / 10 for number in count())
    with closing(stage.open()) as journal:
        journal.put("time_left", left)
        engine = stage.engine(journal, carrier, clock=partial(next, clock))
        engine.begin()
        engine.run()
        return how_ended(journal) == "timeout"


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_study_that_its_timeout_ends_goes_on_to_the_same_result(
    make: Callable[[], Algorithm], tmp_path: Path
) -> None:
    space = Space({"x": grid([0.4, 0.1, 0.3, 0.2])}) if isinstance(make(), Grid) else Stage(tmp_path).space
    whole, stage = Stage(tmp_path / "whole", make, space), Stage(tmp_path / "study", make, space)
    whole.run(backend())
    timeouts = 0
    while run(stage, backend(), left=2.5):
        timeouts += 1
        assert {row[2] for row in stage.outcome()} & {TrialState.PENDING, TrialState.PAUSED}
        assert timeouts < 100
    assert timeouts > 1
    with JournalView.read(stage.directory) as journal:
        verbs = [each.verb for each in journal.interventions()]
    assert verbs in (["timeout"] * timeouts, ["timeout"] * (timeouts + 1))  # one may pass as the study finishes
    assert all(row[2].final for row in stage.outcome())  # type: ignore[attr-defined]
    if make in SYNCHRONOUS.values():  # others decide by the order in which trials report, which a stop changes
        assert stage.outcome() == whole.outcome()


def test_the_timeout_is_a_sum_over_runs_that_a_kill_does_not_renew(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "study", lambda: Grid(2), Space({"x": grid([float(x) for x in range(9)])}))
    stage.settings["timeout"] = 100.0

    def die_late(job: Any) -> None:
        if job.purpose is Purpose.TRAIN:
            raise Killed

    left = []
    for _ in range(2):
        carrier = backend(on_start=die_late)
        clock = count()
        with closing(stage.open()) as journal:
            engine = stage.engine(journal, carrier, clock=partial(next, clock))
            engine.begin()
            with pytest.raises(Killed):
                engine.run()
        with JournalView.read(stage.directory) as view:
            left.append(time_left(view))
    assert 100.0 > left[0] > left[1] > 0  # type: ignore[operator]


@pytest.mark.parametrize(
    ("study", "times", "runs", "left"),
    [
        pytest.param({}, [5.0, 6.0, 8.0], True, 7.0, id="runs"),
        pytest.param({}, [5.0, 6.0, 8.0], False, 10.0, id="paused"),
        pytest.param({}, [0.0, 10.0, 99.0], True, 0.0, id="expires once"),
        pytest.param({"time_left": 1.5}, [7.0, 8.0], True, 0.5, id="continues"),
        pytest.param({"time_left": None}, [0.0, 99.0], True, None, id="lifted"),
    ],
)
def test_what_is_left_of_a_timeout(
    study: Mapping[str, Any], times: list[float], runs: bool, left: float | None
) -> None:
    lifecycle = Lifecycle(study, 10.0)
    expired = [lifecycle.count_time(now, runs=runs) for now in times]
    assert (lifecycle.time_left, lifecycle.timed_out, sum(expired)) == (left, left == 0, left == 0)


def test_what_is_left_is_recorded_now_and_then() -> None:
    lifecycle, written = Lifecycle({}, 100.0), []
    for now in range(60):
        lifecycle.count_time(float(now), runs=True)
        written += [row.value for row in lifecycle.take_rows()]
    assert written == [100.0 - RECORD_SECONDS * number for number in range(1, 12)]
    lifecycle.record_time()
    assert [row.value for row in lifecycle.take_rows()] == [41.0]


@pytest.mark.parametrize(
    ("make", "limit", "ends"),
    [
        pytest.param(lambda: Grid(3), 1.5, [(TrialState.STOPPED, 2)] * 4, id="below the budget"),
        pytest.param(lambda: Grid(3), 3.0, [(TrialState.COMPLETE, 3)] * 4, id="at the budget"),
        pytest.param(
            lambda: SuccessiveHalving(4, 4, eta=2),
            2.0,
            [(TrialState.STOPPED, 1)] * 2 + [(TrialState.STOPPED, 2)] * 2,
            id="at a rung",
        ),
        pytest.param(lambda: PBT(4, 4, truncation=0), 2.0, [(TrialState.STOPPED, 2)] * 4, id="of a population"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_trial_is_stopped_when_it_has_trained_as_long_as_it_may(
    make: Callable[[], Algorithm],
    limit: float,
    ends: list[tuple[TrialState, int]],
    when: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = Space({"x": grid([1.0, 2.0, 3.0, 4.0])}) if isinstance(make(), Grid) else Stage(tmp_path).space
    stage = Stage(tmp_path / "study", make, space, settings={"trial_timeout": limit})
    assert run_with_kills(ReportRow, when, lambda: stage.run(backend(side_by_side)), monkeypatch) > 0
    rows = stage.outcome()
    assert sorted(row[2:4] for row in rows) == sorted(ends)
    with JournalView.read(stage.directory) as journal:
        reasons = {row.reason for row in journal.trials() if "timeout" in row.reason}
        assert journal.study["finished"]
        assert all(row.metrics for row in journal.trials())
    assert reasons <= {f"has trained as long as a trial may, {limit:g} s (trial_timeout)"}
    assert bool(reasons) == (limit < 3)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("make", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_limit_of_trials_that_train_changes_the_schedule_alone(make: Callable[[], Algorithm], tmp_path: Path) -> None:
    space = Space({"x": grid([0.4, 0.1, 0.3, 0.2])}) if isinstance(make(), Grid) else Stage(tmp_path).space
    outcomes, widths = [], []
    for most in (None, 8, 3, 1):
        stage = Stage(tmp_path / f"{most}", make, space, slots=2, settings={"max_concurrent": most})
        carrier, at_once = backend(side_by_side), [0]
        with closing(stage.open()) as journal:
            engine = stage.engine(journal, carrier)

            def count_running(engine: Any = engine, at_once: list[int] = at_once) -> None:
                at_once.append(sum(x.state is TrialState.RUNNING for x in engine.state.trials))

            engine._observe = count_running
            engine.begin()
            engine.run()
        outcomes.append(stage.outcome())
        widths.append(max(map(len, carrier.trained())))
        assert max(at_once) <= (most or 99)
    assert outcomes == outcomes[:1] * 4
    assert (widths[2] <= 3, widths[3]) == (True, 1)


def test_trials_wait_for_the_limit_with_a_reason(tmp_path: Path) -> None:
    stage = four(tmp_path / "study")
    stage.settings["max_concurrent"] = 3
    seen: set[str] = set()

    class Looking(Scripted):
        def poll(self, timeout: float) -> list[Any]:
            with JournalView.read(stage.directory) as journal:
                seen.update(row.reason for row in journal.trials() if row.number == 3)
            return super().poll(timeout)

    stage.run(Looking(side_by_side, False, lambda job: None))
    assert "waits for others to end, as at most 3 trials train at a time (max_concurrent)" in seen


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ({"timeout": "2 hours"}, "`timeout` must be a duration"),
        ({"trial_timeout": -1}, "`trial_timeout` must be a duration"),
        ({"max_concurrent": 0}, "`max_concurrent` must be an integer of at least 1, got 0"),
        ({"max_concurrent": 2.5}, "`max_concurrent` must be an integer of at least 1, got 2.5"),
    ],
    ids=str,
)
def test_a_bad_budget_is_refused_before_there_is_a_study(argument: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=fault):
        tune(tasks.Blobs(), {"lr": shoal.grid([0.01])}, tmp_path / "study", **argument)
    assert not (tmp_path / "study").exists()


def test_a_timeout_before_the_first_report_loses_nothing(
    tmp_path: Path, finished: shoal.Study, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tune(tasks.Blobs(), {"lr": shoal.grid([0.01, 0.03])}, tmp_path / "short", timeout=1e-3, show_progress=True)
    said = capsys.readouterr().err
    assert (study.ended, [row.state for row in study.trials]) == ("timeout", [TrialState.PENDING] * 2)
    assert "ended by its timeout before a trial reported; 2 trials open" in said
    assert f"Resume with: shoal resume {study.directory}" in said
    with pytest.raises(ShoalError, match="`timeout` must be a duration"):
        shoal.resume(study.directory, timeout="soon", show_progress=False)
    assert shoal.resume(study.directory, timeout="0.001s", show_progress=False).ended == "timeout"
    study = shoal.resume(study.directory, show_progress=False)
    assert study.ended == "finished"
    check_equal(curves(study.directory), curves(finished.directory))


def test_what_is_left_is_told(finished: shoal.Study) -> None:
    with JournalView.read(finished.directory) as journal:
        seen = snapshot(journal, 0.0)
    open_trials = replace(seen, states={**seen.states, TrialState.COMPLETE: 1, TrialState.PENDING: 1}, end="")
    cases = [
        (replace(seen, time_left=60.0), "", ""),
        (replace(open_trials, time_left=None, pid=1, seconds_left=90.0), "0:01:30 left", ""),
        (replace(open_trials, time_left=60.0, pid=1, seconds_left=90.0), "0:01:30 left, timeout in 0:01:00", None),
        (replace(open_trials, time_left=60.0), "", "timeout in 0:01:00"),
        (replace(open_trials, time_left=0.0, end="timeout"), "", "ended by its timeout; 1 trial open"),
    ]
    for shown, left, timeout in cases:
        assert left_text(shown) == left
        assert timeout is None or timeout_text(shown) == timeout
