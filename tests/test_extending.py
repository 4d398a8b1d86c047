"""docs/extending.md: contracts stand where it says, and an entry in a registry is all that a name needs."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shoal
from shoal import testing
from shoal.algorithms import ALGORITHMS, Random
from shoal.backends import BACKENDS, Inline
from shoal.cli.app import app
from shoal.planner import PACKINGS, NoPacking
from shoal.schedule import POLICIES, Fifo

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
ROWS = re.findall(r"^\| ([\w ]+) \| \[`(\w+)`\]\(([^)]+)\) \| `(check_\w+)` \|", PAGE.read_text(), re.MULTILINE)


def test_six_contracts_are_listed() -> None:
    assert [what for what, *_ in ROWS] == ["algorithm", "policy", "packing", "back end", "fusion rule", "callback"]


@pytest.mark.parametrize(("what", "base", "link", "suite"), ROWS, ids=[row[0] for row in ROWS])
def test_a_base_class_states_its_contract(what: str, base: str, link: str, suite: str) -> None:
    tree = ast.parse((PAGE.parent / link).resolve().read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base)
    contract = ast.get_docstring(found) or ""
    assert f"shoal.testing.{suite}" in contract
    assert callable(getattr(testing, suite))
    for part in (r"[Cc]all", r"may return", r"(raise|raised)"):
        assert re.search(part, contract), f"the contract of {base} says nothing of {part!r}"


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
