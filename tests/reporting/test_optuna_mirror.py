"""A study of Optuna's follows one of ours, in a database and in a file."""

import threading
import time
import warnings
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as There

from shoal.core.array import Array, FusionKey, Member
from shoal.core.errors import JournalError, ShoalError
from shoal.core.job import Job, Purpose
from shoal.core.space import Space, choice, loguniform
from shoal.core.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState
from shoal.journal.writer import Journal
from shoal.reporting.optuna_study import mirror
from shoal.results import Study

SPACE = Space({"lr": loguniform(1e-4, 1), "act": choice(["relu", "tanh"])})
TRIALS = [Trial(number, SPACE.sample(number), number, 7) for number in range(4)]


@pytest.fixture(params=["sqlite", "journal"])
def storage(request, tmp_path):
    """An address as a user gives it, and the same storage for a look at what is in it."""
    if request.param == "sqlite":
        address = f"sqlite:///{tmp_path}/optuna.db"
        return address, RDBStorage(address)  # made beforehand: Optuna's tables cannot be made by two at a time
    path = str(tmp_path / "optuna.log")
    return path, JournalStorage(JournalFileBackend(path))


def create(tmp_path, metric="accuracy", mode="max"):
    study = {"metric": metric, "mode": mode, "space": SPACE.to_json()}
    return Journal.create(tmp_path / "runs", study, task=b"", algorithm=b"")


def train(journal, numbers, epochs):
    """They are asked for and started."""
    journal.record_proposal(1, [TrialGroup(tuple(TRIALS[number] for number in numbers), Budget(epochs))])
    members = tuple(Member(TRIALS[number], 0, epochs) for number in numbers)
    name = f"job {len(journal.jobs())}"
    journal.record_job_start(Job(name, (Array(FusionKey("s", "d", 32), members),), Purpose.TRAIN), "cpu:0")


def report(journal, number, epoch, accuracy, state=TrialState.RUNNING, **more):
    journal.record_reports("job 0", [Report(number, epoch, {"accuracy": accuracy, **more}, 0.5, state)])


@pytest.fixture
def following():
    threads = []

    def follow(directory, address):
        threads.append(threading.Thread(target=mirror, args=(directory, address, "mine", 0.02)))
        threads[-1].start()
        return threads[-1]

    yield follow
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def states(where):
    """The trials there, once the study is there."""
    try:
        found = optuna.load_study(study_name="mine", storage=where)
    except KeyError:
        return [], None
    return [trial.state for trial in found.trials], found


def wait_for(where, expected):
    """Until the trials there are in these states."""
    end = time.monotonic() + 10
    while (seen := states(where)[0]) != expected:
        assert time.monotonic() < end, f"{seen}, not {expected}"
        time.sleep(0.02)
    return states(where)[1]


def test_a_trial_s_way(tmp_path, storage, following):
    address, where = storage
    with closing(create(tmp_path)) as journal:
        following(tmp_path / "runs", address)
        journal.record_proposal(1, [TrialGroup(tuple(TRIALS), Budget(1))])
        wait_for(where, [There.WAITING] * 4)
        train(journal, range(4), 1)
        wait_for(where, [There.RUNNING] * 4)
        report(journal, 0, 1, 0.5, TrialState.PAUSED)
        report(journal, 1, 1, 0.25, TrialState.PAUSED)
        report(journal, 2, 1, float("nan"), TrialState.PAUSED)
        journal.record_decisions([Decision(2, TrialState.STOPPED, "accuracy is nan")])
        wait_for(where, [There.RUNNING, There.RUNNING, There.FAIL, There.RUNNING])
        journal.record_proposal(1, [TrialGroup((TRIALS[0],), Budget(2))])  # promoted: it waits to go on
        report(journal, 3, 1, 0.75, TrialState.PAUSED)
        journal.record_decisions([Decision(3, TrialState.STOPPED, "rank 3 of 3")])
        found = wait_for(where, [There.RUNNING, There.RUNNING, There.FAIL, There.PRUNED])
        assert found.trials[0].intermediate_values == {1: 0.5}
        assert found.trials[0].params == {"lr": TRIALS[0].config["lr"], "act": TRIALS[0].config["act"]}
        assert found.trials[3].user_attrs["reason"] == "rank 3 of 3"
        assert found.trials[3].value == 0.75
        train(journal, [0], 2)
        report(journal, 0, 2, 0.625, TrialState.PAUSED)
        journal.record_decisions([Decision(0, TrialState.COMPLETE)])
        found = wait_for(where, [There.COMPLETE, There.RUNNING, There.FAIL, There.PRUNED])
        assert found.best_value == 0.625
        assert found.trials[0].intermediate_values == {1: 0.5, 2: 0.625}
        assert found.trials[1].user_attrs["state"] == "paused"
    assert [trial.number for trial in found.trials] == [trial.user_attrs["number"] for trial in found.trials]


