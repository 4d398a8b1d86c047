"""A `DataLoader` that `data` returns is read with its settings; trials train as in a plain loop over it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import shoal
from shoal.core.errors import ShoalError, TaskError
from shoal.train.data.datasets import DataSets

CPU = torch.device("cpu")
TRAIN, VALID = 53, 21


class Noisy(Dataset[Any]):
    """Points on a line, each with noise that is drawn when the point is fetched."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor([index / self.samples, 1.0], dtype=torch.float64)
        return x, 3 * x[0] + torch.rand((), dtype=torch.float64) / 10


class Task(shoal.Task):
    """Fits a line to the data that a function of the config returns."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def data(self, config: Any) -> Any:
        return self.make(config)

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).squeeze(-1), y)


class Sized(Task):
    def batch_size(self, config: Any) -> int:
        return 7


class Padding(Task):
    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)


def weights() -> Tensor:
    return torch.arange(TRAIN, dtype=torch.float64) + 1


class Backwards(Sampler[int]):
    """Yields every second index from the end, beginning with the number of the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 25

    def __iter__(self) -> Iterator[int]:
        return iter([TRAIN - 1 - 2 * place - self.epoch % 2 for place in range(25)])


LOADERS: dict[str, Callable[[Dataset[Any]], DataLoader[Any]]] = {
    "shuffled": lambda d: DataLoader(d, 8, shuffle=True),
    "in order": lambda d: DataLoader(d, 8),
    "drop last": lambda d: DataLoader(d, 8, shuffle=True, drop_last=True),
    "weighted": lambda d: DataLoader(d, 8, sampler=WeightedRandomSampler(weights(), 40)),  # type: ignore[arg-type]
    "subset": lambda d: DataLoader(d, 8, sampler=SubsetRandomSampler(range(5, 47)), drop_last=True),
    "with replacement": lambda d: DataLoader(d, 8, sampler=RandomSampler(d, True, generator=torch.Generator())),  # type: ignore[arg-type]
    "own": lambda d: DataLoader(d, 8, sampler=Backwards()),
    "workers": lambda d: DataLoader(d, 8, shuffle=True, num_workers=2),
    "collate": lambda d: DataLoader(d, 8, shuffle=True, num_workers=1, collate_fn=jittered),
}


def jittered(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x + torch.rand(x.shape, dtype=torch.float64) / 100, y


def search(task: shoal.Task, directory: Path, trials: int = 2, **options: Any) -> Any:
    return shoal.tune(
        task, {"lr": shoal.loguniform(1e-3, 1e-1)}, metric="valid_loss", mode="min",
        algorithm=shoal.Random(trials, epochs=2), devices="cpu:1", backend="inline", directory=directory / "study",
        show_progress=False, **options,
    )  # fmt: skip


def learned_alone(task: Task, trial: Any, epochs: int = 2) -> float:
    """Return the last validation loss of a plain loop over the same loaders."""
    torch.manual_seed(trial.seed)
    model = task.model(trial.config)
    optimizer = task.optimizer(model, trial.config)
    train, valid = task.data(trial.config)
    for epoch in range(epochs):
        order = shoal.sample_order(trial, epoch, train)
        for number, rows in enumerate(order.split(train.batch_size)):
            if len(rows) < train.batch_size and train.drop_last:
                continue
            with shoal.sample_randomness(trial, epoch, number):
                batch = train.collate_fn([train.dataset[int(i)] for i in rows])
            optimizer.zero_grad()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    losses: list[float] = []
    for number, rows in enumerate(torch.arange(len(valid.dataset)).split(valid.batch_size)):
        with shoal.sample_randomness(trial, None, number), torch.no_grad():
            batch = valid.collate_fn([valid.dataset[int(i)] for i in rows])
            losses += [task.loss(model, batch).item()] * len(rows)
    return sum(losses) / len(losses)


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("name", LOADERS)
def test_trials_learn_what_they_learn_in_a_loop_over_the_loader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    task = Task(lambda config: (LOADERS[name](Noisy(TRAIN)), DataLoader(Noisy(VALID), 5, shuffle=True)))
    study = search(task, tmp_path)
    for trial in study.trials:
        assert trial.metrics["valid_loss"] == pytest.approx(learned_alone(task, trial), rel=1e-9)


def batches(make: Any, kind: type[Task] = Task, epoch: int = 0) -> list[Any]:
    train, _ = DataSets(kind(lambda config: (make, TensorDataset(torch.zeros(2)))), CPU).of({})
    return list(train.iterate(train.batch_size or 8, train.order(7, epoch), seed=3))


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_are_cut_as_the_loader_says(workers: int) -> None:
    data = TensorDataset(torch.arange(20))
    given = batches(DataLoader(data, 6, drop_last=True, num_workers=workers))
    assert [x.tolist() for (x,) in given] == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]
    assert [len(x) for (x,) in batches(DataLoader(data, 6, shuffle=True, num_workers=workers))] == [6, 6, 6, 2]


