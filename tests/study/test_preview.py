"""What a search would do with its first trials: a study that only measures, and plans worked out by hand."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch
from planner_samples import KnownCosts
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.errors import ShoalError, StudyInterrupted, TaskError
from shoal.core.trial import Trial
from shoal.plan.array_packer import START_SECONDS, ArrayPacker
from shoal.plan.cost.history import History, environment
from shoal.plan.packing.cost import CostPacking
from shoal.run_study import measured
from shoal.study.preview import _Jobs

DEVICE = Device("cpu:0", "cpu/1", memory=4_200_000_000)


def profile(step=0.01, fused=None, steps=10, fetch=0.0, sharing="resident", base=100, member=10):
    """Steps of `step` seconds alone, of `fused` for two, no validation."""
    sizes = {1: step} if fused is None else {1: step, 2: fused}
    return Profile(sizes, steps, 0, base, member, 1.0, 1.0, fetch_seconds=fetch, sample_sharing=sharing)


def array(numbers, known, structure="mlp", data="data"):
    """An array of the trials of these numbers."""
    trials = [Trial(number, {"lr": 0.1 * (1 + number)}, seed=number, data_seed=0) for number in numbers]
    return Array(FusionKey(structure, data, 32), tuple(Member(trial, 0, 1) for trial in trials), known)


def plan(*jobs, relative_times=None, fuse=True):
    profiles = {array.key: array.profile for arrays in jobs for array in arrays}
    packer = ArrayPacker(CostPacking(), lambda kind: relative_times or {})
    return _Jobs(DEVICE, KnownCosts(lambda key, kind: profiles[key]), packer, fuse, list(jobs))


SLOW = profile(0.001, fetch=0.05, sharing="window")
KEPT = profile(0.01, fetch=0.05, sharing="kept")


@pytest.mark.parametrize(
    ("jobs", "shared", "expected"),
    [
        pytest.param([(array([0], profile()),)], False, 0.1, id="a step at a time"),
        pytest.param([(array([0, 1], profile(0.01, 0.012)),)], True, 0.12, id="fused"),
        pytest.param([(array([0], SLOW),), (array([1], SLOW, "cnn"),)], True, 1.02, id="samples of each job"),
        pytest.param([(array([0], SLOW), array([1], SLOW, "cnn"))], True, 0.52, id="of a pack once"),
        pytest.param([(array([0], KEPT),), (array([1], KEPT, "cnn"),)], True, 0.7, id="kept for all jobs"),
        pytest.param([(array([0], KEPT),), (array([1], KEPT, "cnn"),)], False, 1.2, id="kept where nothing is shared"),
        pytest.param([(array([0], KEPT),), (array([1], KEPT, "mlp", "b"),)], True, 1.2, id="kept of other data"),
    ],
)
def test_an_epoch_of_a_plan_is_that_of_its_jobs(jobs, shared, expected):
    assert plan(*jobs).seconds(shared) == pytest.approx(expected + len(jobs) * START_SECONDS)


def test_steps_of_a_pack_go_at_the_pace_that_was_measured():
    jobs = [(array([0], profile(0.1), "a"), array([1], profile(0.1), "b"))]
    found = plan(*jobs, relative_times={("a x 32", "b x 32"): 0.6})
    assert found.seconds(True) == pytest.approx(0.6 * 2 + START_SECONDS)


LARGE = profile(0.1, base=10, member=3_000_000_000)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        pytest.param([(array([0], profile()),)], "by itself: no other array has its data", id="nobody"),
        pytest.param(
            [(array([0, 1], profile(0.021, 0.02)),)], "2 trials fused; by itself: no other array has its data", id="all"
        ),
        pytest.param(
            [(array([0], profile()),), (array([1], profile(), data="other"),)],
            "by itself: no other array has its data",
            id="other data",
        ),
        pytest.param(
            [(array([0], profile(1.0)),), (array([1], profile(1.0), "cnn"),)],
            "by itself: sharing would save up to 0 %",
            id="saves too little",
        ),
        pytest.param(
            [(array([0], LARGE),), (array([1], LARGE, "cnn"),)],
            "by itself: needs 6.0 GB with another array, cpu:0 has 4.2 GB",
            id="does not fit with another",
        ),
        pytest.param(
            [(array([0], profile(1.0)),), (array([1], profile(1.0)),)],
            "not fused: together no faster; by itself: sharing would save up to 0 %",
            id="fusing is slower",
        ),
        pytest.param(
            [(array([0], LARGE),), (array([1], LARGE),)],
            "not fused: two take 6.0 GB, cpu:0 has 4.2 GB; "
            "by itself: needs 6.0 GB with another array, cpu:0 has 4.2 GB",
            id="two are too large",
        ),
    ],
)
def test_an_array_by_itself_has_a_reason(jobs, expected):
    (first, *_) = plan(*jobs).arrays()
    assert first.decision == expected


def test_a_packed_array_says_with_whom_and_what_that_saves():
    jobs = [(array([3], profile(), data="other"),), (array([0, 1], SLOW), array([2], SLOW, "cnn"))]
    single, fused, lone = plan(*jobs).arrays()
    # 0.02 + 0.01 + 0.5 and a start against 0.03 + 2 * 0.5 and two
    share = f"{100 * (0.5 + START_SECONDS) / (1.03 + 2 * START_SECONDS):.0f}"
    assert fused.decision == f"2 trials fused; packed with 3: saves {share} %"
    assert lone.decision == f"packed with 2: saves {share} %"
    assert [(each.job, each.packed_with) for each in (single, fused, lone)] == [(1, ()), (2, (2,)), (2, (1,))]
    assert fused.seconds == lone.seconds == pytest.approx(0.53 + START_SECONDS)
    assert (fused.separate_seconds, lone.separate_seconds) == pytest.approx(
        (2 * (0.51 + START_SECONDS), 0.51 + START_SECONDS)
    )


def test_a_study_that_does_not_fuse_is_the_reason():
    (unfused, _) = plan((array([0], profile()),), (array([1], profile()),), fuse=False).arrays()
    assert unfused.decision.startswith("not fused: fuse=False; by itself: sharing would save up to ")


def test_figures_of_an_array_are_those_of_its_profile():
    (found,) = plan((array([0, 1], profile(0.01, 0.012, fetch=0.03, sharing="kept")),)).arrays()
    assert (found.step_alone, found.step_fused) == (0.01, 0.006)
    assert found.gain == pytest.approx(1 / 0.6)
    assert (found.memory_alone, found.memory) == (110, 120)
    assert found.preprocessing == 0.75
    assert dataclasses.replace(found, array=found.array).members == 2


SPACE = {"lr": shoal.loguniform(1e-3, 1e-1), "width": shoal.choice([4, 6])}


class Sums(shoal.Task):
    def __init__(self, odd=""):
        self.odd = odd

    def data(self, config):
        x = torch.linspace(-1, 1, 4 * 32).view(32, 4)
        return TensorDataset(x, x.sum(1)), TensorDataset(x, x.sum(1))

    def model(self, config):
        if self.odd == "raises" and config["width"] == 6:
            raise ValueError("six")
        return nn.Linear(4, config["width"])

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        if self.odd == "interrupts" and not Path("../sent").exists():  # a second signal would end the process at once
            Path("../sent").touch()
            os.kill(os.getpid(), signal.SIGINT)
        if self.odd == "fails" and model.out_features != 1:
            raise RuntimeError("no loss")
        loss = (model(batch[0]).sum(1) - batch[1]).square()
        return loss if self.odd == "no scalar" else loss.mean()


def tuned(odd="", **changes):
    given = {"metric": "valid_loss", "mode": "min", "algorithm": shoal.ASHA(9, max_epochs=9), "devices": "cpu:1"}
    return shoal.tune(Sums(odd), SPACE, backend="inline", show_progress=False, **given | changes)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def numbers(found):
    return sorted(member.trial.number for each in found.arrays for member in each.array.members)


def test_tune_measures_what_random_search_would_try_and_does_not_return(tmp_path):
    passed = []

    def run():
        try:
            tuned(metric=["valid_loss", "b"], mode=["min", "max"], algorithm=shoal.OptunaSearch(3, 1))
        except Exception:  # a script's own
            passed.append("caught")
        passed.append("after")

    found = measured(run, 4, seed=5)
    assert (passed, list((tmp_path / "here").iterdir())) == ([], [])
    assert (numbers(found), found.failed, found.device.name) == ([0, 1, 2, 3], (), "cpu:0")
    known = History(environment=environment())
    for each in found.arrays:
        key = each.array.key
        assert known.get(key.structure, key.data, key.batch_size, found.device.kind) == each.array.profile
    study = tuned(algorithm=shoal.Random(4, epochs=1), seed=5, directory=tmp_path / "study")
    trials = {member.trial.number: member.trial for each in found.arrays for member in each.array.members}
    assert [trials[row.number] for row in study.trials] == [row.trial for row in study.trials]
    again = measured(tuned, 4, seed=5)
    assert [each.array.profile.step_seconds.keys() for each in again.arrays] != []
    assert measured(lambda: None, 4) is None


def test_who_raises_is_told_and_the_others_are_planned():
    found = measured(lambda: tuned("raises"), 8, seed=3)
    (failed,) = found.failed
    assert failed.reason == "ValueError: six"
    assert sorted([*failed.trials, *numbers(found)]) == list(range(8))
    assert {member.trial.config["width"] for each in found.arrays for member in each.array.members} == {4}


def test_where_many_fail_alike_the_reasons_are_what_is_found(monkeypatch):
    monkeypatch.setitem(SPACE, "width", shoal.choice([*range(1, 13)]))
    found = measured(lambda: tuned("fails"), 24, seed=3)
    reasons = {each.reason for each in found.failed}
    assert "RuntimeError: no loss" in reasons
    assert reasons <= {"RuntimeError: no loss", "was not measured"}
    others = [number for each in found.failed for number in each.trials]
    assert sorted([*others, *numbers(found)]) == [*range(24)]


def test_what_no_study_could_do_ends_it(tmp_path):
    with pytest.raises(TaskError, match="'loss' must be a real scalar"):
        measured(lambda: tuned("no scalar"), 2)
    with pytest.raises(StudyInterrupted):
        measured(lambda: tuned("interrupts"), 2)
    with pytest.raises(ShoalError, match="seed"):
        measured(lambda: tuned(seed="x"), 2)
    program = {"metric": "loss", "mode": "min", "algorithm": shoal.Random(1, epochs=1)}
    with pytest.raises(ShoalError, match="cannot be tried for a few steps"):
        measured(lambda: shoal.tune(print, SPACE, **program), 2)
    assert list((tmp_path / "here").iterdir()) == []
