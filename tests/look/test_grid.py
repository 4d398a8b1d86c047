"""The grid of a study: its axes, its cells, and the map of it that a person reads."""

import io
import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import row
from rich.cells import cell_len
from rich.console import Console

from shoal.core.domain import LogRandInt, RandInt
from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.space import Space, choice, loguniform, quniform, randint, uniform
from shoal.core.trial import Trial, TrialState
from shoal.look.axis import axes
from shoal.look.budget_values import BudgetValues, min_trials
from shoal.look.grid import Cell, HeatMap, grid_json, study_grid
from shoal.look.importance import eta_squared

NESTED = {
    "lr": loguniform(1e-4, 1e-1),
    "width": choice([64, 128]),
    "epochs": 9,
    "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 0.9), "lookahead": 5}, {"name": "adam"}]),
    "decay": choice([0.0, loguniform(1e-6, 1e-2)]),
    "layers": randint(1, 5),
}
LR = ["1e-4..3.2e-4", "3.2e-4..1e-3", "1e-3..3.2e-3", "3.2e-3..0.01", "0.01..0.032", "0.032..0.1"]


def trials(*described, **same):
    """Rows of (config, state, accuracy), numbered."""
    return [
        row(number, state, accuracy, trial=Trial(number, config, number, 7), **same)
        for number, (config, state, accuracy) in enumerate(described)
    ]


def grid(space, *described, mode="max"):
    return study_grid(Space(space), trials(*described), Objective("accuracy", mode))


def rendered(heat_map, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(heat_map)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"a": 1, "b": {"c": "x"}, "d": choice([3]), "e": uniform(1, 1)}, {}, id="constants"),
        pytest.param({"a": choice([64, 128])}, {"a": ["64", "128"]}, id="choice"),
        pytest.param({"a": choice([[1, 2], None, True])}, {"a": ["[1, 2]", "None", "True"]}, id="any values"),
        pytest.param({"a": choice([1, "1", 1.0])}, {"a": ["1", "'1'", "1.0"]}, id="values that look alike"),
        pytest.param({"a": choice(["b", ""])}, {"a": ["'b'", "''"]}, id="empty text"),
        pytest.param({"a": choice(["b", "c\nd"])}, {"a": ["b", r"c\nd"]}, id="text of two lines"),
        pytest.param({"a": choice([1, 1])}, {}, id="the same option twice"),
        pytest.param({"n": randint(1, 5)}, {"n": ["1", "2", "3", "4"]}, id="few integers"),
        pytest.param({"n": quniform(0, 1, 0.5)}, {"n": ["0", "0.5", "1"]}, id="few steps"),
        pytest.param(
            {"n": randint(0, 100)}, {"n": ["0..15", "16..32", "33..49", "50..65", "66..82", "83..99"]}, id="integers"
        ),
        pytest.param(
            {"n": RandInt(-30, 60, 10)},
            {"n": ["-30..-16", "-15..-1", "0..14", "15..29", "30..44", "45..59"]},
            id="step",
        ),
        pytest.param(
            {"n": LogRandInt(1, 65)}, {"n": ["1", "2..3", "4..7", "8..15", "16..31", "32..64"]}, id="orders of integers"
        ),
        pytest.param(
            {"n": randint(0, 3 * 10**9)},
            {"n": ["0..5.00e+8", "5.00e+8..1.00e+9", "1.00e+9..1.50e+9", "1.50e+9..2.00e+9", "2.00e+9..2.50e+9",
                   "2.50e+9..3.00e+9"]},
            id="large integers",
        ),
        pytest.param({"n": randint(0, 10**400)}, {"n": ANY}, id="integers beyond the floats"),
        pytest.param(
            {"p": uniform(0, 0.5)},
            {"p": ["0..0.083", "0.083..0.17", "0.17..0.25", "0.25..0.33", "0.33..0.42", "0.42..0.5"]},
            id="uniform",
        ),
        pytest.param({"lr": loguniform(1e-4, 1e-1)}, {"lr": LR}, id="loguniform"),
        pytest.param(
            {"p": uniform(1000, 1001)},
            {"p": ["1000..1000.17", "1000.17..1000.33", "1000.33..1000.5", "1000.5..1000.67", "1000.67..1000.83",
                   "1000.83..1001"]},
            id="as many digits as it takes",
        ),
        pytest.param(
            {"p": quniform(0, 10, 0.5)}, {"p": ["0..1.7", "1.7..3.3", "3.3..5", "5..6.7", "6.7..8.3", "8.3..10"]},
            id="many steps",
        ),
        pytest.param(
            {"decay": choice([0.0, loguniform(1e-6, 1e-3)])},
            {"decay": ["0", "1e-6..3.2e-6", "3.2e-6..1e-5", "1e-5..3.2e-5", "3.2e-5..1e-4", "1e-4..3.2e-4",
                       "3.2e-4..1e-3"]},
            id="a value or a range",
        ),
        pytest.param(
            {"p": choice([uniform(0, 1), uniform(2, 6)])},
            {"p": ["0..1", "1..2", "2..3", "3..4", "4..5", "5..6"]},
            id="two ranges are covered by one",
        ),
        pytest.param(
            {"optimizer": choice([{"name": "sgd", "momentum": choice([0, 0.9])}, {"name": "adam"}])},
            {"optimizer.name": ["sgd", "adam"], "optimizer.momentum": ["0", "0.9", "-"]},
            id="conditional",
        ),
        pytest.param(
            {"o": choice([None, {"name": "sgd"}])}, {"o": ["None", "-"], "o.name": ["sgd", "-"]}, id="a dict or nothing"
        ),
        pytest.param(
            {"o": choice([{"a": choice([1, 2])}, choice([{"a": 2}, {"a": 3}])])}, {"o.a": ["1", "2", "3"]}, id="merged"
        ),
    ],
)  # fmt: skip
def test_axes(space, expected):
    assert {axis.name: list(axis.labels) for axis in axes(Space(space))} == expected


