"""Optuna objectives in studies of Shoal, with real processes and a real Optuna storage."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as Recorded

import shoal
from shoal.core.errors import ShoalError, TaskError
from shoal.core.trial import TrialState
from shoal.integrations.optuna import optuna_objective

pytestmark = pytest.mark.usefixtures("own_history")


def conditional(trial: optuna.Trial) -> float:
    kind = trial.suggest_categorical("kind", ["sgd", "adam"])
    x = trial.suggest_float("x", 0, 1) if kind == "sgd" else trial.suggest_int("n", 1, 10**6)
    for step in range(4):
        trial.report(x + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(x)


def forgets_to_return(trial: optuna.Trial) -> None:
    for step in range(2):
        trial.report(trial.suggest_float("x", 0, 1), step)


class OddPruner(optuna.pruners.BasePruner):
    """Prunes each second trial after its second report."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number % 2 == 1 and trial.last_step == 1


@pytest.fixture
def study(tmp_path: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "optuna.log")))
    return optuna.create_study(storage=storage, study_name="search", pruner=OddPruner())


def search(objective: Any, folder: Path, algorithm: Any, devices: str = "cpu:1") -> Any:
    return shoal.tune(
        objective,
        {},
        metric="value",
        mode="min",
        algorithm=algorithm,
        devices=devices,
        directory=folder / "study",
        show_progress=False,
    )


def test_an_objective_runs_with_its_own_space_and_pruner(study: optuna.Study, tmp_path: Path) -> None:
    done = search(optuna_objective(conditional, study), tmp_path, shoal.Random(4, epochs=5))
    assert [row.state for row in done.trials] == [TrialState.COMPLETE] * 4
    recorded = study.trials
    assert [trial.state for trial in recorded] == [Recorded.COMPLETE, Recorded.PRUNED] * 2
    for trial in recorded:
        x = trial.params["x" if trial.params["kind"] == "sgd" else "n"]
        ends = 4 if trial.state is Recorded.COMPLETE else 2
        assert trial.intermediate_values == {step: x + step for step in range(ends)}
    assert recorded[0].value == recorded[0].intermediate_values[0], "the value is what the objective returned"
    assert len({str(trial.params) for trial in recorded}) == 4, "processes draw different numbers"


def test_a_promoted_trial_keeps_its_parameters(study: optuna.Study, tmp_path: Path) -> None:
    study.pruner = optuna.pruners.NopPruner()
    search(optuna_objective(conditional, study), tmp_path, shoal.SuccessiveHalving(2, 2, eta=2))
    first, second, promoted = study.trials
    assert [len(trial.intermediate_values) for trial in (first, second, promoted)] == [1, 1, 2]
    best = min((first, second), key=lambda trial: trial.value)
    assert (promoted.params, promoted.state) == (best.params, Recorded.COMPLETE)
    assert promoted.value == best.value + 1, "the last value before the budget was reached"


def best_epoch(trial: optuna.Trial) -> float:
    """Returns the best of its losses, and keeps all of them."""
    x = trial.suggest_float("x", 0, 1)
    losses = [x + extra for extra in (0.3, 0.0, 0.2, 0.4)]
    for step, loss in enumerate(losses):
        trial.report(loss, step)
    trial.set_user_attr("losses", losses)
    return min(losses)


def score_of_a_test(trial: optuna.Trial) -> float:
    """Returns what it never reported, in other units."""
    x = trial.suggest_float("x", 0, 1)
    for step in range(2):
        trial.report(x / (step + 1), step)
    trial.set_user_attr("test", 100 * x)
    return 100 * x


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("epochs", [2, 4, 5])
@pytest.mark.parametrize(("objective", "reports", "least"), [(best_epoch, 4, 1), (score_of_a_test, 2, 100)])
def test_the_value_is_what_the_objective_returns_whatever_the_budget(
    objective: Any, reports: int, least: int, epochs: int, study: optuna.Study, tmp_path: Path
) -> None:
    study.pruner = optuna.pruners.NopPruner()
    done = search(optuna_objective(objective, study), tmp_path, shoal.Random(2, epochs=epochs))
    returned = [least * trial.params["x"] for trial in study.trials]
    if epochs < reports:  # the objective would report on
        returned = [trial.params["x"] for trial in study.trials]
    assert [trial.state for trial in study.trials] == [Recorded.COMPLETE] * 2
    assert [trial.value for trial in study.trials] == pytest.approx(returned)
    assert sorted(row.metrics["value"] for row in done.trials) == pytest.approx(sorted(returned))
    assert [row.epoch for row in done.trials] == [epochs] * 2
    for trial in study.trials:
        assert len(trial.intermediate_values) == min(reports, epochs)
        assert (len(trial.user_attrs) > 1) == (epochs >= reports)


@pytest.mark.parametrize("killed", [True, False])
def test_an_objective_that_fails_after_its_last_report_fails_and_is_tried_again(
    killed: bool, study: optuna.Study, tmp_path: Path
) -> None:
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        for step in range(shoal.step(), 2):
            (shoal.checkpoint() / "state").write_text(str(step))
            trial.report(x, step)
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the test set is missing")
        return -x

    study.pruner = optuna.pruners.NopPruner()
    (row,) = search(optuna_objective(objective, study), tmp_path, shoal.Random(1, epochs=2)).trials
    assert (row.state, row.failures) == (TrialState.COMPLETE, 1)
    states = [Recorded.COMPLETE] if killed else [Recorded.FAIL, Recorded.COMPLETE]
    assert [trial.state for trial in study.trials] == states
    assert row.metrics["value"] == study.trials[-1].value == -study.trials[-1].params["x"]


