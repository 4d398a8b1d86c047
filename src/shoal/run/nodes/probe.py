"""Checks that all nodes share the directory of a study: each agent looks for the engine's file and writes beside it."""

import os
import time
from pathlib import Path

__all__ = ["PROBE_SECONDS", "agent_probe_fault", "remove_probes", "write_probe"]

PROBE_SECONDS = 30.0
"""Longest wait for a file of another machine; NFS shows new files after up to this time."""
_PAUSE_SECONDS = 0.2


def write_probe(directory: Path, name: str) -> None:
    """Write the file of the engine or of an agent, whose name is unique in all runs."""
    folder = directory / "agents"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())


def agent_probe_fault(directory: Path, node: str, probe: str, seconds: float = PROBE_SECONDS) -> str:
    """Look on a node for the engine's file, and write one beside it; return a fault in words, or "".

    A run's file has a name of its own, so a node that has it has the engine's directory, and the engine sees what the
    node writes there.
    """
    if not directory.is_dir():  # an agent makes no directory, since the engine's study would not be in it
        return _not_shared(directory, f"node {node} does not have it")
    if not _appears(directory / "agents" / probe, seconds):
        missing = f"agents/{probe}"
        return _not_shared(directory, f"node {node} has a directory of that name without the engine's file {missing}")
    try:
        write_probe(directory, f"{probe}-{node}")
    except OSError as error:
        return f"node {node} cannot write to the directory {directory} of the study: {error}; let its user write there"
    return ""


def remove_probes(directory: Path, probe: str) -> None:
    """Remove the files of a run."""
    for path in (directory / "agents").glob(f"{probe}*"):
        path.unlink(missing_ok=True)


def _not_shared(directory: Path, why: str) -> str:
    return (
        f"the directory {directory} of the study is not shared by all nodes: {why}; choose one on a file system that "
        "all nodes mount at the same path, with directory=... or --directory"
    )


def _appears(path: Path, seconds: float) -> bool:
    """Return whether a file is there within some seconds; listing its folder makes NFS look again."""
    deadline = time.monotonic() + seconds
    while not (path.parent.is_dir() and path.name in os.listdir(path.parent)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True
