"""Paths and names of checkpoint files; imports no torch.

A checkpoint of a trial is its weights, `checkpoints/<trial>/<epoch>-<step>-<crc32>.pt`, and what training resumes
from, `<epoch>-<step>-<crc32>.state`, which is there before the weights. The two newest checkpoints are kept, and the
weights of the best epoch. Checkpoints of a program are directories, `checkpoints/<trial>/<epoch>-000000-files`.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.core.errors import CheckpointError
from shoal.core.trial import Trial
from shoal.host.file_system import network_file_system

__all__ = [
    "CHECKPOINT_NAME",
    "checkpoint_bytes",
    "checkpoint_directory",
    "checkpoint_files",
    "checkpoint_stem",
    "copy_checkpoint",
    "delete_checkpoints",
    "is_exportable",
    "make_checkpoint_directory",
    "program_checkpoints",
    "program_directory",
    "remove_later_checkpoints",
    "state_files",
    "wait_for_checkpoint",
]

VISIBLE_SECONDS = 60.0
"""Longest wait for a file of another machine; NFS shows it after 30 to 60 seconds."""
_PAUSE_SECONDS = 0.5

CHECKPOINT_NAME = re.compile(r"(\d{6})-(\d{6})-([0-9a-f]{8})\.(pt|state)")
"""Name of a file with weights, or with the state of optimizers, schedulers and reports:
epochs finished, steps done of the next epoch, checksum."""

_study: tuple[Path, int] | None = None
"""Directory of the study that this process trains for, and a descriptor of it, which follows it when it is moved."""


def checkpoint_directory(directory: Path, trial: int) -> Path:
    """Return the directory of a trial's checkpoints."""
    return directory / "checkpoints" / f"{trial:06d}"


def checkpoint_bytes(directory: Path) -> int:
    """Return the bytes of the checkpoints of all trials; a file with several names counts once."""
    found = {}
    for place, _, names in os.walk(directory / "checkpoints"):
        for name in names:
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                info = os.lstat(os.path.join(place, name))
                found[info.st_dev, info.st_ino] = info.st_size
    return sum(found.values())


def make_checkpoint_directory(directory: Path, trial: int) -> Path:
    """Make the directory of a trial's checkpoints in that of its study, and return it.

    The directory of a study that was moved or removed while it runs does not come back under its old name, and another
    that took its place gets no checkpoints: it must be the one that this process found there first.

    Raises:
        FileNotFoundError: The study's directory is not there any more.
    """
    global _study
    if _study is None or _study[0] != directory:
        opened = os.open(directory, os.O_RDONLY)
        if _study is not None:
            os.close(_study[1])
        _study = directory, opened
    if not os.path.samestat(os.fstat(_study[1]), directory.stat()):
        raise FileNotFoundError(errno.ENOENT, "another directory has taken the place of the study's", str(directory))
    path = checkpoint_directory(directory, trial)
    path.parent.mkdir(exist_ok=True)
    path.mkdir(exist_ok=True)
    return path


def checkpoint_files(directory: Path, trial: int) -> list[Path]:
    """Return a trial's files with weights, newest first: of its checkpoints, and of its best epoch."""
    return _files(directory, trial, "*.pt")


def state_files(directory: Path, trial: int) -> list[Path]:
    """Return a trial's files with the state of optimizers, newest first."""
    return _files(directory, trial, "*.state")


def _files(directory: Path, trial: int, pattern: str) -> list[Path]:
    found = checkpoint_directory(directory, trial).glob(pattern)
    return sorted((path for path in found if CHECKPOINT_NAME.fullmatch(path.name)), reverse=True)


def checkpoint_stem(epoch: int, step: int) -> str:
    """Return the beginning of a checkpoint's name: epochs finished, and steps done of the next epoch."""
    return f"{epoch:06d}-{step:06d}"


def remove_later_checkpoints(directory: Path, trial: int, epoch: int, step: int) -> None:
    """Remove a trial's checkpoints of later steps than this one."""
    for path in [*checkpoint_files(directory, trial), *state_files(directory, trial)]:  # else a state might be missing
        if path.name[:13] > checkpoint_stem(epoch, step):
            path.unlink(missing_ok=True)


