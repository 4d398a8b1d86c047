"""The arguments of a task's own `step`. mypy checks this file too: users' tasks are typed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

import shoal
from shoal.core.errors import TaskError
from shoal.task import takes_config

Config = Mapping[str, Any]


class Plain(shoal.Task):
    def data(self, config: Config) -> tuple[Dataset[Any], Dataset[Any]]:
        raise NotImplementedError

    def model(self, config: Config) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        return SGD(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError


class Classic(Plain):
    def step(self, model: nn.Module, batch: Any, optimizer: Optimizer) -> Tensor:
        return super().step(model, batch, optimizer)


class Configured(Plain):
    def step(self, model: nn.Module, batch: Any, optimizer: Optimizer, config: Config) -> Tensor:
        return super().step(model, batch, optimizer, config)


class Forwarding(Plain):
    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().step(*args, **kwargs)


@pytest.mark.parametrize(("task", "expected"), [(Classic(), False), (Configured(), True), (Forwarding(), True)])
def test_typed_steps_are_given_what_they_take(task: shoal.Task, expected: bool) -> None:
    assert takes_config(task) == expected


def other_name(model: Any, batch: Any, optimizer: Any, settings: Any) -> None: ...
def by_default(model: Any, batch: Any, optimizer: Any, config: Any = None) -> None: ...
def some(model: Any, *rest: Any) -> None: ...
def with_options(model: Any, batch: Any, optimizer: Any, config: Any, **options: Any) -> None: ...


@pytest.mark.parametrize("step", [other_name, by_default, some, with_options])
def test_a_fourth_argument_is_the_config(step: Any) -> None:
    task = Plain()
    task.step = step  # type: ignore[method-assign]
    assert takes_config(task)


def two(model: Any, batch: Any) -> None: ...
def five(model: Any, batch: Any, optimizer: Any, config: Any, clip: Any) -> None: ...
def another_default(model: Any, batch: Any, optimizer: Any, cfg: Any = None) -> None: ...
def by_keyword(model: Any, batch: Any, optimizer: Any, *, config: Any) -> None: ...
def by_keyword_or_not(model: Any, batch: Any, optimizer: Any, *, clip: float = 1.0) -> None: ...
def only_options(model: Any, batch: Any, optimizer: Any, **options: Any) -> None: ...


@pytest.mark.parametrize("step", [two, five, another_default, by_keyword, by_keyword_or_not, only_options])
def test_other_arguments_are_refused_before_there_is_a_directory(step: Any, tmp_path: Path) -> None:
    task = Plain()
    task.step = step  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"must be step\(self, model, batch, optimizer\), or .* but takes \(model: Any"):
        shoal.tune(
            task,
            {"lr": 0.1},
            metric="valid_loss",
            mode="min",
            algorithm=shoal.Random(1, epochs=1),
            directory=tmp_path / "study",
        )
    assert not (tmp_path / "study").exists()
