"""Interleaves the steps of the lanes (arrays in training) of one process; the fastest interleaving is measured.

All interleavings bring all lanes to the same position in the data. The fastest one is kept:

- "turns": one lane after another, each for a whole round, so caches stay warm
- "steps": always one step of the lane furthest behind, so lanes that share samples only at the same position in the
  data fetch them once
- "streams": as "steps", with one CUDA stream per lane, so kernels overlap (GPU only)

"turns" is always one of the interleavings, so a pack is not slower than its members in sequence. Lanes that must stay
in lockstep use "steps" instead, since sharing samples saves more than warm caches.
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

from shoal.fuse.race import Race, RaceRules

__all__ = ["RULES", "Interleaving", "InterleavingSearch", "Lane", "LaneFailure", "LaneScheduler"]

_log = logging.getLogger("shoal.pack")

ROUND_SECONDS = 0.2
"""Intended duration of a round. A turn of some hundredths of a second loses less than 1% to cold caches, and lanes
drift apart by at most the samples of one round."""

Interleaving = Literal["turns", "steps", "streams"]
"""Order in which the lanes of a process run their steps."""

PROBE_SECONDS = 0.1
"""Minimum duration of a probe of one interleaving; a probe may consist of several rounds."""

RULES = RaceRules(margin=1.03, drop_after_seconds=2 * PROBE_SECONDS)


class Lane(Protocol):
    """Array in training that shares a process, and possibly a data stream, with others.

    Lanes are compared by identity, and must support weak references.
    """

    @property
    def position(self) -> int:
        """Number of samples trained on; in a scheduler's first round equal at the same position of an epoch."""

    @property
    def pass_position(self) -> tuple[object, int] | None:
        """Pass over the data and number of samples of it; None if samples are shared at any position."""

    @property
    def settled(self) -> bool:
        """Whether the lane has found its fastest step mode."""

    def advance(self) -> bool:
        """Take one step; return False if it was the last one of an epoch, or if no step was ready.

        A lane's CUDA stream is synchronised before and after a round; within it, lanes synchronise shared tensors.
        """


@dataclass(frozen=True)
class LaneFailure:
    """The error of a lane, also `SystemExit`, whose step may be incomplete. Other lanes are not affected."""

    lane: Lane
    error: Exception | SystemExit


class InterleavingSearch:
    """Finds the fastest interleaving for a set of lanes, or the first of equally fast ones, in real training."""

    def __init__(self, interleavings: Sequence[Interleaving], lanes: int) -> None:
        self._race: Race[Interleaving] = Race(interleavings, RULES)
        if len(interleavings) == 1:
            self._race.stop()
        self._seconds = 0.0
        self._taken = [0] * lanes

    @property
    def interleaving(self) -> Interleaving | None:
        """The fastest interleaving; None during the search."""
        return self._race.winner

    @property
    def seconds(self) -> dict[Interleaving, float]:
        """Schedule -> seconds per sample of a lane, in its fastest probe."""
        return self._race.seconds

    def next(self) -> Interleaving:
        """Return the interleaving of the next round."""
        return self._race.next

    def record(self, seconds: float, taken: Sequence[int]) -> None:
        """Record a round in the interleaving `next`, with the samples of each lane; several may add up to a probe."""
        self._seconds += seconds
        self._taken = [before + now for before, now in zip(self._taken, taken, strict=True)]
        if min(self._taken) > 0 and self._seconds >= PROBE_SECONDS:
            self._race.note(self._seconds, sum(self._taken))
            self._seconds, self._taken = 0.0, [0] * len(self._taken)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds * 1e6:.3g} us a sample" for name, seconds in self.seconds.items())


@dataclass
class _LaneState:
    """State of a lane in the scheduler: number, position at progress 0, CUDA stream."""

    number: int
    start_position: int
    stream: "torch.cuda.Stream | None" = None


