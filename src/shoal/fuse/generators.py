"""The default random generators of Python, NumPy and torch: seeding them, and snapshots of their states.

A training step seeds all of them (`seeded`). Where members run one after another, they are seeded again before each
member (`seed_member`), so that user code draws the same numbers as in a run of that member alone.
"""

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import ne
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "DEFAULT_GENERATORS",
    "GENERATOR_STATES",
    "DrawDetector",
    "PythonRngSnapshot",
    "forked_rng",
    "generator_lock",
    "preserved_rng",
    "same_state",
    "seed_all",
    "seed_member",
    "seeded",
]

generator_lock = RLock()
"""Lock for seeding and restoring the default generators, which all threads share, and for the draws in between."""

GENERATOR_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda one: one.bit_generator.state, lambda one, to: setattr(one.bit_generator, "state", to)),
    np.random.RandomState: (lambda one: one.get_state(legacy=False), np.random.RandomState.set_state),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
}
"""Class of random generators -> functions that get and set the state of one."""


def same_state(state: Any, other: Any) -> bool:
    """Whether two states of random generators, or two arrays, are equal bit by bit."""
    if isinstance(state, np.ndarray):
        return bool(state.tobytes() == other.tobytes())
    return torch.equal(state, other) if isinstance(state, Tensor) else repr(state) == repr(other)


DEFAULT_GENERATORS = (random._inst, np.random.mtrand._rand, torch.default_generator)
"""The default generators of Python, NumPy and torch, which Shoal seeds."""

_seeds: ContextVar[tuple[Sequence[int], torch.device] | None] = ContextVar("seeds", default=None)


def seed_all(seed: int, device: torch.device) -> None:
    """Seed all generators on a CPU in 7 microseconds; `torch.manual_seed` takes half a millisecond for torch's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seeds: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed all generators for the first member; in this context, `seed_member` seeds them for another member."""
    token = _seeds.set((seeds, device))
    seed_all(seeds[0], device)
    try:
        yield
    finally:
        _seeds.reset(token)


def seed_member(b: int) -> None:
    """Seed all generators for member b; call it in the context of `seeded`, before member b runs on its own."""
    if (found := _seeds.get()) is not None:
        seeds, device = found
        seed_all(seeds[b], device)


@contextmanager
def forked_rng(devices: Sequence[int]) -> Iterator[None]:
    """Context manager that locks torch's default generators, and restores their states at the end."""
    with generator_lock, torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Context manager that restores torch's generators without a lock, for which a thread of autograd may wait."""
    before = DrawDetector(device)
    try:
        yield
    finally:
        before.restore()


class DrawDetector:
    """Detects draws from torch's default generators since this object was created."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = _states(device)

    def __call__(self) -> bool:
        """Whether a number was drawn."""
        return any(map(ne, map(_bytes, _states(self._device)), map(_bytes, self._states)))

    def restore(self) -> None:
        """Restore the states that the generators had when this object was created."""
        with generator_lock:
            torch.default_generator.set_state(self._states[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._states[1], self._device)


class PythonRngSnapshot:
    """Snapshot of the states of Python's and NumPy's generators, which takes 45 microseconds."""

    def __init__(self) -> None:
        self._states = _python_states()

    def restore(self) -> None:
        """Restore the states."""
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])

    def has_drawn(self) -> bool:
        """Whether a number was drawn since the snapshot."""
        return pickle.dumps(_python_states()) != pickle.dumps(self._states)


def _python_states() -> tuple[tuple[object, ...], dict[str, object]]:
    return random.getstate(), np.random.get_state(legacy=False)


def _states(device: torch.device) -> list[Tensor]:
    with generator_lock:
        states = [torch.default_generator.get_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
