"""Scalars of NumPy are taken wherever a number or a truth value is, and become Python's."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.algorithms.base import call_text
from shoal.core.domain import Domain
from shoal.core.plain import plain
from shoal.core.space import Space
from shoal.plan.packing.cost import CostPacking
from shoal.plan.schedule.convergence import Convergence
from shoal.plan.schedule.exact import Exact
from shoal.programs.opaque import Function, opaque
from shoal.spec import StudySpec

LARGEST = np.iinfo(np.int64).max


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((np.int64(3), 3), (np.uint8(255), 255), (np.int64(LARGEST), int(LARGEST)), (np.bool_(True), True)),
        *((np.float64(0.1), 0.1), (np.float32(0.5), 0.5), (np.float16(2), 2.0), (np.longdouble(0.25), 0.25)),
        *((True, True), (3, 3), (0.5, 0.5), (None, None), ("3", "3")),
    ],
    ids=repr,
)
def test_a_scalar_becomes_pythons(value: object, expected: object) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_what_is_no_number_stays() -> None:
    for value in (np.datetime64("2026-01-01"), np.complex128(1j), np.zeros(1)):
        assert plain(value) is value


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: shoal.uniform(np.float32(0.5), np.int64(1)), "uniform(0.5, 1)"),
        (lambda: shoal.loguniform(np.float64(0.1), 1), "loguniform(0.1, 1)"),
        (lambda: shoal.quniform(np.int32(0), 1, np.float32(0.25)), "quniform(0, 1, 0.25)"),
        (lambda: shoal.randint(np.int64(1), np.int64(4)), "randint(1, 4)"),
        (lambda: shoal.choice(list(np.array([True, False]))), "choice([True, False])"),
        (lambda: shoal.grid(np.arange(2)), "choice([0, 1])"),
        (lambda: shoal.normal(np.float32(0), np.int64(1)), "normal(0.0, 1)"),
        (lambda: shoal.choice([1, 2], weights=[np.float32(0.5), np.int8(2)]), "choice([1, 2], weights=[0.5, 2])"),
    ],
)
def test_domains(make: Callable[[], Domain], text: str) -> None:
    (domain, _) = Space({"x": make()}).domains()["x"]
    assert str(domain) == text


TWO, FOUR, NINE = np.int64(2), np.int32(4), np.uint8(9)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: shoal.Random(FOUR, epochs=NINE), "Random(n=4, epochs=9)"),
        (lambda: shoal.Grid(epochs=NINE), "Grid(epochs=9)"),
        (lambda: shoal.SuccessiveHalving(NINE, max_epochs=NINE), "SuccessiveHalving(n=9, max_epochs=9)"),
        (lambda: shoal.Hyperband(NINE, eta=np.int64(3)), "Hyperband(max_epochs=9)"),
        (lambda: shoal.ASHA(NINE, max_epochs=NINE), "ASHA(n=9, max_epochs=9)"),
        (lambda: shoal.BOHB(NINE, random_fraction=np.float32(0.5)), "BOHB(max_epochs=9, random_fraction=0.5)"),
        (lambda: shoal.PBT(FOUR, epochs=NINE, interval=TWO), "PBT(n=4, epochs=9, interval=2)"),
        (lambda: shoal.Median(FOUR, epochs=NINE), "Median(n=4, epochs=9)"),
        (lambda: shoal.OptunaSearch(FOUR, epochs=NINE), "OptunaSearch(n=4, epochs=9)"),
        (lambda: shoal.Patience(FOUR, min_delta=np.float32(0.5)), "Patience(epochs=4, min_delta=0.5)"),
        (lambda: shoal.Percentile(np.float32(25), warmup=TWO), "Percentile(percentile=25.0, warmup=2)"),
    ],
)
def test_algorithms_and_rules(make: Callable[[], Any], text: str) -> None:
    assert call_text(make()) == text


def test_policies_and_packings() -> None:
    made: list[Any] = [Exact(seconds=np.float32(2)), CostPacking(worth=np.float32(0.5))]
    made.append(Convergence(quantum=np.int64(9), jobs_per_device=np.int64(2)))
    assert [repr(made[0].seconds), repr(made[1].worth)] == ["2.0", "0.5"]
    assert [repr(made[2].quantum), repr(made[2].jobs_per_device)] == ["9", "2"]


def test_arguments_of_a_study() -> None:
    numbers: dict[str, Any] = {
        "seed": np.int64(3),
        "data_seed": np.uint8(4),
        "retries": np.int16(1),
        "target": np.float32(0.5),
        "checkpoint_seconds": np.float32(2),
        "hang_seconds": np.int64(99),
        "oversubscription": np.float64(1.5),
        "fuse": np.bool_(False),
    }
    spec = StudySpec(metric="loss", mode="min", space=Space({"x": [1]}).to_json(), algorithm="Grid()", **numbers)
    written = json.loads(json.dumps(spec.to_json()))
    assert {name: written[name] for name in numbers} == {name: plain(value) for name, value in numbers.items()}
    training = opaque(len, Space({"x": [1]}), np.float32(2))
    assert isinstance(training, Function)
    assert repr(training.time_limit) == "2.0"


def test_steps_of_reports(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_REPORT", raising=False)
    monkeypatch.setattr("shoal.programs.trainable._report_count", None)
    for step in np.arange(1, 3):
        shoal.report({"loss": np.float32(0.5)}, step=step)
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 2]
