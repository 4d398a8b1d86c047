"""What fusing and packing saved: the reported seconds of the epochs, times the measured speed-up of arrays."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.recorded import RecordedJournal
from timeline_samples import Clock, machines, training, trial

import shoal
from shoal.core.activity import Activity
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import Proven
from shoal.core.job import Purpose
from shoal.core.trial import Budget, Report, TrialGroup
from shoal.journal.view import JournalView
from shoal.look.savings import Savings, Speedup, SpeedupWatch, savings, speedup
from shoal.look.snapshot import snapshot
from shoal.look.text import speedup_text
from shoal.plan.cost.history import History
from shoal.spec import StudySpec

KIND = "NVIDIA H200"
PROFILE = Profile({1: 0.1, 4: 0.2}, 10, 0, 0, 0, 1.0, 1.0)
"""Four members train twice as fast at once."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(tmp_path: Path, clock: Clock) -> Iterator[RecordedJournal]:
    study = StudySpec(metric="accuracy", mode="max")
    with RecordedJournal.create(tmp_path / "study", study, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_devices(machines(1))
        journal.record_proposal(9, [TrialGroup(tuple(map(trial, range(8))), Budget(3))])
        yield journal


@pytest.fixture
def history() -> History:
    known = History("")
    for structure in "ab":
        known.put(structure, "d", 32, KIND, PROFILE)
    return known


def train(journal: RecordedJournal, structures: str, trials: int, seconds: float) -> None:
    """A job whose trials report two epochs each, of so many seconds of their share."""
    journal.record_job_start(training("1", list(range(trials)), structures), "cuda:0")
    for epoch in (1, 2):
        journal.record_reports("1", [Report(number, epoch, {"accuracy": 0.5}, seconds) for number in range(trials)])


def step(journal: RecordedJournal, name: str, numbers: list[int], structures: str, device: str = "cuda:0") -> None:
    """A job whose arrays have taken a step."""
    job = training(name, numbers, structures)
    journal.record_job_start(job, device)
    for array in job.arrays:
        if len(array.members) > 1:
            journal.record_checks(Proven(name, array.key, {member.trial.number: 0 for member in array.members}))


def test_an_array_is_compared_with_its_members_one_by_one(
    journal: RecordedJournal, clock: Clock, history: History
) -> None:
    journal.record_job_start(replace(training("0", [0]), purpose=Purpose.PROFILE), "cuda:0")
    clock.now += 0.5
    activities = {Activity.START: 0.2, Activity.SIGNATURE: 0.1, Activity.PROFILE: 0.2}
    journal.record_job_end("0", "finished", failed=False, activities=activities)
    train(journal, "a", 4, 0.25)
    found = savings(journal, history)
    assert found == Savings(epochs=8, together=2.0, alone=pytest.approx(4.0), packed=0.0, measuring=pytest.approx(0.3))
    assert found.saved == pytest.approx(1.7)


@pytest.mark.parametrize("outside", [Activity.VALIDATION, Activity.END_EPOCH])
def test_time_of_epochs_outside_of_steps_counts_as_it_is(
    outside: Activity, journal: RecordedJournal, history: History
) -> None:
    train(journal, "a", 4, 0.25)
    activities = {Activity.START: 9.0, Activity.STEPS: 1.0, Activity.TIMED_STEPS: 0.2, outside: 0.4}
    journal.record_job_end("1", "finished", failed=False, activities=activities)
    found = savings(journal, history)
    assert found is not None
    assert (found.together, found.alone) == (2.0, pytest.approx(2.0 * (0.25 + 0.75 * 2)))


def test_epochs_of_a_killed_job_are_divided_as_those_of_the_others(journal: RecordedJournal, history: History) -> None:
    train(journal, "a", 4, 0.25)
    journal.record_job_end("1", "crashed", failed=True)
    step(journal, "2", [4], "a")
    journal.record_job_end("2", "finished", failed=False, activities={Activity.STEPS: 1.0, Activity.VALIDATION: 3.0})
    found = savings(journal, history)
    assert found is not None
    assert (found.together, found.alone) == (2.0, pytest.approx(2.0 * (0.75 + 0.25 * 2)))


def test_checks_against_plain_pytorch_are_no_time_that_trials_would_take_alone(
    journal: RecordedJournal, history: History
) -> None:
    train(journal, "a", 4, 0.25)
    activities = {Activity.STEPS: 1.0, Activity.VALIDATION: 0.5, Activity.CHECKS: 0.5}
    journal.record_job_end("1", "finished", failed=False, activities=activities)
    found = savings(journal, history)
    assert found is not None
    assert (found.together, found.alone) == (2.0, pytest.approx(2.0 * (0.25 + 0.5 * 2)))


def test_compilation_and_autotuning_are_no_gain(journal: RecordedJournal, history: History) -> None:
    train(journal, "a", 4, 0.25)
    activities = {Activity.STEPS: 0.5, Activity.COMPILE: 1.0, Activity.AUTOTUNE: 0.5, Activity.BUILD: 4.0}
    journal.record_job_end("1", "finished", failed=False, activities=activities)
    found = savings(journal, history)
    assert found is not None
    assert (found.together, found.alone) == (2.0, pytest.approx(2.0 * (0.75 + 0.25 * 2)))
    assert found.measuring == 0.5


def test_a_pack_saves_what_its_relative_time_says(journal: RecordedJournal, clock: Clock, history: History) -> None:
    history.put_relative_time(("a x 32", "b x 32"), KIND, 0.8)
    journal.record_job_start(training("1", [0, 1], "ab"), "cuda:0")
    for number, epoch in ((0, 1), (1, 1), (0, 2), (1, 2)):
        clock.now += 1.0
        journal.record_reports("1", [Report(number, epoch, {"accuracy": 0.5}, 0.8)])
    found = savings(journal, history)
    assert found is not None
    assert (found.together, found.alone) == (pytest.approx(3.2), pytest.approx(4.0))
    assert found.packed == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("structures", "trials", "opaque"),
    [
        pytest.param("a", 1, False, id="a trial alone"),
        pytest.param("c", 4, False, id="never measured"),
        pytest.param("a", 4, True, id="a user's program"),
    ],
)
def test_nothing_is_said_of_what_was_not_grouped_or_measured(
    structures: str, trials: int, opaque: bool, journal: RecordedJournal, history: History
) -> None:
    journal.spec = replace(journal.spec, opaque="opaque train 0123456789abcdef" if opaque else "")
    train(journal, structures, trials, 0.25)
    assert savings(journal, history) is None


