"""What training steps change, to go back to: of an array, its members and their optimizers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.fuse.array import ModelArray
from shoal.fuse.plain import OF_EVERY_MODULE

__all__ = ["Held", "Snapshot", "Values", "memories"]

_PLAIN = {type(None), bool, int, float, str}


class Values:
    """The values of tensors, copied to memory that is kept for the next time."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._saved: list[Tensor] = []

    @torch.no_grad()
    def save(self, tensors: list[Tensor]) -> None:
        """Copy the values of tensors; those of before are forgotten."""
        if len(tensors) != len(self._saved) or not all(map(_alike, tensors, self._saved)):
            self._saved = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        self._tensors = tensors
        if self._saved:
            torch._foreach_copy_(self._saved, tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the tensors the values that they had."""
        if self._saved:
            torch._foreach_copy_(self._tensors, self._saved)


class Held:
    """What an object's attributes hold, with lists and dicts among them as they are now.

    Args:
        owner: the object.
        skipped: tells the names of attributes that are left alone.
    """

    def __init__(self, owner: object, skipped: Callable[[str], bool]) -> None:
        self._owner = owner
        self._skipped = skipped
        mine = ((name, value) for name, value in vars(owner).items() if not skipped(name))
        self._values = {name: _copied(value) for name, value in mine}

    @classmethod
    def of_optimizer(cls, optimizer: Optimizer) -> "Held":
        """State, parameter groups, and whatever its class keeps."""
        return cls(optimizer, lambda name: name.endswith("_hooks"))

    def tensors(self) -> list[Tensor]:
        """Those that are no parameters."""
        leaves = pytree.tree_leaves(self._values)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]

    def restore(self) -> None:
        """Put all back in its place, once; the values of tensors are not looked at."""
        attributes = vars(self._owner)
        for name in [name for name in attributes if not self._skipped(name)]:
            del attributes[name]
        attributes.update(self._values)


class Snapshot:
    """All that a step of an array may change.

    Args:
        array: the models, with weights, buffers, attributes, and the gradients that the members have of their own.
        optimizers: of the members.
    """

    def __init__(self, array: ModelArray, optimizers: Iterable[Optimizer]) -> None:
        self._array = array
        self._ticks = array.ticks
        modules = [module for member in array.members for module in member.modules()]
        self._held = [Held(module, OF_EVERY_MODULE.__contains__) for module in modules]
        self._held += [Held.of_optimizer(optimizer) for optimizer in optimizers]
        self._grads = [(own, own.grad) for member in array.members for own in member.parameters()]
        others = [tensor for held in self._held for tensor in held.tensors()]
        others += [grad for _, grad in self._grads if grad is not None]
        self._values = Values()
        self._values.save(memories((*array.parameters(), *array.buffers(), *others)))

    def restore(self) -> None:
        """Bring everything back, once; parameters that were put elsewhere in memory are rows of the array's again."""
        for held in self._held:
            held.restore()
        self._values.restore()
        for _, stacked, own in self._array.columns():
            for tensor, row in zip(own, stacked.detach().unbind(0), strict=True):
                if tensor.data_ptr() != row.data_ptr():
                    tensor.data = row
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._array.ticks = self._ticks


def _copied(value: Any) -> Any:
    return value if type(value) in _PLAIN else pytree.tree_map(lambda leaf: leaf, value)


def memories(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, those that are views of one as that one."""
    wholes = (tensor if tensor._base is None else tensor._base for tensor in tensors)
    return list({id(whole): whole for whole in wholes}.values())


def _alike(tensor: Tensor, saved: Tensor) -> bool:
    return tensor.shape == saved.shape and tensor.dtype == saved.dtype and tensor.device == saved.device
