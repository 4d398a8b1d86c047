"""Paths and names of checkpoints; needs no torch.

The two newest of each trial are kept, as `checkpoints/<trial>/<epoch>-<step>-<crc32>.pt`. Those of a program are
directories, `checkpoints/<trial>/<epoch>-000000-files`.
"""

import os
import re
import shutil
from pathlib import Path

from shoal.core.errors import CheckpointError
from shoal.core.trial import Trial

__all__ = ["NAME", "checkpoints", "copy_checkpoint", "folder", "kept", "published"]

NAME = re.compile(r"(\d{6})-(\d{6})-([0-9a-f]{8})\.pt")
"""Epochs finished, steps done of the next epoch, and the file's checksum."""


def folder(directory: Path, trial: int) -> Path:
    """The directory of a trial's checkpoints.

    Args:
        directory: Directory of the study.
        trial: Number of the trial.
    """
    return directory / "checkpoints" / f"{trial:06d}"


def checkpoints(directory: Path, trial: int) -> list[Path]:
    """A trial's checkpoint files, newest first."""
    found = folder(directory, trial).glob("*.pt")
    return sorted((path for path in found if NAME.fullmatch(path.name)), reverse=True)


def published(directory: Path, trial: int) -> list[Path]:
    """The checkpoint directories of a trial that a program trains, newest first."""
    return sorted(folder(directory, trial).glob("[0-9]*-000000-files"), reverse=True)


def kept(directory: Path, trial: int) -> Path:
    """The directory with a program's files of a trial, as of its last report."""
    newest = next(iter(published(directory, trial)), None)
    return folder(directory, trial) / "live" if newest is None else newest / "files"


def copy_checkpoint(directory: Path, trial: Trial) -> None:
    """Give a trial the checkpoint of its origin, unless it has checkpoints already.

    The file is a hard link if the file system has them, so that either trial may delete it.

    Args:
        directory: Directory of the study.
        trial: Trial with an origin.

    Raises:
        CheckpointError: The origin has no checkpoint at the end of that epoch.
        OSError: The disk is full or cannot be written.
    """
    origin = trial.origin
    if origin is None or checkpoints(directory, trial.number) or published(directory, trial.number):
        return
    begins = f"{origin.epoch:06d}-{0:06d}-"
    there = [*checkpoints(directory, origin.trial), *published(directory, origin.trial)]
    source = next((x for x in there if x.name.startswith(begins)), None)
    if source is None and (folder(directory, origin.trial) / "live").exists():
        raise CheckpointError(
            f"trial {trial.number} was to go on from trial {origin.trial} at epoch {origin.epoch}, which has no copy "
            "of its files: a program's files are copied when it calls shoal.report, not when it prints"
        )
    if source is None:
        raise CheckpointError(
            f"trial {trial.number} was to go on from trial {origin.trial} at epoch {origin.epoch}, whose checkpoint is "
            f"gone from {folder(directory, origin.trial)}"
        )
    target = folder(directory, trial.number) / source.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, symlinks=True)
        partial.replace(target)
        return
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        partial = target.with_suffix(".partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
