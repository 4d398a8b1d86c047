"""`HostCounts`: the step counts of a single optimizer on the CPU, while those of its array stay on the GPU."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.fuse.constants import to_device

__all__ = ["HostCounts"]

_NAMES = ("step", "mu_product")
"""Entries of an optimizer's state whose values torch reads: where these are on a GPU, the host waits for each one."""


class HostCounts:
    """Shows an optimizer of torch its counts on the CPU, as torch keeps them, during a step of its own.

    They are read from the GPU once, and once more after `forget` or a change in place.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._read: list[tuple[Tensor, int]] = []
        """Counts on the GPU, [], and their versions, of which `_rows` holds the values."""
        self._rows: tuple[Tensor, ...] = ()

    def forget(self) -> None:
        """Read the counts anew at the next step, since they were advanced in another way."""
        self._read = []

    @contextmanager
    def shown(self, groups: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Context manager for a step in which torch reads the counts of some parameter groups."""
        states = [self._optimizer.state.get(param, {}) for group in groups for param in group["params"]]
        places = [(mine, name) for mine in states for name in _NAMES if _on_gpu(mine.get(name))]
        if not places:
            yield
            return
        counts = [mine[name] for mine, name in places]
        if [id(count) for count in counts] != [id(count) for count, _ in self._read] or any(
            count._version != version for count, version in self._read
        ):
            self._rows = torch.stack(counts).cpu().unbind()
        for (mine, name), row in zip(places, self._rows, strict=True):
            mine[name] = row
        try:
            yield
        finally:
            for (mine, name), count in zip(places, counts, strict=True):
                mine[name] = count
            torch._foreach_copy_(counts, to_device(torch.stack(self._rows), counts[0].device).unbind())
            self._read = [(count, count._version) for count in counts]


def _on_gpu(count: object) -> bool:
    return isinstance(count, Tensor) and count.is_cuda
