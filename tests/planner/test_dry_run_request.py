"""A call of `tune` that only says what it asks for."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.api import overridden
from shoal.core.errors import ShoalError
from shoal.dry_run.request import dry_run_request

SPACE = {"lr": shoal.loguniform(1e-3, 1e-1), "width": shoal.choice([4, 8])}


class Line(shoal.Task):
    def data(self, config):
        x = torch.ones(4, 1)
        return TensorDataset(x, x), TensorDataset(x, x)

    def model(self, config):
        return nn.Linear(1, 1)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()


def tuned(**changes):
    given = {"metric": "valid_loss", "mode": "min", "algorithm": shoal.Random(3, epochs=1), "devices": "cpu:1"}
    return shoal.tune(Line(), SPACE, **given | changes)


def test_tune_hands_over_and_does_not_return(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    passed = []

    def run():
        passed.append("before")
        try:
            tuned()
        except Exception:  # a script's own
            passed.append("caught")
        passed.append("after")

    found = dry_run_request(run)
    assert passed == ["before"]
    assert list(tmp_path.iterdir()) == []
    assert found.spec["task"] == "Line"
    assert [device.name for _, device in found.cluster] == ["cpu:0"]


def test_its_trials_are_those_that_random_search_would_try(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    with overridden(seed=5, devices="cpu:2"):
        found = dry_run_request(lambda: tuned(seed=1))
    study = tuned(seed=5, directory=tmp_path / "study", backend="inline", show_progress=False)
    assert found.trials(3) == [row.trial for row in study.trials]
    assert len(found.cluster.nodes[0].devices) == 2


def test_trials_with_an_order_of_their_own_and_several_metrics_are_told_as_well():
    def run():
        tuned(data_seed="trial", metric=["valid_loss", "b"], mode=["min", "max"], algorithm=shoal.OptunaSearch(3, 1))

    trials = dry_run_request(run).trials(2)
    assert len({trial.data_seed for trial in trials}) == 2


def test_who_never_calls_tune_asks_for_nothing_and_wrong_arguments_raise_as_ever():
    assert dry_run_request(lambda: None) is None
    with pytest.raises(ShoalError, match="seed"):
        dry_run_request(lambda: tuned(seed="x"))