@pytest.mark.parametrize(
    ("domain", "value", "label"),
    [
        pytest.param(choice([64, 128]), 128, "128", id="choice"),
        pytest.param(choice([[1, 2], None]), [1, 2], "[1, 2]", id="list"),
        pytest.param(choice([1, True]), True, "True", id="True is not 1"),
        pytest.param(loguniform(1e-4, 1e-1), 1e-4, LR[0], id="low"),
        pytest.param(loguniform(1e-4, 1e-1), 1e-1, LR[-1], id="high"),
        pytest.param(loguniform(1e-4, 1e-1), 3.2e-4, LR[1], id="an edge belongs to the bin above"),
        pytest.param(loguniform(1e-4, 1e-1), 1e-9, LR[0], id="below"),
        pytest.param(loguniform(1e-4, 1e-1), 7, LR[-1], id="above"),
        pytest.param(randint(0, 100), 32, "16..32", id="last integer of a bin"),
        pytest.param(randint(0, 100), 33, "33..49", id="first integer of a bin"),
        pytest.param(choice([0.0, uniform(0, 6)]), 0.0, "0", id="a value before a range"),
        pytest.param(choice([0.0, uniform(0, 6)]), 0.5, "0..1", id="a range beside a value"),
        pytest.param(choice([{}, uniform(0, 6)]), True, "-", id="a truth value is not a number"),
        pytest.param(choice([64, {}]), 96, "-", id="a value from elsewhere"),
    ],
)
def test_the_place_of_a_value(domain, value, label):
    (axis,) = axes(Space({"x": domain}))
    assert axis.labels[axis.position(value)] == label


ranges = st.one_of(
    st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
    .map(sorted)
    .map(lambda bounds: uniform(*bounds)),
    st.tuples(st.floats(1e-300, 1e300), st.floats(1e-300, 1e300)).map(sorted).map(lambda bounds: loguniform(*bounds)),
    st.floats(1e-300, 1e300).map(lambda low: loguniform(low, low * (1 + 1e-15))),
    st.builds(lambda low, width: randint(low, low + width), st.integers(), st.integers(9)),
    st.builds(lambda low, width: LogRandInt(low, low + width), st.integers(1, 10**9), st.integers(9, 10**9)),
)


