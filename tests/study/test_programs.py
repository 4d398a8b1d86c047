"""Studies of functions that report by themselves, in real processes."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import programs
import pytest
from processes import gone
from programs import curve, search

import shoal
from shoal.core.demand import Profile
from shoal.core.errors import ShoalError
from shoal.core.event import Outcome
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.plan.cost.history import History, environment, history_path

Profiles = dict[tuple[str, str, int, str], Profile]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[shoal.Study, Profiles]:
    """A study of three functions in processes of their own, and what it has learnt of them; of those who only read."""
    history_path().unlink(missing_ok=True)
    study = search(programs.counted, tmp_path_factory.mktemp("counted"), backend="local")
    return study, History(environment=environment()).all()


def check_budget(study: shoal.Study) -> None:
    assert [(row.state, row.epoch, row.metrics["loss"]) for row in study.trials] == [
        (TrialState.COMPLETE, 4, 4.0 * slope) for slope in (1, 2, 3)
    ]
    for trial in range(3):
        assert [report.epoch for report in curve(study, trial)] == [1, 2, 3, 4]
    assert study.best_trial.config == {"slope": 1}


def test_a_function_is_trained_up_to_its_budget(counted: tuple[shoal.Study, Profiles]) -> None:
    check_budget(counted[0])


def test_a_function_is_trained_without_a_back_end_of_processes(tmp_path: Path) -> None:
    check_budget(search(programs.counted, tmp_path, backend="inline"))


def test_each_trial_has_a_job_of_its_own_and_none_is_looked_at_or_measured_before(
    counted: tuple[shoal.Study, Profiles],
) -> None:
    with JournalView.read(counted[0].directory) as journal:
        jobs = journal.jobs()
    assert [job.purpose for job in jobs] == [Purpose.TRAIN] * 3
    assert sorted(job.trials for job in jobs) == [(0,), (1,), (2,)]


def test_what_a_function_takes_is_learnt_and_kept_for_the_next_study(counted: tuple[shoal.Study, Profiles]) -> None:
    ((key, profile),) = counted[1].items()
    structure, data, size, _ = key
    assert structure.startswith("opaque counted ")
    assert (data, size) == ("", 1)
    assert 1 << 20 < profile.base_memory < 1 << 32
    assert 0 < profile.compute <= 1
    assert 0 < profile.step_seconds[1] < 10


def test_hyperband_pauses_a_function_and_it_goes_on(tmp_path: Path) -> None:
    study = search(
        programs.counted, tmp_path, {"slope": shoal.uniform(0, 1)}, algorithm=shoal.SuccessiveHalving(3, 3, eta=3)
    )
    (best,) = [row for row in study.trials if row.epoch == 3]
    reports = curve(study, best.number)
    assert [(report.epoch, report.metrics["began"]) for report in reports] == [(1, 0), (2, 1), (3, 1)]
    assert sum(row.epoch == 1 for row in study.trials) == 2


@pytest.mark.parametrize("fault", ["kill the worker", pytest.param("kill itself", marks=pytest.mark.thorough)])
def test_after_a_kill_it_goes_on_from_what_was_whole(tmp_path: Path, fault: str) -> None:
    marker = tmp_path / "killed"
    space = {"slope": 1, "at": 3, "fault": fault, "marker": str(marker)}
    study = search(programs.counted, tmp_path, space)
    assert marker.exists()
    (row,) = study.trials
    assert (row.state, row.epoch, row.failures) == (TrialState.COMPLETE, 4, 1)
    reports = curve(study, 0)
    assert [(report.epoch, report.metrics["began"]) for report in reports] == [(1, 0), (2, 0), (3, 2), (4, 2)]


@pytest.mark.thorough
def test_a_kill_of_the_fork_server_blames_no_trial(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    space = {"slope": shoal.grid([1, 2, 3, 4]), "at": 3, "fault": "kill the server", "marker": str(marker)}
    study = search(programs.counted, tmp_path, space, retries=0)
    assert marker.exists()
    assert [(row.state, row.epoch, row.failures) for row in study.trials] == [(TrialState.COMPLETE, 4, 0)] * 4
    with JournalView.read(study.directory) as journal:
        lost = [job for job in journal.jobs() if job.outcome == Outcome.ORPHANED]
    assert lost
    assert all("the server of its worker process was killed by SIGKILL" in job.message for job in lost)
    for trial in range(4):
        assert [report.epoch for report in curve(study, trial)] == [1, 2, 3, 4]


def test_after_a_kill_of_the_engine_a_study_is_gone_on_with(tmp_path: Path) -> None:
    marker, engine = tmp_path / "killed", tmp_path / "engine"
    space = {"slope": 1, "at": 3, "fault": "kill the engine", "marker": str(marker), "engine": str(engine)}
    script = tmp_path / "study.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(programs.__file__).parent)!r})\n"
        "from pathlib import Path\nimport programs, shoal\n"
        f"Path({str(engine)!r}).write_text(str(os.getpid()))\n"
        f"shoal.tune(programs.counted, {space!r}, metric='loss', mode='min', algorithm=shoal.Random(1, 4), "
        "devices='cpu:1', directory='study')\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    study = shoal.resume(tmp_path / "study", show_progress=False)
    reports = curve(study, 0)
    assert [(report.epoch, report.metrics["began"]) for report in reports] == [(1, 0), (2, 0), (3, 2), (4, 2)]
    assert gone(int(marker.read_text())), "a process of the first run is left"


@pytest.mark.thorough
def test_a_function_that_keeps_nothing_begins_again(tmp_path: Path) -> None:
    study = search(
        programs.keeps_nothing, tmp_path, {"slope": shoal.uniform(0, 1)}, algorithm=shoal.SuccessiveHalving(3, 3, eta=3)
    )
    (best,) = [row for row in study.trials if row.epoch == 3]
    assert [(report.epoch, report.metrics["own"]) for report in curve(study, best.number)] == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.thorough
def test_what_is_handed_out_again_is_of_the_step_that_it_says(tmp_path: Path) -> None:
    study = search(
        programs.keeps_now_and_then,
        tmp_path,
        {"slope": shoal.grid([1, 2])},
        algorithm=shoal.SuccessiveHalving(2, 8, eta=2, min_epochs=4),
    )
    (best,) = [row for row in study.trials if row.epoch == 8]
    assert [report.metrics["kept"] for report in curve(study, best.number)] == [0, 0, 3, 3, 3, 6, 6, 6]


def test_a_function_that_ends_early_has_its_last_report_stand_for_the_rest(tmp_path: Path) -> None:
    study = search(programs.ends_early, tmp_path)
    assert [(row.state, row.epoch, row.metrics["loss"]) for row in study.trials] == [
        (TrialState.COMPLETE, 4, 1.0 + slope) for slope in (1, 2, 3)
    ]
    assert [report.epoch for report in curve(study, 0)] == [1, 2, 4]


@pytest.mark.thorough
def test_population_based_training_copies_what_a_function_kept(tmp_path: Path) -> None:
    algorithm = shoal.PBT(4, epochs=4, interval=2, truncation=0.25)
    study = search(programs.counted, tmp_path, {"slope": shoal.uniform(1, 2)}, algorithm=algorithm)
    copies = [row for row in study.trials if row.trial.origin is not None]
    assert copies
    for row in copies:
        assert [report.metrics["began"] for report in curve(study, row.number)] == [2, 2]


def test_a_function_may_tidy_up_when_its_trial_is_over(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    search(programs.tidies_up, tmp_path, {"marker": str(marker)}, algorithm=shoal.Random(1, 2))
    assert marker.read_text() == "tidy"


def test_a_function_sees_its_device_and_its_trial(tmp_path: Path) -> None:
    study = search(partial(programs.surroundings), tmp_path, {"slope": 1}, algorithm=shoal.Random(1, 1))
    (row,) = study.trials
    (kept,) = (study.directory / "checkpoints" / "000000").glob("*-files/files/environment.txt")
    assert kept.read_text().splitlines() == ["1", "", "0", str(row.trial.seed)]
    assert row.config == {"slope": 1}


def test_there_is_no_model_but_a_directory(counted: tuple[shoal.Study, Profiles]) -> None:
    with pytest.raises(ShoalError, match=r"a program of yours.* trial 0 is in .*000004-000000-files/files"):
        counted[0].best_model("last")


def test_a_function_of_a_script_is_carried_along(tmp_path: Path) -> None:
    script = {"__name__": "__main__"}
    exec("import shoal\ndef train(config):\n    shoal.report({'loss': config['slope'] / 2})\n", script)
    assert b"train" in cloudpickle.dumps(script["train"])
    study = search(script["train"], tmp_path, algorithm=shoal.Grid(1))
    assert [row.metrics["loss"] for row in study.trials] == [0.5, 1.0, 1.5]
