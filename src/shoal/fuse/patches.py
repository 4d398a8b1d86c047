"""Process-wide patches of torch methods, and warning filters, which last while any thread needs them.

All threads share one list of filters, which two that overlap in `warnings.catch_warnings` could spoil for good.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock, local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import lowrank_multivariate_normal, multivariate_normal, normal
from torch.overrides import handle_torch_function
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, _StopRecomputationError

from shoal.core.errors import FusionError
from shoal.fuse.randomness import active_source
from shoal.fuse.stacked import Stacked

__all__ = ["HiddenWarning", "begun_checkpoints", "close_checkpoints", "install_patches", "remove_patches"]

_lock = Lock()
_runs = 0
"""Number of runs in all threads; the methods are patched while it is above 0."""

_flatten = nn.RNNBase.flatten_parameters
_checkpointed = checkpoint._checkpoint_without_reentrant_generator
_GAUSSIAN: tuple[Any, ...] = (normal, multivariate_normal, lowrank_multivariate_normal)
"""Modules with distributions that draw from a standard normal one."""
_standard_normal: Callable[[Any, Any, Any], Tensor] = _GAUSSIAN[0]._standard_normal


class _Checkpoints(local):
    """Checkpointed parts that runs of this thread began."""

    def __init__(self) -> None:
        self.begun: list[Generator[None, None, None]] = []


_checkpoints = _Checkpoints()


def install_patches() -> None:
    """Count a run, and patch torch's methods if it is the first one."""
    global _runs, _flatten
    with _lock:
        _runs += 1
        if _runs == 1:
            CheckpointFunction.apply = classmethod(_refuse_reentrant)  # type: ignore[assignment,method-assign]
            _flatten = nn.RNNBase.flatten_parameters
            nn.RNNBase.flatten_parameters = _skip_flatten  # type: ignore[assignment,method-assign]
            F.handle_torch_function = _pass_on_weight  # type: ignore[attr-defined]
            checkpoint._checkpoint_without_reentrant_generator = _checkpoint_of_run
            for module in _GAUSSIAN:
                module._standard_normal = _draw_standard_normal


def remove_patches() -> None:
    """Count the end of a run, and restore torch's methods if it was the last one."""
    global _runs
    with _lock:
        _runs -= 1
        if _runs == 0:
            del CheckpointFunction.apply
            nn.RNNBase.flatten_parameters = _flatten  # type: ignore[method-assign]
            F.handle_torch_function = handle_torch_function  # type: ignore[attr-defined]
            checkpoint._checkpoint_without_reentrant_generator = _checkpointed
            for module in _GAUSSIAN:
                module._standard_normal = _standard_normal


def _refuse_reentrant(cls: Any, *args: Any) -> Any:
    if active_source() is None:  # a plain model in another thread
        return super(CheckpointFunction, cls).apply(*args)
    raise FusionError(
        "torch.utils.checkpoint(use_reentrant=True) runs the model a second time outside of the array; "
        "pass use_reentrant=False"
    )


def _skip_flatten(module: nn.RNNBase) -> None:
    """Do not move weights while an array runs: cuDNN prefers contiguous weights, but these are rows of the array's."""
    if active_source() is None:
        _flatten(module)


def _checkpoint_of_run(fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Begin a checkpointed part; one of a run draws the same numbers again without the states of torch's generators."""
    source = active_source()
    if source is None:
        return _checkpointed(fn, preserve_rng_state, *args, **kwargs)
    part = _checkpointed(partial(_run_again, source.begin_part(), fn), False, *args, **kwargs)
    _checkpoints.begun.append(part)
    return part


def _run_again(
    run: Callable[[], AbstractContextManager[None]], fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Compute a part once more in the backward pass; torch ends it by an error as soon as it has all saved tensors."""
    stop = None
    with torch._C.DisableTorchFunctionSubclass():
        for value in args:
            if type(value) is Stacked and value.requires_grad:
                value.whole.requires_grad_()  # hooks of an outer part have detached it, and autograd sees the wrapper
    with run(), torch._C._EnableTorchFunction():
        try:
            fn(*args, **kwargs)
        except _StopRecomputationError as error:
            stop = error
    if stop is not None:
        raise stop


def _draw_standard_normal(shape: Any, dtype: Any, device: Any) -> Tensor:
    """Draw numbers of each member's own; torch's function writes to a new tensor, which all members would share."""
    if active_source() is None:
        return _standard_normal(shape, dtype, device)
    return torch.randn(shape, dtype=dtype, device=device)


def begun_checkpoints() -> int:
    """The number of checkpointed parts that runs of this thread have begun so far."""
    return len(_checkpoints.begun)


def close_checkpoints(number: int) -> None:
    """Close the checkpointed parts that this thread began after the first `number`.

    Before 2.13, torch leaves their hooks in effect after an exception, for as long as the traceback lives.
    """
    for part in reversed(_checkpoints.begun[number:]):
        part.close()
    del _checkpoints.begun[number:]


def _pass_on_weight(public: Callable[..., Any], relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's override handler, with the argument `weight` of `l1_loss`, which torch forgets to pass on."""
    if public is F.l1_loss and len(relevant) == 3:
        kwargs["weight"] = relevant[2]
    return handle_torch_function(public, relevant, *args, **kwargs)


@dataclass(eq=False)
class HiddenWarning:
    """Hides a warning by the start of its text; the first thread to enter adds a filter, the last one removes it."""

    message: str

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._within = 0
        self._filter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context manager in which the warning is hidden."""
        with self._lock:
            self._within += 1
            if self._within == 1:
                warnings.filterwarnings("ignore", self.message, UserWarning)
                self._filter = warnings.filters[0]
        try:
            yield
        finally:
            with self._lock:
                self._within -= 1
                if (
                    self._within == 0 and self._filter in warnings.filters
                ):  # otherwise other code has restored another list
                    warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
