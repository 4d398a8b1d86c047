"""The autotuner: times several ways to compute the same result on this machine, and takes the fastest.

A way is timed on the tensors at hand, forward and, if they require gradients, backward. A finding holds for the same
function, settings, shapes, strides, types and device, and for every later process; see `shoal.fuse.tuning_cache`.

Batches of sentences, and arrays that gain and lose members, never stop bringing new shapes. So within this process a
finding also holds for tensors of nearly the same sizes, and when the time for races is used up (`TuningBudget`), for
the nearest sizes at any distance. A function without any finding is still timed then. `SHOAL_AUTOTUNE=0` in the
environment turns the autotuner off: then, and wherever nothing may be measured, the first way is taken.
"""

import contextlib
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
from shoal.cost.activity_clock import during
from shoal.cost.race import Race, RaceRules, choose_fastest
from shoal.fuse.generators import undrawn
from shoal.fuse.tuning_cache import TuningCache

__all__ = ["Layouts", "TuningBudget", "fastest", "forced", "off", "on"]

_log = logging.getLogger("shoal.fuse")

T = TypeVar("T")

Layouts = Mapping[str, Callable[..., Sequence[Tensor | None]]]
"""Way -> function that returns its tensors in the memory layout that suits the way best."""

_RULES = RaceRules(max_runs=9, drop_ratio=3.0, drop_after_seconds=0.02, margin=1.03, budget_seconds=2.0)
"""Rules of a race; candidates are given up soon, since training waits for the race."""

_DEVICES = ("cpu", "cuda")
"""Kinds of devices on which functions can be timed."""

_NEAR = math.log(1.5)
"""Largest difference of log sizes at which tensors count as nearly the same: a factor of 1.5 in elements."""

_ALLOWANCE_SECONDS = 20.0
_SHARE = 0.05


@dataclass
class TuningBudget:
    """Time for races: an allowance, enough for all layers of a large model, then a share of the time that passes.

    The budget bounds the cost of measuring for any sequence of shapes. A limit on the number of races would be too high
    for a short run on sentences, or too low for a model of many different layers.

    Args:
        clock: Clock in seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    _began: float | None = field(default=None, init=False)
    _spent: float = field(default=0.0, init=False)

    def left(self) -> bool:
        """Whether there is time for another race; the first call starts the clock."""
        if self._began is None:
            self._began = self.clock()
        return self._spent < _ALLOWANCE_SECONDS + _SHARE * (self.clock() - self._began)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time spent within to the budget."""
        start = self.clock()
        try:
            yield
        finally:
            self._spent += self.clock() - start


@dataclass(eq=False)
class _Tuner:
    """Settings and findings of the autotuner.

    Args:
        active: Whether ways are chosen by measurement; else the first is taken.
        findings: Findings on disk.
        forced: Function name -> way to take, whatever was found.
        budget: Time for races.
        known: Everything that a finding depends on -> way, found, read or taken over from near sizes.
        sized: Everything but sizes -> ways found or read, each with the logarithm of each tensor's size.
    """

    active: bool
    findings: TuningCache = field(default_factory=TuningCache)
    forced: Mapping[str, str] = field(default_factory=dict)
    budget: TuningBudget = field(default_factory=TuningBudget)
    known: dict[Hashable, str] = field(default_factory=dict)
    sized: dict[Hashable, list[tuple[list[float], str]]] = field(default_factory=dict)


_tuners = [_Tuner(os.environ.get("SHOAL_AUTOTUNE", "1") != "0")]
"""Stack of tuners; the last one counts in all threads, since backward passes run in threads of autograd."""

_racing = Lock()
"""Lock of the running race. No thread waits for it: autograd's threads may have to serve the race itself."""


def fastest(
    name: str,
    ways: Mapping[str, Callable[..., T]],
    tensors: Sequence[Tensor | None],
    settings: Hashable = (),
    layouts: Layouts = MappingProxyType({}),
) -> T:
    """Run one of several ways that compute the same result from the same tensors.

    The way that measured fastest runs. Without a finding, the first way runs where nothing may be measured: with
    autotuning off, in a trace, in a CUDA graph, on tensors without data, under a transform of `torch.func`, and while
    another thread measures. Under hooks of saved tensors the first way always runs, because a checkpoint must save the
    same tensors when it runs again.

    Args:
        name: Name of the computed function, "conv2d".
        ways: Functions of `tensors` by name, the default first. They do not write to the tensors and draw no random
            numbers. Equal names, settings, shapes, strides and types mean equal ways.
        tensors: All plain tensors that the ways depend on.
        settings: Other values that the time depends on; plain, since their `repr` is kept on disk.
        layouts: Ways with a preferred memory layout, which is used in the race: tensors come so laid out where one such
            way follows another, and where a compiler writes them.

    Returns:
        A tensor, or a tuple of tensors.
    """
    tuner = _tuners[-1]
    way: str | None = None
    if tuner.forced:
        way = tuner.forced.get(name)
    elif tuner.active and len(ways) > 1 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        key = (name, settings, torch.is_grad_enabled(), torch.get_num_threads(), _autocast(), *map(_traits, tensors))
        way = tuner.known.get(key)
        if way is None:
            way = _find(tuner, key, ways, tensors, layouts)
    if way is None or way not in ways:
        way = next(iter(ways))
    return ways[way](*tensors)


