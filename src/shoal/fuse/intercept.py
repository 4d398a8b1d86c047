"""Intercepts torch functions while an array runs: functions of stacked tensors, and random functions."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.dispatch import dispatch
from shoal.fuse.patches import begun_checkpoints, close_checkpoints, install_patches, remove_patches
from shoal.fuse.randomness import RandomSource, active_source, use_source
from shoal.fuse.rows import members_without_grad, record_row_grad
from shoal.fuse.rules.attention import multi_head_without_overrides
from shoal.fuse.side_effects import (
    RANDOM_FUNCTIONS,
    STATISTICS_FUNCTIONS,
    draws_random,
    updates_statistics,
    written_arguments,
)
from shoal.fuse.stacked import NeedsMemberError, Ragged, Stacked

__all__ = ["FunctionInterceptor", "RowLookup", "member_run"]


RowLookup = Callable[[Tensor], tuple[Tensor, int] | None]
"""Function that maps a tensor to the stacked parameter of which it is a row, and the row's index; else to None."""


class FunctionInterceptor(TorchFunctionMode):
    """Torch function mode that runs functions for all members, and gives each member its own random numbers.

    Random functions are intercepted even if all of their tensors are shared, or belong to one member. The mode is idle
    while another source of random numbers is active: a single member then runs on its own within the array's run.

    Args:
        members: Number of members that run.
        source: Source of their random numbers.
        row_lookup: Lookup of stacked parameters, if a single member runs on rows of them, so that its gradients go to
            rows of the stacked gradients. It may refuse access to a tensor's gradient.
    """

    def __init__(self, members: int, source: RandomSource, row_lookup: RowLookup | None = None) -> None:
        super().__init__()
        self._members = members
        self._source = source
        self._single_member = source.single_member
        self._row_lookup = row_lookup

    def __enter__(self) -> Self:
        install_patches()
        self._begun_checkpoints = begun_checkpoints()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        close_checkpoints(self._begun_checkpoints)
        remove_patches()

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, with or without tensors."""
        kwargs = kwargs or {}
        source = active_source()
        if source is not self._source:
            if source is None:  # a thread of autograd, which inherits the modes of the caller of `backward`
                with use_source(self._source):
                    return self.__torch_function__(func, types, args, kwargs)
            return func(*args, **kwargs)
        if Ragged in types:
            with torch._C.DisableTorchFunctionSubclass():
                return Ragged.dispatch(func, args, kwargs)
        if Stacked not in types:
            floats = not self._single_member and _given_floats(args, kwargs)
            if func in _INTERCEPTED and (not floats or draws_random(func, args, kwargs)):
                return self._run_intercepted(func, args, kwargs)
            if not floats:
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return dispatch(func, args, kwargs)

    def _run_intercepted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of plain tensors that must not run as in plain PyTorch."""
        if self._single_member and func is F.multi_head_attention_forward:
            with FunctionInterceptor(1, self._source, self._row_lookup):  # only functions in it draw
                return multi_head_without_overrides(*args, **kwargs)
        if draws_random(func, args, kwargs):
            return self._draw(func, args, kwargs)
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return _new_leaf(*args)
        if (
            self._row_lookup is not None
            and func in _ROW_ATTRIBUTES
            and (found := self._row_lookup(args[0])) is not None
        ):
            return True if func == _IS_LEAF else _gradient_of_row(*found, *args[1:])
        if self._row_lookup is not None and func in _REQUIRES_GRAD_SETTERS and self._row_lookup(args[0]) is not None:
            if (*args[1:], True)[0] == args[0].requires_grad:
                return args[0]
            raise FusionError(
                "a parameter is frozen or unfrozen while the model runs (as by peft's `disable_adapter`), which works "
                "in plain PyTorch only; use a model of its own without the adapter instead"
            )
        if not self._single_member and func in _REQUIRES_GRAD_SETTERS and args[1:] in ((), (True,)):
            raise NeedsMemberError("`requires_grad` is set on a tensor that all members share")
        if not self._single_member and updates_statistics(func, args, kwargs):
            raise NeedsMemberError(f"{func.__name__} updates statistics that all members share")
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = written_arguments(func, args, kwargs)
        if changed and not self._single_member:
            raise NeedsMemberError(f"{func.__name__} writes random numbers to a tensor that all members share")
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(value, _NESTED) for value in args) or any(map(_holds_tensors, kwargs.values())):
                args, kwargs = pytree.tree_map_only(Tensor, self._lift, (args, kwargs))
            else:
                args = tuple(self._lift(value) if isinstance(value, Tensor) else value for value in args)
            result = dispatch(func, args, kwargs)
        if changed:
            return changed[-1]
        return self._lower(result) if self._single_member else result

    def _lift(self, x: Tensor) -> Stacked:
        if isinstance(x, Stacked):
            return x
        return Stacked(x.unsqueeze(0) if self._single_member else x.expand(self._members, *x.shape))

    def _lower(self, result: Any) -> Any:
        """The results of a single member that runs on its own, as plain tensors."""
        if isinstance(result, Stacked):
            return result.whole.squeeze(0)
        return pytree.tree_map_only(Stacked, self._lower, result)


@contextmanager
def member_run(source: RandomSource, row_lookup: RowLookup | None = None) -> Iterator[RandomSource]:
    """Context manager in which a single member runs on plain tensors and draws from `source`.

    Args:
        source: Source of the member's random numbers.
        row_lookup: As for `FunctionInterceptor`.
    """
    with use_source(source), FunctionInterceptor(1, source, row_lookup):
        yield source


_NESTED = (tuple, list, dict)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, *_NESTED))


def _given_floats(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether floats in which members differ are among the arguments of a function; torch's `types` omits them."""
    for value in args:
        if isinstance(value, Stacked):
            return True
    return bool(kwargs) and any(isinstance(value, Stacked) for value in kwargs.values())


def _gradient_of_row(stacked: Tensor, b: int, *value: Tensor | None) -> Tensor | None:
    """Get the gradient of a row of a stacked parameter; with a value, set it."""
    if not value:
        return None if stacked.grad is None or b in members_without_grad(stacked) else stacked.grad[b]
    if len(stacked) > 1:
        record_row_grad(stacked, b, has=value[0] is not None)
    if value[0] is None and len(stacked) == 1:
        stacked.grad = None
    elif value[0] is None:
        if stacked.grad is not None:
            stacked.grad[b].zero_()  # zeros stand for no gradient, since other members have one
    else:
        if stacked.grad is None:
            stacked.grad = torch.zeros_like(stacked)
        stacked.grad[b].copy_(value[0])
    return None


_IS_LEAF = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_ROW_ATTRIBUTES = {_IS_LEAF, Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
"""Attributes of a row that user code must see as those of a parameter."""
_REQUIRES_GRAD_SETTERS = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_INTERCEPTED = frozenset(
    {Tensor.__deepcopy__, *_ROW_ATTRIBUTES, *_REQUIRES_GRAD_SETTERS, *RANDOM_FUNCTIONS, *STATISTICS_FUNCTIONS}
)


def _new_leaf(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a row of a stacked parameter into a new parameter; user code sees the row as a parameter."""
    memo[id(x)] = copied = nn.Parameter(x.detach().clone(), x.requires_grad)
    return copied
