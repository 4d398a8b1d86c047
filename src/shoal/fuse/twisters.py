"""The states of Python's and NumPy's default generators, read in the memory they lie in.

To ask for them takes 15 and 70 us, and to compare Python's 30, as tuples and arrays are made of them number by number;
to read 2,500 bytes takes one, and steps that are looked at compare them twice. Where the bytes are not what they are in
CPython, which is found out first, the generators are asked.
"""

import _random
import ctypes
import pickle
import random
from typing import Any, ClassVar

import numpy as np

__all__ = ["NumPyState", "PythonState"]


class PythonState:
    """That of Python's default generator when this is made."""

    def __init__(self) -> None:
        self._seen = _seen_of_python()

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        return _seen_of_python() != self._seen

    def restore(self) -> None:
        """Bring it back."""
        if self.moved():
            twister, gaussian = self._seen
            random.setstate((3, _numbers_of(twister), gaussian) if _PYTHONS_IS_SEEN else twister)


class NumPyState:
    """That of NumPy's default generator when this is made."""

    _without_gaussian: ClassVar[bytes] = b""
    """What is seen beside the twister while no Gaussian is left."""

    def __init__(self) -> None:
        self._seen = _seen_of_numpy()
        self._state: dict[str, Any] | None = None
        if self._seen is None or self._seen[1] != NumPyState._without_gaussian:
            self._state = np.random.get_state(legacy=False)
            if self._seen is not None and not self._state["has_gauss"]:
                NumPyState._without_gaussian, self._state = self._seen[1], None

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = _seen_of_numpy()
        if now is None or self._seen is None:
            return pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(self._state)
        return now != self._seen

    def restore(self) -> None:
        """Bring it back."""
        if self._state is not None:
            np.random.set_state(self._state)
        elif self._seen is not None and self.moved():
            twister = np.frombuffer(self._seen[0], dtype=np.uint32)
            np.random.set_state(("MT19937", twister[:-1], int(twister[-1]), 0, 0.0))


def _seen_of_python() -> tuple[Any, Any]:
    """The twister, and the Gaussian that is left, as these are drawn two at a time."""
    if not _PYTHONS_IS_SEEN:
        return random.getstate(), None
    return _memory(random._inst, _random.Random), vars(random._inst)["gauss_next"]


def _seen_of_numpy() -> tuple[bytes, bytes] | None:
    """The twister, and what its owner holds beside it: a Gaussian that is left, and what it has worked out for
    binomials, which no state has. None where the generator is of another kind.
    """
    if not _NUMPYS_IS_SEEN or type(np.random.mtrand._rand._bit_generator) is not np.random.MT19937:
        return None
    return _twister_of(np.random.mtrand._rand), _memory(np.random.mtrand._rand, np.random.RandomState)


def _twister_of(owner: np.random.RandomState) -> bytes:
    return ctypes.string_at(owner._bit_generator.ctypes.state_address, 4 * 625)


def _memory(of: object, kind: type) -> bytes:
    """What an object holds of a kind that it is of."""
    return ctypes.string_at(id(of) + object.__basicsize__, kind.__basicsize__ - object.__basicsize__)


def _numbers_of(twister: bytes) -> tuple[int, ...]:
    """The key and the position, as `random.getstate` has them."""
    position, *key = np.frombuffer(twister, dtype=np.uint32, count=625).tolist()
    return (*key, position)


def _is_seen_in_python() -> bool:
    own = random.Random(0)
    own.random()
    if not hasattr(random, "_inst") or "gauss_next" not in vars(random._inst):
        return False
    enough = _random.Random.__basicsize__ >= object.__basicsize__ + 4 * 625
    return enough and _numbers_of(_memory(own, _random.Random)) == own.getstate()[1]


def _is_seen_in_numpy() -> bool:
    owner = np.random.RandomState(0)
    if not hasattr(np.random.mtrand, "_rand") or not hasattr(owner, "_bit_generator"):
        return False
    before = _memory(owner, np.random.RandomState)
    owner.randn()
    twister, state = np.frombuffer(_twister_of(owner), dtype=np.uint32), owner.get_state(legacy=False)["state"]
    same = np.array_equal(twister[:-1], state["key"]) and twister[-1] == state["pos"]
    return bool(same) and _memory(owner, np.random.RandomState) != before


_PYTHONS_IS_SEEN, _NUMPYS_IS_SEEN = _is_seen_in_python(), _is_seen_in_numpy()
"""Whether they lie where they do in CPython."""
