"""docs/extending.md: an entry in a registry is all that a name needs."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shoal
from shoal.algorithms import ALGORITHMS, Random
from shoal.cli.app import app
from shoal.plan.packing import PACKINGS, NoPacking
from shoal.plan.schedule import POLICIES, Fifo
from shoal.run import BACKENDS, Inline


def train(config: dict[str, float]) -> None:
    shoal.report({"loss": config["x"]}, step=1)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, made in ((ALGORITHMS, Random), (POLICIES, Fifo), (PACKINGS, NoPacking), (BACKENDS, Inline)):
        monkeypatch.setitem(registry, "mine", made)


@pytest.mark.usefixtures("names")
def test_a_name_in_a_registry_is_known_to_a_study_and_its_resume(tmp_path: Path) -> None:
    space, algorithm, directory = {"x": shoal.uniform(0, 1)}, Random(2, epochs=1), tmp_path / "study"
    chosen = {"policy": "mine", "packing": "mine", "backend": "mine"}
    shoal.tune(train, space, metric="loss", mode="min", algorithm=algorithm, directory=directory, **chosen)
    study = shoal.resume(directory)
    assert [trial.state for trial in study.trials] == ["complete", "complete"]


@pytest.mark.parametrize("chosen", [{"policy": "round_robin"}, {"packing": "knn"}], ids=["policy", "packing"])
def test_a_baseline_of_the_papers_is_refused_with_its_place(chosen: dict[str, Any], tmp_path: Path) -> None:
    space, algorithm, directory = {"x": shoal.uniform(0, 1)}, Random(2, epochs=1), tmp_path / "study"
    with pytest.raises(shoal.ShoalError, match=r"is a baseline of the papers.* benchmarks/baselines of Shoal's source"):
        shoal.tune(train, space, metric="loss", mode="min", algorithm=algorithm, directory=directory, **chosen)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("kind", "name", "remedy"), [("policy", "slaq", "--policy auto"), ("packing", "knn", "--packing cost")]
)
def test_a_study_begun_with_a_baseline_says_how_it_goes_on_without(
    kind: str, name: str, remedy: str, finished: shoal.Study
) -> None:
    with closing(sqlite3.connect(finished.directory / "journal.sqlite")) as connection, connection:
        connection.execute("UPDATE study SET value = json_set(value, ?, ?) WHERE key = 'spec'", (f"$.{kind}", name))
    with pytest.raises(
        shoal.ShoalError, match=rf"'{name}' is a baseline.*resume the study with another one: shoal resume .* {remedy}$"
    ):
        shoal.resume(finished.directory)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--algorithm", "mine", "--trials", "1"], id="algorithm"),
        pytest.param(["--policy", "mine"], id="policy"),
        pytest.param(["--packing", "mine"], id="packing"),
        pytest.param(["--backend", "mine"], id="back end"),
    ],
)
def test_a_name_in_a_registry_is_known_to_the_command_line(
    options: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text("x = {low = 0.0, high = 1.0}\n")
    asked = ["--space", "space.toml", "--metric", "loss", "--mode", "min", "--epochs", "1"]
    asked += [] if "--trials" in options else ["--trials", "1"]
    line = ["--", "printf", '{"loss": {x}, "step": 1}\\n']
    done = CliRunner().invoke(app, ["run", *asked, *options, *line])
    assert "is not one of" not in done.output
    assert done.exit_code == 0, done.output


@pytest.mark.usefixtures("names")
def test_a_name_in_a_registry_is_known_to_scenarios(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text("""
policies = ["mine"]
packing = "mine"
slowdown = "none"
[[nodes]]
kind = "A100"
devices = 1
memory_gb = 80
[[models]]
name = "small"
batch_sizes = [64]
epoch_seconds = [60.0]
compute = 1.0
memory_gb = 4
[[studies]]
name = "search"
learning_rates = 2
algorithm = { name = "mine", n = 2, epochs = 1 }
""")
    done = CliRunner().invoke(app, ["simulate", str(scenario)])
    assert done.exit_code == 0, done.output
    assert "mine" in done.output
