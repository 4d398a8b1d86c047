"""Schema of a journal: its tables, opening, and the translation of SQLite's errors."""

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from shoal.core.errors import JournalError, StorageFullError, StudyExistsError
from shoal.host.file_system import network_file_system
from shoal.host.paths import as_given
from shoal.host.process_lock import TemporaryFolder
from shoal.host.remedy import command
from shoal.journal.lock import lock_owner
from shoal.journal.storage import is_in_wal_mode, read_stamp

__all__ = [
    "FILE_NAME",
    "VERSION",
    "checked_file",
    "connect",
    "create_tables",
    "open_existing",
    "require_read_permission",
    "translate_errors",
    "writable",
]

FILE_NAME = "journal.sqlite"
APPLICATION = int.from_bytes(b"Shoa")
"""SQLite's application id of a journal. Files with a version and without this id are older than release 0.1.0."""
VERSION = 1
_MOST_PATH_BYTES = 504
"""Longest path of a journal: SQLite takes 512 bytes, and adds "-journal"."""
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

_CHECKS = (
    # Comparisons of trials of arrays with plain PyTorch, in order; `key` is that of the jobs, and `members` the number
    # of trials of the array. `what` is "" in a row that only says that a trial was in an array, and "refused" in one
    # whose `reason` says why it trains in plain PyTorch; `difference` is NULL in both.
    """CREATE TABLE checks (
        job TEXT NOT NULL, key TEXT NOT NULL, trial INTEGER NOT NULL, members INTEGER NOT NULL, epoch INTEGER NOT NULL,
        step INTEGER NOT NULL, what TEXT NOT NULL, difference REAL, reason TEXT NOT NULL)""",
    "CREATE INDEX checks_of_trial ON checks (key, trial)",
    # What follows from them for each key; `trials` is a JSON list of the first numbers.
    """CREATE TABLE verdicts (
        key TEXT PRIMARY KEY, trials TEXT NOT NULL, members INTEGER NOT NULL, checks INTEGER NOT NULL,
        difference REAL NOT NULL, newest TEXT NOT NULL, refusal TEXT NOT NULL, epoch INTEGER NOT NULL,
        step INTEGER NOT NULL)""",
)

_MEASUREMENTS = (
    # Losses of each turn of a job that policies may compare; `number` counts the turns of a job over its suspensions.
    """CREATE TABLE quanta (
        job TEXT NOT NULL, number INTEGER NOT NULL, time REAL NOT NULL, highest REAL NOT NULL, lowest REAL NOT NULL,
        last REAL NOT NULL, steps INTEGER NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (job, number))""",
    # Use of a GPU, a row where it has changed: percent of time with a running kernel, bytes; NULL where unknown.
    "CREATE TABLE telemetry (time REAL NOT NULL, device TEXT NOT NULL, utilisation INTEGER, memory INTEGER)",
)

_DELETIONS = (
    # Ended trials without the state of optimizers, or (`weights`) without any checkpoint, in the order of deletion.
    "CREATE TABLE deletions (trial INTEGER NOT NULL, weights INTEGER NOT NULL, time REAL NOT NULL)",
)

