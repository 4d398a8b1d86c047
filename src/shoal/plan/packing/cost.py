"""The cost packing: packs with the least expected makespan, found by cuts and local search."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import final

from shoal.core.array import FusionKey
from shoal.core.errors import PackError
from shoal.core.plain import plain_fields
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.packs import memory_needed, ordered_packs
from shoal.plan.packing.prediction import makespan, predicted

__all__ = ["CandidateOrder", "CostPacking", "Partition", "local_search"]

_JOBS = (1, 2, 3, 4, 6, 8)
"""Numbers of jobs per device to try. More jobs balance devices better, but fewer arrays share a process."""

_SLACK = (1.0, 0.5)
"""Slack of a pack beyond its even share, in mean lengths of a candidate, since packs are not filled exactly."""

_EVEN_JOBS = (1, 2)
"""Numbers of jobs per device to try for cuts that are as even as possible."""

_HALVINGS = 7
"""Bisection steps in the search for the length of even packs."""

_TOLERANCE = 0.01
"""Relative gain in makespan below which the search stops."""

_Score = tuple[float, int, float]
"""Makespan including tails, number of idle devices without a job, and total device seconds; compared in this order,
less is better."""

_SEARCH_EFFORT = 10_000
"""Limit of tried changes, times the square of the number of candidates. Both the number and the cost of changes grow
with the number of candidates."""


@final
@dataclass(frozen=True)
class CostPacking(Packing):
    """Packs arrays for the least expected makespan of all arrays and the training that follows; ties are broken by
    device time.

    Every pack must save a part of the time of its arrays one after another, as predicted from measurements
    (`predicted`). So a pack that was measured to save too little is split. The makespan assumes list scheduling, the
    longest pack first, each on the first free device, so the search also keeps enough packs for all devices.

    Arrays are sorted so that matching arrays are neighbours (`CandidateOrder`), and the order is cut into packs of
    different length: single arrays, cuts that balance the devices, and the fewest packs that save time. The
    best cut, and the cut into single arrays, are then improved by changes of one or two arrays. For few arrays this
    nearly always finds the best packs; for many arrays there are no changes, and the time is linear in their number.

    Args:
        worth: Part of its time that a pack must save.

    Raises:
        PackError: `worth` is not at least 0 and below 1.
    """

    worth: float = 0.05

    def __post_init__(self) -> None:
        plain_fields(self)
        number = isinstance(self.worth, int | float) and not isinstance(self.worth, bool)
        if not (number and 0 <= self.worth < 1):
            raise PackError(f"`worth` must be at least 0 and below 1, got {self.worth!r}; 0.05 is 5 % of the time")

    def pack(self, candidates: Sequence[Candidate], context: PackingContext) -> list[tuple[Candidate, ...]]:
        """Return the best packs found."""
        if len(candidates) < 2:
            return [(each,) for each in candidates]
        candidate_order = CandidateOrder(candidates, context, self.worth)

        def score_of(cut: Partition) -> _Score:
            return _score(cut, context.loads)

        best = min(_candidate_cuts(candidate_order, context.loads), key=score_of)
        starts = [best] if len(best.packs) == len(candidates) else [best, candidate_order.single()]
        improved = [local_search(cut, candidate_order, context.loads) for cut in starts]
        return ordered_packs(min(improved, key=score_of).packs, candidates)

    def admits(self, incoming: Candidate, present: Sequence[Candidate], context: PackingContext) -> bool:
        """Return whether sharing saves at least `worth` of the time of the incoming candidate alone."""
        pack = [*present, incoming]
        if incoming.key.data != present[0].key.data or memory_needed(pack) > context.memory:
            return False
        alone = context.start + incoming.seconds
        added = predicted(pack, context).together - predicted(present, context).together
        return alone - added >= self.worth * alone


_MAX_OPEN_PACKS = 3
"""Number of newest packs that may still grow; the next candidate joins the one with the largest saving."""


@dataclass(frozen=True)
class Partition:
    """Candidates in packs, the predicted seconds of each, and those of training that follows it if nothing waits."""

    packs: list[list[int]]
    lengths: list[float]
    tails: list[float]


@dataclass(eq=False, slots=True)
class _Item:
    """Amounts of a candidate; `alone_seconds` are its start, fetching and steps, `epochs` the most of a member."""

    index: int
    kind: int
    alone_seconds: float
    fetching: float
    steps: float
    memory: int
    base: int
    epochs: int
    tail: float


@dataclass(eq=False, slots=True)
class _ItemPack:
    """Items, the seconds of all one after another (`apart`) and in one process (`together`), and their amounts.

    `fetching`, `memory` and `base` are those of the process; `steps` are the seconds of all steps, each item alone.
    """

    items: list[_Item]
    apart: float
    together: float
    fetching: float
    steps: float
    memory: int
    base: int
    kinds: dict[int, int]
    change: float = 0.0

    @classmethod
    def of(cls, item: _Item) -> "_ItemPack":
        alone = (item.alone_seconds, item.alone_seconds, item.fetching, item.steps, item.memory, item.base)
        return cls([item], *alone, kinds={item.kind: 1})

    def tail(self, start: float) -> float:
        """Seconds from the end of the pack to the end of all training that follows its items. The items train each
        epoch together, so items with fewer epochs end before the pack.
        """
        tails: dict[int, float] = {}  # longest tail by the epochs after which it begins
        for item in self.items:
            if item.tail:
                tails[item.epochs] = max(item.tail, tails.get(item.epochs, 0.0))
        if not tails:
            return 0.0
        max_epochs = max(item.epochs for item in self.items)
        relative_time = (self.together - start - self.fetching) / self.steps if self.steps else 1.0
        last = self.together
        for epochs, tail in tails.items():
            steps = sum(item.steps * min(1.0, epochs / item.epochs) for item in self.items)
            last = max(last, start + self.fetching * epochs / max_epochs + relative_time * steps + tail)
        return last - self.together

    def add(self, item: _Item, together: float, change: float) -> None:
        self.items.append(item)
        self.apart += item.alone_seconds
        self.together = together
        self.fetching = max(self.fetching, item.fetching)
        self.steps += item.steps
        self.memory += item.memory
        self.base = max(self.base, item.base)
        self.kinds[item.kind] = self.kinds.get(item.kind, 0) + 1
        self.change = change


class CandidateOrder:
    """Sorts candidates, and cuts the order into packs of any length, each of which must save `worth` of its time.

    Candidates are sorted by data set, then by keys that gain from each other, then by fetching time: a pack fetches as
    long as its longest candidate, so candidates of similar fetching times save most.
    """

    def __init__(self, candidates: Sequence[Candidate], context: PackingContext, worth: float) -> None:
        self._start, self._memory, self._worth = context.start, context.memory, worth
        kinds: dict[FusionKey, int] = {}
        self._items = [_item(index, candidate, context, kinds) for index, candidate in enumerate(candidates)]
        self._data = [candidate.key.data for candidate in candidates]
        self._relative_time_changes = _relative_time_changes(kinds, context)
        rank = _ranks(self._items, self._relative_time_changes)
        candidate_order = sorted(self._items, key=lambda item: (rank[item.kind], -item.fetching))
        streams: dict[str, list[_Item]] = {}
        for item in candidate_order:
            streams.setdefault(self._data[item.index], []).append(item)
        self._streams = list(streams.values())

    def single(self) -> Partition:
        """Return one pack per candidate."""
        items = self._items
        return Partition(
            [[item.index] for item in items], [item.alone_seconds for item in items], [item.tail for item in items]
        )

    def cut(self, longest: float = inf) -> Partition:
        """Return the worthwhile packs of at most `longest` seconds.

        The next candidate in the order joins one of the newest packs if that saves enough of its time, else it begins
        a new pack.
        """
        packs: list[list[int]] = []
        lengths: list[float] = []
        tails: list[float] = []
        for pack in (pack for stream in self._streams for pack in self._grow_packs(stream, longest)):
            if self._saves_enough(pack):
                packs.append([item.index for item in pack.items])
                lengths.append(pack.together)
                tails.append(pack.tail(self._start))
            else:
                packs += [[item.index] for item in pack.items]
                lengths += [item.alone_seconds for item in pack.items]
                tails += [item.tail for item in pack.items]
        return Partition(packs, lengths, tails)

    def evaluate(self, indices: Iterable[int]) -> tuple[float, float] | None:
        """Predicted seconds and tail of a pack; None if the candidates cannot share a process, or save too little."""
        first, *others = (self._items[index] for index in indices)
        pack = _ItemPack.of(first)
        for item in others:
            if self._data[item.index] != self._data[first.index] or not self._fits(pack, item):
                return None
            pack.add(item, *self._joined_cost(pack, item))
        return (pack.together, pack.tail(self._start)) if self._saves_enough(pack) else None

    def _grow_packs(self, stream: Sequence[_Item], longest: float) -> list[_ItemPack]:
        done: list[_ItemPack] = []
        open_packs: list[_ItemPack] = []
        for item in stream:
            best: tuple[_ItemPack, float, float] | None = None
            best_saving = self._worth * item.alone_seconds
            for pack in open_packs:
                if self._fits(pack, item):
                    together, change = self._joined_cost(pack, item)
                    saved = pack.together + item.alone_seconds - together
                    if together <= longest and saved > 0 and saved >= best_saving:
                        best, best_saving = (pack, together, change), saved
            if best is not None:
                pack, together, change = best
                pack.add(item, together, change)
                continue
            if len(open_packs) == _MAX_OPEN_PACKS:
                done.append(open_packs.pop(max(range(_MAX_OPEN_PACKS), key=lambda index: open_packs[index].together)))
            open_packs.append(_ItemPack.of(item))
        return done + open_packs

    def _fits(self, pack: _ItemPack, item: _Item) -> bool:
        return max(pack.base, item.base) + pack.memory + item.memory <= self._memory

    def _saves_enough(self, pack: _ItemPack) -> bool:
        return len(pack.items) == 1 or pack.apart - pack.together >= self._worth * pack.apart

    def _joined_cost(self, pack: _ItemPack, item: _Item) -> tuple[float, float]:
        change, measured, kinds = pack.change, self._relative_time_changes[item.kind], pack.kinds
        if measured:
            for kind in measured if len(measured) < len(kinds) else kinds:
                if kind in kinds and kind in measured:
                    change += measured[kind] * kinds[kind]
        count = len(pack.items)
        relative_time = 1 + change / (count * (count + 1) / 2)
        return self._start + max(pack.fetching, item.fetching) + relative_time * (pack.steps + item.steps), change


def _item(index: int, candidate: Candidate, context: PackingContext, kinds: dict[FusionKey, int]) -> _Item:
    return _Item(
        index,
        kinds.setdefault(candidate.key, len(kinds)),
        context.start + candidate.seconds,
        candidate.fetching,
        candidate.seconds - candidate.fetching,
        candidate.memory,
        candidate.base,
        max(1, *candidate.array.epochs),
        candidate.tail,
    )


def _relative_time_changes(kinds: Mapping[FusionKey, int], context: PackingContext) -> list[dict[int, float]]:
    """Return, for each kind, the kinds measured with it -> their relative time minus 1."""
    changes: list[dict[int, float]] = [{} for _ in kinds]
    for pair, relative_time in context.relative_times.items():
        one, other = (numbers := [kinds.get(key) for key in pair])[0], numbers[-1]  # equal for a pair of one key
        if one is not None and other is not None:
            changes[one][other] = changes[other][one] = relative_time - 1
    return changes


def _ranks(items: Sequence[_Item], changes: Sequence[Mapping[int, float]]) -> list[tuple[float, int, int]]:
    """Sort key of each kind: chains of kinds that gain from each other, the pair with the largest gain first.

    Chains and unmeasured kinds are sorted by their longest fetching time.
    """
    chains = [[kind] for kind in range(len(changes))]
    gains = sorted(
        (change, kind, other)
        for kind, others in enumerate(changes)
        for other, change in others.items()
        if kind < other and change < 0
    )
    for _, kind, other in gains:
        one, two = sorted((chains[kind], chains[other]), key=len, reverse=True)
        if one is not two:
            one += two
            for member in two:
                chains[member] = one
    fetching = [0.0] * len(changes)
    for item in items:
        fetching[item.kind] = max(fetching[item.kind], item.fetching)
    ranks: list[tuple[float, int, int]] = [(0.0, 0, 0)] * len(changes)
    for chain in {id(chain): chain for chain in chains}.values():
        longest = max(fetching[kind] for kind in chain)
        for position, kind in enumerate(chain):
            ranks[kind] = (-longest, chain[0], position)
    return ranks


def _candidate_cuts(candidate_order: CandidateOrder, loads: Sequence[float]) -> Iterator[Partition]:
    """Return cuts from single arrays to as few packs as save time, until one reaches a bound of the makespan."""
    single, coarsest = candidate_order.single(), candidate_order.cut()
    yield single
    yield coarsest
    if len(coarsest.packs) == len(single.packs) or len(loads) == 1:
        return
    longest_path = min(loads) + max(map(sum, zip(single.lengths, single.tails, strict=True)))
    target = (1 + _TOLERANCE) * max(_water_level(sum(coarsest.lengths), loads), longest_path, *loads)
    best_makespan = min(_score(cut, loads)[0] for cut in (single, coarsest))
    total = sum(coarsest.lengths)
    for jobs, slack in product(_JOBS, _SLACK):
        if best_makespan <= target:
            return
        cut = candidate_order.cut((_water_level(total, loads) - min(loads)) / jobs + slack * total / len(single.packs))
        best_makespan, total = min(best_makespan, _score(cut, loads)[0]), sum(cut.lengths)
        yield cut
    for jobs in _EVEN_JOBS:
        if best_makespan <= target:
            return
        cut = _even_cut(candidate_order, jobs * len(loads), coarsest)
        best_makespan = min(best_makespan, _score(cut, loads)[0])
        yield cut


def _even_cut(candidate_order: CandidateOrder, packs: int, cut: Partition) -> Partition:
    """Return the cut into at most `packs` packs whose longest pack is shortest, by bisection: shared fetching makes
    the length of packs unpredictable from the sum of lengths."""
    low, high = 0.0, max(cut.lengths)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        finer = candidate_order.cut(middle)
        if len(finer.packs) <= packs:
            cut, high = finer, middle
        else:
            low = middle
    return cut


def _water_level(seconds: float, loads: Sequence[float]) -> float:
    """Time at which all devices are free if `seconds` are spread over them as evenly as possible (water-filling)."""
    ordered = sorted(loads)
    filled = next(
        count
        for count in range(1, len(ordered) + 1)
        if count == len(ordered) or seconds + sum(ordered[:count]) <= count * ordered[count]
    )
    return (seconds + sum(ordered[:filled])) / filled


def _score(cut: Partition, loads: Sequence[float]) -> _Score:
    unused = max(0, loads.count(0) - len(cut.packs))
    return _without_rounding(makespan(cut.lengths, loads, cut.tails)), unused, _without_rounding(sum(cut.lengths))


def local_search(cut: Partition, candidate_order: CandidateOrder, loads: Sequence[float]) -> Partition:
    """Improve packs by small changes until none is better or the effort is used up; `loads` as in `PackingContext`."""
    best = _score(cut, loads)
    neighbours = _neighbours(cut, candidate_order)
    for _ in range(_SEARCH_EFFORT // sum(map(len, cut.packs)) ** 2):
        other = next(neighbours, cut)
        if other is cut:  # there is no neighbour
            break
        if other is not None and (found := _score(other, loads)) < best:
            cut, best, neighbours = other, found, _neighbours(other, candidate_order)
    return cut


def _without_rounding(seconds: float) -> float:
    """Round to nine digits, since the order of a sum changes its last digits."""
    return float(f"{seconds:.9g}")


def _neighbours(cut: Partition, candidate_order: CandidateOrder) -> Iterator[Partition | None]:
    """The packs after moving one candidate to another pack or a new one, or swapping two; None if impossible.

    The longest packs come first, since they are likely to end last.
    """
    order = sorted(range(len(cut.packs)), key=lambda index: -cut.lengths[index])
    for source in order:
        for index in cut.packs[source]:
            rest = [other for other in cut.packs[source] if other != index]
            if rest:
                yield _replaced(cut, candidate_order, (source,), (rest, [index]))
            for target in order:
                if target == source:
                    continue
                pack = cut.packs[target]
                yield _replaced(cut, candidate_order, (source, target), (rest, [*pack, index]))
                for other in pack if rest else ():
                    kept = [each for each in pack if each != other]
                    yield _replaced(cut, candidate_order, (source, target), ([*rest, other], [*kept, index]))


def _replaced(
    cut: Partition, candidate_order: CandidateOrder, old: tuple[int, ...], new: tuple[list[int], ...]
) -> Partition | None:
    packs = [pack for index, pack in enumerate(cut.packs) if index not in old]
    lengths = [length for index, length in enumerate(cut.lengths) if index not in old]
    tails = [tail for index, tail in enumerate(cut.tails) if index not in old]
    for pack in filter(None, new):
        joined = candidate_order.evaluate(pack)
        if joined is None:
            return None
        packs.append(pack)
        lengths.append(joined[0])
        tails.append(joined[1])
    return Partition(packs, lengths, tails)
