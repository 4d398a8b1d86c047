"""The job history as a person looks at it: what is known of which jobs, in every environment."""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.demand import Profile
from shoal.core.errors import ShoalError
from shoal.cost.history import profile_from

__all__ = ["Record", "forget", "records"]


@dataclass(frozen=True)
class Record:
    """What was measured of one structure on one kind of device.

    Args:
        environment: the versions it was measured with.
        kind: of the device.
        structure: digest of the model, and of its optimizer where that decides who may be one array.
        data: digest of what decides its data.
        batch_size: samples per step and member.
        profile: what was measured; None if this version of Shoal cannot read it.
        origins: name of each task that it came from -> the parameters that all its trials agree on.
    """

    environment: str
    kind: str
    structure: str
    data: str
    batch_size: int
    profile: Profile | None
    origins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def records(path: Path) -> list[Record]:
    """All that a job history knows, sorted; nothing if there is no file.

    Args:
        path: the file.

    Raises:
        ShoalError: it is no job history.
    """
    if _is_empty(path):
        return []
    with _opened(path) as connection:
        rows = connection.execute(
            "SELECT environment, kind, structure, data, batch_size, profile FROM profiles "
            "ORDER BY environment, kind, structure, batch_size, data"
        ).fetchall()
        known: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
        for *key, task, text in _origins(connection):
            known.setdefault(tuple(key), {})[task] = json.loads(text)
    return [
        Record(
            environment,
            kind,
            structure,
            data,
            batch_size,
            profile_from(text),
            known.get((structure, data, batch_size), {}),
        )
        for environment, kind, structure, data, batch_size, text in rows
    ]


def forget(path: Path, *, kind: str | None = None, structure: str | None = None) -> tuple[int, int]:
    """Remove what a job history knows, in every environment, so that it is measured anew.

    Args:
        path: the file.
        kind: only of this kind of device.
        structure: only of structures whose digest begins so.

    Returns:
        How many measurements of a structure were removed, and how many of two in one process.

    Raises:
        ShoalError: it is no job history, or cannot be written.
    """
    if _is_empty(path):
        return 0, 0
    begins = "" if structure is None else structure
    with _opened(path) as connection:
        profiles = connection.execute(
            "DELETE FROM profiles WHERE (?1 IS NULL OR kind = ?1) AND substr(structure, 1, length(?2)) = ?2",
            (kind, begins),
        ).rowcount
        paces = connection.execute(
            "DELETE FROM paces WHERE (?1 IS NULL OR kind = ?1) "
            "AND (substr(one, 1, length(?2)) = ?2 OR substr(other, 1, length(?2)) = ?2)",
            (kind, begins),
        ).rowcount
        if _has_origins(connection):
            connection.execute(
                "DELETE FROM origins WHERE NOT EXISTS (SELECT 1 FROM profiles WHERE profiles.structure = "
                "origins.structure AND profiles.data = origins.data AND profiles.batch_size = origins.batch_size)"
            )
    return profiles, paces


def _origins(connection: sqlite3.Connection) -> list[Any]:
    if not _has_origins(connection):
        return []
    return connection.execute(
        "SELECT structure, data, batch_size, task, parameters FROM origins ORDER BY task"
    ).fetchall()


def _has_origins(connection: sqlite3.Connection) -> bool:
    """Whether the file says where structures came from; older versions of Shoal did not."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'origins'").fetchall())


def _is_empty(path: Path) -> bool:
    """Whether there is no file, or one that nothing was written to."""
    return not path.exists() or (path.is_file() and not path.stat().st_size)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(path, timeout=5.0)) as connection, connection:
            yield connection
    except sqlite3.Error as error:
        raise ShoalError(
            f"the job history {path} cannot be used ({error}); delete the file, or set SHOAL_CACHE to another directory"
        ) from error
