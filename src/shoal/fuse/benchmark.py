"""Times several ways to compute the same thing, forward and backward."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.cost.race import Race, RaceRules, choose_fastest
from shoal.fuse.generators import undrawn

__all__ = ["Layouts", "benchmark"]

Layouts = Mapping[str, Callable[..., Sequence[Tensor | None]]]
"""By way, a function of its tensors: the same tensors as it likes them to lie in memory."""

_RULES = RaceRules(most=9, hopeless=3.0, hopeless_seconds=0.02, margin=1.03, budget_seconds=2.0)
"""Nothing but races runs meanwhile, so that a candidate is given up soon."""


def benchmark(ways: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor | None], layouts: Layouts) -> Race[str]:
    """Find the fastest of several ways to compute the same thing.

    Args:
        ways: see `shoal.fuse.autotune.fastest`. What the first one raises is raised; another that raises is out.
        tensors: arguments of the ways. Gradients are computed for those that require one, if they are enabled; none
            of it is seen by the tensors' own graph.
        layouts: see there.

    Returns:
        The race between them, which is over.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    given = {name: layouts[name](*tensors) if name in layouts else tensors for name in ways}
    runs = {name: partial(_pass, way, [_leaf(tensor) for tensor in given[name]], device) for name, way in ways.items()}
    with _unseen(device):
        return choose_fastest(runs, _RULES, refusals=(RuntimeError,))


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
