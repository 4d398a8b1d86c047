"""CUDA graphs that stand-ins record and replay on a CPU, for captured steps of arrays whose tensors are there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shoal.fuse.capture as capture_module

__all__ = ["Device", "graphs"]


class Device:
    """What a test reads: the streams that were made, the calls of the device, and the graphs that were recorded."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = Stream()
        self.log: list[str] = []
        self.graphs: list[Graph] = []
        self.fails: list[BaseException] = []
        """Errors that the next records raise, one each."""

    @property
    def recording(self) -> bool:
        return any(graph.recording for graph in self.graphs)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    def new_stream(self, device: Any = None) -> "Stream":
        self.streams.append(Stream())
        return self.streams[-1]

    def new_graph(self) -> "Graph":
        self.graphs.append(Graph(self))
        return self.graphs[-1]

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class Stream:
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, stream: "Stream") -> None:
        self.waited_for.append(stream)


class Graph:
    """Notes each function between `capture_begin` and `capture_end`, undoes what it wrote, and runs all of them later.

    As on a GPU, where recorded kernels do not run, and a replay reads and writes the recorded memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._noting: _Noting | None = None
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.stream: Stream | None = None
        self.replays = 0

    @property
    def recording(self) -> bool:
        return self._noting is not None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        assert self._device.current in self._device.streams, "a graph is not recorded on the default stream"
        self.stream = self._device.current
        self._device.log.append("begin")
        self._noting = _Noting(self._device.fails)
        self._noting.__enter__()

    def capture_end(self) -> None:
        assert self._device.current is self.stream, "a record ends on the stream on which it began"
        noting, self._noting = self._noting, None
        assert noting is not None
        noting.__exit__(None, None, None)
        noting.undo()
        self._calls = noting.calls
        self._device.log.append("end")

    @torch.no_grad()
    def replay(self) -> None:
        assert self.stream is not None
        self.replays += 1
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            for place, value in zip(made, _made(args, kwargs, again), strict=True):
                place.detach().copy_(value)


class _Noting(TorchDispatchMode):
    def __init__(self, fails: list[BaseException]) -> None:
        super().__init__()
        self._fails = fails
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self._own: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._fails:
            raise self._fails.pop(0)
        assert torch.Tag.data_dependent_output not in func.tags, f"{func} waits for the device"
        for tensor in _tensors((args, kwargs)):  # not all functions that write say so, as batch norm does not
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own | self._before.keys():
                self._before[storage._cdata] = storage, storage.clone()
        result = func(*args, **kwargs)
        made = _made(args, kwargs, result)
        self._own.update(tensor.untyped_storage()._cdata for tensor in made)
        self.calls.append((func, args, kwargs, made))
        return result

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _made(args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """The tensors of a result that lie in new memory."""
    given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
    return [tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in given]


def graphs(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Let captured steps record graphs on the CPU."""
    device = Device()
    monkeypatch.setattr(capture_module, "records_graphs", lambda device: True)
    for name, stand_in in {
        "CUDAGraph": device.new_graph,
        "Stream": device.new_stream,
        "stream": device.on,
        "current_stream": lambda of=None: device.current,
        "graph_pool_handle": lambda: (0, len(device.graphs)),
        "is_current_stream_capturing": lambda: device.recording,
        "synchronize": lambda of=None: device.log.append("synchronize"),
        "empty_cache": lambda: device.log.append("empty_cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name, said in {"endAllocateToPool": "end pool", "clearCublasWorkspaces": "clear workspaces"}.items():
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_, said=said: device.log.append(said), raising=False)
    return device
