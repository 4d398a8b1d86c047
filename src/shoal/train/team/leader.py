"""The leader's side of a team: a training job that lets helpers compute a part of its gradients, timed and compared."""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.array import FusionKey
from shoal.core.event import TeamMeasured
from shoal.core.job import WorkerContext
from shoal.fuse.array import ModelArray
from shoal.fuse.backward import MicroBatches, micro_batches
from shoal.fuse.shard import IndivisibleStepError, MaskRows, Shard
from shoal.fuse.step import TrainingStep
from shoal.fuse.transaction import Transaction
from shoal.task import size_of
from shoal.train.stepper import MixedEpochsError, Stepper, StepRefusedError
from shoal.train.team.channel import Channel, LeaderSide, PeerLostError
from shoal.train.team.exchange import (
    BatchLeaf,
    GradientSum,
    Header,
    SharedState,
    TrainedArray,
    divided,
    first_rows,
    leaves_of,
    pack,
    rebuilt,
)

__all__ = ["GradientSnapshot", "TeamLeader", "TeamStepTimes", "tolerance"]

WARM_UP = 3
"""Number of steps of each size that are not counted: memory is allocated, and caches are cold."""
COUNTED = 5
"""Number of steps of which the median counts."""

_log = logging.getLogger("shoal.train")

POLL_SECONDS = 0.05
PEER_SECONDS, PEER_STEPS = 30.0, 5
"""Seconds, and steps of the leader alone, after which a silent helper is lost; the longer time counts. The steps are
fewer than those after which a job hangs, see `shoal.study.hangs.PATIENCE`."""
HANG_SHARE = 1 / 3
"""Largest part of `WorkerContext.hang_seconds` that counts, so that a leader which waits does not seem to hang."""
CHECK_INTERVAL, CHECK_ROWS = 100, 16
"""Number of steps of a team before the first of which gradients are compared with those that the leader computes alone,
and number of rows for that, but at least two for each process: with more rows, growing would take long."""
MAX_LOSSES = 3
"""Number of lost helpers after which the steps of a key are not divided any more."""


class TeamStepTimes:
    """Times of the steps of one array, as they are reported once each size has been measured."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WARM_UP + COUNTED))
        self._reported: frozenset[int] = frozenset()

    def add(self, size: int, seconds: float) -> None:
        """Add the time of a step of so many devices."""
        self._seconds[size].append(seconds)

    def seconds(self, size: int) -> float | None:
        """Median seconds of a step of so many devices; None while unknown."""
        found = self._seconds[size]
        return median(list(found)[WARM_UP:]) if len(found) == WARM_UP + COUNTED else None

    def news(self, job: str, key: FusionKey, members: int) -> list[TeamMeasured]:
        """An event with all times, if a size other than 1 has been measured since the last one."""
        times = {size: found for size in list(self._seconds) if (found := self.seconds(size)) is not None}
        if 1 not in times or times.keys() <= self._reported | {1}:
            return []
        self._reported = frozenset(times)
        return [TeamMeasured(job, key, members, times)]


_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_MIXED_TOLERANCE = 3e-2


def tolerance(dtype: torch.dtype, mixed: bool) -> float:
    """Largest relative difference of two sums of equal rows in different order; `mixed`: under autocast."""
    return _MIXED_TOLERANCE if mixed else _TOLERANCES.get(dtype, _MIXED_TOLERANCE)


@dataclass(frozen=True)
class GradientSnapshot:
    """Losses, [B], gradients and buffers after a step, [B, *shape] each, that one process has computed alone."""

    losses: Tensor
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]

    @classmethod
    def of(cls, losses: Tensor, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> "GradientSnapshot":
        """Copy the losses and gradients; `buffers` are copies."""
        return cls(losses.clone(), [None if p.grad is None else p.grad.clone() for p in parameters], buffers)

    def check(self, other: "GradientSnapshot", relative: float) -> None:
        """Raise `IndivisibleStepError` if a team's values of a member differ by more than `relative` of their norm."""
        if [each is None for each in self.gradients] != [each is None for each in other.gradients]:
            raise IndivisibleStepError("some parameters have a gradient only if the batch is divided")
        gradients = [(own, its) for own, its in zip(self.gradients, other.gradients, strict=True) if own is not None]
        for what, pairs in (
            ("loss", [(self.losses, other.losses)]),
            ("gradients", gradients),
            ("buffers", list(zip(self.buffers, other.buffers, strict=True))),
        ):
            difference = max(_difference(pairs).tolist(), default=0.0)
            if difference > relative:
                raise IndivisibleStepError(
                    f"the {what} of a step differ by {difference:.2g} of their norm if the batch is divided, so the "
                    "loss is not a mean over samples that are independent of each other"
                )


