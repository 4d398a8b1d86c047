"""The contract of a rule: how functions run for all members of an array at once."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.overrides import handle_torch_function
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.autotune import fastest
from shoal.fuse.stacked import Stacked, count, stack

__all__ = ["Layout", "Rule", "channel_major", "merge_channels", "named", "split_channels"]

_log = logging.getLogger("shoal.fuse")

Lowering = Callable[..., Any]
"""The results of all members."""


class Layout(Enum):
    """How tensors [N, C, ...] of B members lie in memory; they are handed on as [B, N, C, ...] in either case."""

    MODEL_MAJOR = "[B, N, C, ...]"
    CHANNEL_MAJOR = "[N, B*C, ...]"


@dataclass(frozen=True, eq=False)
class Rule:
    """How some functions run for all members of an array at once.

    `shoal.fuse.dispatch.dispatch` calls `run` instead of the function wherever an argument is each member's own: in any
    thread, in the forward and the backward pass, in eager steps and while a step is traced. The default `run` first
    asks `declines`, then calls one of the lowerings. Without a rule, and where the rule declines, a function runs by
    `torch.func.vmap`, or for one member after another where vmap refuses it: so a rule is about speed alone.

    What it may return: the members' own results, with their own gradients. It writes to no argument and draws no random
    numbers. What may be raised: a lowering may raise what torch raises of wrong arguments; the function then runs for
    one member after another, so that the message is torch's own. `torch.OutOfMemoryError` and `FusionError` are passed
    on.

    `shoal.testing.check_rule` checks this contract.

    Args:
        functions: that have `__torch_function__` overrides: torch's own, an operator (`torch.library.custom_op`), or a
            function decorated by `torch.overrides.wrap_torch_function`.
        lowerings: ways to compute the same, by name, the default first. Each is called as the function is, with the
            tensors of all members, [B, *shape], in the place of tensors (of one that they share a view), and returns
            what the function does with tensors [B, ...]. The fastest one is taken, as measured once for each shape; one
            member after another is always among them.
        takes: memory layouts that the lowerings compute on. By default any, also views; of a single one they are given
            tensors that are contiguous in it.
        gives: the layout of results, of arguments of that layout; None promises nothing.
        declines: called as the function is; tensors have one member's shape. A reason why the lowerings do not cover
            such arguments, or None. Numbers in which members differ are always declined.
        run: instead of all this, called with the function and its arguments, `Stacked` or shared by all members; for
            rules whose ways depend on what is shared. Returns the members' result, `Stacked`, or NotImplemented to
            decline, and raises nothing but `NeedsMemberError`: no result of all members at once can exist.

    Raises:
        FusionError: there is no function or no lowering, or a function that no array could ever see.
    """

    functions: tuple[Any, ...]
    lowerings: Mapping[str, Lowering]
    takes: tuple[Layout, ...] = tuple(Layout)
    gives: Layout | None = None
    declines: Callable[..., str | None] | None = None
    run: Callable[..., Any] = None  # type: ignore[assignment]  # filled in

    def __post_init__(self) -> None:
        if not self.functions or not self.lowerings:
            raise FusionError(f"a rule needs functions and lowerings, got {self.functions!r} and {self.lowerings!r}")
        object.__setattr__(self, "functions", tuple(one for func in self.functions for one in _overridable(func)))
        if self.run is None:
            object.__setattr__(self, "run", self._fastest)

    @classmethod
    def direct(cls, run: Callable[..., Any], *functions: Any, gives: Layout | None = None) -> "Rule":
        """A rule with a `run` of its own, which is its only lowering and takes any layout."""
        return cls(functions, {"at once": run}, gives=gives, run=run)

    def _fastest(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The default of `run`."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Stacked) and leaf.numbers is not None for leaf in leaves):
            return NotImplemented
        reason = None if self.declines is None else self.declines(*args, **kwargs)
        if reason is not None:
            _say(f"the rule of {func} declines: {reason}")
            return NotImplemented
        members = count(leaves) or 1
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def filled(tensors: Iterable[Tensor]) -> tuple[Any, Any]:
            given = list(leaves)
            for i, tensor in zip(places, tensors, strict=True):
                given[i] = tensor
            own_args, own_kwargs = pytree.tree_unflatten(given, spec)
            return own_args, own_kwargs

        def call(lowering: Lowering, *tensors: Tensor) -> Any:
            own_args, own_kwargs = filled(tensors)
            return lowering(*own_args, **own_kwargs)

        def loop(*tensors: Tensor) -> Any:
            rows = zip(*(tensor.unbind(0) for tensor in tensors), strict=True)
            results = stack([call(func, *row) for row in rows])
            return pytree.tree_map_only(Stacked, lambda result: result.whole, results)

        ways: dict[str, Lowering] = {name: partial(call, lowering) for name, lowering in self.lowerings.items()}
        ways.setdefault("loop", loop)
        settings = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        result = fastest(name_of(func), ways, [self._data(leaves[i], members) for i in places], settings)
        return pytree.tree_map_only(Tensor, Stacked, result)

    def _data(self, value: Tensor, members: int) -> Tensor:
        """All members' data, [B, *shape], in a layout that the lowerings take."""
        data = value.whole if isinstance(value, Stacked) else value.expand(members, *value.shape)
        if len(self.takes) > 1:
            return data
        if self.takes == (Layout.CHANNEL_MAJOR,) and data.dim() > 2:
            return data.transpose(0, 1).contiguous().transpose(0, 1)
        return data.contiguous()


def name_of(func: Any) -> str:
    """The name under which a function's lowerings are measured."""
    return str(getattr(func, "__name__", func))


@lru_cache(maxsize=256)
def _say(text: str) -> None:
    """In the log, once."""
    _log.info(text)


def _overridable(func: Any) -> Iterator[Any]:
    """What an array sees when a function is called."""
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        raise FusionError(
            f"{func.__name__}.apply has no overrides; call it in a function decorated by "
            "torch.overrides.wrap_torch_function, and register that"
        )
    if isinstance(func, CustomOpDef):
        yield from (func._opoverload, func._opoverload.overloadpacket)
        return
    own = isinstance(func, FunctionType) and not func.__module__.startswith("torch.")
    if own and handle_torch_function.__name__ not in func.__code__.co_names:
        raise FusionError(
            f"{func.__qualname__} has no overrides, so no rule would be found when it is called; decorate it by "
            "torch.overrides.wrap_torch_function(lambda x, weight: (x, weight)), which names its tensors"
        )
    yield func


def named(names: str, *homes: Any) -> tuple[Any, ...]:
    """Torch's functions of some names, by default those of `torch` and the methods of `Tensor`, where they exist."""
    pairs = [(home, name) for home in homes or (torch, Tensor) for name in names.split()]
    found = [getattr(home, name, None) for home, name in pairs if home is Tensor or not name.startswith("__")]
    return tuple(func for func in dict.fromkeys(found) if callable(func))  # `torch.float` is a type


def channel_major(data: Tensor) -> bool:
    """Whether B and C are neighbours in the memory of [B, N, C, ...], so that [N, B*C, ...] is a view."""
    return data.stride(0) == data.shape[2] * data.stride(2)


def merge_channels(data: Tensor) -> Tensor:
    """[B, N, C, ...] -> [N, B*C, ...]; a view where the memory is channel-major already."""
    return data.transpose(0, 1).flatten(1, 2)


def split_channels(data: Tensor, members: int) -> Tensor:
    """[N, B*C, ...] -> [B, N, C, ...], a view."""
    shape = (data.shape[0], members, data.shape[1] // members, *data.shape[2:])
    return data.view(shape).transpose(0, 1)
