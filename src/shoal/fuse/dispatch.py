"""How one torch function runs for all members: by its rule, else by vmap, else in a loop."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.copies import note_copy, one_memory, refuse_stale
from shoal.fuse.draws import draws
from shoal.fuse.generators import forked
from shoal.fuse.quiet import Hidden
from shoal.fuse.randomness import active, current
from shoal.fuse.rules.table import RULES
from shoal.fuse.stacked import NeedsMemberError, SharedWriteError, Stacked, count, each, refuse_recorded, stack
from shoal.fuse.undo import before_write
from shoal.fuse.writes import tracks, writes, written

__all__ = ["dispatch", "loop"]

_log = logging.getLogger("shoal.fuse")
_looped: set[Any] = set()
"""Functions that vmap has refused; they go to the loop at once."""

_slow_vmap = Hidden("There is a performance drop")
"""Of a loop inside of vmap."""

_TENSOR = object()
_REFUSALS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` for all members at once.

    A rule or vmap may fail on arguments that are wrong or that it cannot handle; the loop then tells which, in torch's
    own words for one member.

    Raises:
        NeedsMemberError: `func` must see one member at a time.
    """
    for value in args:  # most often there is nothing to refuse
        if isinstance(value, Stacked):
            if value.grad_fn is not None:
                refuse_recorded(args)
        elif isinstance(value, (list, tuple)):
            refuse_recorded(value)
    if not args and "input" in kwargs and "condition" not in kwargs:  # torch's name for the first argument
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    changed = written(func, args, kwargs)
    for tensor in changed:
        if isinstance(tensor, Tensor) and not isinstance(tensor, Stacked):
            raise SharedWriteError(_name(func), tensor)
    if changed:
        refuse_stale(_name(func), changed)
        before_write(func, changed)
    rule = RULES.get(func)
    refusal = None
    try:
        try:
            if rule is not None:
                result = rule(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if tracks(func, args, kwargs) and len(args) > 1 and not isinstance(args[1], Stacked):
                raise NeedsMemberError(f"{_name(func)} updates statistics that all members share")
            if _vmaps(func) and not writes(func, args, kwargs) and not draws(func, args, kwargs):
                return _vmap(func, args, kwargs)
        except (torch.OutOfMemoryError, FusionError):
            raise
        except _REFUSALS as error:
            if changed and not isinstance(error, NotImplementedError):  # not twice
                raise
            refusal = str(error).split("\n")[0]
        result = loop(func, args, kwargs)
        if refusal is not None and rule is None:
            _looped.add(func)
            _log.info("%s runs in a loop over the members: %s", _name(func), refusal)
        return changed[-1] if changed else result
    except NeedsMemberError:
        raise
    except Exception as error:
        error.add_note(f"in {_name(func)} of {count((args, kwargs))} members, for one member: {_show(args, kwargs)}")
        raise


def _vmaps(func: Any) -> bool:
    """Autocast decides by function, and vmap shows it what a function is made of."""
    return func not in _looped and not torch._C._is_any_autocast_enabled()


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

    with _slow_vmap():
        results = iter(torch.func.vmap(one, randomness="error")(*[leaves[i].whole for i in where]))
    out_spec, plain = static
    merged = [Stacked(next(results)) if leaf is _TENSOR else leaf for leaf in plain]
    return pytree.tree_unflatten(merged, out_spec)


def loop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seeded: bool = False) -> Any:
    """Run `func` for one member after another.

    Args:
        func: any function of tensors.
        args: positional arguments, stacked or shared.
        kwargs: keyword arguments, stacked or shared.
        seeded: draw from torch's default generators, seeded by each member's key, as functions known to draw do.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    source = active()
    members = count(leaves) or (len(source.keys) if source else 1)
    in_place = writes(func, args, kwargs)
    columns = [_slices(leaf, members) if in_place else each(leaf, members) for leaf in leaves]
    rows = zip(*columns, strict=True) if columns else [()] * members
    calls = (pytree.tree_unflatten(list(values), spec) for values in rows)
    if not seeded and not draws(func, args, kwargs):
        own = [func(*own_args, **own_kwargs) for own_args, own_kwargs in calls]
        result = stack(own)
        if not in_place:
            _note_views(leaves, own[0], result)
        return result
    devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda})
    if not devices and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # seeded as well
        devices = [torch.cuda.current_device()]
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
    results, listed = [], list(calls)
    drawing = None if seeded else [draws(func, *call) for call in listed]
    with forked(devices):
        for key, (own_args, own_kwargs) in zip(current(members).next(drawing).tolist(), listed, strict=True):
            for generator in generators:  # `torch.manual_seed` looks for more of them, which takes half a millisecond
                generator.manual_seed(key)
            results.append(func(*own_args, **own_kwargs))
    return stack(results)


def _note_views(leaves: list[Any], own: Any, result: Any) -> None:
    """Remember which results were views of arguments before they were brought together.

    Args:
        leaves: the arguments, stacked or shared.
        own: what the first member got.
        result: what all of them got.
    """
    for view, copy in zip(pytree.tree_leaves(own), pytree.tree_leaves(result), strict=True):
        for leaf in leaves:
            if isinstance(copy, Stacked) and isinstance(leaf, Stacked) and one_memory(view, leaf.whole):
                note_copy(leaf.whole, copy.whole)


def _slices(value: Any, members: int) -> Iterator[Any]:
    """Like `each`, for values that may be written to: a slice is taken only after the one before it was written."""
    if not isinstance(value, Stacked) or value.numbers is not None:
        yield from each(value, members)
    else:
        for b in range(members):
            yield value.whole[b]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _show(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{'each' if isinstance(value, Stacked) else 'shared'} {tuple(value.shape)}"
        return repr(value)

    return ", ".join([*map(show, args), *(f"{name}={show(value)}" for name, value in kwargs.items())])


Stacked.dispatch = staticmethod(dispatch)
