"""What a search of the benchmark consists of, and what most of its tasks have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import shoal
from shoal.algorithms.base import Algorithm

__all__ = ["Search", "Supervised"]


@dataclass(frozen=True)
class Search:
    """A search.

    Args:
        task: Makes the task from the folder of the data sets and whether the run is a quick one.
        space: Search space.
        algorithm: Makes the algorithm of a full run.
        quick: Makes the algorithm of a quick run.
        metric: Metric of the search.
        mode: "max" or "min".
        tolerance: Largest difference between the best values of two ways. It is rounding for most tasks; tasks with
            dropout draw other random numbers in other ways.
        file: Data set that the task reads, in the folder of the data sets; "" for none.
        imports: Further modules that the task imports when it is used, which the caller of a search has imported.
        repeats: Seeds of each configuration.
        asked: Asked at most on a GPU, by names of `searches.py`.
    """

    task: Callable[[Path, bool], shoal.Task]
    space: Mapping[str, Any]
    algorithm: Callable[[], Algorithm]
    quick: Callable[[], Algorithm] = lambda: shoal.Random(2, epochs=1)
    metric: str = "accuracy"
    mode: str = "max"
    tolerance: float = 0.02
    file: str = ""
    imports: tuple[str, ...] = ()
    repeats: int = 1
    asked: Mapping[str, float] = field(default_factory=dict)

    def import_all(self) -> None:
        """Import what the caller of a search has imported."""
        for name in self.imports:
            module, _, names = name.partition(":")
            for each in names.split(","):
                getattr(import_module(module), each)


class Supervised(shoal.Task):
    """AdamW on cross entropy; batches are pairs of inputs and classes."""

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config.get("weight_decay", 0.01))

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}
