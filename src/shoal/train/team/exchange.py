"""Messages between the processes of a team: the description of an array; in a step weights, rows and gradients."""

import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.array import Member
from shoal.fuse.array import ModelArray
from shoal.fuse.shard import IndivisibleStepError, MaskRows, Shard
from shoal.fuse.stacked import Stacked
from shoal.task import size_of
from shoal.train.team.channel import Channel

__all__ = [
    "BatchLeaf",
    "GradientSum",
    "Header",
    "SharedState",
    "TrainedArray",
    "divided",
    "first_rows",
    "leaves_of",
    "pack",
    "rebuilt",
    "unpack",
]

_HEADER_BYTES = 4096
_LENGTH_BYTES = 8
_ALIGNMENT = 16


@dataclass(frozen=True)
class TrainedArray:
    """The members of an array, in its order, and what a helper must have built equally.

    Args:
        tensors: Name of each parameter and buffer -> its shape, type and whether it is trained, for each member;
            of a frozen parameter, which is not sent, also a checksum.
    """

    members: tuple[Member, ...]
    tensors: tuple[dict[str, tuple[Any, ...]], ...]
    rows: Any

    @classmethod
    def of(cls, members: Iterable[Member], models: Iterable[nn.Module], rows: Any) -> "TrainedArray":
        """Describe an array by its members and their models."""
        checksums: dict[int, int] = {}
        return cls(tuple(members), tuple(_described(model, checksums) for model in models), rows)

    def difference(self, models: Sequence[nn.Module]) -> str:
        """Why models of a helper are not those of the leader; "" if they are."""
        checksums: dict[int, int] = {}
        for member, model, described in zip(self.members, models, self.tensors, strict=True):
            own = _described(model, checksums)
            for name in sorted(own.keys() | described.keys()):
                if own.get(name) != described.get(name):
                    return (
                        f"{name!r} of trial {member.trial.number} differs from what the task's `model` returns on "
                        "another device for the same config and seed; a helper gets only parameters that are trained"
                    )
        return ""


@dataclass(frozen=True)
class Header:
    """Command of the leader to its helpers: to take a step; or, with a generation, to end the present team.

    Args:
        rows: Rows of each rank, for each micro-batch.
        form: Pickled form of the batch, see `leaves_of`; empty if it is that of the last step.
        masks: Shapes of the dropout masks of a whole batch, in the first message of a team.
        generation: Number of the next team; None for a step.
        stay: Helpers that are to be in the next team; the others are not needed any more.
    """

    ticks: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()
    form: bytes = b""
    masks: list[tuple[int, ...]] | None = None
    generation: int | None = None
    stay: tuple[str, ...] = ()

    def shards(self, rank: int, channel: Channel, masks: MaskRows) -> tuple[list[Shard], tuple[float, ...]]:
        """Shards of a rank, one of each micro-batch, and the weights of their losses."""
        shards = [Shard(sum(each[:rank]), each[rank], sum(each), channel.all_reduce, masks) for each in self.rows]
        weights = zip(self.weights, shards, strict=True)
        return shards, tuple(weight * shard.rows / shard.total for weight, shard in weights)


