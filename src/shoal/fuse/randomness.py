"""Random numbers that belong to the member: a function of its seed, the step, and nothing else.

Dropout masks are counter-based: a strong hash of the element's index, mixed with a key per member and call by two
rounds of multiply and xor-shift (the construction of splitmix and of Wang's integer hashes). So a mask does not depend
on who shares the array, on the dtype or on the device, costs six passes over int32, and can be traced. Any other random
function runs member by member with torch's default generators seeded by the same key.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Randomness", "current", "keep_mask", "member_keys", "randomness"]

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_MULTIPLY = (-2048144789, -1028477387)  # murmur3's finalizer, as int32


def member_keys(seeds: Sequence[int], tick: int) -> Tensor:
    """One int64 key per member from its seed and the number of the call of its model, shape [B]."""
    return _mix64(_mix64(torch.tensor(seeds, dtype=torch.int64)) + tick * 2654435761)


class Randomness:
    """Hands out the keys of one run of a function over the members.

    Args:
        keys: int64 [B], see `member_keys`.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.calls = 0

    def next(self) -> Tensor:
        """The keys [B] of the next random function of this run."""
        self.calls += 1
        return _mix64(self.keys + self.calls * _GOLDEN)


_active: list[Randomness] = []


@contextmanager
def randomness(source: Randomness) -> Iterator[None]:
    """Let the random functions within draw from `source`."""
    _active.append(source)
    try:
        yield
    finally:
        _active.pop()


def current(members: int) -> Randomness:
    """The source of the innermost `randomness` block; outside of any, a new one from torch's default generator."""
    if _active:
        return _active[-1]
    return Randomness(torch.randint(0, 2**62, (members,)))


def keep_mask(keys: Tensor, shape: Sequence[int], drop: Tensor | float, device: torch.device) -> Tensor:
    """True where an element is kept, with probability 1 - drop.

    Args:
        keys: int64 [B], from `Randomness.next`.
        shape: of one member.
        drop: probability in [0, 1), one for all or a tensor that broadcasts to [B, *shape].

    Returns:
        bool [B, *shape].
    """
    numel = 1
    for size in shape:
        numel *= size
    index = _index_hash(numel, device).view(1, *shape)
    key = keys.to(device).to(torch.int32).view(-1, *[1] * len(shape))
    word = (index ^ key) * _MULTIPLY[0]
    word = (word ^ (word >> 15)) * _MULTIPLY[1]
    if isinstance(drop, Tensor):
        return word.to(torch.float64) >= drop.to(torch.float64) * 2.0**32 - 2.0**31
    return word >= int(drop * 2.0**32 - 2.0**31)


@lru_cache(maxsize=64)
def _index_hash(numel: int, device: torch.device) -> Tensor:
    return _mix64(torch.arange(1, numel + 1, dtype=torch.int64, device=device)).to(torch.int32)


def _mix64(word: Tensor) -> Tensor:
    """The finalizer of splitmix64, with sign-extending shifts (still a bijection)."""
    word = (word ^ (word >> 30)) * -4658895280553007687
    word = (word ^ (word >> 27)) * -7723592293110705685
    return word ^ (word >> 31)
