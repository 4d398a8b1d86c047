"""`Stacked`: a tensor subclass that holds the tensors of all members, and has the shape of one member's tensor."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.constants import constant

__all__ = [
    "NeedsMemberError",
    "Ragged",
    "SharedWriteError",
    "Stacked",
    "StackedFloat",
    "agreed_value",
    "events",
    "member_count",
    "member_values",
    "stack",
]


class NeedsMemberError(BaseException):
    """User code needs a single value where the members have different ones; it cannot run for all members at once.

    This is not an `Exception`, so that no handler in user code catches it and continues for all members at once.
    """


class SharedWriteError(NeedsMemberError):
    """User code writes values of each member to a tensor that all members share."""

    def __init__(self, function: str, target: Tensor) -> None:
        super().__init__(f"{function} changes a tensor that all members share")
        self.target = target


class Stacked(Tensor):
    """A view of `whole` (shape [B, *shape]) that looks like one member's tensor (shape `shape`).

    A torch function called on it runs for all members: by a rule, by `torch.func.vmap` over this one function, or in a
    loop over the members. Plain tensors among the arguments are shared by all members. The leading axis B may have any
    position in memory: a [B, N, C, H, W] tensor whose storage is ordered N, B, C, H, W has the channel-major layout of
    grouped convolutions, so that chains of convolutions and elementwise functions copy nothing.

    Args:
        whole: Plain tensor, shape [B, *shape].
        floats: The members' Python floats, if the tensor stands for a float (such as a dropout rate); a loop over the
            members passes them as floats.
    """

    whole: Tensor
    floats: tuple[float, ...] | None
    dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Function that runs a torch function; set by `shoal.fuse.intercept`."""

    @staticmethod
    def __new__(cls, whole: Tensor, floats: tuple[float, ...] | None = None) -> "Stacked":
        """Wrap a plain tensor."""
        view = Tensor._make_wrapper_subclass(
            cls, whole.shape[1:], dtype=whole.dtype, device=whole.device, requires_grad=whole.requires_grad
        )
        view.whole = whole
        view.floats = floats
        return view

    @staticmethod
    def of_floats(floats: tuple[float, ...]) -> "StackedFloat":
        """The members' Python floats as one value, shape []."""
        return StackedFloat(torch.tensor(floats, dtype=torch.float64), floats)

    def parts(self) -> Sequence[Any]:
        """The members' tensors, or their numbers."""
        return self.whole.unbind(0) if self.floats is None else self.floats

    def floats_like(self, like: Tensor) -> Tensor:
        """The members' floats as [B], with `like`'s dtype and device; in a trace a constant, as CUDA graphs need."""
        if self.whole.device == like.device:
            return self.whole.to(like)
        return constant(self.floats or (), like.dtype, like.device)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function on stacked tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            return cls.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse code that bypasses torch's Python functions, which a member alone can run, but not autograd's."""
        if func is torch.ops.aten.detach.default:  # as autograd hands out a tensor that a hook has packed
            return type(args[0])(args[0].whole.detach(), args[0].floats)
        events.bypasses += 1
        raise NeedsMemberError(f"{func} bypasses torch's Python functions")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Stacked(members={len(self.whole)}, shape={tuple(self.whole.shape[1:])}, dtype={self.whole.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stacked":
        copied = type(self)(self.whole.detach().clone().requires_grad_(self.whole.requires_grad), self.floats)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a stacked tensor exists only while its array runs and cannot be pickled")


class StackedFloat(Stacked):
    """Python floats in which the members differ: a tensor of shape [] for torch's functions, a float for `isinstance`.

    Torch's functions work for all members at once, and so do arithmetic and comparisons: with other numbers they are
    Python's own, in double precision. Any other use of a float is refused.
    """

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` checks besides the type."""
        return float

    def __getattr__(self, name: str) -> Any:
        """Refuse methods of floats that tensors do not have."""
        if hasattr(float, name):
            self._refuse_method(name)
        raise AttributeError(f"'float' object has no attribute {name!r}")

    def of_each(self, function: Callable[..., Any], *others: Any) -> Any:
        """The result of a function of each member's float and of other numbers, which the members may have of own."""
        columns = [member_values(other, len(self.floats or ())) for other in others]
        results = [function(*row) for row in zip(self.floats or (), *columns, strict=True)]
        if all(type(result) is float for result in results):
            return Stacked.of_floats(tuple(results))
        return agreed_value(results)

    def __neg__(self) -> Any:
        return self.of_each(operator.neg)

    def __pos__(self) -> "StackedFloat":
        return self

    def __abs__(self) -> Any:
        return self.of_each(abs)

    def __bool__(self) -> bool:
        return bool(self.of_each(bool))

    def __hash__(self) -> int:
        self._refuse_method("__hash__")

    def __str__(self) -> str:
        self._refuse_method("__str__")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self._refuse_method("__repr__")

    def __format__(self, spec: str) -> str:
        self._refuse_method("__format__")

    def __round__(self, digits: int | None = None) -> NoReturn:
        self._refuse_method("__round__")

    def __trunc__(self) -> NoReturn:
        self._refuse_method("__trunc__")

    def __floor__(self) -> NoReturn:
        self._refuse_method("__floor__")

    def __ceil__(self) -> NoReturn:
        self._refuse_method("__ceil__")

    def __divmod__(self, other: Any) -> NoReturn:
        self._refuse_method("__divmod__")

    def __rdivmod__(self, other: Any) -> NoReturn:
        self._refuse_method("__rdivmod__")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_method("__reduce_ex__")

    def _refuse_method(self, method: str) -> NoReturn:
        raise NeedsMemberError(f"{method} is called on a float in which the members differ, {self.floats}")


