"""Checkpoints of single trials: plain state dicts, written atomically, whose names contain a checksum.

A checkpoint loads in plain PyTorch: `torch.load(path, weights_only=True)["model"]`. If one differs from its checksum,
the previous one is used; see also `checkpoint_paths`. A snapshot of the tensors is copied to the host, where those of a
GPU share buckets, so that it takes few copies and no wait; a thread writes it while training goes on.
"""

import io
import logging
import os
import pickle
import platform
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.activity import Activity
from shoal.core.errors import CheckpointError
from shoal.core.trial import Report
from shoal.fuse.rows import bytes_of
from shoal.host.activity_clock import during
from shoal.train.checkpoint_paths import (
    CHECKPOINT_NAME,
    checkpoint_files,
    checkpoint_stem,
    make_checkpoint_directory,
    wait_for_checkpoint,
)
from shoal.train.trial_parts import is_atom

__all__ = [
    "Checkpoint",
    "CheckpointSnapshot",
    "CheckpointWriter",
    "host_copies",
    "load_newest",
    "mismatch_message",
    "snapshot",
    "write",
]

_log = logging.getLogger("shoal.train")
_MAX_CHECKPOINTS = 2

_STORED = ("trial", "epoch", "step", "model", "optimizer", "scheduler", "average", "scaler", "lost", "gradients")
"""Fields of a checkpoint that are stored as they are."""

HELD_BYTES = 1 << 30
"""Bytes of snapshots in memory from which `submit` waits until fewer are left to write."""

BUCKET_BYTES = 16 << 20
"""Maximum bytes of a bucket: tensors that are copied at once, through as much additional device memory."""

PINNED_BYTES = 256 << 20
"""Maximum bytes of tensors of one call that are copied into pinned memory, which torch rounds up and keeps."""


@dataclass(frozen=True)
class Checkpoint:
    """State from which a trial continues.

    Args:
        scheduler: State dict of the LR scheduler, a list with one for each of several, or None.
        reports: Reports of all epochs so far; the journal may lack the last ones.
        average: Moving averages of parameters by name; empty if the task asks for none.
        scaler: State dict of a `torch.amp.GradScaler` with the trial's loss scale, or None.
        carried: Other state, as `CarriedState.dump` returns it; b"" if there is none.
        lost: Paths of what could not be pickled, in one line; "" if there is nothing.
        gradients: Gradients that a `step` of the task's own has left for the next one, by parameter.
    """

    trial: int
    epoch: int
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | list[Any]
    scheduler: dict[str, Any] | list[Any] | None
    reports: tuple[Report, ...]
    average: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    carried: bytes = b""
    lost: str = ""
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSnapshot:
    """Content of a checkpoint's file, which stays the same while training goes on.

    Args:
        bytes: Bytes of its tensors, which are in host memory.
        wait: Function that waits until they have their values.
    """

    trial: int
    epoch: int
    step: int
    content: Any
    bytes: int
    wait: Callable[[], None]


class CheckpointWriter:
    """Writes the checkpoints of a process in the order in which they are submitted.

    `submit` takes a snapshot, which a thread writes to the disk. What refers to a checkpoint is sent to the engine only
    once `written` has reached the value that `submitted` had then.

    After a checkpoint that could not be written, `check` and `flush` raise its error.
    """

    def __init__(self, directory: Path) -> None:
        self.submitted = 0
        """Number of checkpoints that the thread was given."""
        self._directory = directory
        self._pending: deque[tuple[Future[Path], int]] = deque()  # and bytes of the snapshot
        self._executor: ThreadPoolExecutor | None = None

    @property
    def written(self) -> int:
        """Number of checkpoints on the disk, of those submitted, before the first that is not."""
        while self._pending and (first := self._pending[0][0]).done() and first.exception() is None:
            self._pending.popleft()
        return self.submitted - len(self._pending)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Take a snapshot of a checkpoint to be written; wait first while earlier ones take too much memory."""
        while sum(size for future, size in self._pending if not future.done()) >= HELD_BYTES:
            wait_for_futures([future for future, _ in self._pending if not future.done()], None, FIRST_COMPLETED)
        taken = snapshot(checkpoint)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "shoal-checkpoints")
        self._pending.append((self._executor.submit(write, self._directory, taken), taken.bytes))
        self.submitted += 1

    def check(self) -> None:
        """Raise the error of the first checkpoint that could not be written, if there is one."""
        if self.written < self.submitted and (first := self._pending[0][0]).done():
            first.result()

    def flush(self) -> None:
        """Wait until all checkpoints are on the disk."""
        self.wait()
        self.check()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the thread has nothing to write, or for some seconds."""
        if self._pending:
            with during(Activity.CHECKPOINTS):
                wait_for_futures([future for future, _ in self._pending], seconds)

    def close(self) -> None:
        """Wait for the thread to end, and forget its errors."""
        if self._executor is not None:
            with during(Activity.CHECKPOINTS):
                self._executor.shutdown()
        self._executor = None
        self._pending.clear()