def test_a_sampler_is_seeded_by_the_data_seed_and_the_epoch() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        loader = DataLoader(Noisy(TRAIN), 8, sampler=WeightedRandomSampler(weights(), 40))  # type: ignore[arg-type]
        train, _ = DataSets(Task(lambda config: (loader, loader)), CPU).of({})
        found = train.order(seed, epoch)
        assert found is not None
        return found.tolist()

    first = order(0, 7)
    before = torch.get_rng_state()  # `data` has been called, with a seed
    assert order(0, 7) == first
    assert order(0, 7) != order(1, 7)
    assert order(0, 7) != order(0, 8)
    assert torch.equal(torch.get_rng_state(), before)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Short(Endless):
    def __len__(self) -> int:
        return 4


class Names(Short):
    def __iter__(self) -> Any:
        return iter("abcd")


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


POINTS = Noisy(9)


def ragged(samples: list[Any]) -> Any:
    return [[float(y)] * count for count, (_, y) in enumerate(samples)]


@pytest.mark.parametrize(
    ("loader", "kind", "message"),
    [
        (DataLoader(POINTS, batch_sampler=BatchSampler(SequentialSampler(POINTS), 3, False)), Task,
         r"the training loader has a batch sampler \(BatchSampler\).* `batch_size`, `sampler`"),
        (DataLoader(POINTS, batch_size=None), Task, "has no batch size"),
        (DataLoader(POINTS, 3, sampler=Endless()), Task, "sampler Endless of the training loader has no length"),
        (DataLoader(POINTS, 3, sampler=Short()), Task, "Short .* yields 3 indices, and its length is 4"),
        (DataLoader(POINTS, 3, sampler=[0, -1, 2]), Task,
         "sampler of the training loader yields -1, and the data set has the indices 0 to 8"),
        (DataLoader(POINTS, 3, sampler=[0, 9, 2]), Task, "sampler of the training loader yields 9"),
        (DataLoader(POINTS, 3, sampler=Names()), Task, "Names .* must yield integers"),
        (DataLoader(POINTS, 16, drop_last=True), Task, "drops its only batch: an epoch has 9 samples, a batch 16"),
        (Doubling(POINTS, 3), Task, "is a Doubling, which iterates in its own way"),
        (DataLoader(POINTS, 3, collate_fn=jittered), Padding,
         r"has a `collate_fn` \(jittered\), and the task overrides `collate`"),
        (DataLoader(POINTS, 3, collate_fn=ragged), Task,
         "the `collate_fn` of the training loader must return a tensor .* pad what is ragged"),
        (DataLoader(POINTS, 3, collate_fn=ragged, num_workers=1), Task,
         "the `collate_fn` of the training loader must return a tensor .* pad what is ragged"),
    ],
)  # fmt: skip
def test_what_a_study_cannot_keep_is_refused(loader: Any, kind: type[Task], message: str) -> None:
    with pytest.raises(TaskError, match=f"(?s){message}"):
        batches(loader, kind)


