"""Losses are summed up once a second, with the steps that an array has taken of its epoch and their rate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.core.event import EpochProgress, Event, Reported
from shoal.train import array_members
from shoal.train.array_members import LossTracker


def runtime(number: int, epoch: int) -> Any:
    return SimpleNamespace(trial=SimpleNamespace(number=number), epoch=epoch, step=0, loss_scale=None, failure="")


@pytest.mark.parametrize(
    ("seconds", "unsettled", "found"),
    [
        pytest.param([0.5] * 8, 0, [(2, 2.0), (4, 2.0), (6, 2.0), (8, 2.0)], id="steady"),
        pytest.param([3.0, 3.0], 0, [(1, 1 / 3), (2, 1 / 3)], id="steps of seconds"),
        pytest.param(
            [4.0, *[0.5] * 4], 0, [(1, 0.25), (3, 2.6 / 3.4), (5, 3.56 / 3.04)], id="a slow first step is forgotten"
        ),
        pytest.param([9.0, 9.0, *[0.5] * 4], 3, [(1, 9.0), (2, 9.0), (4, 2.0), (6, 2.0)], id="slow unsettled steps"),
        pytest.param([0.125] * 7, 0, [], id="a short epoch"),
    ],
)
def test_progress_is_reported_once_a_second(
    seconds: list[float], unsettled: int, found: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(array_members, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    events: list[Event] = []
    tracker, cohort = LossTracker("1", events), [runtime(7, 2), runtime(8, 1)]
    for step, took in enumerate(seconds, start=1):
        tracker.begin_step()
        now[0] += took
        tracker.add(cohort, torch.tensor([0.5 / step, torch.nan if step > 3 else 9.0], dtype=torch.float64))
        tracker.end_step(cohort, step, 100, settled=step > unsettled, profiled=9.0)
    told = [event.progress for event in events if isinstance(event, Reported)]
    assert told == [EpochProgress((7, 8), 2, step, 100, 0.5 / step, pytest.approx(rate)) for step, rate in found]


def test_without_a_finite_loss_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_members, "READ_SECONDS", 0.0)
    events: list[Event] = []
    tracker, cohort = LossTracker("1", events), [runtime(7, 0)]
    tracker.begin_step()
    tracker.add(cohort, torch.tensor([torch.nan]))
    tracker.end_step(cohort, 1, 100, settled=False, profiled=None)
    (event,) = events
    assert isinstance(event, Reported)
    assert event.progress is not None
    assert (event.progress.loss, event.progress.steps_per_second) == (None, None)