@given(ranges, st.integers(0, 1000))
def test_bins_cover_any_range(domain, seed):
    for axis in axes(Space({"x": domain})):
        assert all(low < high for low, high in pairwise(axis.edges))
        assert axis.edges[0] == domain.low
        assert axis.edges[-1] == domain.high
        position = axis.position(Space({"x": domain}).sample(seed)["x"])
        assert position in axis.bins
        assert len(axis.labels) == len(axis.bins) == len(axis.edges) - 1 <= 6


def test_a_cell_has_its_trials_and_the_best_that_has_not_failed():
    seen = grid(
        {"width": choice([64, 128, 256])},
        ({"width": 64}, TrialState.COMPLETE, 0.5),
        ({"width": 64}, TrialState.STOPPED, 0.75),
        ({"width": 64}, TrialState.RUNNING, 0.75),
        ({"width": 64}, TrialState.FAILED, 0.9),
        ({"width": 64}, TrialState.COMPLETE, None),
        ({"width": 256}, TrialState.PENDING, None),
    )
    states = {TrialState.RUNNING: 1, TrialState.COMPLETE: 2, TrialState.STOPPED: 1, TrialState.FAILED: 1}
    assert seen.cells == {(0,): Cell(states, 0.75, 1), (2,): Cell({TrialState.PENDING: 1}, None, None)}
    assert list(seen.cells[0,].states) == list(states)
    assert seen.cells[0,].trials == 5
    assert repr(seen) == "StudyGrid(width: 3; 6 trials in 2 cells)"


@pytest.mark.parametrize(("mode", "best"), [("min", (-math.inf, 1)), ("max", (0.5, 2))])
def test_the_best_follows_the_mode(mode, best):
    values = (0.25, -math.inf, 0.5, 0.5)
    (cell,) = grid({"a": 1}, *(({"a": 1}, TrialState.COMPLETE, value) for value in values), mode=mode).cells.values()
    assert (cell.best, cell.best_trial) == best


def test_a_trial_without_a_parameter_has_a_place_of_its_own():
    seen = grid(NESTED, *((Space(NESTED).sample(seed), TrialState.COMPLETE, 0.5) for seed in range(40)))
    assert [axis.name for axis in seen.axes] == [
        "lr", "width", "optimizer.name", "optimizer.momentum", "optimizer.lookahead", "decay", "layers",
    ]  # fmt: skip
    by = seen.project("optimizer.name", "optimizer.momentum")
    for (name, momentum), cell in by.cells.items():
        assert (name == 1) == (by.axes[1].labels[momentum] == "-"), cell


def test_a_config_from_elsewhere_gets_a_place_of_its_own():
    seen = grid({"width": choice([64, 128])}, ({"width": 96}, TrialState.COMPLETE, 0.5), ({}, TrialState.PENDING, None))
    assert seen.axes[0].labels == ("64", "128", "-")
    assert {position: cell.trials for position, cell in seen.cells.items()} == {(2,): 2}


names = st.permutations(
    ["lr", "width", "optimizer.name", "optimizer.momentum", "optimizer.lookahead", "decay", "layers"]
)
scores = st.none() | st.floats(allow_nan=False)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(TrialState), scores), max_size=40),
    names,
    st.integers(0, 7),
    st.sampled_from(["min", "max"]),
)
def test_a_projection_loses_no_trial_and_no_best(described, order, count, mode):
    seen = grid(NESTED, *((Space(NESTED).sample(seed), *rest) for seed, *rest in described), mode=mode)
    projected = seen.project(*order[:count])
    for each in (seen, projected):
        for state in TrialState:
            total = sum(cell.states.get(state, 0) for cell in each.cells.values())
            assert total == sum(given_state is state for _, given_state, _ in described)
        assert sum(cell.trials for cell in each.cells.values()) == len(described)
        values = [value for _, state, value in described if value is not None and state is not TrialState.FAILED]
        bests = [cell.best for cell in each.cells.values() if cell.best is not None]
        best = min if mode == "min" else max
        assert best(bests, default=None) == best(values, default=None)
    assert projected == seen.project(*order[: count + 1]).project(*order[:count])


