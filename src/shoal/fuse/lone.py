"""A step of an array of one on its member's own tensors, without what is done for the sake of several."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from shoal.fuse.alone import tensors_in
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.optim.lone import LoneUpdate
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
        optimizer: its.
        update: all that the optimizer does.
        loss: as for `TrainingStep`.
    """

    def __init__(
        self, array: ModelArray, optimizer: FusedOptimizer, update: LoneUpdate, loss: Callable[..., Any]
    ) -> None:
        self._array = array
        self._optimizer = optimizer
        self._versions = array.version, optimizer.version
        self._update = update
        self._loss = loss
        self._member = array.members[0]
        self._places = [
            _Place(own, container, key, own.data_ptr(), own.requires_grad)
            for own, container, key in array.lone_places()
        ]

    @classmethod
    def of(cls, array: ModelArray, optimizer: FusedOptimizer, loss: Callable[..., Any]) -> Self | None:
        """The step; None where the array has several members, or the one or its optimizer is more than this knows."""
        update = optimizer.lone()
        return None if update is None or not array.lone_places() else cls(array, optimizer, update, loss)

    def fits(self, batch: Any) -> bool:
        """Whether all is as it was, so that a step may be taken."""
        array = self._array
        if array.watched or self._versions != (array.version, self._optimizer.version) or not array.silent(self._loss):
            return False
        for place in self._places:
            if not place.there or place.own.requires_grad is not place.trained:
                return False
        return self._update.fits() and not any(isinstance(leaf, Stacked) for leaf in tensors_in(batch))

    def backward(self, batch: Any) -> Tensor:
        """Compute the loss, [1] and part of no graph, and the gradients of the member's own parameters.

        Raises:
            FusionError: as `TrainingStep`; there are no gradients then.
        """
        array = self._array
        array.check_present()
        array.tick += 1
        self._drop()
        try:
            returned = self._loss(self._member, batch)
            if not all(place.there for place in self._places):
                array.take_back_lone()
            loss = one(returned)
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            array.take_back_lone()
            self._drop()
            raise
        return loss.detach().unsqueeze(0)

    def update(self) -> bool:
        """Update the parameters; false where that takes the array's own optimizer, and then nothing is done."""
        return self._update.step()

    def _drop(self) -> None:
        for place in self._places:
            if place.trained:
                place.own.grad = None
