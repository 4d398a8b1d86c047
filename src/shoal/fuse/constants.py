"""Tensors of numbers that stay the same from step to step, kept on the device so that no step copies them there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["constant", "making_constants", "to_device"]


def constant(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor [B], which nobody may change in place. On a GPU a new one makes the host wait, once."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return _constant(str(list(values)), tuple(values), dtype, device)


@lru_cache(maxsize=1024)
def _constant(name: str, values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`name` tells apart what compares equal: 0.0 and -0.0."""
    with making_constants(device):
        return torch.tensor(values, dtype=dtype, device=device)


@contextmanager
def making_constants(device: torch.device) -> Iterator[None]:
    """Context manager for making a tensor that is kept and read by later steps, in and outside of traces and streams.

    Raises:
        RuntimeError: A CUDA graph is being recorded, in whose memory the tensor would be.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a step that is recorded needs a constant that the steps before it did not; record it again")
    with _disable_current_modes(), torch.inference_mode(False):
        yield
    if device.type == "cuda":  # other streams may read it next; one stream, since another thread may record a graph
        torch.cuda.current_stream(device).synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of a step or its batch on a device; the host waits for no copy to a GPU of one that can be pinned."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    if plain and tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()  # by an allocator that does not hand the memory out again before the copy
    return tensor.to(device, non_blocking=True)
