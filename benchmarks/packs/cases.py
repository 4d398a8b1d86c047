"""What members of a pack have in common: the paper's ablation (section 4.7, table 2), and packs of each network."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from packs.tasks import Cifar

__all__ = ["ABLATION", "Case", "Cell"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What members take in turn; a factor of one entry is the same for all.

    Args:
        name: Name of the factor that differs.
        pipeline: "tensors" leaves preprocessing out of the step, "png" has it in.
        models: Names of networks.
        parts: Numbers of parts of the data set; members of different parts have no picture in common.
        optimizers: Names of optimizers.
        batch_sizes: Samples per step.
    """

    name: str
    pipeline: str = "tensors"
    models: Sequence[str] = ("MLP-3",)
    parts: Sequence[int] = (0,)
    optimizers: Sequence[str] = ("Momentum",)
    batch_sizes: Sequence[int] = (50,)

    def configs(self, members: int) -> list[dict[str, Any]]:
        """Of so many members; each has a learning rate of its own."""
        factors = zip(*map(cycle, (self.models, self.parts, self.optimizers, self.batch_sizes)), strict=False)
        names = ("model", "part", "optimizer", "batch_size")
        return [
            {**dict(zip(names, values, strict=True)), "lr": 0.001 * (1 + number / 16), "activation": "ReLU"}
            for number, values in enumerate(islice(factors, members))
        ]


MODELS = ("MLP-3", "CNN", "wide MLP-3", "narrow MLP-3")
PARTS = (0, 1)
ALGORITHMS = ("Momentum", "SGD", "Adam", "Adagrad")
BATCH_SIZES = (50, 20, 70, 40)

_FACTORS = (
    Case("none"),
    Case("model", models=MODELS),
    Case("data", parts=PARTS),
    Case("optimizer", optimizers=ALGORITHMS),
    Case("batch size", batch_sizes=BATCH_SIZES),
    Case("all", models=MODELS, parts=PARTS, optimizers=ALGORITHMS, batch_sizes=BATCH_SIZES),
)
ABLATION = tuple(replace(case, pipeline=pipeline) for pipeline in ("tensors", "png") for case in _FACTORS)


@dataclass(frozen=True)
class Cell:
    """One case with so many members: what every way of training is given.

    Args:
        case: What they have in common.
        members: Number of members.
        samples: Number of samples of each member's training set.
        folder: Folder of the PNG files.
        device: Device of models, and of data that are tensors beforehand.
    """

    case: Case
    members: int
    samples: int
    folder: Path
    device: torch.device = CPU

    @property
    def configs(self) -> list[dict[str, Any]]:
        return self.case.configs(self.members)

    @property
    def task(self) -> Cifar:
        return Cifar(pipeline=self.case.pipeline, folder=self.folder, train=self.samples, test=1)

    def per_step(self, seconds: float) -> float:
        """Of the seconds of an epoch, those in which every member sees as many samples as the largest batch has.

        Where all batches are equal that is T_s, the time of one step of every member.
        """
        return seconds * max(config["batch_size"] for config in self.configs) / self.samples
