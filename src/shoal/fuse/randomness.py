"""Random numbers of each member, which depend only on the member's seed and step (counter-based keys, dropout masks).

A dropout mask is counter-based: a strong hash of the element's index is mixed with a key per member and call by two
rounds of multiply and xor-shift (the construction of splitmix and of murmur's finalizer). So a mask does not depend on
the other members, the dtype or the device, costs six passes over int32, and can be traced. Any other random
function runs in a loop over the members with torch's generators seeded by the same key; see `fuse.torch_functions`.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.core.errors import FusionError
from shoal.fuse.constants import constant, making_constants, to_device
from shoal.fuse.shard import Shard, recorded_shard, use_shard

__all__ = [
    "RandomSource",
    "active_source",
    "current_source",
    "keep_mask",
    "keep_mask_blocks",
    "keys_at",
    "member_keys",
    "seed_words",
    "use_source",
]

_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_TICK = 2654435761  # 2**32 / golden ratio
_MULTIPLY = (-2048144789, -1028477387)  # murmur3's finalizer, as int32


def member_keys(seeds: Sequence[int], ticks: Sequence[int]) -> list[int]:
    """One int64 key per member, computed from its seed and the number of its call."""
    words = seed_words(seeds)
    return [_mix(_int64(word + tick * _TICK)) for word, tick in zip(words, ticks, strict=True)]


def seed_words(seeds: Sequence[int]) -> list[int]:
    """One int64 per member, computed from its seed: what `keys_at` needs."""
    return [_mix(seed) for seed in seeds]


def keys_at(words: Tensor, ticks: Tensor) -> Tensor:
    """`member_keys` computed on a device, for the members' `seed_words` and numbers of calls, int64 [..., B] each."""
    return _mix64(words + ticks * _TICK)


class RandomSource:
    """Source of the keys of random functions in one run: int64 [B], or a function called at the first draw."""

    open_run: Callable[["RandomSource"], AbstractContextManager[object]]
    """Makes the context manager of a run like this one, with another source; set by the run."""

    def __init__(self, keys: Tensor | Callable[[], list[int]], single_member: bool = False, calls: int = 0) -> None:
        self.single_member = single_member
        self._in_checkpoint = _in_checkpoint()
        self.calls: int | tuple[int, ...] = calls
        """Number of random functions so far; a tuple with one number per member if the numbers differ."""
        self._keys: Tensor | list[int] | Callable[[], list[int]] = keys

    @property
    def keys(self) -> Tensor | list[int]:
        """The members' keys of this run: an int64 tensor [B], which can be traced, or a list, which is faster."""
        if not isinstance(self._keys, (Tensor, list)):
            self._keys = self._keys()
        return self._keys

    def next(self, drawing: Sequence[bool] | None = None) -> Tensor:
        """Count a random function, and return its keys, [B]; a member with a dropout rate of 0 is not `drawing`."""
        if self._in_checkpoint:
            raise FusionError(
                "random numbers are drawn in a run that begins within a part under torch.utils.checkpoint, which would "
                "draw those of another run when it is computed again; checkpoint parts of the model within the run"
            )
        keys = self.keys
        if drawing is None or all(drawing):
            self.calls = self.calls + 1 if isinstance(self.calls, int) else tuple(calls + 1 for calls in self.calls)
        else:
            self.resume_after([calls + drawn for calls, drawn in zip(self._counts(), drawing, strict=True)])
        if isinstance(keys, Tensor) and isinstance(self.calls, int):
            return _mix64(keys + _int64(self.calls * _GOLDEN))
        offsets = [_int64(calls * _GOLDEN) for calls in self._counts()]
        if isinstance(keys, Tensor):
            return _mix64(keys + constant(offsets, torch.int64, keys.device))
        return torch.tensor([_mix(_int64(key + offset)) for key, offset in zip(keys, offsets, strict=True)])

    def _counts(self) -> tuple[int, ...]:
        return (self.calls,) * len(self.keys) if isinstance(self.calls, int) else self.calls

    def of_member(self, b: int) -> "RandomSource":
        """The source of member b, for a part of the run in which the members run one by one."""
        calls = self.calls if isinstance(self.calls, int) else self.calls[b]
        own = copy.copy(self)
        own.single_member, own.calls, own._keys = True, calls, self.keys[b : b + 1]
        return own

    def resume_after(self, members: Sequence[int | tuple[int, ...]]) -> None:
        """Continue after a part in which members ran one by one; `members` are their numbers of random functions."""
        counts = tuple(calls for calls in members if isinstance(calls, int))
        self.calls = counts[0] if len(set(counts)) == 1 else counts

    def begin_part(self) -> Callable[[], AbstractContextManager[None]]:
        """Begin a part that runs again in the backward pass, maybe in another thread and after the end of the run.

        Returns:
            Function that makes the context manager of another run of the part, which draws the same numbers.
        """
        calls, shard = self.calls, _copied(recorded_shard())

        @contextmanager
        def run_again() -> Iterator[None]:
            source = copy.copy(self)
            source.calls = calls
            with use_shard(_copied(shard)), self.open_run(source):
                yield

        return run_again


