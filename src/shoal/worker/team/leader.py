"""The leader's side of a team: a training job that lets helpers compute a part of its gradients."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.array import FusionKey
from shoal.core.event import TeamMeasured
from shoal.fuse.array import ModelArray
from shoal.fuse.micro_batches import MicroBatches, micro_batches
from shoal.fuse.shard import IndivisibleStepError, MaskRows, Shard
from shoal.fuse.step import TrainingStep
from shoal.task import size_of
from shoal.worker.stepper import Stepper
from shoal.worker.team.channel import Channel, PeerLostError
from shoal.worker.team.content import TrainedArray
from shoal.worker.team.exchange import (
    BatchLeaf,
    GradientSum,
    Header,
    SharedState,
    divided,
    leaves_of,
    pack,
    rebuilt,
)
from shoal.worker.team.rendezvous import LeaderSide
from shoal.worker.team.step_check import GradientSnapshot, tolerance
from shoal.worker.team.step_times import StepTimes

__all__ = ["TeamLeader"]

_log = logging.getLogger("shoal.worker")

LOOK_SECONDS = 0.05
"""Interval at which a leader looks for helpers that are ready."""
PEER_SECONDS, PEER_STEPS = 30.0, 5
"""Seconds, and steps of the leader alone, after which a silent helper is lost; the longer time counts. The steps are
fewer than those after which a job hangs, see `shoal.study.hangs.PATIENCE`."""
HANG_SHARE = 1 / 3
"""Largest part of `WorkerContext.hang_seconds` that counts, so that a leader which waits does not seem to hang."""
CHECKED_STEPS = 1
"""Number of first steps of each new team whose gradients the leader also computes alone, to compare them."""


class TeamLeader:
    """Lets helpers compute gradients for the steps of an array.

    Before each step, it follows changes of the array, and forms a new team if other helpers are ready or wanted. In a
    step, each process computes the gradients of its rows of the batch. All else is done by the leader alone. A step
    that fails is taken by the leader alone, from the same state. A step that cannot be divided ends the teams of the
    array's key.

    Args:
        job: Id of the leader's job.
        directory: Directory of the study.
        host: Address at which helpers reach this process.
        hang_seconds: As in `WorkerContext`.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        job: str,
        directory: Path,
        host: str,
        hang_seconds: float = 300.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.events: list[TeamMeasured] = []
        """Events for the engine; the owner removes them."""
        self._job = job
        self._peer_seconds = min(PEER_SECONDS, HANG_SHARE * hang_seconds)
        self._clock = clock
        self._side = LeaderSide(directory, job, host)
        self._helpers: frozenset[str] = frozenset()
        self._refused: set[FusionKey] = set()
        self._times = StepTimes()
        self._stepper: Stepper | None = None
        self._key: FusionKey | None = None
        self._looked = 0.0
        self._check_seconds = 0.0  # of this step, spent only because it is checked
        self._channel: Channel | None = None
        self._exchange: _Exchange | None = None

    @property
    def size(self) -> int:
        """Number of processes that compute gradients now."""
        return 1 if self._channel is None else self._channel.size

    def allow(self, helpers: frozenset[str]) -> None:
        """Set the ids of the jobs that may help from the next step on."""
        self._helpers = helpers
        self._looked = 0.0

    def train_step(
        self,
        key: FusionKey,
        stepper: Stepper,
        batches: Sequence[Any],
        ticks: Sequence[int],
        alone: Callable[[], Tensor],
    ) -> Tensor:
        """Take a step of an array, with the helpers that are ready; return the losses, [B].

        Args:
            key: Key of the array.
            stepper: Stepper of the array.
            batches: As for `Stepper.train_step`.
            ticks: As for `Stepper.train_step`.
            alone: Function that takes the step without helpers.
        """
        if stepper is not self._stepper or key != self._key:
            self._turn_to(key, stepper)
        began, settled, self._check_seconds = self._clock(), stepper.settled, 0.0
        losses = self._with_helpers(key, stepper, batches, ticks)
        if losses is None:
            began = self._clock()
            losses = alone()
            seconds = self._clock() - began
            if settled:
                self._times.add(1, seconds)
            else:
                self._times.add_estimate(seconds)
        elif self._check_seconds:
            self._times.add_estimate(self._clock() - began - self._check_seconds)
        else:
            self._times.add(self.size, self._clock() - began)
        self.events += self._times.news(self._job, key, len(stepper.runtimes))
        return losses

    def close(self) -> None:
        """End the team; helpers that wait end as well."""
        self._drop_channel()
        self._side.close()

    def _turn_to(self, key: FusionKey, stepper: Stepper) -> None:
        """Tell the helpers about a new array, which they build."""
        self._drop_channel()
        self._stepper, self._key = stepper, key
        self._times = StepTimes()
        if key not in self._refused and not stepper.indivisible:
            members = [runtime.member for runtime in stepper.runtimes]
            content = TrainedArray.of(members, [runtime.model for runtime in stepper.runtimes])
            self._side.publish(cloudpickle.dumps(content))
            self._looked = 0.0

    def _with_helpers(
        self, key: FusionKey, stepper: Stepper, batches: Sequence[Any], ticks: Sequence[int]
    ) -> Tensor | None:
        """Take a step with helpers; return None, with everything as before, if that is impossible."""
        if key in self._refused:
            return None
        try:
            if stepper.indivisible:
                raise IndivisibleStepError(stepper.indivisible)
            if time.monotonic() - self._looked >= LOOK_SECONDS:
                self._look()
                self._looked = time.monotonic()
            return None if self._channel is None else stepper.team_step(self.gradients, batches, ticks)
        except IndivisibleStepError as reason:
            self._refuse(key, str(reason))
        except PeerLostError as error:
            _log.info("a helper is lost, and the step is taken alone: %s", error)
            self._drop_channel()
            if refusal := self._side.refusal():
                self._refuse(key, refusal)
        return None

    def _refuse(self, key: FusionKey, reason: str) -> None:
        """Let no helper take part in the steps of a key any more, and report the reason."""
        _log.info("steps are not divided between devices: %s", reason)
        self._refused.add(key)
        self._times.note = reason
        self._drop_channel()

    def _look(self) -> None:
        """Form the next team, if other helpers are ready, or present ones are not wanted any more."""
        if refusal := self._side.refusal():
            raise IndivisibleStepError(refusal)
        present = [] if self._channel is None else self._channel.members[1:]
        new = self._side.ready(self._helpers - set(present))
        stay = [each for each in present if each in self._helpers]
        if not new and len(stay) == len(present):
            return
        self._side.generation += 1
        if self._channel is not None and self._exchange is not None:
            self._exchange.state.send(self._channel, Header(generation=self._side.generation, stay=tuple(stay)))
        self._side.call(new)
        members = self._side.gather(self._job, [*stay, *new])
        self._drop_channel()
        if len(members) > 1:
            seconds = max(self._peer_seconds, PEER_STEPS * (self._times.seconds(1) or 0.0))
            self._channel = Channel(self._side.store, self._side.generation, members, 0, self._side.host, seconds)
            _log.info("%d processes compute the gradients: %s", len(members), ", ".join(members))

    def _drop_channel(self) -> None:
        """End the present team; its helpers look into the store again."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._exchange = None

    def gradients(
        self, step: TrainingStep, batch: Any, precision: str, context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor | None:
        """Compute the gradients of a step with the helpers; return the losses, [B].

        Args:
            step: Training step of the array.
            batch: Batch of the step.
            precision: Precision of the models, see `Task.precision`.
            context: Function that returns a context for each computation of the gradients.

        Returns:
            The losses; None, with everything as before, if the batch has too few rows.

        Raises:
            PeerLostError: A helper is lost.
            IndivisibleStepError: The gradients cannot be computed shard by shard.
        """
        parts, weights = zip(*micro_batches(batch), strict=True)
        totals = [size_of(part) for part in parts]
        if self._channel is None or min(totals) < self._channel.size:
            return None
        if self._exchange is None or self._exchange.array is not step.array:
            self._exchange = _Exchange(step.array)
        exchange, ticks = self._exchange, step.array.ticks
        exchange.state.save()
        began = self._clock()
        try:
            alone = exchange.alone(step, batch, totals, context) if exchange.checked < CHECKED_STEPS else None
            passed = self._clock() - began
            losses = exchange.divided(step, self._channel, parts, weights, context)
            if alone is not None:
                mixed = precision != "32"
                alone.check(exchange.snapshot(losses), tolerance(exchange.sums.flat.dtype, mixed))
                self._check_seconds = self._clock() - began - passed
        except (IndivisibleStepError, PeerLostError):
            exchange.state.restore_buffers()
            step.array.ticks = ticks
            raise
        exchange.checked += 1
        return losses


class _Exchange:
    """State of the exchange of a leader with one team.

    Args:
        array: Array of the leader.
    """

    def __init__(self, array: ModelArray) -> None:
        self.array = array
        self.state = SharedState(array)
        self.sums = GradientSum(array)
        self.checked = 0
        """Number of steps so far, up to `CHECKED_STEPS` of which are checked."""
        self._masks = MaskRows()
        self._form = b""

    def alone(
        self, step: TrainingStep, batch: Any, totals: Sequence[int], context: Callable[[], AbstractContextManager[Any]]
    ) -> GradientSnapshot:
        """Compute the gradients of the whole batch, and return to the state before."""
        ticks, recorded = self.array.ticks, MaskRows()
        shards = [Shard(0, n, n, lambda _: None, MaskRows() if number else recorded) for number, n in enumerate(totals)]
        with context():
            found = self.snapshot(step.gradients(batch, shards))
        if not self.checked:
            self._masks = recorded
        self.state.restore_buffers()
        self.array.ticks = ticks
        return found

    def snapshot(self, losses: Tensor) -> GradientSnapshot:
        """Copies of the losses, gradients and buffers."""
        return GradientSnapshot.of(losses, self.sums.parameters, self.state.buffers())

    def divided(
        self,
        step: TrainingStep,
        channel: Channel,
        parts: Sequence[Any],
        weights: Sequence[float],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Compute the gradients with the helpers; return the losses, [B].

        Args:
            step: Training step of the array.
            channel: Channel to the helpers.
            parts: Micro-batches.
            weights: Weights of the micro-batches.
            context: As for `TeamLeader.gradients`.
        """
        form, tensors = leaves_of(parts)
        leaves = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, BatchLeaf)]
        pickled = cloudpickle.dumps(form)
        header = Header(
            self.array.ticks,
            tuple(divided(size_of(part), channel.size) for part in parts),
            tuple(weights),
            step.scales,
            b"" if pickled == self._form else pickled,
            None if self.checked else self._masks.shapes,
        )
        self._form = pickled
        shards = [header.shards(rank, channel, self._masks) for rank in range(channel.size)]
        with context():
            self.state.send(channel, header)
            messages = [pack(_rows_of(shards[rank][0], leaves, tensors)) for rank in range(1, channel.size)]
            sent = [channel.send(message, rank) for rank, message in enumerate(messages, start=1)]
            own, shares = shards[0]
            batch = MicroBatches(tuple(rebuilt(form, _rows_of(own, leaves, tensors))), shares)
            self.sums.collect(step.gradients(batch, own))
            channel.sum_to_leader(self.sums.flat)
            for work in sent:
                channel.finish(work)
        return self.sums.assign()


def _rows_of(shards: Sequence[Shard], leaves: Sequence[BatchLeaf], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The rows of a rank of all tensors of a batch; `shards` are its shards of the micro-batches."""
    return [
        tensor.narrow(1 if leaf.members else 0, shards[leaf.part].first, shards[leaf.part].rows)
        for leaf, tensor in zip(leaves, tensors, strict=True)
    ]
