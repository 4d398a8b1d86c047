"""What a study loses time to: the three largest losses, each with its seconds, its cause and a remedy."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.recorded import RecordedJournal
from timeline_samples import Clock, machines, training, trial

from shoal.core.activity import Activity
from shoal.core.cause import Cause
from shoal.core.rows import TrialRow, Verdict
from shoal.core.trial import Budget, Report, TrialGroup, TrialState
from shoal.look.accounting import Accounting, account
from shoal.look.diagnosis import Diagnosis, diagnose, diagnosis, diagnosis_json
from shoal.look.overview import Overview, overview
from shoal.spec import StudySpec


@pytest.fixture
def study(tmp_path: Path) -> Overview:
    """A study of two devices: four trials took 60 s of steps in one job, of a structure named "a"."""
    clock = Clock()
    with RecordedJournal.create(
        tmp_path / "study", StudySpec(metric="accuracy", mode="max"), task=b"", algorithm=b"", clock=clock
    ) as journal:
        journal.record_devices(machines(2))
        journal.record_proposal(4, [TrialGroup(tuple(map(trial, range(4))), Budget(3))])
        journal.record_job_start(training("job-00001", range(4)), "cuda:0")
        clock.now += 100
        journal.record_reports(
            "job-00001", [Report(x, 3, {"accuracy": 0.5}, 25.0, TrialState.COMPLETE) for x in range(4)]
        )
        journal.record_job_end("job-00001", "finished", failed=False, activities={Activity.STEPS: 60.0})
        return overview(journal, clock.now)


def diagnosed(study: Overview, spent: Mapping[Activity, float], wall: float = 50.0) -> Diagnosis:
    """The diagnosis with these seconds of two devices that ran for 50 s each."""
    return diagnose(study, Accounting(wall, {"cuda:0": spent, "cuda:1": {}}), {})


CASES = {
    "waiting for results": (Activity.WAITS_FOR_TRIALS, "devices idle while others train", "asynchronous"),
    "idle at the end": (Activity.FINISHED, "devices idle at the end", "fewer devices"),
    "start": (Activity.START, "start of processes", "imports"),
    "data": (Activity.DATA, "start of processes", "preprocessing"),
    "waiting for measuring": (Activity.WAITS_FOR_MEASURING, "devices idle while others measure", "shoal history"),
    "compile": (Activity.COMPILE, "compilation", "tensor shapes"),
    "checks": (Activity.CHECKS, "checks against plain PyTorch", "Nothing to change"),
    "validation": (Activity.VALIDATION, "validation", "smaller validation set"),
    "end_epoch": (Activity.END_EPOCH, "end_epoch", "less often"),
    "checkpoints": (Activity.CHECKPOINTS, "checkpoints", "checkpoint_seconds"),
    "engine": (Activity.ENGINE, "planning", "longer rungs"),
}


@pytest.mark.parametrize(("activity", "name", "remedy"), CASES.values(), ids=CASES)
def test_time_beside_training_steps_is_named_with_a_remedy(
    study: Overview, activity: Activity, name: str, remedy: str
) -> None:
    (loss,) = diagnosed(study, {Activity.STEPS: 80.0, activity: 20.0}).losses
    assert (loss.name, loss.seconds, loss.at_most) == (name, 20.0, False)
    assert remedy in loss.remedy


def test_measuring_is_what_jobs_report_of_it(study: Overview) -> None:
    spent = {Activity.SIGNATURE: 1.0, Activity.PROFILE: 2.0, Activity.AUTOTUNE: 4.0, Activity.COMPILE: 8.0}
    (bar,) = study.bars
    study = replace(study, bars=(replace(bar, job=replace(bar.job, activities=spent)),))
    (loss,) = diagnosed(study, {Activity.STEPS: 80.0}).losses
    assert (loss.name, loss.seconds) == ("measuring", 7.0)


def test_three_losses_are_named_the_largest_first(study: Overview) -> None:
    spent = {Activity.CHECKS: 5.0, Activity.VALIDATION: 9.0, Activity.ENGINE: 7.0, Activity.COMPILE: 3.0}
    found = diagnosed(study, {Activity.STEPS: 76.0, **spent})
    assert [loss.seconds for loss in found.losses] == [9.0, 7.0, 5.0]
    assert diagnosis_json(found)["losses"][0]["share"] == pytest.approx(0.09)
    assert found.lines[1].startswith("validation, 9 s (9%): ")


def test_it_says_so_if_there_is_nothing_to_gain(study: Overview) -> None:
    found = diagnosed(study, {Activity.STEPS: 99.5, Activity.VALIDATION: 0.5})
    assert found.losses == ()
    assert found.summary.endswith("there is nothing to gain.")


def test_unreported_time_is_unknown_and_neither_lost_nor_gained(study: Overview) -> None:
    found = diagnosed(study, {Activity.STEPS: 60.0, Activity.UNREPORTED: 40.0})
    assert found.losses == ()
    assert "40 s are not known, as jobs were killed" in found.summary
    assert "nothing to gain" not in found.summary
    assert "never report it" in diagnosed(study, {Activity.UNREPORTED: 100.0}).summary
    (bar,) = study.bars
    runs = replace(
        study, state=replace(study.state, pid=1), bars=(replace(bar, job=replace(bar.job, ended=None, outcome="")),)
    )
    assert "40 s are not known yet" in diagnosed(runs, {Activity.STEPS: 60.0, Activity.UNREPORTED: 40.0}).summary
    assert "not known yet" in diagnosed(runs, {Activity.UNREPORTED: 100.0}).summary


def test_where_nothing_ran_nothing_is_said_of_devices(study: Overview) -> None:
    found = diagnosed(replace(study, bars=()), {Activity.START: 0.1, Activity.FINISHED: 90.0})
    assert found.lines == ["No job has run."]


def test_an_asynchronous_algorithm_is_told_of_to_others_alone(study: Overview) -> None:
    spent = Accounting(50.0, {"cuda:0": {Activity.STEPS: 80.0, Activity.WAITS_FOR_TRIALS: 20.0}, "cuda:1": {}})
    for algorithm, told in [("ASHA(space, trials=9)", False), ("Hyperband(space)", True)]:
        (loss,) = diagnose(study, spent, {}, algorithm).losses
        assert ("asynchronous" in loss.remedy) == told


def test_losses_of_a_job_that_failed_do_not_overlap(study: Overview) -> None:
    (bar,) = study.bars
    spent = {Activity.START: 40.0, Activity.ENGINE: 15.0, Activity.STEPS: 45.0}
    failed = replace(bar.job, outcome="raised", activities={Activity.START: 40.0, Activity.STEPS: 45.0})
    found = diagnosed(
        replace(study, bars=(replace(bar, job=failed),), failed_trials=study.best[:2]), spent, wall=bar.end / 2
    )
    assert [(loss.name, loss.seconds) for loss in found.losses] == [
        ("work that was cut off", 45.0),
        ("start of processes", 40.0),
        ("planning", 15.0),
    ]


def test_a_refused_structure_costs_at_most_what_an_array_would_save(study: Overview) -> None:
    key = next(iter(study.bars[0].job.members))
    refused = Verdict(key, (0, 1, 2, 3), members=4, refusal="`net.py:42` asks for a Python number")
    study = replace(study, state=replace(study.state, arrays=(refused,)))
    (loss,) = diagnosed(study, {Activity.STEPS: 100.0}).losses
    assert (loss.seconds, loss.at_most) == (45.0, True)
    assert "`net.py:42` asks for a Python number" in loss.cause


def test_failed_trials_are_a_loss_with_their_cause(study: Overview) -> None:
    failed: tuple[TrialRow, ...] = study.best[:2]
    study = replace(
        study, failed_trials=failed, state=replace(study.state, causes=(Cause("ValueError: odd", (0, 1), ""),))
    )
    (loss,) = diagnosed(study, {Activity.STEPS: 100.0}).losses
    assert loss.seconds == sum(row.seconds for row in failed) == 50.0
    assert "2 trials failed for good after training, 2 of them by: ValueError: odd" in loss.cause


def test_a_pause_hides_no_other_loss(study: Overview) -> None:
    paused = replace(study, state=replace(study.state, paused=True))
    spent = {Activity.STEPS: 190.0, Activity.WAITS_FOR_MEASURING: 9800.0, Activity.VALIDATION: 10.0}
    found = diagnosed(paused, spent, wall=5000.0)
    assert [(loss.name, loss.seconds) for loss in found.losses] == [("paused by a user", 9800.0), ("validation", 10.0)]
    assert found.summary == "2% of 10000 s of device time were training steps."
    assert [line.split(":")[0] for line in found.lines[1:]] == [
        "paused by a user, 9800 s (98%)",
        "validation, 10 s (0%)",
    ]
    assert [loss["share"] for loss in diagnosis_json(found)["losses"]] == [0.98, 0.001]


@pytest.mark.parametrize(
    "waiting", [{}, {"paused by ada": [1]}], ids=["it waited for the results of others", "it waited for a device"]
)
def test_a_pause_of_a_trial_that_holds_up_the_study_is_named_first(
    study: Overview, waiting: dict[str, list[int]]
) -> None:
    state = replace(study.state, held=(1,), waiting=waiting, waiting_for_others={"waiting for others at epoch 3": [2]})
    spent = {Activity.STEPS: 80.0, Activity.VALIDATION: 20.0, Activity.WAITS_FOR_MEASURING: 2.0}
    found = diagnosed(replace(study, state=state), spent, wall=study.bars[0].end + 1)
    assert [(loss.name, loss.seconds) for loss in found.losses] == [("paused by a user", 2.0), ("validation", 20.0)]


def test_work_of_a_killed_job_since_its_last_report_is_lost(tmp_path: Path) -> None:
    clock = Clock()
    with RecordedJournal.create(
        tmp_path / "study", StudySpec(metric="accuracy", mode="max"), task=b"", algorithm=b"", clock=clock
    ) as journal:
        journal.record_devices(machines(1))
        journal.record_proposal(2, [TrialGroup(tuple(map(trial, range(2))), Budget(3))])
        for number, (took, outcome) in enumerate([(8, "crashed"), (5, "finished")]):
            name = f"job-{number}"
            journal.record_job_start(training(name, [number]), "cuda:0")
            clock.now += 2
            journal.record_reports(name, [Report(number, 1, {"accuracy": 0.5}, 2.0)])
            clock.now += took
            journal.record_job_end(name, outcome, failed=outcome == "crashed")
        study = overview(journal, clock.now)
        losses = diagnosis(journal, study, account(journal, study.elapsed, study.bars)).losses
    (loss,) = [loss for loss in losses if loss.name == "work that was cut off"]
    assert loss.seconds == pytest.approx(8.0)
    assert loss.cause.startswith("1 job was cut off")
