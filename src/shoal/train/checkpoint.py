"""Checkpoints of single trials: plain state dicts, written atomically, whose names contain a checksum.

A checkpoint loads in plain PyTorch: `torch.load(path, weights_only=True)["model"]`, and "config" in it says which model
to build; the optimizer's state is in a file beside it. If one differs from its checksum, the previous one is used; see
also `checkpoint_paths`. A snapshot of the tensors is copied to the host, where those of a GPU share buckets, so that it
takes few copies and no wait; a thread writes it while training continues.
"""

import io
import json
import logging
import os
import pickle
import platform
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.activity import Activity
from shoal.core.errors import CheckpointError
from shoal.core.space import config_text
from shoal.core.trial import Config, Report
from shoal.fuse.rows import bytes_of, data_address
from shoal.host.activity_clock import during
from shoal.train.checkpoint_paths import (
    CHECKPOINT_NAME,
    checkpoint_files,
    checkpoint_stem,
    make_checkpoint_directory,
    state_files,
    wait_for_checkpoint,
)
from shoal.train.host_copies import host_copies, is_plain, memory_key
from shoal.train.trial_parts import is_atom

__all__ = [
    "Checkpoint",
    "CheckpointSnapshot",
    "CheckpointWriter",
    "Weights",
    "load_newest",
    "load_weights",
    "metrics_of",
    "mismatch_message",
    "snapshot",
    "write",
]

_log = logging.getLogger("shoal.train")

_STATE = ("optimizer", "scheduler", "scaler", "lost", "gradients")
"""Fields of a checkpoint that are stored as they are beside its weights."""

HELD_BYTES = 1 << 30
"""Bytes of snapshots in memory from which `submit` waits until fewer are left to write."""


@dataclass(frozen=True)
class Weights:
    """A trial's model after a step, and what was measured until then.

    Args:
        epoch: Number of epochs finished.
        step: Steps done of the next epoch.
        average: Moving averages of parameters by name; empty if the task asks for none.
        carried: State outside of state dicts, as `CarriedState.dump` returns it; b"" if the model has none.
        metrics: Number of each epoch so far, with its metrics.
        best: The best epoch so far; 0 without one.
        base: `base_fingerprint` of the model.
        config: Configuration that the model was built from.
    """

    trial: int
    epoch: int
    step: int
    model: dict[str, Any]
    average: dict[str, Tensor] = field(default_factory=dict)
    carried: bytes = b""
    metrics: tuple[tuple[int, dict[str, float]], ...] = ()
    best: int = 0
    base: str = ""
    config: Config = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """Beginning of the name of its file."""
        return checkpoint_stem(self.epoch, self.step)

    @torch.no_grad()
    def copied(self, shared: AbstractSet[int], hosted: AbstractSet[int]) -> "Weights":
        """The weights in memory of their own on their device or, if it has none left, on the host.

        Args:
            shared: Addresses of frozen parameters that trials share, which stay where they are.
            hosted: Addresses of parameters that are copied to the host.
        """
        leaves, structure = pytree.tree_flatten((self.model, self.average))
        leaves = [_storable(leaf) for leaf in leaves]
        moved = [each for each in leaves if isinstance(each, Tensor) and data_address(each) not in shared]
        distinct = {memory_key(each): each for each in moved}
        far = [key for key, each in distinct.items() if data_address(each) in hosted]
        copies = dict(zip(far, host_copies([distinct[key] for key in far], pinned=False)[0], strict=True))
        plain = [key for key, each in distinct.items() if key not in copies and is_plain(each)]
        copies |= {key: distinct[key].clone() for key in distinct.keys() - copies.keys() - set(plain)}
        try:
            copies |= {key: torch.empty_like(distinct[key]) for key in plain}
            if plain:  # complex and sparse parameters are not
                torch._foreach_copy_([copies[key] for key in plain], [distinct[key] for key in plain])
        except torch.OutOfMemoryError:
            copies |= zip(plain, host_copies([distinct[key] for key in plain], pinned=False)[0], strict=True)
        by_id = {id(each): copies[memory_key(each)] for each in moved}
        model, average = pytree.tree_unflatten([by_id.get(id(leaf), leaf) for leaf in leaves], structure)
        return replace(self, model=model, average=average)