def stops(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", 0, 1)
    trial.report(x, 0)
    if trial.number == 2:
        trial.study.stop()
    while trial.number > 2 and not trial.study.trials[2].state.is_finished():
        time.sleep(0.02)
    trial.report(x + 1, 1)
    return 3 * x


def stops_when_pruned(trial: optuna.Trial) -> float:
    trial.report(trial.suggest_float("x", 0, 1), 0)
    if trial.number == 2:
        trial.study.stop()
        raise optuna.TrialPruned
    while trial.number > 2 and not trial.study.trials[2].state.is_finished():
        time.sleep(0.02)
    return 1.0


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("objective", [stops, stops_when_pruned])
def test_an_objective_that_stops_the_study_is_the_last_one(
    objective: Any, devices: str, study: optuna.Study, tmp_path: Path
) -> None:
    study.pruner = optuna.pruners.NopPruner()
    done = search(optuna_objective(objective, study), tmp_path, shoal.Random(9, epochs=2), devices=devices)
    wanted = optuna.create_study()
    wanted.optimize(objective, n_trials=9)
    assert len(wanted.trials) == 3
    assert [each.state for each in study.trials[:3]] == [each.state for each in wanted.trials]
    assert all(each.state.is_finished() for each in study.trials), "one that trains beside it continues to its end"
    begun = [row for row in done.trials if row.metrics]
    assert len(begun) == len(study.trials)
    rest = [row for row in done.trials if not row.metrics]
    assert {row.state for row in rest} <= {TrialState.STOPPED}
    assert {row.reason for row in rest} <= {f"trial {row.number} stopped the study" for row in begun}
    assert len(shoal.resume(done.directory, show_progress=False).trials) == len(done.trials)
    assert len(study.trials) == len(begun), "it has ended"


def whole(trial: optuna.Trial) -> float:
    return float(trial.suggest_int("n", 0, 3))


@pytest.mark.in_turns(3)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [
        (optuna.samplers.BruteForceSampler, optuna.pruners.NopPruner()),
        (optuna.samplers.BruteForceSampler, optuna.pruners.HyperbandPruner(1, 4)),
        (lambda: optuna.samplers.GridSampler({"n": [0, 1, 2, 3]}, seed=0), optuna.pruners.NopPruner()),
    ],
    ids=["brute force", "brute force in brackets", "grid"],
)
def test_a_sampler_whose_space_is_used_up_ends_the_study(
    sampler: Any, pruner: Any, devices: str, study: optuna.Study, tmp_path: Path
) -> None:
    study.sampler, study.pruner = sampler(), pruner
    done = search(optuna_objective(whole, study), tmp_path, shoal.Random(12, epochs=1), devices=devices)
    wanted = optuna.create_study(sampler=sampler(), pruner=pruner)
    wanted.optimize(whole, n_trials=12)
    values = [trial.value for trial in study.trials]
    assert None not in values, "a trial that runs when the study is stopped continues to its end"
    if devices == "cpu:1":
        assert sorted(values) == sorted(trial.value for trial in wanted.trials)
    else:
        assert set(values) == {0.0, 1.0, 2.0, 3.0}
    assert sorted(row.metrics["value"] for row in done.trials if row.metrics) == sorted(values)


def test_an_objective_that_returns_no_number_is_refused(study: optuna.Study, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="the objective must return the value of the trial, a number, got None"):
        search(optuna_objective(forgets_to_return, study), tmp_path, shoal.Random(1, epochs=5))


def test_studies_that_processes_cannot_share_are_refused() -> None:
    with pytest.raises(TaskError, match=r"is in memory, .*storage='sqlite"):
        optuna_objective(conditional, optuna.create_study())
    with pytest.raises(TaskError, match=r"optuna_objective takes a function .*create_study.*, got .* and None"):
        optuna_objective(conditional, None)  # type: ignore[arg-type]


def test_a_study_of_several_directions_is_refused(tmp_path: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "optuna.log")))
    with pytest.raises(TaskError, match=r"has 2 directions.*OptunaSearch"):
        optuna_objective(conditional, optuna.create_study(storage=storage, directions=["minimize", "maximize"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"mode": "max"}, r"is to minimize its values, and `mode` is 'max'; pass mode='min'", id="mode"),
        pytest.param({"metric": "loss"}, 'reports its values as "value"', id="metric"),
        pytest.param({"space": {"lr": shoal.uniform(0, 1)}}, "is empty, {}.* nothing reads 'lr'", id="space"),
    ],
)
def test_arguments_that_contradict_the_optuna_study_are_refused(
    arguments: dict[str, Any], message: str, study: optuna.Study, tmp_path: Path
) -> None:
    given = {"space": {}, "metric": "value", "mode": "min"} | arguments
    with pytest.raises(TaskError, match=message):
        shoal.tune(
            optuna_objective(conditional, study),
            given.pop("space"),
            algorithm=shoal.Random(2, epochs=2),
            devices="cpu:1",
            directory=tmp_path / "study",
            **given,
        )
    assert not (tmp_path / "study").exists()
