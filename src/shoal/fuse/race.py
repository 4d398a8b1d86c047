"""The time that several ways to compute the same thing take."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.generators import undrawn

__all__ = ["Layouts", "race"]

Layouts = Mapping[str, Callable[..., Sequence[Tensor | None]]]
"""By way, a function of its tensors: the same tensors as it likes them to lie in memory."""

_ROUNDS = (3, 9)
"""At least and at most, after a first one that only makes kernels and caches."""
_ENOUGH_SECONDS = 0.1
_MOST_SECONDS = 2.0
"""After so long fewer rounds have to do."""
_HOPELESS = 3.0
"""Times the fastest way's time, and more than `_LONG_SECONDS`: such a way is not tried again."""
_LONG_SECONDS = 0.02
_BEATEN = 1.25
"""Times the fastest way's shortest run, after the least of rounds: such a way is not tried again either."""


def race(
    ways: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor | None], layouts: Layouts
) -> dict[str, list[float]]:
    """Try all ways in turn, several times.

    Args:
        ways: see `shoal.fuse.autotune.fastest`. What the first one raises is raised; another that raises is out.
        tensors: arguments of the ways. Gradients are computed for those that require one, if they are enabled; none
            of it is seen by the tensors' own graph.
        layouts: see there.

    Returns:
        Seconds of each way's runs.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    given = {name: layouts[name](*tensors) if name in layouts else tensors for name in ways}
    leaves = {name: [_leaf(tensor) for tensor in laid] for name, laid in given.items()}
    first = next(iter(ways))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    running = list(ways)
    with _unseen(device):
        for name in ways:
            try:
                _pass(ways[name], leaves[name], device)
            except RuntimeError:
                if name == first:
                    raise
                running.remove(name)
                del seconds[name]
        start = time.perf_counter()
        for number in range(1, 1 + _ROUNDS[1]):
            for name in running:
                took = _pass(ways[name], leaves[name], device)
                if took < _LONG_SECONDS:  # of a short run it matters that it found caches as another way had left them
                    took = _pass(ways[name], leaves[name], device)
                seconds[name].append(took)
            least = min(map(min, seconds.values()))
            if number < _ROUNDS[0]:
                enough, limit = _MOST_SECONDS, max(_LONG_SECONDS, _HOPELESS * least)
            else:
                enough, limit = _ENOUGH_SECONDS, _BEATEN * least
            running = [name for name in running if min(seconds[name]) <= limit]
            if len(running) == 1 or time.perf_counter() - start > enough:
                break
    return seconds


def _leaf(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


@contextlib.contextmanager
def _unseen(device: torch.device) -> Iterator[None]:
    """No mode of the caller, nor its random numbers or caches, is touched by what runs within."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(undrawn(device))
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            stack.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
        yield


def _pass(way: Callable[..., Any], leaves: Sequence[Tensor | None], device: torch.device) -> float:
    """Seconds of one run, forward and backward."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    start = _now(device)
    result = way(*leaves)
    seconds = _now(device) - start
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if outputs:
        end = _End.apply([torch.ones_like(output) for output in outputs], *outputs)  # type: ignore[no-untyped-call]
        start = _now(device)
        torch.autograd.grad(end, wanted, allow_unused=True)
        seconds += _now(device) - start
    return seconds


class _End(torch.autograd.Function):
    """A number whose backward pass begins with given gradients, [as the outputs].

    `torch.autograd.grad` takes them as well, but for checking them imports SymPy, which takes a process 0.3 s.
    """

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)  # real, whatever they are

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
