"""Which torch functions write to their arguments."""

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from shoal.fuse.stacked import NeedsMemberError

__all__ = ["TRACKING", "WRITES_INSIDE", "tracks", "written"]

WRITES_INSIDE = {
    F.embedding,  # max_norm
    F.embedding_bag,
    F.batch_norm,  # running statistics
    F.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
}
"""Functions that write to a table or to statistics, which they do not return."""

TRACKING = frozenset({F.batch_norm, F.instance_norm})
"""Functions that may update running statistics."""

_OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_DUNDERS = {f"__i{name}__" for name in _OPERATORS.split()} | {"__setitem__", "__set__", "__delitem__"}
_NEVER = 1_000
"""A place among the arguments that no function has."""


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The arguments that an in-place function changes and returns: its first one, or `out`.

    Raises:
        NeedsMemberError: a custom operator changes some of its arguments, and returns what it likes.
    """
    in_place, switch = _kind(func)
    if not in_place and not kwargs and len(args) <= switch:  # most often
        return ()
    changed = []
    if args and (in_place or (len(args) > switch and args[switch])):
        changed.append(args[0])
    if kwargs:
        if in_place and not args and "tensor" in kwargs:  # the name of the first argument in `torch.nn.init`
            changed.append(kwargs["tensor"])
        if args and not changed and kwargs.get("inplace"):
            changed.append(args[0])
        out = kwargs.get("out")
        if out is not None:
            changed += out if isinstance(out, (tuple, list)) else [out]
    return changed


def tracks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does a norm, (input, running mean, running variance, weight, bias, training, ...), update its statistics?"""
    if func not in TRACKING:
        return False
    mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
    named = kwargs.get("training", False) or kwargs.get("use_input_stats", False)
    return mean is not None and bool(args[5] if len(args) > 5 else named)


@cache
def _kind(func: Any) -> tuple[bool, int]:
    """Is it in place by its name, and where does its argument `inplace` stand?"""
    overloads = [func] if isinstance(func, OpOverload) else []
    if isinstance(func, OpOverloadPacket):
        overloads = [getattr(func, name) for name in func.overloads()]  # type: ignore[no-untyped-call]
    if any(one.namespace != "aten" and one._schema.is_mutable for one in overloads):
        raise NeedsMemberError(f"{func} changes its arguments")
    name = getattr(func, "__name__", "")
    code = func.__code__ if isinstance(func, FunctionType) else None
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    switch = names.index("inplace") if "inplace" in names else _NEVER
    return name in _DUNDERS or (name.endswith("_") and not name.endswith("__")), switch
