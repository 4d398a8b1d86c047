"""How SQLite keeps a journal, which depends on the file system."""

import sqlite3
import struct
from contextlib import suppress
from pathlib import Path

from shoal.host.file_system import network_file_system

__all__ = ["is_in_wal_mode", "read_stamp", "set_journal_mode"]

_NETWORK_BUSY_SECONDS = 120.0
"""Longest wait of a writer for readers, which lock it out in a mode other than WAL."""

_MODES_PLACE, _WAL_MODES = 18, b"\x02\x02"
"""Place of the read and write versions in the header of an SQLite file, and their value in WAL mode."""


def set_journal_mode(directory: Path, connection: sqlite3.Connection) -> None:
    """Set how a writer's connection keeps the journal, which is safe against kills in both cases.

    On a local file system that is WAL with NORMAL: only a power failure may lose the last transactions. WAL needs
    memory that all its processes share, so on a network file system it is TRUNCATE with FULL: readers on other machines
    may read, and the writer waits for them.
    """
    if network_file_system(directory):
        connection.execute(f"PRAGMA busy_timeout = {1000 * _NETWORK_BUSY_SECONDS:.0f}")
        with suppress(sqlite3.OperationalError):  # a reader has it open in WAL mode, which stays until the next run
            connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
    else:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")


def is_in_wal_mode(file: Path) -> bool:
    """Return whether a database is in WAL mode, without opening it in SQLite."""
    with file.open("rb") as content:
        return content.read(_MODES_PLACE + 2)[_MODES_PLACE:] == _WAL_MODES


def read_stamp(file: Path) -> tuple[int, int]:
    """Return the application id and the version in the header of a database, without opening it in SQLite."""
    with file.open("rb") as content:
        header = content.read(72)
    version, application = struct.unpack(">60xI4xI", header) if header.startswith(b"SQLite format 3\0") else (0, 0)
    return application, version