def _operator(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The method of `StackedFloat` for a binary operator; `function` takes a member's float first."""
    of_tensors = getattr(Tensor, name)

    def method(self: StackedFloat, other: Any) -> Any:
        if isinstance(other, Tensor) and type(other) is not StackedFloat:
            return of_tensors(self, other)
        return self.of_each(function, other)

    return method


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda own, other: function(other, own)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(StackedFloat, f"__{_name}__", _operator(f"__{_name}__", _function))
    setattr(StackedFloat, f"__i{_name}__", _operator(f"__{_name}__", _function))  # a float is never changed in place
    setattr(StackedFloat, f"__r{_name}__", _operator(f"__r{_name}__", _reflected(_function)))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(StackedFloat, f"__{_name}__", _operator(f"__{_name}__", getattr(operator, _name)))


class Ragged(Stacked):
    """Tensors whose shapes differ between members; functions run on them member by member, but not in-place ones."""

    _rows: tuple[Tensor, ...] | None
    padded: Tensor | None
    """The members' tensors, padded to [B, *shape] and valid up to `sizes` on the last axis; None if unpadded."""
    sizes: Sequence[int]

    @staticmethod
    def __new__(cls, rows: tuple[Tensor, ...]) -> "Ragged":
        """Wrap plain tensors."""
        return cls._wrap(rows[0].shape, rows[0], any(row.requires_grad for row in rows), rows, None, ())

    @classmethod
    def of_padded(cls, padded: Tensor, sizes: Sequence[int]) -> "Ragged":
        """Wrap a padded tensor [B, *shape]; `sizes` are the members' sizes on the last axis."""
        return cls._wrap((*padded.shape[1:-1], sizes[0]), padded, padded.requires_grad, None, padded, sizes)

    @classmethod
    def _wrap(
        cls,
        shape: Sequence[int],
        like: Tensor,
        tracked: bool,
        rows: tuple[Tensor, ...] | None,
        padded: Tensor | None,
        sizes: Sequence[int],
    ) -> "Ragged":
        view = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device, requires_grad=tracked)
        view.floats, view._rows, view.padded, view.sizes = None, rows, padded, sizes
        return view

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The members' tensors."""
        if self._rows is None:
            assert self.padded is not None
            self._rows = tuple(one[..., :size] for one, size in zip(self.padded.unbind(0), self.sizes, strict=True))
        return self._rows

    @property
    def whole(self) -> NoReturn:  # type: ignore[override]
        """Refuse: tensors of different shapes have no stacked tensor."""
        shapes = ", ".join(str(tuple(row.shape)) for row in self.rows)
        raise NeedsMemberError(f"the members' results have different shapes: {shapes}")

    def parts(self) -> Sequence[Tensor]:
        """The members' tensors."""
        return self.rows


def refuse_custom_autograd(values: Iterable[Any]) -> None:
    """Refuse results of a custom `autograd.Function`, whose `apply` records its backward pass for the wrappers."""
    with torch._C.DisableTorchFunctionSubclass():
        for value in values:
            if isinstance(value, Stacked):
                if value.grad_fn is not None:
                    raise NeedsMemberError("a custom autograd function must run for one member at a time")
            elif isinstance(value, (list, tuple)):
                refuse_custom_autograd(value)


def member_count(tree: Any) -> int | None:
    """The number of members B of the first stacked tensor in nested arguments, or None."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Stacked):
            return len(leaf.whole)
    return None


def member_values(value: Any, members: int) -> Iterator[Any]:
    """Each member's value: the slices of a stacked tensor, or B times the same object for any other value."""
    return iter(value.parts()) if isinstance(value, Stacked) else iter([value] * members)


@dataclass
class Events:
    """Counts of events in functions of stacked tensors."""

    bypasses: int = 0


events = Events()


def agreed_value(values: list[Any]) -> Any:
    """Return the plain value in which all members agree."""
    first, *others = values
    if any(type(value) is not type(first) or _differ(value, first) for value in others):
        raise NeedsMemberError(f"a plain value is asked for, and the members hold {first!r} and others")
    return first


def _differ(value: Any, other: Any) -> bool:
    try:
        return bool(value != other)
    except (RuntimeError, ValueError):  # NumPy arrays, and containers of them, compare element by element
        return True


def stack(values: list[Any], uneven: Callable[[tuple[Tensor, ...]], Any] | None = None) -> Any:
    """Stack nested results of one structure, the inverse of `member_values`; plain values must agree between members.

    Where tensors differ in shape, `uneven`, such as `Ragged`, combines the members' tensors; without it they are
    refused.
    """
    leaves, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise NeedsMemberError("the members' results differ in structure")
    merged = [_stack_leaf(column, uneven) for column in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(merged, specs[0])


def _stack_leaf(column: tuple[Any, ...], uneven: Callable[[tuple[Tensor, ...]], Any] | None) -> Any:
    first = column[0]
    if not all(isinstance(value, Tensor) for value in column):
        return agreed_value(list(column))
    if uneven is not None and any(value.shape != first.shape for value in column):
        return uneven(column)
    if any(value.shape != first.shape or value.dtype != first.dtype for value in column):
        shapes = ", ".join(str(tuple(value.shape)) for value in column)
        raise NeedsMemberError(f"the members' results have different shapes: {shapes}")
    if first.layout is not torch.strided:
        raise NeedsMemberError("a sparse tensor has no axis for the members")
    return Stacked(torch.stack(column))
