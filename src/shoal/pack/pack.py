"""Trains several loaded models in one process on one data stream (Pack, section 3)."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import PackError, ShoalError
from shoal.pack.loaded import Loaded, Loss, MakeOptimizers, free, load
from shoal.train.lane_scheduler import LaneScheduler

__all__ = ["Pack"]

_log = logging.getLogger("shoal.pack")


@dataclass
class _BufferedBatch:
    first: int
    leaves: list[Tensor]
    own: bool

    @property
    def end(self) -> int:
        return self.first + len(self.leaves[0])

    def rows(self, first: int, end: int) -> list[Tensor]:
        return [leaf[max(first - self.first, 0) : end - self.first] for leaf in self.leaves]


class _RowBuffer:
    """Buffers batches as one sequence of rows from which members take slices. Each batch moves to the device once."""

    def __init__(self, device: torch.device) -> None:
        self.end = 0
        self._device = device
        self._parts: list[_BufferedBatch] = []
        self._spec: pytree.TreeSpec | None = None

    def add(self, batch: Any) -> None:
        leaves, spec = pytree.tree_flatten(batch)
        rows = _length(leaves)
        if self._parts:
            self._check_fit(leaves, spec)
        if rows == 0:
            return
        moved = [leaf.to(self._device) for leaf in leaves]
        own = all(one is not other for one, other in zip(moved, leaves, strict=True))
        self._spec = spec
        self._parts.append(_BufferedBatch(self.end, moved, own))
        self.end += rows

    def take(self, first: int, end: int) -> Any:
        """Return copies of the rows from number `first` up to number `end` (exclusive), nested as the batches."""
        slices = [part.rows(first, end) for part in self._parts if part.first < end and first < part.end]
        own = [column[0].clone() if len(column) == 1 else torch.cat(column) for column in zip(*slices, strict=True)]
        assert self._spec is not None
        return pytree.tree_unflatten(own, self._spec)

    def drop(self, first: int) -> None:
        """Drop the rows before number `first`, and copy remaining rows that share memory with the caller's tensors."""
        self._parts = [
            part
            if part.own
            else _BufferedBatch(max(part.first, first), [leaf.clone() for leaf in part.rows(first, part.end)], True)
            for part in self._parts
            if part.end > first
        ]

    def _check_fit(self, leaves: Sequence[Tensor], spec: pytree.TreeSpec) -> None:
        before = [_kind(leaf) for leaf in self._parts[-1].leaves]
        if spec != self._spec or [_kind(leaf) for leaf in leaves] != before:
            raise PackError(
                f"a batch of {_kinds(leaves, spec)} cannot follow one of "
                f"{_kinds(self._parts[-1].leaves, self._spec)}, of which a member keeps rows for its next step; nest "
                "all batches in the same way, or call `end_epoch` in between"
            )


class _MemberLane:
    """Member with its position in the data stream; implements `Lane`."""

    def __init__(self, member: Loaded, rows: _RowBuffer) -> None:
        self.member = member
        self.position = rows.end
        self.steps = 0
        self.losses: list[Tensor] = []
        self.flushing = False
        self._rows = rows

    @property
    def settled(self) -> bool:
        return self.member.settled

    @property
    def pass_position(self) -> None:
        """None, since rows stay in the buffer until all members have taken them."""

    @property
    def ready(self) -> bool:
        left = self._rows.end - self.position
        return left >= self.member.batch_size or (self.flushing and left > 0)

    def advance(self) -> bool:
        if not self.ready:
            return False
        last = min(self.position + self.member.batch_size, self._rows.end)
        losses = self.member.step(self._rows.take(self.position, last))
        self.position = last
        self.steps += 1
        self.losses.append(losses)
        return self.ready

    def collect(self) -> Tensor:
        """Return and clear the losses since the last call, [steps, B]."""
        losses, self.losses = self.losses, []
        if losses:
            return torch.stack(losses)
        return next(self.member.array.parameters()).new_empty(0, len(self.member.models))


