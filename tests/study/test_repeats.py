"""Studies whose configurations are repeated: live, killed and gone on with, with folds, and with a target."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tasks
import torch
from plain import array_sizes, check_plain, tune
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import shoal
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.api import resume
from shoal.cli.app import app
from shoal.core.errors import ShoalError
from shoal.core.repeats import ConfigurationRow
from shoal.core.trial import TrialState
from shoal.journal.requests import pending_requests
from shoal.journal.view import JournalView
from shoal.results import Study

SPACE = {"lr": shoal.grid([0.001, 0.01, 0.1]), "width": 6}
KILLED_SPACE = {"lr": shoal.choice([0.01, 0.03]), "width": shoal.choice([6, 8]), "momentum": 0.9, "step_size": 2}

PROGRAM = """
import signal, sys
from pathlib import Path
sys.path[:] = {path!r}
import shoal, tasks
from plain import tune
from test_repeats import KILLED_SPACE, SuccessiveHalving
tune(tasks.Signals(signal.SIGKILL, Path({marker!r})), KILLED_SPACE, Path({directory!r}),
     algorithm=SuccessiveHalving(4, max_epochs=8, eta=2, min_epochs=4), repeats=2, checkpoint_seconds=0.0)
print("complete")
"""


class Folded(tasks.Blobs):
    """Validates on the samples of its fold, and trains on the others."""

    def data(self, config: Any) -> tasks.Sets:
        x, y = tasks.blobs(120, 0).tensors
        held_out = (torch.arange(120) % 3) == config["fold"]
        return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


@pytest.mark.usefixtures("fusing_pays")
def test_the_repeats_of_a_configuration_are_members_of_one_array(tmp_path: Path) -> None:
    study = tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=shoal.Grid(2), repeats=3)
    assert [(row.number, row.config["lr"]) for row in study.trials] == [
        (number, [0.001, 0.01, 0.1][number // 3]) for number in range(9)
    ]
    assert array_sizes(tmp_path / "study")[0] == 9
    check_plain(study, tasks.Blobs())
    best = study.best_trial
    assert isinstance(best, ConfigurationRow)
    values = sorted(row.objective for row in best.repeats)
    assert best.objective == sum(values) / 3
    assert {row.number: row for row in best.repeats}[best.number].objective == values[1]
    assert study.dataframe()["configuration"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(study.to_optuna().trials) == 3


def test_the_commands_show_the_configuration_and_its_repeats(tmp_path: Path) -> None:
    tune(tasks.Blobs(), SPACE, tmp_path / "study", algorithm=shoal.Grid(1), repeats=2)

    def shown(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, str(tmp_path / "study")])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "(n=2)" in shown("status")
    best = json.loads(shown("best", "--json"))
    assert [each["trial"] for each in best["repeats"]] == [best["repeats"][0]["trial"] + i for i in range(2)]
    assert 0 <= best["next"]["p_value"] <= 1
    assert "their spread (p = " in shown("best")
    rows = [line.split()[0] for line in shown("trials").splitlines()[1:10]]
    assert sorted(rows) == ["0", "0-1", "1", "2", "2-3", "3", "4", "4-5", "5"]


@pytest.mark.usefixtures("fusing_pays")
def test_folds_are_arrays_of_their_own(tmp_path: Path) -> None:
    study = tune(Folded(), SPACE, tmp_path / "study", algorithm=shoal.Grid(1), folds=3)
    assert array_sizes(tmp_path / "study") == [3, 3, 3]
    check_plain(study, Folded())
    study.clone(4, {"lr": 0.01}, anew=True)
    assert [each.arguments["config"]["fold"] for each in pending_requests(tmp_path / "study")] == [1]
    with pytest.raises(ShoalError, match="`fold` must be the number of a fold, from 0 to 2, got None"):
        study.add({"lr": 0.01, "width": 6}, 1)


def test_a_study_that_is_killed_amid_its_repeats_goes_on(
    shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=sys.path, marker=str(tmp_path / "sent"), directory=str(tmp_path / "study")))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert TrialState.COMPLETE not in {row.state for row in Study(tmp_path / "study").trials}
    study = resume(tmp_path / "study", show_progress=False)
    check_plain(study, tasks.Momentum())
    halving = SuccessiveHalving(4, max_epochs=8, eta=2, min_epochs=4)
    whole = tune(tasks.Momentum(), KILLED_SPACE, tmp_path / "whole", algorithm=halving, repeats=2)
    assert [(row.state, row.epoch) for row in study.trials] == [(row.state, row.epoch) for row in whole.trials]
    assert {row.state for row in study.trials} == {TrialState.COMPLETE, TrialState.STOPPED}


def test_the_target_is_one_of_the_configuration(tmp_path: Path) -> None:
    usual: dict[str, Any] = {"metric": "valid_loss", "mode": "min", "algorithm": shoal.Grid(1), "repeats": 2}
    whole = tune(tasks.Blobs(), SPACE, tmp_path / "whole", **usual)
    best, lucky = (min(row.objective for row in rows) for rows in (whole.configurations, whole.trials))
    assert best > lucky
    for target, ended in ((lucky, False), (best, True)):
        tune(tasks.Blobs(), SPACE, tmp_path / str(ended), **usual, target=target)
        with JournalView.read(tmp_path / str(ended)) as journal:
            assert ("ended_because" in journal.study) is ended
