"""CIFAR-10 through three input pipelines: tensors made beforehand, pictures made into tensors one by one, PNG files."""

import argparse
import os
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
MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
"""Of the pixels of CIFAR-10's training set, by channel."""
MARGIN = 4
"""Pixels by which a crop is shifted at most (He et al., arXiv:1512.03385, section 4.2)."""

Picture = np.ndarray[Any, np.dtype[np.uint8]]
"""[height, width, 3]."""


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures in memory, each made into a normalised tensor when it is asked for, as torchvision does it."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, dtype: torch.dtype) -> None:
        self.images, self.labels, self.dtype = images, labels.astype("int64"), dtype
        self.mean, self.std = (value.to(dtype).view(3, 1, 1) for value in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.prepared(self.picture(index)), int(self.labels[index])

    def picture(self, index: int) -> Picture:
        return self.images[index]

    def prepared(self, picture: Picture) -> Tensor:
        x = torch.from_numpy(picture).permute(2, 0, 1).contiguous().to(self.dtype).div_(255)
        return x.sub_(self.mean).div_(self.std)


class Files(Pictures):
    """PNG files, each opened, decoded and, for training, mirrored and shifted at random when it is asked for.

    The random numbers are of torch's default generator, as they are in torchvision's transforms.
    """

    def __init__(self, folder: Path, name: str, rows: range, dtype: torch.dtype) -> None:
        super().__init__(np.empty(0), np.load(folder / f"{name}.npy")[rows.start : rows.stop], dtype)
        self.folder, self.name, self.first = folder / name, name, rows.start
        self.decoded = 0
        """Number of files that were decoded."""

    def picture(self, index: int) -> Picture:
        self.decoded += 1
        with Image.open(self.folder / f"{self.first + index}.png") as image:
            return np.array(image)

    def prepared(self, picture: Picture) -> Tensor:
        x = super().prepared(picture)
        if self.name != "train":
            return x
        if torch.rand(()) < 0.5:
            x = x.flip(2)
        down, right = torch.randint(2 * MARGIN + 1, (2,)).tolist()
        height, width = x.shape[1:]
        return F.pad(x, [MARGIN] * 4)[:, down : down + height, right : right + width].contiguous()


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
    if not CIFAR.exists():
        raise FileNotFoundError(f"{CIFAR} is missing; this benchmark needs 5,000 + 1,000 pictures of CIFAR-10 there")
    with np.load(CIFAR) as loaded:
        return {name: loaded[name] for name in loaded.files}


def made(
    pipeline: str, name: str, rows: range, dtype: torch.dtype = torch.float32, folder: Path | None = None
) -> Dataset[Any]:
    """Some rows of a set.

    Args:
        pipeline: one of `PIPELINES`.
        name: "train" or "test".
        rows: of the set; those beyond its end are left out.
        dtype: of the pictures.
        folder: of the files that `write` wrote; only PNG files need it.
    """
    if pipeline == "png":
        if folder is None:
            raise ValueError("the pipeline 'png' reads files; pass the `folder` that `write` has filled")
        return Files(folder, name, rows, dtype)
    data, part = arrays(), slice(rows.start, rows.stop)
    pictures = Pictures(data[f"x_{name}"][part], data[f"y_{name}"][part], dtype)
    if pipeline == "pictures":
        return pictures
    if pipeline != "tensors":
        raise ValueError(f"`pipeline` must be one of {', '.join(PIPELINES)}, got {pipeline!r}")
    x = torch.stack([pictures.prepared(picture) for picture in pictures.images])
    return TensorDataset(x, torch.from_numpy(pictures.labels))


def write(folder: Path, most: int | None = None) -> Path:
    """Write at most so many pictures of both sets as PNG files below a folder, which is returned."""
    for name in ("train", "test"):
        (folder / name).mkdir()
        np.save(folder / f"{name}.npy", arrays()[f"y_{name}"][:most])
        for number, image in enumerate(arrays()[f"x_{name}"][:most]):
            Image.fromarray(image).save(folder / name / f"{number}.png")
    return folder
