"""Checkpoints of single trials: plain state dicts, written whole or not at all, checked when read.

A trial's two newest are kept, `checkpoints/<trial>/<epoch>-<step>-<crc32>.pt`. The name holds the checksum of the file,
so a damaged one is known and the one before it is used. Each loads in plain PyTorch:
`torch.load(path, weights_only=True)["model"]`.
"""

import io
import logging
import os
import pickle
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.errors import CheckpointError
from shoal.trial import Report

__all__ = ["Checkpoint", "load_newest", "save"]

_log = logging.getLogger("shoal.worker")
_NAME = re.compile(r"(\d{6})-(\d{6})-([0-9a-f]{8})\.pt")
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """All that a trial needs to go on.

    Args:
        epoch: epochs finished.
        step: steps done of the next one.
        model: its state dict.
        optimizer: its state dict; of several optimizers, a list of theirs.
        scheduler: its state dict, or None; of several likewise.
        reports: of all epochs so far; the journal may lack the last of them.
    """

    epoch: int
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | list[Any]
    scheduler: dict[str, Any] | list[Any] | None
    reports: tuple[Report, ...]


def save(directory: Path, trial: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and drop all but the newest two.

    Args:
        directory: of the study.
        trial: its number.
        checkpoint: tensors may lie anywhere and be views; only their own elements are stored, on the CPU.

    Raises:
        OSError: the disk is full or cannot be written; earlier checkpoints are intact.
    """
    content = {
        "trial": trial,
        "epoch": checkpoint.epoch,
        "step": checkpoint.step,
        "model": checkpoint.model,
        "optimizer": checkpoint.optimizer,
        "scheduler": checkpoint.scheduler,
        "reports": [(r.epoch, dict(r.metrics), r.seconds) for r in checkpoint.reports],
    }
    buffer = io.BytesIO()
    torch.save(pytree.tree_map(_own, content), buffer)
    data = buffer.getbuffer()
    folder = _folder(directory, trial)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{checkpoint.epoch:06d}-{checkpoint.step:06d}-{zlib.crc32(data):08x}.pt"
    partial = folder / f"{os.getpid()}.partial"
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    older = [other for other in _files(folder) if other.name[:13] < path.name[:13]]
    for other in _files(folder):  # one at the same step or beyond it was damaged, else training had gone on from there
        if other != path and other not in older[: _KEPT - 1]:
            other.unlink(missing_ok=True)
    return path


def load_newest(directory: Path, trial: int) -> Checkpoint | None:
    """The newest checkpoint of a trial that is intact, or None.

    Args:
        directory: of the study.
        trial: its number.
    """
    for path in _files(_folder(directory, trial)):
        try:
            return _read(path, trial)
        except CheckpointError as damage:
            _log.warning("%s; the one before it is used", damage)
    return None


def _read(path: Path, trial: int) -> Checkpoint:
    data = path.read_bytes()
    match = _NAME.fullmatch(path.name)
    if match is None or f"{zlib.crc32(data):08x}" != match.group(3):
        raise CheckpointError(f"checkpoint {path} of trial {trial} is damaged: its checksum differs")
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"checkpoint {path} of trial {trial} cannot be read: {error}") from error
    reports = tuple(Report(trial, epoch, metrics, seconds) for epoch, metrics, seconds in content["reports"])
    return Checkpoint(
        content["epoch"], content["step"], content["model"], content["optimizer"], content["scheduler"], reports
    )


def _folder(directory: Path, trial: int) -> Path:
    return directory / "checkpoints" / f"{trial:06d}"


def _files(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((path for path in folder.glob("*.pt") if _NAME.fullmatch(path.name)), reverse=True)


def _own(value: Any) -> Any:
    """A leaf as it is stored: what NumPy has left among the settings would not be read back."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