@pytest.mark.parametrize(
    ("space", "names", "words"),
    [
        pytest.param(NESTED, ["lr", "momentum"], ["'momentum'", "it has lr, width, optimizer.name"], id="unknown"),
        pytest.param(NESTED, ["epochs"], ["'epochs'", "it has lr, width"], id="constant"),
        pytest.param({"a": 1}, ["a"], ["'a'", "nothing is searched"], id="nothing is searched"),
        pytest.param(NESTED, [["lr"]], ["named by a string, got ['lr']; write project('lr', 'width')"], id="list"),
        pytest.param(NESTED, ["lr", None], ["named by a string, got None"], id="None"),
        pytest.param(NESTED, ["lr", "lr"], ["'lr' is named twice", "lr, width"], id="twice"),
    ],
)
def test_an_axis_that_cannot_be_had(space, names, words):
    with pytest.raises(ShoalError) as error:
        grid(space).project(*names)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        pytest.param({"a": 1}, (), id="nothing"),
        pytest.param({"a": 1, "width": choice([64, 128])}, ("width",), id="one"),
        pytest.param({"a": choice([1, 2]), "b": choice([1, 2, 3])}, ("b", "a"), id="the longer one goes down"),
        pytest.param(NESTED, ("decay", "lr"), id="the longest"),
        pytest.param(
            {"o": choice([{"k": k, "depth": depth} for k, depth in ("a1", "b2", "c3")]), "w": choice([1, 2])},
            ("o.k", "w"),
            id="one for each choice",
        ),
    ],
)
def test_main_axes(space, expected):
    assert grid(space).main_axes == expected


def effects(space, value, count=64):
    """A study of random trials, each with the value that its configuration gives."""
    configs = [space.sample(seed) for seed in range(count)]
    rows = trials(*((config, TrialState.COMPLETE, value(config)) for config in configs))
    values = {row.number: row.objective for row in rows}
    found = BudgetValues(
        space, Objective("accuracy", "max"), 3, "epochs", values, dict(enumerate(configs)), 0, min_trials(space)
    )
    return study_grid(space, rows, found.objective, eta_squared(found))


MIXED = Space({"lr": loguniform(1e-4, 1.0), "kind": ["a", "b"], "depth": [1, 2, 3], "noise": uniform(0, 1)})


@pytest.mark.parametrize(
    ("value", "count", "expected"),
    [
        pytest.param(lambda c: {"a": 10, "b": 0}[c["kind"]] + c["depth"], 64, ("depth", "kind"), id="categories"),
        pytest.param(lambda c: math.log(c["lr"]) + 2 * (c["kind"] == "b"), 64, ("lr", "kind"), id="a number and one"),
        pytest.param(lambda c: math.exp(20 * c["noise"]) * c["lr"], 64, ("noise", "lr"), id="by rank, not by size"),
        pytest.param(lambda c: c["depth"], 9, ("lr", "noise"), id="too few values: the longest"),
        pytest.param(lambda c: 0.5, 64, ("lr", "noise"), id="equal values: the longest"),
    ],
)
def test_the_main_axes_are_those_that_explain_most(value, count, expected):
    seen = effects(MIXED, value, count)
    assert set(seen.main_axes) == set(expected)
    lengths = [len(axis.labels) for axis in seen.project(*seen.main_axes).axes]
    assert lengths == sorted(lengths, reverse=True)


def test_what_an_axis_explains():
    known = effects(MIXED, lambda config: config["depth"]).explained
    assert known["depth"] == pytest.approx(1.0)
    assert all(known[name] < 0.15 for name in ("lr", "kind", "noise"))
    told = "importance at one budget: depth 100%, kind 0%"
    shown = effects(MIXED, lambda config: config["depth"]).project("depth", "kind")
    assert rendered(HeatMap(shown, runs=False))[-1].startswith(told[:-2])
    assert not effects(MIXED, lambda config: 1.0).explained


