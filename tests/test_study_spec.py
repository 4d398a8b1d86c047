"""The specification of a study: its defaults, its form in the journal, and what it refuses."""

import inspect
import json
import re
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import pytest

import shoal
from shoal.algorithms.base import Totals
from shoal.core.errors import ShoalError
from shoal.core.trial import derive_seed
from shoal.spec import StudySpec

SPEC = StudySpec(metric="accuracy", mode="max")


def test_defaults_are_those_of_tune() -> None:
    arguments = inspect.signature(shoal.tune).parameters
    required = {"metric", "mode", "space", "algorithm", "task"}
    made = required | {"objective", "callbacks", "initial", "constraints"}  # these have another form
    plain = [field for field in fields(StudySpec) if field.name in arguments.keys() - made]
    assert len(plain) > 15
    assert {field.name: field.default for field in plain} == {x.name: arguments[x.name].default for x in plain}


def test_json_keeps_all() -> None:
    spec = replace(
        SPEC,
        totals=Totals(2, 4, 8),
        stop_after=shoal.NoImprovement(7, 0.5),
        devices=["cpu:0"],
        settings={"detect_anomaly": True},
        data_seed="trial",
        best_by=MappingProxyType({"f1": "max"}),
        constraints=MappingProxyType({"ms": "<= 10"}),
    )
    assert StudySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("changes", "loss", "seed"),
    [
        pytest.param({}, None, derive_seed(0, "data"), id="defaults"),
        pytest.param({"mode": "min", "seed": 3}, "accuracy", derive_seed(3, "data"), id="minimised"),
        pytest.param({"loss": "cost", "data_seed": 0}, "cost", 0, id="named"),
        pytest.param({"metric": ["a", "b"], "mode": ["max", "min"], "data_seed": "trial"}, "b", None, id="several"),
    ],
)
def test_what_follows_from_the_arguments(changes: dict[str, Any], loss: str | None, seed: int | None) -> None:
    spec = replace(SPEC, **changes)
    assert (spec.loss_metric, spec.shared_data_seed) == (loss, seed)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": True},
        {"fuse": 1},
        {"retries": 1.0},
        {"target": "high"},
        {"stop_after": 3},
        {"sbatch": 4},
        {"policy": None},
        {"best_by": {"": "min"}},
        {"best_by": {"a\n": "min"}},
        {"best_by": ["f1"]},
        {"metric": ""},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_by_its_name(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(ShoalError, match=f"`{name}` must be .*, got {re.escape(repr(value))}"):
        replace(SPEC, **changes)