def snapshot(checkpoint: Checkpoint) -> CheckpointSnapshot:
    """Copy a checkpoint, without waiting for a GPU.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: A state dict has what cannot be pickled.
    """
    content = {
        **{name: getattr(checkpoint, name) for name in _STORED},
        "reports": [(r.epoch, dict(r.metrics), r.seconds) for r in checkpoint.reports],
        "carried": torch.frombuffer(bytearray(checkpoint.carried), dtype=torch.uint8) if checkpoint.carried else None,
    }
    leaves, structure = pytree.tree_flatten(content)
    leaves = [_storable(leaf) for leaf in leaves]
    copies, wait = host_copies([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    remaining = iter(copies)
    leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    copied = pytree.tree_unflatten(leaves, structure)
    return CheckpointSnapshot(checkpoint.trial, checkpoint.epoch, checkpoint.step, copied, bytes_of(copies), wait)


def write(directory: Path, taken: CheckpointSnapshot) -> Path:
    """Write a checkpoint, return its path, and delete all but the newest two, which stay intact if it fails."""
    target = make_checkpoint_directory(directory, taken.trial)
    partial = target / f"{platform.node()}-{os.getpid()}.partial"  # another node may have a process of this id
    try:
        with partial.open("wb") as file:
            written = _ChecksumWriter(file)
            taken.wait()
            torch.save(taken.content, written)  # type: ignore[arg-type]  # it only writes
            written.check()
            file.flush()
            os.fsync(file.fileno())  # else a node that dies may leave a whole name on an empty file
        path = target / f"{checkpoint_stem(taken.epoch, taken.step)}-{written.checksum:08x}.pt"
        partial.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)
        partial.unlink(missing_ok=True)
        raise
    present = checkpoint_files(directory, taken.trial)
    older = [other for other in present if other.name[:13] < path.name[:13]]
    for other in present:  # checkpoints of the same or a later step are damaged: training did not start from them
        if other != path and other not in older[: _MAX_CHECKPOINTS - 1]:
            other.unlink(missing_ok=True)
    return path


def load_newest(directory: Path, trial: int, oldest: str = "") -> Checkpoint | None:
    """Return a trial's newest intact checkpoint, or None; wait for `oldest` if a network file system hides it."""
    if oldest and not wait_for_checkpoint(directory, trial, oldest):
        _log.warning("checkpoint %s of trial %d is not visible here; an older one is used", oldest, trial)
    for path in checkpoint_files(directory, trial):
        try:
            return _read(path, trial)
        except (CheckpointError, FileNotFoundError) as damage:  # a newer one has taken the place of a missing file
            _log.warning("%s; the checkpoint before it is used", damage)
    return None


def mismatch_message(what: str, checkpoint: Checkpoint, error: Exception) -> str:
    """Return the error message for a model or an optimizer that does not fit the checkpoint of its own trial."""
    return (
        f"the {what} that the task makes now does not fit the checkpoint of trial {checkpoint.trial}, saved after "
        f"{checkpoint.epoch} epochs: {error}\nWas the task edited? Undo that, or start a new study. (A {what} that "
        f"changes while it trains cannot be restored: make all of it at its start.)"
    )


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
    keys = list(map(_memory, tensors))
    distinct = {key: tensor.detach() for key, tensor in zip(keys, tensors, strict=True)}
    bucketed = {key: tensor for key, tensor in distinct.items() if tensor.device.type != "cpu" and _is_plain(tensor)}
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


def _read(path: Path, trial: int) -> Checkpoint:
    data = path.read_bytes()
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match is None or f"{zlib.crc32(data):08x}" != match.group(3):
        raise CheckpointError(f"checkpoint {path} of trial {trial} is damaged: its checksum differs")
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"checkpoint {path} of trial {trial} cannot be read: {error}") from error
    reports = tuple(Report(trial, epoch, metrics, seconds) for epoch, metrics, seconds in content["reports"])
    carried = b"" if content["carried"] is None else content["carried"].numpy().tobytes()
    return Checkpoint(**content | {"reports": reports, "carried": carried})


class _ChecksumWriter:
    """Computes the checksum as it writes, without the checkpoint in memory; keeps a write's error for `check`."""

    def __init__(self, file: IO[bytes]) -> None:
        self.checksum = 0
        self._file = file
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes; nothing more after an error."""
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            if self._error is None:
                self._file.write(data)
        except OSError as error:
            self._error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing, as the file is flushed when it is closed."""

    def check(self) -> None:
        """Raise the error of the first write that failed."""
        if self._error is not None:
            raise self._error


def _storable(value: Any) -> Any:
    """Return a leaf as it is stored, copied unless it is a tensor; `weights_only` refuses values of NumPy."""
    if isinstance(value, Tensor) or is_atom(value):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())  # those that are read-only cannot be shared
    return pickle.loads(pickle.dumps(value))


def _memory(tensor: Tensor) -> object:
    """Return what is equal for tensors with the same elements of the same memory."""
    if not _is_plain(tensor) or not tensor.data_ptr():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _is_plain(tensor: Tensor) -> bool:
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
