"""A tensor that every member of an array has: user code sees one member's, the data holds all of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["NeedsMemberError", "Stacked", "count", "each", "stack"]


class NeedsMemberError(Exception):
    """User code asked for one number where the members have several; the function runs member by member instead."""


class Stacked(Tensor):
    """A view of `all` (shape [B, *shape]) that looks like one member's tensor (shape `shape`).

    Torch functions called on it run once for all members: by a rule, by `torch.func.vmap` over that one function, or
    in a loop over the members. Plain tensors among the arguments are shared by all members. The leading axis B may lie
    anywhere in memory: a [B, N, C, H, W] tensor whose storage is ordered N, B, C, H, W is the channel-major layout of
    grouped convolutions, so chains of convolutions and elementwise functions copy nothing.

    Args:
        all: plain tensor, shape [B, *shape].
        number: stands for a Python float of the members (a dropout rate), which a loop hands out as a float.
    """

    all: Tensor
    number: bool
    dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Runs a torch function; set by `shoal.fuse.dispatch`."""

    @staticmethod
    def __new__(cls, all: Tensor, number: bool = False) -> "Stacked":  # noqa: A002
        """Wrap a plain tensor."""
        view = Tensor._make_wrapper_subclass(cls, all.shape[1:], dtype=all.dtype, device=all.device)
        view.all = all
        view.number = number
        return view

    def __init__(self, all: Tensor, number: bool = False) -> None:  # noqa: A002
        pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function on a stacked tensor comes through here."""
        with torch._C.DisableTorchFunctionSubclass():
            return Stacked.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Only code that bypasses the Python interface of torch gets here: it must see one member at a time."""
        raise NeedsMemberError(f"{func} bypasses torch's Python functions")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Stacked(members={len(self.all)}, shape={tuple(self.all.shape[1:])}, dtype={self.all.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stacked":
        return Stacked(self.all.clone(), self.number)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a stacked tensor exists only while its array runs and cannot be pickled")


def count(tree: Any) -> int:
    """The number of members B of the first stacked tensor in nested arguments."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Stacked):
            return len(leaf.all)
    raise TypeError(f"no stacked tensor among the arguments {tree!r}")


def each(value: Any, members: int) -> Iterator[Any]:
    """One member's value after another: slices of a stacked tensor, the same object of anything else."""
    if not isinstance(value, Stacked):
        return iter([value] * members)
    if value.number:
        return iter(value.all.tolist())
    return iter(value.all.unbind(0))


def stack(values: list[Any]) -> Any:
    """The inverse of `each` over nested results of one structure; what is no tensor must agree between members.

    Raises:
        NeedsMemberError: the members' results differ in structure, shape or plain value.
    """
    leaves, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise NeedsMemberError("the members' results differ in structure")
    merged = [_stack_leaf(column) for column in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(merged, specs[0])


def _stack_leaf(column: tuple[Any, ...]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        if any(type(value) is not type(first) or value != first for value in column):
            raise NeedsMemberError(f"the members' results differ: {first!r} and others")
        return first
    if any(value.shape != first.shape or value.dtype != first.dtype for value in column):
        shapes = ", ".join(str(tuple(value.shape)) for value in column)
        raise NeedsMemberError(f"the members' results have different shapes: {shapes}")
    return Stacked(torch.stack(column))
