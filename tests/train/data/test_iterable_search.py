"""Trials on iterable data sets train as in a plain loop: fused, packed, alone, and after a suspension."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Trial
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

CPU = torch.device("cpu")
TRAIN, VALID, SIZE, EPOCHS = 53, 21, 8, 2


class Points(IterableDataset[Any]):
    """Noisy points on a line whose slope changes with the pass; without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for place in range(self.samples):
            x = torch.tensor([place / self.samples, 1.0], dtype=torch.float64)
            yield x, (3 + self.epoch / 10) * x[0] + torch.rand((), dtype=torch.float64) / 10


class SizedPoints(Points):
    def __len__(self) -> int:
        return self.samples


def jittered(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + torch.rand(x.shape, dtype=torch.float64) / 100, y


class Line(shoal.Task):
    """Fits a line to points; an epoch is a pass."""

    def data(self, config: Any) -> Any:
        return SizedPoints(TRAIN), SizedPoints(VALID)

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).squeeze(-1), y)

    def batch_size(self, config: Any) -> int:
        return config.get("size", SIZE)


class Loaded(Line):
    """Uses loaders that have batch sizes, drop the last batch, and draw for each batch."""

    def data(self, config: Any) -> Any:
        return (
            DataLoader(SizedPoints(TRAIN), SIZE, drop_last=True, collate_fn=jittered),
            DataLoader(SizedPoints(VALID), 5),
        )


class Stepped(Line):
    """Has epochs of 5 steps, while a pass has 7."""

    def steps_per_epoch(self, config: Any) -> int:
        return 5


