"""`TrainedArray`: the description of a leader's array, from which helpers build an equal one, and rows to try it on."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.array import Member

__all__ = ["TrainedArray"]


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
