"""The way back to the start of a training step that the user has written."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.array import ModelArray
from shoal.fuse.generators import seed_again
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.worker.snapshot import Held, Values, memories

__all__ = ["WayBack"]


class WayBack:
    """Keeps what a step of an array is about to change, and no more of it than the step comes to change.

    Frozen parameters that the array keeps once are not saved: it refuses members that change them.

    Args:
        array: the models.
        optimizers: theirs.
    """

    def __init__(self, array: ModelArray, optimizers: Sequence[FusedOptimizer]) -> None:
        self._array = array
        self._updates = {optimizer: _Update(array, optimizer) for optimizer in optimizers}
        self._stepped: list[FusedOptimizer] = []
        self._values = Values()
        self._arranged: list[int] = []
        self._free: list[Tensor] = []

    def begin(self) -> None:
        """Save what the step may change at any moment: buffers, gradients, and parameters that no optimizer updates."""
        arranged = [optimizer.version for optimizer in self._updates]
        if arranged != self._arranged:
            self._arranged = arranged
            updated = {id(tensor) for update in self._updates.values() for tensor in update.parameters()}
            mine = [stacked for _, stacked, _ in self._array.columns()]
            self._free = memories(tensor for tensor in mine if id(tensor) not in updated)
        self._stepped.clear()
        self._ticks = self._array.ticks
        self._grads = [(stacked, stacked.grad) for _, stacked, _ in self._array.columns() if stacked.requires_grad]
        buffers = self._array.buffers()
        self._values.save([*memories(buffers), *self._free, *(grad for _, grad in self._grads if grad is not None)])

    def before(self, optimizer: FusedOptimizer) -> None:
        """Save what an optimizer is about to update; to be called before each of its steps."""
        if optimizer not in self._stepped:
            self._updates[optimizer].save()
            self._stepped.append(optimizer)

    def take(self) -> None:
        """Go back to where the step began."""
        for optimizer in self._stepped:
            self._updates[optimizer].undo()
        self._values.restore()
        for stacked, grad in self._grads:
            stacked.grad = grad
        self._array.ticks = self._ticks
        seed_again()


class _Update:
    """The parameters and the state that an optimizer updates."""

    def __init__(self, array: ModelArray, optimizer: FusedOptimizer) -> None:
        self._array = array
        self._optimizer = optimizer
        self._values = Values()
        self._held: list[Held] = []
        self._tensors: list[Tensor] = []
        self._version = -1
        self._shown: list[object] = []

    def parameters(self) -> Iterable[Tensor]:
        """The array's parameters that are updated, [B, *shape] each."""
        groups = [group for member in self._optimizer.members for group in member.param_groups]
        updated = {id(param) for group in groups for param in group["params"]}
        return [stacked for _, stacked, own in self._array.columns() if any(id(param) in updated for param in own)]

    def save(self) -> None:
        """Save their values."""
        self._optimizer.refresh()
        if not self._is_as_before():
            self._version = self._optimizer.version
            held = _state if self._optimizer.by_rule else Held.of_optimizer
            self._held = [held(member) for member in self._optimizer.members]
            states = (tensor for held in self._held for tensor in held.tensors())
            self._tensors = memories((*self.parameters(), *states))
        self._values.save(self._tensors)

    def _is_as_before(self) -> bool:
        """Whether the state lies where it lay: rules begin it for all members at once, and change it in place."""
        before = self._shown
        first = self._optimizer.members[0]
        self._shown = [value for state in first.state.values() for value in state.values()]
        if not self._optimizer.by_rule or self._optimizer.version != self._version or len(before) != len(self._shown):
            return False
        return all(value is other for value, other in zip(before, self._shown, strict=True))

    def undo(self) -> None:
        """Give them the values that were saved."""
        for held in self._held:
            held.restore()
        self._values.restore()


def _state(optimizer: Optimizer) -> Held:
    """All that a rule changes; settings, which schedulers change between steps, would be those of an earlier step."""
    return Held(optimizer, lambda name: name != "state")