_SCHEMA = (
    # "spec" -> specification of the study, which never changes, and values that do change, by key; all are JSON.
    "CREATE TABLE study (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    # The pickled task and algorithm.
    "CREATE TABLE blobs (name TEXT PRIMARY KEY, data BLOB NOT NULL)",
    # Events of the study: `seq` is one increasing number over proposals, reports and interventions.
    """CREATE TABLE proposals (
        seq INTEGER PRIMARY KEY, time REAL NOT NULL, free INTEGER NOT NULL, proposed TEXT NOT NULL)""",
    """CREATE TABLE reports (
        seq INTEGER PRIMARY KEY, time REAL NOT NULL, job TEXT NOT NULL, trial INTEGER NOT NULL, epoch INTEGER NOT NULL,
        state TEXT NOT NULL, reason TEXT NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL,
        checkpoint TEXT NOT NULL, best_value REAL)""",
    "CREATE UNIQUE INDEX reports_of_trial ON reports (trial, epoch, state)",
    # Reports that have changed the value of the best trial.
    "CREATE INDEX best_values ON reports (seq) WHERE best_value IS NOT NULL",
    *_INTERVENTIONS,
    # State derived from the events, and actions of the engine. A new trial gets its state in the same transaction.
    """CREATE TABLE trials (
        number INTEGER PRIMARY KEY, config TEXT NOT NULL, seed INTEGER NOT NULL, data_seed INTEGER NOT NULL,
        origin INTEGER, start INTEGER NOT NULL, state TEXT, reason TEXT, epoch INTEGER, target INTEGER,
        failures INTEGER, device TEXT, job TEXT, seconds REAL, metrics TEXT, best TEXT, objective REAL,
        violation REAL, ranked TEXT, best_epoch INTEGER, errors TEXT,
        paused_by TEXT)""",
    "CREATE INDEX trials_of_state ON trials (state, job)",
    # `trials` and `keys`, a JSON object (key of an array -> numbers of its trials), are those of the start of a job.
    # `kill_outcome` is the outcome that it has once its kill, for `kill_reason`, has ended it; "" without a kill.
    # `activities` is a JSON object: activity -> seconds; empty for a job that did not report them. `resumes` is the id
    # of the suspended job that it continues, or ""; `assists` that of the job for which it computes gradients, or "".
    """CREATE TABLE jobs (
        id TEXT PRIMARY KEY, purpose TEXT NOT NULL, device TEXT NOT NULL, trials TEXT NOT NULL, started REAL NOT NULL,
        ended REAL, outcome TEXT NOT NULL, message TEXT NOT NULL, keys TEXT NOT NULL, kill_outcome TEXT NOT NULL,
        kill_reason TEXT NOT NULL, activities TEXT NOT NULL, resumes TEXT NOT NULL, assists TEXT NOT NULL)""",
    *_JOINS,
    # Reservations of a job from a point in time on, NULL where unknown; the first is from its start.
    "CREATE TABLE reservations (job TEXT NOT NULL, time REAL NOT NULL, compute REAL, memory INTEGER, cores REAL)",
    "CREATE INDEX reservations_of_job ON reservations (job)",
    # `before` is the time of the last event of the runs before; NULL without one.
    """CREATE TABLE runs (
        number INTEGER PRIMARY KEY, pid INTEGER NOT NULL, started REAL NOT NULL, epochs INTEGER NOT NULL,
        before REAL)""",
    # Changes of devices, a row for each.
    """CREATE TABLE devices (
        time REAL NOT NULL, run INTEGER NOT NULL, name TEXT NOT NULL, node TEXT NOT NULL, node_cores REAL NOT NULL,
        kind TEXT NOT NULL, memory INTEGER NOT NULL, cores INTEGER NOT NULL, compute REAL NOT NULL,
        healthy INTEGER NOT NULL, reason TEXT NOT NULL)""",
    *_CHECKS,
    *_MEASUREMENTS,
    *_DELETIONS,
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)


def checked_file(directory: Path) -> Path:
    """Return the path of the journal, without links; JournalError if it is too long for SQLite."""
    file = (directory / FILE_NAME).resolve()
    if (size := len(os.fsencode(file))) > _MOST_PATH_BYTES:
        raise JournalError(
            f"the path of the journal has {size} bytes, and SQLite takes at most {_MOST_PATH_BYTES}; choose a shorter "
            f"directory than {directory}"
        )
    return file


def connect(directory: Path, mode: Literal["ro", "rw", "rwc"]) -> sqlite3.Connection:
    """A connection in autocommit mode; transactions need explicit BEGIN and COMMIT."""
    uri = f"{checked_file(directory).as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)


def open_existing(directory: Path, *, write: bool) -> sqlite3.Connection:
    """A connection to an existing journal.

    If this process may not write the directory, it reads a copy in memory: SQLite reads a journal in WAL mode only with
    a further file beside it, which this process cannot make, or which its owner could not write.
    """
    with translate_errors(directory), require_read_permission(directory):
        connection = connect(directory, "rw") if _is_written_here(directory) else _open_checked(directory, write)
        if not write:
            connection.execute("PRAGMA query_only = ON")
    return connection


