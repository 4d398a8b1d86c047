"""Copies of tensors in host memory, which take few transfers from a GPU and no wait."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

__all__ = ["host_copies", "is_plain", "memory_key"]

BUCKET_BYTES = 16 << 20
"""Maximum bytes of a bucket: tensors that are copied at once, through as much additional device memory."""

PINNED_BYTES = 256 << 20
"""Maximum bytes of tensors of one call that are copied into pinned memory, which torch rounds up and keeps."""


@torch.no_grad()
def host_copies(tensors: Sequence[Tensor], pinned: bool = True) -> tuple[list[Tensor], Callable[[], None]]:
    """Copy tensors to host memory, each to a storage of its own; tensors of one memory have one copy.

    The values are those at this place in the device's current stream, whatever later work of the stream changes.

    Args:
        pinned: Whether to copy up to `PINNED_BYTES` from a GPU into pinned memory, without waiting for it. Other
            copies are complete on return.

    Returns:
        The copies, and a function that waits until they are complete.
    """
    keys = list(map(memory_key, tensors))
    distinct = {key: tensor.detach() for key, tensor in zip(keys, tensors, strict=True)}
    bucketed = {key: tensor for key, tensor in distinct.items() if tensor.device.type != "cpu" and is_plain(tensor)}
    rest = ((key, tensor) for key, tensor in distinct.items() if key not in bucketed)
    copies = {key: tensor.clone() if tensor.device.type == "cpu" else tensor.cpu() for key, tensor in rest}
    devices: set[torch.device] = set()
    size = 0
    for bucket in _buckets(bucketed.items()):
        size += sum(tensor.nbytes for tensor in bucket.values())
        pinned = pinned and size <= PINNED_BYTES
        copies.update(_copies_of_bucket(bucket, pinned))
        devices.update(tensor.device for tensor in bucket.values() if pinned and tensor.device.type == "cuda")
    events = [(device, _recorded_event(device)) for device in devices]

    def wait() -> None:
        for device, event in events:
            with torch.cuda.device(device):  # a thread begins with the first GPU
                event.synchronize()

    return [copies[key] for key in keys], wait


def memory_key(tensor: Tensor) -> object:
    """Return what is equal for tensors with the same elements of the same memory."""
    if not is_plain(tensor) or not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and of torch's own class, and its elements are what its memory holds."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_complex() or tensor.is_neg() or tensor.is_quantized)


def _buckets(tensors: Iterable[tuple[object, Tensor]]) -> Iterator[dict[object, Tensor]]:
    """Divide tensors by device and dtype into buckets of at most `BUCKET_BYTES`, or of one tensor."""
    buckets: dict[object, dict[object, Tensor]] = {}
    sizes: dict[object, int] = {}
    for key, tensor in tensors:
        kind = tensor.device, tensor.dtype
        if sizes.get(kind, 0) + tensor.nbytes > BUCKET_BYTES and kind in buckets:
            yield buckets.pop(kind)
            sizes[kind] = 0
        buckets.setdefault(kind, {})[key] = tensor
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    yield from buckets.values()


def _copies_of_bucket(bucket: dict[object, Tensor], pinned: bool) -> dict[object, Tensor]:
    """Copy tensors of one device and dtype to the host, each by itself if the device lacks memory for the bucket."""
    with suppress(torch.OutOfMemoryError):
        return dict(_copied_at_once(bucket, pinned))
    return {key: tensor.cpu() for key, tensor in bucket.items()}


def _copied_at_once(bucket: dict[object, Tensor], pinned: bool) -> Iterator[tuple[object, Tensor]]:
    """Copy tensors of one device and dtype by one copy of a flat tensor; yield each with its key, in its strides."""
    orders = [sorted(range(each.dim()), key=each.stride, reverse=True) for each in bucket.values()]
    permuted = [each.permute(order) for each, order in zip(bucket.values(), orders, strict=True)]
    rows = [each.reshape(-1) for each in permuted]
    flat = torch.cat(rows) if len(rows) > 1 else rows[0]
    if pinned and flat.device.type == "cuda":
        storage = _pinned_like(flat).copy_(flat, non_blocking=True).untyped_storage()
    else:
        storage = flat.cpu().untyped_storage()
    begin = 0
    for key, each, order in zip(bucket, permuted, orders, strict=True):
        own = torch.empty(0, dtype=each.dtype).set_(storage[begin : begin + each.nbytes]).view(each.shape)
        begin += each.nbytes
        yield key, own.permute(sorted(range(each.dim()), key=order.__getitem__))


def _pinned_like(flat: Tensor) -> Tensor:
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    """Return an event after all work of the device's current stream; waiting for it takes no processor time."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