def test_a_trial_that_joined_a_job_counts_with_its_structure(journal: RecordedJournal, history: History) -> None:
    journal.record_job_start(training("1", [0], "a"), "cuda:0")
    journal.record_join("1", "cuda:0", training("2", [1], "a").arrays)
    journal.record_reports("1", [Report(number, 1, {"accuracy": 0.5}, 0.25) for number in (0, 1)])
    found = savings(journal, history)
    assert found is not None
    assert (found.epochs, found.together) == (2, 0.5)


@pytest.mark.parametrize(
    ("measured", "speedup"),
    [
        pytest.param({"step_seconds": {1: 0.1, 4: 0.1}}, 4.0, id="steps as short as one member's"),
        pytest.param({"step_seconds": {1: 3.0, 4: 0.1}}, 4.0, id="one member was disturbed"),
        pytest.param({"step_seconds": {1: 0.1, 4: 0.9}}, 1.0, id="an array takes plain steps where they are faster"),
        pytest.param({"fused_gain": {4: 3.0}}, 3.0, id="timed in turns"),
        pytest.param({"step_seconds": {1: 0.1}}, 1.0, id="one member alone was timed"),
    ],
)
def test_the_speedup_is_that_which_was_measured(
    measured: dict[str, Any], speedup: float, journal: RecordedJournal, history: History
) -> None:
    history.put("a", "d", 32, KIND, replace(PROFILE, **measured))
    train(journal, "a", 4, 0.25)
    found = savings(journal, history)
    assert found is not None
    assert found.alone == pytest.approx(2.0 * speedup)


def test_a_repeated_report_is_one_epoch(journal: RecordedJournal, history: History) -> None:
    train(journal, "a", 2, 0.25)
    journal.record_reports("1", [Report(0, 2, {"accuracy": 0.5}, 0.0)])
    found = savings(journal, history)
    assert found is not None
    assert found.epochs == 4


FULL = (
    "training steps of one of these models already fill a GPU: expect 1.0 to 1.1 times the speed of one trial at a "
    "time, as measured"
)


