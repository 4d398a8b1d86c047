"""Trials on one base whose training steps have different numbers of batches train as one array, each as alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract_samples import Planned, StopsAfter, search, work
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.array import FusionKey, Member
from shoal.core.errors import TaskError
from shoal.core.job import JobUpdate
from shoal.core.trial import Report, Trial
from shoal.task import Task
from shoal.train import proof
from shoal.train.data.datasets import DataSets
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache

SAMPLES, SIZE = 43, 4


class Accumulates(Task):
    """Steps of `config["batches"]` batches of four, the last one of three samples."""

    scheduler_interval = "step"

    def data(self, config: Any) -> Any:
        x = torch.randn(SAMPLES + 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y = x[:, :3].argmax(1)
        return TensorDataset(x[:SAMPLES], y[:SAMPLES]), TensorDataset(x[SAMPLES:], y[SAMPLES:])

    def base(self, config: Any) -> nn.Module:
        return nn.Linear(6, 6, dtype=torch.float64)

    def model(self, config: Any, *base: Any, **_: Any) -> nn.Module:
        own = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).double()
        return nn.Sequential(*base, own)

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.AdamW(model[-1].parameters(), lr=config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def batch_size(self, config: Any) -> int:
        return SIZE

    def accumulate(self, config: Any) -> int:
        return int(config["batches"])

    def clip_norm(self, config: Any) -> float:
        return 0.5

    def ema(self, config: Any) -> float | None:
        return 0.9


def key(task: Task, **config: Any) -> FusionKey:
    builder = SignatureBuilder(task, DataSets(task, torch.device("cpu")))
    return builder.key(Trial(0, {"lr": 0.1, "batches": 1, **config}, seed=0, data_seed=0))


class Prints(Accumulates):
    """Asks for a number, so that its trials train in plain PyTorch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        self.check(loss.item())
        return loss

    def check(self, loss: float) -> None:
        assert loss >= 0


class Sized(Accumulates):
    """Batches of `config["size"]` samples, of which four are computed at once."""

    micro_batch_size = SIZE

    def model(self, config: Any, *base: Any, **_: Any) -> nn.Module:
        own = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(config.get("p", 0.2)), nn.Linear(8, 3)).double()
        return nn.Sequential(*base, own)

    def batch_size(self, config: Any) -> int:
        return int(config["size"])

    def eval_batch_size(self, config: Any) -> int:
        return SIZE


class Skips(Accumulates):
    """Uses a layer only in batches of four samples, so that the last one gives it no gradient."""

    def model(self, config: Any, *base: Any, **_: Any) -> nn.Module:
        model = super().model(config, *base)
        model[-1].register_module("more", nn.Linear(3, 3, dtype=torch.float64))
        return model

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        own = model[-1]
        for layer in (model[0], *list(own)[:5]):
            x = layer(x)
        return F.cross_entropy(own.more(x) if len(x) == SIZE else x, y)


@pytest.mark.parametrize("kind", [Accumulates, Prints, Skips])
def test_each_trial_trains_as_alone(kind: type[Task], fusing_pays: None, tmp_path: Path) -> None:
    study = search(
        kind(), {"lr": shoal.loguniform(1e-3, 1e-1), "batches": shoal.choice([1, 2, 3, 4])}, tmp_path,
        algorithm=shoal.Random(6, epochs=2), devices="cpu:1",
    )  # fmt: skip
    assert len({trial.config["batches"] for trial in study.trials}) > 2
    rows = [row for trial in study.trials for row in study.proof(trial.number)]
    if kind is Accumulates:
        assert {row.members for row in rows} == {6}
        assert {row.reason for row in rows} == {""}
        assert {row.trial for row in rows if row.what == "step, eager"} > {0}
    else:
        reason = "`.item()`" if kind is Prints else "'1.more.weight' gets no gradient from some batches"
        assert any(reason in row.reason for row in rows)
    for trial in study.trials:
        assert study.rerun(trial.number).largest < 1e-9


