"""Partial fusion: a submodule in which the members differ, and which runs member by member."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import OtherGenerators, active
from shoal.fuse.stacked import NeedsMemberError, Stacked, stack

__all__ = ["Apart"]


class Apart(nn.Module):
    """Stands in an array's model where each member has a module of its own kind.

    Called, it calls each member's with that member's part of the arguments; what they return is stacked again, and so
    must agree in shape. Attributes asked of it are the members' own, stacked where they are tensors.

    Args:
        path: of the submodules.
        own: the members' submodules.
    """

    own: tuple[nn.Module, ...]

    def __init__(self, path: str, own: Sequence[nn.Module]) -> None:
        super().__init__()
        self.path = path
        self.__dict__["own"] = tuple(own)  # not submodules: they belong to the members
        self.training = own[0].training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call each member's module."""
        return self._by_member([module.__call__ for module in self.own], args, kwargs)

    def train(self, mode: bool = True) -> "Apart":
        """Set the members' modules to training or evaluation."""
        self.training = mode
        for module in self.own:
            module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        missing = [b for b, module in enumerate(self.own) if not hasattr(module, name)]
        if len(missing) == len(self.own):
            raise AttributeError(f"{type(self.own[0]).__name__!r} at {self.path!r} has no attribute {name!r}")
        if missing:
            raise NeedsMemberError(f"{self.path}.{name} is asked for, which members {missing} do not have")
        values = [getattr(module, name) for module in self.own]
        if all(isinstance(value, nn.Module) for value in values):
            return Apart(f"{self.path}.{name}", values)
        if all(callable(value) for value in values):
            return lambda *args, **kwargs: self._by_member(values, args, kwargs)
        return stack(values)

    def _by_member(self, calls: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = active()
        if source is None:
            raise NeedsMemberError(f"{self.path!r} is called outside of its array")
        others = OtherGenerators()
        results, drawn = [], []
        for b, call in enumerate(calls):
            if b:
                others.restore()
            own_args, own_kwargs = pytree.tree_map_only(Tensor, partial(_part, b), (args, kwargs))
            with member_run(source.of_member(b)) as own:
                results.append(call(*own_args, **own_kwargs))
            drawn.append(own.calls)
        source.go_on_from(drawn)
        return stack(results)


def _part(b: int, value: Tensor) -> Any:
    if not isinstance(value, Stacked):
        return value
    return value.whole[b] if value.numbers is None else value.numbers[b]
