"""Learners that have paused, kept at hand for the next job of this process."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.fuse.frozen import lent
from shoal.planner.job import Member
from shoal.worker.files import checkpoints
from shoal.worker.learner import Learner, optimizers_in

__all__ = ["Paused"]

KEPT_BYTES = 256 << 20
"""Of parameters, buffers and optimizer state. It is small models whose loading is as long as their training."""


class Paused:
    """Keeps learners as they are saved, so that one that goes on here need not be built and loaded again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Learner, int]] = OrderedDict()
        self._bytes = 0

    def keep(self, learner: Learner) -> None:
        """Keep one that has just been saved; those kept longest go, where there is no room."""
        tensors = _tensors(learner)
        size = sum(tensor.nbytes for tensor in tensors)
        if size > KEPT_BYTES:
            return
        for tensor in tensors:  # a row of an array's memory would keep all of that
            if not lent(tensor):
                tensor.data = tensor.data.clone()
        self._drop(learner.trial.number)
        self._kept[learner.trial.number] = (learner, size)
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def take(self, member: Member, directory: Path) -> Learner | None:
        """The learner of a member, if it is here and nobody has trained it further."""
        if member.trial.number not in self._kept:
            return None
        learner, _ = self._kept[member.trial.number]
        self._drop(member.trial.number)
        epoch, step = learner.saved
        newest = next(iter(checkpoints(directory, member.trial.number)), None)
        if learner.trial != member.trial or newest is None or not newest.name.startswith(f"{epoch:06d}-{step:06d}-"):
            return None
        return replace(learner, member=member)

    def _drop(self, number: int) -> None:
        if number in self._kept:
            self._bytes -= self._kept.pop(number)[1]


def _tensors(learner: Learner) -> list[Tensor]:
    states = (state for one in optimizers_in(learner.optimizer) for state in one.state.values())
    held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return [*learner.model.parameters(), *learner.model.buffers(), *held]
