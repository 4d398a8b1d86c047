"""Studies whose trials differ in structure and batch size: packed or not, each is the same trial."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from baselines import KNN, RandomPacking
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.core.job import Purpose
from shoal.journal.view import JournalView


class Slow(Dataset[Any]):
    """Samples that take a while to make."""

    def __init__(self, rows: range) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(100, 6, generator=generator, dtype=torch.float64)[rows]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.x[index], int(self.x[index].sum() > 0)


class Net(shoal.Task):
    """Small models of two widths, with dropout."""

    def data(self, config: Any) -> tuple[Any, Any]:
        valid = Slow(range(40, 60))
        return Slow(range(40)), TensorDataset(valid.x, (valid.x.sum(1) > 0).long())

    def model(self, config: Any) -> nn.Module:
        width = config["width"]
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


SPACE = {"width": shoal.grid([4, 6, 8]), "batch_size": shoal.grid([8, 12]), "lr": shoal.grid([0.01, 0.1])}


def searched(directory: Path, **options: Any) -> dict[int, list[float]]:
    """The reports of every trial."""
    study = shoal.tune(
        Net(),
        SPACE,
        metric="valid_loss",
        mode="min",
        algorithm=shoal.SuccessiveHalving(n=12, min_epochs=1, max_epochs=9, eta=3),
        directory=directory,
        devices="cpu:1",
        show_progress=False,
        **options,
    )
    with JournalView.read(directory) as journal:
        return {
            row.number: [report.metrics["valid_loss"] for report in journal.curve(row.number)] for row in study.trials
        }


def structures(directory: Path) -> list[int]:
    """Of every training job, how many structures with batch sizes its trials had."""
    with JournalView.read(directory) as journal:
        configs = {row.number: row.config for row in journal.trials()}
        jobs = [job for job in journal.jobs() if job.purpose is Purpose.TRAIN]
    return [len({(configs[n]["width"], configs[n]["batch_size"]) for n in job.trials}) for job in jobs]


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "cost"},
        pytest.param({"packing": RandomPacking()}, marks=pytest.mark.thorough),
        pytest.param({"packing": KNN(), "fuse": False}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_packed_search_is_the_search_of_trials_by_themselves(options: dict[str, Any], tmp_path: Path) -> None:
    alone = searched(tmp_path / "alone", packing="none", fuse=False)
    assert set(structures(tmp_path / "alone")) == {1}
    packed = searched(tmp_path / "packed", **options)
    assert max(structures(tmp_path / "packed")) > 1
    assert packed.keys() == alone.keys()
    for number, losses in packed.items():
        assert losses == pytest.approx(alone[number], rel=1e-9), number


def test_a_packed_study_goes_on_after_an_interrupt(tmp_path: Path) -> None:
    alone = searched(tmp_path / "alone", packing="none", fuse=False)

    class Stops(Net):
        def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            if not (tmp_path / "stopped").exists():
                (tmp_path / "stopped").touch()
                raise KeyboardInterrupt
            return {}

    with pytest.raises(KeyboardInterrupt):
        shoal.tune(
            Stops(), SPACE, metric="valid_loss", mode="min", backend="inline", devices="cpu:1", show_progress=False,
            algorithm=shoal.SuccessiveHalving(n=12, min_epochs=1, max_epochs=9, eta=3), directory=tmp_path / "packed",
        )  # fmt: skip
    study = shoal.resume(tmp_path / "packed", packing=KNN(), show_progress=False)
    with JournalView.read(tmp_path / "packed") as journal:
        for row in study.trials:
            losses = [report.metrics["valid_loss"] for report in journal.curve(row.number)]
            assert losses == pytest.approx(alone[row.number], rel=1e-9)
