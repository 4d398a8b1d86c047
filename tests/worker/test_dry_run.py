"""The dry run takes a few real steps of some configurations: alone, fused and packed."""

import logging
import math
import time
from dataclasses import replace

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import TaskError
from shoal.core.space import Space
from shoal.core.trial import Trial
from shoal.cost.history import History, records
from shoal.dry_run.request import DryRunRequest
from shoal.dry_run.run import dry_run
from shoal.planner.packing.base import NoPacking
from shoal.planner.packing.cost import Cost
from shoal.worker.profile import measure

DEVICE = Device("cpu:0", "cpu/1", memory=1 << 40)
FETCH_SECONDS = 0.0003


class Slow(Dataset):
    """Has samples that take long to decode."""

    def __init__(self, samples):
        self.x = torch.linspace(-1, 1, 8 * samples).view(samples, 8)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(FETCH_SECONDS)
        return self.x[index], self.x[index].sum()


class Sums(shoal.Task):
    def data(self, config):
        if config.get("data") == "slow":
            return Slow(128), Slow(16)
        x = torch.linspace(-1, 1, 8 * 256).view(256, 8)
        return TensorDataset(x, x.sum(1)), TensorDataset(x[:32], x[:32].sum(1))

    def model(self, config):
        if config["width"] == 13:
            raise ValueError("13 brings bad luck")
        if config["width"] == 14:
            return nn.Linear(8, 1 << 60)
        return nn.Sequential(nn.Linear(8, config["width"]), nn.ReLU(), nn.Linear(config["width"], 1))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-3))

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x)[:, 0], y)


class Vectors(Sums):
    def loss(self, model, batch):
        return model(batch[0])[:, 0]


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "history.sqlite")


@pytest.fixture
def fusing_pays(monkeypatch):
    """Make fused steps faster, independently of the machine."""

    def measured(*arguments):
        return replace(measure(*arguments), step_seconds={1: 1e-3, 16: 1e-3}, fuse_seconds={})

    monkeypatch.setattr("shoal.dry_run.run.measure", measured)


def tried(configs, history, task=None, device=DEVICE, packing=None, **spec):
    settings = {"task": "Sums", "space": Space({}).to_json(), "seed": 0, "fuse": True} | spec
    cluster = Cluster((Node("here", 1, (device,)),))
    study = DryRunRequest(settings, cloudpickle.dumps(task or Sums()), cluster, packing or Cost())
    trials = [Trial(number, config, seed=number, data_seed=0) for number, config in enumerate(configs)]
    return dry_run(study, trials, history, lambda line: None)


def numbers(each):
    return [member.trial.number for member in each.array.members]


def test_slow_samples_make_sharing_pay(history, fusing_pays):
    slow = {"data": "slow", "width": 4}
    configs = [slow | {"lr": 0.01}, slow | {"width": 6}, slow | {"lr": 0.02}, slow | {"batch_size": 16}]
    found = tried(configs, history)
    assert [numbers(each) for each in found.arrays] == [[0, 2], [1], [3]]
    for each in found.arrays:
        assert each.profile.sharing == "kept"
        assert each.profile.fetch_seconds >= each.array.key.batch_size * FETCH_SECONDS
        assert each.preprocessing > 0.5
    assert [(each.job, each.packed_with) for each in found.arrays] == [(1, (1, 2)), (1, (0, 2)), (1, (0, 1))]
    assert found.arrays[0].decision.startswith("2 trials fused; packed with 2, 3: saves ")
    assert found.pays
    assert found.totals["chosen"] < min(found.totals["fused"], found.totals["packed"]) < found.totals["apart"]
    fetched = 144 * FETCH_SECONDS
    assert found.totals["apart"] - found.totals["chosen"] > 3 * fetched, "samples are fetched for one of four"


def test_what_was_measured_is_known_to_the_next_search(history):
    found = tried([{"data": "slow", "width": 4}, {"data": "slow", "width": 6}], history)
    again = History(history.path)
    for each in found.arrays:
        key = each.array.key
        assert again.get(key.structure, key.data, key.batch_size, "cpu/1") == each.profile
    (record, _) = records(history.path)
    assert set(record.tasks["Sums"]) == {"data", "width"}


def test_what_the_history_says_is_measured_anew(history):
    before = tried([{"width": 4}], history).arrays[0]
    key, absurd = before.array.key, 1e6
    known = type(before.profile)({1: absurd}, 1, 1, 0, 0, 1.0, 1.0)
    history.put(key.structure, key.data, key.batch_size, "cpu/1", known)
    assert tried([{"width": 4}], history).arrays[0].step_alone < 1
    assert history.get(key.structure, key.data, key.batch_size, "cpu/1").step_seconds[1] < 1


def test_arrays_of_other_data_stay_apart(history):
    found = tried([{"data": "slow", "width": 4}, {"width": 4}], history)
    assert [each.job for each in found.arrays] == [1, 2]
    assert [each.decision for each in found.arrays] == ["by itself: no other array has its data"] * 2
    assert [each.profile.sharing for each in found.arrays] == ["kept", "resident"]
    assert found.totals["packed"] == found.totals["apart"]


