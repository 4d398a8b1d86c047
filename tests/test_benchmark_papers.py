"""The lists of experiments are whole, and the index shows the results that there are."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
session, index, experiments = (importlib.import_module(name) for name in ("session", "index", "experiments"))
experiment = importlib.import_module("papers.experiment")

EXPERIMENTS = [each for some in index.experiments_of().values() for each in some]
LEAST = 40
PAGE = f"# Figures\n\nBefore.\n\n{index.BEGIN}\n\nold\n\n{index.END}\n\nAfter.\n"


def test_there_are_enough_experiments_each_with_a_name_of_its_own() -> None:
    titles = [(each.measurement.name, each.title) for each in EXPERIMENTS]
    assert len(titles) == len(set(titles)) >= LEAST
    by_name: dict[str, Any] = {}
    for each in EXPERIMENTS:
        assert by_name.setdefault(each.measurement.name, each.measurement) == each.measurement, "one name, one command"


@pytest.mark.parametrize("each", experiments.measurements_of(), ids=lambda each: each.name)
def test_every_measurement_names_files_that_there_are(each: Any) -> None:
    for command in (each.command, each.quick):
        assert (ROOT / command[0]).is_file()
        assert "--quick" in command or command is each.command
    assert session.code_of(each.code)
    assert session.code_of((*each.code, each.command[0])) == session.code_of(each.code), "the program counts"
    assert 0 < each.least < each.most


@pytest.mark.parametrize("each", EXPERIMENTS, ids=lambda each: f"{each.measurement.name}: {each.title}")
def test_every_experiment_says_what_is_compared(each: Any) -> None:
    assert all((each.title, each.setting))
    assert bool(each.place) == bool(each.reported)
    assert each.asked >= 0
    assert 0 < each.noise <= 0.5
    assert each.better in ("at least", "at most")


def test_the_index_shows_the_results_that_there_are() -> None:
    text = experiments.INDEX.read_text()
    assert index.page(text, session.read([experiments.RESULTS])) == text, "python tools/experiments.py --list"
    assert "**missed** |" not in text, "a miss has a reason"


MACHINE = {"device": "EPYC", "cores": 2, "gib": 24, "torch": "2.13.0"}


def result(value: float, **change: Any) -> dict[str, Any]:
    found = {"outcome": "done", "date": "2026-12-02", "commit": "abc", "machine": MACHINE, "seconds": 9.0}
    return {**found, "figures": {"speed": value}, **change}


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        pytest.param(None, ("not measured", "–", "at least 2.00x", "–"), id="not measured"),
        pytest.param(result(2.5), ("2.50x", "0.50", "at least 2.00x: reached", "–"), id="reached"),
        pytest.param(
            result(1.5), ("1.50x", "0.30", "at least 2.00x: **missed**, few cores", "–"), id="missed"
        ),
        pytest.param(
            result(2.5, before={"date": "2026-12-01", "figures": {"speed": 2.4}}),
            ("2.50x", "0.50", "at least 2.00x: reached", "2.40x on 2026-12-01: agrees within 10 %"),
            id="agrees",
        ),
        pytest.param(
            result(2.5, before={"date": "2026-12-01", "figures": {"speed": 2.0}}),
            ("2.50x", "0.50", "at least 2.00x: reached", "2.00x on 2026-12-01: **differs** by more than 10 %"),
            id="differs",
        ),
        pytest.param(result(float("nan")), ("not measured", "–", "at least 2.00x", "–"), id="no number"),
        pytest.param(result(2.5, figures={}), ("not measured", "–", "at least 2.00x", "–"), id="failed"),
    ],
)  # fmt: skip
def test_a_row_of_the_index(found: Any, shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("benchmarks/fusion.py", "--models", "a b")
    one = session.Measurement("fusion", "Fusion", 1, 2, command, command, ("benchmarks/fusion.py",))
    each = experiment.Experiment(
        "ResNet", "Table 1", "5x on | a V100", "B = 8", one, lambda figures: figures["speed"], 2.0, published=5.0,
        noise=0.1, why="few cores",
    )  # fmt: skip
    monkeypatch.setattr(index, "experiments_of", lambda: {"HFTA: arrays": (each,)})
    results = {} if found is None else {"fusion": found}
    page = index.page(PAGE, results)
    assert f"| ResNet | Table 1: 5x on / a V100 | B = 8 | {' | '.join(shown)} | fusion |" in page
    assert '`python benchmarks/fusion.py --models "a b"`' in page
    assert page.startswith("# Figures\n\nBefore.\n")
    assert page.endswith("\n\nAfter.\n")
    assert "old" not in page
    assert index.page(page, results) == page
    drawn = index.pictures(results)
    assert list(drawn) == ([] if shown[0] == "not measured" else ["benchmarks-hfta.svg"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"outcome": "done"}'])
def test_a_file_that_is_no_result_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(SystemExit, match=r"one\.json is not the result of a measurement .*; delete it"):
        session.read([tmp_path])


def test_a_measurement_that_skips_what_it_measures_has_no_result(tmp_path: Path) -> None:
    one = session.Measurement("one", "One", 0, 60, ("-c", 'print(\'{"skipped": "no data"}\')'), (), ("tools",), ())
    taken = session.take(one, one.command, 60, {})
    assert (taken["outcome"], taken["reason"], taken["figures"]) == ("failed", "skipped: no data", {})


def test_a_result_keeps_that_of_the_last_other_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = session.Measurement("one", "One", 0, 60, ("-c", "print('{\"speed\": 2}')"), (), ("tools/session.py",), ())
    taken = session.Session([one], [], tmp_path, lambda results: None, dict, again=lambda result: True)
    for day in ("2026-12-01", "2026-12-02", "2026-12-02", "2026-12-03"):
        monkeypatch.setattr(session.time, "strftime", lambda form, day=day: day)
        taken.run(5, MACHINE, {}, toy=False)
    found = json.loads((tmp_path / "one.json").read_text())
    assert (found["date"], found["before"]["date"]) == ("2026-12-03", "2026-12-02")
    assert "before" not in found["before"]
