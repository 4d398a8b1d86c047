"""Intercepts torch functions while an array runs: those on stacked tensors, and those that draw random numbers."""

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
from shoal.fuse.patches import stand_in, step_back
from shoal.fuse.randomness import Randomness, active, randomness
from shoal.fuse.rows import absent, note_row
from shoal.fuse.rules.attention import multi_head_parts
from shoal.fuse.side_effects import DRAWING, TRACKING, draws, tracks, written
from shoal.fuse.stacked import NeedsMemberError, Ragged, Stacked

__all__ = ["Home", "MemberFunctions", "member_run"]


Home = Callable[[Tensor], tuple[Tensor, int] | None]
"""Function that maps a tensor to the stacked parameter of which it is a row, and the row's index; None if none."""


class MemberFunctions(TorchFunctionMode):
    """Gives each member its own random numbers, also if all tensors of a function are shared or belong to one member.

    It is idle while another source of random numbers is active: a member then runs by itself within the array's run.

    Args:
        members: Number of members that run.
        source: Source of their random numbers.
        home: Lookup of stacked parameters, if a member runs by itself on rows of them, so that its gradients go to the
            rows of the stacked gradients. It may refuse access to a tensor's gradient.
    """

    def __init__(self, members: int, source: Randomness, home: Home | None = None) -> None:
        super().__init__()
        self._members = members
        self._source = source
        self._alone = source.alone
        self._home = home

    def __enter__(self) -> Self:
        stand_in()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        step_back()

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, with or without tensors."""
        kwargs = kwargs or {}
        source = active()
        if source is not self._source:
            if source is None:  # in a thread of autograd's, which gets the modes of the caller of `backward`
                with randomness(self._source):
                    return self.__torch_function__(func, types, args, kwargs)
            return func(*args, **kwargs)
        if Ragged in types:
            with torch._C.DisableTorchFunctionSubclass():
                return Ragged.dispatch(func, args, kwargs)
        if Stacked not in types:
            numbers = not self._alone and _given_numbers(args, kwargs)
            if func in _WATCHED and (not numbers or draws(func, args, kwargs)):
                return self._watched(func, args, kwargs)
            if not numbers:
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return dispatch(func, args, kwargs)

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of plain tensors that has another meaning for all members than for one."""
        if self._alone and func is F.multi_head_attention_forward:
            with MemberFunctions(1, self._source, self._home):  # some of its parts draw
                return multi_head_parts(*args, **kwargs)
        if draws(func, args, kwargs):
            return self._draw(func, args, kwargs)
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return _new_leaf(*args)
        if self._home is not None and func in _OF_A_ROW and (found := self._home(args[0])) is not None:
            return True if func == _IS_LEAF else _gradient_of_row(*found, *args[1:])
        if self._home is not None and func in _ASKS_FOR_GRADIENT and self._home(args[0]) is not None:
            if (*args[1:], True)[0] == args[0].requires_grad:
                return args[0]
            raise FusionError(
                "a parameter is frozen or unfrozen while the model runs (as by peft's `disable_adapter`), which works "
                "in plain PyTorch only; use a model of its own without the adapter instead"
            )
        if not self._alone and func in _ASKS_FOR_GRADIENT and args[1:] in ((), (True,)):
            raise NeedsMemberError("a tensor that all members share is to have a gradient, which each has of its own")
        if not self._alone and tracks(func, args, kwargs):
            raise NeedsMemberError(f"{func.__name__} updates statistics that all members share")
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = written(func, args, kwargs)
        if changed and not self._alone:
            raise NeedsMemberError(f"{func.__name__} writes random numbers to a tensor that all members share")
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(value, _NESTED) for value in args) or any(map(_holds_tensors, kwargs.values())):
                args, kwargs = pytree.tree_map_only(Tensor, self._lift, (args, kwargs))
            else:
                args = tuple(self._lift(value) if isinstance(value, Tensor) else value for value in args)
            result = dispatch(func, args, kwargs)
        if changed:
            return changed[-1]
        return self._lower(result) if self._alone else result

    def _lift(self, x: Tensor) -> Stacked:
        if isinstance(x, Stacked):
            return x
        return Stacked(x.unsqueeze(0) if self._alone else x.expand(self._members, *x.shape))

    def _lower(self, result: Any) -> Any:
        """Results for a member that runs by itself, as plain tensors."""
        if isinstance(result, Stacked):
            return result.whole.squeeze(0)
        return pytree.tree_map_only(Stacked, self._lower, result)


@contextmanager
def member_run(source: Randomness, home: Home | None = None) -> Iterator[Randomness]:
    """Within, one member runs by itself, on plain tensors, and draws from `source`; `home` as for `MemberFunctions`."""
    with randomness(source), MemberFunctions(1, source, home):
        yield source


_NESTED = (tuple, list, dict)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (Tensor, *_NESTED))


def _given_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether members' own numbers are among the options of a function of shared tensors; `types` omits numbers."""
    for value in args:
        if isinstance(value, Stacked):
            return True
    return bool(kwargs) and any(isinstance(value, Stacked) for value in kwargs.values())


def _gradient_of_row(stacked: Tensor, b: int, *value: Tensor | None) -> Tensor | None:
    """Get the gradient of a row of a stacked parameter; with a value, set it."""
    if not value:
        return None if stacked.grad is None or b in absent(stacked) else stacked.grad[b]
    if len(stacked) > 1:
        note_row(stacked, b, has=value[0] is not None)
    if value[0] is None and len(stacked) == 1:
        stacked.grad = None
    elif value[0] is None:
        if stacked.grad is not None:
            stacked.grad[b].zero_()  # stands for no gradient, since other members have one
    else:
        if stacked.grad is None:
            stacked.grad = torch.zeros_like(stacked)
        stacked.grad[b].copy_(value[0])
    return None


_IS_LEAF = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_OF_A_ROW = {_IS_LEAF, Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
"""Attributes of a row that user code must see as those of a parameter."""
_ASKS_FOR_GRADIENT = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_WATCHED = frozenset({Tensor.__deepcopy__, *_OF_A_ROW, *_ASKS_FOR_GRADIENT, *DRAWING, *TRACKING})


def _new_leaf(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy a row of a stacked parameter, which user code sees as a parameter, as a parameter."""
    memo[id(x)] = copied = nn.Parameter(x.detach().clone(), x.requires_grad)
    return copied
