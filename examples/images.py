"""A search on PNG files: two loader processes decode and augment each picture once for all trials of a job.

    python examples/images.py [--trials 12] [--epochs 4] [--pictures 400] [--workers 2]

The pictures are level and upright bars on noise, written to a temporary directory. Needs Pillow (`pip install pillow`).
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shoal

SIDE = 24
SHAPES = ("level", "upright")


def write(folder: Path, pictures: int) -> None:
    """Write pictures as PNG files, each named by its number and its shape."""
    random = np.random.default_rng(0)
    down, right = np.mgrid[:SIDE, :SIDE]
    folder.mkdir(parents=True)
    for number in range(pictures):
        shape = SHAPES[number % 2]
        y, x = random.uniform(8, SIDE - 8, 2)
        along, across = (right - x, down - y) if shape == "level" else (down - y, right - x)
        inside = (abs(along) < 7) & (abs(across) < random.uniform(1, 3))
        pixels = random.integers(0, 120, (SIDE, SIDE, 3)) + 100 * inside[..., None]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:05d}-{shape}.png")


class Pictures(Dataset):
    """PNG files of a folder; for training, each is mirrored and shifted at random whenever it is fetched."""

    def __init__(self, folder: Path, augment: bool) -> None:
        self.files = sorted(folder.glob("*.png"))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        with Image.open(file) as image:
            x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        if self.augment:
            x = x.flip(2) if torch.rand(()) < 0.5 else x
            x = x.roll(torch.randint(-2, 3, (2,)).tolist(), dims=(1, 2))
        return x, SHAPES.index(file.stem.split("-")[1])


class Shapes(shoal.Task):
    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self.workers = workers

    def data(self, config):
        train, valid = Pictures(self.folder / "train", augment=True), Pictures(self.folder / "valid", augment=False)
        return (
            DataLoader(train, batch_size=25, shuffle=True, num_workers=self.workers),
            DataLoader(valid, batch_size=50, num_workers=self.workers),
        )

    def model(self, config):
        width = config["width"]
        return nn.Sequential(
            *(nn.Conv2d(3, width, 5, stride=2), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * width, len(SHAPES))),
        )

    def optimizer(self, model, config):
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "train", options.pictures)
        write(Path(folder) / "valid", options.pictures // 4)
        study = shoal.tune(
            Shapes(Path(folder), options.workers),
            {"lr": shoal.loguniform(1e-3, 3e-2), "width": shoal.choice([8, 16])},
            metric="accuracy",
            mode="max",
            algorithm=shoal.Random(options.trials, epochs=options.epochs),
            directory=Path(folder) / "study",
        )
        best = study.best_trial
        print(f"Best of {len(study.trials)} trials: accuracy {best.ranked['accuracy']:.3f} by trial {best.number}")


if __name__ == "__main__":
    main()
