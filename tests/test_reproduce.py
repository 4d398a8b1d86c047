"""The order of samples and the random numbers of a trial, by public names."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal
from shoal.core.errors import FusionError
from shoal.core.trial import Trial

TRIAL = Trial(3, {}, seed=11, data_seed=5)
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


def test_orders_are_those_of_the_data_seed_and_the_epoch() -> None:
    first = shoal.sample_order(TRIAL, 0, 20)
    assert first.dtype == torch.int64
    assert sorted(first.tolist()) == list(range(20))
    assert torch.equal(first, shoal.sample_order(Trial(4, {}, seed=12, data_seed=5), 0, 20)), "they share batches"
    assert not torch.equal(first, shoal.sample_order(TRIAL, 1, 20))
    assert not torch.equal(first, shoal.sample_order(Trial(3, {}, seed=11, data_seed=6), 0, 20))


DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "a module's dropout": lambda: nn.Dropout1d(0.5)(X),
    "dropout of attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "numbers of torch": lambda: torch.rand(5) + torch.randn(5) + torch.randperm(5),
    "samples of a distribution": lambda: torch.distributions.Normal(torch.zeros(5), 1.0).sample(),
    "two functions": lambda: F.dropout(torch.rand(4), 0.5) + torch.rand(4),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_the_member_of_an_array(name: str) -> None:
    draw = DRAWS[name]
    array = shoal.fuse([nn.Linear(1, 1) for _ in range(3)], seeds=[10, TRIAL.seed, 12])
    array.ticks = (7, 7, 7)
    wanted = array.map(lambda model: draw() + 0 * model.weight.sum())[1]
    torch.manual_seed(0)
    with shoal.randomness(TRIAL, 7):
        found = draw()
    assert torch.equal(found.to(wanted), wanted)
    with shoal.randomness(TRIAL, 8):
        assert not torch.equal(draw().to(wanted), wanted)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "of a step": lambda: shoal.randomness(TRIAL, 0),
    "of a step of no array": lambda: shoal.randomness(TRIAL, 0, array=False),
    "of samples": lambda: shoal.sample_randomness(TRIAL, 0, 0),
}


def raise_within(context: Any) -> None:
    with context:
        raise ZeroDivisionError(numbers())


def numbers() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.rand()]


@pytest.mark.parametrize("name", CONTEXTS)
def test_all_generators_are_seeded_within_and_as_before_after_it(name: str) -> None:
    context = CONTEXTS[name]
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    wanted = numbers()
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    with context():
        within = numbers()
    with pytest.raises(ZeroDivisionError):
        raise_within(context())
    assert numbers() == wanted
    assert not set(within) & set(wanted)


def test_what_cannot_be_drawn_within_is_refused() -> None:
    with shoal.randomness(TRIAL, 0), pytest.raises(FusionError, match="pass use_reentrant=False"):
        checkpoint(F.dropout, X.clone().requires_grad_(), use_reentrant=True)
    with shoal.randomness(TRIAL, 0), pytest.raises(FusionError, match="within a function that an array runs"):
        shoal.fuse([nn.Linear(4, 1).double()])(X)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shoal.sample_order(3, 0, 10), "`trial` must be a trial, such as study.best_trial .*, got 3"),
        (lambda: shoal.sample_order(TRIAL, -1, 10), "`epoch` must be an integer of at least 0, got -1"),
        (lambda: shoal.sample_order(TRIAL, 0, [1, 2]), r"`samples` must be an integer of at least 1, got \[1, 2\]"),
        (lambda: shoal.randomness(TRIAL, 0.5).__enter__(), "`step` must be an integer, got 0.5"),
        (lambda: shoal.sample_randomness(TRIAL, 0, -1).__enter__(), "`batch` must be an integer of at least 0, got -1"),
    ],
    ids=["no trial", "epoch", "samples", "step", "batch"],
)
def test_arguments_that_mean_nothing_are_refused(call: Callable[[], object], words: str) -> None:
    with pytest.raises(shoal.ShoalError, match=words):
        call()


class Checkpointed(shoal.Task):
    """Its dropout is in a part that runs again; a model cannot draw numbers of its own in one that is re-entrant."""

    def __init__(self, reentrant: bool) -> None:
        self.reentrant = reentrant

    def data(self, config: Any) -> Any:
        return TensorDataset(X), TensorDataset(X)

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)).double()

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        out = checkpoint(model, x, use_reentrant=self.reentrant) * (random.random() + np.random.rand())
        return out.square().mean()

    def batch_size(self, config: Any) -> int:
        return 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_under_a_re_entrant_checkpoint_draws_numbers_of_the_generators(tmp_path: Path, reentrant: bool) -> None:
    study = shoal.tune(
        Checkpointed(reentrant),
        {"lr": shoal.grid([0.1, 0.2])},
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs=2),
        directory=tmp_path / "study",
        backend="inline",
        devices="cpu:1",
        show_progress=False,
    )
    for row in study.trials:
        torch.manual_seed(row.seed)
        task = Checkpointed(reentrant)
        model = task.model(row.config)
        optimizer = task.optimizer(model, row.config)
        for step in range(4):
            rows = shoal.sample_order(row, step // 2, len(X)).split(4)[step % 2]
            with shoal.randomness(row, step, array=not reentrant):
                task.step(model, (X[rows],), optimizer)
        total = 0.0
        for number, part in enumerate(X.split(4)):
            with shoal.randomness(row, -1 - number, array=not reentrant):
                total += task.loss(model.eval(), (part,)).item() * len(part)
        assert row.metrics["valid_loss"] == pytest.approx(total / len(X), rel=1e-12)
