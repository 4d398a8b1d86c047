"""Frozen parameters that share memory between models, within an array and across arrays."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["lend_frozen", "lent", "note_lent", "own_small", "same", "take_own", "worth_lending"]

LENT_BYTES = 64 << 20
"""Frozen bytes of a model from which on arrays share them: those of a pretrained base, which is not written to. Fewer
bytes are cheap to copy, and may be a temperature or a mask that the model itself changes."""

_addresses: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> the address of its memory when it began to share it; the parameter may have moved since."""


def lend_frozen(first: nn.Module, model: nn.Module) -> None:
    """Let frozen parameters of a model use the memory of the parameters of `first` with the same name and value."""
    given = dict(first.named_parameters())
    for name, parameter in model.named_parameters():
        lender = given.get(name)
        if lender is None or lender.requires_grad or parameter.requires_grad or lender.device != parameter.device:
            continue
        if same(parameter, lender):
            parameter.data = lender.data
            note_lent((lender, parameter))


def worth_lending(model: nn.Module) -> bool:
    """Whether the frozen parameters of a model are so large that models of different arrays share them."""
    return sum(each.nbytes for each in model.parameters() if not each.requires_grad) >= LENT_BYTES


def own_small(model: nn.Module) -> None:
    """Give a model memory of its own for its frozen parameters, unless they are worth lending."""
    borrowed = [each for each in model.parameters() if lent(each)]
    if borrowed and not worth_lending(model):
        for each in borrowed:
            take_own(each)


def note_lent(tensors: Iterable[Tensor]) -> None:
    """Record that tensors share their memory with others."""
    for tensor in tensors:
        _addresses[tensor] = tensor.data_ptr()


def lent(tensor: Tensor) -> bool:
    """Whether others use, or have used, the memory of a tensor."""
    return tensor in _addresses and bool(_addresses[tensor] == tensor.data_ptr())


def take_own(tensor: Tensor) -> None:
    """Give a tensor memory of its own, with the same values."""
    tensor.data = tensor.detach().clone()
    _addresses.pop(tensor, None)  # type: ignore[no-untyped-call]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are of one type and equal."""
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))
