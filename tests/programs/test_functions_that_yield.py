"""Functions that would not train are refused with the cause."""

import functools
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import shoal
from shoal.core.errors import TaskError
from shoal.core.space import Space
from shoal.host.pickling import dumped
from shoal.programs import main
from shoal.programs.opaque import opaque


async def coroutine(config: dict[str, Any]) -> None:
    shoal.report({"loss": 1.0})


def generator(config: dict[str, Any]) -> Iterator[None]:
    yield shoal.report({"loss": 1.0})


async def both(config: dict[str, Any]) -> AsyncIterator[None]:
    yield shoal.report({"loss": 1.0})


class Called:
    async def __call__(self, config: dict[str, Any]) -> None:
        shoal.report({"loss": 1.0})


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (coroutine, r"coroutine is a coroutine function \(async def\)"),
        (functools.partial(coroutine), "coroutine is a coroutine function"),
        (Called(), "Called is a coroutine function"),
        (generator, "generator is a generator function"),
        (both, "both is an asynchronous generator function"),
    ],
)
def test_a_call_would_run_nothing(function: Callable[..., Any], fault: str) -> None:
    with pytest.raises(TaskError, match=fault):
        opaque(function, Space({"x": [1]}), 60.0)


@pytest.mark.parametrize(("called", "kind"), [(coroutine, "coroutine"), (generator, "generator")])
def test_a_call_that_has_run_nothing(
    called: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr("shoal.programs.trainable._report_count", None)
    content = dumped(lambda config: called(config), "it cannot be pickled", TaskError, "leave it out")
    with pytest.raises(TaskError, match=f"the function returned a {kind}, of which nothing ran"):
        main._call(content, {})


def test_any_error_of_a_pickle_is_told_of_with_the_part() -> None:
    class Refuses:
        def __reduce__(self) -> str:
            raise pickle.PickleError("it holds a handle")

    held = Refuses()

    def uses(config: dict[str, Any]) -> None:
        print(held)

    with pytest.raises(TaskError, match=r"'held', which .*uses closes over: it holds a handle"):
        opaque(uses, Space({"x": [1]}), 60.0)
