"""What costs make of observations: what holds on, what is corrected, what is not believed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from planner_samples import FUSES, GB, A, B

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.event import MemoryMeasured, Profiled, RelativeTimeMeasured
from shoal.core.job import Job, Purpose
from shoal.core.trial import Trial
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.costs import Costs, EpochTimes, Observation, OutOfMemoryObserved, WeightedMeans
from shoal.plan.cost.history import History, records

H200 = Device("cuda:0", "H200", 141 * GB)
KNOWN = replace(
    FUSES,
    member_memory=3 * GB,
    compiled_gain={4: 2.0},
    compile_seconds=5.0,
    recorded_gain={4: 3.0},
    crowding={2: 1.5},
    fused_gain={4: 1.1},
)
FOUND = replace(
    FUSES,
    step_seconds={1: 2.0, 4: 3.0},
    compiled_gain={8: 1.5},
    fused_gain={16: 4.0},
    reload_seconds=0.5,
    recorded_gain={8: 2.0},
    record_seconds=0.2,
)


def array(*numbers: int, key: FusionKey = A) -> Array:
    trials = (Trial(number, {"lr": number / 10, "width": 64}, 0, 0) for number in numbers)
    return Array(key, tuple(Member(trial, 0, 3) for trial in trials))


def job(*arrays: Array, purpose: Purpose = Purpose.TRAIN) -> Job:
    return Job("one", arrays or (array(0, 1),), purpose)


PROFILE, TRAIN = job(purpose=Purpose.PROFILE), job()


@pytest.fixture
def costs() -> Costs:
    return Costs(History(""))


def knowing(profile: Profile, *keys: FusionKey) -> Costs:
    """A costs in which keys were measured."""
    costs = Costs(History(""))
    for key in keys or (A,):
        costs.observe(Profiled("one", key, profile), PROFILE, H200)
    return costs


def after(
    costs: Costs, *seen: Observation, job: Job = TRAIN, device: Device = H200, key: FusionKey = A
) -> Profile | None:
    """What is estimated of a key after observations."""
    for each in seen:
        costs.observe(each, job, device)
    return costs.profile(key, "H200")


@pytest.mark.parametrize(
    ("known", "seen", "wrong", "means"),
    [
        (None, [2.0], 9, [2.0]),
        (2.0, [3.0, 4.0, 5.0], 9, [2.5, 3.0, 3.6]),
        (2.0, [2.05, 2.05], 9, [2.0, 2.0]),
        (2.0, [3.0, 3.0], 1.25, [3.0, 3.0]),
        (2.0, [1.0, 1.2], 1.25, [1.0, 1.1]),
    ],
    ids=["first", "weights", "hardly moves", "was wrong", "then begins anew"],
)
def test_a_mean_weighs_newer_observations_more(
    known: float | None, seen: Sequence[float], wrong: float, means: Sequence[float]
) -> None:
    weighted = WeightedMeans()
    for value, mean in zip(seen, means, strict=True):
        known = weighted.observe("name", known, value, wrong)
        assert known == pytest.approx(mean)


def test_a_profile_job_keeps_measurements_of_training_jobs() -> None:
    assert after(knowing(KNOWN), Profiled("two", A, FOUND), job=PROFILE) == replace(
        FOUND,
        member_memory=3 * GB,
        compiled_gain={4: 2.0, 8: 1.5},
        compile_seconds=5.0,
        recorded_gain={4: 3.0, 8: 2.0},
        crowding={2: 1.5},
    )


def test_a_profile_job_on_a_share_adds_its_speed_there() -> None:
    """Only of sizes that were measured on the whole device, and only if its process was limited."""
    costs = knowing(KNOWN)
    asked, slow = replace(PROFILE, compute_limit=0.5), replace(FUSES, step_seconds={1: 2.0, 4: 9.0, 16: 4.0})
    assert after(costs, Profiled("two", A, slow), job=asked) == KNOWN
    first = replace(KNOWN, share_speeds={1: {0.5: 0.5}, 16: {0.5: 1.0}})
    assert after(costs, Profiled("two", A, slow, compute_limit=0.5), job=asked) == first
    second = replace(KNOWN, share_speeds={1: {0.5: 0.5, 0.25: 0.25}, 16: {0.5: 1.0, 0.25: 1.0}})
    again = Profiled("three", A, replace(slow, step_seconds={1: 4.0, 16: 4.75}), compute_limit=0.25)
    assert after(costs, again, job=replace(PROFILE, compute_limit=0.25)) == second
    assert after(costs, Profiled("four", A, KNOWN), job=PROFILE) == second, "a new profile keeps them"


def test_a_training_job_adds_to_what_was_measured() -> None:
    expected = replace(KNOWN, compiled_gain={4: 2.0, 8: 1.5}, fused_gain={4: 1.1, 16: 4.0}, reload_seconds=0.5)
    expected = replace(expected, recorded_gain={4: 3.0, 8: 2.0}, record_seconds=0.2)
    costs = knowing(KNOWN)
    assert after(costs, Profiled("two", A, FOUND)) == expected
    again = replace(expected, fused_gain={4: 1.1, 16: 2.0})
    assert after(costs, Profiled("two", A, again)) == replace(expected, fused_gain={4: 1.1, 16: 3.0})


def test_of_two_runs_of_a_program_the_larger_demands_and_the_least_seconds_count(costs: Costs) -> None:
    key = FusionKey("program", "", 1, opaque=True)
    one, other = (
        Profile({1: seconds}, 1, 0, base_memory=size, member_memory=0, compute=compute, cores=cores, measured_members=1)
        for seconds, size, compute, cores in ((1.0, 100, 0.2, 0.5), (2.0, 50, 0.4, 0.1))
    )
    both = [Profiled("one", key, one), Profiled("two", key, other)]
    assert after(costs, *both, key=key) == replace(one, compute=0.4)


EPOCH = replace(FUSES, step_seconds={1: 0.1, 2: 0.2}, epoch_steps=10, validation_steps=0)
"""An epoch of two members takes two seconds."""
COMPILED = replace(EPOCH, compiled_gain={2: 3.0})


UNTRIED = replace(EPOCH, step_seconds={1: 0.1}, expected_epochs=9)


def test_the_first_epochs_of_members_together_give_the_time_of_their_size() -> None:
    found = after(knowing(UNTRIED), EpochTimes(1, 1, 1.0), EpochTimes(1, 4, 3.0), EpochTimes(1, 8, 6.0))
    assert found is not None
    assert found.step_seconds == pytest.approx({1: 0.1, 4: 0.3})


def test_sizes_that_a_training_job_has_timed_are_new() -> None:
    together = Job("one", (replace(array(0, 1), profile=UNTRIED),))
    timed = Profiled("one", A, replace(UNTRIED, step_seconds={1: 0.1, 2: 0.12}, fused_gain={2: 1.7}))
    found = after(knowing(UNTRIED), EpochTimes(1, 2, 1.9), timed, job=together)
    assert found == replace(UNTRIED, step_seconds={1: 0.1, 2: 0.12}, fused_gain={2: 1.7})


@pytest.mark.parametrize(
    ("profile", "seconds", "factor"),
    [
        pytest.param(EPOCH, [6.0], 3.0, id="three times as long"),
        pytest.param(EPOCH, [1.0, 1.0], 0.5, id="half as long"),
        pytest.param(EPOCH, [2.4], 1.1, id="a bit longer"),
        pytest.param(EPOCH, [2.4, 2.4, 2.4], 1.13, id="a bit longer, again and again"),
        pytest.param(EPOCH, [2.05, 1.95, 2.05], 1.0, id="noise"),
        pytest.param(COMPILED, [1.0], 1.0, id="compiled"),
        pytest.param(COMPILED, [6.0], 3.0, id="slow although compiled"),
    ],
)
def test_epochs_alone_scale_the_steps_of_all_sizes(profile: Profile, seconds: Sequence[float], factor: float) -> None:
    costs = knowing(profile)
    found = after(costs, *(EpochTimes(1, 2, each) for each in seconds))
    assert found is not None
    assert found.step_seconds == pytest.approx({size: factor * each for size, each in EPOCH.step_seconds.items()}, 0.01)
    assert found == replace(profile, step_seconds=found.step_seconds)
    assert (costs.version == 1) == (factor == 1), "nothing is planned anew for nothing"


@pytest.mark.parametrize(
    ("profile", "seen", "crowding"),
    [
        pytest.param(EPOCH, [EpochTimes(2, 2, 3.0, 2.0)], {2: 1.5}, id="against epochs alone"),
        pytest.param(EPOCH, [EpochTimes(2, 2, 3.0)], {2: 1.5}, id="against the profile"),
        pytest.param(COMPILED, [EpochTimes(2, 2, 3.0)], {}, id="that does not tell of compiled steps"),
        pytest.param(COMPILED, [EpochTimes(2, 2, 3.0, 1.0)], {2: 3.0}, id="epochs alone do"),
        pytest.param(EPOCH, [EpochTimes(2, 2, 3.0), EpochTimes(2, 2, 5.0)], {2: 2.0}, id="twice"),
        pytest.param(EPOCH, [EpochTimes(2, 2, 3.0), EpochTimes(3, 2, 8.0)], {2: 1.5, 3: 4.0}, id="of more jobs"),
    ],
)
def test_crowding_is_observed(profile: Profile, seen: Sequence[EpochTimes], crowding: Mapping[int, float]) -> None:
    assert after(knowing(profile), *seen) == replace(profile, crowding=crowding)


def test_an_unchanged_measurement_is_not_a_change(costs: Costs) -> None:
    assert after(costs, EpochTimes(2, 2, 3.0)) is None, "nothing is known of the key yet"
    assert costs.version == 0
    costs = knowing(EPOCH)
    after(costs, *([EpochTimes(2, 2, 3.0)] * 3))
    assert costs.version == 2


def test_the_relative_time_of_a_pack_applies_to_its_pairs() -> None:
    history = History("")
    costs = Costs(history)
    a, b, c = A.steps, B.steps, replace(A, structure="c").steps
    costs.observe(RelativeTimeMeasured("one", (B, A, replace(A, structure="c")), 0.9), TRAIN, H200)
    assert history.relative_times("H200") == dict.fromkeys(
        (tuple(sorted(pair)) for pair in ((a, b), (a, c), (b, c))), 0.9
    )
    costs.observe(RelativeTimeMeasured("one", (A, B), 0.7), TRAIN, H200)
    costs.observe(RelativeTimeMeasured("one", (B, A, A), 0.5), TRAIN, H200)
    assert history.relative_times("H200")[min(a, b), max(a, b)] == pytest.approx(0.8), (
        "what a pair shows itself is better known"
    )
    assert history.relative_times("H200")[a, a] == 0.5


MEMORY = replace(FUSES, base_memory=100, member_memory=10)


@pytest.mark.parametrize(("peak", "raised"), [(140, False), (175, False), (176, True), (280, True), (90, False)])
def test_memory_that_is_far_above_the_profile_raises_it(peak: int, raised: bool) -> None:
    found = after(knowing(MEMORY), MemoryMeasured("one", {A: 4}, peak))
    assert found is not None
    assert (found != MEMORY) == raised
    if raised:
        assert peak <= Cost(found).memory(4) <= peak + 5
        assert found.step_seconds == MEMORY.step_seconds


def test_arrays_in_one_process_are_raised_together_and_not_above_the_device() -> None:
    costs = knowing(MEMORY)
    costs.observe(Profiled("one", B, replace(MEMORY, base_memory=50, member_memory=30)), PROFILE, H200)
    one = after(costs, MemoryMeasured("one", {A: 2, B: 1}, 300))
    two = costs.profile(B, "H200")
    assert one is not None
    assert two is not None
    assert (one.base_memory, one.member_memory, two.base_memory, two.member_memory) == (200, 20, 100, 60)
    limited = after(knowing(MEMORY), MemoryMeasured("one", {A: 4}, 10_000), device=replace(H200, memory=280))
    assert limited is not None
    assert Cost(limited).memory(4) == 280


def test_a_process_with_an_unmeasured_array_changes_no_profile() -> None:
    assert after(knowing(MEMORY), MemoryMeasured("one", {A: 2, B: 1}, 10_000)) == MEMORY


@pytest.mark.parametrize(
    ("device", "peak", "expected"),
    [
        pytest.param(1000, 0, 15, id="half as much again"),
        pytest.param(1000, 140, 15, id="what was seen is less"),
        pytest.param(1000, 170, 17, id="what was seen is more"),
        pytest.param(112, 0, 12, id="one member still fits"),
        pytest.param(105, 0, 10, id="never less than before"),
    ],
)
def test_running_out_of_memory_raises_the_memory_of_a_member(device: int, peak: int, expected: int) -> None:
    seen = [MemoryMeasured("one", {A: 4}, peak)] if peak else []
    found = after(
        knowing(MEMORY), *seen, OutOfMemoryObserved((array(0, 1, 2, 3),)), device=replace(H200, memory=device)
    )
    assert found == replace(MEMORY, member_memory=expected)


def test_each_out_of_memory_raises_the_memory_further() -> None:
    costs, seen = knowing(replace(MEMORY, member_memory=0)), []
    for _ in range(4):
        profile = after(costs, OutOfMemoryObserved((array(0, 1, 2, 3),)))
        assert profile is not None
        seen.append(profile.member_memory)
    assert seen == [1, 2, 3, 5]


def test_a_failure_of_several_arrays_of_a_key_raises_its_memory_once() -> None:
    found = after(knowing(MEMORY), OutOfMemoryObserved((array(0), array(1), array(2))))
    assert found == replace(MEMORY, member_memory=15)


def test_the_peak_of_a_pack_or_of_a_job_that_is_over_is_not_an_arrays_own() -> None:
    costs = knowing(MEMORY)
    costs.observe(MemoryMeasured("one", {A: 4}, 170), TRAIN, H200)
    costs.end("one")
    found = after(costs, OutOfMemoryObserved((array(0, 1, 2, 3),)))
    assert found == replace(MEMORY, member_memory=15)
    costs = knowing(MEMORY, A, B)
    costs.observe(MemoryMeasured("one", {A: 4}, 170), TRAIN, H200)
    assert after(costs, OutOfMemoryObserved((array(0), array(1, key=B)))) == replace(MEMORY, member_memory=15)


def test_tasks_of_structures_are_kept_across_studies(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    Costs(History(path), "Digits").observe(Profiled("one", A, FUSES), job(array(3)), H200)
    assert [record.tasks for record in records(path)] == [{"Digits": {"lr": 0.3, "width": 64}}]
    Costs(History(path), "Digits").observe(Profiled("one", A, FUSES), job(array(3, 4)), H200)
    Costs(History(path), "Letters").observe(Profiled("one", A, FUSES), job(array(3, 4)), H200)
    assert [record.tasks for record in records(path)] == [{"Digits": {"width": 64}, "Letters": {"width": 64}}]
