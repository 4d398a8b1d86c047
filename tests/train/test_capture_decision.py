"""One process compiles a step, if that pays; others do not wait for it."""

from dataclasses import replace

import pytest

from shoal.core.demand import Profile
from shoal.fuse.capture_decision import RETRY_SECONDS, CaptureDecision
from shoal.fuse.compile_cache import CompileRecord

PROFILE = Profile({4: 1.0}, 10, 3, 0, 0, 1.0, 1.0, compiled_gain={4: 2.0}, compile_seconds=20.0, reload_seconds=2.0)
NEVER_FASTER = replace(PROFILE, compiled_gain={4: 1.0})

NOBODY, ANOTHER, BEFORE = "nobody has compiled it", "another process compiles it", "it was compiled before"
CASES = {
    "60 s saved": (PROFILE, NOBODY, 120, {}, True, False),
    "10 s saved": (PROFILE, NOBODY, 20, {}, False, False),
    "10 s saved here, and as much in each of four later arrays": (PROFILE, NOBODY, 20, {20: 4.0}, True, False),
    "10 s saved, and only reloading to pay for": (PROFILE, BEFORE, 20, {}, True, False),
    "1 s saved, and only reloading to pay for": (PROFILE, BEFORE, 2, {}, False, False),
    "another process compiles it": (PROFILE, ANOTHER, 120, {}, False, True),
    "the other process compiles what is worth reloading": (PROFILE, ANOTHER, 20, {}, False, True),
    "the other process compiles what is not worth reloading": (PROFILE, ANOTHER, 2, {}, False, False),
    "a step that is never faster": (NEVER_FASTER, ANOTHER, 10**9, {}, False, False),
}


@pytest.mark.parametrize(("profile", "state", "steps", "later", "now", "waits"), CASES.values(), ids=CASES)
def test_decision(
    profile: Profile,
    state: str,
    steps: int,
    later: dict[int, float],
    now: bool,
    waits: bool,
    request: pytest.FixtureRequest,
) -> None:
    other, mine = CompileRecord(request.node.name), CompileRecord(request.node.name)
    if state is not NOBODY:
        assert other.begin()
    other.end(compiled=state is BEFORE) if state is not ANOTHER else None
    decision = CaptureDecision(profile, 4, steps, later, mine)
    assert (decision(1.0), decision.waits) == (now, waits)
    assert decision.reloads is (state is BEFORE)
    other.end(compiled=False)
    is_free = state is not NOBODY or not now
    assert other.begin() is is_free, "it holds the right if, and only if, it compiles"


@pytest.mark.parametrize(
    ("profile", "steps", "records", "expected"),
    [
        pytest.param(PROFILE, 120, False, True, id="60 s saved by compiling"),
        pytest.param(PROFILE, 20, False, True, id="10 s saved, if the machine has compiled it before"),
        pytest.param(PROFILE, 2, False, False, id="1 s saved, and 2 s to reload"),
        pytest.param(NEVER_FASTER, 10**9, False, False, id="never faster"),
        pytest.param(replace(NEVER_FASTER, recorded_gain={4: 2.0}, record_seconds=1.0), 5, True, True, id="recorded"),
        pytest.param(replace(NEVER_FASTER, recorded_gain={4: 2.0}, record_seconds=1.0), 5, False, False, id="no GPU"),
        pytest.param(None, 1, False, True, id="unknown"),
        pytest.param(None, 0, True, False, id="no step left"),
    ],
)
def test_whether_capturing_can_pay_at_all(
    profile: Profile | None, steps: int, records: bool, expected: bool, request: pytest.FixtureRequest
) -> None:
    decision = CaptureDecision(profile, 4, steps, record=CompileRecord(request.node.name))
    assert decision.can_pay(records) is expected


def test_a_step_takes_as_long_as_all_of_its_batches() -> None:
    assert [CaptureDecision(PROFILE, 4, 2).can_pay(False, batches) for batches in (1, 8)] == [False, True]


def test_it_asks_again_until_the_other_process_is_done() -> None:
    other, now = CompileRecord("asks again"), [0.0]
    assert other.begin()
    decision = CaptureDecision(PROFILE, 4, 120, record=CompileRecord("asks again"), clock=lambda: now[0])
    assert not decision(1.0)
    found = []
    for seconds in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        now[0] = seconds * RETRY_SECONDS
        if seconds == 2.5:
            other.end(compiled=False)  # as if it was killed
        found.append(decision.may_retry())
    assert found == [False, False, False, False, False, True]
    assert decision(1.0)
    assert not decision.waits
    assert not decision.may_retry()
    assert not other.begin(), "this process compiles now"
    decision.end(compiled=True)
    assert CompileRecord("asks again").exists


def test_without_a_record_each_array_decides_for_itself() -> None:
    assert CaptureDecision(PROFILE, 4, 120)(1.0)
    assert not CaptureDecision(PROFILE, 4, 20)(1.0)