def _copied(shard: Shard | None) -> Shard | None:
    """A shard that counts its masks by itself."""
    return None if shard is None else replace(shard)


def _in_checkpoint() -> bool:
    """Whether saved tensors are left out now, since a part under torch.utils.checkpoint computes them again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


_active: ContextVar[RandomSource | None] = ContextVar("active_source", default=None)
"""Source of the run in this thread; arrays may run in several threads at once."""


@contextmanager
def use_source(source: RandomSource) -> Iterator[None]:
    """Context manager in which random functions draw from `source`."""
    before = _active.get()
    _active.set(source)
    try:
        yield
    finally:
        _active.set(before)


def active_source() -> RandomSource | None:
    """The source of random numbers of the current run in this thread, or None."""
    return _active.get()


def current_source(members: int) -> RandomSource:
    """The source of the current run; outside of a run, a new source with keys from torch's default generator."""
    return active_source() or RandomSource(torch.randint(0, 2**62, (members,)))


def keep_mask(keys: Tensor, shape: Sequence[int], drop: Sequence[float], device: torch.device) -> Tensor:
    """Dropout mask: True where an element is kept, with probability 1 - drop.

    Args:
        drop: Probability, in [0, 1]: one for all members, or one for each. A mask with 1 is not all False.

    Returns:
        Mask, bool [B, *shape]; in a step of several processes, the rows of this process of the mask of the whole batch.
    """
    whole, axis, first = _mask_rows(tuple(shape))
    index = _index_hash(prod(whole), device).view(1, *whole)
    if whole != tuple(shape):
        index = index.narrow(axis + 1, first, shape[axis])
    return _kept(index, keys, drop)


def keep_mask_blocks(
    keys: Tensor, shape: Sequence[int], drop: Sequence[float], device: torch.device
) -> Callable[[Sequence[range]], Tensor]:
    """As `keep_mask`, for a mask that is too large to exist at once.

    Returns:
        Function of the ranges of a block of [B, *shape] that returns the block of the mask.
    """
    whole, axis, first = _mask_rows(tuple(shape))

    def mask_of(block: Sequence[range]) -> Tensor:
        members, *ranges = block
        index = torch.ones((), dtype=torch.int64, device=device)
        for a, own in enumerate(ranges):
            begin = own.start + (first if a == axis else 0)
            along = torch.arange(begin, begin + len(own), dtype=torch.int64, device=device) * prod(whole[a + 1 :])
            index = index + along.view(-1, *[1] * (len(ranges) - 1 - a))
        own_drop = drop if len(drop) == 1 else drop[members.start : members.stop]
        return _kept(_mix64(index).to(torch.int32).unsqueeze(0), keys[members.start : members.stop], own_drop)

    return mask_of


def _mask_rows(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """See `Shard.mask_rows`."""
    shard = recorded_shard()
    return (shape, 0, 0) if shard is None else shard.mask_rows(shape)


def _kept(index: Tensor, keys: Tensor, drop: Sequence[float]) -> Tensor:
    """The mask of elements whose hashed indices are int32 [1, *shape]."""
    axes = [1] * (index.dim() - 1)
    key = to_device(keys.to(torch.int32), index.device).view(-1, *axes)
    word = _times_(index ^ key, _MULTIPLY[0])
    word ^= word >> 15
    word = _times_(word, _MULTIPLY[1])
    limits = [min(int(rate * 2.0**32 - 2.0**31), 2**31 - 1) for rate in drop]
    if len(limits) == 1:
        return word >= limits[0]
    return word >= constant(limits, torch.int32, index.device).view(-1, *axes)


def _times_(word: Tensor, factor: int) -> Tensor:
    """An int32 product modulo 2**32: in place, or by int64 in a trace, since compilers may assume no overflow."""
    if _get_current_dispatch_mode() is None:
        return word.mul_(factor)
    return (word.to(torch.int64) * factor).to(torch.int32)


@lru_cache(maxsize=64)
def _index_hash(numel: int, device: torch.device) -> Tensor:
    """Hash of the element indices."""
    with making_constants(device):
        return _mix64(torch.arange(1, numel + 1, dtype=torch.int64, device=device)).to(torch.int32)


def _int64(number: int) -> int:
    """An integer modulo 2**64, as torch's int64 wraps around."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(word: int) -> int:
    """`_mix64` of one number."""
    word = _int64((word ^ (word >> 30)) * -4658895280553007687)
    word = _int64((word ^ (word >> 27)) * -7723592293110705685)
    return word ^ (word >> 31)


def _mix64(word: Tensor) -> Tensor:
    """The finalizer of splitmix64, with sign-extending shifts (still a bijection)."""
    word = (word ^ (word >> 30)) * -4658895280553007687
    word = (word ^ (word >> 27)) * -7723592293110705685
    return word ^ (word >> 31)
