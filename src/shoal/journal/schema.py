"""Schema of a journal: its tables, opening, migration, and the translation of SQLite's errors."""

import errno
import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Literal

from shoal.cluster.file_system import network_file_system
from shoal.cluster.temporary import TemporaryFolder
from shoal.core.errors import JournalError, StorageFullError, StudyExistsError
from shoal.journal.lock import lock_owner
from shoal.journal.storage import is_in_wal_mode, set_journal_mode
from shoal.remedy import command

__all__ = [
    "FILE_NAME",
    "VERSION",
    "connect",
    "create_tables",
    "migrate",
    "open_existing",
    "require_read_permission",
    "translate_errors",
    "writable",
]

FILE_NAME = "journal.sqlite"
VERSION = 11
_BUSY_SECONDS = 10.0
_COPIES = 20
_COPY_PAUSE_SECONDS = 0.05

_JOINS = (
    # Trials that joined a job after its start, in order.
    "CREATE TABLE joins (job TEXT NOT NULL, key TEXT NOT NULL, trial INTEGER NOT NULL)",
    "CREATE INDEX joins_of_job ON joins (job, trial)",
)

_INTERVENTIONS = (
    # Requests of users and their results: a row when a request is carried out or refused.
    """CREATE TABLE interventions (
        seq INTEGER PRIMARY KEY, time REAL NOT NULL, request TEXT NOT NULL, verb TEXT NOT NULL, trials TEXT NOT NULL,
        devices TEXT NOT NULL, text TEXT NOT NULL, refused TEXT NOT NULL)""",
    "CREATE INDEX interventions_of_request ON interventions (request)",
)

_MEASUREMENTS = (
    # Losses of each turn of a job that policies may compare; `number` counts the turns of a job over its suspensions.
    """CREATE TABLE quanta (
        job TEXT NOT NULL, number INTEGER NOT NULL, time REAL NOT NULL, highest REAL NOT NULL, lowest REAL NOT NULL,
        last REAL NOT NULL, steps INTEGER NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (job, number))""",
    # Use of a GPU, a row where it has changed: percent of time with a running kernel, bytes; NULL where unknown.
    "CREATE TABLE telemetry (time REAL NOT NULL, device TEXT NOT NULL, utilisation INTEGER, memory INTEGER)",
)

_SCHEMA = (
    # Values of the study: key -> JSON; the pickled task and algorithm.
    "CREATE TABLE study (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE blobs (name TEXT PRIMARY KEY, data BLOB NOT NULL)",
    # Events of the study: `seq` is one increasing number over proposals, reports and interventions.
    """CREATE TABLE proposals (
        seq INTEGER PRIMARY KEY, time REAL NOT NULL, free INTEGER NOT NULL, proposed TEXT NOT NULL)""",
    """CREATE TABLE reports (
        seq INTEGER PRIMARY KEY, time REAL NOT NULL, job TEXT NOT NULL, trial INTEGER NOT NULL, epoch INTEGER NOT NULL,
        state TEXT NOT NULL, reason TEXT NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL,
        checkpoint TEXT NOT NULL DEFAULT '')""",
    "CREATE UNIQUE INDEX reports_of_trial ON reports (trial, epoch, state)",
    *_INTERVENTIONS,
    # State derived from the events, and actions of the engine.
    """CREATE TABLE trials (
        number INTEGER PRIMARY KEY, config TEXT NOT NULL, seed INTEGER NOT NULL, data_seed INTEGER NOT NULL,
        origin INTEGER, start INTEGER NOT NULL,
        state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', epoch INTEGER NOT NULL DEFAULT 0,
        target INTEGER NOT NULL, failures INTEGER NOT NULL DEFAULT 0, device TEXT NOT NULL DEFAULT '',
        job TEXT NOT NULL DEFAULT '', seconds REAL NOT NULL DEFAULT 0, metrics TEXT NOT NULL DEFAULT '{}',
        best TEXT NOT NULL DEFAULT '{}', objective REAL)""",
    # A job as it was started. `keys` is a JSON object: key of an array -> numbers of its trials; in old journals a list
    # of keys. `kill_reason` is the outcome after a kill, with its reason: "hung: showed no progress ...".
    # `activities` is a JSON object: activity -> seconds; empty for a job that did not report them. `resumes` is the id
    # of the suspended job that it continues, or ""; `assists` that of the job for which it computes gradients, or "".
    """CREATE TABLE jobs (
        id TEXT PRIMARY KEY, purpose TEXT NOT NULL, device TEXT NOT NULL, trials TEXT NOT NULL, started REAL NOT NULL,
        ended REAL, outcome TEXT NOT NULL DEFAULT '', message TEXT NOT NULL DEFAULT '', keys TEXT NOT NULL,
        kill_reason TEXT NOT NULL DEFAULT '', activities TEXT NOT NULL DEFAULT '{}',
        resumes TEXT NOT NULL DEFAULT '', assists TEXT NOT NULL DEFAULT '')""",
    *_JOINS,
    # Reservations of a job from a point in time on, NULL where unknown; the first is from its start.
    "CREATE TABLE reservations (job TEXT NOT NULL, time REAL NOT NULL, compute REAL, memory INTEGER, cores REAL)",
    "CREATE INDEX reservations_of_job ON reservations (job)",
    """CREATE TABLE runs (
        number INTEGER PRIMARY KEY, pid INTEGER NOT NULL, started REAL NOT NULL, epochs INTEGER NOT NULL)""",
    # Changes of devices, a row for each.
    """CREATE TABLE devices (
        time REAL NOT NULL, run INTEGER NOT NULL, name TEXT NOT NULL, node TEXT NOT NULL, node_cores REAL NOT NULL,
        kind TEXT NOT NULL, memory INTEGER NOT NULL, cores INTEGER NOT NULL, compute REAL NOT NULL,
        healthy INTEGER NOT NULL, reason TEXT NOT NULL)""",
    *_MEASUREMENTS,
    f"PRAGMA user_version = {VERSION}",
)


