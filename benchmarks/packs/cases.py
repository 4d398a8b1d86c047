"""The paper's ablation as a table: what members of a pack have in common, factor by factor (section 4.7, table 2)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from packs.tasks import AnyModel

__all__ = ["CASES", "SIZES", "Case", "Cell"]

CPU = torch.device("cpu")
SIZES = (2, 4, 8)
"""Members of a pack."""


@dataclass(frozen=True)
class Case:
    """What members take in turn; a factor of one entry is the same for all.

    Args:
        name: of the factor that differs.
        pipeline: "tensors" leaves preprocessing out of the step, the others have it in.
        models: kind and width.
        parts: of the data set; members of different parts have no picture in common.
        optimizers: by name.
        batch_sizes: samples per step.
    """

    name: str
    pipeline: str = "tensors"
    models: Sequence[tuple[str, int]] = (("MLP-3", 64),)
    parts: Sequence[int] = (0,)
    optimizers: Sequence[str] = ("Momentum",)
    batch_sizes: Sequence[int] = (50,)

    def configs(self, members: int) -> list[dict[str, Any]]:
        """Of so many members; each has a learning rate of its own."""
        factors = (self.models, self.parts, self.optimizers, self.batch_sizes)
        return [
            {
                "model": model,
                "width": width,
                "part": part,
                "optimizer": optimizer,
                "batch_size": size,
                "lr": 0.001 * (1 + number / 16),
                "activation": "ReLU",
            }
            for number, ((model, width), part, optimizer, size) in enumerate(
                islice(zip(*map(cycle, factors), strict=False), members)
            )
        ]


MODELS = (("MLP-3", 64), ("CNN", 8), ("MLP-3", 96), ("MLP-3", 32))
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
CASES = tuple(replace(case, pipeline=pipeline) for pipeline in ("tensors", "pictures", "png") for case in _FACTORS)


@dataclass(frozen=True)
class Cell:
    """One case with so many members: what every way of training is given.

    Args:
        case: what they have in common.
        members: how many there are.
        samples: of each member's training set.
        folder: of the PNG files.
        device: of models, and of data that are tensors beforehand.
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
    def task(self) -> AnyModel:
        return AnyModel(self.case.pipeline, self.folder, train=self.samples, test=1)

    def per_step(self, seconds: float) -> float:
        """Of the seconds of an epoch, those in which every member sees as many samples as the largest batch has.

        Where all batches are equal that is T_s, the time of one step of every member.
        """
        return seconds * max(config["batch_size"] for config in self.configs) / self.samples
