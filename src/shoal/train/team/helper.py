"""Computes gradients for another job: the helper's side of a team, which keeps no state of the training."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.array import Member
from shoal.core.errors import FusionError
from shoal.core.job import Job
from shoal.core.trial import step_seed
from shoal.fuse.api import fuse
from shoal.fuse.backward import MicroBatches, backward
from shoal.fuse.frozen import large_frozen, load_own_state, share_frozen
from shoal.fuse.generators import seeded
from shoal.fuse.scaler import GradScaler
from shoal.fuse.shard import IndivisibleStepError, MaskRows, Shard
from shoal.host.pickling import loaded
from shoal.task import size_of
from shoal.train.checkpoint import load_newest
from shoal.train.control import JobControl
from shoal.train.metrics import task_loss
from shoal.train.team.channel import Channel, HelperSide, PeerLostError, address_path
from shoal.train.team.exchange import BatchLeaf, GradientSum, Header, SharedState, TrainedArray, rebuilt, unpack
from shoal.train.trial_runtime import TrialRuntime, build
from shoal.train.worker_state import WorkerState

__all__ = ["assist"]

_log = logging.getLogger("shoal.train")

IDLE_SECONDS = 10 * 24 * 3600.0
"""Longest time that a helper waits for its leader, which may load data or validate."""
POLL_SECONDS = 0.02


def assist(job: Job, state: WorkerState, control: JobControl, host: str) -> None:
    """Compute gradients for the job that this one assists, until it ends or needs no more, or this one is stopped."""

    replica: _Replica | None = None

    def idle() -> bool:
        control.beat(settled=replica is not None and replica.stepped)  # the first step may take long
        return not control.stopping()

    path = address_path(state.directory, job.assists)
    while not path.exists():
        if not idle():
            return
        time.sleep(POLL_SECONDS)
    try:
        side = HelperSide(path, job.id, idle)
        while replica is None or replica.needed:
            if (found := side.content()) is None:
                return
            version, content = found
            if replica is None or replica.version != version:
                control.beat(settled=False)  # to build models may take long
                array: TrainedArray = loaded(content)
                replica = _Replica(state, version, array, {} if replica is None else replica.trials)
                if replica.refusal:
                    side.refuse(version, replica.refusal)
                else:
                    replica.warm_up(array.rows)
                    replica = _Replica(state, version, array, replica.trials)  # without what that step has left
            _take_part(side, replica, idle, host)
    except PeerLostError:  # the leader has ended
        return


def _take_part(side: HelperSide, replica: "_Replica", idle: Callable[[], bool], host: str) -> None:
    """Be a member of teams, until something else is trained, a team breaks, or the helper is not needed."""
    side.announce(replica.version)
    generation = side.await_call(replica.version)
    while generation is not None and (members := side.answer(generation)) is not None:
        try:
            channel = Channel(side.store, generation, members, members.index(side.job), host, IDLE_SECONDS)
        except PeerLostError:
            return
        try:
            generation = replica.work(channel, idle, side.job)
        except PeerLostError:
            return
        except (IndivisibleStepError, FusionError) as reason:
            side.refuse(replica.version, str(reason))
            return
        finally:
            channel.close()


class _Replica:
    """The array of the leader, as this process has built it."""

    def __init__(
        self, state: WorkerState, version: str, content: TrainedArray, trials: Mapping[int, TrialRuntime]
    ) -> None:
        self.version = version
        self.needed = True
        self.stepped = False
        self._device = state.device
        numbers = [member.trial.number for member in content.members]
        self.trials = {
            number: _reusable(trials.get(number), member) or _built(state, member)
            for number, member in zip(numbers, content.members, strict=True)
        }
        self._runtimes = list(self.trials.values())
        lead = self._runtimes[0]
        for runtime in self._runtimes[1:]:
            if large_frozen(runtime.model):
                share_frozen(lead.model, runtime.model)
        self.refusal = content.difference([runtime.model for runtime in self._runtimes])
        self._array = fuse([x.model for x in self._runtimes], [x.trial.seed for x in self._runtimes], strict=False)
        self._loss = update_wrapper(partial(task_loss, state.task, lead.autocast), state.task.loss)
        self._scales = [runtime.loss_scale for runtime in self._runtimes if runtime.loss_scale is not None]
        self._scaler = GradScaler.of(self._array, self._scales)
        self._state = SharedState(self._array)
        self._sums = GradientSum(self._array)
        self._form: Any = None
        self._masks = MaskRows()

    def warm_up(self, rows: Any) -> None:
        """Compute gradients of some rows, so that no team waits for tuning; the array is not used afterwards.

        Its errors are raised in a team's first step, but for those of the number of rows or of old buffers.
        """
        rows = pytree.tree_map_only(Tensor, lambda each: each.to(self._device), rows)
        size = size_of(rows)
        try:
            self._backward([0] * len(self._array), rows, [Shard(0, size, size, lambda _: None, MaskRows())])
        except Exception as error:
            _log.info("the first step of a team may take longer, since this one failed: %r", error)

    def work(self, channel: Channel, idle: Callable[[], bool], job: str) -> int | None:
        """Take the steps of a team; return the number of the next team that the helper is to join, or None."""
        while (header := self._state.receive(channel, idle)) is not None and header.generation is None:
            self._step(channel, header)
        self.needed = header is not None and job in header.stay
        return header.generation if header is not None and self.needed else None

    def _step(self, channel: Channel, header: Header) -> None:
        if header.form:
            self._form = loaded(header.form)
        if header.masks is not None:
            self._masks = MaskRows(header.masks)
        form, rank = self._form, channel.rank
        leaves = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, BatchLeaf)]
        tensors = unpack(leaves, [rows[rank] for rows in header.rows], channel.receive)
        parts = rebuilt(form, [tensor.to(self._device) for tensor in tensors])
        shards, weights = header.shards(rank, channel, self._masks)
        for scale, value in zip(self._scales, header.scales, strict=True):
            scale.scale = value
        self._sums.clear()
        self._sums.collect(self._backward(header.ticks, MicroBatches(tuple(parts), weights), shards))
        channel.sum_to_leader(self._sums.flat)
        self.stepped = True

    def _backward(self, ticks: Sequence[int], batch: Any, shards: Sequence[Shard]) -> Tensor:
        """Add the gradients of a batch to those of the array; return the losses, [B]."""
        self._array.ticks = tuple(ticks)
        seed = self._runtimes[0].trial.data_seed
        with seeded([step_seed(seed, tick) for tick in ticks], self._device):
            return backward(self._array, self._loss, self._scaler, batch, shards)


def _reusable(runtime: TrialRuntime | None, member: Member) -> TrialRuntime | None:
    return runtime if runtime is not None and runtime.trial == member.trial else None


def _built(state: WorkerState, member: Member) -> TrialRuntime:
    """Build a trial; if it began from another one, with the frozen parameters of its checkpoint."""
    runtime = build(state.task, member, state.device)
    if member.trial.origin is not None and (saved := load_newest(state.directory, member.trial.number)) is not None:
        load_own_state(runtime.model, saved.model)
    return runtime
