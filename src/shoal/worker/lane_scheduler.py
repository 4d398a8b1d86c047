"""How the lanes of a pack take turns, chosen by measurement.

The ways, all of which lead all lanes to the same place in the data, and of which the fastest is kept:

- turns    one lane after another, each for as long as the round lasts: no caches are disturbed
- steps    the lane furthest behind takes one step, then the one that is so then: who shares samples only at the same
           place in the data, has them fetched once
- streams  the same, each lane on a CUDA stream of its own, so that kernels overlap (on a GPU)

Turns are what members do in sequence, and always among the ways: so a pack is not slower than its members. Lanes that
have to keep abreast take steps instead, which save more than caches are worth.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch

from shoal.cost.race import Race, RaceRules

__all__ = ["RULES", "Failure", "Lane", "LaneScheduler", "ScheduleSearch", "Way"]

_log = logging.getLogger("shoal.pack")

ROUND_SECONDS = 0.2
"""What a round is to take. A lane that has its turn for some hundredths of a second pays for cold caches by less than a
hundredth, and lanes drift apart by no more than what that many seconds take in of one of them."""

Way = Literal["turns", "steps", "streams"]

PROBE_SECONDS = 0.1
"""How long a probe of a way takes at least: rounds may be shorter."""

RULES = RaceRules(margin=1.03, hopeless_seconds=2 * PROBE_SECONDS)


class Lane(Protocol):
    """What takes turns: an array in training, with a data stream that it may share with others.

    It is known by its identity and must allow weak references.
    """

    @property
    def position(self) -> int:
        """Samples it has taken in; grows with every step. Those of lanes that come first are equal where these are
        level, such as at one place of an epoch."""

    @property
    def place(self) -> tuple[object, int] | None:
        """Where it is in the data, if it shares samples only with lanes that are at the same place: the pass that it is
        in, and samples that it has taken of that. Else None."""

    @property
    def settled(self) -> bool:
        """Whether its own search for the fastest way to step is over."""

    def advance(self) -> bool:
        """Take one step; False when that ended an epoch, or when there was nothing to do.

        On a GPU it may run on a stream of its own. That waits for all that was begun before the round, and what comes
        after the round waits for it; what lanes hand each other within a round is theirs to synchronise.
        """


@dataclass(frozen=True)
class Failure:
    """A lane that raised; the others are as if it had not been there.

    Args:
        lane: which; what a step leaves half done stays so.
        error: what it raised; `SystemExit` is as good as any other, the caller decides what it means.
    """

    lane: Lane
    error: Exception | SystemExit


class ScheduleSearch:
    """Finds out which way is the fastest by trying all of them in turn, with real steps only.

    Args:
        ways: to choose from; of equals the first.
        lanes: how many take turns.
    """

    def __init__(self, ways: Sequence[Way], lanes: int) -> None:
        self._race: Race[Way] = Race(ways, RULES)
        if len(ways) == 1:
            self._race.stop()
        self._seconds = 0.0
        self._taken = [0] * lanes

    @property
    def way(self) -> Way | None:
        """The fastest, or None while that is open."""
        return self._race.winner

    @property
    def seconds(self) -> dict[Way, float]:
        """By way, those that a sample takes to go through a lane, as the fastest probe showed."""
        return self._race.seconds

    def next(self) -> Way:
        """How the next round is to be."""
        return self._race.next

    def note(self, seconds: float, taken: Sequence[int]) -> None:
        """Note what a round in the `next` way showed; rounds are added up until they make a probe.

        Args:
            seconds: that it took.
            taken: samples taken in by each lane.
        """
        self._seconds += seconds
        self._taken = [before + now for before, now in zip(self._taken, taken, strict=True)]
        if min(self._taken) > 0 and self._seconds >= PROBE_SECONDS:
            self._race.note(self._seconds, sum(self._taken))
            self._seconds, self._taken = 0.0, [0] * len(self._taken)

    def __str__(self) -> str:
        return ", ".join(f"{way} {seconds * 1e6:.3g} us a sample" for way, seconds in self.seconds.items())


@dataclass
class _LaneState:
    """What is kept of a lane: its number, what its position was at progress 0, and its stream."""

    number: int
    zero: int
    stream: "torch.cuda.Stream | None" = None


class LaneScheduler:
    """Lets lanes take turns, at first in all ways in turn, then in the one that was the fastest.

    What was found is kept for each set of lanes, and found anew for a set in which one is not settled: what it does is
    new. While a lane is not settled nothing is measured. Steps of lanes that need not keep abreast are tried on streams
    alone: one after the other they gain nothing.

    Args:
        device: that all lanes train on.
        clock: in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._lanes: WeakKeyDictionary[Lane, _LaneState] = WeakKeyDictionary()
        self._count = 0
        self._searches: dict[tuple[frozenset[int], tuple[Way, ...]], ScheduleSearch] = {}
        self._search: ScheduleSearch | None = None
        self._span = 1

    @property
    def way(self) -> Way | None:
        """The one chosen for the lanes of the last round, or None while that is open."""
        return None if self._search is None else self._search.way

    @property
    def seconds(self) -> dict[Way, float]:
        """By way, for the lanes of the last round, the seconds that a sample takes to go through one of them."""
        return {} if self._search is None else self._search.seconds

    @property
    def span(self) -> int:
        """Samples by which the next round takes the lanes further: so far, and a step, they may be apart meanwhile."""
        return self._span

    def round(self, lanes: Sequence[Lane], interrupted: Callable[[], bool]) -> list[Failure]:
        """Let lanes go on for a while, at most until each has said that there is nothing to do.

        A lane that has said so, or has raised, is left alone for the rest of the round; the others go on. One that
        joins counts from where the others are in the same pass over the data, so that it catches up with them; where
        none is, from where the one furthest behind is.

        Args:
            lanes: of the pack, in the same order each time.
            interrupted: asked after every step; True ends the round.

        Returns:
            The lanes that raised. They are as the error left them, and to be dropped.
        """
        if not lanes:
            return []
        self._admit(lanes)
        self._search = search = self._search_of(lanes)
        measured = search is not None and search.way is None
        before = [lane.position for lane in lanes]
        if measured:
            self._wait()
        began = self._clock()
        way = search.next() if search is not None else "steps" if _abreast(lanes) else "turns"
        failures = self._go(way, lanes, interrupted)
        if measured:
            self._wait()
        seconds = self._clock() - began
        if search is not None and measured and not failures:
            search.note(seconds, [lane.position - then for lane, then in zip(lanes, before, strict=True)])
            if search.way is not None:
                _log.info("%d lanes take turns by %r: %s", len(lanes), search.way, search)
        if max(lane.position - then for lane, then in zip(lanes, before, strict=True)) >= self._span:
            self._adapt(seconds)
        return failures

    def _adapt(self, seconds: float) -> None:
        """Let rounds take about as long as they are to, after one that led over the whole span."""
        if seconds < ROUND_SECONDS / 2:
            self._span *= 2
        elif seconds > ROUND_SECONDS * 2:
            self._span = max(1, self._span // 2)

    def _admit(self, lanes: Sequence[Lane]) -> None:
        """Take note of lanes that are new, and drop what is known of sets in which one is no more."""
        if all(lane in self._lanes for lane in lanes):
            return
        others = [lane for lane in lanes if lane in self._lanes]
        level = min(map(self._progress, others), default=None)
        begins = {place[0]: self._progress(lane) - place[1] for lane in others if (place := lane.place) is not None}
        for lane in lanes:
            if lane not in self._lanes:
                progress = level
                if (place := lane.place) is not None and place[0] in begins:
                    progress = begins[place[0]] + place[1]
                self._lanes[lane] = _LaneState(self._count, 0 if progress is None else lane.position - progress)
                self._count += 1
        numbers = {known.number for known in self._lanes.values()}
        self._searches = {key: search for key, search in self._searches.items() if key[0] <= numbers}

    def _progress(self, lane: Lane) -> int:
        return lane.position - self._lanes[lane].zero

    def _search_of(self, lanes: Sequence[Lane]) -> ScheduleSearch | None:
        """What is known of a set of lanes; None, and nothing of before is kept, if one is still finding its own way."""
        if len(lanes) == 1:
            return ScheduleSearch(("turns",), 1)
        unsettled = {self._lanes[lane].number for lane in lanes if not lane.settled}
        if unsettled:
            self._searches = {key: search for key, search in self._searches.items() if not key[0] & unsettled}
            return None
        ways = self._ways(lanes)
        key = frozenset(self._lanes[lane].number for lane in lanes), ways
        return self._searches.setdefault(key, ScheduleSearch(ways, len(lanes)))

    def _ways(self, lanes: Sequence[Lane]) -> tuple[Way, ...]:
        first: Way = "steps" if _abreast(lanes) else "turns"
        if self._device.type == "cuda":
            return (first, "streams")
        return (first,)

    def _go(self, way: Way, lanes: Sequence[Lane], interrupted: Callable[[], bool]) -> list[Failure]:
        """One round in a way; where those furthest behind have nothing to do, of the others."""
        failures: list[Failure] = []
        before = [lane.position for lane in lanes]
        taking_part = list(lanes)
        while taking_part:
            goal = sys.maxsize if len(lanes) == 1 else min(map(self._progress, taking_part)) + self._span
            with self._streams(lanes) if way == "streams" else nullcontext():
                stopped = self._lead(way, taking_part, goal, interrupted, failures)
            if stopped or before != [lane.position for lane in lanes]:
                break
            taking_part = [lane for lane in taking_part if self._progress(lane) >= goal]
        return failures

    def _lead(
        self, way: Way, lanes: Sequence[Lane], goal: int, interrupted: Callable[[], bool], failures: list[Failure]
    ) -> bool:
        """Let the lane furthest behind have its turn, then again the one that is so then, until all are so far.

        Returns:
            Whether that was interrupted.
        """
        waiting = [lane for lane in lanes if self._progress(lane) < goal]
        while waiting:
            lane = min(waiting, key=self._progress)
            waiting.remove(lane)
            goes_on = True
            while goes_on:
                try:
                    goes_on = self._advance(lane, way)
                except (Exception, SystemExit) as error:  # not hidden: the caller is given it, with the lane
                    failures.append(Failure(lane, error))
                    goes_on = False
                if interrupted():
                    return True
                goes_on = goes_on and self._progress(lane) < goal
                if goes_on and way != "turns":  # then a turn is one step
                    waiting.append(lane)
                    break
        return False

    def _advance(self, lane: Lane, way: Way) -> bool:
        if way != "streams":
            return lane.advance()
        with torch.cuda.stream(self._stream(lane)):
            return lane.advance()

    @contextmanager
    def _streams(self, lanes: Sequence[Lane]) -> Iterator[None]:
        """Within, lanes may use their streams: these come after what was begun before, and before what comes after."""
        current = torch.cuda.current_stream(self._device)
        for lane in lanes:
            self._stream(lane).wait_stream(current)
        try:
            yield
        finally:
            for lane in lanes:
                current.wait_stream(self._stream(lane))

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        known = self._lanes[lane]
        if known.stream is None:
            known.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return known.stream

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _abreast(lanes: Sequence[Lane]) -> bool:
    return any(lane.place is not None for lane in lanes)
