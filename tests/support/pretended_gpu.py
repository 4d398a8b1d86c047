"""A GPU that is not there: CPU tensors that say they are on `cuda:0`, whose kernel launches and host waits are counted.

    with PretendedGpu() as gpu:
        gpu.claim(model)                       # the model's tensors are "on the GPU" from now on
        x = torch.randn(8, 4, device="cuda")   # and so is whatever is made there or of what is there
        with gpu.counting() as counts:
            model(x).sum().backward()
    counts.launches, counts.waits              # by the name of the function

The values are those of a CPU. Launches are reckoned: one for each function that is not a view, and for those of several
tensors what torch's CUDA sources launch (`ForeachUtils.h`, `MultiTensorApply.cuh`). A wait is where the host stops
until the device has come to that point: a copy to the host, or to the device from memory that is not pinned or without
`non_blocking`; a value read; a result whose shape depends on values; `torch.cuda.synchronize`. A CUDA graph is recorded
as the list of its functions: while it is recorded, waits raise as on a device, and what it writes is undone. A replay,
which runs the functions again in the same memory, is one launch. A function of tensors on both devices raises.

What it does not show: the time of anything, the order of streams, functions that a CUDA build computes by others.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from shoal.fuse import autotune, constants, randomness, transaction
from shoal.fuse.rules import recurrent
from shoal.fuse.stacked import Stacked

__all__ = ["Counts", "PretendedGpu"]

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)

_MAX_TENSORS = (110, 64, 48, 36, 30)
_MAX_BLOCKS, _CHUNK = 320, 65536
"""Limits of one multi-tensor kernel, by the number of lists (`MultiTensorApply.cuh`; newer devices take more)."""

_NO_KERNEL = ("empty", "new_empty", "detach", "lift", "alias", "set_", "resize_", "_unsafe_view", "is_same_size")
"""Beginnings of names of functions, besides views, that launch nothing."""

_KERNELS = {
    "native_batch_norm": 2,
    "native_layer_norm_backward": 2,
    "native_group_norm": 2,
    "embedding_dense_backward": 4,
}
"""Launches of functions of which a CUDA build makes several."""

_HIDDEN_WRITES = ("native_batch_norm",)
"""Functions that write to arguments without saying so."""


@dataclass(eq=False)
class Counts:
    """Numbers of launches, of kernels in replayed graphs, and of waits, by the name of the function (and its place)."""

    launches: Counter[str] = field(default_factory=Counter)
    in_graphs: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


class PretendedGpu:
    """Context manager in which tensors can be on a GPU that is not there; see the module."""

    def __init__(self) -> None:
        self.counted: list[Counts] = []
        self._mode = _Mode(self)
        self._graph: _Graph | None = None
        self._generator = torch.Generator()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for cache in (constants._constant, randomness._index_hash):  # keep nothing of this device for another one
                cache.cache_clear()
                stack.callback(cache.cache_clear)
            for target, name, value in (*self._tensor_members(), *self._cuda_functions(), *self._names_in_shoal()):
                stack.enter_context(patch.object(target, name, value, create=True))
            stack.enter_context(autotune.without_autotuning())  # what is fast on a CPU says nothing
            stack.enter_context(self._mode)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.close()

    def claim(self, *values: Any) -> None:
        """Let the tensors of modules, and those in trees of tensors, be on the GPU, as if they had been made there."""
        for leaf in pytree.tree_leaves(values):
            tensors = (*leaf.parameters(), *leaf.buffers()) if isinstance(leaf, nn.Module) else (leaf,)
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    _mark(tensor, True)

    @contextmanager
    def counting(self, counts: Counts | None = None) -> Iterator[Counts]:
        """Context manager that counts what it encloses, on top of earlier `counts`; it may be entered within itself."""
        counts = Counts() if counts is None else counts
        self.counted.append(counts)
        try:
            yield counts
        finally:
            self.counted.remove(counts)

    def launch(self, name: str, number: int) -> None:
        if self._graph is not None:
            self._graph.kernels[name] += number
            return
        for counts in self.counted:
            counts.launches[name] += number

    def wait(self, name: str) -> None:
        if self._graph is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")
        where = _place_in_shoal()
        for counts in self.counted:
            counts.waits[f"{name} ({where})"] += 1

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch, and count it."""
        name = func._schema.name.removeprefix("aten::")
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_gpu, asked, pinned = [_claimed(tensor) for tensor in read], kwargs.get("device"), kwargs.get("pin_memory")
        for_gpu = (any(on_gpu) and not pinned) or (asked is not None and asked.type == "cuda")
        if asked is not None:
            kwargs = {**kwargs, "device": _CPU}
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        if self._graph is not None and (func._schema.is_mutable or name in _HIDDEN_WRITES):
            self._graph.keep(read)
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if pinned:
            made[0].untyped_storage().pinned = True  # type: ignore[attr-defined]
        if not for_gpu:
            return result
        self._count_waits(func, name, read, on_gpu, args, kwargs)
        if name == "_local_scalar_dense":
            return result
        if name != "copy_":  # torch's C++ asks for the CPU by name where it makes a tensor like another one
            for tensor in made:
                _mark(tensor, True)
        if not (func.is_view or name.startswith(_NO_KERNEL) or not any(t.numel() for t in (made or read))):
            self.launch(name, _launches(name, args, kwargs))
        if self._graph is not None and not name.startswith(_NO_KERNEL):
            self._graph.calls.append((func, args, kwargs, result))
        return result

    def _count_waits(
        self, func: Any, name: str, read: list[Tensor], on_gpu: list[bool], args: Any, kwargs: Any
    ) -> None:
        if name == "_local_scalar_dense" or torch.Tag.data_dependent_output in func.tags:
            self.wait(name)
        elif name in ("copy_", "_to_copy"):
            source = read[-1] if name == "copy_" else read[0]
            to_gpu = name == "_to_copy" or on_gpu[0]  # copies to the host by `to` are made by `_moved`
            free = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
            pinned = getattr((source if to_gpu else read[0]).untyped_storage(), "pinned", False)
            if to_gpu != _claimed(source) and not (free and pinned):
                self.wait(f"{name} to {'device' if to_gpu else 'host'}")
        elif name in ("index", "index_put_", "_index_put_impl_"):
            places = [place for place in args[1] if place is not None]
            if not all(map(_claimed, places)):
                self.wait(f"{name} by a tensor of the host")
            by_mask = any(place.dtype in (torch.bool, torch.uint8) for place in places)
            if by_mask and (name == "index" or args[2].numel() != 1):  # one number by a mask is `masked_fill_`
                self.wait(f"{name} by a mask")
        elif torch.Tag.dynamic_output_shape in func.tags:
            self.wait(name)
        elif any(tensor.dim() and not claimed for tensor, claimed in zip(read, on_gpu, strict=True)):
            raise RuntimeError(f"Expected all tensors to be on the same device, but got cpu and cuda:0 ({name})")

    def _tensor_members(self) -> Iterable[tuple[Any, str, Any]]:
        """What tensors are asked for without a function that the mode sees."""
        base = torch._C.TensorBase

        def device(tensor: Tensor) -> torch.device:
            return _CUDA if _claimed(tensor) else base.device.__get__(tensor)

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if isinstance(tensor, Stacked):
                return base.to(tensor, *args, **kwargs)
            return self._moved(tensor, args, kwargs)

        def read(tensor: Tensor, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if _claimed(tensor):
                self.wait(function.__name__)
            return function(tensor, *args, **kwargs)

        def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if _claimed(tensor):
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            return base.numpy(tensor, *args, **kwargs)

        yield torch.Tensor, "device", property(device)
        yield torch.Tensor, "is_cuda", property(_claimed)
        yield torch.Tensor, "is_cpu", property(lambda tensor: not _claimed(tensor))
        yield torch.Tensor, "to", to
        yield torch.Tensor, "cpu", lambda tensor: tensor.to(_CPU)
        yield torch.Tensor, "cuda", lambda tensor: tensor.to(_CUDA)
        yield torch.Tensor, "numpy", numpy
        yield torch.Tensor, "tolist", lambda tensor: read(tensor, base.tolist)
        yield torch.Tensor, "pin_memory", _pinned_copy
        yield torch.Tensor, "is_pinned", lambda tensor, *rest: getattr(tensor.untyped_storage(), "pinned", False)
        yield torch.Tensor, "record_stream", lambda tensor, stream: None
        group = torch._C._group_tensors_by_device_and_dtype

        def grouped(lists: list[list[Any]], with_indices: bool = False) -> Any:
            return {(lists[0][0].device, dtype): found for (_, dtype), found in group(lists, with_indices).items()}

        yield torch._C, "_group_tensors_by_device_and_dtype", grouped
        yield torch, "tensor", self._made(torch.tensor)
        yield torch, "as_tensor", self._made(torch.as_tensor)

    def _moved(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What `to` returns; torch itself sees only one device."""
        values = (*args, *kwargs.values())
        like = next((x for x in values if isinstance(x, Tensor)), None)
        place = tensor.device if like is None else like.device
        place = next((torch.device(x) for x in values if isinstance(x, (str, torch.device))), place)
        dtype = next((x for x in values if isinstance(x, torch.dtype)), tensor.dtype if like is None else like.dtype)
        flags = [x for x in args if isinstance(x, bool)]
        options = {**dict(zip(("non_blocking", "copy"), flags, strict=False)), **kwargs}
        options = {name: options[name] for name in ("non_blocking", "copy", "memory_format") if name in options}
        on_gpu = _claimed(tensor)
        if place.type == "cuda" and not on_gpu:
            return torch._C.TensorBase.to(tensor, _CUDA, dtype, **options)
        if place.type == "cpu" and on_gpu:
            if not options.get("non_blocking"):  # else torch copies into pinned memory
                self.wait("to host")
            tensor = tensor.clone()
            _mark(tensor, False)
        return torch._C.TensorBase.to(tensor, dtype, **options)

    def _made(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        as_tensor = torch.as_tensor

        def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.pop("device", None)
            if isinstance(data, Tensor) and function is as_tensor:
                return data.to(device or data.device, kwargs.get("dtype") or data.dtype)
            made = function(data, *args, **kwargs)
            if device is not None and torch.device(device).type == "cuda":
                self.wait(f"{function.__name__} of the host's numbers")
                self.launch("_to_copy", 1)
                _mark(made, True)
            return made

        return make

    def _cuda_functions(self) -> Iterable[tuple[Any, str, Any]]:
        stream = type("Stream", (_Stream,), {"gpu": self})
        stand_ins: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_initialized": lambda: False,
            "synchronize": lambda device=None: self.wait("synchronize"),
            "is_current_stream_capturing": lambda: self._graph is not None,
            "current_stream": lambda device=None: stream(),
            "set_stream": lambda stream: None,
            "stream": lambda stream: nullcontext(),
            "Stream": stream,
            "Event": stream,
            "CUDAGraph": type("CUDAGraph", (_Graph,), {"gpu": self}),
            "graph_pool_handle": lambda: None,
            "get_device_name": lambda device=None: "pretended",
            "current_device": lambda: 0,
            "get_rng_state": lambda device=None: self._generator.get_state(),
            "set_rng_state": lambda state, device=None: self._generator.set_state(state),
            "manual_seed": lambda seed: self._generator.manual_seed(seed),
            "default_generators": (self._generator,),
        }
        yield torch._C, "_cuda_clearCublasWorkspaces", lambda: None
        yield from ((torch.cuda, name, value) for name, value in stand_ins.items())

    def _names_in_shoal(self) -> Iterable[tuple[Any, str, Any]]:
        """Shoal leaves dispatch modes, or asks for one, where it may be traced; this one is none of those."""

        def current() -> Any:
            mode = _get_current_dispatch_mode()
            return None if mode is self._mode else mode

        @contextmanager
        def without_modes() -> Iterator[None]:
            with _disable_current_modes(), self._mode:
                yield

        for module in (randomness, constants, autotune, recurrent, transaction):
            for name, value in (("_get_current_dispatch_mode", current), ("_disable_current_modes", without_modes)):
                if hasattr(module, name):
                    yield module, name, value

    def record(self, graph: "_Graph | None") -> None:
        """Record what runs from now on as a graph; None: no more."""
        self._graph = graph


class _Mode(TorchDispatchMode):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._gpu.run(func, args, kwargs or {})


class _Graph:
    """A recorded CUDA graph of so many kernels."""

    gpu: PretendedGpu

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.gpu.record(self)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the values of tensors, which a function that is recorded may write."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._before:
                self._before[storage._cdata] = storage, storage.clone()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        self.gpu.record(None)
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        self.gpu.launch("graph", 1)
        for counts in self.gpu.counted:
            counts.in_graphs.update(self.kernels)
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, recorded in self.calls:
                if func.is_view:
                    continue
                made = func(*args, **kwargs)
                for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(made), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)


class _Stream:
    """A stream or an event; all work of this GPU is done at once."""

    gpu: PretendedGpu
    device = _CUDA

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None:
        self.gpu.wait("synchronize")

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> "_Stream":
        return self

    wait_event = wait_stream = wait = record


def _place_in_shoal() -> str:
    """The innermost line of Shoal that is running, else the innermost one of torch's Python."""
    frame: FrameType | None = sys._getframe(2)
    first = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/shoal/" in file:
            return f"{file.rpartition('/')[2]}:{frame.f_lineno}{first}"
        if not first and "/torch/" in file and "/_compile" not in file and "eval_frame" not in file:
            first = f", {file.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return first.removeprefix(", ")


def _claimed(tensor: Tensor) -> bool:
    """Whether a tensor is on the GPU."""
    if isinstance(tensor, Stacked):
        return _claimed(tensor.whole)
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with torch._C.DisableTorchFunction():
        return torch._C._has_storage(tensor) and getattr(tensor.untyped_storage(), "claimed", False)


def _mark(tensor: Tensor, claimed: bool) -> None:
    if type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, nn.Parameter):
        with torch._C.DisableTorchFunction():
            if torch._C._has_storage(tensor):
                tensor.untyped_storage().claimed = claimed  # type: ignore[attr-defined]


def _pinned_copy(tensor: Tensor, *device: Any) -> Tensor:
    copied = tensor.clone()
    copied.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return copied


def _launches(name: str, args: Any, kwargs: Any) -> int:
    """The number of kernels that a function of CUDA tensors launches."""
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    if name == "convolution_backward":
        return sum(args[-1])
    if name.startswith("_fused_"):
        if len({t.dtype for tensors in lists[: None if "sgd" in name else -1] for t in tensors}) > 1:
            raise RuntimeError(f"params, grads and moments must have same dtype, device, and layout ({name})")
        depth = len(lists) - ("sgd" not in name)  # the counts are no list of the kernel's
        return _multi_tensor([t.numel() for t in lists[0]], min(depth, 5))
    if not name.startswith("_foreach_"):
        return _KERNELS.get(name, 1)
    if not _takes_fast_path(lists):
        return len(lists[0])
    if name.startswith("_foreach_norm"):
        return 1 + _multi_tensor([t.numel() for t in lists[0]], 1)
    depth = len(lists) + (not name.endswith("_") and name != "_foreach_zero_")
    return _multi_tensor([t.numel() for t in lists[0]], min(depth, 5))


def _takes_fast_path(lists: list[Any]) -> bool:
    """Whether torch runs lists by multi-tensor kernels (`can_use_fast_route`), not one tensor after another."""
    first = lists[0]
    for column in zip(*lists, strict=True):
        for tensor in column:
            if tensor.dtype != first[0].dtype or tensor.shape != column[0].shape:
                return False
            if not _is_dense(tensor) or _steps(tensor) != _steps(column[0]):
                return False
    return True


def _steps(tensor: Tensor) -> list[int]:
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _multi_tensor(sizes: list[int], depth: int) -> int:
    """The number of launches of a multi-tensor kernel over so many lists."""
    launches = tensors = blocks = 0
    for size in sizes:
        if not size:
            continue
        tensors += 1
        chunks = -(-size // _CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == _MAX_BLOCKS or (last and tensors == _MAX_TENSORS[depth - 1]):
                launches, blocks, tensors = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)
