"""The importance of parameters, by the values of trials at one budget."""

import json
import math

import pytest
from halving_samples import SPACE, halving_study
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.core.errors import ShoalError
from shoal.core.space import Space, choice, loguniform, uniform
from shoal.journal.view import JournalView
from shoal.look.budget_values import budget_values
from shoal.look.grid import journal_grid
from shoal.look.importance import METHODS
from shoal.results import Study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return Study(halving_study(tmp_path_factory.mktemp("halving") / "study"))


def values_at(directory, budget=None):
    with JournalView.read(directory) as journal:
        return budget_values(journal, budget)


@pytest.mark.parametrize(
    ("trials", "budget", "compared", "others"),
    [
        pytest.param(48, None, "15 trials after 3 epochs", 30, id="the highest that enough reached"),
        pytest.param(48, 1, "45 trials after 1 epoch", 0, id="the first rung, without a trial that failed"),
        pytest.param(48, 2, "15 trials after 2 epochs", 30, id="between rungs"),
        pytest.param(48, 9, "5 trials after 9 epochs", 40, id="a budget that few reached"),
        pytest.param(48, 99, "0 trials after 99 epochs", 45, id="a budget that none reached"),
        pytest.param(8, None, "5 trials after 1 epoch", 0, id="too few: the lowest"),
        pytest.param(2, None, "0 trials after 0 epochs", 0, id="none has begun"),
    ],
)
def test_the_budget_at_which_trials_are_compared(tmp_path, trials, budget, compared, others):
    found = values_at(halving_study(tmp_path / "study", trials), budget)
    assert (str(found), found.others) == (compared, others)
    assert bool(found.selection) == bool(others)


def test_a_trial_that_is_nan_at_the_budget_is_left_out(tmp_path):
    space = Space({"lr": loguniform(1e-3, 1)})
    directory = halving_study(
        tmp_path / "study", 40, (3,), space=space, loss=lambda c, epoch: math.nan if c["lr"] > 0.5 else c["lr"]
    )
    diverged = sum(space.sample(number)["lr"] > 0.5 for number in range(38))
    assert diverged
    assert len(values_at(directory).values) == 38 - diverged


@pytest.mark.parametrize("method", METHODS)
def test_what_matters_most_comes_first(study, method):
    found = study.importance(method, budget=1)
    assert next(iter(found.shares)) == "lr"
    assert found.trials == 45
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)
    assert not {"only", "classes"} & found.shares.keys()
    if method != "eta2":
        assert sum(found.shares.values()) == pytest.approx(1)
    assert study.importance(method, budget=1).shares == found.shares


def test_a_conditional_parameter_is_assessed_or_named(study):
    assert "optimizer[0].momentum" in study.importance("ped-anova").shares
    assert study.importance("fanova").omitted == ("optimizer[0].momentum",)
    assert "not assessed: optimizer[0].momentum" in repr(study.importance("fanova"))
    assert "optimizer.momentum" in study.importance("eta2").shares


def test_the_selection_is_said_in_text_notebook_and_json(study):
    found = study.importance()
    lines = repr(found).splitlines()
    assert lines[0].split() == [next(iter(found.shares)), f"{max(found.shares.values()):.3f}"]
    assert lines[-3:] == [
        "by ped-anova of loss: 15 trials after 3 epochs",
        "beyond the first rung only survivors remain: 30 other trials have values at lower budgets only",
        "the best tenth of fewer than 50 trials are few, so that the shares may change much with more trials",
    ]
    assert "<th>lr</th>" in found._repr_html_()
    assert "beyond the first rung" in found._repr_html_()
    assert study.importance("eta2", budget=1).notes == ("by eta2 of loss: 45 trials after 1 epoch",)


def test_what_the_grid_explains_is_eta2(study):
    with JournalView.read(study.directory) as journal:
        assert journal_grid(journal).explained == study.importance("eta2").shares


