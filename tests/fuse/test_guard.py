"""Guards on attributes in which members differ: code that reads such an attribute sees each member's own value."""

import copy
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import build

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.guard import differences
from shoal.fuse.structure_serializer import StructureSerializer

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass
class Settings:
    width: int
    names: set[str] = field(default_factory=set)
    rate: float = 0.1


VALUES: dict[str, tuple[list[Any], Any]] = {
    "a number of a dict": ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], {"b": None}),
    "floats of a dict, which members have each": ([{"a": 1.0, "b": 1}, {"a": 2.0, "b": 2}], {"b": None}),
    "another order of keys": ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], None),
    "state outside of attributes": ([random.Random(1), random.Random(2)], None),
    "arguments of a partial": ([partial(int, 1), partial(int, 2)], None),
    "a field of an object": ([Settings(1), Settings(2)], {"width": None}),
    "a field of an object in a dict": ([{"a": Settings(1)}, {"a": Settings(2)}], {"a": {"width": None}}),
    "sets of an object": ([Settings(1, {"q"}), Settings(1, {"v"})], {"names": None}),
    "lists of strings": ([["q"], ["q", "v"]], {}),
    "lists of numbers, which torch reads past a guard": ([[1], [2, 3]], None),
    "other keys": ([{"a": 1}, {"b": 1}], None),
    "numbers by themselves": ([1, 2], None),
    "several classes": ([{"a": 1}, [1]], None),
    "a float for a number": ([{"a": 1}, {"a": 1.5}], None),
    "tensors of several shapes": ([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}], None),
    "modules": ([{"a": nn.ReLU()}, {"a": nn.Tanh()}], None),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_differs(name: str) -> None:
    values, expected = VALUES[name]
    texts = [StructureSerializer(nn.Module()).attribute for _ in values]
    assert differences(values, texts) == expected


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.settings = Settings(width, {str(width)})
        self.table = {"width": width, "scale": 0.5 * width, "same": 7}
        self.order = [str(place) for place in range(width)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table["scale"] * self.table["same"] * self.settings.rate


def nets() -> list[Any]:
    return [build(lambda b=b: Net(b + 1), 3)[b] for b in range(3)]


def test_models_that_differ_where_no_function_looks_are_one_array() -> None:
    models = nets()
    array = fuse(models)
    expected = torch.stack([model(X) for model in models])
    torch.testing.assert_close(array(X), expected, rtol=1e-12, atol=0)
    assert not array.partial
    assert [model.settings.width for model in models] == [1, 2, 3]  # the members' own are as they were
    assert [type(model.table) for model in models] == [dict] * 3


READS: dict[str, Callable[[Any], float]] = {
    "a key": lambda model: model.table["width"],
    "by get": lambda model: model.table.get("width"),
    "all values": lambda model: sum(model.table.values()),
    "all items": lambda model: sum(value for _, value in model.table.items()),
    "a copy of a dict": lambda model: dict(model.table)["width"],
    "as arguments": lambda model: dict(**model.table)["width"],
    "merged": lambda model: (model.table | {})["width"],
    "compared": lambda model: 2.0 if model.table == {"width": 1, "scale": 0.5, "same": 7} else 1.0,
    "a field": lambda model: model.settings.width,
    "by getattr": lambda model: getattr(model.settings, "width"),  # noqa: B009
    "by vars": lambda model: vars(model.settings)["width"],
    "asdict": lambda model: asdict(model.settings)["width"],
    "a deep copy": lambda model: copy.deepcopy(model.settings).width,
    "a set": lambda model: 2.0 if "1" in model.settings.names else 1.0,
    "the length of a list": lambda model: len(model.order),
    "a list's elements": lambda model: sum(map(int, model.order)) + 1,
    "a list unpacked": lambda model: len([*model.order, "1"]),
    "a list joined": lambda model: len(model.order + ["1"]),  # noqa: RUF005
    "a list joined to another": lambda model: len(["1"] + model.order),  # noqa: RUF005
    "strings joined": lambda model: len("".join(model.order)),
}


@pytest.mark.parametrize("name", READS)
def test_a_function_that_reads_what_differs_is_refused(name: str) -> None:
    def read(model: Any, x: Tensor) -> Tensor:
        return model.layer(x) * READS[name](model)

    with pytest.raises(FusionError, match=r"'?(table|settings|order)\b.*, in which the members differ; .*unfuse\(\)"):
        fuse(nets()).map(read, X)


def test_a_function_that_changes_what_differs_is_refused() -> None:
    models = nets()

    def count(model: Any, x: Tensor) -> Tensor:
        model.order.append("0")
        return model(x)

    with pytest.raises(FusionError, match="it reads or changes 'order', in which the members differ"):
        fuse(models).map(count, X)
    assert [len(model.order) for model in models] == [1, 2, 3]


def test_classes_of_what_differs_are_still_theirs() -> None:
    def read(model: Any, x: Tensor) -> Tensor:
        assert isinstance(model.settings, Settings)
        assert isinstance(model.table, dict)
        return model.layer(x) * model.table["same"]

    array = fuse(nets())
    array.map(read, X)


def test_a_number_on_a_module_itself_is_still_a_difference() -> None:
    models = [build(lambda: Net(1), 2)[b] for b in range(2)]
    models[0].width, models[1].width = 1, 2
    with pytest.raises(FusionError, match="differs from member 0 at 'width'"):
        fuse(models)
