"""A study of Optuna's follows one of ours, in a database and in a file."""

import threading
import time
import warnings
from contextlib import closing

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState as There

from shoal.errors import JournalError, ShoalError
from shoal.journal.writer import Journal
from shoal.planner.job import Array, ArrayKey, Job, Member, Purpose
from shoal.report.optuna_mirror import mirror
from shoal.space import Space, choice, loguniform
from shoal.trial import Budget, Decision, Report, Trial, TrialGroup, TrialState

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
    journal.asked(1, [TrialGroup(tuple(TRIALS[number] for number in numbers), Budget(epochs))])
    members = tuple(Member(TRIALS[number], 0, epochs) for number in numbers)
    name = f"job {len(journal.jobs())}"
    journal.job_started(Job(name, (Array(ArrayKey("s", "d", 32), members),), Purpose.TRAIN), "cpu:0")


def report(journal, number, epoch, accuracy, state=TrialState.RUNNING, **more):
    journal.reported("job 0", [Report(number, epoch, {"accuracy": accuracy, **more}, 0.5, state)])


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
        journal.asked(1, [TrialGroup(tuple(TRIALS), Budget(1))])
        wait_for(where, [There.WAITING] * 4)
        train(journal, range(4), 1)
        wait_for(where, [There.RUNNING] * 4)
        report(journal, 0, 1, 0.5, TrialState.PAUSED)
        report(journal, 1, 1, 0.25, TrialState.PAUSED)
        report(journal, 2, 1, float("nan"), TrialState.PAUSED)
        journal.decided([Decision(2, TrialState.STOPPED, "accuracy is nan")])
        wait_for(where, [There.RUNNING, There.RUNNING, There.FAIL, There.RUNNING])
        journal.asked(1, [TrialGroup((TRIALS[0],), Budget(2))])  # promoted: it waits to go on
        report(journal, 3, 1, 0.75, TrialState.PAUSED)
        journal.decided([Decision(3, TrialState.STOPPED, "rank 3 of 3")])
        found = wait_for(where, [There.RUNNING, There.RUNNING, There.FAIL, There.PRUNED])
        assert found.trials[0].intermediate_values == {1: 0.5}
        assert found.trials[0].params == {"lr": TRIALS[0].config["lr"], "act": TRIALS[0].config["act"]}
        assert found.trials[3].user_attrs["reason"] == "rank 3 of 3"
        assert found.trials[3].value == 0.75
        train(journal, [0], 2)
        report(journal, 0, 2, 0.625, TrialState.PAUSED)
        journal.decided([Decision(0, TrialState.COMPLETE)])
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
        journal.decided([Decision(0, TrialState.COMPLETE)])
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
        journal.decided([Decision(0, TrialState.COMPLETE), Decision(1, TrialState.COMPLETE)])
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
        journal.decided([Decision(0, TrialState.COMPLETE), Decision(1, TrialState.COMPLETE)])
    found = mirror(tmp_path / "runs", address, "mine")
    assert [direction.name for direction in found.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [trial.values for trial in found.trials] == [[0.5, 2.0], None]
    assert states(where)[0] == [There.COMPLETE, There.FAIL]


@pytest.mark.parametrize("address", ["mysqll://nowhere/x", "sqlite:////no/such/folder/x.db", "/no/such/folder/x.log"])
def test_a_storage_that_cannot_be_used(address, tmp_path):
    create(tmp_path).close()
    with pytest.raises(ShoalError) as error:
        mirror(tmp_path / "runs", address)
    assert f"the storage {address!r} cannot be used" in str(error.value)


def test_what_there_must_be(tmp_path):
    with pytest.raises(JournalError, match="there is no study in"):
        mirror(tmp_path, "x.log")
    create(tmp_path).close()
    with pytest.raises(ShoalError, match="`interval` must be a number of seconds above 0, got 0"):
        mirror(tmp_path / "runs", str(tmp_path / "x.log"), interval=0)
