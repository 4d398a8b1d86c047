"""What functions return for all members, and for one member after another, as plain tensors with an axis B."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.stacked import NeedsMemberError, Stacked, refuse_recorded

__all__ = ["join", "spread"]

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def spread(value: Any, members: int) -> Any:
    """One leaf of what a function returned for all members at once, with a leading axis B.

    Raises:
        NeedsMemberError: it is no tensor, number or None, and may hold something of a member's that cannot be seen.
    """
    if isinstance(value, Stacked):
        refuse_recorded([value])
        return value.whole
    if isinstance(value, Tensor):
        return value.expand(members, *value.shape)
    if isinstance(value, _NUMBERS):
        return torch.tensor([value] * members)
    if value is not None:
        raise NeedsMemberError(f"it returns a {type(value).__name__}, which may differ between members")
    return None


def join(results: list[Any]) -> Any:
    """The members' own results as one, as if they had run at once.

    Returns:
        One tree, its leaves tensors with a leading axis B, None, and of anything else lists of B values.

    Raises:
        FusionError: the results differ in structure or shape.
    """
    leaves, specs = zip(*(pytree.tree_flatten(result) for result in results), strict=True)
    for b, spec in enumerate(specs):
        if spec != specs[0]:
            raise FusionError(f"members 0 and {b} return results of different structure: {specs[0]} and {spec}")
    return pytree.tree_unflatten([_join_leaf(column) for column in zip(*leaves, strict=True)], specs[0])


def _join_leaf(column: tuple[Any, ...]) -> Any:
    if all(isinstance(value, Tensor) for value in column):
        shapes = [tuple(value.shape) for value in column]
        if any(shape != shapes[0] for shape in shapes):
            raise FusionError(f"the members return tensors of different shapes, {shapes}; return their means or sums")
        return torch.stack(column)
    if all(isinstance(value, _NUMBERS) for value in column):
        return torch.tensor(column)
    return None if all(value is None for value in column) else list(column)