@final
class Pack:
    """Trains several members in one process. Each batch is loaded and moved to the device once for all of them.

    A member takes batches of its own size from the stream of rows, in order. With 100 rows, a member of batch size 50
    takes two steps; a member of batch size 80 takes one step and keeps 20 rows for its next one. So each member trains
    as it would alone on the same rows, divided into batches of its size. The order of steps, and on a GPU their
    streams, are chosen by measurement; they affect only the time.

    A member whose step raises leaves the pack, and the others continue. The exception is in `failed` and in the log.

    Args:
        members: Results of `load`, all on one device.

    Raises:
        PackError: Members are on different devices, one was freed, or two have the same model or parameter.
    """

    def __init__(self, members: Iterable[Loaded]) -> None:
        if isinstance(members, Loaded) or not isinstance(members, Iterable):
            raise PackError(f"`members` must be a list of what `load` returned, got {type(members).__name__}")
        members = list(members)
        for member in members:
            if not isinstance(member, Loaded):
                raise PackError(f"`members` must be what `load` returned, got {type(member).__name__} among them")
        if not members:
            raise PackError("a pack needs at least one member; load a model first")
        self.failed: dict[Loaded, PackError] = {}
        """Member that left because its step raised -> error that names the member, with the step's exception as its
        cause."""
        self._device = members[0].device
        self._rows = _RowBuffer(self._device)
        self._scheduler = LaneScheduler(self._device)
        self._lanes: list[_MemberLane] = []
        for member in members:
            self._add_lane(member)

    @property
    def members(self) -> tuple[Loaded, ...]:
        """Members in training."""
        return tuple(lane.member for lane in self._lanes if not lane.member.freed)

    def load(self, model: nn.Module, *, optimizer: MakeOptimizers, loss: Loss, batch_size: int) -> Loaded:
        """Add a model to the pack; see `shoal.pack.load`. It trains from the next batch on."""
        member = load(model, self._device, optimizer=optimizer, loss=loss, batch_size=batch_size)
        try:
            self._add_lane(member)
        except PackError:
            free(member)
            raise
        return member

    def free(self, member: Loaded) -> list[dict[str, Any]]:
        """Remove a member from the pack and from the device; see `shoal.pack.free`. Failed members can be freed, too.

        The member does not train on rows kept for its next batch; after `end_epoch` there are none.

        Raises:
            PackError: The member is not in this pack.
        """
        if member not in self.members and member not in self.failed:
            raise PackError(f"{member!r} is not in this pack; it holds {list(self.members)}")
        checkpoints = free(member)
        self.failed.pop(member, None)
        self._remove_freed()
        return checkpoints

    def step(self, batch: Any) -> dict[Loaded, Tensor]:
        """Train all members on a batch of any size.

        Args:
            batch: Tensor or nest of tensors with rows as the first axis, on any device. Members get rows in the same
                nesting.

        Returns:
            Member -> losses of its steps, [steps, B], detached; B is 1 for a plain model, and steps may be 0. Failed
            members are left out.

        Raises:
            PackError: There are no members, or the batch is invalid. The pack is unchanged.
        """
        self._check_not_empty()
        self._rows.add(batch)
        return self._train()

    def end_epoch(self) -> dict[Loaded, Tensor]:
        """Train each member on its remaining rows as a last, smaller batch; return losses as `step`.

        Raises:
            PackError: There are no members.
        """
        self._check_not_empty()
        for lane in self._lanes:
            lane.flushing = True
        try:
            return self._train()
        finally:
            for lane in self._lanes:
                lane.flushing = False

    def _train(self) -> dict[Loaded, Tensor]:
        while any(lane.ready for lane in self._lanes):
            for failure in self._scheduler.round(self._lanes, lambda: False):
                if isinstance(failure.error, SystemExit):  # a signal handler or the user's code ends the process
                    raise failure.error
                lane = next(lane for lane in self._lanes if lane is failure.lane)
                self._lanes.remove(lane)
                self.failed[lane.member] = _member_error(lane, failure.error)
                _log.warning("%s leaves the pack: %s", lane.member, self.failed[lane.member], exc_info=failure.error)
        self._rows.drop(min((lane.position for lane in self._lanes), default=self._rows.end))
        self._check_not_empty()
        return {lane.member: lane.collect() for lane in self._lanes}

    def _add_lane(self, member: Loaded) -> None:
        self._remove_freed()
        if member.device != self._device:
            raise PackError(
                f"{member!r} is on {member.device}, others of the pack are on {self._device}; load all on one device"
            )
        for lane in self._lanes:
            shared = _shared_part(lane.member, member)
            if shared is not None:
                raise PackError(
                    f"{lane.member!r} and {member!r} both hold {shared}; give each a model of its own (copy.deepcopy)"
                )
        self._lanes.append(_MemberLane(member, self._rows))

    def _remove_freed(self) -> None:
        """Drop members that were freed, also by `shoal.pack.free`."""
        self._lanes = [lane for lane in self._lanes if not lane.member.freed]

    def _check_not_empty(self) -> None:
        self._remove_freed()
        if self._lanes:
            return
        if self.failed:
            last = next(reversed(self.failed.values()))
            raise PackError(f"all members of the pack have failed, the last with: {last}") from last
        raise PackError("the pack has no members any more; bring in a model with its `load`")


