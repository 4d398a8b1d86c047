"""A function of tensors as a CUDA graph: recorded once, replayed with one launch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Replay"]


class Replay:
    """Does what a function did when it was recorded, on what then is in its tensors.

    Args:
        fn: takes tensors on one CUDA device and may change them in place; has run there before, so that libraries are
            loaded. It is not run: recording only notes its kernels.
        held: tensors that are the same memory at every call.
        given: examples of those that are other ones at every call; they are copied.
    """

    def __init__(self, fn: Callable[..., Tensor], held: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        self._places = _places(held)
        self._given = [tensor.clone() for tensor in given]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may go on meanwhile
            self._result = fn(*held, *self._given)

    def fits(self, held: Sequence[Tensor]) -> bool:
        """Whether the tensors that are held still lie where they lay."""
        return _places(held) == self._places

    def __call__(self, given: Sequence[Tensor]) -> Tensor:
        """Replay with other values in the place of the given tensors."""
        for place, tensor in zip(self._given, given, strict=True):
            place.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._result.clone()


def _places(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
