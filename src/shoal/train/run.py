"""Runs a job in a worker process; its contract is `shoal.run.base.Runner`.

The arrays of a job that trains take turns and share one data stream.
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from shoal.core.activity import Activity
from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.epoch_order import EpochOrder
from shoal.core.errors import UnusableTaskError
from shoal.core.event import (
    ArrayFailed,
    Event,
    MembersLeft,
    Outcome,
    Profiled,
    Proven,
    RelativeTimeMeasured,
    Reported,
    SignaturesFound,
    TeamMeasured,
)
from shoal.core.job import Job, Purpose, WorkerContext, log_path
from shoal.core.trial import Report, Trial
from shoal.host.activity_clock import during
from shoal.host.machine import ThisMachine, threads
from shoal.host.pickling import original_or_loaded, why_not_loaded
from shoal.host.process_lock import TemporaryFolder
from shoal.host.process_settings import ProcessSettings, applied, thread_limit
from shoal.task import Task
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.bases import bases_of
from shoal.train.comparison import EPSILON, TOLERANCE, compute_dtype
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.failures import outcome_of, record_failure
from shoal.train.lane_scheduler import LaneFailure, LaneScheduler
from shoal.train.memory import MemoryTracker, limit_memory, release_cached_memory
from shoal.train.plain_copy import MARGIN, perturb
from shoal.train.postponed_compiler import postpone_compiler
from shoal.train.profile import FREE_SECONDS, PREVIEW_SECONDS, measure
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.team.helper import assist
from shoal.train.team.leader import TeamLeader
from shoal.train.worker_state import TrialCache, WorkerState

__all__ = ["Retrained", "Trainer", "prepare", "retrain", "run"]

_log = logging.getLogger("shoal.train")

MAX_JOIN_WAIT_SECONDS = 0.05
"""Maximum seconds to wait for trials to join, after the reports of the trials that they replace are sent, and for
those."""

MAX_PERTURBATION = 0.01
"""Largest relative change of weights that stands for rounding, which that of coarse dtypes would exceed."""


class Trainer:
    """Trains the arrays of a job, each a lane that takes turns with the others.

    Requests are handled between two steps: trials leave, join, get a signature, or are saved at a stop. A lane that
    raises is dropped; if the last one raises, the job fails.
    """

    def __init__(
        self,
        job: Job,
        worker_state: WorkerState,
        signature_builder: SignatureBuilder,
        control: JobControl,
        worker_context: WorkerContext,
    ) -> None:
        self._job = job
        self._worker_state = worker_state
        self._signature_builder = signature_builder
        self._control = control
        self._worker_context = worker_context
        worker_state.threads.begin()
        self._team: TeamLeader | None = None
        self._saved = time.monotonic()
        self._writer = worker_state.writer
        self._held: deque[tuple[int, Event]] = deque()  # and number of the checkpoints that are to be written before it
        self._lanes: list[ArrayTrainer] = []
        self._lanes += [self._lane(array) for array in job.arrays]
        self._memory_tracker = MemoryTracker(job.id, worker_state.device)
        self._scheduler = LaneScheduler(worker_state.device)
        self._last_measurement: RelativeTimeMeasured | None = None
        self._lane_count = len(self._lanes)

    def run(self) -> Iterator[Event]:
        """Train; yield the reports of the trials, with one event for trials that end an epoch together.

        A trial at its target is saved before it is PAUSED. No event is emitted before the checkpoints that were
        submitted before it are on the disk. A job out of memory reports its memory before it raises.
        """
        try:
            for event in self._train():
                if event is not None:
                    self._held.append((self._writer.submitted, event))
                if self._control.prompt:
                    self._writer.flush()
                yield from self._emit_due()
                self._writer.check()
            self._writer.flush()
            yield from self._emit_due()
        except (Exception, SystemExit) as error:
            self._writer.wait()
            yield from self._emit_due()
            if outcome_of(error) is Outcome.OUT_OF_MEMORY:
                yield from self._memory_events()
            raise
        finally:
            self._writer.close()
            self._worker_state.built.drop()
            if self._worker_state.device.type == "cuda":
                bases_of(self._worker_state.task, self._worker_state.device).leave_device()
            release_cached_memory(self._worker_state.device)
            if self._team is not None:
                self._team.close()

    def _emit_due(self) -> Iterator[Event]:
        """Yield the events that wait for no checkpoint any more, in order."""
        while self._due():
            yield self._held.popleft()[1]

    def _due(self) -> bool:
        return bool(self._held) and self._held[0][0] <= self._writer.written

    def _train(self) -> Iterator[Event | None]:
        """Train; yield events and, after each round, None."""
        while True:
            yield from self._handle_requests()
            self._lanes = [lane for lane in self._lanes if not lane.done]
            if not self._lanes:
                return
            if self._control.stopping():
                yield from self._suspend()
                return
            failures = self._prepare()
            if not failures and not any(lane.events or lane.failures for lane in self._lanes):
                failures, found = self._round()
                yield from found
            yield from self._events()
            while failures:
                yield self._drop_lane(failures.pop())
            self._free_memory()
            if self._save_due():
                self._save()
            yield from self._wait_for_joins()
            yield None

    def _suspend(self) -> Iterator[Event]:
        """Save and cache all trials, and drop the lanes."""
        for lane in self._lanes:
            lane.suspend()
        yield from self._events()
        del lane  # this name and the list hold the lanes, whose arrays are in device memory
        self._lanes.clear()

    def _prepare(self) -> list[LaneFailure]:
        """Bring all lanes to their next steps; return the lanes that raised."""
        failures = []
        for lane in self._lanes:
            try:
                lane.prepare()
            except (Exception, SystemExit) as error:  # the caller drops the lane, or ends the job
                failures.append(LaneFailure(lane, error))
        return failures

    def _interrupted(self) -> bool:
        """Return whether a request, an event or a checkpoint is due between two steps."""
        self._writer.check()
        if self._due() or self._control.stopping() or self._control.wait(0) or any(lane.events for lane in self._lanes):
            return True
        return self._save_due()

    def _handle_requests(self) -> Iterator[Event]:
        for change in self._control.changes():
            if change.memory_limit is not None:
                limit_memory(self._worker_state.device, change.memory_limit)
            if change.cores is not None:
                most = min(change.cores, ThisMachine().cores())
                self._worker_state.threads.most = _threads(most, self._worker_context)
            if change.team is not None:
                yield from self._allow_helpers(change.team)
            if gone := frozenset[int]().union(*(lane.leave(change.leave) for lane in self._lanes)):
                yield MembersLeft(self._job.id, gone)
            for array in change.join:
                self._join(array)
            if change.find_signatures:
                self._control.beat(settled=False)
                with during(Activity.SIGNATURE):
                    found = self._signature_builder.find_keys(change.find_signatures, load=False)
                yield SignaturesFound(self._job.id, *found)

    def _allow_helpers(self, helpers: frozenset[str]) -> Iterator[Event]:
        """Let other jobs compute gradients from the next step on, while this job trains a single array."""
        try:
            if self._team is None and helpers:
                self._team = TeamLeader(self._job.id, self._worker_context)
        except OSError as error:
            reason = f"helpers cannot connect to job {self._job.id}: {error}"
            _log.warning("%s", reason)
            for lane in self._lanes:
                yield TeamMeasured(self._job.id, lane.key, len(lane.trials), {}, reason)
        if self._team is not None:
            self._team.allow(helpers)

    def _join(self, array: Array) -> None:
        """Add members to the lane of their key, or add a new lane."""
        for lane in self._lanes:
            if lane.key == array.key and not array.separate:
                lane.join(array.members)
                return
        self._lanes.append(self._lane(array))

    def _lane(self, array: Array) -> ArrayTrainer:
        return ArrayTrainer(self._job.id, array, self._worker_state, self._frozen_sources, self._heartbeat)

    def _heartbeat(self) -> None:
        """Send a heartbeat, and whether lanes only take steps, so that the next should be as long as the last."""
        self._control.beat(all(lane.steady for lane in self._lanes))

    def _frozen_sources(self) -> list[nn.Module]:
        return [model for lane in self._lanes for model in lane.models[:1]]

    def _memory_events(self) -> Iterator[Event]:
        arrays = [(lane.key, len(lane.models)) for lane in self._lanes]
        self._memory_tracker.sample(arrays, self._worker_state.built.bytes)
        if (news := self._memory_tracker.new_peak()) is not None:
            yield news

    def _events(self) -> Iterator[Event]:
        if any(lane.events for lane in self._lanes):
            yield from self._memory_events()
        for lane in self._lanes:
            while lane.events:
                yield lane.events.pop(0)
            while lane.failures:
                yield self._array_failed(*lane.failures.pop(0))

    def _round(self) -> tuple[list[LaneFailure], list[Event]]:
        lanes = [lane for lane in self._lanes if lane.ready]
        for lane in self._lanes:
            lane.team = self._team if len(self._lanes) == 1 else None
        failures = self._scheduler.round(lanes, self._interrupted)
        interleaving, seconds = self._scheduler.interleaving, self._scheduler.seconds
        if interleaving is None or "turns" not in seconds:
            return failures, []
        keys = tuple(lane.key for lane in lanes)
        found = RelativeTimeMeasured(self._job.id, keys, seconds[interleaving] / seconds["turns"])
        news = found != self._last_measurement
        self._last_measurement = found
        return failures, [found] if news else []

    def _wait_for_joins(self) -> Iterator[Event | None]:
        """If trials have just left the only lane, wait a short time for others to join.

        None is yielded once the checkpoints of those that have left may be on the disk, so that their reports are sent.
        If these are not written by then, training continues.
        """
        if len(self._lanes) != 1 or not self._lanes[0].join_wait:
            return
        (lane,) = self._lanes
        latest = time.monotonic() + MAX_JOIN_WAIT_SECONDS
        self._writer.wait(MAX_JOIN_WAIT_SECONDS)
        yield None
        deadline = min(latest, time.monotonic() + lane.join_wait)
        while not self._held and time.monotonic() < deadline and not self._control.stopping():
            with during(Activity.ENGINE):
                requested = self._control.wait(deadline - time.monotonic())
            if requested:
                before = lane.trials
                yield from self._handle_requests()
                if lane.trials - before:
                    return

    def _drop_lane(self, failure: LaneFailure) -> Event:
        (failed,) = [mine for mine in self._lanes if mine is failure.lane]
        error = failure.error
        self._lanes.remove(failed)
        if not self._lanes:
            raise error
        return self._array_failed(failed.trials, error)

    def _array_failed(self, trials: frozenset[int], error: Exception | SystemExit) -> Event:
        if outcome_of(error) is Outcome.STORAGE_FULL:
            raise error
        outcome, message = record_failure(error, log_path(self._worker_state.directory, self._job.id))
        _log.warning("trials %s leave the job after an error: %s", sorted(trials), message)
        return ArrayFailed(self._job.id, trials, outcome, message)

    def _free_memory(self) -> None:
        before, self._lane_count = self._lane_count, len(self._lanes)
        if self._lane_count < before:
            release_cached_memory(self._worker_state.device)

    def _save_due(self) -> bool:
        """Return whether to save all trials now; not before earlier checkpoints are on the disk, which may be slow."""
        if time.monotonic() - self._saved < self._worker_context.checkpoint_seconds:
            return False
        return self._writer.written == self._writer.submitted

    def _save(self) -> None:
        for lane in self._lanes:
            lane.save()
        self._saved = time.monotonic()


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Find signatures, profile, train or assist another job, depending on the job's purpose."""
    control.beat(settled=False)
    with during(Activity.START):
        worker_state, signature_builder = prepare(device, worker_context)
        if worker_state.device.type == "cuda" and job.purpose is not Purpose.SIGNATURE:
            torch.cuda.synchronize(worker_state.device)  # creates the CUDA context, which is an MPS client if MPS runs
    limit_memory(worker_state.device, job.memory_limit)
    control.beat(settled=False)
    match job.purpose:
        case Purpose.SIGNATURE:
            yield SignaturesFound(job.id, *signature_builder.find_keys([member.trial for member in job.members]))
        case Purpose.PROFILE:
            free_seconds = _free_seconds(worker_state.device, worker_context.trains) / len(job.arrays)
            for array in job.arrays:
                if control.stopping():
                    return
                control.beat(settled=False)
                refusals: list[str] = []
                profile = measure(worker_state, array, device.memory, free_seconds, refusals.append)
                worker_state.outside.restore_first()
                release_cached_memory(worker_state.device)
                trials = {member.trial.number: member.start for member in array.members}
                yield from (Proven(job.id, array.key, trials, refusal=refusal) for refusal in refusals)
                yield Profiled(job.id, array.key, profile, _compute_limit())
        case Purpose.TRAIN:
            yield from Trainer(job, worker_state, signature_builder, control, worker_context).run()
        case Purpose.ASSIST:
            assist(job, worker_state, control, worker_context.host)