def wait_for_checkpoint(
    directory: Path,
    trial: int,
    oldest: str,
    seconds: float = VISIBLE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return whether a trial has a checkpoint not older than `oldest`, which a network file system may show late."""
    deadline = time.monotonic() + seconds
    while True:
        files = checkpoint_files(directory, trial)
        if files and files[0].name >= oldest:
            return True
        if time.monotonic() >= deadline or not network_file_system(directory):
            return False
        sleep(_PAUSE_SECONDS)
        with suppress(OSError):  # listing the folder above makes the client of NFS look again
            os.listdir(directory / "checkpoints")


def program_checkpoints(directory: Path, trial: int) -> list[Path]:
    """Return the checkpoints, which are directories, of a trial that a program trains; newest first."""
    return sorted(checkpoint_directory(directory, trial).glob("[0-9]*-000000-files"), reverse=True)


def program_directory(directory: Path, trial: int, best: int | None = None) -> Path:
    """Return the directory with a program's files as of the trial's best report, if they were kept, else its last."""
    found = program_checkpoints(directory, trial)
    chosen = [path for path in found if best is not None and path.name.startswith(f"{best:06d}-")] or found
    return chosen[0] / "files" if chosen else checkpoint_directory(directory, trial) / "live"


def is_exportable(directory: Path, trial: int, best: int | None = None) -> bool:
    """Return whether a trial has weights, or files that a program has kept, as of `program_directory`."""
    kept = program_directory(directory, trial, best)
    return bool(checkpoint_files(directory, trial)) or (kept.is_dir() and any(kept.iterdir()))


def copy_checkpoint(directory: Path, trial: Trial) -> None:
    """Copy, by a hard link if possible, the checkpoint of a trial's origin to the trial, unless it has checkpoints."""
    origin = trial.origin
    if origin is None or checkpoint_files(directory, trial.number) or program_checkpoints(directory, trial.number):
        return
    begins = f"{origin.epoch:06d}-{0:06d}-"
    there = [*checkpoint_files(directory, origin.trial), *program_checkpoints(directory, origin.trial)]
    source = next((x for x in there if x.name.startswith(begins)), None)
    states = [path for path in state_files(directory, origin.trial) if path.name.startswith(begins)]
    if source is not None and not source.is_dir() and not states and not trial.is_added:
        source = None  # weights of the best epoch alone: an algorithm's trial continues with the optimizer's state
    live = checkpoint_directory(directory, origin.trial) / "live"
    if source is None and live.exists():
        why = (
            "a program's files are copied when it calls shoal.report, not when it prints"
            if any(live.iterdir())
            else "it keeps none; let it save its state in shoal.checkpoint() before each report, and begin with it"
        )
        raise CheckpointError(
            f"trial {trial.number} was to start from trial {origin.trial} at epoch {origin.epoch}, which has no copy "
            f"of its files: {why}"
        )
    if source is None:
        raise CheckpointError(
            f"trial {trial.number} was to start from trial {origin.trial} at epoch {origin.epoch}, whose checkpoint is "
            f"gone from {checkpoint_directory(directory, origin.trial)}"
        )
    target = make_checkpoint_directory(directory, trial.number) / source.name
    if source.is_dir():
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, symlinks=True)
        partial.replace(target)
        return
    for path in (*states, source):  # the weights come last, as without them there is no checkpoint
        _link(path, target.with_name(path.name))


def delete_checkpoints(directory: Path, trial: int, *, weights: bool) -> None:
    """Delete the state files of a trial; with `weights` also its weights, and all that a program has kept.

    The state goes last, as weights without it are those of a best epoch, which no training continues from.
    """
    if weights:
        for path in checkpoint_files(directory, trial):
            path.unlink(missing_ok=True)
        for folder in (*program_checkpoints(directory, trial), checkpoint_directory(directory, trial) / "live"):
            if folder.exists():
                shutil.rmtree(folder)
    for path in state_files(directory, trial):
        path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:  # an earlier attempt was cut short
        return
    except OSError:  # a file system without hard links
        partial = target.with_suffix(".partial")
        shutil.copyfile(source, partial)
        partial.replace(target)