def test_json_is_strict_and_complete():
    seen = grid(
        {"p": uniform(0, 6), "width": choice([64, [1, 2]])},
        ({"p": 1.5, "width": 64}, TrialState.COMPLETE, 0.5),
        ({"p": 1.25, "width": 64}, TrialState.RUNNING, 0.25),
        ({"p": 6, "width": [1, 2]}, TrialState.COMPLETE, math.inf),
    )
    assert json.loads(json.dumps(grid_json(seen), allow_nan=False)) == {
        "axes": [
            {
                "name": "p",
                "labels": ["0..1", "1..2", "2..3", "3..4", "4..5", "5..6"],
                "values": [],
                "edges": [0, 1, 2, 3, 4, 5, 6],
            },
            {"name": "width", "labels": ["64", "[1, 2]"], "values": [64, [1, 2]], "edges": []},
        ],
        "cells": [
            {
                "at": [1, 0],
                "trials": {"running": 1, "complete": 1},
                "status": {"running": 1, "complete": 1},
                "best": 0.5,
                "best_trial": 0,
            },
            {"at": [5, 1], "trials": {"complete": 1}, "status": {"complete": 1}, "best": None, "best_trial": 2},
        ],
    }


SMALL = {"lr": uniform(0, 6), "width": choice([64, 128])}
SHOWN = [
    ({"lr": 0.5, "width": 64}, TrialState.COMPLETE, 0.98125),
    ({"lr": 0.6, "width": 64}, TrialState.STOPPED, 0.5),
    ({"lr": 0.7, "width": 64}, TrialState.PENDING, None),
    ({"lr": 0.7, "width": 64}, TrialState.PENDING, None),
    ({"lr": 2.5, "width": 128}, TrialState.RUNNING, 0.75),
    ({"lr": 2.5, "width": 128}, TrialState.PAUSED, 0.7),
    ({"lr": 5.5, "width": 64}, TrialState.FAILED, None),
]


def heat_map(space=SMALL, shown=SHOWN, names=("lr", "width"), *, runs=True, mode="max"):
    return HeatMap(grid(space, *shown, mode=mode).project(*names), runs)


@pytest.mark.parametrize(
    ("seen", "width", "lines"),
    [
        pytest.param(
            heat_map(),
            80,
            [
                "best accuracy, higher is better: lr down, width across",
                "lr    64             128",
                "0..1  0.9812 1✓1■2…     ·",
                "1..2       ·            ·",
                "2..3       ·         0.75 1‖1▸",
                "3..4       ·            ·",
                "4..5       ·            ·",
                "5..6         1✗         ·",
                "✓ complete ■ stopped ✗ failed ‖ waiting for others ▸ running … waiting",
            ],
            id="wide",
        ),
        pytest.param(
            heat_map(names=("width", "lr")),
            40,
            [
                "best accuracy, higher is better: width …",
                "       0..     1..  2..   3..  4..  5..",
                "width  1       2    3     4    5    6",
                "64     0.9812    ·     ·    ·    ·",
                "       1✓1■2…                        1✗",
                "128         ·    ·  0.75    ·    ·    ·",
                "                    1‖1▸",
                "✓ complete ■ stopped ✗ failed ‖ waiting",
                "for others ▸ running … waiting",
            ],
            id="narrow",
        ),
        pytest.param(
            heat_map(names=("width", "lr")),
            24,
            [
                "best accuracy, higher i…",
                "       0..    1..  2..",
                "width  1      2    3",
                "64     0.981    ·     ·",
                "        1✓1■",
                "          2…",
                "128        ·    ·  0.75",
                "",
                "                   1‖1▸",
                "       3..  4..  5..",
                "width  4    5    6",
                "64       ·    ·",
                "                  1✗",
                "",
                "128      ·    ·    ·",
                "",
                "",
                "✓ complete ■ stopped ✗",
                "failed ‖ waiting for",
                "others ▸ running …",
                "waiting",
            ],
            id="cut into blocks",
        ),
        pytest.param(
            heat_map(names=("width",), runs=False, mode="min"),
            80,
            [
                "best accuracy, lower is better: width across",
                "  64            128",
                "  0.5 1✓1■1✗2…  0.7 1‖1▸",
                "✓ complete ■ stopped ✗ failed ‖ waiting for others ▸ interrupted … waiting",
            ],
            id="one axis, nobody runs it",
        ),
        pytest.param(
            heat_map({"a": choice([1, 2])}, [], ["a"]),
            80,
            ["best accuracy, higher is better: a across", "  1  2", "  ·  ·", "no trials yet"],
            id="no trials",
        ),
    ],
)
def test_heat_map(seen, width, lines):
    assert rendered(seen, width) == lines


