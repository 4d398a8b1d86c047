"""Studies whose trials differ in structure and batch size: packed or not, each is the same trial."""

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


class Points(Dataset[Any]):
    """Samples that are made one by one."""

    def __init__(self, rows: range) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(100, 6, generator=generator, dtype=torch.float64)[rows]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], int(self.x[index].sum() > 0)


class Net(shoal.Task):
    """Small models of two widths, with dropout."""

    def data(self, config: Any) -> tuple[Any, Any]:
        valid = Points(range(40, 60))
        return Points(range(40)), TensorDataset(valid.x, (valid.x.sum(1) > 0).long())

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
        **{"backend": "inline", **options},
    )
    with JournalView.read(directory) as journal:
        return {
            row.number: [report.metrics["valid_loss"] for report in journal.curve(row.number)] for row in study.trials
        }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """The search of trials by themselves."""
    directory = tmp_path_factory.mktemp("alone") / "study"
    found = searched(directory, packing="none", fuse=False)
    assert set(structures(directory)) == {1}
    return found


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
def test_a_packed_search_is_the_search_of_trials_by_themselves(
    options: dict[str, Any], alone: dict[int, list[float]], tmp_path: Path
) -> None:
    packed = searched(tmp_path / "packed", **options)
    assert max(structures(tmp_path / "packed")) > 1
    assert packed.keys() == alone.keys()
    for number, losses in packed.items():
        assert losses == pytest.approx(alone[number], rel=1e-9), number


def test_a_packed_study_goes_on_after_an_interrupt(alone: dict[int, list[float]], tmp_path: Path) -> None:
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
