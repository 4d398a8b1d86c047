"""The job history: an SQLite file of all profiles measured on this machine, shared by studies."""

import json
import os
import platform
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from msgspec import convert

from shoal.core.demand import Profile
from shoal.core.errors import ShoalError
from shoal.core.version import VERSION

__all__ = [
    "History",
    "HistoryRecord",
    "cache_directory",
    "delete_records",
    "environment",
    "history_path",
    "profile_from",
    "records",
]

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS profiles (
        environment TEXT, structure TEXT, data TEXT, batch_size INTEGER, kind TEXT, profile TEXT NOT NULL,
        PRIMARY KEY (environment, structure, data, batch_size, kind))""",
    """CREATE TABLE IF NOT EXISTS relative_times (
        environment TEXT, one TEXT, other TEXT, kind TEXT, relative_time REAL NOT NULL,
        PRIMARY KEY (environment, one, other, kind))""",
    """CREATE TABLE IF NOT EXISTS tasks (
        structure TEXT, data TEXT, batch_size INTEGER, task TEXT, parameters TEXT NOT NULL,
        PRIMARY KEY (structure, data, batch_size, task))""",
)
_TASKS = "SELECT structure, data, batch_size, task, parameters FROM tasks"
_BUSY_SECONDS = 5.0
"""Longest wait for the lock of another process."""

_Key = tuple[str, str, int, str]
_Pair = tuple[str, str]
_TaskKey = tuple[str, str, int, str]


def cache_directory() -> Path:
    """Return `$SHOAL_CACHE`, else `$XDG_CACHE_HOME/shoal`, else `~/.cache/shoal`."""
    if shoal_cache := os.environ.get("SHOAL_CACHE"):
        return Path(shoal_cache)
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "shoal"
    return Path.home() / ".cache" / "shoal"


def history_path() -> Path:
    """Return the file of this user's history."""
    return cache_directory() / "history-8.sqlite"


def environment() -> str:
    """Return the versions of Python, torch and shoal, on which measurements depend."""
    return f"python {platform.python_version()}, torch {version('torch')}, {VERSION}"