def test_a_trial_that_a_person_paused_is_told_from_one_that_waits():
    shown = trials(*SHOWN[1:4])
    shown[1] = replace(shown[1], paused_by="ada")
    seen = study_grid(Space(SMALL), shown, Objective("accuracy", "max"))
    (cell,) = grid_json(seen)["cells"]
    assert (cell["trials"], cell["status"]) == (
        {"pending": 2, "stopped": 1},
        {"waiting": 1, "paused": 1, "stopped": 1},
    )
    lines = rendered(HeatMap(seen.project("width"), runs=True))
    assert lines[2].split() == ["0.5", "1■1□1…", "·"]
    assert lines[3] == "■ stopped □ paused … waiting"


@pytest.fixture(scope="module")
def crowded():
    texts = [f"a text of some length {k}" for k in range(9)]
    space = {"a": choice(texts), "b": choice(["海" * 20, "鯨"]), "n": randint(0, 10**9)}
    return grid(space, *((Space(space).sample(seed), TrialState.COMPLETE, 0.5) for seed in range(1000)))


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 120])
@pytest.mark.parametrize("names", [["a", "b"], ["b", "a"], ["a"], ["b"], ["b", "n"]])
def test_a_map_stays_within_the_width_and_shows_every_cell(names, width, crowded):
    seen = crowded.project(*names)
    lines = rendered(HeatMap(seen, runs=True), width)
    assert max(map(cell_len, lines)) <= width
    assert "".join(lines).count("0.5") == len(seen.cells)


@pytest.mark.parametrize(
    ("system", "mode", "colours"),
    [
        pytest.param("truecolor", "max", [243, 65, 71, 41, 47], id="max"),
        pytest.param("256", "min", [47, 41, 71, 65, 243], id="min"),
        pytest.param("standard", "max", [8, 2, 2, 10, 10], id="16 colours"),
        pytest.param(None, "max", [None] * 5, id="no colour"),
    ],
)
def test_the_better_the_stronger(system, mode, colours):
    values = [-3.0, 0.0, 0.1, 0.2, math.inf]
    shown = [({"a": place}, TrialState.COMPLETE, value) for place, value in enumerate(values)]
    seen = heat_map({"a": choice([*range(6)])}, shown, ["a"], mode=mode)
    console = Console(width=100, file=io.StringIO(), force_terminal=system is not None, color_system=system)
    cells = [
        segment.style for segment in console.render(seen) if "✓" in segment.text and "complete" not in segment.text
    ]
    if system is None:
        console.print(seen)
        assert "\x1b[" not in console.file.getvalue()
    else:
        assert [style.bgcolor.number for style in cells] == colours


def test_one_value_far_off_leaves_the_others_apart():
    shown = [({"a": place}, TrialState.COMPLETE, value) for place, value in enumerate([0.1, 0.2, 1e300])]
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system="256")
    parts = console.render(heat_map({"a": choice([0, 1, 2])}, shown, ["a"], mode="min"))
    assert len({part.style.bgcolor for part in parts if part.style and part.style.bgcolor}) == 3


def test_ten_thousand_trials_are_gridded_in_a_moment():
    space = Space(NESTED)
    rows = trials(*((space.sample(seed), TrialState.COMPLETE, seed / 10_000) for seed in range(10_000)))
    begin = time.process_time()
    seen = study_grid(space, rows, Objective("accuracy", "max"))
    rendered(HeatMap(seen.project(*seen.main_axes), runs=False))
    assert time.process_time() - begin < 2.0  # a factor of ten for a slow machine; of its own time, as others share it
    assert sum(cell.trials for cell in seen.cells.values()) == 10_000
