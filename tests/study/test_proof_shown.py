"""A search says which of its structures train as arrays, and what was proven: in Python, and by `shoal status`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.core.activity import Activity
from shoal.core.errors import ShoalError
from shoal.journal.view import JournalView

pytest.importorskip("pandas")


class Two(shoal.Task):
    """Models of two structures; those of width 3 have a hook on a parameter, which an array cannot have."""

    def data(self, config: Any) -> Any:
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(16, 2)
        return TensorDataset(x, x.sum(1)), TensorDataset(x, x.sum(1))

    def model(self, config: Any) -> nn.Module:
        first = nn.Linear(2, config["width"])
        if config["width"] == 3:
            first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(config["width"], 1), nn.Flatten(0)).double()

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])


class TwoUnchecked(Two):
    exact = False


def searched(task: shoal.Task, directory: Path) -> tuple[shoal.Study, list[int], list[int]]:
    """A study, and the trials of its two structures: those that are refused, and the others."""
    study = shoal.tune(
        task,
        {"lr": [0.01, 0.02, 0.03], "width": [3, 4]},
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs=2),
        backend="inline",
        devices="cpu:1",
        directory=directory,
    )
    refused, others = ([row.number for row in study.trials if row.config["width"] == width] for width in (3, 4))
    return study, refused, others


def status(study: shoal.Study) -> list[dict[str, Any]]:
    arrays: list[dict[str, Any]] = json.loads(
        CliRunner().invoke(app, ["status", str(study.directory), "--json"]).stdout
    )["arrays"]
    return arrays


@pytest.mark.usefixtures("fusing_pays")
def test_a_search_says_what_was_proven(tmp_path: Path) -> None:
    study, refused, others = searched(Two(), tmp_path / "study")
    compared = [row for number in others for row in study.proof(number)]
    assert {row.what.partition(",")[0] for row in compared} == {"step", "validation"}
    assert all(row.difference is not None and 0 <= row.difference < 1e-9 and not row.reason for row in compared)
    for number in refused:
        rows = study.proof(number)
        assert {(row.what, row.difference) for row in rows} == {("refused", None)}
        assert all("hook" in row.reason for row in rows)
    with pytest.raises(ShoalError, match="has no trial 6; its trials are 0-5"):
        study.proof(6)

    frame = study.dataframe().set_index("trial")["proof"]
    assert all(frame[number].startswith("plain: ") for number in refused)
    assert all(" equal at " in frame[number] for number in others)

    plain, fused = arrays = status(study)
    assert plain["trials"] == refused
    assert (plain["members"], plain["is_plain"], plain["checks"]) == (3, True, 0)
    assert fused["trials"] == others
    assert (fused["members"], fused["refusal"], fused["checks"]) == (3, "", len(compared))
    assert fused["difference"] == max(row.difference for row in compared if row.difference is not None)
    shown = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["status", str(study.directory)]).stdout
    assert [shown.count(each["text"]) for each in arrays] == [1, 1]
    assert "note" not in shown

    with JournalView.read(study.directory) as journal:
        assert sum(job.activities.get(Activity.CHECKS, 0.0) for job in journal.jobs() if job.members) > 0.0


@pytest.mark.usefixtures("fusing_pays")
def test_a_task_that_is_not_exact_is_not_compared(tmp_path: Path) -> None:
    study, refused, others = searched(TwoUnchecked(), tmp_path / "study")
    plain, unknown = status(study)
    assert (plain["trials"], plain["is_plain"]) == (refused, True)
    assert (
        unknown["text"]
        == f"an array of 3 members (trials {', '.join(map(str, others))}); not compared with plain PyTorch"
    )
    assert [study.proof(number) for number in others] == [[], [], []]
