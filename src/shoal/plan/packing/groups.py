"""Groups of candidates: the memory of a group, filling a group, the required order, and the check of an answer."""

from collections.abc import Iterable, Sequence

from shoal.core.errors import PackError
from shoal.plan.packing.base import Candidate, PackingContext

__all__ = ["check_groups", "fill_group", "memory_needed", "ordered_groups"]


def memory_needed(group: Sequence[Candidate]) -> int:
    """Return the bytes of a process with these candidates."""
    return max(each.base for each in group) + sum(each.memory for each in group)


def fill_group(
    first: int, others: Iterable[int], candidates: Sequence[Candidate], context: PackingContext, size: int | None = None
) -> list[int]:
    """One candidate and, in order, the others that have its data and still fit, at most `size`; the rest is skipped."""
    group = [first]
    base, memory = candidates[first].base, candidates[first].memory
    for index in others:
        if len(group) == size:
            break
        other = candidates[index]
        if (
            other.key.data == candidates[first].key.data
            and max(base, other.base) + memory + other.memory <= context.memory
        ):
            group.append(index)
            base, memory = max(base, other.base), memory + other.memory
    return group


def ordered_groups(groups: Iterable[Iterable[int]], candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """Return the candidates at these places, in the order that `Packing` requires within and between groups."""
    return [tuple(candidates[index] for index in group) for group in sorted(sorted(group) for group in groups)]


def check_groups(
    groups: Sequence[Sequence[Candidate]], candidates: Sequence[Candidate], context: PackingContext
) -> None:
    """Check groups against the rules that `Packing` states; the PackError says which one is broken."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, Sequence) for group in groups):
        raise PackError(f"a packing must return a list of groups of the candidates that it was given, got {groups!r}")
    for stranger in (each for group in groups for each in group if not isinstance(each, Candidate)):
        raise PackError(f"a group must hold candidates that the packing was given, got {stranger!r}")
    indices: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates):
        indices.setdefault(id(candidate), []).append(index)
    for free in indices.values():
        free.reverse()
    firsts: list[int] = []
    for group in groups:
        if not group:
            raise PackError("a group is empty; leave it out")
        taken: list[int] = []
        for candidate in group:
            if not indices.get(id(candidate)):
                raise PackError(f"{_named(candidate)} is in two groups, or was never given")
            taken.append(indices[id(candidate)].pop())
        if taken != sorted(taken):
            raise PackError(f"the group of {_named(group[0])} is not in the order in which it was given")
        firsts.append(taken[0])
        _check_group(group, context)
    left = [candidate for candidate in candidates if indices[id(candidate)]]
    if left:
        raise PackError(f"{_named(left[0])} is in no group")
    if firsts != sorted(firsts):
        raise PackError("the groups are not in the order of their first candidates")


def _check_group(group: Sequence[Candidate], context: PackingContext) -> None:
    if len(group) == 1:
        return
    streams = {candidate.key.data for candidate in group}
    if len(streams) > 1:
        raise PackError(f"the group of {_named(group[0])} needs {len(streams)} streams of data; a process has one")
    if memory_needed(group) > context.memory:
        raise PackError(
            f"the group of {_named(group[0])} needs {memory_needed(group)} bytes, the smallest device has "
            f"{context.memory}"
        )


def _named(candidate: Candidate) -> str:
    numbers = ", ".join(str(member.trial.number) for member in candidate.array.members)
    return f"the array of trial {numbers}"
