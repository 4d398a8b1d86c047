"""How one torch function runs for all members: by its rule, else by vmap, else in a loop."""

import logging
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.randomness import current
from shoal.fuse.rules.table import RULES
from shoal.fuse.stacked import NeedsMemberError, Stacked, count, each, stack

__all__ = ["dispatch"]

_log = logging.getLogger("shoal.fuse")
_looped: set[Any] = set()
"""Functions that vmap has refused; they go to the loop at once."""

_TENSOR = object()
_VMAP_REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` for all members at once.

    Raises:
        NeedsMemberError: `func` must see one member at a time.
    """
    if not args and "input" in kwargs:  # torch's name for the first argument nearly everywhere
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    try:
        rule = RULES.get(func)
        if rule is not None:
            result = rule(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func not in _looped:
            try:
                return _vmap(func, args, kwargs)
            except _VMAP_REFUSALS as refusal:
                result = _loop(func, args, kwargs)  # an error of the user's own is raised again from here
                _looped.add(func)
                _log.info("%s runs in a loop over the members: %s", _name(func), str(refusal).split("\n")[0])
                return result
        return _loop(func, args, kwargs)
    except NeedsMemberError:
        raise
    except Exception as error:
        error.add_note(f"in {_name(func)} of {count((args, kwargs))} members, for one member: {_describe(args, kwargs)}")
        raise


def _vmap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]
    static: list[Any] = []

    def one(*members: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, member in zip(where, members, strict=True):
            filled[i] = member
        inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
        out, out_spec = pytree.tree_flatten(func(*inner_args, **inner_kwargs))
        static[:] = [out_spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in out]]
        return [leaf for leaf in out if isinstance(leaf, Tensor)]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # vmap's own loop within a function
        results = iter(torch.func.vmap(one, randomness="error")(*[leaves[i].all for i in where]))
    out_spec, plain = static
    merged = [Stacked(next(results)) if leaf is _TENSOR else leaf for leaf in plain]
    return _same_if_in_place(func, args, pytree.tree_unflatten(merged, out_spec))


def _loop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    members = count(leaves)
    keys = current(members).next().tolist()
    columns = [each(leaf, members) for leaf in leaves]
    results = []
    devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda})
    with torch.random.fork_rng(devices=devices):
        for key, values in zip(keys, zip(*columns, strict=True), strict=True):
            torch.manual_seed(key)
            member_args, member_kwargs = pytree.tree_unflatten(list(values), spec)
            results.append(func(*member_args, **member_kwargs))
    return _same_if_in_place(func, args, stack(results))


def _same_if_in_place(func: Any, args: tuple[Any, ...], result: Any) -> Any:
    """An in-place function returns its first argument, as it does outside of arrays."""
    name = _name(func)
    if name.endswith("_") and (not name.endswith("__") or name.startswith("__i")) and args:
        if not isinstance(args[0], Stacked):
            raise NeedsMemberError(f"{name} changes a tensor that all members share")
        return args[0]
    return result


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            kind = "each" if isinstance(value, Stacked) else "shared"
            return f"{kind} {tuple(value.shape)}"
        return repr(value)

    shown = [show(arg) for arg in args] + [f"{name}={show(arg)}" for name, arg in kwargs.items()]
    return ", ".join(shown)


Stacked.dispatch = staticmethod(dispatch)
