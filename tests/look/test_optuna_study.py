"""A study of ours as one of Optuna's, in memory, in a database and in a file."""

import math

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from report_samples import row

from shoal.core.constraint import parse_constraints
from shoal.core.errors import ShoalError
from shoal.core.objective import objectives
from shoal.core.space import Space, choice, loguniform, randint
from shoal.core.trial import Report, Trial, TrialState
from shoal.look.optuna_study import optuna_study

SPACE = Space(
    {
        "lr": loguniform(1e-4, 1),
        "net": choice([{"kind": "mlp", "width": randint(1, 65)}, {"kind": "linear"}]),
        "act": choice(["relu", "tanh"]),
        "size": 28,
    }
)


def config(number):
    return SPACE.sample(number)


def report(number, epoch, loss):
    return Report(number, epoch, {"loss": loss})


def trial(number, state, objective, reason=""):
    return row(number, state, trial=Trial(number, config(number), number, 7), objective=objective, reason=reason)


ROWS = [
    (trial(0, TrialState.COMPLETE, 0.5), [report(0, 1, 0.75), report(0, 2, 0.5)]),
    (trial(1, TrialState.STOPPED, 0.9, "rank 4 of 9"), [report(1, 1, 0.9)]),
    (trial(2, TrialState.RUNNING, 0.8), [report(2, 1, 0.8)]),
    (trial(3, TrialState.FAILED, None, "out of memory"), []),
    (trial(4, TrialState.COMPLETE, None), [report(4, 1, math.nan)]),
]


def test_trials_that_have_ended():
    study = optuna_study(ROWS, SPACE, objectives("loss", "min"), "mine")
    assert study.study_name == "mine"
    assert study.user_attrs == {"metric": "loss"}
    assert [each.state.name for each in study.trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL"]
    assert [each.user_attrs["number"] for each in study.trials] == [0, 1, 3, 4]
    assert study.best_value == 0.5
    assert study.trials[0].intermediate_values == {1: 0.75, 2: 0.5}
    assert study.trials[1].user_attrs["reason"] == "rank 4 of 9"


def test_parameters_are_those_of_the_space():
    study = optuna_study(ROWS, SPACE, objectives("loss", "max"), "mine")
    assert study.direction is optuna.study.StudyDirection.MAXIMIZE
    for each in study.trials:
        ours = config(each.user_attrs["number"])
        assert each.params["lr"] == ours["lr"]
        assert each.params["act"] == ours["act"]
        assert each.params["net"] == ["mlp", "linear"].index(ours["net"]["kind"])
        assert each.params.get("net[0].width") == ours["net"].get("width")
        assert "size" not in each.params


def test_it_is_kept_where_asked(tmp_path):
    for address, where in [
        (f"sqlite:///{tmp_path}/optuna.db", f"sqlite:///{tmp_path}/optuna.db"),
        (f"{tmp_path}/optuna.log", JournalStorage(JournalFileBackend(f"{tmp_path}/optuna.log"))),
    ]:
        optuna_study(ROWS, SPACE, objectives("loss", "min"), "mine", address)
        assert len(optuna.load_study(study_name="mine", storage=where).trials) == 4
        with pytest.raises(optuna.exceptions.DuplicatedStudyError):
            optuna_study(ROWS, SPACE, objectives("loss", "min"), "mine", address)


def test_trials_of_several_metrics_have_no_curve():
    rows = [(row(0, TrialState.COMPLETE, trial=Trial(0, config(0), 0, 7), metrics={"a": 0.5, "b": 2.0}), [])]
    study = optuna_study(rows, SPACE, objectives(["a", "b"], ["max", "min"]), "mine")
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [(each.values, each.intermediate_values) for each in study.trials] == [([0.5, 2.0], {})]


def test_constraints_are_those_of_the_epoch_that_ranks():
    values = {"metrics": {"loss": 0.7, "size": 12.0}, "ranked": {"loss": 0.5, "size": 8.0}, "objective": 0.5}
    rows = [(row(0, TrialState.COMPLETE, trial=Trial(0, config(0), 0, 7), best_epoch=2, **values), [])]
    study = optuna_study(rows, SPACE, objectives("loss", "min"), "mine", None, parse_constraints({"size": "<= 10"}))
    assert (study.best_value, list(study.trials[0].constraints.values())) == (0.5, [-0.2])


class Locked(InMemoryStorage):
    def create_new_study(self, *arguments):
        raise StorageInternalError("the database is locked")


def test_a_storage_that_cannot_be_used(tmp_path):
    """Nothing is written to what is not Optuna's."""
    (tmp_path / "some").write_bytes(b"\xff\xfe\x00" * 90)
    (tmp_path / "line").write_bytes(b"one line")
    (tmp_path / "list").write_bytes(b"[1, 2]\n")
    (tmp_path / "journal.sqlite").write_bytes(b"SQLite format 3")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for address in (
        *("mysqll://nowhere/x", "://", "sqlite:////no/such/folder/x.db", "/no/such/folder/x.log", "", str(tmp_path)),
        *(f"sqlite:///{tmp_path}/some", f"{tmp_path}/some", f"{tmp_path}/line", f"{tmp_path}/list"),
        *(f"{tmp_path}/journal.sqlite", f"sqlite:///{tmp_path}/journal.sqlite"),
    ):
        with pytest.raises(ShoalError) as error:
            optuna_study([], SPACE, objectives("loss", "min"), "mine", address)
        assert f"the storage {address!r} cannot be used" in str(error.value)
        assert "give an address such as sqlite:///optuna.db" in str(error.value)
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(ShoalError, match=r"cannot be used \(StorageInternalError: the database is locked"):
        optuna_study([], SPACE, objectives("loss", "min"), "mine", Locked())
    for storage in (3, b"x.log", tmp_path):
        with pytest.raises(ShoalError, match="`storage` must be an address such as"):
            optuna_study([], SPACE, objectives("loss", "min"), "mine", storage)
