"""Schedules the lanes (arrays in training) of one process: who takes the next step, chosen by measurement.

All schedules lead all lanes to the same place in the data. The fastest is kept:

- turns    one lane after another, each for a whole round: caches stay warm
- steps    one step of the lane furthest behind, again and again: lanes that share samples only at the same place in the
           data fetch them once
- streams  as steps, each lane on a CUDA stream of its own, so that kernels overlap (GPU only)

"turns" is always among the schedules, so that a pack is not slower than its members in sequence. Lanes that must keep
abreast use "steps" instead: sharing samples saves more than warm caches.
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
"""Duration of a round. A turn of some hundredths of a second loses less than a hundredth of it to cold caches, and
lanes drift apart by no more than the samples of one round."""

Way = Literal["turns", "steps", "streams"]

PROBE_SECONDS = 0.1
"""Least duration of a probe of one schedule; rounds may be shorter."""

RULES = RaceRules(margin=1.03, drop_after_seconds=2 * PROBE_SECONDS)


class Lane(Protocol):
    """An array in training that takes turns with others, on a data stream that they may share.

    Lanes are told apart by identity, and must allow weak references.
    """

    @property
    def position(self) -> int:
        """Samples that the lane has trained on, which grow with every step. In the first round of a scheduler, lanes at
        the same place of an epoch have equal positions."""

    @property
    def place(self) -> tuple[object, int] | None:
        """The pass over the data and the samples taken from it, if the lane shares samples only with lanes at the same
        place; else None."""

    @property
    def settled(self) -> bool:
        """Whether the lane's own search for the fastest kind of step is over."""

    def advance(self) -> bool:
        """Take one step; returns False if it ended an epoch, or if there was nothing to do.

        On a GPU it may run on a stream of its own, which is synchronised with the current stream before and after the
        round. Within a round, lanes synchronise what they hand to each other.
        """


@dataclass(frozen=True)
class Failure:
    """A lane that raised. Other lanes are not affected.

    Args:
        lane: Lane that raised; its step may be half done.
        error: Exception that it raised, also `SystemExit`: the caller decides what that means.
    """

    lane: Lane
    error: Exception | SystemExit


class ScheduleSearch:
    """Finds the fastest schedule for a set of lanes by trying all in turn, in real training.

    Args:
        ways: Schedules to choose from; the first of equally fast ones wins.
        lanes: Number of lanes.
    """

    def __init__(self, ways: Sequence[Way], lanes: int) -> None:
        self._race: Race[Way] = Race(ways, RULES)
        if len(ways) == 1:
            self._race.stop()
        self._seconds = 0.0
        self._taken = [0] * lanes

    @property
    def way(self) -> Way | None:
        """The fastest schedule; None while the search goes on."""
        return self._race.winner

    @property
    def seconds(self) -> dict[Way, float]:
        """Schedule -> seconds per sample of a lane, in its fastest probe."""
        return self._race.seconds

    def next(self) -> Way:
        """The schedule of the next round."""
        return self._race.next

    def note(self, seconds: float, taken: Sequence[int]) -> None:
        """Record a round in the schedule `next`. Rounds add up to a probe.

        Args:
            seconds: Duration of the round.
            taken: Samples that each lane has trained on.
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
    """A lane's number, its position at progress 0, and its CUDA stream."""

    number: int
    zero: int
    stream: "torch.cuda.Stream | None" = None


class LaneScheduler:
    """Lets lanes take turns: first in all schedules, then in the fastest one.

    The result is kept for each set of lanes. While a lane is not settled nothing is measured, and results for sets with
    that lane are dropped, since its steps change. Lanes that need not keep abreast try single steps on streams only:
    one after the other they gain nothing.

    Args:
        device: Device of all lanes.
        clock: Time in seconds.
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
        """The schedule chosen for the lanes of the last round; None while the search goes on."""
        return None if self._search is None else self._search.way

    @property
    def seconds(self) -> dict[Way, float]:
        """Schedule -> seconds per sample of a lane, for the lanes of the last round."""
        return {} if self._search is None else self._search.seconds

    @property
    def span(self) -> int:
        """Samples of each lane in the next round. Within the round, lanes are apart by at most this and a step."""
        return self._span

    def round(self, lanes: Sequence[Lane], interrupted: Callable[[], bool]) -> list[Failure]:
        """Let lanes train for one round, which ends early if no lane has anything to do.

        A lane that has nothing to do, or has raised, gets no more steps in the round; the others go on. A new lane
        counts from the lanes in the same pass over the data, so that it catches up with them. If there are none it
        counts from the lane furthest behind.

        Args:
            lanes: Lanes to train, in the same order each time.
            interrupted: Function that is called after every step; True ends the round.

        Returns:
            The lanes that raised, as the error left them. The caller must drop them.
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
        """Change the span so that rounds take about `ROUND_SECONDS`, after a round over the whole span."""
        if seconds < ROUND_SECONDS / 2:
            self._span *= 2
        elif seconds > ROUND_SECONDS * 2:
            self._span = max(1, self._span // 2)

    def _admit(self, lanes: Sequence[Lane]) -> None:
        """Register new lanes, and drop the searches of sets with a lane that is gone."""
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
        """The search for a set of lanes; None if one of them is not settled, whose searches are dropped then."""
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
        """Run one round in a schedule. If the lanes furthest behind have nothing to do, the others take it."""
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
        """Give the turn to the lane furthest behind, again and again, until all lanes have reached the goal.

        Returns:
            Whether the round was interrupted.
        """
        waiting = [lane for lane in lanes if self._progress(lane) < goal]
        while waiting:
            lane = min(waiting, key=self._progress)
            waiting.remove(lane)
            goes_on = True
            while goes_on:
                try:
                    goes_on = self._advance(lane, way)
                except (Exception, SystemExit) as error:  # not hidden: the caller gets it with the lane
                    failures.append(Failure(lane, error))
                    goes_on = False
                if interrupted():
                    return True
                goes_on = goes_on and self._progress(lane) < goal
                if goes_on and way != "turns":  # a turn is one step
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
        """Order the lanes' streams after all earlier work of the current stream, and before all later work."""
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
