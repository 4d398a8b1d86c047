"""`Rule`: the contract of a fusion rule, which runs torch functions for all members of an array at once."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.autotune import fastest
from shoal.fuse.stacked import Stacked, member_count, stack
from shoal.fuse.torch_functions import has_overrides, is_replacement, torch_function

__all__ = [
    "Layout",
    "Rule",
    "channel_major",
    "functions_named",
    "merge_channels",
    "name_of",
    "split_channels",
    "stacked_data",
]

_log = logging.getLogger("shoal.fuse")

Lowering = Callable[..., Any]
"""Called with all members' tensors, [B, *shape]; returns the results of all members, [B, ...]."""


class Layout(Enum):
    """Memory layout of B members' tensors [N, C, ...]; their shape is [B, N, C, ...] in either layout."""

    MODEL_MAJOR = "[B, N, C, ...]"
    CHANNEL_MAJOR = "[N, B*C, ...]"


@dataclass(frozen=True, eq=False)
class Rule:
    """A fusion rule: runs some torch functions for all members of an array at once.

    `shoal.fuse.intercept.dispatch` calls `run` instead of the function if members differ in an argument: in any thread,
    in the forward and the backward pass, in eager steps and while a step is traced. The default `run` first calls
    `declines`, then one of the lowerings. Without a rule, and if the rule declines, a function runs by
    `torch.func.vmap`, or for one member after another if vmap fails. So a rule changes the speed, but not the results.

    A rule may return only what the function returns for each member, with the same gradients. It writes to no
    argument and draws no random numbers. A lowering may raise the errors that torch raises for wrong arguments; the
    function then runs for one member after another, so that the message is torch's own. `torch.OutOfMemoryError` and
    `FusionError` propagate.

    `shoal.testing.check_rule` checks this contract.

    Args:
        functions: Functions with `__torch_function__` overrides: torch's own, an operator (`torch.library.custom_op`),
            or a function decorated by `torch.overrides.wrap_torch_function`.
        lowerings: Name -> implementation of the function for all members, the default first. A lowering takes the
            function's arguments, with tensors `[B, *shape]` in place of one member's tensors (for a shared tensor, an
            expanded view), and returns the function's result with tensors [B, ...]. Each shape is measured once and
            runs by the fastest lowering; a loop over the members is always a candidate.
        input_layouts: Memory layouts that the lowerings accept. By default any, including views; with a single layout,
            tensors are made contiguous in this layout.
        output_layout: Layout of the results for arguments of the same layout; None for no guarantee.
        declines: Function of the function's arguments, with tensors of one member's shape. It returns a reason if the
            lowerings do not support these arguments, else None. Floats in which members differ are always declined.
        run: Replacement of the lowerings, for rules that depend on which arguments are shared. It takes the function
            and its arguments, each `Stacked` or shared by all members. It returns the members' result, `Stacked`, or
            NotImplemented to decline. It raises only `NeedsMemberError`, if there is no result for all members at once.

    Raises:
        FusionError: There is no function or no lowering, or a function has no overrides.
    """

    functions: tuple[Any, ...]
    lowerings: Mapping[str, Lowering]
    input_layouts: tuple[Layout, ...] = tuple(Layout)
    output_layout: Layout | None = None
    declines: Callable[..., str | None] | None = None
    run: Callable[..., Any] = None  # type: ignore[assignment]  # set in `__post_init__`

    def __post_init__(self) -> None:
        if not self.functions or not self.lowerings:
            raise FusionError(f"a rule needs functions and lowerings, got {self.functions!r} and {self.lowerings!r}")
        object.__setattr__(self, "functions", tuple(one for func in self.functions for one in _overridable(func)))
        if self.run is None:
            object.__setattr__(self, "run", self._fastest)

    @classmethod
    def direct(cls, run: Callable[..., Any], *functions: Any, output_layout: Layout | None = None) -> "Rule":
        """A rule with a custom `run`, which is its only lowering and takes any layout."""
        return cls(functions, {"at once": run}, output_layout=output_layout, run=run)

    def _fastest(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The default `run`: the fastest of the lowerings and a loop over the members."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, Stacked) and leaf.floats is not None for leaf in leaves):
            return NotImplemented
        reason = None if self.declines is None else self.declines(*args, **kwargs)
        if reason is not None:
            _log_once(f"the rule of {func} declines: {reason}")
            return NotImplemented
        members = member_count(leaves) or 1
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

        lowerings: dict[str, Lowering] = {name: partial(call, lowering) for name, lowering in self.lowerings.items()}
        lowerings.setdefault("loop", loop)
        settings = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        result = fastest(name_of(func), lowerings, [self._data(leaves[i], members) for i in places], settings)
        return pytree.tree_map_only(Tensor, Stacked, result)

    def _data(self, value: Tensor, members: int) -> Tensor:
        """All members' data, [B, *shape], in a layout that the lowerings accept."""
        data = stacked_data(value, members)
        if len(self.input_layouts) > 1:
            return data
        if self.input_layouts == (Layout.CHANNEL_MAJOR,) and data.dim() > 2:
            return data.transpose(0, 1).contiguous().transpose(0, 1)
        return data.contiguous()


def name_of(func: Any) -> str:
    """The name of a function in the tuning cache."""
    return str(getattr(func, "__name__", func))


@lru_cache(maxsize=256)
def _log_once(text: str) -> None:
    """Log a text when it occurs for the first time."""
    _log.info(text)


def _overridable(func: Any) -> Iterator[Any]:
    """The functions that `__torch_function__` receives when a function is called."""
    if isinstance(func, type) and issubclass(func, torch.autograd.Function):
        raise FusionError(
            f"{func.__name__}.apply has no overrides; call it in a function decorated by "
            "torch.overrides.wrap_torch_function, and register that"
        )
    if isinstance(func, CustomOpDef):
        yield from (func._opoverload, func._opoverload.overloadpacket)
        return
    if not has_overrides(func):
        if is_replacement(func):  # it calls torch's function in the end
            return
        raise FusionError(
            f"{func.__qualname__} has no overrides, so no rule would be found when it is called; decorate it by "
            "torch.overrides.wrap_torch_function(lambda x, weight: (x, weight)), which names its tensors"
        )
    yield func


def functions_named(names: str, *namespaces: Any) -> tuple[Any, ...]:
    """Torch's existing functions with these names in the namespaces, by default `torch` and `Tensor`."""
    pairs = [(namespace, name) for namespace in namespaces or (torch, Tensor) for name in names.split()]
    found = [torch_function(namespace, name) for namespace, name in pairs if namespace is Tensor or name[:2] != "__"]
    return tuple(func for func in dict.fromkeys(found) if callable(func))  # `torch.float` is a type


def stacked_data(value: Any, members: int) -> Tensor:
    """All members' data, [B, *shape]; a shared tensor is expanded, as a view."""
    data: Tensor = value.whole if isinstance(value, Stacked) else value.expand(members, *value.shape)
    return data


def channel_major(data: Tensor) -> bool:
    """Whether B and C are adjacent in the memory of [B, N, C, ...], so that [N, B*C, ...] is a view."""
    return data.stride(0) == data.shape[2] * data.stride(2)


def merge_channels(data: Tensor) -> Tensor:
    """[B, N, C, ...] -> [N, B*C, ...]; a view if the memory is channel-major."""
    return data.transpose(0, 1).flatten(1, 2)


def split_channels(data: Tensor, members: int) -> Tensor:
    """[N, B*C, ...] -> [B, N, C, ...], a view."""
    shape = (data.shape[0], members, data.shape[1] // members, *data.shape[2:])
    return data.view(shape).transpose(0, 1)
