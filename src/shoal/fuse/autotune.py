"""Which of several ways to compute the same thing is the fastest here, found by trying them.

A way is tried on the tensors at hand, forward and, if they ask for it, backward. What is found holds for the same
function, settings, shapes, strides, types and device, and for every later process; see `shoal.fuse.findings`.
`SHOAL_AUTOTUNE=0` in the environment turns it off: then, and wherever nothing may be measured, the first way is taken.
"""

import logging
import os
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.fuse.findings import Findings
from shoal.fuse.race import race

__all__ = ["fastest", "forced", "off", "on"]

_log = logging.getLogger("shoal.fuse")

T = TypeVar("T")

_DEVICES = ("cpu", "cuda")
"""Where it is known how to take the time."""

_WORTH = 0.95
"""Another way has to take less than this part of the time of the first one: measurements are off by some percent."""


@dataclass
class _Tuner:
    """How ways are chosen at the moment.

    Args:
        active: by measurement; else always the first.
        findings: kept on disk.
        forced: ways by the name of the function, whatever was found.
        known: found or read so far, by everything that a finding depends on.
    """

    active: bool
    findings: Findings = field(default_factory=Findings)
    forced: Mapping[str, str] = field(default_factory=dict)
    known: dict[Hashable, str] = field(default_factory=dict)


_tuner = _Tuner(os.environ.get("SHOAL_AUTOTUNE", "1") != "0")


def fastest(
    name: str, ways: Mapping[str, Callable[..., T]], tensors: Sequence[Tensor | None], settings: Hashable = ()
) -> T:
    """Run one of several ways that compute the same result from the same tensors.

    It is the one that measured fastest. It is the first where there is no finding and nothing may be measured: with
    autotuning off, in a trace, in a CUDA graph, on tensors without data, under a transform of `torch.func`; and
    always under hooks of saved tensors, because a checkpoint has to save the same tensors when it runs again.

    Args:
        name: of what is computed, "conv2d".
        ways: functions of `tensors` by name, the default first. They write to none of them and draw no random numbers.
            Equal names, settings, shapes, strides and types mean equal ways.
        tensors: all that the ways depend on; plain.
        settings: whatever else decides about the time; plain values, since their `repr` is kept on disk.

    Returns:
        A tensor, or a tuple of them.
    """
    tuner = _tuner
    way: str | None = None
    if tuner.forced:
        way = tuner.forced.get(name)
    elif tuner.active and len(ways) > 1 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        key = (name, settings, torch.is_grad_enabled(), torch.get_num_threads(), _autocast(), *map(_traits, tensors))
        way = tuner.known.get(key)
        if way is None:
            way = _find(tuner, key, ways, tensors)
    if way is None or way not in ways:
        way = next(iter(ways))
    return ways[way](*tensors)


def _traits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.device


def _autocast() -> Any:
    """The type that functions compute in, by device, or None."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind))


def _find(
    tuner: _Tuner, key: Hashable, ways: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor | None]
) -> str | None:
    """What the file says, else what a race says, else None."""
    given = [tensor for tensor in tensors if tensor is not None]
    text = f"{_environment(given[0].device)}: {key}"
    way = tuner.findings.get(text)
    if way is None or way not in ways:
        if not _measurable(given):
            return None
        seconds = race(ways, tensors)
        way = _winner(seconds)
        shortest = {name: min(runs) for name, runs in seconds.items()}
        tuner.findings.put(text, way, shortest)
        times = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in shortest.items())
        _log.info("%r is the fastest way (%s): %s", way, times, text)
    tuner.known[key] = way
    return way


def _winner(seconds: Mapping[str, Sequence[float]]) -> str:
    """The way with the shortest run, since what disturbs a run only makes it longer.

    It takes the first one's place only where it is the faster one in the middle as well.
    """
    first = next(iter(seconds))
    best = min(seconds, key=lambda name: min(seconds[name]))
    shorter = min(seconds[best]) < _WORTH * min(seconds[first])
    return best if shorter and median(seconds[best]) < median(seconds[first]) else first


def _measurable(tensors: Sequence[Tensor]) -> bool:
    """Do these tensors hold numbers, and would functions of them run now, once, unseen?"""
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
    global _tuner
    before, _tuner = _tuner, tuner
    try:
        yield
    finally:
        _tuner = before


def on(path: Path) -> AbstractContextManager[None]:
    """Within, ways are chosen by measurement, and findings are kept in the file `path`."""
    return _with(_Tuner(True, Findings(path)))


def off() -> AbstractContextManager[None]:
    """Within, the first way is taken."""
    return _with(replace(_tuner, active=False, forced={}))


def forced(ways: Mapping[str, str]) -> AbstractContextManager[None]:
    """Within, nothing is measured and functions go these ways, `{"conv2d": "loop"}`; the first where there is none."""
    return _with(replace(_tuner, active=False, forced=ways))
