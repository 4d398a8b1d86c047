"""Trains a job: its arrays in turns, as one process with one stream of data."""

import logging
import time
from collections.abc import Iterator

from torch import nn

from shoal.core.array import Array
from shoal.core.event import ArrayFailed, Event, MembersLeft, Outcome, PackSpeedMeasured, SignaturesFound
from shoal.core.job import Job, log_path
from shoal.worker.array_trainer import ArrayTrainer
from shoal.worker.control import JobControl
from shoal.worker.failures import outcome_of, recorded
from shoal.worker.lane_scheduler import Failure, LaneScheduler
from shoal.worker.memory import MemoryTracker, give_back
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.worker_state import WorkerState

__all__ = ["Trainer"]

_log = logging.getLogger("shoal.worker")


class Trainer:
    """Trains the arrays of a job, each a lane that takes turns with the others.

    What is asked of the job meanwhile is heard between two steps: trials leave, others join, or are looked at. A lane
    whose task raises is dropped, and the others go on; the last one takes the job with it.

    Args:
        job: what to train.
        worker_state: of this process.
        signature_builder: of the task, for trials that are to be looked at meanwhile.
        control: looked at after every step; when it is to stop, all is saved and training ends.
        checkpoint_seconds: longest wall time between two checkpoints.
    """

    def __init__(
        self,
        job: Job,
        worker_state: WorkerState,
        signature_builder: SignatureBuilder,
        control: JobControl,
        checkpoint_seconds: float,
    ) -> None:
        self._job = job
        self._worker_state = worker_state
        self._signature_builder = signature_builder
        self._control = control
        self._checkpoint_seconds = checkpoint_seconds
        self._saved = time.monotonic()
        self._lanes: list[ArrayTrainer] = []
        self._lanes += [self._lane(array) for array in job.arrays]
        self._peak = MemoryTracker(job.id, worker_state.device)
        self._turns = LaneScheduler(worker_state.device)
        self._paced: PackSpeedMeasured | None = None
        self._held = len(self._lanes)

    def run(self) -> Iterator[Event]:
        """Yields the reports of the trials, those that end an epoch together in one event.

        A trial that reaches its target is saved before it is reported as PAUSED. Of a job that runs out of memory it is
        said what it held.
        """
        try:
            yield from self._train()
        except Exception as error:
            if outcome_of(error) is Outcome.OUT_OF_MEMORY:
                yield from self._look()
            raise

    def _train(self) -> Iterator[Event]:
        while True:
            yield from self._hear()
            self._lanes = [lane for lane in self._lanes if not lane.done]
            if not self._lanes:
                self._give_back()
                return
            if self._control.stopping():
                yield from self._suspend()
                return
            failures = self._prepare()
            if not failures and not any(lane.events or lane.failures for lane in self._lanes):
                failures, found = self._round()
                yield from found
            yield from self._tell()
            while failures:
                yield self._drop(failures.pop())
            self._give_back()
            if time.monotonic() - self._saved >= self._checkpoint_seconds:
                self._save()
            yield from self._linger()

    def _suspend(self) -> Iterator[Event]:
        """Save all, and free the device; a job that goes on with these arrays in this process finds them at hand."""
        for lane in self._lanes:
            lane.suspend()
        yield from self._tell()
        self._lanes.clear()
        give_back(self._worker_state.device)

    def _prepare(self) -> list[Failure]:
        """Bring all lanes to their next steps; returns those that raised."""
        failures = []
        for lane in self._lanes:
            try:
                lane.prepare()
            except (Exception, SystemExit) as error:  # not hidden: the lane is dropped for it, or the job ends
                failures.append(Failure(lane, error))
        return failures

    def _interrupted(self) -> bool:
        """Whether there is anything to be told, heard or done between two steps."""
        if self._control.stopping() or self._control.wait(0) or any(lane.events for lane in self._lanes):
            return True
        return time.monotonic() - self._saved >= self._checkpoint_seconds

    def _hear(self) -> Iterator[Event]:
        """Let trials go that are to leave, bring those in that are to join, look at those that are to be looked at."""
        for change in self._control.changes():
            if gone := frozenset[int]().union(*(lane.leave(change.leave) for lane in self._lanes)):
                yield MembersLeft(self._job.id, gone)
            for array in change.join:
                self._let_in(array)
            if change.look:
                self._control.beat(settled=False)
                yield SignaturesFound(self._job.id, *self._signature_builder.survey(change.look, load=False))

    def _let_in(self, array: Array) -> None:
        """Members join the lane of their key, or are a new one."""
        for lane in self._lanes:
            if lane.key == array.key and not array.apart:
                lane.join(array.members)
                return
        self._lanes.append(self._lane(array))

    def _lane(self, array: Array) -> ArrayTrainer:
        return ArrayTrainer(self._job.id, array, self._worker_state, self._lenders, self._beat)

    def _beat(self) -> None:
        """Something makes progress; while only steps are taken, the next one takes about as long as the last."""
        self._control.beat(all(lane.stepping for lane in self._lanes))

    def _lenders(self) -> list[nn.Module]:
        """One model of each array."""
        return [model for lane in self._lanes for model in lane.models[:1]]

    def _look(self) -> Iterator[Event]:
        """How much memory the job has taken, if that is news."""
        self._peak.look((lane.key, len(lane.models)) for lane in self._lanes)
        if (news := self._peak.news()) is not None:
            yield news

    def _tell(self) -> Iterator[Event]:
        if any(lane.events for lane in self._lanes):
            yield from self._look()
        for lane in self._lanes:
            while lane.events:
                yield lane.events.pop(0)
            while lane.failures:
                yield self._dropped(*lane.failures.pop(0))

    def _round(self) -> tuple[list[Failure], list[Event]]:
        """Let lanes take turns for a while.

        Returns:
            Those that raised; and what has been found of what lanes gain from each other, if it is news.
        """
        lanes = [lane for lane in self._lanes if lane.ready]
        failures = self._turns.round(lanes, self._interrupted)
        way, seconds = self._turns.way, self._turns.seconds
        if way is None or "turns" not in seconds:
            return failures, []
        found = PackSpeedMeasured(self._job.id, tuple(lane.key for lane in lanes), seconds[way] / seconds["turns"])
        news = found != self._paced
        self._paced = found
        return failures, [found] if news else []

    def _linger(self) -> Iterator[Event]:
        """Where some have just left the only lane, wait a moment for who takes their places; hear meanwhile."""
        if len(self._lanes) != 1:
            return
        (lane,) = self._lanes
        deadline = time.monotonic() + lane.linger
        while time.monotonic() < deadline and not self._control.stopping():
            if self._control.wait(deadline - time.monotonic()):
                before = lane.trials
                yield from self._hear()
                if lane.trials - before:
                    return

    def _drop(self, failure: Failure) -> Event:
        """Go on without a lane that raised.

        Raises:
            Exception: what it raised, if it is the last one, or the disk is full.
        """
        (failed,) = [mine for mine in self._lanes if mine is failure.lane]
        error = failure.error
        self._lanes.remove(failed)
        if not self._lanes:
            raise error
        return self._dropped(failed.trials, error)

    def _dropped(self, trials: frozenset[int], error: Exception | SystemExit) -> Event:
        if outcome_of(error) is Outcome.STORAGE_FULL:
            raise error
        outcome, message = recorded(error, log_path(self._worker_state.directory, self._job.id))
        _log.warning("trials %s are trained here no more: %s", sorted(trials), message)
        return ArrayFailed(self._job.id, trials, outcome, message)

    def _give_back(self) -> None:
        """Let memory of the device that lanes had be used by others."""
        before, self._held = self._held, len(self._lanes)
        if self._held < before:
            give_back(self._worker_state.device)

    def _save(self) -> None:
        for lane in self._lanes:
            lane.save()
        self._saved = time.monotonic()