def _move_interventions(connection: sqlite3.Connection) -> None:
    """Move interventions from the table study to their own table.

    They were a list; retries were a mapping of each trial to the `seq` before its first retry. Proposals and reports
    are renumbered to make room between them.
    """
    keys = "('interventions', 'retried')"
    study = {k: json.loads(v) for k, v in connection.execute(f"SELECT key, value FROM study WHERE key IN {keys}")}
    events = "(SELECT seq, time FROM asks UNION ALL SELECT seq, time FROM reports)"
    rows: list[tuple[int, tuple[object, ...]]] = []
    for each in study.get("interventions", ()):
        query = f"SELECT coalesce(max(seq), 0) FROM {events} WHERE time <= ?"
        ((after,),) = connection.execute(query, (each["time"],))
        texts = json.dumps(each["trials"]), "[]", each["text"], json.dumps(each["refused"])
        rows.append((after, (each["time"], each["request"], each["verb"], *texts)))
    retried: dict[int, list[int]] = {}
    for trial, after in study.get("retried", {}).get("after", {}).items():
        retried.setdefault(after, []).append(int(trial))
    for after, trials in retried.items():
        ((moment,),) = connection.execute(f"SELECT coalesce(max(time), 0) FROM {events} WHERE seq <= ?", (after,))
        rows.append((after, (moment, "", "retry", json.dumps(trials), "[]", "", "[]")))
    rows.sort(key=itemgetter(0))
    stride = len(rows) + 1
    for table in ("asks", "reports") if rows else ():
        connection.execute(f"UPDATE {table} SET seq = -seq * {stride}")  # negative first: numbers stay unique
        connection.execute(f"UPDATE {table} SET seq = -seq")
    connection.executemany(
        "INSERT INTO interventions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [(after * stride + position, *row) for position, (after, row) in enumerate(rows, 1)],
    )
    connection.execute(f"DELETE FROM study WHERE key IN {keys}")


_RENAMED_VALUES = {
    "held": "paused_trials",
    "tried": "common_failure_trials",
    "ended": "end_requested",
    "over": "ended",
}
"""Key of a value of the study in versions 3 to 5 -> its present key; renamed in this order."""