_OF_SHAPES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that a model raises for inputs of a wrong shape or kind."""


def _member_error(lane: _MemberLane, error: Exception) -> PackError:
    what = f"{type(error).__name__}: {error}"
    if lane.steps or isinstance(error, ShoalError) or not isinstance(error, _OF_SHAPES):
        explained = PackError(f"{lane.member!r} failed at its step {lane.steps + 1} in the pack: {what}")
    else:
        explained = PackError(
            f"{lane.member!r} failed at its first step in the pack: {what}. All members are given the same rows: if "
            "this one takes inputs of another shape or kind, train it in another pack"
        )
    explained.__cause__ = error
    return explained


def _shared_part(first: Loaded, second: Loaded) -> str | None:
    """Return the model or tensor that two members share, in words; None if there is none."""
    if any(model is other for model in first.models for other in second.models):
        return "the same model"
    own = {id(tensor) for model in first.models for tensor in (*model.parameters(), *model.buffers())}
    trained = {one.data_ptr(): one.requires_grad for model in first.models for one in model.parameters() if one.numel()}
    for model in second.models:
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) in own:
                return f"the tensor {path!r}"
        for path, parameter in model.named_parameters():  # only frozen parameters may share memory
            address = parameter.data_ptr()
            if address in trained and (trained[address] or parameter.requires_grad):
                return f"the memory of {path!r}"
    return None


def _length(leaves: Sequence[Any]) -> int:
    """Return the number of rows of a batch, after checks of its tensors."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise PackError(
                f"a batch must be a tensor or tensors in lists, tuples and dicts, got {type(leaf).__name__} in it"
            )
        if leaf.dim() == 0:
            raise PackError("a batch's tensors must have its rows as their first axis, got one of shape ()")
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) != 1:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise PackError(f"a batch's tensors must all have its rows as their first axis, got shapes {shapes}")
    return int(lengths.pop())


def _kind(leaf: Tensor) -> tuple[torch.Size, torch.dtype]:
    return leaf.shape[1:], leaf.dtype


def _kinds(leaves: Sequence[Tensor], spec: pytree.TreeSpec | None) -> str:
    assert spec is not None
    kinds = [f"{leaf.dtype} {tuple(leaf.shape[1:])}".removeprefix("torch.") for leaf in leaves]
    return str(pytree.tree_unflatten(kinds, spec))