@pytest.mark.parametrize(
    ("measured", "jobs", "relative", "text"),
    [
        pytest.param(
            {"fused_gain": {4: 3.04}},
            [("a", 4)],
            None,
            "training steps of arrays of 4 are 3.0 times as fast as those of one trial at a time, as measured",
            id="an array",
        ),
        pytest.param({"fused_gain": {4: 1.04}}, [("a", 4)], None, FULL, id="an array that gains nothing"),
        pytest.param({"fused_gain": {4: 0.7}}, [("a", 4)], None, FULL, id="an array that takes plain steps"),
        pytest.param({}, [("a", 1), ("a", 1)], None, FULL, id="not fused since that is no faster"),
        pytest.param(
            {"compute": 0.3},
            [("a", 1), ("a", 1)],
            None,
            "training these models together gains little: expect 1.0 to 1.1 times the speed of one trial at a time, "
            "as measured",
            id="for another reason",
        ),
        pytest.param(
            {},
            [("ab", 5), ("b", 2)],
            0.5,
            "training steps of arrays of 4 are 2.0 to 4.0 times as fast as those of one trial at a time, as measured",
            id="arrays in packs",
        ),
        pytest.param(
            {"step_seconds": {1: 0.1}},
            [("ab", 2)],
            0.8,
            "training steps of trials packed into one process are 1.2 times as fast as those of one trial at a time, "
            "as measured",
            id="a pack",
        ),
        pytest.param({"step_seconds": {1: 0.1}}, [("a", 4)], None, None, id="only one member was timed"),
        pytest.param({}, [("a", 8)], None, None, id="a larger array than was measured"),
        pytest.param({}, [("a", 1)], None, None, id="one trial"),
        pytest.param({}, [("c", 4)], None, None, id="never measured"),
    ],
)
def test_the_speedup_to_expect_is_told_once_it_is_measured(
    measured: dict[str, Any],
    jobs: list[tuple[str, int]],
    relative: float | None,
    text: str | None,
    journal: RecordedJournal,
    history: History,
) -> None:
    history.put("a", "d", 32, KIND, replace(PROFILE, **measured))
    if relative is not None:
        history.put_relative_time(("a x 32", "b x 32"), KIND, relative)
    free = iter(range(8))
    for name, (structures, trials) in enumerate(jobs):
        step(journal, str(name), [next(free) for _ in range(trials)], structures)
    found = speedup(journal, history)
    assert (found and speedup_text(found)) == text


def test_a_structure_in_plain_pytorch_has_no_speedup(journal: RecordedJournal, history: History) -> None:
    train(journal, "b", 4, 0.25)
    key = training("1", [0], "b").arrays[0].key
    journal.record_checks(Proven("1", key, dict.fromkeys(range(4), 0), refusal="a layer mixes its batch"))
    assert speedup(journal, history) is None
    found = savings(journal, history)
    assert found is not None
    assert found.alone == found.together
    history.put("a", "d", 32, KIND, replace(PROFILE, fused_gain={4: 3.0}))
    step(journal, "2", [4, 5, 6, 7], "a")
    assert speedup(journal, history) == Speedup(3.0, 3.0, 4, "GPU")


def test_trials_that_joined_a_job_one_after_another_are_no_larger_array(
    journal: RecordedJournal, history: History
) -> None:
    history.put("a", "d", 32, KIND, replace(PROFILE, step_seconds={1: 0.1, 4: 0.2, 8: 0.2}))
    step(journal, "1", [0, 1, 2, 3], "a")
    journal.record_join("1", "cuda:0", training("2", [4, 5, 6, 7], "a").arrays)
    assert speedup(journal, history) == Speedup(2.0, 2.0, 4, "GPU")


@pytest.mark.parametrize(
    ("cores", "compute", "fills"), [(1.0, 0.99, "core"), (1.9, 0.95, "CPU"), (0.5, 0.5, "")], ids=str
)
def test_what_models_fill_on_a_cpu(
    cores: float, compute: float, fills: str, journal: RecordedJournal, history: History
) -> None:
    profile = replace(PROFILE, cores=cores, compute=compute, fused_gain={4: 1.0})
    history.put("a", "d", 32, "cpu/1", profile)
    journal.record_devices(Cluster((Node("one", 2, (Device("cpu:0", "cpu/1", 1000),)),)))
    step(journal, "1", [0, 1, 2, 3], "a", "cpu:0")
    assert speedup(journal, history) == Speedup(1.0, 1.0, 4, fills)


@pytest.mark.parametrize("spec", [{"opaque": "opaque train 0123456789abcdef"}, {"fuse": False}], ids=str)
def test_no_speedup_is_told_of_trials_that_are_not_to_be_fused(
    spec: dict[str, Any], journal: RecordedJournal, history: History
) -> None:
    journal.spec = replace(journal.spec, **spec)
    train(journal, "a", 4, 0.25)
    assert speedup(journal, history) is None


def test_a_study_records_its_speedup_as_soon_as_it_is_measured_and_looks_ever_more_rarely(
    journal: RecordedJournal, history: History
) -> None:
    now, looks = [0.0], []
    watch = SpeedupWatch(journal, history, clock=lambda: now[0])
    for tenth in range(100):
        now[0] = tenth / 10
        if tenth == 21:
            step(journal, "1", [0, 1, 2, 3], "a")
        watch.update()
        looks.append("speedup" in journal.study)
    assert looks.index(True) == 30, "after looks at 0, 0.5, 1.2 and 2 seconds"
    assert snapshot(journal, 0.0).speedup == Speedup(2.0, 2.0, 4, "GPU")
    journal.put("speedup", None)
    watch.record()
    assert journal.study["speedup"]["most"] == 2.0, "once more at the end, with what training has measured"


def test_a_study_that_has_ended_keeps_it(finished: shoal.Study) -> None:
    with JournalView.read(finished.directory) as journal:
        found = snapshot(journal, 0.0).savings
    assert found is not None
    assert 0 < found.epochs <= 32
    assert all(math.isfinite(value) and value > 0 for value in (found.together, found.alone, found.measuring))
