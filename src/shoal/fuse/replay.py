"""Launches the recorded kernels of a step, with the keys of its random numbers."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shoal.fuse.array import ModelArray
from shoal.fuse.cuda_graph import record_graph
from shoal.fuse.randomness import keys_at, seed_words

__all__ = ["DeviceKeys", "Replay"]


class Replay:
    """A CUDA graph: records the kernels of a function once, and launches all of them on the tensors' current values."""

    def __init__(
        self,
        run: Callable[[Sequence[Tensor]], Tensor],
        held: Callable[[], Sequence[Tensor]],
        given: Sequence[Tensor],
        keys: "DeviceKeys | None",
        device: torch.device,
    ) -> None:
        self._held = held
        """Tensors in the recorded memory that may come to lie elsewhere; the optimizer notices that of parameters."""
        self._places = _places(held())
        self._given = [tensor.clone() for tensor in given]
        self._keys = keys
        self._graph, self._result = record_graph(lambda: run(self._given), device)
        self._run = run  # holds the memory of the constants, which the graph reads

    def fits(self) -> bool:
        """Whether the held tensors are still in the recorded memory."""
        return _places(self._held()) == self._places

    def __call__(self, given: Sequence[Tensor]) -> Tensor:
        """Run the kernels; if it raises an error, none has run."""
        losses = torch.empty_like(self._result)
        for place, tensor in zip(self._given, given, strict=True):
            place.copy_(tensor, non_blocking=True)
        if self._keys is not None:
            self._keys.write()
        self._graph.replay()
        if self._keys is not None:
            self._keys.count()
        return losses.copy_(self._result)


class DeviceKeys:
    """Keys of the members' random numbers, computed on the device by what it counts itself.

    The host writes seeds and numbers of calls only where the device has others, as when an epoch begins.
    """

    def __init__(self, array: ModelArray, runs: int, device: torch.device) -> None:
        self._array = array
        self._runs = runs
        self._words, self._ticks = torch.zeros(2, len(array), dtype=torch.int64, device=device)
        self._later = torch.arange(runs, device=device)[:, None]
        self._written: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        """Seeds and numbers of calls that are on the device."""

    def write(self) -> None:
        """Let the device have the seeds, and the numbers of the members' next calls."""
        now = (self._array.seeds, self._array.ticks)
        if now != self._written:
            for place, values in ((self._words, seed_words(now[0])), (self._ticks, now[1])):
                place.copy_(torch.tensor(values))
            self._written = now

    def next(self) -> Tensor:
        """The keys of a step, int64 [B], or [runs, B] for several runs; counts its calls, on the device alone."""
        keys = keys_at(self._words, self._ticks + self._later)
        self._ticks += self._runs
        return keys if self._runs > 1 else keys[0]

    def count(self) -> None:
        """Note on the host that the device has counted a step."""
        if self._written is not None:
            seeds, ticks = self._written
            self._written = seeds, tuple(tick + self._runs for tick in ticks)


def _places(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