def _is_written_here(directory: Path) -> bool:
    """Whether this process writes the journal, so it has been checked. Its files are only opened by SQLite then: when a
    process closes any descriptor of a file, it loses all its POSIX locks on the file, those of SQLite included.
    """
    owner = lock_owner(directory) if _file_exists(directory / FILE_NAME) else None
    return owner is not None and owner.is_this_process


def _open_checked(directory: Path, write: bool) -> sqlite3.Connection:
    if not _has_tables(directory):
        raise JournalError(f"there is no study in {directory}; name the directory of one, or begin it with shoal run")
    own = writable(directory)
    if write and not own:
        raise JournalError(
            f"the study in {directory} cannot be resumed, because this process may not write its journal; shoal "
            "status only reads it, and a copy of the directory can be resumed"
        )
    if wal := is_in_wal_mode(directory / FILE_NAME):
        _check_readable_here(directory)
    # In another mode than WAL a reader has to be able to roll back what a kill has left half done.
    return connect(directory, "ro" if wal and not write else "rw") if own else _in_memory_copy(directory)


def _has_tables(directory: Path) -> bool:
    """Whether the tables of a journal are there. The files are only read: SQLite may change them when
    it closes them.
    """
    file = directory / FILE_NAME
    if not _file_exists(file) or not file.stat().st_size:
        return False
    application, version = read_stamp(file)
    rollback = directory / f"{FILE_NAME}-journal"
    unfinished = _file_exists(rollback) and rollback.stat().st_size > 0
    # The file may lack a transaction that is in the WAL, or hold one that a kill has left half done.
    if unfinished or not (application or version):
        with closing(_in_memory_copy(directory)) as copy:
            application, version, tables = (
                copy.execute(f"SELECT * FROM {source}").fetchone()[0]
                for source in ("pragma_application_id", "pragma_user_version", "(SELECT count(*) FROM sqlite_master)")
            )
        if not (application or version or tables):
            return False
    if application != APPLICATION and (application or not version):
        raise JournalError(f"{file} is a database of something else; choose another directory")
    if (application, version) != (APPLICATION, VERSION):
        before = "" if application else " of the time before release 0.1.0"
        raise JournalError(
            f"the journal {file} is of version {version}{before}, and this Shoal reads version {VERSION} of release "
            "0.1.0 alone; finish its study with the Shoal that wrote it, or start a new directory"
        )
    return True


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


def create_tables(
    directory: Path, connection: sqlite3.Connection, study: Mapping[str, str], blobs: Mapping[str, bytes]
) -> None:
    """Create the tables and write the study in one transaction, before WAL mode, so that the file itself has its
    version.
    """
    if _has_tables(directory):
        (reported,) = connection.execute("SELECT EXISTS (SELECT 1 FROM reports)").fetchone()
        if not reported:
            raise StudyExistsError(
                f"{directory} already holds a study, in which no trial has reported anything. Remove the directory, "
                f"begin one in another (directory=, --directory), or resume it ({command('resume', directory)})"
            )
        raise StudyExistsError(
            f"{directory} already holds a study. Resume it ({command('resume', directory)}; in Python "
            f"shoal.resume({str(as_given(directory))!r})), begin a new study in another directory (directory=, "
            "--directory), or remove this one first"
        )
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
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return False


def writable(directory: Path) -> bool:
    """Whether this process may write the journal in a directory."""
    return all(os.access(path, os.W_OK) for path in (directory, directory / FILE_NAME))


@contextmanager
def require_read_permission(directory: Path) -> Iterator[None]:
    """Translate errors of missing read permission."""
    try:
        yield
    except PermissionError as error:
        raise JournalError(
            f"the study in {directory} cannot be read: {error.filename} ({error.strerror}); ask its owner for "
            "permission to read its files"
        ) from error


_STORAGE_FULL_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,  # a quota or a limit on the size of files
    sqlite3.SQLITE_IOERR_SHMSIZE,
}


@contextmanager
def translate_errors(directory: Path, *, begun: bool = True) -> Iterator[None]:
    """Translate errors of SQLite and of the file system into errors with a remedy."""
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
