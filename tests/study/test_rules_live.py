"""A study of a space with rules, from its first trial to what people add to it."""

from typing import Any

import pytest

import shoal
from shoal.core.errors import ShoalError


def train(config: dict[str, Any]) -> None:
    shoal.report({"loss": config["width"] * config["x"]}, step=1)


def test_a_study_keeps_to_the_rules_of_its_space_and_so_do_added_trials(tmp_path):
    width, layers = shoal.ref("width"), shoal.ref("layers")
    space = shoal.Space(
        {
            "width": shoal.logrange(8, 64, 4, integer=True),
            "layers": shoal.randint(1, 5),
            "x": shoal.uniform(0, 1 / layers),
            "size": width * layers,
        },
        where=[shoal.ref("size") <= 128],
    )
    study = shoal.tune(
        train, space, metric="loss", mode="min", algorithm=shoal.OptunaSearch(6, epochs=1, concurrency=3),
        directory=tmp_path / "study", devices="cpu:2", show_progress=False,
    )  # fmt: skip
    configs = [trial.config for trial in study.trials]
    assert [space.faults(config) for config in configs] == [()] * 6
    exported = study.to_optuna().trials
    assert [set(trial.params) for trial in exported] == [{"width", "layers", "x"}] * 6
    assert [trial.params["x"] * (1 / config["layers"]) for trial, config in zip(exported, configs, strict=True)] == [
        pytest.approx(config["x"]) for config in configs
    ]
    assert study.add({"width": 8, "layers": 2, "x": 0.25}, 1) == 1_000_000
    assert study.clone(0, {"layers": 1}, epochs=1, anew=True) == [1_000_001]
    clone = {**configs[0], "layers": 1, "size": configs[0]["width"]}
    with pytest.raises(ShoalError, match="`size <= 128` does not hold for size = 256"):
        study.add({"width": 64, "layers": 4, "x": 0.1}, 1)
    resumed = shoal.resume(tmp_path / "study", show_progress=False)
    assert [trial.config for trial in resumed.trials][6:] == [{"width": 8, "layers": 2, "x": 0.25, "size": 16}, clone]
    assert "config.size" in resumed.dataframe().columns