class LaneScheduler:
    """Runs the steps of lanes in rounds, first by each interleaving in turn, then by the fastest one.

    The result is kept for each set of lanes. While a lane is not settled, nothing is measured, and results for sets
    with this lane are dropped, since its step time changes. Lanes that need not stay in lockstep never try "steps",
    which gains nothing for them without streams.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._clock = clock
        self._lanes: WeakKeyDictionary[Lane, _LaneState] = WeakKeyDictionary()
        self._count = 0
        self._searches: dict[tuple[frozenset[int], tuple[Interleaving, ...]], InterleavingSearch] = {}
        self._search: InterleavingSearch | None = None
        self.round_samples = 1
        """Samples of each lane in the next round; within it lanes drift apart by at most these and a step."""

    @property
    def interleaving(self) -> Interleaving | None:
        """The interleaving chosen for the lanes of the last round; None during the search."""
        return None if self._search is None else self._search.interleaving

    @property
    def seconds(self) -> dict[Interleaving, float]:
        """Schedule -> seconds per sample of a lane, for the lanes of the last round."""
        return {} if self._search is None else self._search.seconds

    def round(self, lanes: Sequence[Lane], interrupted: Callable[[], bool]) -> list[LaneFailure]:
        """Train lanes for a round, which ends early if none has a step ready; return the failed ones, to be dropped.

        A lane that has no step ready or has raised gets no more steps in the round. A new lane counts its progress
        relative to lanes in the same pass over the data, or from that of the lane furthest behind.
        """
        if not lanes:
            return []
        self._admit(lanes)
        self._search = search = self._search_for(lanes)
        measured = search is not None and search.interleaving is None
        before = [lane.position for lane in lanes]
        if measured:
            self._synchronize()
        began = self._clock()
        interleaving = search.next() if search is not None else "steps" if _in_lockstep(lanes) else "turns"
        failures = self._run_round(interleaving, lanes, interrupted)
        if measured:
            self._synchronize()
        seconds = self._clock() - began
        if search is not None and measured and not failures:
            search.record(seconds, [lane.position - then for lane, then in zip(lanes, before, strict=True)])
            if search.interleaving is not None:
                _log.info("%d lanes are interleaved by %r: %s", len(lanes), search.interleaving, search)
        if max(lane.position - then for lane, then in zip(lanes, before, strict=True)) >= self.round_samples:
            self._adapt(seconds)
        return failures

    def _adapt(self, seconds: float) -> None:
        """After a complete round, change `round_samples` so that rounds take about `ROUND_SECONDS`."""
        if seconds < ROUND_SECONDS / 2:
            self.round_samples *= 2
        elif seconds > ROUND_SECONDS * 2:
            self.round_samples = max(1, self.round_samples // 2)

    def _admit(self, lanes: Sequence[Lane]) -> None:
        """Register new lanes, and drop the searches of sets with a lane that no longer exists."""
        if all(lane in self._lanes for lane in lanes):
            return
        others = [lane for lane in lanes if lane in self._lanes]
        level = min(map(self._progress, others), default=None)
        begins = {
            pass_position[0]: self._progress(lane) - pass_position[1]
            for lane in others
            if (pass_position := lane.pass_position) is not None
        }
        for lane in lanes:
            if lane not in self._lanes:
                progress = level
                if (pass_position := lane.pass_position) is not None and pass_position[0] in begins:
                    progress = begins[pass_position[0]] + pass_position[1]
                self._lanes[lane] = _LaneState(self._count, 0 if progress is None else lane.position - progress)
                self._count += 1
        numbers = {known.number for known in self._lanes.values()}
        self._searches = {key: search for key, search in self._searches.items() if key[0] <= numbers}

    def _progress(self, lane: Lane) -> int:
        return lane.position - self._lanes[lane].start_position

    def _search_for(self, lanes: Sequence[Lane]) -> InterleavingSearch | None:
        """Return the search for a set of lanes; None, and all searches dropped, for those not settled."""
        if len(lanes) == 1:
            return InterleavingSearch(("turns",), 1)
        unsettled = {self._lanes[lane].number for lane in lanes if not lane.settled}
        if unsettled:
            self._searches = {key: search for key, search in self._searches.items() if not key[0] & unsettled}
            return None
        interleavings = self._interleavings_for(lanes)
        key = frozenset(self._lanes[lane].number for lane in lanes), interleavings
        return self._searches.setdefault(key, InterleavingSearch(interleavings, len(lanes)))

    def _interleavings_for(self, lanes: Sequence[Lane]) -> tuple[Interleaving, ...]:
        first: Interleaving = "steps" if _in_lockstep(lanes) else "turns"
        if self._device.type == "cuda":
            return (first, "streams")
        return (first,)

    def _run_round(
        self, interleaving: Interleaving, lanes: Sequence[Lane], interrupted: Callable[[], bool]
    ) -> list[LaneFailure]:
        """Run one round by an interleaving. If no lane furthest behind has a step ready, the others take the round."""
        failures: list[LaneFailure] = []
        before = [lane.position for lane in lanes]
        active = list(lanes)
        while active:
            goal = sys.maxsize if len(lanes) == 1 else min(map(self._progress, active)) + self.round_samples
            with self._streams(lanes) if interleaving == "streams" else nullcontext():
                stopped = self._run_to(interleaving, active, goal, interrupted, failures)
            if stopped or before != [lane.position for lane in lanes]:
                break
            active = [lane for lane in active if self._progress(lane) >= goal]
        return failures

    def _run_to(
        self,
        interleaving: Interleaving,
        lanes: Sequence[Lane],
        goal: int,
        interrupted: Callable[[], bool],
        failures: list[LaneFailure],
    ) -> bool:
        waiting = [lane for lane in lanes if self._progress(lane) < goal]
        while waiting:
            lane = min(waiting, key=self._progress)
            waiting.remove(lane)
            goes_on = True
            while goes_on:
                try:
                    goes_on = self._advance(lane, interleaving)
                except (Exception, SystemExit) as error:  # the caller gets the error with the lane
                    failures.append(LaneFailure(lane, error))
                    goes_on = False
                if interrupted():
                    return True
                goes_on = goes_on and self._progress(lane) < goal
                if goes_on and interleaving != "turns":  # one step per turn
                    waiting.append(lane)
                    break
        return False

    def _advance(self, lane: Lane, interleaving: Interleaving) -> bool:
        if interleaving != "streams":
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

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _in_lockstep(lanes: Sequence[Lane]) -> bool:
    return any(lane.pass_position is not None for lane in lanes)