@pytest.mark.parametrize("cheap", [0.0, float("inf")], ids=["two copies", "three copies"])
def test_copies_are_made_where_steps_begin(cheap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 3 and 4 batches of 11 end at once at the end of an epoch alone, where the first window continues."""
    monkeypatch.setattr(proof, "CHEAP_SECONDS", cheap)
    space = {"lr": shoal.choice([0.01, 0.02]), "batches": shoal.choice([3, 4])}
    study = search(Accumulates(), space, tmp_path, algorithm=shoal.Grid(epochs=2), devices="cpu:1")
    rows = [row for trial in study.trials for row in study.proof(trial.number)]
    assert {(row.members, row.reason) for row in rows} == {(4, "")}


def members(*batches: int, start: int = 0) -> list[Member]:
    configs = [{"lr": 0.01 * (n + 1), "batches": each} for n, each in enumerate(batches)]
    return [Member(Trial(n, config, seed=n, data_seed=0), start, 2) for n, config in enumerate(configs)]


def values(reports: list[Report]) -> dict[tuple[int, int], dict[str, float]]:
    return {(each.trial, each.epoch): dict(each.metrics) for each in reports}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, float]]:
    """Values of trials alone."""
    return {
        key: value
        for member in members(1, 2, 4)
        for key, value in values(work(Accumulates(), tmp_path_factory.mktemp("alone"), [member])).items()
    }


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("stays", [True, False], ids=["in this process", "in another"])
@pytest.mark.parametrize("looks", [2, 3, 4, 5])
def test_trials_go_on_where_they_were_stopped(
    looks: int, stays: bool, tmp_path: Path, whole: dict[tuple[int, int], dict[str, float]]
) -> None:
    cache, control = TrialCache(), StopsAfter(looks)
    found = work(Accumulates(), tmp_path, members(1, 2, 4), control, cache)
    assert control.stop_noticed
    found += work(Accumulates(), tmp_path, members(1, 2, 4), trial_cache=cache if stays else None)
    for key, value in values(found).items():
        assert value == pytest.approx(whole[key], rel=1e-9), key
    assert values(found).keys() == whole.keys()


def test_one_that_leaves_changes_nothing_for_the_others(
    tmp_path: Path, whole: dict[tuple[int, int], dict[str, float]]
) -> None:
    control = Planned({3: JobUpdate(leave=frozenset({1}))})
    found = values(work(Accumulates(), tmp_path, members(1, 2, 4), control))
    assert found.keys() == {key for key in whole if key[0] != 1}
    for key, value in found.items():
        assert value == pytest.approx(whole[key], rel=1e-9), key


def test_batch_sizes_share_an_array(tmp_path: Path) -> None:
    """With micro-batches, trials of any batch size are one array, each as alone and as with whole batches."""
    space = {"lr": shoal.loguniform(1e-3, 1e-1), "size": shoal.choice([4, 8, 12]), "batches": shoal.choice([1, 2])}
    study = search(Sized(), space, tmp_path, algorithm=shoal.Random(6, epochs=2), devices="cpu:1")
    assert len({trial.config["size"] * trial.config["batches"] for trial in study.trials}) > 2
    rows = [row for trial in study.trials for row in study.proof(trial.number)]
    assert {(row.members, row.reason) for row in rows} == {(6, "")}
    for trial in study.trials:
        assert study.rerun(trial.number).largest < 1e-9

    class Whole(Sized):
        micro_batch_size = None

    configs = [{"lr": 0.01, "size": size, "batches": batches, "p": 0.0} for size, batches in ((4, 1), (12, 1), (8, 2))]
    own = [Member(Trial(n, config, seed=n, data_seed=0), 0, 2) for n, config in enumerate(configs)]
    together = values(work(Sized(), tmp_path / "together", own))
    for one in own:
        for place, value in values(work(Whole(), tmp_path / f"{one.trial.number}", [one])).items():
            assert together[place] == pytest.approx(value, rel=1e-9)


class OfLoaders(Sized):
    def data(self, config: Any) -> Any:
        train, valid = super().data(config)
        return DataLoader(train, batch_size=8), valid


class Steps(Sized):
    def accumulate(self, config: Any) -> int:
        return 1

    def clip_norm(self, config: Any) -> Any:
        return None

    def step(self, model: nn.Module, batch: Any, optimizer: Any, *config: Any, **_: Any) -> Tensor:
        return super().step(model, batch, optimizer)


@pytest.mark.parametrize(
    ("kind", "size", "of_batch", "message"),
    [
        (Sized, 0, 8, "`micro_batch_size` of a task must be a positive integer or None, got 0"),
        (Sized, 2.0, 8, "`micro_batch_size` of a task must be a positive integer or None, got 2.0"),
        (Sized, 4, 10, "a batch of 10 samples cannot be divided by `micro_batch_size` of the task, 4; .* set it to 2"),
        (OfLoaders, 4, 8, "`micro_batch_size` of the task is 4, and its `data` returns a loader"),
        (Steps, 4, 8, "the task overrides `step`, which then does the work of `micro_batch_size` itself"),
    ],
)
def test_micro_batch_sizes_that_are_refused(kind: type[Task], size: Any, of_batch: int, message: str) -> None:
    task = kind()
    task.micro_batch_size = size
    with pytest.raises(TaskError, match=message):
        key(task, size=of_batch)


def test_the_number_of_batches_makes_no_other_structure_on_a_base() -> None:
    class ByStep(Accumulates):
        def steps_per_epoch(self, config: Any) -> int:
            return 3

    class WithoutBase(Accumulates):
        def base(self, config: Any) -> Any:
            return None

    assert key(Accumulates(), batches=1) == key(Accumulates(), batches=4)
    assert key(ByStep(), batches=1) != key(ByStep(), batches=4), "their epochs end at different samples"
    assert key(WithoutBase(), batches=1) != key(WithoutBase(), batches=4), "they share no products"


@pytest.mark.parametrize("name", ["base", "steps_per_epoch", "precision"])
def test_steps_divided_otherwise_are_another_structure_where_they_cannot_mix(name: str) -> None:
    """Four samples twice, and eight in two micro-batches: as many batches of a step, of which one array would mix."""
    returned = {"base": None, "steps_per_epoch": 3, "precision": "16-mixed"}[name]
    task = type("Divided", (Sized,), {name: lambda self, config: returned})()
    assert key(task, size=4, batches=2) != key(task, size=8, batches=1)
    assert key(Sized(), size=4, batches=2) == key(Sized(), size=8, batches=1)
