"""A step of members one after another on their own tensors: nothing is stacked, and no gradient handed over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.alone import tensors_in
from shoal.fuse.array import ModelArray
from shoal.fuse.generators import seed_again
from shoal.fuse.lazy import lazily_copied
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.optim.serial_update import SerialUpdate
from shoal.fuse.scalar import one
from shoal.fuse.stacked import Stacked

__all__ = ["SerialStep"]


@dataclass(frozen=True)
class _Place:
    """A parameter or buffer of a member, as it was.

    Args:
        own: the tensor.
        container: of a module's.
        key: in that.
        address: of its memory.
        trained: it required a gradient.
    """

    own: Tensor
    container: dict[str, Any]
    key: str
    address: int
    trained: bool

    @property
    def there(self) -> bool:
        """Whether it stands where it stood."""
        return self.container.get(self.key) is self.own and self.own.data_ptr() == self.address


class SerialStep:
    """Loss and backward of each member, then the updates of all, by the members' own gradients.

    For losses that are known to draw no random numbers.

    Args:
        array: the models.
        places: of each member's tensors.
        update: all that the optimizers do.
        loss: as for `TrainingStep`.
    """

    def __init__(
        self,
        array: ModelArray,
        places: Sequence[Sequence[tuple[Tensor, dict[str, Any], str]]],
        update: SerialUpdate,
        loss: Callable[..., Any],
    ) -> None:
        self._array = array
        self._version = array.version
        self._places = [
            [_Place(*place, place[0].data_ptr(), place[0].requires_grad) for place in own] for own in places
        ]
        self._update = update
        self._loss = loss
        self.params = [param for param in array.parameters() if param.grad is not None]
        """The array's, that there are gradients of in every step."""

    @classmethod
    def of(cls, array: ModelArray, optimizer: FusedOptimizer, loss: Callable[..., Any]) -> Self | None:
        """The step, right after the same was taken with stacked gradients, which are dropped then; None where the
        members or their optimizers are more than this knows.
        """
        if not array.silent(loss) or not (places := array.own_places()):
            return None
        update = optimizer.serial()
        if update is None:
            return None
        made = cls(array, places, update, loss)
        optimizer.zero_grad()
        return made

    def fits(self) -> bool:
        """Whether the members are as they were, so that a step may be taken. Plain attributes are each member's own
        affair here; that they have come to differ is found when all run at once again.
        """
        array = self._array
        if self._version != array.version or not array.silent(self._loss):
            return False
        for places in self._places:
            for place in places:
                if not place.there or place.own.requires_grad is not place.trained:
                    return False
        return True

    def backward(self, batch: Any) -> Tensor:
        """Compute the losses, [B] and part of no graph, and the gradients of the members' own parameters.

        Raises:
            FusionError: as `TrainingStep`; there are no gradients then.
        """
        array = self._array
        array.check_free()
        stacked = any(isinstance(leaf, Stacked) for leaf in tensors_in(batch))
        if stacked:
            array.check_batch(batch)
        array.tick += 1
        self.drop()
        losses = []
        try:
            for b in range(len(array)):
                if b:
                    seed_again()
                if stacked:
                    mine = pytree.tree_map_only(Tensor, partial(_part, b=b), batch)
                else:
                    mine = batch if len(array) == 1 else lazily_copied(batch)
                losses.append(self._run_backward(b, mine).detach())
        except BaseException:
            self.drop()
            raise
        return torch.stack(losses)

    def update(self) -> bool:
        """Update the parameters, and drop the gradients; false where that takes the array's own optimizer, and then
        nothing is done.
        """
        if not self._update.step():
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Forget the gradients of the members' own parameters."""
        for places in self._places:
            for place in places:
                if place.trained:
                    place.own.grad = None

    def _run_backward(self, b: int, batch: Any) -> Tensor:
        """The loss. What it has put in the place of a buffer is taken over last: autograd may have saved the buffer."""
        try:
            returned = self._array.silently(self._loss, b, batch)
        except BaseException:
            self._array.put_back(b)
            raise
        try:
            loss = one(returned)
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            if not all(place.there for place in self._places[b]):
                self._array.take_over(b)
        return loss


def _part(value: Tensor, b: int) -> Tensor:
    """Member b's of a batch's tensor."""
    return value.whole[b] if isinstance(value, Stacked) else lazily_copied(value)