def test_infinite_values_rank_last_and_are_left_out_by_optuna(tmp_path):
    directory = halving_study(
        tmp_path / "study",
        40,
        (2,),
        space=Space({"lr": loguniform(1e-3, 1), "decay": uniform(0, 1)}),
        loss=lambda config, epoch: math.inf if config["lr"] > 0.5 else config["lr"],
    )
    assert Study(directory).importance("eta2").trials == 38
    found = Study(directory).importance("ped-anova")
    assert found.trials < 38
    assert f"{38 - found.trials} of them infinite and left out" in found.notes[0]


def test_of_several_metrics_the_first_counts(tmp_path):
    directory = halving_study(tmp_path / "study", metric=("loss", "seconds"), mode=("min", "max"))
    assert Study(directory).importance().notes[0] == "by ped-anova of loss: 15 trials after 3 epochs"


def test_repeats_and_folds_count_as_one_trial_with_their_aggregate(tmp_path):
    """Configuration 0 has failed with trial 1, and the last one waits."""
    directory = halving_study(tmp_path / "study", 96, (1, 3), repeats=1, folds=2)
    found = values_at(directory, 1)
    assert str(found) == "46 configurations after 1 epoch"
    assert all(spread == pytest.approx(0.1 / 2**0.5) for spread in found.deviations.values())
    rows = {row.number: row for row in Study(directory).configurations if row.number in found.values and row.epoch == 1}
    assert rows
    assert all(found.values[number] == row.objective for number, row in rows.items())
    assert next(iter(Study(directory).importance(budget=1).shares)) == "lr"
    theirs = Study(directory).to_optuna().trials
    assert [each.params["lr"] for each in theirs] == [row.config["lr"] for row in Study(directory).configurations[:-1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"method": "shap"}, "`method` must be one of ped-anova, fanova, eta2, got 'shap'", id="method"),
        pytest.param({"budget": 0}, "`budget` must be a positive number of epochs, .* got 0", id="budget"),
        pytest.param({"budget": True}, "got True", id="a truth value"),
        pytest.param({"budget": 9}, "needs at least 10 trials .* got 5 trials after 9 epochs; wait", id="too few"),
    ],
)
def test_refused(study, arguments, message):
    with pytest.raises(ShoalError, match=message):
        study.importance(**arguments)


@pytest.mark.parametrize(
    ("space", "loss", "message"),
    [
        pytest.param(Space({"lr": 0.1}), lambda config, epoch: 1.0, "nothing is searched", id="constants"),
        pytest.param(Space({"lr": choice([1, 2])}), lambda config, epoch: 1.0, "all values of 'loss' are", id="equal"),
    ],
)
def test_nothing_to_compare(tmp_path, space, loss, message):
    directory = halving_study(tmp_path / "study", 30, (2,), space=space, loss=loss)
    with pytest.raises(ShoalError, match=message):
        Study(directory).importance()


def test_without_scikit_learn(study, monkeypatch):
    monkeypatch.setattr("shoal.look.importance.find_spec", lambda name: None)
    with pytest.raises(ShoalError, match=r"needs scikit-learn\. Install it with: pip install scikit-learn"):
        study.importance("fanova")


def test_the_command(study):
    done = CliRunner().invoke(app, ["importance", str(study.directory), "--method", "eta2", "--budget", "1", "--json"])
    shown = json.loads(done.stdout)
    assert shown["importance"] == study.importance("eta2", 1).shares
    assert (shown["trials"], shown["budget"], shown["unit"], shown["metric"]) == (45, 1, "epochs", "loss")
    plain = CliRunner().invoke(app, ["importance", str(study.directory)])
    assert plain.stdout == f"{study.importance()!r}\n"
    assert CliRunner().invoke(app, ["importance", str(study.directory), "--method", "shap"]).exit_code == 2


def test_the_space_of_the_samples_has_all_kinds_of_parameters():
    assert {path: conditional for path, (_, conditional) in SPACE.domains().items()} == {
        "lr": False,
        "optimizer": False,
        "optimizer[0].momentum": True,
        "act": False,
        "only": False,
    }
