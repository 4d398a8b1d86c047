"""Packs of candidates: the memory of a pack, filling a pack, the required order, and the check of an answer."""

from collections.abc import Iterable, Sequence

from shoal.core.errors import PackError
from shoal.plan.packing.base import Candidate, PackingContext

__all__ = ["check_packs", "fill_pack", "memory_needed", "ordered_packs"]


def memory_needed(pack: Sequence[Candidate]) -> int:
    """Return the bytes of a process with these candidates."""
    return max(each.base for each in pack) + sum(each.memory for each in pack)


def fill_pack(
    first: int, others: Iterable[int], candidates: Sequence[Candidate], context: PackingContext, size: int | None = None
) -> list[int]:
    """One candidate and, in order, the others that have its data and still fit, at most `size`; the rest is skipped."""
    pack = [first]
    base, memory = candidates[first].base, candidates[first].memory
    for index in others:
        if len(pack) == size:
            break
        other = candidates[index]
        if (
            other.key.data == candidates[first].key.data
            and max(base, other.base) + memory + other.memory <= context.memory
        ):
            pack.append(index)
            base, memory = max(base, other.base), memory + other.memory
    return pack


def ordered_packs(packs: Iterable[Iterable[int]], candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """Return the candidates at these places, in the order that `Packing` requires within and between packs."""
    return [tuple(candidates[index] for index in pack) for pack in sorted(sorted(pack) for pack in packs)]


def check_packs(packs: Sequence[Sequence[Candidate]], candidates: Sequence[Candidate], context: PackingContext) -> None:
    """Check packs against the rules that `Packing` states; the PackError says which one is broken."""
    if not isinstance(packs, Sequence) or not all(isinstance(pack, Sequence) for pack in packs):
        raise PackError(f"a packing must return a list of packs of the candidates that it was given, got {packs!r}")
    for stranger in (each for pack in packs for each in pack if not isinstance(each, Candidate)):
        raise PackError(f"a pack must hold candidates that the packing was given, got {stranger!r}")
    indices: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates):
        indices.setdefault(id(candidate), []).append(index)
    for free in indices.values():
        free.reverse()
    firsts: list[int] = []
    for pack in packs:
        if not pack:
            raise PackError("a pack is empty; leave it out")
        taken: list[int] = []
        for candidate in pack:
            if not indices.get(id(candidate)):
                raise PackError(f"{_named(candidate)} is in two packs, or was never given")
            taken.append(indices[id(candidate)].pop())
        if taken != sorted(taken):
            raise PackError(f"the pack of {_named(pack[0])} is not in the order in which it was given")
        firsts.append(taken[0])
        _check_pack(pack, context)
    left = [candidate for candidate in candidates if indices[id(candidate)]]
    if left:
        raise PackError(f"{_named(left[0])} is in no pack")
    if firsts != sorted(firsts):
        raise PackError("the packs are not in the order of their first candidates")


def _check_pack(pack: Sequence[Candidate], context: PackingContext) -> None:
    if len(pack) == 1:
        return
    streams = {candidate.key.data for candidate in pack}
    if len(streams) > 1:
        raise PackError(f"the pack of {_named(pack[0])} needs {len(streams)} streams of data; a process has one")
    if memory_needed(pack) > context.memory:
        raise PackError(
            f"the pack of {_named(pack[0])} needs {memory_needed(pack)} bytes, the smallest device has {context.memory}"
        )


def _named(candidate: Candidate) -> str:
    numbers = ", ".join(str(member.trial.number) for member in candidate.array.members)
    return f"the array of trial {numbers}"