def test_a_mirror_goes_on_where_another_stopped(tmp_path, storage):
    address, where = storage
    with closing(create(tmp_path)) as journal:
        train(journal, [0, 1], 2)
        report(journal, 0, 1, 0.5)
    mirror(tmp_path / "runs", address, "mine")
    with closing(Journal.open(tmp_path / "runs")) as journal:
        report(journal, 0, 2, 0.75, TrialState.PAUSED)
        journal.record_decisions([Decision(0, TrialState.COMPLETE)])
        train(journal, [2], 2)
    for _ in range(2):
        mirror(tmp_path / "runs", address, "mine")
    seen, found = states(where)
    assert seen == [There.COMPLETE, There.RUNNING, There.RUNNING]
    assert found.trials[0].intermediate_values == {1: 0.5, 2: 0.75}


@pytest.mark.parametrize("there", ["a trial", "another direction", "another study of ours"])
def test_another_study_is_left_alone(there, tmp_path, storage):
    address, where = storage
    if there == "another study of ours":
        create(tmp_path / "other").close()
        mirror(tmp_path / "other" / "runs", address, "mine")
    else:
        way = "minimize" if there == "another direction" else "maximize"
        other = optuna.create_study(study_name="mine", storage=where, direction=way)
        if there == "a trial":
            other.add_trial(optuna.trial.create_trial(value=1.0))
    before = states(where)[0]
    with closing(create(tmp_path)) as journal:
        train(journal, [0], 1)
    with pytest.raises(ShoalError, match=r"holds another study named 'mine'; choose another name"):
        mirror(tmp_path / "runs", address, "mine")
    assert states(where)[0] == before


def test_a_mirror_that_died_before_it_wrote_its_mark(tmp_path, storage):
    address, where = storage
    optuna.create_study(study_name="mine", storage=where, direction="maximize").set_user_attr("metric", "accuracy")
    with closing(create(tmp_path)) as journal:
        train(journal, [0], 1)
    assert len(mirror(tmp_path / "runs", address, "mine").trials) == 1


def test_plots_of_a_study_that_runs(tmp_path, storage):
    import matplotlib

    matplotlib.use("Agg")
    from optuna.visualization import matplotlib as plots

    with closing(create(tmp_path)) as journal:
        train(journal, [0, 1, 2], 2)
        for number, accuracy in enumerate((0.5, 0.25, 0.75)):
            report(journal, number, 1, accuracy)
            report(journal, number, 2, accuracy + 0.125, TrialState.PAUSED)
        journal.record_decisions([Decision(0, TrialState.COMPLETE), Decision(1, TrialState.COMPLETE)])
    found = mirror(tmp_path / "runs", storage[0], "mine")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        lines = plots.plot_intermediate_values(found).get_lines()
        history = plots.plot_optimization_history(found)
    assert sorted(list(line.get_ydata()) for line in lines) == [[0.25, 0.375], [0.5, 0.625], [0.75, 0.875]]
    assert history.get_ylabel() == "Objective Value"


