"""Watches runs of a training step before a graph of it is made, and refuses what a graph would freeze."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.core.errors import FusionError
from shoal.fuse.stacked import Stacked

__all__ = ["FrozenWriteError", "WatchedStep", "frozen_hook", "guarded_trace"]

_tracing = RLock()
"""Lock for tracing: tracers replace methods of modules, and set a compiler flag, for all threads of the process."""


class FrozenWriteError(FusionError):
    """A step writes to a frozen tensor that it was not given as a copy."""


class WatchedStep(TorchDispatchMode):
    """Runs a step as a trace does, and refuses it if a graph of the step would freeze values.

    Args:
        keys: Index of the keys of random numbers among the tensors that the step receives.
        frozen: Frozen tensors that the step receives without a copy; a write to one is refused before it takes place.
    """

    def __init__(self, fn: Callable[..., Tensor], keys: int, frozen: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fn = fn
        self._frozen = set(map(_memory, frozen))
        self.constants: list[Tensor] = []
        """Tensors that the last run has read and not made."""
        self.uses_keys = False
        """Whether a run has drawn random numbers."""
        self._calls: list[Any] = []
        self._index = keys
        self._keys: Tensor | None = None
        self._made: set[int] = set()

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run the step; reads of values, shapes that depend on values, and copies between devices are refused."""
        self._keys = tensors[self._index]
        self.constants, self._calls, self._made = [], [], set()
        with guarded_trace(), torch.enable_grad(), self:
            return self.fn(*tensors)

    def watch(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Run the step; return `functions`."""
        self(*tensors)
        self.constants = []
        return self.functions()

    def functions(self) -> list[Any]:
        """Return the functions of the last run, with the arguments in words except for tensors, and forget them."""
        calls, self._calls, self._made, self._keys = self._calls, [], set(), None
        return calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of the step."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise FusionError(f"it reads values of a tensor by `{func}`")
        if _shaped_by_values(func, args):
            raise FusionError(f"the shape of what `{func}` returns depends on values")
        if self._frozen and any(_memory(tensor) in self._frozen for tensor in _written(func, args, kwargs)):
            raise FrozenWriteError(f"`{func}` writes to a frozen parameter; keep what changes in buffers")
        result = func(*args, **kwargs)
        given = pytree.tree_leaves((args, kwargs))
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in given if isinstance(leaf, Tensor)]
        if _crosses_devices(func, [*read, *made]):
            raise FusionError(f"`{func}` copies between devices; create tensors on the model's device")
        self.uses_keys |= any(tensor is self._keys for tensor in read)
        self.constants += [tensor for tensor in read if _memory(tensor) not in self._made]
        self._made.update(map(_memory, made))
        if func is not torch.ops.aten.detach.default:  # autograd calls it where something else holds a gradient
            self._calls.append((func, repr([leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in given])))
        return result


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a function writes to, by its schema."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _shaped_by_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of a function's result depends on values, so that a graph would freeze it."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)


def _crosses_devices(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether a function copies between CPU and GPU, which no CUDA graph records; a CPU number is a kernel argument."""
    return len({tensor.device.type for tensor in tensors if tensor.dim() or func in _COPIES}) > 1


@contextmanager
def guarded_trace() -> Iterator[None]:
    """Context manager for a run that is traced, watched or recorded; see `_TraceGuard` and `_compiling`."""
    with _TraceGuard(), _compiling():
        yield


@contextmanager
def _compiling() -> Iterator[None]:
    """Context manager in which `torch.compiler.is_compiling()` is true, as when torch exports or compiles user code."""
    with _tracing:
        before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_NODE = Tensor.grad_fn.__get__  # type: ignore[union-attr]


class _TraceGuard(TorchFunctionMode):
    """Refuses to read values out of tensors or to register autograd hooks, which tracers would silently freeze."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUES:
            raise FusionError(f"it reads values of a tensor by `{func.__name__}`")
        if func in _HOOKS:
            raise frozen_hook()
        result = func(*args, **(kwargs or {}))
        if func == _NODE and result is not None and not isinstance(args[0], Stacked):
            raise frozen_hook()  # user code adds a hook to a node; nodes of `Stacked` are read by Shoal
        return result


def frozen_hook() -> FusionError:
    """Return the error for a hook in the backward pass."""
    return FusionError("the step has a hook in the backward pass, which a trace would call only once; remove the hook")
