"""Which array a model is a member of: the last one that it was fused into."""

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["take_ownership"]

_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of models, a weak reference to their array."""


def take_ownership(array: nn.Module, members: Iterable[nn.Module]) -> set[Any]:
    """Note the array of some models.

    Returns:
        The arrays that they have left, as far as these still exist.
    """
    before = set()
    here = ref(array)
    for member in members:
        there = _homes.get(member)  # type: ignore[no-untyped-call]
        before.add(there() if there is not None else None)
        _homes[member] = here
    return before - {None, array}