@dataclass(frozen=True)
class Checkpoint:
    """State from which a trial continues.

    Args:
        optimizer: State dict of the optimizer, a list with one for each of several; None if it was not kept.
        scheduler: State dict of the LR scheduler, a list with one for each of several, or None.
        reports: Reports of all epochs so far; the journal may lack the last ones.
        average: As in `Weights`.
        scaler: State dict of a `torch.amp.GradScaler` with the trial's loss scale, or None.
        carried: Other state, as `CarriedState.dump` returns it; b"" if there is none.
        lost: Paths of what could not be pickled, in one line; "" if there is nothing.
        gradients: Gradients that a `step` of the task's own has left for the next one, by parameter.
        model_carries: Whether the model has a part in `carried`.
        best_epoch: As `Weights.best`.
        best: Weights of the best epoch, if they are not on the disk yet.
        kept: Epochs whose weights are kept: the best ones as of this checkpoint, and as of the one before.
        base, config: As in `Weights`.
    """

    trial: int
    epoch: int
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | list[Any] | None
    scheduler: dict[str, Any] | list[Any] | None
    reports: tuple[Report, ...]
    average: dict[str, Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    carried: bytes = b""
    lost: str = ""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    model_carries: bool = True
    best_epoch: int = 0
    best: Weights | None = None
    kept: frozenset[int] = frozenset()
    base: str = ""
    config: Config = field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        """What the file with its weights holds."""
        carried = self.carried if self.model_carries else b""
        place = self.trial, self.epoch, self.step
        metrics = metrics_of(self.reports)
        return Weights(*place, self.model, self.average, carried, metrics, self.best_epoch, self.base, self.config)


def metrics_of(reports: Sequence[Report]) -> tuple[tuple[int, dict[str, float]], ...]:
    """Return `Weights.metrics`; the names are interned, so that equal metrics have equal pickles."""
    return tuple(
        (report.epoch, {sys.intern(str(name)): value for name, value in report.metrics.items()}) for report in reports
    )


@dataclass(frozen=True)
class CheckpointSnapshot:
    """Contents of a checkpoint's files, which stay the same while training continues.

    Args:
        stem: Beginning of the names of its files.
        weights: Beginning of the name of each file with weights -> its content; those of the checkpoint come last.
        kept: As in `Checkpoint`.
        bytes: Bytes of its tensors, which are in host memory.
        wait: Function that waits until they have their values.
    """

    trial: int
    stem: str
    state: Any
    weights: dict[str, Any]
    kept: frozenset[int]
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
    own = None if checkpoint.model_carries else _as_tensor(checkpoint.carried)
    state = {
        **{name: getattr(checkpoint, name) for name in _STATE},
        "seconds": [report.seconds for report in checkpoint.reports],
        "carried": own,
    }
    weights = [each for each in (checkpoint.best, checkpoint.weights) if each is not None]
    leaves, structure = pytree.tree_flatten([state, {each.stem: _content(each) for each in weights}])
    leaves = [_storable(leaf) for leaf in leaves]
    copies, wait = host_copies([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    remaining = iter(copies)
    leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    state, contents = pytree.tree_unflatten(leaves, structure)
    stem = checkpoint.weights.stem
    return CheckpointSnapshot(checkpoint.trial, stem, state, contents, checkpoint.kept, bytes_of(copies), wait)


def _content(weights: Weights) -> dict[str, Any]:
    content = {each.name: getattr(weights, each.name) for each in fields(weights)}
    config = json.loads(config_text(weights.config))  # parsed anew, so that equal configs have equal pickles
    return content | {"carried": _as_tensor(weights.carried), "metrics": list(weights.metrics), "config": config}


def _as_tensor(carried: bytes) -> Tensor | None:
    return torch.frombuffer(bytearray(carried), dtype=torch.uint8) if carried else None


def write(directory: Path, taken: CheckpointSnapshot) -> Path:
    """Write a checkpoint and the weights of the best epoch, and return the path of the checkpoint's weights.

    Other files than those of the newest two checkpoints and the weights of their best epochs are deleted. If it fails,
    the newest two checkpoints stay intact.
    """
    target = make_checkpoint_directory(directory, taken.trial)
    *best, newest = taken.weights.items()
    taken.wait()
    written = [_write_file(target, *each, "pt") for each in best]
    written.append(_write_file(target, taken.stem, taken.state, "state"))  # first, so that no weights lack it
    written.append(_write_file(target, *newest, "pt"))
    _delete_others(directory, taken, written)
    return written[-1]


def _write_file(target: Path, stem: str, content: Any, suffix: str) -> Path:
    partial = target / f"{platform.node()}-{os.getpid()}.partial"  # another node may have a process of this id
    try:
        with partial.open("wb") as file:
            written = _ChecksumWriter(file)
            torch.save(content, written)  # type: ignore[arg-type]  # it only writes
            written.check()
            file.flush()
            os.fsync(file.fileno())  # else a node that dies may leave a whole name on an empty file
        path = target / f"{stem}-{written.checksum:08x}.{suffix}"
        partial.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target)
        partial.unlink(missing_ok=True)
        raise
    return path


def _delete_others(directory: Path, taken: CheckpointSnapshot, written: Sequence[Path]) -> None:
    """Delete what `write` says. Files of the same or a later step that were not written are of a training that this
    trial did not continue from, or damaged.
    """
    present, states = checkpoint_files(directory, taken.trial), state_files(directory, taken.trial)
    stems = {path.name[:13] for path in states}
    older = [path.name[:13] for path in present if path.name[:13] < taken.stem and path.name[:13] in stems][:1]
    best = {checkpoint_stem(epoch, 0) for epoch in taken.kept}
    new = {path.name[:13]: path for path in written if path.suffix == ".pt"}
    for path in present:
        stem = path.name[:13]
        if new.get(stem, path) != path or (stem not in new and stem not in (*older, *best)) or stem > taken.stem:
            path.unlink(missing_ok=True)
    for path in states:
        if path not in written and path.name[:13] not in older:
            path.unlink(missing_ok=True)


def load_newest(directory: Path, trial: int, oldest: str = "") -> Checkpoint | None:
    """Return a trial's newest intact checkpoint, or None; wait for `oldest` if a network file system hides it.

    Weights of another trial, with which the trial begins, are a checkpoint even without an optimizer's state.
    """
    if oldest and not wait_for_checkpoint(directory, trial, oldest):
        _log.warning("checkpoint %s of trial %d is not visible here; an older one is used", oldest, trial)
    states = {path.name[:13]: path for path in reversed(state_files(directory, trial))}
    for path in checkpoint_files(directory, trial):
        state = states.get(path.name[:13])
        try:
            weights = _read_weights(path, trial)
            if state is None and weights.trial == trial:
                continue  # those of the best epoch
            return _checkpoint(weights, None if state is None else _read(state, trial), trial)
        except (CheckpointError, FileNotFoundError) as damage:  # a newer one has taken the place of a missing file
            _log.warning("%s; the checkpoint before it is used", damage)
    return None


def load_weights(directory: Path, trial: int, epoch: int | None = None) -> Weights:
    """Return a trial's weights as of its newest intact checkpoint, or as of the end of its best epoch.

    While the weights of the best epoch are not on the disk, or if they are damaged, the result is of the best epoch as
    of the newest checkpoint, or else of that checkpoint, and a warning says so.

    Args:
        epoch: The best epoch; None: those of the newest checkpoint.

    Raises:
        CheckpointError: there are no intact weights.
    """
    wanted = None if epoch is None else checkpoint_stem(epoch, 0)
    files = checkpoint_files(directory, trial)
    for path in sorted(files, key=lambda path: wanted is not None and not path.name.startswith(wanted)):
        try:
            found = _read_weights(path, trial)
            break
        except (CheckpointError, FileNotFoundError) as damage:
            _log.warning("%s; other weights are used", damage)
    else:
        raise CheckpointError(f"trial {trial} has no intact checkpoint below {directory / 'checkpoints'}")
    if wanted is None or found.stem == wanted:
        return found
    if found.best not in (0, epoch):
        found = load_weights(directory, trial, found.best)
    text = "trial %d has the weights after epoch %d, as those of its best epoch, %d, are not on the disk"
    _log.warning(text, trial, found.epoch, epoch)
    return found


def _read_weights(path: Path, trial: int) -> Weights:
    content = _read(path, trial)
    carried = b"" if content["carried"] is None else content["carried"].numpy().tobytes()
    return Weights(**content | {"carried": carried, "metrics": tuple(map(tuple, content["metrics"]))})


def _checkpoint(weights: Weights, state: dict[str, Any] | None, trial: int) -> Checkpoint:
    """Put together what a checkpoint's files hold; without a state the optimizer and the scheduler begin anew."""
    if state is None:
        state = {**dict.fromkeys(_STATE), "lost": "", "gradients": {}, "carried": None}
        state["seconds"] = [0.0] * len(weights.metrics)
    reports = tuple(
        Report(trial, epoch, metrics, seconds)
        for (epoch, metrics), seconds in zip(weights.metrics, state.pop("seconds"), strict=True)
    )
    own = state.pop("carried")
    return Checkpoint(
        *(weights.trial, weights.epoch, weights.step, weights.model),
        **state,
        reports=reports,
        average=weights.average,
        carried=weights.carried if own is None else own.numpy().tobytes(),
        base=weights.base,
        config=weights.config,
        model_carries=own is None,
        best_epoch=weights.best,
    )


def mismatch_message(what: str, checkpoint: Checkpoint | Weights, error: Exception) -> str:
    """Return the error message for a model or an optimizer that does not fit the checkpoint of its own trial."""
    return (
        f"the {what} that the task makes now does not fit the checkpoint of trial {checkpoint.trial}, saved after "
        f"{checkpoint.epoch} epochs: {error}\nWas the task edited? Undo that, or start a new study. (A {what} that "
        f"changes while it trains cannot be restored: make all of it at its start.)"
    )


def _read(path: Path, trial: int) -> dict[str, Any]:
    data = path.read_bytes()
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match is None or f"{zlib.crc32(data):08x}" != match.group(3):
        raise CheckpointError(f"checkpoint {path} of trial {trial} is damaged: its checksum differs")
    try:
        content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"checkpoint {path} of trial {trial} cannot be read: {error}") from error
    return content


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
