"""Which jobs hang, on a clock of the tests' own."""

from collections.abc import Sequence

import pytest

from shoal.core.errors import ShoalError
from shoal.core.event import Event, Heartbeat, SignaturesFound
from shoal.core.job import Job
from shoal.spec import StudySpec
from shoal.study.hangs import HangDetector

STEPS, PREPARES = Heartbeat("job", True), Heartbeat("job", False)


def hung_at(said: Sequence[tuple[float, Event]], until: float = 2000.0) -> float | None:
    """When a job of which a limit of 100 seconds is asked is found to hang; it is looked at every second."""
    hang_detector, left = HangDetector(100.0), list(said)
    hang_detector.begin(Job("job", ()))
    for now in range(int(until)):
        while left and left[0][0] <= now:
            hang_detector.on_event(left.pop(0)[1])
        if list(hang_detector.poll(float(now))):
            return float(now)
    return None


@pytest.mark.parametrize(
    ("said", "hangs"),
    [
        pytest.param([], 1000.0, id="what was never heard of may be loading data"),
        pytest.param([(0, STEPS)], 100.0, id="no step after the first"),
        pytest.param([(10 * place, STEPS) for place in range(30)], 390.0, id="steps end"),
        pytest.param([(0, STEPS), (30, STEPS)], 330.0, id="ten times the longest step"),
        pytest.param([(0, STEPS), (30, PREPARES)], 1030.0, id="compiling"),
        pytest.param([(0, PREPARES), (900, PREPARES), (950, STEPS)], 1050.0, id="what preparing took is not a step"),
        pytest.param([(0, STEPS), (90, SignaturesFound("job", {}))], 990.0, id="any event is progress"),
        pytest.param([(50 * place, STEPS) for place in range(60)], None, id="well"),
    ],
)
def test_a_job_hangs_when_it_has_shown_no_progress_for_long(
    said: Sequence[tuple[float, Event]], hangs: float | None
) -> None:
    found = hung_at(said)
    assert (found is None) == (hangs is None)
    assert found is None or hangs is None or hangs - 11 <= found <= hangs + 1, "as exact as looks a second apart are"


def test_nothing_hangs_because_the_engine_slept() -> None:
    hang_detector = HangDetector(100.0)
    hang_detector.begin(Job("job", ()))
    hang_detector.on_event(STEPS)
    assert not list(hang_detector.poll(0.0))
    assert not list(hang_detector.poll(5000.0))
    assert not list(hang_detector.poll(5001.0))


def test_a_job_that_has_ended_is_not_watched() -> None:
    hang_detector = HangDetector(1.0)
    hang_detector.begin(Job("job", ()))
    hang_detector.end("job")
    hang_detector.on_event(STEPS)
    assert not [hung for now in range(50) for hung in hang_detector.poll(float(now))]


@pytest.mark.parametrize("seconds", [0, -1, 2.9, float("nan"), float("inf"), "60", None, True])
def test_a_limit_that_is_none_is_shown(seconds: object) -> None:
    with pytest.raises(ShoalError, match="`hang_seconds` must be a finite number of at least 3"):
        StudySpec(metric="loss", mode="min", hang_seconds=seconds)
