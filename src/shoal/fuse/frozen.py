"""Sharing of frozen parameters: models use one memory for equal frozen values, within an array and across arrays."""

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.fuse.checks import list_names
from shoal.fuse.quantised import load_scales, weight_states
from shoal.fuse.rows import bytes_of, data_address, dense_parts, is_packed, packed_state

__all__ = [
    "base_fingerprint",
    "is_lent",
    "is_shared",
    "large_frozen",
    "lent_copy",
    "load_own_state",
    "of_same_memory",
    "own_state",
    "record_shared",
    "same_values",
    "share_frozen",
    "share_storage",
    "unshare",
    "unshare_small",
]

MIN_SHARED_BYTES = 64 << 20
"""Number of frozen bytes of a model from which models of different arrays share them, as for a pretrained base model.
Fewer bytes are cheap to copy, and may be a temperature or a mask that the model itself changes."""

_SAMPLED = 64
"""Elements of a parameter in the fingerprint of a base, at most."""

_addresses: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter -> the address of its memory when it began to be shared; the parameter may have moved since."""

_lent: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameter of a copy of a base model -> likewise, of the memory of the base, which no model may write to."""


def of_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Return a frozen parameter with the memory and the version of another one, so that only writes reach that one."""
    if type(parameter) is not nn.Parameter:
        return parameter
    copied = nn.Parameter(parameter.detach(), requires_grad=False)
    if is_lent(parameter):
        _lent[copied] = copied.data_ptr()
    return copied


def lent_copy(base: nn.Module) -> nn.Module:
    """Return a copy of a frozen model whose parameters use the memory of the model's own; buffers are copied."""
    memo: dict[int, Any] = {id(each): each for each in weight_states(base)}
    memo |= {id(each): of_same_memory(each) for each in base.parameters()}
    copied = copy.deepcopy(base, memo)
    for each in copied.parameters():
        _lent[each] = each.data_ptr()
    record_shared(copied.parameters())
    return copied


def is_lent(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter of a `lent_copy`, in the memory of the base."""
    return tensor in _lent and bool(_lent[tensor] == tensor.data_ptr())


def own_state(model: nn.Module) -> dict[str, Any]:
    """The state dict of a model without the parameters of a base, and without what their modules save of these."""
    lent = {name for name, each in model.named_parameters(remove_duplicate=False) if is_lent(each)}
    state: dict[str, Any] = model.state_dict()
    for name in lent and list(state):
        scales = name.endswith((".SCB", ".weight_format")) and f"{name.rpartition('.')[0]}.weight" in lent
        if name in lent or scales or any(name[:end] in lent for end, letter in enumerate(name) if letter == "."):
            del state[name]
    return state


def base_fingerprint(model: nn.Module) -> str:
    """A digest of names, shapes, dtypes and some elements of the parameters of a base; "" without a base."""
    lent = [(name, each) for name, each in model.named_parameters() if is_lent(each)]
    digest = hashlib.sha256()
    for name, each in lent:
        digest.update(f"{name} {tuple(each.shape)} {each.dtype}".encode())
    parts = [part.detach() for _, each in lent for part in dense_parts(each)]
    for dtype in sorted({each.dtype for each in parts}, key=str):
        flat = [each.reshape(-1) for each in parts if each.dtype == dtype]
        some = torch.cat([each[:: max(1, len(each) // _SAMPLED)][:_SAMPLED] for each in flat])
        digest.update(some.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if lent else ""


def load_own_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load what `own_state` gave; a module may save names that it does not load, as bitsandbytes' quantization states.

    Raises:
        RuntimeError: The names or shapes differ.
    """
    differing = sorted(own_state(model).keys() ^ saved.keys())
    if differing and any(map(is_lent, model.parameters())):
        raise RuntimeError(f"only one of model and checkpoint has {list_names(differing)}")
    model.load_state_dict(saved, strict=bool(differing))
    load_scales(model, saved)


def share_frozen(first: nn.Module, model: nn.Module) -> None:
    """Let frozen parameters of a model use the memory of the parameters of `first` with equal name and values."""
    given = dict(first.named_parameters())
    for name, parameter in model.named_parameters():
        lender = given.get(name)
        if lender is None or lender.requires_grad or parameter.requires_grad or lender.device != parameter.device:
            continue
        if same_values(parameter, lender):
            share_storage(parameter, lender)
            record_shared((lender, parameter))


def large_frozen(model: nn.Module) -> list[nn.Parameter]:
    """The frozen parameters that models of different arrays share: all if large, else packed ones, those of a base."""
    frozen = [each for each in model.parameters() if not each.requires_grad]
    if bytes_of(frozen) >= MIN_SHARED_BYTES:
        return frozen
    return [each for each in frozen if is_packed(each) or is_lent(each)]


def unshare_small(model: nn.Module) -> None:
    """Give a model its own memory for frozen parameters that it shares, if they are too small to be worth sharing."""
    shared = [each for each in model.parameters() if is_shared(each) and not is_lent(each)]
    if shared:
        large = set(map(id, large_frozen(model)))
        for each in shared:
            if id(each) not in large:
                unshare(each)


def share_storage(parameter: nn.Parameter | Tensor, lender: Tensor) -> None:
    """Let a parameter use the memory of another one with equal values, and what a packed one holds beside it."""
    if parameter is lender:
        return
    if not is_packed(parameter):
        parameter.data = lender.data
        return
    if not hasattr(parameter, "__tensor_flatten__"):  # else all of its memory is that of tensors in its attributes
        parameter.data = lender.detach()
    vars(parameter).update({name: each for name, each in vars(lender).items() if not isinstance(each, nn.Module)})


def record_shared(tensors: Iterable[Tensor]) -> None:
    """Record that tensors share their memory with other tensors."""
    for tensor in tensors:
        _addresses[tensor] = tensor.data_ptr()


def is_shared(tensor: Tensor) -> bool:
    """Whether other tensors share, or have shared, the memory of a tensor."""
    return tensor in _addresses and bool(_addresses[tensor] == tensor.data_ptr())


def unshare(tensor: Tensor) -> None:
    """Give a tensor its own memory, with the same values; packed parameters, to which nobody writes, stay shared."""
    if is_packed(tensor):
        return
    tensor.data = tensor.detach().clone()
    _addresses.pop(tensor, None)  # type: ignore[no-untyped-call]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal layouts, dtypes and values; packed ones also equal scales and settings."""
    if a is b:
        return True
    if a.dtype != b.dtype or a.layout != b.layout or a.shape != b.shape:
        return False
    if (is_packed(a) or is_packed(b)) and _settings(a) != _settings(b):
        return False
    as_bytes = is_packed(a)  # codes in a floating dtype may be NaN
    return all(_equal(x, y, as_bytes) for x, y in zip(dense_parts(a), dense_parts(b), strict=True))


def _equal(a: Tensor, b: Tensor, as_bytes: bool) -> bool:
    if data_address(a) and data_address(a) == data_address(b) and a.shape == b.shape and a.stride() == b.stride():
        return True  # without a look at what may be gigabytes
    if as_bytes and a.dim():
        a, b = (each.detach().contiguous().view(torch.uint8) for each in (a, b))
    return torch.equal(a, b)


def _settings(packed: Tensor) -> tuple[type, dict[str, Any]]:
    """The class of a packed parameter, and all that it holds beside its memory; None for tensors."""
    if not is_packed(packed):
        return type(packed), {}
    return type(packed), {
        path: None if isinstance(each, Tensor) else each for path, each in packed_state(packed).items()
    }