def test_several_metrics(tmp_path, storage):
    address, where = storage
    with closing(create(tmp_path, ["accuracy", "latency"], ["max", "min"])) as journal:
        train(journal, [0, 1], 1)
        report(journal, 0, 1, 0.5, TrialState.PAUSED, latency=2.0)
        report(journal, 1, 1, 0.75, TrialState.PAUSED, latency=float("nan"))
        journal.record_decisions([Decision(0, TrialState.COMPLETE), Decision(1, TrialState.COMPLETE)])
    found = mirror(tmp_path / "runs", address, "mine")
    assert [direction.name for direction in found.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [trial.values for trial in found.trials] == [[0.5, 2.0], None]
    assert states(where)[0] == [There.COMPLETE, There.FAIL]


def mirrored(directory, storage):
    mirror(directory, storage)


def exported(directory, storage):
    Study(directory).to_optuna(storage)


@pytest.mark.parametrize("export", [mirrored, exported])
@pytest.mark.parametrize(
    ("address", "content"),
    [
        pytest.param("mysqll://nowhere/x", None, id="unknown kind"),
        pytest.param("://", None, id="no address"),
        pytest.param("sqlite:////no/such/folder/x.db", None, id="no folder of a database"),
        pytest.param("/no/such/folder/x.log", None, id="no folder of a file"),
        pytest.param("", None, id="empty"),
        pytest.param("{folder}", None, id="folder"),
        pytest.param("sqlite:///{folder}/some", b"some text " * 100, id="text as a database"),
        pytest.param("{folder}/some", b"\xff\xfe\x00" * 9, id="bytes as a file"),
        pytest.param("{folder}/some", b"one line", id="text of one line as a file"),
        pytest.param("{folder}/some", b"[1, 2]\n", id="other JSON as a file"),
        pytest.param("{folder}/runs/journal.sqlite", None, id="its own journal as a file"),
        pytest.param("sqlite:///{folder}/runs/journal.sqlite", None, id="its own journal as a database"),
    ],
)
def test_a_storage_that_cannot_be_used(address, content, export, tmp_path):
    create(tmp_path).close()
    address = address.format(folder=tmp_path)
    if content is not None:
        (tmp_path / "some").write_bytes(content)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ShoalError) as error:
        export(tmp_path / "runs", address)
    assert f"the storage {address!r} cannot be used" in str(error.value)
    assert "give an address such as sqlite:///optuna.db" in str(error.value)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("storage", [None, 3, b"x.log", Path("x.log")], ids=repr)
def test_what_is_not_a_storage(storage, tmp_path):
    create(tmp_path).close()
    with pytest.raises(ShoalError) as error:
        mirror(tmp_path / "runs", storage)
    assert str(error.value) == (
        "`storage` must be an address such as 'sqlite:///optuna.db', the path of a file as a string, or one of "
        f"Optuna's storages, got {storage!r}"
    )
    if storage is None:
        assert Study(tmp_path / "runs").to_optuna().trials == []
    else:
        with pytest.raises(ShoalError, match="`storage` must be an address"):
            Study(tmp_path / "runs").to_optuna(storage)


class Locked(InMemoryStorage):
    def create_new_study(self, *arguments):
        raise StorageInternalError("the database is locked")


@pytest.mark.parametrize("export", [mirrored, exported])
def test_a_storage_that_takes_no_study(export, tmp_path):
    create(tmp_path).close()
    with pytest.raises(ShoalError, match=r"cannot be used \(StorageInternalError: the database is locked"):
        export(tmp_path / "runs", Locked())


def test_both_take_the_same_storages(tmp_path, storage):
    address, where = storage
    with closing(create(tmp_path)) as journal:
        train(journal, [0], 1)
        report(journal, 0, 1, 0.5, TrialState.PAUSED)
        journal.record_decisions([Decision(0, TrialState.COMPLETE)])
    Study(tmp_path / "runs").to_optuna(address, "mine")
    assert states(where)[0] == [There.COMPLETE]


def test_what_there_must_be(tmp_path):
    with pytest.raises(JournalError, match="there is no study in"):
        mirror(tmp_path, "x.log")
    create(tmp_path).close()
    for interval in (0, -1.0, "1", None, True, float("nan"), float("inf")):
        with pytest.raises(ShoalError) as error:
            mirror(tmp_path / "runs", str(tmp_path / "x.log"), interval=interval)
        assert str(error.value) == f"`interval` must be a number of seconds above 0, got {interval!r}"
