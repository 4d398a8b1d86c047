"""Checkpoints of single trials: plain state dicts, written atomically, whose names contain a checksum.

A checkpoint loads in plain PyTorch: `torch.load(path, weights_only=True)["model"]`. If one differs from its checksum,
the previous one is used; see also `checkpoint_paths`.
"""

import io
import logging
import os
import pickle
import platform
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.errors import CheckpointError
from shoal.core.trial import Report
from shoal.fuse.rows import bytes_of
from shoal.train.checkpoint_paths import (
    CHECKPOINT_NAME,
    checkpoint_directory,
    checkpoint_files,
    checkpoint_stem,
    wait_for_checkpoint,
)
from shoal.train.host_copies import host_copies
from shoal.train.trial_parts import is_atom

__all__ = ["Checkpoint", "CheckpointSnapshot", "load_newest", "mismatch_message", "snapshot", "write"]

_log = logging.getLogger("shoal.train")
_MAX_CHECKPOINTS = 2

_STORED = ("trial", "epoch", "step", "model", "optimizer", "scheduler", "average", "scaler", "lost", "gradients")
"""Fields of a checkpoint that are stored as they are."""


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
    target = checkpoint_directory(directory, taken.trial)
    target.mkdir(parents=True, exist_ok=True)
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