_MIGRATIONS: Mapping[int, Sequence[str | Callable[[sqlite3.Connection], None]]] = {
    3: ("ALTER TABLE trials RENAME COLUMN array TO job", *_JOINS),
    4: ("ALTER TABLE jobs ADD COLUMN killed TEXT NOT NULL DEFAULT ''", *_INTERVENTIONS, _move_interventions),
    5: (
        "ALTER TABLE asks RENAME TO proposals",
        "ALTER TABLE promises RENAME TO reservations",
        "DROP INDEX promises_of_job",
        "CREATE INDEX reservations_of_job ON reservations (job)",
        "ALTER TABLE jobs RENAME COLUMN killed TO kill_reason",
        "UPDATE jobs SET purpose = 'signature' WHERE purpose = 'survey'",
        "UPDATE jobs SET outcome = 'orphaned' WHERE outcome = 'lost'",
        *(f"UPDATE study SET key = '{key}' WHERE key = '{old}'" for old, key in _RENAMED_VALUES.items()),
    ),
    6: ("ALTER TABLE jobs ADD COLUMN activities TEXT NOT NULL DEFAULT '{}'",),
    7: (
        "ALTER TABLE jobs ADD COLUMN resumes TEXT NOT NULL DEFAULT ''",
        "UPDATE jobs SET resumes = substr(message, 14, instr(message || char(10), char(10)) - 14) "
        "WHERE message LIKE 'goes on with %'",
        *_MEASUREMENTS,
    ),
    8: tuple(
        f"""UPDATE jobs SET activities = replace(activities, '"{old}":', '"{new}":')"""
        for old, new in (("survey", "signature"), ("races", "autotune"))
    ),
    9: ("ALTER TABLE jobs ADD COLUMN assists TEXT NOT NULL DEFAULT ''",),
    10: (
        "ALTER TABLE reports ADD COLUMN checkpoint TEXT NOT NULL DEFAULT ''",
        "UPDATE reports SET checkpoint = printf('%06d-000000', epoch) WHERE state = 'paused'",
    ),
}
"""Version -> statements, and functions of the connection, that make the next version of it."""


def connect(directory: Path, mode: Literal["ro", "rw", "rwc"]) -> sqlite3.Connection:
    """A connection in autocommit mode; transactions need explicit BEGIN and COMMIT.

    Args:
        directory: Directory of the study.
        mode: "ro": read only; "rw": read and write; "rwc": create as well.
    """
    uri = f"{(directory / FILE_NAME).resolve().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)


def open_existing(directory: Path, *, write: bool) -> sqlite3.Connection:
    """A connection to an existing journal, of this version or, for writing, of an older one to `migrate`.

    If this process may not write the directory, it reads a copy in memory: SQLite reads a journal in WAL mode only with
    a further file beside it, which this process cannot make, or which its owner could not write. It reads a copy of an
    older version, too, since the process that runs the study may be of that version.

    Args:
        directory: Directory of the study.
        write: Whether the journal is to be written.

    Raises:
        JournalError: there is no journal, or one that this process or this version cannot read or write.
    """
    nothing = JournalError(f"there is no study in {directory}; name the directory of one, or begin it with shoal run")
    with translate_errors(directory), require_read_permission(directory):
        if not _file_exists(directory / FILE_NAME):
            raise nothing
        own = writable(directory)
        if write and not own:
            raise JournalError(
                f"the study in {directory} cannot be resumed, because this process may not write its journal; shoal "
                "status only reads it, and a copy of the directory can be resumed"
            )
        if wal := is_in_wal_mode(directory / FILE_NAME):
            _check_readable_here(directory)
        with ExitStack() as undo:
            # In another mode than WAL a reader has to be able to roll back what a kill has left half done.
            connection = connect(directory, "ro" if wal and not write else "rw") if own else _in_memory_copy(directory)
            undo.callback(connection.close)
            if not write:
                connection.execute("PRAGMA query_only = ON")
            version = _version(connection)
            if version in _MIGRATIONS and not write:
                undo.close()
                connection = _in_memory_copy(directory)
                undo.callback(connection.close)
                migrate(connection)
            if version == VERSION or version in _MIGRATIONS:
                undo.pop_all()
                return connection
    if version == 0:
        raise nothing
    raise JournalError(
        f"the study in {directory} was written with journal version {version}, this Shoal reads versions "
        f"{min(_MIGRATIONS)} to {VERSION}; use the version of Shoal that began it"
    )


