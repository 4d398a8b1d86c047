"""The autotuner: times several lowerings (implementations) of a function on this machine, and uses the fastest one.

A lowering is timed on the tensors of the call, forward and, if they require gradients, backward. Within
`timed_by_replay` it is timed as part of a CUDA graph, where launches cost next to nothing. A result holds for the
same function, settings, shapes, strides, dtypes and device, also in later processes; within a process, also for nearly
the same sizes, since batches of sentences bring new shapes all the time. Once the time for measurements is spent, the
result for the nearest sizes holds at any distance. `SHOAL_AUTOTUNE=0` in the environment turns the autotuner off: the
first lowering is used.
"""

import contextlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.core.activity import Activity
from shoal.fuse.cuda_graph import record_graph
from shoal.fuse.generators import preserved_rng
from shoal.fuse.race import Race, RaceRules, choose_fastest
from shoal.host.activity_clock import during
from shoal.plan.cost.history import cache_directory

__all__ = [
    "Layouts",
    "TuningBudget",
    "TuningCache",
    "autocast_state",
    "autotuning",
    "fastest",
    "forced_lowerings",
    "timed_by_replay",
    "times_replays",
    "without_autotuning",
]

_log = logging.getLogger("shoal.fuse")

T = TypeVar("T")

Layouts = Mapping[str, Callable[..., Sequence[Tensor | None]]]
"""Lowering -> function that returns its tensors in the memory layout that suits the lowering best."""

_RULES = RaceRules(max_runs=9, drop_ratio=2.0, drop_after_seconds=0.02, margin=1.03, budget_seconds=2.0)
"""Rules of a race; slow candidates are dropped early, since training waits for the race."""

_DEVICES = ("cpu", "cuda")
"""Kinds of devices on which functions can be timed."""

_MAX_LOG_RATIO = math.log(1.5)
"""Largest difference of log sizes at which tensors count as nearly equal in size: a factor of 1.5 in elements."""

_ALLOWANCE_SECONDS = 20.0
_BUDGET_SHARE = 0.05


class TuningCache:
    """The fastest lowering by key, stored across processes as one JSON object per line, of which the last one counts.

    Each line is appended by one write, so several processes may append at once. An unreadable line is skipped and
    logged. A file that cannot be read or written is not used again; results are then kept in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else cache_directory() / "lowerings-2.jsonl"
        self._lowerings: dict[str, str] | None = None
        self._usable = True

    def get(self, key: str) -> str | None:
        """The fastest lowering of a key, or None if the key was never measured."""
        if self._lowerings is None:
            self._lowerings = self._load()
        return self._lowerings.get(key)

    def put(self, key: str, lowering: str, seconds: Mapping[str, float]) -> None:
        """Store a result with the seconds of each lowering."""
        if self._lowerings is None:
            self._lowerings = self._load()
        self._lowerings[key] = lowering
        if not self._usable:
            return
        line = json.dumps(
            {"key": key, "lowering": lowering, "seconds": {name: float(f"{s:.3g}") for name, s in seconds.items()}}
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, f"\n{line}\n".encode())  # the first ends a line that another process left unfinished
            finally:
                os.close(file)
        except OSError as error:
            self._disable(error)

    def _load(self) -> dict[str, str]:
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._disable(error)
            return {}
        found = {}
        torn = 0
        for line in filter(None, lines):
            try:
                entry = json.loads(line)
                found[str(entry["key"])] = str(entry["lowering"])
            except (ValueError, KeyError, TypeError):
                torn += 1
        if torn:
            _log.warning("%d lines of %s cannot be read; their lowerings are measured anew", torn, self.path)
        return found

    def _disable(self, error: OSError) -> None:
        self._usable = False
        _log.warning(
            "the autotuner's file %s cannot be used (%s); its findings are kept in memory only. Set SHOAL_CACHE to a "
            "directory that can be written.",
            self.path,
            error,
        )


@dataclass
class TuningBudget:
    """Time budget of measurements: a fixed allowance, enough for all layers of a large model, plus a share of the run.

    A limit on the number of races would be too high for a short run on sentences, or too low for many different layers.
    """

    clock: Callable[[], float] = time.perf_counter
    _began: float | None = field(default=None, init=False)
    _spent: float = field(default=0.0, init=False)

    def left(self) -> bool:
        """Whether there is time for another race; the first call starts the clock."""
        if self._began is None:
            self._began = self.clock()
        return self._spent < _ALLOWANCE_SECONDS + _BUDGET_SHARE * (self.clock() - self._began)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Context manager that charges the time spent in it to the budget."""
        start = self.clock()
        try:
            yield
        finally:
            self._spent += self.clock() - start


