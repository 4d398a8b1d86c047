"""A name that a config lacks: the error names it, the nearest one, and those that there are."""

from collections.abc import Callable
from typing import Any

import pytest

from shoal.core.names import explain_missing_name, nearest_name_hint
from shoal.train.data.tracked_config import values_read

CONFIG = {"lr": 0.1, "width": 8, "optimizer": {"name": "sgd", "momentum": 0.9}}
ROWS = {"train": 1}


def of_helper(config: dict[str, Any]) -> Any:
    return config["widht"]


def caught_in_loop(config: dict[str, Any]) -> Any:
    return [config[name] for name in ("lr", "lrs")]


def nested(config: dict[str, Any]) -> Any:
    inner = config["optimizer"]
    return inner["mometum"]


def beside(config: dict[str, Any]) -> Any:
    sizes = {"small": config["width"]}
    return sizes["medium"]


def told(name: str, near: str) -> list[str]:
    has = "'lr', 'width', 'optimizer', 'name', 'momentum'"
    return [f"KeyError: '{name}'; the config has only {has}{near}"]


WIDTH = told("widht", " (did you mean 'width'?)")
CASES: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "a value": (lambda config: config["widht"], WIDTH),
    "in a function of the user": (of_helper, WIDTH),
    "in a comprehension": (
        caught_in_loop,
        told("lrs", " (did you mean 'lr'?)"),
    ),
    "a nested value": (nested, told("mometum", " (did you mean 'momentum'?)")),
    "a nested value at once": (
        lambda config: config["optimizer"]["mometum"],
        told("mometum", " (did you mean 'momentum'?)"),
    ),
    "none is near": (lambda config: config["seed"], told("seed", "")),
    "popped": (lambda config: config.pop("seed"), told("seed", "")),
    "no name": (lambda config: config[3], []),
    "looked up by a value": (lambda config: {"adam": 1}[config["optimizer"]["name"]], []),
    "of a dict beside it": (beside, []),
    "of a global dict": (lambda config: ROWS["valid"], []),
    "of another dict": (lambda config: ROWS[f"valid{config['width']}"], []),
}


def notes(call: Callable[[], object]) -> list[str]:
    with pytest.raises(KeyError) as error:
        call()
    return getattr(error.value, "__notes__", [])


@pytest.mark.parametrize(("read", "expected"), CASES.values(), ids=CASES)
def test_missing_name_is_explained(read: Callable[[dict[str, Any]], Any], expected: list[str]) -> None:
    def plain() -> object:
        config = dict(CONFIG)
        try:
            return read(config)
        except KeyError as error:
            explain_missing_name(error, "another argument", config)
            raise

    assert notes(plain) == expected
    assert notes(lambda: values_read(read, CONFIG)) == expected, "as `data` reads it"
    assert notes(lambda: values_read(lambda config: values_read(read, config), CONFIG)) == expected, "one note"


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [("acuracy", ["accuracy", "valid_loss"], " (did you mean 'accuracy'?)"), ("x", ["accuracy"], ""), (3, [], "")],
)
def test_nearest_name(name: object, names: list[str], expected: str) -> None:
    assert nearest_name_hint(name, names) == expected
