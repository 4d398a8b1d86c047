"""The last line of a benchmark names the rows of the index that miss what is asked."""

import json
from typing import Any

import pytest
from papers.experiment import Experiment, missed_of
from papers.measurement import Measurement
from report import machine, report

ONE, OTHER = (Measurement(name, "", 1, 2, (), (), ()) for name in ("one", "other"))


def row(title: str, measurement: Measurement, asked: float, better: Any = "at least") -> Experiment:
    return Experiment(title, "", "", "", measurement, lambda found: found[title], asked, better)


def test_rows_that_miss_what_is_asked_or_are_not_measured() -> None:
    rows = [
        row("a", ONE, 2.0),
        row("b", ONE, 2.0),
        row("b", OTHER, 9.0),
        row("c", ONE, 1.0, "at most"),
        row("d", ONE, 1.0),
    ]
    assert missed_of(rows, ONE, {"a": 1.5, "b": 2.0, "c": 1.25}) == [
        "a: 1.5 x, asked at least 2",
        "c: 1.25 x, asked at most 1",
        "not measured: d",
    ]


def test_of_parts_of_a_program_those_rows_are_judged_whose_figures_are_there() -> None:
    rows = [row("a", ONE, 2.0), row("b", OTHER, 2.0), row("c", OTHER, 1.0)]
    assert missed_of(rows, None, {"a": 1.5, "c": 1.0}) == ["a: 1.5 x, asked at least 2"]


@pytest.mark.parametrize("missed", [[], ["a: 1.5 x, asked at least 2"]], ids=["reached", "missed"])
def test_the_last_line_is_one_object_and_the_status_says_whether_something_is_missed(
    capsys: pytest.CaptureFixture[str], missed: list[str]
) -> None:
    assert report({"a": 1.5}, missed) == len(missed)
    assert json.loads(capsys.readouterr().out) == {"a": 1.5, "missed": missed}


def test_the_machine_is_named_with_versions() -> None:
    assert machine("torch").partition(", torch ")[2].startswith("2.")