class SharedState:
    """The header of a step, the trained parameters and the buffers of an array, as one message of constant size."""

    def __init__(self, array: ModelArray) -> None:
        tensors = [data for _, data, _ in array.stacked_tensors()]
        sent = [each for each in tensors if not isinstance(each, nn.Parameter) or each.requires_grad]
        self._tensors = [each.detach() for each in sent]
        begins, size = _places([each.nbytes for each in sent], _HEADER_BYTES)
        self._message = torch.zeros(size, dtype=torch.uint8)
        self._copies = [_view(self._message, at, t.shape, t.dtype) for at, t in zip(begins, sent, strict=True)]
        self._buffers = [n for n, each in enumerate(sent) if not isinstance(each, nn.Parameter)]

    def save(self) -> None:
        """Copy the present values into the message."""
        _copy(self._copies, self._tensors)

    def send(self, channel: Channel, header: Header) -> None:
        """Send the header and the saved values to all helpers."""
        content = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        self._message[:_LENGTH_BYTES].view(torch.int64).fill_(len(content))
        fits = _LENGTH_BYTES + len(content) <= _HEADER_BYTES
        if fits:
            self._message[_LENGTH_BYTES : _LENGTH_BYTES + len(content)] = content
        channel.broadcast(self._message)
        if not fits:
            channel.broadcast(content)

    def receive(self, channel: Channel, idle: Callable[[], bool]) -> Header | None:
        """Wait for the leader's next message; return its header, or None if it waited in vain."""
        if not channel.await_broadcast(self._message, idle):
            return None
        length = int(self._message[:_LENGTH_BYTES].view(torch.int64))
        content = self._message[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if _LENGTH_BYTES + length > _HEADER_BYTES:
            content = torch.empty(length, dtype=torch.uint8)
            channel.broadcast(content)
        header: Header = pickle.loads(content.numpy().tobytes())
        if header.generation is None:
            _copy(self._tensors, self._copies)
        return header

    def buffers(self) -> list[Tensor]:
        """Copies of the present buffers, [B, *shape] each."""
        return [self._tensors[n].clone() for n in self._buffers]

    def restore_buffers(self) -> None:
        """Return the buffers to their saved values."""
        _copy([self._tensors[n] for n in self._buffers], [self._copies[n] for n in self._buffers])


class GradientSum:
    """The gradients of an array and its losses in one tensor, which is summed over the processes of a team."""

    def __init__(self, array: ModelArray) -> None:
        tensors = [data for _, data, _ in array.stacked_tensors()]
        self.parameters = [each for each in tensors if isinstance(each, nn.Parameter) and each.requires_grad]
        dtype = torch.float32
        for each in self.parameters:
            dtype = torch.promote_types(dtype, each.dtype)
        sizes = [each.numel() for each in self.parameters]
        self.flat = torch.zeros(sum(sizes) + len(array) + len(sizes), dtype=dtype)
        *parts, self._losses, self._present = torch.split(self.flat, [*sizes, len(array), len(sizes)])
        self._parts = [part.view(each.shape) for part, each in zip(parts, self.parameters, strict=True)]

    def clear(self) -> None:
        """Drop the gradients of all trained parameters, also of those that no optimizer updates."""
        for each in self.parameters:
            each.grad = None

    def collect(self, losses: Tensor) -> None:
        """Copy the gradients, none of them sparse, and losses, [B], into the tensor."""
        present = [each.grad is not None for each in self.parameters]
        if any(each.grad is not None and each.grad.is_sparse for each in self.parameters):
            raise IndivisibleStepError("a gradient is sparse; make the embedding with sparse=False")
        pairs = list(zip(self._parts, self.parameters, strict=True))
        _copy([part for part, each in pairs if each.grad is not None], [e.grad for _, e in pairs if e.grad is not None])
        torch._foreach_zero_([self.flat[:0], *(part for part, each in pairs if each.grad is None)])
        self._losses.copy_(losses)
        self._present.copy_(torch.tensor(present))

    def assign(self) -> Tensor:
        """Make the sums the gradients of the array; return the losses, [B]."""
        for part, each, present in zip(self._parts, self.parameters, self._present.tolist(), strict=True):
            each.grad = part.to(each.device, each.dtype) if present else None
        return self._losses.to(self.parameters[0].device, copy=True)


def divided(rows: int, size: int) -> tuple[int, ...]:
    """Rows of each rank of a team; the leader, which also updates, has no more than the others."""
    each, rest = divmod(rows, size)
    return tuple(each + (rank >= size - rest) for rank in range(size))


@dataclass(frozen=True)
class BatchLeaf:
    """Place of a tensor in the form of a batch: its shape without rows and B, and B or, for a shared tensor, 0."""

    part: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    members: int = 0

    def sized(self, rows: int) -> tuple[int, ...]:
        """Shape of the tensor for a number of rows."""
        return (*([self.members] if self.members else []), rows, *self.shape)


def leaves_of(parts: Sequence[Any]) -> tuple[Any, list[Tensor]]:
    """Take the tensors out of micro-batches; one without rows first is indivisible.

    Returns the micro-batches with a `BatchLeaf` for each tensor, and the tensors, [N, ...] or [B, N, ...] each.
    """
    found: list[Tensor] = []

    def take(part: int, rows: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if len(value) != rows:
            raise IndivisibleStepError(
                f"a batch of {rows} samples has a tensor of shape {tuple(value.shape)}, whose first axis is another"
            )
        members = len(value.whole) if isinstance(value, Stacked) else 0
        found.append(value.whole if isinstance(value, Stacked) else value)
        return BatchLeaf(part, value.dtype, tuple(value.shape[1:]), members)

    form = [pytree.tree_map(partial(take, number, size_of(part)), part) for number, part in enumerate(parts)]
    return form, found


def rebuilt(form: Any, tensors: Sequence[Tensor]) -> list[Any]:
    """Return micro-batches of a form with these tensors."""
    following = iter(tensors)

    def put(leaf: BatchLeaf) -> Tensor:
        tensor = next(following)
        return Stacked(tensor) if leaf.members else tensor

    return [pytree.tree_map_only(BatchLeaf, put, part) for part in form]


def first_rows(part: Any, count: int) -> Any:
    """Return the first rows of a micro-batch."""
    form, tensors = leaves_of([part])
    leaves = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, BatchLeaf)]
    pairs = zip(leaves, tensors, strict=True)
    (rows,) = rebuilt(form, [tensor.narrow(1 if leaf.members else 0, 0, count) for leaf, tensor in pairs])
    return rows


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors of some rows as one message, uint8."""
    begins, size = _places([tensor.nbytes for tensor in tensors])
    message = torch.empty(size, dtype=torch.uint8)
    for at, tensor in zip(begins, tensors, strict=True):
        _view(message, at, tensor.shape, tensor.dtype).copy_(tensor)
    return message


def unpack(leaves: Sequence[BatchLeaf], rows: Sequence[int], receive: Callable[[Tensor], None]) -> list[Tensor]:
    """Receive the message of `pack`, and return its tensors."""
    shapes = [leaf.sized(rows[leaf.part]) for leaf in leaves]
    begins, size = _places([prod(s) * leaf.dtype.itemsize for s, leaf in zip(shapes, leaves, strict=True)])
    receive(message := torch.empty(size, dtype=torch.uint8))
    return [_view(message, at, s, leaf.dtype) for at, s, leaf in zip(begins, shapes, leaves, strict=True)]


def _places(sizes: Sequence[int], begin: int = 0) -> tuple[list[int], int]:
    """Aligned places of parts with these bytes in a message, and the bytes of the message."""
    ends = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=begin))
    return ends[:-1], ends[-1]


def _view(message: Tensor, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return message[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _described(model: nn.Module, checksums: dict[int, int]) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {name: _kind(each) for name, each in model.named_buffers()}
    for name, each in model.named_parameters():
        found[name] = (*_kind(each), *(() if each.requires_grad else (_checksum(each, checksums),)))
    return found


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def _checksum(tensor: Tensor, checksums: dict[int, int]) -> int:
    """Checksum of the values; members that share memory are summed once."""
    if tensor.data_ptr() not in checksums:
        content = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
        checksums[tensor.data_ptr()] = zlib.crc32(content.numpy().data)
    return checksums[tensor.data_ptr()]
