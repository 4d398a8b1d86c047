"""A step of an array of one on its member's own tensors, without what is done for the sake of several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shoal.fuse.alone import tensors_in
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.optim.lone_update import LoneUpdate
from shoal.fuse.scalar import one
from shoal.fuse.stacked import Stacked

__all__ = ["LoneStep"]


@dataclass(frozen=True)
class _Place:
    """A parameter or buffer of the member, as it was.

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


class LoneStep:
    """Loss, backward and update of one member; nothing is stacked, and nothing handed over.

    For losses that are known to draw no random numbers, while nobody looks whether that stays so.

    Args:
        array: of one.
        places: of its member's tensors.
        update: all that its optimizer does.
        loss: as for `TrainingStep`.
    """

    def __init__(
        self,
        array: ModelArray,
        places: Sequence[tuple[Tensor, dict[str, Any], str]],
        update: LoneUpdate,
        loss: Callable[..., Any],
    ) -> None:
        self._array = array
        self._version = array.version
        self._places = [_Place(*place, place[0].data_ptr(), place[0].requires_grad) for place in places]
        self._update = update
        self._loss = loss
        self._member = array.members[0]

    @classmethod
    def of(cls, array: ModelArray, optimizer: FusedOptimizer, loss: Callable[..., Any]) -> Self | None:
        """The step; None where the array has several members, or the one or its optimizer is more than this knows.

        The array's own gradients are dropped then.
        """
        if len(array) > 1 or array.watched or not array.silent(loss) or not (places := array.lone_places()):
            return None
        update = optimizer.lone()
        if update is None:
            return None
        optimizer.zero_grad()
        return cls(array, places, update, loss)

    def fits(self, batch: Any) -> bool:
        """Whether the member is as it was, so that a step may be taken."""
        array = self._array
        if array.watched or self._version != array.version or not array.silent(self._loss):
            return False
        for place in self._places:
            if not place.there or place.own.requires_grad is not place.trained:
                return False
        return not any(isinstance(leaf, Stacked) for leaf in tensors_in(batch))

    def backward(self, batch: Any) -> Tensor:
        """Compute the loss, [1] and part of no graph, and the gradients of the member's own parameters.

        Raises:
            FusionError: as `TrainingStep`; there are no gradients then.
        """
        array = self._array
        array.check_free()
        array.tick += 1
        self.drop()
        try:
            loss = self._run_backward(batch)
        except BaseException:
            self.drop()
            raise
        return torch.stack([loss.detach()])

    def update(self) -> bool:
        """Update the parameters, and drop the gradients; false where that takes the array's own optimizer, and then
        nothing is done.
        """
        if not self._update.step():
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Forget the gradients of the member's own parameters."""
        for place in self._places:
            if place.trained:
                place.own.grad = None

    def _run_backward(self, batch: Any) -> Tensor:
        """The loss. What it has put in the place of a buffer is taken over last: autograd may have saved the buffer."""
        try:
            returned = self._loss(self._member, batch)
        except BaseException:
            self._array.put_back_lone()
            raise
        try:
            loss = one(returned)
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            if not all(place.there for place in self._places):
                self._array.take_over_lone()
        return loss