def test_what_a_pack_gains_is_planned_with(history, monkeypatch):
    """The measured gain is also used by the next search."""
    monkeypatch.setattr("shoal.dry_run.run._measure_relative_time", lambda arrays, worker_state: 0.5)
    found = tried([{"data": "slow", "width": 4}, {"data": "slow", "width": 6}], history)
    structures = sorted(each.array.key.steps for each in found.arrays)
    assert dict(History(history.path).relative_times("cpu/1")) == {tuple(structures): 0.5}
    assert found.arrays[0].job == found.arrays[1].job


def test_who_raises_is_told_and_the_others_go_on(history, caplog):
    with caplog.at_level(logging.WARNING, "shoal.worker"):
        found = tried([{"width": 13}, {"width": 4}, {"width": 14}, {"width": 13}], history)
    assert [numbers(each) for each in found.arrays] == [[1]]
    reasons = {each.trials: each.reason for each in found.failed}
    assert reasons[0, 3] == "ValueError: 13 brings bad luck"
    assert set(reasons) == {(0, 3), (2,)}
    assert caplog.text.count("13 brings bad luck") >= 1
    assert "line" in caplog.text


def test_a_member_that_raises_does_not_take_its_structure_along(history, fusing_pays):
    class Odd(Sums):
        def optimizer(self, model, config):
            if config["lr"] < 0 and next(model.parameters()).device.type != "meta":
                raise ValueError("lr is negative")
            return torch.optim.SGD(model.parameters(), lr=abs(config["lr"]))

    found = tried([{"width": 4, "lr": lr} for lr in (0.1, -0.1, 0.2)], history, Odd())
    assert [numbers(each) for each in found.arrays] == [[0, 2]]
    assert found.failed[0].trials == (1,)
    assert found.failed[0].reason == "ValueError: lr is negative"


def test_no_memory_is_a_reason(history):
    found = tried([{"width": 4}, {"width": 6}], history, device=Device("cpu:0", "cpu/1", memory=1 << 20))
    assert found.arrays == ()
    (failed,) = found.failed
    assert failed.trials == (0, 1)
    assert "cpu:0 has 1 MB" in failed.reason

    class Greedy(Sums):
        def loss(self, model, batch):
            if model[0].weight.shape[-2] == 6:
                raise torch.OutOfMemoryError("no room")
            return super().loss(model, batch)

    greedy = tried([{"width": 4}, {"width": 6}], history, Greedy())
    assert [(each.trials, each.reason) for each in greedy.failed] == [((1,), "out of memory")]


def test_a_task_that_breaks_its_contract_ends_it(history):
    with pytest.raises(TaskError, match=r"'loss' must be a real scalar.*; it was met with configuration 0, .*width"):
        tried([{"width": 4}, {"width": 4}], history, Vectors())


def test_who_exits_is_told_and_the_others_go_on(history):
    class Exits(Sums):
        def loss(self, model, batch):
            if model[0].weight.shape[-2] == 6:
                raise SystemExit(7)
            return super().loss(model, batch)

    found = tried([{"width": 4}, {"width": 6}], history, Exits())
    assert [numbers(each) for each in found.arrays] == [[0]]
    assert [(each.trials, each.reason) for each in found.failed] == [((1,), "SystemExit: 7")]


def test_trials_are_not_fused_where_the_study_says_so(history):
    found = tried([{"width": 4}, {"width": 4}], history, packing=NoPacking(), fuse=False)
    assert [numbers(each) for each in found.arrays] == [[0], [1]]
    assert found.arrays[0].decision.startswith("not fused: fuse=False; by itself: sharing would save up to ")
    assert found.arrays[0].decision.endswith(", NoPacking() decides")
    assert set(found.totals.values()) == {found.totals["apart"]}


def test_losses_that_are_not_numbers_do_not_end_what_is_measured(history):
    configs = [{"data": "slow", "width": width, "lr": lr} for width, lr in ((4, 1e-3), (6, 1e30), (8, 1e-3))]
    found = tried(configs, history)
    assert {each.job for each in found.arrays} == {1}
    assert not math.isnan(found.totals["chosen"])


def test_arrays_that_raise_in_company_are_by_themselves(history):
    class Lonely(Sums):
        def __init__(self):
            self.widths = []

        def loss(self, model, batch):
            self.widths.append(model[0].weight.shape[-2])
            if len(set(self.widths)) == 2 and len(self.widths) > 60:
                raise RuntimeError("too many models")
            return super().loss(model, batch)

    configs = [{"data": "slow", "width": 4}, {"data": "slow", "width": 6}]
    found = tried(configs, history, Lonely())
    assert [each.job for each in found.arrays] == [1, 2]
    why = "by itself: measuring it with others failed: RuntimeError: too many models"
    assert [each.decision for each in found.arrays] == [why] * 2
    assert history.relative_times("cpu/1") == {}


def test_random_samples_are_fetched_for_all_of_one_batch_size(history):
    class Noise(Slow):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.01 * torch.randn(8), y

    class Augmented(Sums):
        def data(self, config):
            return Noise(128), Noise(16)

    found = tried([{"width": 4}, {"width": 6}], history, Augmented())
    assert [each.profile.sharing for each in found.arrays] == ["batch", "batch"]
    assert {each.job for each in found.arrays} == {1}
    fetched = 144 * FETCH_SECONDS
    assert found.totals["apart"] - found.totals["chosen"] > fetched, "once for both"


def test_nothing_is_written_but_the_history(history, tmp_path, monkeypatch):
    place = tmp_path / "empty"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    tried([{"width": 4}, {"width": 6}], history)
    assert list(place.iterdir()) == []