@dataclass(eq=False)
class _Tuner:
    active: bool
    findings: TuningCache = field(default_factory=TuningCache)
    forced: Mapping[str, str] = field(default_factory=dict)
    budget: TuningBudget = field(default_factory=TuningBudget)
    known: dict[Hashable, str] = field(default_factory=dict)
    sized: dict[Hashable, list[tuple[list[float], str]]] = field(default_factory=dict)
    replays: bool = False


_tuners = [_Tuner(os.environ.get("SHOAL_AUTOTUNE", "1") != "0")]
"""Stack of tuners; the last one is used in all threads, since backward passes run in threads of autograd."""

_racing = Lock()
"""Lock of the running race. No thread waits for it: autograd's threads may have to serve the race itself."""


def fastest(
    name: str,
    lowerings: Mapping[str, Callable[..., T]],
    tensors: Sequence[Tensor | None],
    settings: Hashable = (),
    layouts: Layouts = MappingProxyType({}),
) -> T:
    """Run the fastest of several lowerings, which compute the same result from the same tensors.

    The first lowering runs where nothing can be measured: with autotuning off, in a trace, in a CUDA graph, on tensors
    without data, under a transform of `torch.func`, and while another thread measures. It always runs under hooks of
    saved tensors, because a checkpoint must save the same tensors when it runs again. A process keeps what it has found
    when its number of threads changes; the file has it for each number.

    Args:
        lowerings: Functions of `tensors` by name, the default first; they write to no tensor and draw no numbers.
        settings: Other values that the time depends on; plain values, since their `repr` is stored on disk.
        layouts: Lowerings with a preferred memory layout, in which they are timed: their arguments have this layout if
            another such lowering, or a compiled function, computed them.
    """
    tuner = _tuners[-1]
    lowering: str | None = None
    if tuner.forced:
        lowering = tuner.forced.get(name)
    elif tuner.active and len(lowerings) > 1 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        run = (torch.is_grad_enabled(), autocast_state(), tuner.replays)
        key = (name, settings, *run, *map(_traits, tensors))
        lowering = tuner.known.get(key)
        if lowering is None:
            lowering = _find(tuner, key, lowerings, tensors, layouts)
    if lowering is None or lowering not in lowerings:
        lowering = next(iter(lowerings))
    return lowerings[lowering](*tensors)


def _layout_traits(tensor: Tensor | None) -> Any:
    """As `_traits`, but without sizes and with the memory order of the axes in place of strides."""
    if tensor is None:
        return None
    stride = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -stride[axis]))
    return order, tensor.dtype, tensor.requires_grad, tensor.device


def _sizes(tensors: Sequence[Tensor]) -> list[float]:
    return [math.log(max(1, tensor.numel())) for tensor in tensors]


def _traits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.device