@dataclass(frozen=True)
class HistoryRecord:
    """Measurements of one structure on one kind of device.

    Args:
        structure: Digest of the model, and of its optimizer where fusion depends on it.
        data: Digest of the parameters that determine the data.
        profile: The profile; None if this version of Shoal cannot read it.
        tasks: Name of each task with this structure -> the parameters on which all its trials agree.
    """

    environment: str
    kind: str
    structure: str
    data: str
    batch_size: int
    profile: Profile | None
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class History:
    """Profiles by structure, data, batch size and kind of device, kept across studies.

    The file is read once, at the start, and written through. SQLite's locks make concurrent writes of two studies safe.
    If the file cannot be read or written, one warning is given, and the history is kept in memory for this study.

    Args:
        path: Path of the file; by default in the user's cache directory; "" keeps the history in memory.
        environment: Versions on which measurements depend, as returned by `environment()`. Only profiles of the same
            environment are visible.
    """

    def __init__(self, path: Path | Literal[""] | None = None, *, environment: str = "") -> None:
        self.path = history_path() if path is None else Path(path)
        self.environment = environment
        self._profiles: dict[_Key, Profile] = {}
        self._relative_times: dict[str, dict[_Pair, float]] = {}
        self._tasks: dict[_TaskKey, dict[str, Any]] = {}
        self._usable = path != ""
        if not self._usable:
            return
        try:
            self._load()
        except (OSError, sqlite3.Error, ValueError, TypeError, KeyError) as error:
            self._disable(error)

    def get(self, structure: str, data: str, batch_size: int, kind: str) -> Profile | None:
        """Return the profile by `FusionKey.structure`, `FusionKey.data`, batch size and `Device.kind`; None if never
        measured.
        """
        return self._profiles.get((structure, data, batch_size, kind))

    def all(self) -> Mapping[tuple[str, str, int, str], Profile]:
        """Return all profiles, by the arguments of `get`."""
        return dict(self._profiles)

    def put(self, structure: str, data: str, batch_size: int, kind: str, profile: Profile) -> None:
        """Store a profile, replacing an older one of the same key."""
        self._profiles[structure, data, batch_size, kind] = profile
        row = (self.environment, structure, data, batch_size, kind, json.dumps(asdict(profile)))
        self._write("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?, ?, ?, ?)", [row])

    def put_task(
        self, structure: str, data: str, batch_size: int, task: str, configs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store, for display, the task of a structure and the parameters on which all its trials so far agree."""
        key = (structure, data, batch_size, task)
        known = self._tasks.get(key)
        common = dict(configs[0]) if known is None else known
        for config in configs:
            common = {name: value for name, value in common.items() if name in config and config[name] == value}
        if common != known:
            self._tasks[key] = common
            self._write("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?, ?)", [(*key, json.dumps(common))])

    def relative_times(self, kind: str) -> Mapping[tuple[str, str], float]:
        """Return pair of structures, ascending -> time of steps in one process over that of one after another."""
        return self._relative_times.get(kind, {})

    def put_relative_time(self, pair: tuple[str, str], kind: str, relative_time: float) -> None:
        """Store the relative time of two structures in ascending order, replacing an older one."""
        self._relative_times.setdefault(kind, {})[pair] = relative_time
        self._write(
            "INSERT OR REPLACE INTO relative_times VALUES (?, ?, ?, ?, ?)",
            [(self.environment, *pair, kind, relative_time)],
        )

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if not self._usable:
            return
        try:
            with _connection(self.path) as connection:
                connection.executemany(statement, rows)
        except (OSError, sqlite3.Error) as error:
            self._disable(error)

    def _load(self) -> None:
        parameters = (self.environment,)
        with _connection(self.path) as connection:
            profiles = connection.execute(
                "SELECT structure, data, batch_size, kind, profile FROM profiles WHERE environment = ?", parameters
            ).fetchall()
            relative_times = connection.execute(
                "SELECT one, other, kind, relative_time FROM relative_times WHERE environment = ?", parameters
            ).fetchall()
            tasks = connection.execute(_TASKS).fetchall()
        for *key, text in tasks:
            self._tasks[tuple(key)] = json.loads(text)
        for structure, data, size, kind, text in profiles:
            if (profile := profile_from(text)) is not None:
                self._profiles[structure, data, size, kind] = profile
        for one, other, kind, relative_time in relative_times:
            self._relative_times.setdefault(kind, {})[one, other] = relative_time

    def _disable(self, error: Exception) -> None:
        self._usable = False
        warnings.warn(
            f"the job history {self.path} cannot be used ({error}); the measurements of this study are kept in memory "
            "only. Delete the file, or set SHOAL_CACHE to a directory that can be written.",
            RuntimeWarning,
            stacklevel=3,
        )


def records(path: Path) -> list[HistoryRecord]:
    """Return all records of a job history, of every environment, sorted; empty if there is no file."""
    if _is_empty(path):
        return []
    with _user_connection(path) as connection:
        rows = connection.execute(
            "SELECT environment, kind, structure, data, batch_size, profile FROM profiles "
            "ORDER BY environment, kind, structure, batch_size, data"
        ).fetchall()
        known: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
        for *key, task, text in connection.execute(f"{_TASKS} ORDER BY task"):
            known.setdefault(tuple(key), {})[task] = json.loads(text)
    return [
        HistoryRecord(environment_name, kind, name, data, size, profile_from(text), known.get((name, data, size), {}))
        for environment_name, kind, name, data, size, text in rows
    ]


def delete_records(path: Path, *, kind: str | None = None, structure: str | None = None) -> tuple[int, int]:
    """Delete measurements from a job history, of every environment, so that they are repeated.

    Args:
        structure: Restriction to structures whose digest begins with this prefix.

    Returns:
        Number of deleted profiles, and of deleted relative times.
    """
    if _is_empty(path):
        return 0, 0
    which = {"kind": kind, "prefix": "" if structure is None else structure}
    with _user_connection(path) as connection:
        profiles = connection.execute(
            "DELETE FROM profiles WHERE (:kind IS NULL OR kind = :kind) "
            "AND substr(structure, 1, length(:prefix)) = :prefix",
            which,
        ).rowcount
        relative_times = connection.execute(
            "DELETE FROM relative_times WHERE (:kind IS NULL OR kind = :kind) "
            "AND (substr(one, 1, length(:prefix)) = :prefix OR substr(other, 1, length(:prefix)) = :prefix)",
            which,
        ).rowcount
        connection.execute(
            "DELETE FROM tasks WHERE NOT EXISTS (SELECT 1 FROM profiles WHERE profiles.structure = tasks.structure "
            "AND profiles.data = tasks.data AND profiles.batch_size = tasks.batch_size)"
        )
    return profiles, relative_times


def profile_from(text: str) -> Profile | None:
    """Return the profile of a JSON text; None if the text is damaged. Sizes are strings in JSON."""
    try:
        return convert(json.loads(text), Profile, str_keys=True)
    except ValueError:
        return None


def _is_empty(path: Path) -> bool:
    return not path.exists() or (path.is_file() and not path.stat().st_size)


@contextmanager
def _connection(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection for one transaction; a connection kept open would be shared with forked workers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
        for statement in _SCHEMA:
            connection.execute(statement)
        with connection:
            yield connection


@contextmanager
def _user_connection(path: Path) -> Iterator[sqlite3.Connection]:
    """Return a connection for one transaction on a file given by a user, with errors as `ShoalError`."""
    try:
        with _connection(path) as connection:
            yield connection
    except sqlite3.Error as error:
        raise ShoalError(
            f"the job history {path} cannot be used ({error}); delete the file, or set SHOAL_CACHE to another directory"
        ) from error