@dataclass(frozen=True)
class Retrained:
    """A trial that was trained alone from its start, up to a loss that was not finite.

    Args:
        tolerance: Relative difference of a metric that the rounding of one training step explains.
        perturbation: Relative change of the initial weights that stands for the rounding of a whole training.
    """

    reports: list[Report]
    tolerance: float
    perturbation: float


def retrain(
    task: bytes, trial: Trial, epochs: int, device: Device, settings: ProcessSettings, perturbed: int | None = None
) -> Retrained:
    """Train one trial alone in this process from its start.

    Args:
        perturbed: Seed of the signs by which its initial weights are changed by `perturbation`; None for no change.
    """
    member = Member(trial, 0, epochs)
    array = Array(FusionKey(f"trial {trial.number}", "", 1, trial.data_seed), (member,))
    with TemporaryFolder() as folder, applied(settings):
        worker_context = WorkerContext(folder.path, task, settings=settings)
        worker_state, _ = prepare(device, worker_context)
        worker_state.sets.of(trial.config)  # before the build, as in training
        runtime = worker_state.build(member)
        dtype = compute_dtype(runtime)
        perturbation = min(MARGIN * EPSILON[dtype], MAX_PERTURBATION)
        if perturbed is not None:
            perturb(runtime.model, perturbation, perturbed)
        worker_state.built.keep([runtime], math.inf)
        del runtime  # the job drops it, so that its memory is free at the end
        events = run(Job("rerun", (array,)), device, worker_context, JobControl(prompt=True))
        reports = [report for event in events if isinstance(event, Reported) for report in event.reports]
        return Retrained(reports, TOLERANCE[dtype], perturbation)


