"""Records the kernels of a function as a CUDA graph."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

__all__ = ["record_graph"]

T = TypeVar("T")

_ERROR_MODE = "thread_local"
"""Other threads may use the device while this one records."""


def record_graph(run: Callable[[], T], device: torch.device) -> "tuple[torch.cuda.CUDAGraph, T]":
    """Record a function's kernels.

    Memory that the allocator keeps for later is given back only if the record needs it: it takes long to get again.
    """
    with suppress(torch.OutOfMemoryError):  # its traceback holds tensors of the record
        return _record_once(run, device)
    torch.cuda.empty_cache()  # which the allocator does not do by itself during a record
    return _record_once(run, device)


def _record_once(run: Callable[[], T], device: torch.device) -> "tuple[torch.cuda.CUDAGraph, T]":
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    before = torch.cuda.current_stream(device)
    stream.wait_stream(before)
    # cuBLAS keeps one workspace for each stream, and torch has few streams. Each graph makes a workspace in its own
    # memory: graphs may run at the same time, and outlive each other.
    torch._C._cuda_clearCublasWorkspaces()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode=_ERROR_MODE)
            try:
                result = run()
            finally:
                graph.capture_end()
    except RuntimeError:
        # A record that fails leaves its pool open and the generator of random numbers recording (torch 2.11,
        # CUDAGraph::capture_end). The end of a record that succeeds closes the generator's.
        with suppress(RuntimeError):  # the pool is closed already, as only the last part of the record has failed
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            closing = torch.cuda.CUDAGraph()
            closing.capture_begin(capture_error_mode=_ERROR_MODE)
            torch.zeros((), device=device)
            closing.capture_end()
        raise
    finally:
        torch._C._cuda_clearCublasWorkspaces()
    before.wait_stream(stream)
    return graph, result