def _difference(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    """Norm of the difference relative to the norm, [B], or [0] without pairs; 0 where both are not finite."""
    if not pairs:
        return torch.zeros(0)
    both = [(own.double(), its.to(own.device).double()) for own, its in pairs if its is not None]
    apart = torch.stack([_squares(own - its) for own, its in both]).sum(0)
    size = torch.stack([_squares(own) for own, _ in pairs]).sum(0)
    other = torch.stack([_squares(its) for _, its in both]).sum(0)
    relative = (apart / size.clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    finite = size.isfinite(), other.isfinite()
    return relative.where(finite[0] & finite[1], torch.where(finite[0] == finite[1], 0.0, torch.inf))


def _squares(values: Tensor) -> Tensor:
    return values.double().flatten(1).square().sum(1) if values.dim() > 1 else values.double().square()


class TeamLeader:
    """Lets helpers compute gradients for the steps of an array.

    Before each step, it follows changes of the array, and forms a new team if other helpers are ready or wanted. In a
    step, each process computes the gradients of its rows of the batch. All else is done by the leader alone. A step
    that fails is taken by the leader alone, from the same state. A step that cannot be divided ends the teams of the
    array's key, and so does the loss of several helpers. The first team of a key is formed once the time of a step
    without helpers is measured.

    Whether steps can be divided is checked by comparing the gradients of some rows before the first step of each team,
    and before some later ones. A loss that is a mean over samples in the checked rows only is not recognized.
    """

    def __init__(self, job: str, worker_context: WorkerContext) -> None:
        self.events: list[TeamMeasured] = []
        """Events for the engine; the owner removes them."""
        self._job = job
        self._peer_seconds = min(PEER_SECONDS, HANG_SHARE * worker_context.hang_seconds)
        self._side = LeaderSide(worker_context.directory, job, worker_context.host)
        self._helpers: frozenset[str] = frozenset()
        self._refused: set[FusionKey] = set()
        self._losses: Counter[FusionKey] = Counter()
        self._times: dict[tuple[FusionKey, int], TeamStepTimes] = defaultdict(TeamStepTimes)
        self._stepper: Stepper | None = None  # whose array is published
        self._polled = 0.0
        self._checked = False  # whether gradients are compared before this step, which takes longer
        self._channel: Channel | None = None
        self._exchange: _Exchange | None = None

    @property
    def size(self) -> int:
        """Number of processes that compute gradients now."""
        return 1 if self._channel is None else self._channel.size

    def allow(self, helpers: frozenset[str]) -> None:
        """Set the ids of the jobs that may help from the next step on."""
        self._helpers = helpers
        self._polled = 0.0

    def train_step(
        self,
        key: FusionKey,
        stepper: Stepper,
        batches: Sequence[Any],
        ticks: Sequence[int],
        alone: Callable[[], Tensor],
    ) -> Tensor:
        """Take a step of an array, with the helpers that are ready; return the losses, [B].

        Raises:
            StepRefusedError: Steps that were divided cannot be.
        """
        times = self._times[key, len(stepper.runtimes)]
        began, self._checked = time.perf_counter(), False
        losses = self._with_helpers(key, stepper, batches, ticks)
        if losses is None:
            began, settled = time.perf_counter(), stepper.settled
            losses = alone()
            if settled:
                times.add(1, time.perf_counter() - began)
        elif not self._checked:
            times.add(self.size, time.perf_counter() - began)
        self.events += times.news(self._job, key, len(stepper.runtimes))
        return losses

    def close(self) -> None:
        """End the team; helpers that wait end as well."""
        self._drop_channel()
        self._side.close()

    def _publish(self, stepper: Stepper, part: Any) -> None:
        """Publish a new array, which the helpers build, and end the team of the last one."""
        self._drop_channel()
        count = max(divided(size_of(part), 1 + len(self._helpers)))
        rows = pytree.tree_map_only(Tensor, lambda each: each.cpu().clone(), first_rows(part, count))
        members = [runtime.member for runtime in stepper.runtimes]
        content = TrainedArray.of(members, [runtime.model for runtime in stepper.runtimes], rows)
        self._stepper = stepper
        self._side.publish(cloudpickle.dumps(content))
        self._polled = 0.0

    def _with_helpers(
        self, key: FusionKey, stepper: Stepper, batches: Sequence[Any], ticks: Sequence[int]
    ) -> Tensor | None:
        """Take a step with helpers; return None, with everything as before, if that is impossible."""
        if key in self._refused:
            self._drop_channel()  # it may be that of another array
            return None
        if not (self._helpers or self._channel):
            return None
        try:
            if stepper.indivisible:
                raise IndivisibleStepError(stepper.indivisible)
            if (rows := stepper.runtimes[0].settings.batch_size) <= len(self._helpers):
                raise IndivisibleStepError(f"a batch of {rows} samples is too small for {len(self._helpers)} helpers")
            parts = [part for batch in batches for part, _ in micro_batches(batch)]
            if stepper is not self._stepper:
                self._publish(stepper, parts[0])
            alone = self._times[key, len(stepper.runtimes)].seconds(1)
            if alone is not None and time.monotonic() - self._polled >= POLL_SECONDS:
                self._poll_helpers(alone)
                self._polled = time.monotonic()
            if self._channel is None or min(map(size_of, parts)) < self._channel.size:
                return None
            return stepper.team_step(partial(self.gradients, self._channel), batches, ticks)
        except IndivisibleStepError as reason:
            self._refuse(key, stepper, str(reason))
        except StepRefusedError as reason:
            self._refuse(key, stepper, str(reason))
            raise
        except MixedEpochsError:
            self._drop_channel()  # helpers are within the step that has failed
            raise
        except PeerLostError as error:
            _log.info("a helper is lost, and the step is taken alone: %s", error)
            self._drop_channel()
            self._losses[key] += 1
            if refusal := self._side.refusal():
                self._refuse(key, stepper, refusal)
            elif self._losses[key] == MAX_LOSSES:
                self._refuse(key, stepper, f"helpers were lost {MAX_LOSSES} times")
        return None

    def _refuse(self, key: FusionKey, stepper: Stepper, reason: str) -> None:
        """Let no helper take part in the steps of a key any more, and report the reason."""
        _log.info("steps are not divided between devices: %s", reason)
        members = len(stepper.runtimes)
        alone = self._times[key, members].seconds(1)
        self._refused.add(key)
        self.events.append(TeamMeasured(self._job, key, members, {} if alone is None else {1: alone}, reason))
        self._drop_channel()

    def _poll_helpers(self, alone: float) -> None:
        """Form the next team, if other helpers are ready, or present ones are no longer needed."""
        if refusal := self._side.refusal():
            raise IndivisibleStepError(refusal)
        present = [] if self._channel is None else self._channel.members[1:]
        new = self._side.ready(self._helpers - set(present))
        stay = [each for each in present if each in self._helpers]
        if not new and len(stay) == len(present):
            return
        self._side.generation += 1
        if self._channel is None or self._exchange is None:  # present helpers await a step, and become ready again
            stay = []
        else:
            self._exchange.state.send(self._channel, Header(generation=self._side.generation, stay=tuple(stay)))
        self._side.call(new)
        members = self._side.gather(self._job, [*stay, *new])
        self._drop_channel()
        if len(members) > 1:
            seconds = max(self._peer_seconds, PEER_STEPS * alone)
            self._channel = Channel(self._side.store, self._side.generation, members, 0, self._side.host, seconds)
            _log.info("%d processes compute the gradients: %s", len(members), ", ".join(members))

    def _drop_channel(self) -> None:
        """End the present team; its helpers become ready again."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._exchange = None

    def gradients(
        self,
        channel: Channel,
        step: TrainingStep,
        batch: Any,
        precision: str,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Compute the gradients of a step with the helpers, for a batch with enough rows; return the losses, [B].

        Raises:
            PeerLostError: A helper is lost.
            IndivisibleStepError: The gradients cannot be computed shard by shard. Everything is as before.
            StepRefusedError: A later check of a team has shown this, so steps before may have had wrong gradients.
        """
        if self._exchange is None or self._exchange.array is not step.array:
            self._exchange = _Exchange(step.array)
        exchange, ticks = self._exchange, step.array.ticks
        exchange.state.save()
        self._checked = exchange.steps % CHECK_INTERVAL == 0
        try:
            if self._checked:
                exchange.check(step, channel, batch, precision, context)
            losses = exchange.divided(step, channel, batch, context)
        except (IndivisibleStepError, PeerLostError, RuntimeError) as error:
            exchange.state.restore_buffers()
            exchange.sums.clear()
            step.array.ticks = ticks
            if isinstance(error, PeerLostError):
                raise
            if exchange.steps and isinstance(error, IndivisibleStepError):
                raise StepRefusedError(str(error)) from error
            raise IndivisibleStepError(str(error)) from error
        exchange.steps += 1
        return losses


class _Exchange:
    def __init__(self, array: ModelArray) -> None:
        self.array = array
        self.state = SharedState(array)
        self.sums = GradientSum(array)
        self.steps = 0
        self._masks = MaskRows()
        self._form = b""

    def check(
        self,
        step: TrainingStep,
        channel: Channel,
        batch: Any,
        precision: str,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Compare the gradients of some rows with those that the team computes, and return to the state before."""
        part, _ = micro_batches(batch)[0]
        rows = first_rows(part, min(size_of(part), max(CHECK_ROWS, 2 * channel.size)))
        ticks = self.array.ticks
        alone = self._alone(step, rows, context)
        found = self._snapshot(self.divided(step, channel, rows, context))
        alone.check(found, tolerance(self.sums.flat.dtype, precision != "32"))
        self.state.restore_buffers()
        self.array.ticks = ticks

    def _alone(
        self, step: TrainingStep, batch: Any, context: Callable[[], AbstractContextManager[Any]]
    ) -> GradientSnapshot:
        """Compute the gradients of a batch without helpers, and return to the state before."""
        ticks, masks = self.array.ticks, MaskRows()
        size = size_of(batch)
        self.sums.clear()
        self.array.state.sync_from_members()  # else the snapshot of the template may be out of date
        before = Transaction([self.array.state.template, *self.array.members], [step.loss])
        with context():
            found = self._snapshot(step.gradients(batch, [Shard(0, size, size, lambda _: None, masks)]))
        if (label := before.changed()) is not None:
            before.restore()
            raise IndivisibleStepError(f"the model or the loss keeps state in `{label}`, which changes in a step")
        if not self.steps:
            self._masks = masks
        self.state.restore_buffers()
        self.array.ticks = ticks
        return found

    def _snapshot(self, losses: Tensor) -> GradientSnapshot:
        return GradientSnapshot.of(losses, self.sums.parameters, self.state.buffers())

    def divided(
        self,
        step: TrainingStep,
        channel: Channel,
        batch: Any,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Compute the gradients with the helpers; return the losses, [B]."""
        parts, weights = zip(*micro_batches(batch), strict=True)
        form, tensors = leaves_of(parts)
        leaves = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, BatchLeaf)]
        pickled = cloudpickle.dumps(form)
        header = Header(
            self.array.ticks,
            tuple(divided(size_of(part), channel.size) for part in parts),
            tuple(weights),
            step.scales,
            b"" if pickled == self._form else pickled,
            None if self._masks.axes else self._masks.shapes,
        )
        self._form = pickled
        self.sums.clear()
        shards = [header.shards(rank, channel, self._masks) for rank in range(channel.size)]
        with context():
            self.state.send(channel, header)
            messages = [pack(_rows_of(shards[rank][0], leaves, tensors)) for rank in range(1, channel.size)]
            for rank, message in enumerate(messages, start=1):
                channel.send(message, rank)
            own, shares = shards[0]
            rows = MicroBatches(tuple(rebuilt(form, _rows_of(own, leaves, tensors))), shares)
            self.sums.collect(step.gradients(rows, own))
            channel.sum_to_leader(self.sums.flat)
            channel.finish_sending()
        return self.sums.assign()


def _rows_of(shards: Sequence[Shard], leaves: Sequence[BatchLeaf], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The rows of a rank of all tensors of a batch; `shards` are its shards of the micro-batches."""
    return [
        tensor.narrow(1 if leaf.members else 0, shards[leaf.part].first, shards[leaf.part].rows)
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
