"""Files of search spaces with every kind of domain, and sweeps of W&B."""

import re
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.space_file import read_space
from shoal.core.distributions import LogNormal, Normal, QLogUniform
from shoal.core.domain import LogRandInt, RandInt
from shoal.core.errors import SpaceError
from shoal.core.foreign_spaces import SweepSettings
from shoal.core.reference import ref
from shoal.core.space import (
    Space,
    choice,
    logrange,
    loguniform,
    normal,
    ordinal,
    qloguniform,
    quniform,
    randint,
    uniform,
)


def space_of(directory: Path, text: str, name: str = "space.toml") -> Space:
    (directory / name).write_text(text)
    return read_space(directory / name)[0]


def test_a_file_with_all_kinds_of_domains(tmp_path: Path) -> None:
    space = space_of(
        tmp_path,
        """
        where = ["layers * width <= 128", ["<", ["ref", "net.a"], 0.9], "net.a < 0.5 or layers == 1"]
        ordered = [["low", "high"]]
        noise = {mean = 0, sd = 1}
        cut = {mean = 0, sd = 1, low = -1}
        lr = {median = 1e-3, factor = 3}
        width = {low = 8, high = 64, size = 4, integer = true}
        decay = {low = 1e-4, high = 1e-1, size = 4}
        q = {low = 0.5, high = 4.0, step = 0.5, log = true}
        batch = {low = 8, high = 64, step = 8, log = true}
        augment = {ordinal = ["none", "weak", "strong"]}
        kind = {choice = ["a", {low = 0.0, high = 1.0}], weights = [3, 1]}
        layers = {low = 1, high = 4}
        warmup = {ref = "layers // 2"}
        listed = {ref = ["*", ["ref", "layers"], 2]}
        heads = {low = 1, high = {ref = "layers"}, integer = true}
        even = {low = 2, high = {ref = "layers * 2"}, step = 2, integer = true}
        rate = {low = 1e-4, high = {ref = "lr + 1"}, log = true}
        steps = {low = 0, high = {ref = "layers"}, step = 0.5}
        moved = {mean = {ref = "layers"}, sd = 2}
        low = {low = 0.0, high = 1.0}
        high = {low = 0.0, high = 1.0}
        mean = 3
        [net]
        a = {low = 0.0, high = 1.0}
        median = 1
        """,
    )
    layers = ref("layers")
    expected = {
        "noise": normal(0, 1), "cut": Normal(0, 1, -1), "lr": LogNormal(1e-3, 3),
        "width": logrange(8, 64, 4, integer=True), "decay": logrange(1e-4, 1e-1, 4), "q": qloguniform(0.5, 4.0, 0.5),
        "batch": QLogUniform(8, 64, 8, integer=True), "augment": ordinal(["none", "weak", "strong"]),
        "kind": choice(["a", uniform(0.0, 1.0)], weights=[3, 1]), "layers": randint(1, 5), "warmup": layers // 2,
        "listed": layers * 2, "heads": randint(1, layers + 1), "even": _even(layers),
        "rate": loguniform(1e-4, ref("lr") + 1), "steps": quniform(0, layers, 0.5), "moved": normal(layers, 2),
        "low": uniform(0.0, 1.0), "high": uniform(0.0, 1.0), "mean": 3, "net": {"a": uniform(0.0, 1.0), "median": 1},
    }  # fmt: skip
    a = ref("net.a")
    where = [layers * ref("width") <= 128, a < 0.9, (a < 0.5) | (layers == 1)]
    assert space.to_json() == Space(expected, where=where, ordered=[("low", "high")]).to_json()
    for seed in range(20):
        assert space.faults(space.sample(seed)) == ()