@pytest.mark.parametrize(
    ("kind", "space", "message"),
    [
        (Task, {"batch_size": shoal.choice([32])},
         "batches of 16, but the config's \"batch_size\" is 32; make the loader with batch_size=self.batch_size"),
        (Sized, {}, "batches of 16, but the task's `batch_size` returns 7"),
    ],
)  # fmt: skip
def test_a_batch_size_that_the_loader_contradicts_names_both(
    kind: type[Task], space: Any, message: str, tmp_path: Path
) -> None:
    task = kind(lambda config: (DataLoader(POINTS, 16), POINTS))
    with pytest.raises(ShoalError, match=message):
        shoal.tune(
            task, {"lr": shoal.choice([0.1]), **space}, metric="valid_loss", mode="min",
            algorithm=shoal.Random(1, epochs=1), devices="cpu:1", backend="inline", directory=tmp_path / "study",
            show_progress=False,
        )  # fmt: skip


def test_a_batch_size_that_the_loader_has_too(tmp_path: Path) -> None:
    task = Sized(lambda config: (DataLoader(POINTS, 7, shuffle=True), POINTS))
    assert all("valid_loss" in trial.metrics for trial in search(task, tmp_path).trials)


@pytest.mark.parametrize("workers", [-1, 1.5, True])
def test_a_wrong_number_of_processes_is_refused(workers: Any) -> None:
    task = Task(lambda config: (POINTS, POINTS))
    task.loader_workers = workers
    with pytest.raises(TaskError, match=r"`loader_workers` of a task must be an integer of at least 0, got"):
        DataSets(task, CPU).of({})


def test_sentences_are_padded_by_the_loader() -> None:
    class Sentences(Noisy):
        def __getitem__(self, index: int) -> Any:
            return torch.arange(index % 4 + 1)

    def padded(samples: list[Any]) -> Any:
        return pad_sequence(samples, batch_first=True, padding_value=-1)

    plain, loaded = (
        batches(DataLoader(Sentences(10), 4, shuffle=True, collate_fn=padded, num_workers=n)) for n in (0, 1)
    )
    assert all(map(torch.equal, plain, loaded))
    assert [len(batch) for batch in plain] == [4, 4, 2]


KILLED = """
import sys
sys.path.insert(0, {here!r})
from test_loaders import *

class Slow(Noisy):
    def __getitem__(self, index):
        import time
        time.sleep(0.004)
        return super().__getitem__(index)

class Kept(Task):
    def __init__(self):
        pass

    def data(self, config):
        return DataLoader(Slow(TRAIN), 8, shuffle=True, num_workers=2), DataLoader(Noisy(VALID), 5, num_workers=1)

if __name__ == "__main__":
    directory = {directory!r}
    if sys.argv[1] == "resume":
        study = shoal.resume(directory, devices="cpu:1", show_progress=False)
        for trial in study.trials:
            assert abs(trial.metrics["valid_loss"] / learned_alone(Kept(), trial, epochs=12) - 1) < 1e-9
        print("equal")
    else:
        shoal.tune(Kept(), {{"lr": shoal.loguniform(1e-3, 1e-1)}}, metric="valid_loss", mode="min",
                   algorithm=shoal.Random(3, epochs=12), devices="cpu:1", directory=directory, show_progress=False,
                   checkpoint_seconds=0.05)
"""


@pytest.mark.thorough
def test_a_study_that_is_killed_in_an_epoch_goes_on_exactly_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "kept.py"
    script.write_text(KILLED.format(here=str(Path(__file__).parent), directory=str(tmp_path / "study")))
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(script)]
    first = subprocess.Popen([*command, "tune"], env=environment, cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 60
    while not in_an_epoch(tmp_path / "study") and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    while processes_with(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_with(tmp_path)
    done = subprocess.run(
        [*command, "resume"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "equal"


def in_an_epoch(directory: Path) -> bool:
    """Return whether a checkpoint was written between two steps of an epoch after the first."""
    names = [path.name.split("-") for path in (directory / "checkpoints").rglob("*-*-*")]
    return any(int(epoch) > 0 and int(step) > 0 for epoch, step, *_ in names if epoch.isdigit() and step.isdigit())


def processes_with(directory: Path) -> list[str]:
    """Return the processes whose working directory is this one."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(each / "cwd") == str(directory):
                found.append(each.name)
        except OSError:
            continue
    return found
