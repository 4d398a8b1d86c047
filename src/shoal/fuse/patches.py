"""Process-wide changes that last while any thread needs them: replaced torch methods and hidden warnings.

Python keeps one list of warning filters for all threads, and `warnings.catch_warnings` restores the list that it found.
If two threads overlap, the one that leaves last would restore a list with the other's filter, for good.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from shoal.core.errors import FusionError
from shoal.fuse.randomness import active

__all__ = ["HiddenWarning", "stand_in", "step_back"]

_lock = Lock()
_runs = 0
"""Number of runs in all threads: the first one replaces the methods, and the last one restores them."""

_flatten = nn.RNNBase.flatten_parameters
_checkpointed = checkpoint._checkpoint_without_reentrant_generator


def stand_in() -> None:
    """Replace the methods, at the start of the first run."""
    global _runs, _flatten
    with _lock:
        _runs += 1
        if _runs == 1:
            CheckpointFunction.apply = classmethod(_refuse)  # type: ignore[assignment,method-assign]
            _flatten = nn.RNNBase.flatten_parameters
            nn.RNNBase.flatten_parameters = _leave_flat  # type: ignore[assignment,method-assign]
            F.handle_torch_function = _hand_on  # type: ignore[attr-defined]
            checkpoint._checkpoint_without_reentrant_generator = _leave_generators


def step_back() -> None:
    """Restore the methods, at the end of the last run."""
    global _runs
    with _lock:
        _runs -= 1
        if _runs == 0:
            del CheckpointFunction.apply
            nn.RNNBase.flatten_parameters = _flatten  # type: ignore[method-assign]
            F.handle_torch_function = handle_torch_function  # type: ignore[attr-defined]
            checkpoint._checkpoint_without_reentrant_generator = _checkpointed


def _refuse(cls: Any, *args: Any) -> Any:
    if active() is None:  # a model that another thread trains by itself
        return super(CheckpointFunction, cls).apply(*args)
    raise FusionError(
        "torch.utils.checkpoint(use_reentrant=True) runs the model a second time outside of the array; "
        "pass use_reentrant=False"
    )


def _leave_flat(module: nn.RNNBase) -> None:
    """Keep the weights in place: cuDNN prefers them in one piece of memory, but they are rows of the array's."""
    if active() is None:
        _flatten(module)


def _leave_generators(fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
    """Run a checkpointed part without restoring torch's generators, which all threads share.

    No random number is drawn in such a part: `Randomness.next` refuses it.
    """
    return _checkpointed(fn, preserve_rng_state and active() is None, *args, **kwargs)


def _hand_on(public: Callable[..., Any], relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Pass on the weight of `l1_loss`, which torch leaves out; (input, target, weight) are its relevant arguments."""
    if public is F.l1_loss and len(relevant) == 3:
        kwargs["weight"] = relevant[2]
    return handle_torch_function(public, relevant, *args, **kwargs)


@dataclass(eq=False)
class HiddenWarning:
    """Hides a warning; the first thread to enter adds a filter, and the last one to leave removes it.

    Args:
        message: Regular expression for the start of the warning.
    """

    message: str

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._within = 0
        self._filter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Hide the warning within."""
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
                if self._within == 0 and self._filter in warnings.filters:  # else other code has restored another list
                    warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
