"""Torch functions while an array runs: those on stacked tensors, and those that draw random numbers for anyone."""

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from shoal.errors import FusionError
from shoal.fuse.dispatch import dispatch
from shoal.fuse.draws import draws
from shoal.fuse.randomness import Randomness, active
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.writes import written

__all__ = ["MemberFunctions"]


class MemberFunctions(TorchFunctionMode):
    """Gives each member random numbers of its own, also where all tensors at hand are shared, or belong to one member.
    Args:
        members: how many run.
        source: of their random numbers.
    """

    def __init__(self, members: int, source: Randomness) -> None:
        super().__init__()
        self._members = members
        self._alone = source.alone

    def __enter__(self) -> Self:
        CheckpointFunction.apply = classmethod(_refuse)  # type: ignore[assignment,method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        del CheckpointFunction.apply

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function comes through here, with or without tensors."""
        kwargs = kwargs or {}
        if Stacked not in types:
            if func is Tensor.__deepcopy__ and not args[0].is_leaf:
                return _new_leaf(*args)
            if draws(func, args, kwargs):
                return self._draw(func, args, kwargs)
            if not self._alone and func in _ASKS_FOR_GRADIENT and args[1:] in ((), (True,)):
                raise NeedsMemberError(
                    "a tensor that all members share is to have a gradient, which each has of its own"
                )
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return dispatch(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = written(func, args, kwargs)
        if changed and not self._alone:
            raise NeedsMemberError(f"{func.__name__} writes random numbers to a tensor that all members share")
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = pytree.tree_map_only(Tensor, self._lift, (args, kwargs))
            result = dispatch(func, args, kwargs)
        return changed[-1] if changed else _plain(result)

    def _lift(self, x: Tensor) -> Stacked:
        return Stacked(x.expand(self._members, *x.shape))


_ASKS_FOR_GRADIENT = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


def _plain(result: Any) -> Any:
    """What a member that runs alone is given: its own tensors."""
    source = active()
    if source is None or not source.alone:
        return result
    return pytree.tree_map_only(Stacked, lambda x: x.whole[0], result)


def _new_leaf(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of what is a parameter to user code, and to autograd a row of the stacked one."""
    memo[id(x)] = copied = nn.Parameter(x.detach().clone(), x.requires_grad)
    return copied


def _refuse(cls: Any, *args: Any) -> Any:
    raise FusionError(
        "torch.utils.checkpoint(use_reentrant=True) runs the model once more behind the array's back; "
        "pass use_reentrant=False"
    )
