"""What a study finds out about its task beforehand."""

import functools
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.arguments import batch_size_override, is_pickled_by_value, script_of
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


class Defaults(dict[str, Any]):
    """Attributes are items; one without an item is None."""

    __getattr__ = dict.get  # type: ignore[assignment]


def nested() -> Any:
    return lambda config: None


PARTS: dict[str, Any] = {
    "a method of a dict": {}.get,
    "a method of a list": [].append,
    "a method of a string": ",".join,
    "a method of a type": str.upper,
    "a method-wrapper": "x".__eq__,
    "a built-in function": len,
    "a class": ByConfig,
    "a method of a task": ByConfig().model,
    "a module": functools,
    "an object with any attribute": Defaults(),
}


@pytest.mark.parametrize(
    ("task", "kept"),
    [
        pytest.param(ByConfig(), False, id="a class of a module"),
        pytest.param(OfScript(), True, id="a class of a script"),
        pytest.param(train, False, id="a function of a module"),
        pytest.param(functools.partial(train, name="x"), False, id="with an argument given"),
        pytest.param(nested(), True, id="a function in a function"),
        pytest.param(Command(("true",), ("loss",), Path()), False, id="a command"),
        *(pytest.param(part, False, id=name) for name, part in PARTS.items()),
    ],
)
def test_definitions_that_the_journal_keeps(task: object, kept: bool) -> None:
    assert is_pickled_by_value(task) is kept


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_attributes_of_a_task_of_a_module_need_no_script(part: object) -> None:
    task = ByConfig()
    task.part = part  # type: ignore[attr-defined]
    assert script_of(task) is None
    task.own = OfScript()  # type: ignore[attr-defined]
    assert script_of(task) is not None


def test_tasks_that_say_their_batch_size() -> None:
    assert [batch_size_override(task) for task in (ByConfig(), ByItself(), train)] == [None, "ByItself", None]