def _kind(tensor: Tensor | None) -> Any:
    """As `_traits` without sizes: of strides only the order of the axes in memory."""
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


def _autocast() -> Any:
    """Kinds of devices under autocast with the type that functions compute in, or None."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind))


def _find(
    tuner: _Tuner,
    key: tuple[Hashable, ...],
    ways: Mapping[str, Callable[..., Any]],
    tensors: Sequence[Tensor | None],
    layouts: Layouts,
) -> str | None:
    """Find the way by the file, else by the nearest sizes, else by a race; None if none of these is possible."""
    given = [tensor for tensor in tensors if tensor is not None]
    text = f"{_environment(given[0].device)}: {key}"
    alike = tuner.sized.setdefault((*key[: -len(tensors)], *map(_kind, tensors)), [])
    way = tuner.findings.get(text)
    if way is None or way not in ways:
        if not _measurable(given):
            return None
        may_race = tuner.budget.left()
        near = _nearest(alike, _sizes(given), ways, _NEAR if may_race else math.inf)
        if near is not None:
            tuner.known[key] = near
            return near
        if not _racing.acquire(blocking=False):
            return None
        try:
            with tuner.budget.charged(), during(Activity.RACES):
                race = _benchmark(ways, tensors, layouts)
        finally:
            _racing.release()
        way, seconds = race.leader, race.seconds
        tuner.findings.put(text, way, seconds)
        times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in seconds.items())
        _log.info("%r is the fastest way (%s): %s", way, times, text)
    alike.append((_sizes(given), way))
    tuner.known[key] = way
    return way


def _nearest(
    alike: Sequence[tuple[list[float], str]], sizes: list[float], ways: Collection[str], within: float
) -> str | None:
    """The way found for the nearest sizes; None if no finding is within the given distance.

    Args:
        alike: Findings: logarithms of the tensors' sizes, and the way.
        sizes: Logarithms of the tensors' sizes.
        ways: Allowed ways.
        within: Largest difference of the logarithms of any tensor's size.
    """
    found = [
        (math.dist(sizes, others), way)
        for others, way in alike
        if way in ways and all(abs(mine - theirs) <= within for mine, theirs in zip(sizes, others, strict=True))
    ]
    return min(found)[1] if found else None


def _measurable(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors hold data, and functions of them run at once and unrecorded."""
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
    return f"torch {torch.__version__}, {kind} {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def _with(tuner: _Tuner) -> Iterator[None]:
    _tuners.append(tuner)
    try:
        yield
    finally:
        _tuners.remove(tuner)  # perhaps not the last one: threads may leave in any order


def on(path: Path, budget: TuningBudget | None = None) -> AbstractContextManager[None]:
    """Within, ways are chosen by measurement, in the time of `budget`; findings are kept in the file `path`."""
    return _with(_Tuner(True, TuningCache(path), budget=budget or TuningBudget()))


def off() -> AbstractContextManager[None]:
    """Within, the first way is taken."""
    return _with(replace(_tuners[-1], active=False, forced={}))


def forced(ways: Mapping[str, str]) -> AbstractContextManager[None]:
    """Within, nothing is measured, and functions take these ways, `{"conv2d": "loop"}`, or else the first."""
    return _with(replace(_tuners[-1], active=False, forced=ways))


def _benchmark(ways: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor | None], layouts: Layouts) -> Race[str]:
    """Find the fastest of several ways to compute the same thing.

    Args:
        ways: As for `fastest`. An error of the first way is raised; another way that raises is out of the race.
        tensors: Arguments of the ways. If gradients are enabled, they are computed for tensors that require one,
            outside of the tensors' own graph.
        layouts: As for `fastest`.

    Returns:
        The finished race.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    given = {name: layouts[name](*tensors) if name in layouts else tensors for name in ways}
    runs = {name: partial(_pass, way, [_leaf(tensor) for tensor in given[name]], device) for name, way in ways.items()}
    with _unseen(device):
        return choose_fastest(runs, _RULES, expected_errors=(RuntimeError,))


def _leaf(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())


@contextlib.contextmanager
def _unseen(device: torch.device) -> Iterator[None]:
    """Keep the caller's modes, random numbers and caches unchanged by the functions that run within."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(undrawn(device))
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            stack.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
        yield


def _pass(way: Callable[..., Any], leaves: Sequence[Tensor | None], device: torch.device) -> float:
    """Seconds of one run of a way, forward and backward."""
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

    `torch.autograd.grad` also takes gradients, but imports SymPy to check them, which takes a process 0.3 s.
    """

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
