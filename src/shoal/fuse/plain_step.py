"""A training step of an array's members one after another, as a loop over the models takes it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.generators import seed_member
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.per_member import MemberRunner, own_part
from shoal.fuse.scalar import one

__all__ = ["PlainStep"]


class PlainStep:
    """Loss and backward of each member, which gets gradients of its own, then the members' own optimizers.

    Weights and state are views of the array's and of its optimizer's, so steps of both kinds may follow each other.

    Args:
        array: the models.
        optimizer: theirs.
        loss: takes a model and a batch and returns a scalar.
    """

    def __init__(self, array: ModelArray, optimizer: FusedOptimizer, loss: Callable[..., Any]) -> None:
        self._array = array
        self._optimizer = optimizer
        self._loss = loss
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._runs = [MemberRunner(seed, self._device) for seed in array.seeds]
        self._columns: list[tuple[Tensor, Sequence[Tensor]]] = []
        """Stacked parameters with the members' own, which may have gradients of the last step."""
        self._begun = False
        self.trained: list[Tensor] = []
        """The array's parameters that a member had a gradient of in the last step."""

    def __call__(self, batch: Any) -> Tensor:
        """One step; returns the losses, [B], part of no graph.

        Raises:
            FusionError: as `TrainingStep`; nothing is updated, and there are no gradients then.
        """
        array = self._array
        array.check_free()
        array.check_batch(batch)
        array.follow_own()
        self._optimizer.zero_grad()
        self._columns = [(stacked, own) for _, stacked, own in array.columns() if isinstance(stacked, nn.Parameter)]
        self.drop()
        ticks = array.ticks
        array.tick += 1
        losses = []
        try:
            for b, (member, run) in enumerate(zip(array.members, self._runs, strict=True)):
                if b:
                    seed_member(b)
                losses.append(self._backward(b, run, ticks[b], member, own_part(batch, b, len(array))))
        except BaseException as error:
            self.drop()
            if isinstance(error, FusionError):
                self._runs = [MemberRunner(seed, self._device, watched=True) for seed in array.seeds]
            raise
        counts = [sum(each.grad is not None for each in own) for _, own in self._columns]
        self.trained = [stacked for (stacked, _), count in zip(self._columns, counts, strict=True) if count]
        self.trained += [own for _, _, own in array.apart() if own.grad is not None]
        self._optimizer.step_each(uneven=any(0 < count < len(array) for count in counts))
        if not self._begun:
            array.check_places()
            self._begun = True
        return torch.stack(losses)

    def _backward(self, b: int, run: MemberRunner, tick: int, member: Any, batch: Any) -> Tensor:
        """A member's loss. What it has put in the place of a buffer is taken over last: autograd may have saved the
        buffer as it was.
        """
        try:
            loss = one(run(self._loss, tick, member, batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self._array.take_over(b)
        except BaseException:
            self._array.put_back(b)
            raise
        return loss.detach()

    def drop(self) -> None:
        """Forget the gradients of the members' own parameters; to be called before a step of another kind."""
        for _, own in self._columns:
            for parameter in own:
                parameter.grad = None
