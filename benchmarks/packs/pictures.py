"""CIFAR-10 through three input pipelines: tensors made beforehand, pictures made into tensors one by one, PNG files."""

import argparse
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

__all__ = ["CIFAR", "PIPELINES", "Files", "Pictures", "arrays", "look_for_data", "made", "write"]

CIFAR = Path(os.environ.get("CIFAR10") or Path(__file__).parents[3] / "shared" / "data" / "cifar10_5k_1k.npz")
"""The variable names another file of the same arrays."""
PIPELINES = ("tensors", "pictures", "png")
MEAN, STD = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).view(2, 3, 1, 1)
"""Mean and deviation of the pixels of CIFAR-10's training set, by channel."""
MARGIN = 4
"""Pixels by which a crop is shifted at most (He et al., arXiv:1512.03385, section 4.2)."""


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in memory, each made into a normalised tensor when it is asked for, as torchvision does it."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images, self.labels = images, labels.astype("int64")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.prepared(self.picture(index)), int(self.labels[index])

    @property
    def tensors(self) -> tuple[Any, Tensor]:
        """As a `TensorDataset` has them, for plain loops; the pictures are prepared batch by batch."""
        return Prepared(self), torch.from_numpy(self.labels)

    def picture(self, index: int) -> np.ndarray:
        return self.images[index]

    def prepared(self, picture: np.ndarray) -> Tensor:
        x = torch.from_numpy(picture).permute(2, 0, 1).contiguous().to(torch.get_default_dtype()).div_(255)
        return x.sub_(MEAN).div_(STD)


class Prepared:
    """Pictures of a data set by the methods of a tensor that a plain loop uses."""

    device = torch.device("cpu")

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, order: Tensor) -> Tensor:
        return torch.stack([self.pictures[index][0] for index in order.tolist()])

    def split(self, size: int) -> Iterator[Tensor]:
        return (self[part] for part in torch.arange(len(self)).split(size))

    def to(self, device: torch.device) -> "Prepared":
        return self


class Files(Pictures):
    """PNG files, each opened, decoded and, for training, mirrored and shifted at random when it is asked for.

    The random numbers are of torch's default generator, as they are in torchvision's transforms.
    """

    def __init__(self, folder: Path, name: str, rows: range) -> None:
        super().__init__(np.empty(0), np.load(folder / f"{name}.npy")[rows.start : rows.stop])
        self.folder, self.training, self.first = folder / name, name == "train", rows.start

    def picture(self, index: int) -> np.ndarray:
        with Image.open(self.folder / f"{self.first + index}.png") as image:
            return np.array(image)

    def prepared(self, picture: np.ndarray) -> Tensor:
        x = super().prepared(picture)
        if not self.training:
            return x
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        down, right = torch.randint(2 * MARGIN + 1, (2,)).tolist()
        return F.pad(x, [MARGIN] * 4)[:, down : down + x.shape[1], right : right + x.shape[2]].contiguous()


def look_for_data(parser: argparse.ArgumentParser, *, quick: bool) -> None:
    """End the program where the pictures are not there: in peace after a quick run, which not every place can do."""
    if CIFAR.exists():
        return
    if quick:
        print(f"{CIFAR} is missing; nothing to do")
        raise SystemExit(0)
    parser.error(f"{CIFAR} is missing")


@cache
def arrays() -> dict[str, np.ndarray]:
    """Images, uint8 [samples, height, width, 3], and labels of both sets, in a random order."""
    with np.load(CIFAR) as loaded:
        return {name: loaded[name] for name in loaded.files}


def made(pipeline: str, name: str, rows: range, folder: Path = Path()) -> Dataset[Any]:
    """Those rows of the set "train" or "test" that exist; the pipeline "png" reads the folder that `write` filled."""
    if pipeline not in PIPELINES:
        raise ValueError(f"`pipeline` must be one of {', '.join(PIPELINES)}, got {pipeline!r}")
    if pipeline == "png":
        return Files(folder, name, rows)
    data, part = arrays(), slice(rows.start, rows.stop)
    pictures = Pictures(data[f"x_{name}"][part], data[f"y_{name}"][part])
    if pipeline == "pictures":
        return pictures
    return TensorDataset(torch.stack([x for x, _ in pictures]), torch.from_numpy(pictures.labels))


def write(folder: Path, most: int | None = None) -> Path:
    """Write at most so many pictures of both sets as PNG files below a folder, which is returned."""
    for name in ("train", "test"):
        (folder / name).mkdir()
        np.save(folder / f"{name}.npy", arrays()[f"y_{name}"][:most])
        for number, image in enumerate(arrays()[f"x_{name}"][:most]):
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return folder
