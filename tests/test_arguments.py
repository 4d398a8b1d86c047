"""What a study finds out about its task beforehand."""

import functools
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.arguments import batch_size_override, is_pickled_by_value
from shoal.programs.opaque import Command


class ByConfig(shoal.Task):
    def data(self, config: Any) -> Any: ...

    def model(self, config: Any) -> Any: ...

    def optimizer(self, model: Any, config: Any) -> Any: ...

    def loss(self, model: Any, batch: Any) -> Any: ...


class ByItself(ByConfig):
    def batch_size(self, config: Any) -> int:
        return 7


class OfScript(ByConfig):
    __module__ = "__main__"


def train(config: Any, name: str = "") -> None: ...


def nested() -> Any:
    return lambda config: None


@pytest.mark.parametrize(
    ("task", "kept"),
    [
        pytest.param(ByConfig(), False, id="a class of a module"),
        pytest.param(OfScript(), True, id="a class of a script"),
        pytest.param(train, False, id="a function of a module"),
        pytest.param(functools.partial(train, name="x"), False, id="with an argument given"),
        pytest.param(nested(), True, id="a function in a function"),
        pytest.param(Command(("true",), ("loss",), Path()), False, id="a command"),
    ],
)
def test_definitions_that_the_journal_keeps(task: object, kept: bool) -> None:
    assert is_pickled_by_value(task) is kept


def test_tasks_that_say_their_batch_size() -> None:
    assert [batch_size_override(task) for task in (ByConfig(), ByItself(), train)] == [None, "ByItself", None]
