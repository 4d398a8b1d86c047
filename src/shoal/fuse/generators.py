"""The default generators of Python, NumPy and torch, which user code draws from and which know no members.

A training step begins with all of them seeded (`seeded`), and where members run one after another, so does each of them
(`seed_member`): so each draws what it would draw alone, and no state has to be read.
"""

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import ne
from threading import RLock

import numpy as np
import torch
from torch import Tensor

__all__ = ["Drawn", "OtherGenerators", "forked", "generators", "reseed", "seed_member", "seeded", "undrawn"]

generators = RLock()
"""Held by who changes the default generators, which all threads share, and brings them back, or draws in between."""

_seeds: ContextVar[tuple[Sequence[int], torch.device] | None] = ContextVar("seeds", default=None)


def reseed(seed: int, device: torch.device) -> None:
    """Seed the generators of Python, NumPy and torch, which takes 7 microseconds on a CPU.

    `torch.manual_seed` does the same for torch, and takes half a millisecond for it.

    Args:
        seed: of all.
        device: whose generator is seeded beside those of the CPU.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def seeded(seeds: Sequence[int], device: torch.device) -> Iterator[None]:
    """Within, all generators begin where the first member's seed puts them, and `seed_member` where another's does."""
    token = _seeds.set((seeds, device))
    reseed(seeds[0], device)
    try:
        yield
    finally:
        _seeds.reset(token)


def seed_member(b: int) -> None:
    """Have the generators where member b is to begin, within `seeded`; to be called before it runs by itself."""
    if (found := _seeds.get()) is not None:
        seeds, device = found
        reseed(seeds[b], device)


@contextmanager
def forked(devices: Sequence[int]) -> Iterator[None]:
    """Within, torch's default generators may be seeded and drawn from: no other thread does so, and none sees it after.

    Args:
        devices: indices of the GPUs whose generators are meant, beside that of the CPU.
    """
    with generators, torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """What is drawn within from torch's default generators is not seen after it.

    Unlike `forked` it locks nobody out in between: a backward pass may run within, which waits for a thread of
    autograd's, and that one may be about to draw for another thread.
    """
    before = Drawn(device)
    try:
        yield
    finally:
        before.restore()


class Drawn:
    """Tells whether anything was drawn from torch's default generators since this was made.

    Args:
        device: whose generator is looked at beside that of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states = _states(device)

    def __call__(self) -> bool:
        """Whether it was."""
        return any(map(ne, map(_bytes, _states(self._device)), map(_bytes, self._states)))

    def restore(self) -> None:
        """Bring the generators back to where they were when this was made."""
        with generators:
            torch.default_generator.set_state(self._states[0])
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(self._states[1], self._device)


class OtherGenerators:
    """Python's and NumPy's generators as they are when this is made, which takes 45 microseconds."""

    def __init__(self) -> None:
        self._states = _others()

    def restore(self) -> None:
        """Bring them back."""
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])

    def moved(self) -> bool:
        """Whether anything was drawn from them since."""
        return pickle.dumps(_others()) != pickle.dumps(self._states)


def _others() -> tuple[tuple[object, ...], dict[str, object]]:
    return random.getstate(), np.random.get_state(legacy=False)


def _states(device: torch.device) -> list[Tensor]:
    """Of the generators of the CPU and, if it is a GPU, of a device."""
    with generators:
        states = [torch.default_generator.get_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()