def test_the_file_of_the_documentation_is_a_space(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "spaces.md"
    (text,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    space = space_of(tmp_path, text)
    assert space.faults(space.sample(0)) == ()
    assert len(space.domains()) == 12


def _even(layers: Any) -> Any:
    from shoal.core.reference import make_domain

    return make_domain(RandInt, 2, layers * 2 + 1, 2)


def test_a_range_of_integers_on_a_logarithmic_scale_has_its_end(tmp_path: Path) -> None:
    space = space_of(tmp_path, "n = {low = 1, high = 64, log = true}")
    assert space == Space({"n": LogRandInt(1, 65)})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("a = 1\nb = {ref = 'a +'}", r"space.toml:2: `b`: 'a \+' is no arithmetic", id="text"),
        pytest.param("b = {ref = 'c'}", "`b` refers to 'c', which is no parameter", id="name"),
        pytest.param("b = {ref = ['open', 'x']}", "`b`: there is no operation 'open'", id="operation"),
        pytest.param("b = {ref = 'b'}", "`b` depends on itself: b -> b", id="circle"),
        pytest.param("a = 1\nwhere = 'a < 1'", "space.toml:2: `where`: must be a list, got 'a < 1'", id="where"),
        pytest.param("a = 1\nwhere = ['a']", "a condition of `where` is true or false", id="no condition"),
        pytest.param("a = 1\nordered = ['a', 'b']", "`ordered` must be a list of groups", id="ordered"),
        pytest.param("a = {choice = [1, 2], weights = 3}", "`a.weights`: must be a list", id="weights"),
        pytest.param("a = {low = 1, high = 8, size = 4, log = true}", "without `log`", id="size and log"),
        pytest.param("a = {low = 1, high = 8, size = 1}", "`a`: size must be an integer from 2", id="size"),
        pytest.param("a = {low = 1, high = 8, integer = 1}", "`integer` must be true or false", id="integer"),
        pytest.param("a = {mean = 'x', sd = 1}", "`a`: mean and sd must be finite", id="mean"),
    ],
)
def test_what_is_no_space_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpaceError, match=words):
        space_of(tmp_path, text)


SWEEP = """
program: train.py
method: bayes
metric: {name: loss, goal: minimize}
parameters:
  lr: {distribution: log_uniform_values, min: 1e-4, max: 1.0e-1}
  width: {values: [64, 128], probabilities: [0.25, 0.75]}
  layers: {min: 1, max: 4}
  optimizer:
    parameters:
      name: {value: sgd}
      momentum: {min: 0.0, max: 0.9}
"""


def test_a_sweep_of_wandb_is_a_file_of_a_space(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    assert space_of(tmp_path, SWEEP, "sweep.yaml") == Space(
        {
            "lr": loguniform(1e-4, 1e-1),
            "width": choice([64, 128], weights=[0.25, 0.75]),
            "layers": randint(1, 5),
            "optimizer": {"name": "sgd", "momentum": uniform(0.0, 0.9)},
        }
    )


def test_what_a_sweep_says_beside_its_parameters(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "sweep.yaml").write_text(f"{SWEEP}\nrun_cap: 20\nearly_terminate: {{type: hyperband}}")
    _, settings = read_space(tmp_path / "sweep.yaml")
    assert settings == SweepSettings("loss", "min", None, 20, ("program", "method", "early_terminate"))


def _metric(metric: str, more: str = "") -> str:
    return f"method: grid\nparameters: {{x: {{values: [1, 2]}}}}\nmetric: {metric}\n{more}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("method: grid\nparameters: {x: {distribution: beta}}", "sweep.yml: `x`: .*'beta'", id="beta"),
        pytest.param(_metric("loss"), "sweep.yml: `metric` of a W&B sweep is a dict .* got 'loss'", id="metric"),
        pytest.param(_metric("{goal: minimize}"), r"`metric` .* got \{'goal': 'minimize'\}", id="no name"),
        pytest.param(
            _metric("{name: a, goal: min}"), "`metric.goal` .* 'minimize' or 'maximize', got 'min'", id="goal"
        ),
        pytest.param(_metric("{name: a, target: x}"), "`metric`: `target` .* finite number, got 'x'", id="target"),
        pytest.param(_metric("{name: a, target: .nan}"), "sweep.yml: `metric`: `target` .* got nan", id="NaN target"),
        *(
            pytest.param(
                _metric("", f"run_cap: {cap}"), f"sweep.yml: `run_cap` .* left out, got {got}", id=f"cap {cap}"
            )
            for cap, got in (("0", "0"), ("many", "'many'"), ("'20'", "'20'"), ("2.5", "2.5"), ("true", "True"))
        ),
        pytest.param("lr: [1, 2]", "sweep.yml is no sweep of W&B, which has `method` and `parameters`", id="no sweep"),
        pytest.param("- 1", "is no sweep of W&B", id="list"),
        pytest.param("a: [", "sweep.yml cannot be read", id="no YAML"),
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path: Path, text: str, words: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(SpaceError, match=words):
        space_of(tmp_path, text, "sweep.yml")


def test_without_yaml_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("shoal.cli.space_file.import_module", absent)
    with pytest.raises(SpaceError, match=r"needs PyYAML\. Install it with: pip install pyyaml"):
        space_of(tmp_path, SWEEP, "sweep.yaml")
