"""Sharing of frozen parameters: models use one memory for equal frozen values, within an array and across arrays."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.fuse.rows import bytes_of, dense_parts

__all__ = [
    "is_shared",
    "large_frozen",
    "record_shared",
    "same_values",
    "share_frozen",
    "unshare",
    "unshare_small",
]

MIN_SHARED_BYTES = 64 << 20
"""Number of frozen bytes of a model from which models of different arrays share them, as for a pretrained base model.
Fewer bytes are cheap to copy, and may be a temperature or a mask that the model itself changes."""

_addresses: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> the address of its memory when it began to be shared; the parameter may have moved since."""


def share_frozen(first: nn.Module, model: nn.Module) -> None:
    """Let frozen parameters of a model use the memory of the parameters of `first` with equal name and values."""
    given = dict(first.named_parameters())
    for name, parameter in model.named_parameters():
        lender = given.get(name)
        if lender is None or lender.requires_grad or parameter.requires_grad or lender.device != parameter.device:
            continue
        if same_values(parameter, lender):
            parameter.data = lender.data
            record_shared((lender, parameter))


def large_frozen(model: nn.Module) -> list[nn.Parameter]:
    """The frozen parameters of a model if they are so large that models of different arrays share them, else none."""
    frozen = [each for each in model.parameters() if not each.requires_grad]
    return frozen if bytes_of(frozen) >= MIN_SHARED_BYTES else []


def unshare_small(model: nn.Module) -> None:
    """Give a model its own memory for frozen parameters that it shares, if they are too small to be worth sharing."""
    shared = [each for each in model.parameters() if is_shared(each)]
    if shared and not large_frozen(model):
        for each in shared:
            unshare(each)


def record_shared(tensors: Iterable[Tensor]) -> None:
    """Record that tensors share their memory with other tensors."""
    for tensor in tensors:
        _addresses[tensor] = tensor.data_ptr()


def is_shared(tensor: Tensor) -> bool:
    """Whether other tensors share, or have shared, the memory of a tensor."""
    return tensor in _addresses and bool(_addresses[tensor] == tensor.data_ptr())


def unshare(tensor: Tensor) -> None:
    """Give a tensor its own memory, with the same values."""
    tensor.data = tensor.detach().clone()
    _addresses.pop(tensor, None)  # type: ignore[no-untyped-call]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal layouts, dtypes and values."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.layout != b.layout or a.shape != b.shape:
        return False
    return all(map(torch.equal, dense_parts(a), dense_parts(b)))
