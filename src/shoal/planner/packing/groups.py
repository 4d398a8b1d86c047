"""Groups as places of candidates: who still fits, and the groups in the order that is asked for."""

from collections.abc import Iterable, Sequence

from shoal.planner.packing.base import Candidate, PackingContext

__all__ = ["arranged", "filled", "needed"]


def needed(group: Sequence[Candidate]) -> int:
    """Bytes that candidates take in one process."""
    return max(each.base for each in group) + sum(each.memory for each in group)


def filled(
    first: int, others: Iterable[int], candidates: Sequence[Candidate], context: PackingContext, size: int | None = None
) -> list[int]:
    """A candidate and those of the others, in their order, that share its data and still fit; who does not is skipped.

    Args:
        first: place of the candidate that every group of its own may be.
        others: places of who may join it, the most wanted first.
        candidates: all.
        context: for the memory.
        size: most candidates of a group.
    """
    group = [first]
    base, memory = candidates[first].base, candidates[first].memory
    for place in others:
        if len(group) == size:
            break
        other = candidates[place]
        if (
            other.key.data == candidates[first].key.data
            and max(base, other.base) + memory + other.memory <= context.memory
        ):
            group.append(place)
            base, memory = max(base, other.base), memory + other.memory
    return group


def arranged(groups: Iterable[Iterable[int]], candidates: Sequence[Candidate]) -> list[tuple[Candidate, ...]]:
    """The candidates at these places, each group in their order, the groups in the order of their first ones."""
    return [tuple(candidates[place] for place in group) for group in sorted(sorted(group) for group in groups)]
