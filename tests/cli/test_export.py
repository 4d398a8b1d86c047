"""`shoal export`: the trained weights of one trial, for use without Shoal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

import shoal
from shoal.cli.app import app

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


class Linear(shoal.Task):
    def data(self, config: Any) -> Any:
        return TensorDataset(X), TensorDataset(X)

    def model(self, config: Any) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> shoal.Study:
    return shoal.tune(
        Linear(), {"lr": shoal.choice([0.1, 0.2])}, metric="valid_loss", mode="min", algorithm=shoal.Grid(epochs=1),
        backend="inline", directory=tmp_path_factory.mktemp("export") / "study", show_progress=False,
    )  # fmt: skip


def export(study: shoal.Study, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", str(study.directory), *map(str, arguments)])


def test_weights_load_in_plain_torch(study: shoal.Study) -> None:
    done = export(study, 1, "--json")
    assert done.exit_code == 0, done.output
    (path,) = json.loads(done.output)["files"]
    model = nn.Linear(3, 1)
    model.load_state_dict(torch.load(path, weights_only=True))
    torch.testing.assert_close(model.state_dict(), study.model(1).state_dict())
    again = export(study, 1)
    assert again.exit_code != 0
    assert "is not empty; name another folder by --output" in str(again.exception)


def test_another_trial_or_no_adapter_is_refused_and_nothing_is_written(study: shoal.Study, tmp_path: Path) -> None:
    place = tmp_path / "out"
    missing = export(study, 7, "--output", place)
    assert "has no trial 7; it has 2 trials" in str(missing.exception)
    pytest.importorskip("peft")
    plain = export(study, 0, "--adapter", "--output", place)
    assert "a Linear, holds no PeftModel" in str(plain.exception)
    assert missing.exit_code != 0
    assert plain.exit_code != 0
    assert not place.exists()


def test_a_folder_that_cannot_be_written_is_named(study: shoal.Study, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = export(study, 0, "--output", tmp_path / "file" / "out")
    assert "file/out cannot be written: " in str(done.exception)
    assert "name another folder by --output" in str(done.exception)
    assert done.exit_code != 0
