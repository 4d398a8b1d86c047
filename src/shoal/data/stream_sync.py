"""Tensors that are written on one stream of a GPU and read on others."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["StreamSync"]


class StreamSync:
    """Lets readers wait for what was written on another stream; on the CPU there is nothing to wait for.

    Who writes calls `wait` before and `written` after it, so that each waits for all before; who reads calls `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: torch.cuda.Event | None = None

    def written(self) -> None:
        """All that the current stream was given to write so far is to be waited for."""
        if self._device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Let the current stream wait for what was written."""
        if self._written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._written)

    def read(self, values: Any) -> None:
        """The same, and when the tensors among `values` are freed, their memory waits for the current stream."""
        if self._device.type != "cuda":
            return
        self.wait()
        stream = torch.cuda.current_stream(self._device)
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