def prepare(device: Device, worker_context: WorkerContext) -> tuple[WorkerState, SignatureBuilder]:
    """Prepare this process and the task for a device."""
    torch_device = _torch_device(device)
    torch.set_num_threads(_threads(device.cores, worker_context))
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    postpone_compiler()
    return _cached_state(worker_context.task, torch_device, worker_context.directory, worker_context.of_best)


def _threads(cores: int, worker_context: WorkerContext) -> int:
    return min(threads(cores), thread_limit(worker_context.settings))


def _torch_device(device: Device) -> torch.device:
    """Return the device as torch names it here: "cuda:0" if no other is visible (see `shoal.run.gpu_sharing`)."""
    if device.uuid and os.environ.get("CUDA_VISIBLE_DEVICES") == device.uuid:
        return torch.device("cuda:0")
    return torch.device(device.torch_name)


def _free_seconds(device: torch.device, trains: bool) -> float:
    """Return the seconds that a profile job may always use for measuring sizes."""
    if device.type == "cpu":
        return FREE_SECONDS
    return 0.0 if trains else PREVIEW_SECONDS


def _compute_limit() -> float | None:
    """Return the part of the GPU that MPS lets this process use; None: all of it, or no MPS."""
    percentage = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100))
    return percentage / 100 if percentage < 100 else None


@lru_cache(maxsize=1)
def _cached_state(
    pickled: bytes, device: torch.device, directory: Path, of_best: EpochOrder
) -> tuple[WorkerState, SignatureBuilder]:
    """Return the worker state and signature builder of a study; its next job in this process gets the same ones."""
    try:
        task: Task = original_or_loaded(pickled)
    except (Exception, SystemExit) as error:
        raise UnusableTaskError(f"the task cannot be loaded in a worker: {why_not_loaded(error)}") from error
    sets = DataSets(task, device)
    return WorkerState(task, sets, TrialCache(), device, directory, of_best), SignatureBuilder(task, sets)
