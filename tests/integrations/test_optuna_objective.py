"""Optuna objectives in studies of Shoal, with real processes and a real Optuna storage."""

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


def search(objective: Any, folder: Path, algorithm: Any) -> Any:
    return shoal.tune(
        objective,
        {},
        metric="value",
        mode="min",
        algorithm=algorithm,
        devices="cpu:1",
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