def autocast_state() -> Any:
    """Device types under autocast, each with its dtype of computation; None without autocast."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind))


def _find(
    tuner: _Tuner,
    key: tuple[Hashable, ...],
    lowerings: Mapping[str, Callable[..., Any]],
    tensors: Sequence[Tensor | None],
    layouts: Layouts,
) -> str | None:
    """Find the lowering in the file, by the nearest sizes, or by a race, in this order; None if that is impossible."""
    given = [tensor for tensor in tensors if tensor is not None]
    text = f"{_environment(given[0].device)}: {key}"
    similar = tuner.sized.setdefault((*key[: -len(tensors)], *map(_layout_traits, tensors)), [])
    lowering = tuner.findings.get(text)
    if lowering is None or lowering not in lowerings:
        if not _measurable(given):
            return None
        may_race = tuner.budget.left()
        near = _nearest(similar, _sizes(given), lowerings, _MAX_LOG_RATIO if may_race else math.inf)
        if near is not None:
            tuner.known[key] = near
            return near
        if not _racing.acquire(blocking=False):
            return None
        try:
            with tuner.budget.charged(), during(Activity.AUTOTUNE):
                race = _benchmark(lowerings, tensors, layouts, tuner.replays)
        finally:
            _racing.release()
        lowering, seconds = race.leader, race.seconds
        tuner.findings.put(text, lowering, seconds)
        times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in seconds.items())
        _log.info("%r is the fastest lowering (%s): %s", lowering, times, text)
    similar.append((_sizes(given), lowering))
    tuner.known[key] = lowering
    return lowering


def _nearest(
    similar: Sequence[tuple[list[float], str]], sizes: list[float], lowerings: Collection[str], within: float
) -> str | None:
    """The lowering for the nearest sizes; None if no result is within the given distance."""
    found = [
        (math.dist(sizes, others), lowering)
        for others, lowering in similar
        if lowering in lowerings
        and all(abs(mine - theirs) <= within for mine, theirs in zip(sizes, others, strict=True))
    ]
    return min(found)[1] if found else None


def _measurable(tensors: Sequence[Tensor]) -> bool:
    """Whether functions of the tensors can be timed: they hold data, and no tracer, transform or graph records them."""
    if _get_current_dispatch_mode() is not None or torch.compiler.is_compiling():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if any(type(t) not in (Tensor, nn.Parameter) or t.device.type not in _DEVICES for t in tensors):
        return False
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _environment(device: torch.device) -> str:
    if device.type == "cuda":
        return f"torch {torch.__version__}, {torch.cuda.get_device_name(device)}"
    kind = platform.processor() or platform.machine()
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"torch {torch.__version__}, {kind} {capability}, {threads} threads"


@contextmanager
def _using(tuner: _Tuner) -> Iterator[None]:
    _tuners.append(tuner)
    try:
        yield
    finally:
        _tuners.remove(tuner)  # not always the last one: threads leave in any order


def autotuning(path: Path, budget: TuningBudget | None = None) -> AbstractContextManager[None]:
    """Context manager that chooses lowerings by measurement, within `budget`, and stores results in the file `path`."""
    return _using(_Tuner(True, TuningCache(path), budget=budget or TuningBudget()))


def timed_by_replay() -> AbstractContextManager[None]:
    """Context manager for a step that is to be a CUDA graph: lowerings are timed as replays of graphs of their own."""
    return _using(replace(_tuners[-1], replays=True))


def times_replays() -> bool:
    """Whether the code runs within `timed_by_replay`."""
    return _tuners[-1].replays


def without_autotuning() -> AbstractContextManager[None]:
    """Context manager in which the first lowering is used."""
    return _using(replace(_tuners[-1], active=False, forced={}))


def forced_lowerings(lowerings: Mapping[str, str]) -> AbstractContextManager[None]:
    """Context manager that uses the given lowerings, such as `{"conv2d": "loop"}`, or else the first, unmeasured."""
    return _using(replace(_tuners[-1], active=False, forced=lowerings))


def _benchmark(
    lowerings: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor | None], layouts: Layouts, replays: bool
) -> Race[str]:
    device = next(tensor.device for tensor in tensors if tensor is not None)
    given = {name: layouts[name](*tensors) if name in layouts else tensors for name in lowerings}
    runs: dict[str, Callable[[], float]] = {}
    for name, lowering in lowerings.items():
        leaves = [_detached_leaf(tensor) for tensor in given[name]]
        runs[name] = partial(_seconds_of_run, lowering, leaves, device)
        if replays:
            runs[name] = _RecordedRun(lowering, leaves, device)
    with _isolated(device):
        return choose_fastest(runs, _RULES, expected_errors=(RuntimeError,))


def _detached_leaf(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


@contextlib.contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Context manager whose code does not affect the caller's modes, random numbers and autocast cache."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(preserved_rng(device))
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            stack.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
        yield


def _seconds_of_run(lowering: Callable[..., Any], leaves: Sequence[Tensor | None], device: torch.device) -> float:
    start = _now(device)
    result = lowering(*leaves)
    seconds = _now(device) - start
    if (backward := _backward_of(result, leaves)) is not None:
        start = _now(device)
        backward()
        seconds += _now(device) - start
    return seconds


def _backward_of(result: Any, leaves: Sequence[Tensor | None]) -> Callable[[], Any] | None:
    """The backward pass of a result from gradients of one; None if nothing requires gradients."""
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        return None
    end = _BackwardSeed.apply([torch.ones_like(output) for output in outputs], *outputs)  # type: ignore[no-untyped-call]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return partial(torch.autograd.grad, end, wanted, allow_unused=True)


class _RecordedRun:
    """A run of a lowering as a CUDA graph, which its first call records; each call returns the seconds of a replay."""

    def __init__(self, lowering: Callable[..., Any], leaves: Sequence[Tensor | None], device: torch.device) -> None:
        self._lowering = lowering
        self._leaves = leaves
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> float:
        if self._graph is None:
            self._forward_and_backward()  # loads libraries, which recording must not do
            self._graph, _ = record_graph(self._forward_and_backward, self._device)
        start = _now(self._device)
        self._graph.replay()
        return _now(self._device) - start

    def _forward_and_backward(self) -> None:
        if (backward := _backward_of(self._lowering(*self._leaves), self._leaves)) is not None:
            backward()


class _BackwardSeed(torch.autograd.Function):
    """A scalar whose backward pass starts with given gradients; `torch.autograd.grad` would import SymPy (0.3 s)."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=outputs[0].device)  # real, even for complex outputs

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
