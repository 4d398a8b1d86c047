"""What a run at once changes of parameters, gradients and buffers, put back where the run is given up."""

from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from typing import Any, Self

import torch
from torch import Tensor

from shoal.core.errors import FusionError
from shoal.fuse.rows import memory_of
from shoal.fuse.stacked import Stacked

__all__ = ["Undo", "before_gradients", "before_write"]


class Undo:
    """Keeps what user code may change while it runs for all members, so that it may run again for each of them.

    Parameters and gradients are copied when they are about to be written to, which few functions do; within the
    context, `before_write` and `before_gradients` tell of that.

    Args:
        buffers: copied at once.
        once: parameters of which no torch function tells that it writes to them: those that are kept once, and those of
            submodules in which the members differ.
        parameters: all that may have gradients.
        first: copy those kept once as well. They may be large, and few functions write to them; that they do nearly
            always shows the first time.
    """

    def __init__(
        self,
        buffers: Iterable[Tensor],
        once: Iterable[Tensor],
        parameters: Callable[[], Iterable[Tensor]],
        first: bool,
    ) -> None:
        self._once = list(once)
        self._versions = None if first else [tensor._version for tensor in self._once]
        kept = [*(tensor.detach() for tensor in buffers), *(tensor.data for tensor in self._once if first)]
        self._values = [(tensor, tensor.clone()) for tensor in kept]
        self._parameters = parameters
        self._memory: dict[int, Tensor | None] | None = None
        """Of each parameter, and (None) of gradients, until these are kept."""
        self._gradients: list[tuple[Tensor, Tensor | None, Tensor | None]] | None = None
        """Parameters with their gradients and copies of these."""
        self._tokens: list[Token[Undo | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_active.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _active.reset(self._tokens.pop())

    def keep_memory_of(self, tensor: Tensor) -> None:
        """Copy the parameter, or all gradients, whose memory a tensor is."""
        if self._memory is None:
            self._memory = {}
            for parameter in self._parameters():
                self._memory[memory_of(parameter)] = parameter
                if parameter.grad is not None:
                    self._memory[memory_of(parameter.grad)] = None
        place = memory_of(tensor)
        if not place or place not in self._memory:
            return
        found = self._memory.pop(place)
        if found is None:
            self.keep_gradients()
        else:
            self._values.append((found.data, found.data.clone()))

    def keep_gradients(self) -> None:
        """Copy all gradients there are."""
        if self._gradients is None:
            self._gradients = [
                (parameter, parameter.grad, None if parameter.grad is None else parameter.grad.detach().clone())
                for parameter in self._parameters()
            ]

    def put_back(self, reason: str) -> None:
        """Put back all that is kept.

        Args:
            reason: why the run is given up.

        Raises:
            FusionError: parameters were changed of which there is no copy.
        """
        if self._versions is not None and self._versions != [tensor._version for tensor in self._once]:
            raise FusionError(
                "a function has changed frozen parameters that are kept once for all members, or parameters of "
                f"submodules in which they differ, and then could not go on for all of them: {reason}; register what "
                "it changes as buffers"
            )
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
            for parameter, gradient, copied in self._gradients or ():
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
                parameter.grad = gradient
        self._memory = self._gradients = None


_active: ContextVar[Undo | None] = ContextVar("undo", default=None)
_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]


def before_write(func: Any, changed: Sequence[Any]) -> None:
    """A torch function is about to write to stacked tensors, or lists of such."""
    undo = _active.get()
    if undo is None:
        return
    if func == _SET_GRADIENT:
        undo.keep_gradients()
        return
    for value in changed:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Stacked) and not _is_new(tensor.whole):
                undo.keep_memory_of(tensor.whole)


def before_gradients() -> None:
    """A backward pass is about to add to gradients."""
    undo = _active.get()
    if undo is not None:
        undo.keep_gradients()


def _is_new(tensor: Tensor) -> bool:
    """Whether a function has made it, in memory of its own; most tensors that are written to are such."""
    return tensor.grad_fn is not None and tensor._base is None