class Endless(Stepped):
    """Has a training set without a length: two epochs are more than three passes."""

    def data(self, config: Any) -> Any:
        return Points(TRAIN // 2), SizedPoints(VALID)


class Uncounted(Endless):
    """Does not define the end of an epoch."""

    def steps_per_epoch(self, config: Any) -> None:
        return None


TASKS = {"a pass is an epoch": Line(), "loaders": Loaded(), "steps": Stepped(), "without a length": Endless()}


@dataclass
class Plain:
    """Trains one trial in a plain loop."""

    task: Line
    trial: Trial

    def losses(self, epochs: int) -> list[float]:
        """Return the validation loss after each epoch."""
        task, config = self.task, self.trial.config
        torch.manual_seed(self.trial.seed)
        model = task.model(config)
        optimizer = task.optimizer(model, config)
        train, valid = (self._taken_apart(each) for each in task.data(config))
        epoch_steps = task.steps_per_epoch(config)
        sized = hasattr(train[0], "__len__")
        batches = chain.from_iterable(self._of_pass(n, *train) for n in count()) if sized else self._endless(*train)
        step, found = count(), []
        for epoch in range(epochs):
            model.train()
            for batch in self._of_pass(epoch, *train) if epoch_steps is None else islice(batches, epoch_steps):
                with shoal.randomness(self.trial, next(step)):
                    task.step(model, batch, optimizer)
            model.eval()
            with torch.no_grad():
                losses = [(task.loss(model, batch).item(), len(batch[1])) for batch in self._of_pass(None, *valid)]
            found.append(sum(loss * rows for loss, rows in losses) / VALID)
        return found

    def _taken_apart(self, returned: Any) -> tuple[Any, int, Any, bool]:
        if isinstance(returned, DataLoader):
            return returned.dataset, returned.batch_size or 0, returned.collate_fn, returned.drop_last
        return returned, self.task.batch_size(self.trial.config), default_collate, False

    def _samples(self, dataset: Any, number: int | None) -> list[Any]:
        dataset.set_epoch(number or 0)
        with shoal.sample_randomness(self.trial, number, 0):
            return list(dataset)

    def _of_pass(self, number: int | None, dataset: Any, size: int, collate: Any, drop: bool) -> Iterator[Any]:
        samples = self._samples(dataset, number)
        for place, first in enumerate(range(0, len(samples) - (size - 1 if drop else 0), size)):
            with shoal.sample_randomness(self.trial, number, place):
                batch = collate(samples[first : first + size])
            yield batch

    def _endless(self, dataset: Any, size: int, collate: Any, drop: bool) -> Iterator[Any]:
        samples = (sample for number in count() for sample in self._samples(dataset, number))
        while True:
            yield collate(list(islice(samples, size)))


def trials(sizes: Sequence[int] = (SIZE,) * 2) -> list[Trial]:
    return [
        Trial(number, {"lr": 0.01 * (number + 1), "size": size}, seed=100 + number, data_seed=5)
        for number, size in enumerate(sizes)
    ]


class StopsWithin(JobControl):
    """Stops a job after a number of steps."""

    def __init__(self, looks: int) -> None:
        super().__init__(prompt=True)
        self.left = looks

    def stopping(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.stop()
        return super().stopping()


def train(
    task: Line, directory: Path, arrays: Sequence[Sequence[Trial]], control: JobControl | None = None
) -> dict[int, dict[int, float]]:
    """Train trials in one job of a new process; return the validation loss of each epoch."""
    sets = DataSets(task, CPU)
    made = tuple(
        Array(FusionKey("line", "data", array[0].config["size"]), tuple(Member(each, 0, EPOCHS) for each in array))
        for array in arrays
    )
    directory.mkdir(parents=True, exist_ok=True)
    state = WorkerState(task, sets, TrialCache(), CPU, directory)
    control = control or JobControl(prompt=True)
    trainer = Trainer(Job("job", made), state, SignatureBuilder(task, sets), control, WorkerContext(directory, b""))
    found: dict[int, dict[int, float]] = {}
    for event in trainer.run():
        if isinstance(event, Reported):
            for report in event.reports:
                found.setdefault(report.trial, {})[report.epoch] = report.metrics["valid_loss"]
    return found


def assert_plain(found: dict[int, dict[int, float]], task: Line, some: Sequence[Trial]) -> None:
    assert found.keys() == {each.number for each in some}
    for each in some:
        assert [*found[each.number]] == [*range(1, EPOCHS + 1)]
        assert [*found[each.number].values()] == pytest.approx(Plain(task, each).losses(EPOCHS), rel=1e-9, abs=0)


@pytest.mark.parametrize("name", TASKS)
def test_a_fused_trial_learns_what_it_learns_alone_and_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    some = trials()
    assert_plain(train(TASKS[name], tmp_path / "fused", [some]), TASKS[name], some)
    assert_plain(train(TASKS[name], tmp_path / "alone", [some[1:2]]), TASKS[name], some[1:2])


@pytest.mark.parametrize("name", ["a pass is an epoch", "without a length"])
def test_arrays_of_several_batch_sizes_in_a_job_read_one_stream(name: str, tmp_path: Path) -> None:
    some = trials((8, 8, 5, 20))
    assert_plain(train(TASKS[name], tmp_path, [some[:2], some[2:3], some[3:]]), TASKS[name], some)


def test_lanes_catch_up_with_each_other_within_an_epoch_only(tmp_path: Path) -> None:
    task = Endless()
    state = WorkerState(task, DataSets(task, CPU), TrialCache(), CPU, tmp_path)

    def place(trial: Trial, target: int) -> Any:
        array = Array(FusionKey("line", "data", trial.config["size"]), (Member(trial, 0, target),))
        trainer = ArrayTrainer("job", array, state)
        while not trainer.done and not trainer.ready:
            trainer.prepare()
        trainer.advance()
        return trainer.pass_position

    one, other, larger = trials((8, 8, 20))
    train(task, tmp_path, [[one]])
    assert place(one, EPOCHS + 1) == ((5, EPOCHS * 5 * 8), 8)
    assert place(other, 1) == ((5, 0), 8)
    assert place(larger, 1) == ((5, 0), 20)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("looks", [3, 6])
@pytest.mark.parametrize("name", TASKS)
def test_a_trial_that_stops_within_an_epoch_goes_on_with_the_same_samples(
    name: str, looks: int, tmp_path: Path
) -> None:
    some, control = trials(), StopsWithin(looks)
    found = train(TASKS[name], tmp_path, [some], control)
    assert control.stop_noticed
    for number, losses in train(TASKS[name], tmp_path, [some]).items():
        found.setdefault(number, {}).update(losses)
    assert_plain(found, TASKS[name], some)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", TASKS)
def test_every_trial_of_a_search_equals_a_plain_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    study = search(TASKS[name], tmp_path)
    epochs = [row.epoch for row in study.trials]
    assert min(epochs) < max(epochs), "some are promoted, and continue"
    for row in study.trials:
        assert row.metrics["valid_loss"] == pytest.approx(
            Plain(TASKS[name], row.trial).losses(row.epoch)[-1], rel=1e-9, abs=0
        )


def test_an_epoch_without_an_end_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(shoal.ShoalError, match=r"no length, so the end of an epoch is unknown.* `steps_per_epoch`"):
        search(Uncounted(), tmp_path)


def search(task: shoal.Task, directory: Path) -> Any:
    return shoal.tune(
        task, {"lr": shoal.loguniform(1e-3, 1e-1)}, metric="valid_loss", mode="min",
        algorithm=shoal.SuccessiveHalving(n=4, max_epochs=2, eta=2), devices="cpu:1", backend="inline",
        directory=directory / "study", show_progress=False,
    )  # fmt: skip