def _check_readable_here(directory: Path) -> None:
    """Check that a journal in WAL mode is not being written on another machine."""
    system = network_file_system(directory)
    owner = lock_owner(directory) if system else None
    if owner is not None and not owner.is_here:
        raise JournalError(
            f"the study in {directory} cannot be read here while {owner} runs it: its journal is in WAL mode, which "
            f"machines cannot share over {system}; look at it on {owner.host}, or stop it and resume it, which changes "
            "the mode"
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Migrate a journal to this version. Each version step is one transaction."""
    for version in range(_version(connection), VERSION):
        connection.execute("BEGIN IMMEDIATE")
        for change in (*_MIGRATIONS[version], f"PRAGMA user_version = {version + 1}"):
            if isinstance(change, str):
                connection.execute(change)
            else:
                change(connection)
        connection.execute("COMMIT")


def create_tables(
    directory: Path, connection: sqlite3.Connection, study: Mapping[str, str], blobs: Mapping[str, bytes]
) -> None:
    """Create the tables and write the values of the study in one transaction.

    Args:
        directory: Directory of the study.
        connection: Connection made with mode "rwc".
        study: Key -> JSON text.
        blobs: Name -> bytes.

    Raises:
        StudyExistsError: the journal exists already.
        JournalError: the file is another database.
    """
    if _version(connection):
        raise StudyExistsError(
            f"{directory} already holds a study; go on with it ({command('resume', directory)}) or choose another "
            "directory"
        )
    ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    if tables:
        raise JournalError(f"{directory / FILE_NAME} is a database of something else; choose another directory")
    set_journal_mode(directory, connection)
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.executemany("INSERT INTO study (key, value) VALUES (?, ?)", study.items())
    connection.executemany("INSERT INTO blobs (name, data) VALUES (?, ?)", blobs.items())
    connection.execute("COMMIT")


def _in_memory_copy(directory: Path) -> sqlite3.Connection:
    with TemporaryFolder() as temporary:
        for path, content in _read_consistently(directory).items():
            (temporary.path / path.name).write_bytes(content)
        with closing(connect(temporary.path, "rw")) as source:
            memory = sqlite3.connect(":memory:", isolation_level=None)
            source.backup(memory)
    return memory


def _read_consistently(directory: Path) -> Mapping[Path, bytes]:
    """Read consistent contents of the journal's files, by reading twice until both reads are equal."""
    paths = [directory / name for name in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-journal")]
    for _ in range(_COPIES):
        first, second = ({path: path.read_bytes() for path in paths if _file_exists(path)} for _ in range(2))
        if first == second:
            return first
        time.sleep(_COPY_PAUSE_SECONDS)
    raise JournalError(f"the study in {directory} is being written too fast to be copied; try again in a moment")


def _file_exists(path: Path) -> bool:
    """Whether a file exists."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return False


def writable(directory: Path) -> bool:
    """Whether this process may write the journal in a directory."""
    return all(os.access(path, os.W_OK) for path in (directory, directory / FILE_NAME))


@contextmanager
def require_read_permission(directory: Path) -> Iterator[None]:
    """Translate errors of missing read permission.

    Raises:
        JournalError: this process may not read a file of the study.
    """
    try:
        yield
    except PermissionError as error:
        raise JournalError(
            f"the study in {directory} cannot be read: {error.filename} ({error.strerror}); ask its owner for "
            "permission to read its files"
        ) from error


def _version(connection: sqlite3.Connection) -> int:
    """Version of the tables; 0 if there are none."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


_STORAGE_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,  # a quota or a limit on the size of files
    sqlite3.SQLITE_IOERR_SHMSIZE,
}


@contextmanager
def translate_errors(directory: Path, *, begun: bool = True) -> Iterator[None]:
    """Translate errors of SQLite and of the file system into errors with a remedy.

    Args:
        directory: Directory of the study.
        begun: Whether the study exists already and can be resumed.

    Raises:
        StorageFullError: the disk is full.
        JournalError: the journal or its directory cannot be used.
    """
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        raise  # a bug of the caller
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) in _STORAGE_FULL_CODES:
            raise _storage_full_error(directory, error, begun) from error
        raise JournalError(f"the journal {directory / FILE_NAME} cannot be used: {error}") from error
    except OSError as error:
        if isinstance(error, StorageFullError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _storage_full_error(directory, error, begun) from error
        raise JournalError(f"cannot keep a study in {directory}: {error.strerror}; choose another directory") from error


def _storage_full_error(directory: Path, error: Exception, begun: bool) -> StorageFullError:
    if not begun:
        return StorageFullError(
            f"no space is left to begin a study in {directory} ({error}), and there is none yet. Free some space, then "
            "begin it again"
        )
    return StorageFullError(
        f"no space is left for the journal in {directory} ({error}); everything recorded so far is intact. "
        f"Free some space, then: {command('resume', directory)}"
    )
