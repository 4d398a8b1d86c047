"""Trains the members of an array and equal models in plain PyTorch, and compares them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep


class CompareWithPlain:
    """An array of copies of some models, and these.

    Args:
        alone: the models.
        loss: of both.
        mode: Step mode of the array.
        settings: of SGD.
    """

    def __init__(self, alone: Sequence[nn.Module], loss: Callable[..., Any], mode: str, **settings: float) -> None:
        self.alone = alone
        self.fused = [copy.deepcopy(model) for model in alone]
        self.array: ModelArray = fuse(self.fused, list(range(len(alone))))
        self._loss = loss
        optimizer = fuse_optimizers([SGD(model.parameters(), 0.1, **settings) for model in self.fused], self.array)
        self._step = TrainingStep(self.array, optimizer, loss, (mode,))  # type: ignore[arg-type]
        self._plain = [SGD(model.parameters(), 0.1, **settings) for model in alone]

    def train(self, batches: Tensor) -> Iterator[Tensor]:
        """Both take a step on each batch, which is then given out; in the end they are to have learnt the same."""
        for x in batches:
            self._step(x)
            for model, optimizer in zip(self.alone, self._plain, strict=True):
                optimizer.zero_grad()
                self._loss(model, x).backward()
                optimizer.step()
            yield x
        for mine, own in zip(self.fused, self.alone, strict=True):
            for name, value in own.state_dict().items():
                torch.testing.assert_close(mine.state_dict()[name], value, rtol=0, atol=1e-12, msg=name)
