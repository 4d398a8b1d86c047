"""Intercepts torch functions while an array runs: functions of stacked tensors, and random functions.

A function of stacked tensors runs by a fusion rule, by vmap, or in a loop over the members.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Self
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import record_copy, refuse_aliased_write, share_memory
from shoal.fuse.generators import forked_rng
from shoal.fuse.patches import HiddenWarning, begun_checkpoints, close_checkpoints, install_patches, remove_patches
from shoal.fuse.randomness import RandomSource, active_source, current_source, use_source
from shoal.fuse.rules.attention import multi_head_without_overrides
from shoal.fuse.rules.table import RULES
from shoal.fuse.shard import IndivisibleStepError, active_shard
from shoal.fuse.stacked import (
    NeedsMemberError,
    Ragged,
    SharedWriteError,
    Stacked,
    member_count,
    member_values,
    refuse_custom_autograd,
    stack,
)
from shoal.fuse.torch_functions import (
    HIDDEN_WRITES,
    RANDOM_FUNCTIONS,
    STATISTICS_FUNCTIONS,
    draws_random,
    updates_statistics,
    written_arguments,
)

__all__ = ["FunctionInterceptor", "GradientCheck", "dispatch", "loop", "member_run"]

_log = logging.getLogger("shoal.fuse")
_looped: set[Any] = {Tensor.__setitem__}
"""Functions that run in a loop without vmap: those that vmap refused before, and `x[:, i] = y`, where vmap is wrong."""

_vmap_warnings = HiddenWarning(
    r"There is a performance drop|torch\.searchsorted\(\): input value tensor is non-contiguous"
)
"""Warnings that vmap uses a loop, and that vmap has made a tensor that is not contiguous."""

_EXPECTED_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function for all members.

    If a rule or vmap fails, the loop runs, and raises torch's own error for one member if the arguments are wrong.
    """
    for value in args:  # fast path: most calls need no refusal
        if isinstance(value, Stacked):
            if value.grad_fn is not None:
                refuse_custom_autograd(args)
        elif isinstance(value, (list, tuple)):
            refuse_custom_autograd(value)
    if not args and "input" in kwargs and "condition" not in kwargs:  # move torch's first argument to `args`
        kwargs = dict(kwargs)
        args = (kwargs.pop("input"),)
    changed = written_arguments(func, args, kwargs)
    for tensor in changed:
        if isinstance(tensor, Tensor) and not isinstance(tensor, Stacked):
            raise SharedWriteError(_name(func), tensor)
    if changed:
        refuse_aliased_write(_name(func), changed)
    versions = _versions(changed)
    rule = RULES.get(func)
    refusal = None
    try:
        try:
            if rule is not None:
                result = rule.run(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            if updates_statistics(func, args, kwargs) and not all(isinstance(value, Stacked) for value in args[1:3]):
                raise NeedsMemberError(f"{_name(func)} updates statistics that all members share")
            if _can_vmap(func, kwargs) and not draws_random(func, args, kwargs):
                result = _vmap(func, args, kwargs)
                if result is not NotImplemented:
                    return changed[-1] if changed else result
        except (torch.OutOfMemoryError, FusionError):
            raise
        except _EXPECTED_ERRORS as error:
            if versions != _versions(changed):  # the function has begun to write, and must not write twice
                raise
            refusal = str(error).split("\n")[0]
        result = loop(func, args, kwargs)
        if refusal is not None and rule is None:
            _looped.add(func)
            _log.info("%s runs in a loop over the members: %s", _name(func), refusal)
        return changed[-1] if changed else result
    except (NeedsMemberError, _StopRecomputationError):
        raise
    except Exception as error:
        if any(isinstance(leaf, Stacked) and leaf.floats is not None for leaf in pytree.tree_leaves((args, kwargs))):
            raise NeedsMemberError(f"{_name(func)} takes no float in which members differ: {error}") from error
        members, arguments = member_count((args, kwargs)), _describe_arguments(args, kwargs)
        error.add_note(f"in {_name(func)} of {members} members, for one member: {arguments}")
        raise


def _can_vmap(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether to try vmap; never under autocast, since vmap decomposes functions that autocast must see whole."""
    if func in _looped or func in HIDDEN_WRITES or kwargs.get("out") is not None:
        return False
    return not torch._C._is_any_autocast_enabled() and _is_batched(func)


@cache
def _is_batched(func: Any) -> bool:
    """Whether vmap has a batching rule for a custom operator; without one, vmap would use a slow loop and warn."""
    if isinstance(func, OpOverloadPacket):
        return all(_is_batched(getattr(func, name)) for name in func.overloads())  # type: ignore[no-untyped-call]
    if not isinstance(func, OpOverload) or func.namespace == "aten":
        return True
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "FuncTorchBatched")  # type: ignore[no-untyped-call]


def _vmap(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function as `torch.func.vmap` does, without its checks, which take ten times as long.

    A result of shared tensors alone is copied for each member, unless it shares memory with an argument.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    members = member_count(leaves)
    own = [leaf for leaf in leaves if isinstance(leaf, Stacked)]
    if members is None or any(leaf.floats is not None for leaf in own):
        return NotImplemented
    shared = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, Stacked)]
    if any(leaf.dim() == 0 for leaf in own) and len({leaf.dtype for leaf in (*own, *shared)}) > 1:
        return NotImplemented  # torch's type promotion gives 0-dim tensors a lower priority

    def of_all(result: Tensor) -> Tensor:
        if functorch.is_batchedtensor(result):
            return Stacked(functorch._remove_batch_dim(result, level, members, 0))
        if any(share_memory(leaf, result) for leaf in shared):
            return result
        return Stacked(result.expand(members, *result.shape).clone(memory_format=torch.contiguous_format))

    level = functorch._vmap_increment_nesting(members, "error")
    try:
        batched = [functorch._add_batch_dim(x.whole, 0, level) if isinstance(x, Stacked) else x for x in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(batched, spec)
        with _vmap_warnings():
            result = func(*own_args, **own_kwargs)
        return pytree.tree_map_only(Tensor, of_all, result)
    finally:
        functorch._vmap_decrement_nesting()


def loop(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` for one member after another, a random one with torch's generators seeded by each member's key."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    source = active_source()
    members = member_count(leaves) or (len(source.keys) if source else 1)
    changed = _stacked(written_arguments(func, args, kwargs))
    copies = {id(tensor): [row.clone() for row in tensor.whole.unbind(0)] for tensor in changed}
    if func in HIDDEN_WRITES:
        columns = [_slices(leaf, members) for leaf in leaves]
    else:
        columns = [copies[id(leaf)] if id(leaf) in copies else member_values(leaf, members) for leaf in leaves]
    rows = zip(*columns, strict=True) if columns else [()] * members
    calls = [pytree.tree_unflatten(list(values), spec) for values in rows]
    if draws_random(func, args, kwargs):
        own = _run_seeded(func, calls, leaves)
    else:
        own = [func(*own_args, **own_kwargs) for own_args, own_kwargs in calls]
    result = stack(own)
    if changed:
        for tensor in changed:
            _write_back(tensor, copies[id(tensor)])
    else:
        _record_views(leaves, own[0], result)
    return result


def _slices(value: Any, members: int) -> Iterable[Any]:
    """As `member_values`, but with slices that allow writes: autograd refuses writes to the results of `unbind`."""
    is_tensor = isinstance(value, Stacked) and value.floats is None
    return [value.whole[b] for b in range(members)] if is_tensor else member_values(value, members)


def _write_back(tensor: Stacked, rows: list[Tensor]) -> None:
    """Write the members' changed copies back together: autograd does not distinguish writes to slices of a tensor."""
    if any(row.shape != tensor.shape for row in rows):
        raise NeedsMemberError(f"an in-place function changes the shape {tuple(tensor.shape)} of a tensor")
    tensor.whole.copy_(torch.stack(rows))


def _run_seeded(func: Any, calls: list[tuple[Any, Any]], leaves: list[Any]) -> list[Any]:
    """Run a random function for each member, with torch's default generators seeded by the member's key."""
    if active_shard() is not None:
        raise IndivisibleStepError(f"{_name(func)} draws random numbers, of which a part of the batch cannot be drawn")
    devices = sorted({leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda})
    if not devices and torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # its generator is seeded, too
        devices = [torch.cuda.current_device()]
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
    drawing = [draws_random(func, *call) for call in calls]
    results = []
    with forked_rng(devices):
        for key, (args, kwargs) in zip(current_source(len(calls)).next(drawing).tolist(), calls, strict=True):
            for generator in generators:  # `torch.manual_seed` takes half a millisecond
                generator.manual_seed(key)
            results.append(func(*args, **kwargs))
    return results


def _record_views(leaves: list[Any], own: Any, result: Any) -> None:
    """Record which results were views of arguments before they were stacked."""
    for view, copy in zip(pytree.tree_leaves(own), pytree.tree_leaves(result), strict=True):
        for leaf in leaves:
            if isinstance(copy, Stacked) and isinstance(leaf, Stacked) and share_memory(view, leaf.whole):
                record_copy(leaf.whole, copy.whole)


def _stacked(changed: Sequence[Any]) -> list[Stacked]:
    return [tensor for tensor in pytree.tree_leaves(list(changed)) if isinstance(tensor, Stacked)] if changed else []


def _versions(changed: Sequence[Any]) -> list[int]:
    return [x.whole._version for x in _stacked(changed) if not x.whole.is_inference()]


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{'each' if isinstance(value, Stacked) else 'shared'} {tuple(value.shape)}"
        return repr(value)

    return ", ".join([*map(show, args), *(f"{name}={show(value)}" for name, value in kwargs.items())])


Stacked.dispatch = staticmethod(dispatch)


GradientCheck = Callable[[Tensor], None]
"""Function that refuses access to the gradient of a tensor."""


class FunctionInterceptor(TorchFunctionMode):
    """Torch function mode that runs functions for all members, and gives each member its own random numbers.

    Random functions are intercepted even if all of their tensors are shared. The mode is idle while another source of
    random numbers is active: a single member then runs within the array's run. `check_gradient` is called with each
    plain tensor whose gradient is read or set.
    """

    def __init__(self, members: int, source: RandomSource, check_gradient: GradientCheck | None = None) -> None:
        super().__init__()
        self._members = members
        self._source = source
        self._single_member = source.single_member
        self._check_gradient = check_gradient
        self._made: dict[int, ReferenceType[Tensor]] = {}
        """Plain tensors that functions of plain tensors have made in this run, by id."""

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
                return self._made_here(func(*args, **kwargs), args)
        with torch._C.DisableTorchFunctionSubclass():
            return dispatch(func, args, kwargs)

    def _made_here(self, result: Any, args: tuple[Any, ...]) -> Any:
        """Record a result of plain tensors, unless a function has returned its argument."""
        if type(result) is Tensor and not self._single_member and not any(result is value for value in args):
            self._made[id(result)] = ref(result)
        return result

    def _is_made(self, tensor: Tensor) -> bool:
        found = self._made.get(id(tensor))
        return found is not None and found() is tensor

    def _run_intercepted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of plain tensors that must not run as in plain PyTorch."""
        if self._single_member and func is F.multi_head_attention_forward:
            with FunctionInterceptor(1, self._source):  # only functions in it draw
                return multi_head_without_overrides(*args, **kwargs)
        if draws_random(func, args, kwargs):
            return self._draw(func, args, kwargs)
        if self._check_gradient is not None and func in _GRADIENT_ATTRIBUTES:
            self._check_gradient(args[0])
        sets = not self._single_member and func in _REQUIRES_GRAD_SETTERS and args[1:] in ((), (True,))
        if sets and not self._is_made(args[0]):  # it outlives the run, with the sum of the members' gradients
            raise NeedsMemberError("`requires_grad` is set on a tensor that all members share")
        if func in _GRADIENT_USES and not self._single_member and args[0].requires_grad:  # it is the members' sum
            raise NeedsMemberError("the gradient of a tensor that all members share is asked for")
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
def member_run(source: RandomSource) -> Iterator[RandomSource]:
    """Context manager in which a single member runs on plain tensors and draws from `source`."""
    source.open_run = member_run
    with use_source(source), FunctionInterceptor(1, source):
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


_GRADIENT_ATTRIBUTES = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
_GRADIENT_USES = {
    *_GRADIENT_ATTRIBUTES,
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]  # its hooks get gradients
}
_REQUIRES_GRAD_SETTERS = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_INTERCEPTED = frozenset({*_GRADIENT_USES, *_REQUIRES_GRAD_SETTERS, *RANDOM_FUNCTIONS, *STATISTICS_FUNCTIONS})
