"""Batches that a task's own `collate` makes, padded or masked, are the same for a trial in an array as alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import shoal
from shoal.core.errors import TaskError
from shoal.train.data.datasets import DataSets

WORDS = 11
CPU = torch.device("cpu")


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of several lengths, whose words count up from the number of the sentence."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[int]:
        return [1 + (index + place) % (WORDS - 1) for place in range(2 + index % 4)]


class Padded(shoal.Task):
    """Predicts the last word; one random word of each batch is masked."""

    def data(self, config: Any) -> Any:
        return Sentences(22), Sentences(9)

    def collate(self, samples: list[Any]) -> Any:
        words = pad_sequence([torch.tensor(sample[:-1]) for sample in samples], batch_first=True)
        words[torch.rand(words.shape) < 0.2] = 0
        return {"words": words, "last": torch.tensor([sample[-1] for sample in samples]), "count": len(samples)}

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model[1](model[0](batch["words"]).mean(1)), batch["last"])


def walk(task: shoal.Task, size: int, seed: int, first: int = 0) -> list[Any]:
    train, _ = DataSets(task, CPU).of({})
    return list(train.iterate(size, torch.arange(22).flip(0), first, seed))


def test_batches_are_padded_to_their_longest_sample() -> None:
    shapes = [tuple(batch["words"].shape) for batch in walk(Padded(), 3, seed=1)]
    lengths = [1 + index % 4 for index in reversed(range(22))]
    assert shapes == [(len(lengths[i : i + 3]), max(lengths[i : i + 3])) for i in range(0, 22, 3)]


def test_what_is_drawn_depends_on_the_batch_and_the_seed_alone() -> None:
    whole = walk(Padded(), 4, seed=1)
    for later, batch in zip(walk(Padded(), 4, seed=1, first=2), whole[2:], strict=True):
        torch.testing.assert_close(later, batch)
    assert any(not torch.equal(a["words"], b["words"]) for a, b in zip(whole, walk(Padded(), 4, seed=2), strict=True))


def test_walks_of_one_batch_size_share_batches() -> None:
    train, _ = DataSets(Padded(), CPU).of({})
    walks = [train.iterate(4, torch.arange(22), seed=3) for _ in range(3)]
    for batches in zip(*walks, strict=True):
        for other in batches[1:]:
            torch.testing.assert_close(other, batches[0])
        batches[0]["words"].zero_()  # a trial may change its batch
    assert train.fetched == 22


class Ragged(Padded):
    def collate(self, samples: list[Any]) -> Any:
        return [list(sample) for sample in samples]


def test_ragged_lists_are_refused_in_words() -> None:
    with pytest.raises(TaskError, match=r"`collate` must return a tensor .* pad what is ragged"):
        walk(Ragged(), 4, seed=0)


class Wrapped(Padded):
    def collate(self, samples: list[Any]) -> Any:
        from transformers import BatchEncoding

        return BatchEncoding(super().collate(samples))


@pytest.mark.parametrize("kind", [Padded, Wrapped])
def test_trials_learn_what_they_learn_in_a_loop_of_their_own(
    kind: type[Padded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    task = kind()
    study = shoal.tune(
        task, {"lr": shoal.loguniform(1e-3, 1e-1), "batch_size": shoal.choice([4, 8])}, metric="valid_loss", mode="min",
        algorithm=shoal.Random(3, epochs=2), devices="cpu:1", backend="inline", directory=tmp_path / "study",
        show_progress=False,
    )  # fmt: skip
    for trial in study.trials:
        size = trial.config["batch_size"]
        torch.manual_seed(trial.seed)
        model = task.model(trial.config)
        optimizer = task.optimizer(model, trial.config)
        train, valid = task.data(trial.config)
        for epoch in range(2):
            order = shoal.sample_order(trial, epoch, len(train))
            for number, rows in enumerate(order.split(size)):
                with shoal.sample_randomness(trial, epoch, number):
                    batch = task.collate([train[int(i)] for i in rows])
                optimizer.zero_grad()
                task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        losses, model = [], model.eval()
        for number, rows in enumerate(torch.arange(len(valid)).split(size)):
            with shoal.sample_randomness(trial, None, number), torch.no_grad():
                losses += [task.loss(model, task.collate([valid[int(i)] for i in rows])).item()] * len(rows)
        assert trial.metrics["valid_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9)
