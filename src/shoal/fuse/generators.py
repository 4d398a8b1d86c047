"""The default generators of Python, NumPy and torch, which user code draws from and nobody owns."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import RLock
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.fuse.beside import accompanied
from shoal.fuse.twisters import NumPyState, PythonState

__all__ = ["Drawn", "OtherGenerators", "Unseeded", "forked", "generators", "reseed", "reseed_again", "undrawn"]

generators = RLock()
"""Held by who changes the default generators, which all threads share, and brings them back, or draws in between."""


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
    before = _states(device)
    try:
        yield
    finally:
        _put_back(before, device)


def _states(device: torch.device) -> list[Tensor]:
    """Of the generators of the CPU and, if it is a GPU, of a device."""
    with generators:
        states = [torch.default_generator.get_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states


def _put_back(states: Sequence[Tensor], device: torch.device) -> None:
    with generators:
        torch.default_generator.set_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)


class Drawn:
    """Tells whether anything was drawn from torch's default generators since this was made.

    Args:
        device: whose generator is looked at beside that of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = _states(device)

    def __call__(self) -> bool:
        """Whether it was."""
        return any(not torch.equal(now, then) for now, then in zip(_states(self._device), self._state, strict=True))

    def put_back(self) -> None:
        """Bring the generators back to where they were when this was made."""
        _put_back(self._state, self._device)


def reseed(seed: int, device: torch.device, torchs_alone: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch, which user code draws from.

    `torch.manual_seed` does the same for torch, and takes half a millisecond for it.

    Args:
        seed: of all.
        device: whose generator is seeded beside those of the CPU.
        torchs_alone: Python's and NumPy's stay as they are, for nobody draws from them.
    """
    global _reseeded
    _Stretch.end_present()
    _reseeded = seed, device
    if not torchs_alone:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


_reseeded: tuple[int, torch.device] | None = None


def reseed_again() -> None:
    """Bring the generators back to where they were seeded last, if they ever were."""
    if _reseeded is not None:
        reseed(*_reseeded)


class OtherGenerators:
    """Python's and NumPy's generators as they are when this is made: they know no members.

    Restored before each of several members runs, they let each draw what it would draw alone. In a thread that runs
    beside others they are left alone: who draws from them may not run there, and who does not has no use for it.
    """

    def __init__(self) -> None:
        self._states = () if accompanied() else (PythonState(), NumPyState())

    def restore(self) -> None:
        """Bring them back."""
        for state in self._states:
            state.restore()

    def moved(self) -> bool:
        """Whether anything was drawn from them since; unknown beside other threads, and then taken not to be."""
        return any(state.moved() for state in self._states)


class Unseeded:
    """Lets training go without the generators being seeded for each step and looked at after it, while steps draw
    nothing from them.

    It lasts from when `TRIED` steps in a row have drawn nothing. Whether that stayed so is known when `broken` is
    asked: if it did not, the steps since it was asked before may have drawn what they should not, and are to be done
    again. It never begins again then; nor, for steps of the same kind, when one of the first has drawn. Who only reads
    a generator's seed or state, or puts the state back himself, goes unnoticed.

    Args:
        device: whose generator is looked at beside those of the CPU.
        possible: it may begin at all.
    """

    TRIED = 3

    def __init__(self, device: torch.device, possible: bool = True) -> None:
        self.lasts = False
        """Whether steps are taken unseeded now."""
        self._device = device
        self._possible = possible
        self._to_try: float = self.TRIED if possible else inf
        self._stretch: _Stretch | None = None

    @property
    def trying(self) -> bool:
        """Whether this step is one of those that decide, but for the first, which does what others do not."""
        return 0 < self._to_try < self.TRIED

    def begin_step(self) -> None:
        """To be called right before a step, after its batch was made."""
        if self.lasts:
            if self._stretch is None or self._stretch.over:
                self._note()
                self._stretch = _Stretch.join(self._device)
        elif self._to_try < inf:
            self._stretch = _Stretch(self._device)

    def end_step(self, seen: bool) -> None:
        """To be called right after it.

        Args:
            seen: what the step did can be told, and taken back by going back to a checkpoint.
        """
        if self.lasts or self._stretch is None:
            return
        self._stretch.end()
        self._to_try = self._to_try - 1 if seen and not self._stretch.broken else inf
        self._stretch = None
        self.lasts = self._to_try == 0

    def broken(self) -> bool:
        """Whether anybody has drawn since it was asked before, in steps or between them; then it is over."""
        if self.lasts:
            self._note()
            self.lasts = self._possible
            return not self._possible
        return False

    def pause(self) -> None:
        """Steps of another kind come, which are to be tried as well."""
        self.lasts = False
        self._to_try = self.TRIED if self._possible else inf

    def _note(self) -> None:
        """Find out how the stretch went in which this has taken part."""
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.end()
            if stretch.broken:
                self._possible, self._to_try = False, inf


class _Stretch:
    """Some time in which nobody is to draw. All who take steps unseeded share the present one.

    Args:
        device: whose generator is looked at beside those of the CPU.
    """

    present: "ClassVar[_Stretch | None]" = None

    def __init__(self, device: torch.device) -> None:
        self.over = self.broken = False
        self._device = device
        self._drawn, self._others = Drawn(device), OtherGenerators()

    def end(self) -> None:
        """Find out whether anybody has drawn, if that is not known already."""
        if not self.over:
            self.over = True
            self.broken = self._drawn() or self._others.moved()

    @classmethod
    def join(cls, device: torch.device) -> "_Stretch":
        """The present one, or a new one."""
        if cls.present is None or cls.present.over or cls.present._device != device:
            cls.end_present()
            cls.present = cls(device)
        return cls.present

    @classmethod
    def end_present(cls) -> None:
        """Before the generators are seeded."""
        if cls.present is not None:
            cls.present.end()
            cls.present = None
