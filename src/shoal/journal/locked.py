"""A journal that one process alone may write: how it is begun, opened and closed, and its transactions."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from shoal.core.errors import AlgorithmError, JournalError
from shoal.core.objective import objectives
from shoal.journal.codec import encode
from shoal.journal.lock import WriterLock
from shoal.journal.schema import connect, fill, migrate, open_existing, translated
from shoal.journal.view import JournalView
from shoal.paths import absolute

__all__ = ["LockedJournal"]


class LockedJournal(JournalView):
    """A study's journal, of which this process is the one writer as long as it is open.

    What was recorded before a `kill -9` is there afterwards, transactions in whole.

    Args:
        directory: of the study.
        connection: to its journal.
        lock: held on it.
        clock: seconds since 1970.
    """

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection)
        self._lock = lock
        self._clock = clock
        # In WAL mode a kill loses nothing under NORMAL; only a power cut may lose the last transactions, whole ones.
        self.tables.rows("PRAGMA synchronous = NORMAL")

    @classmethod
    def create(
        cls,
        directory: Path | str,
        study: Mapping[str, Any],
        *,
        task: bytes,
        algorithm: bytes,
        clock: Callable[[], float] = time.time,
        called: float | None = None,
    ) -> Self:
        """Begin a study in a directory, which is made if need be, and its first run.

        Args:
            directory: where the journal is to be.
            study: what the study is, in JSON values; must hold its "metric" and "mode" ("min" or "max"), or lists of
                several.
            task: the pickled task.
            algorithm: the pickled algorithm, before its first use.
            clock: seconds since 1970.
            called: as of `begin_run`.

        Raises:
            StudyExistsError: the directory holds a study.
            JournalError: the directory cannot be written, or another process is just beginning a study there.
        """
        directory = absolute(directory)
        try:
            objectives(study["metric"], study["mode"])
        except AlgorithmError as error:
            raise JournalError(
                f"a study has a metric and a mode 'min' or 'max', got {study['metric']!r}, {study['mode']!r}"
            ) from error
        values = {key: encode(value, f"the study's {key!r}") for key, value in study.items()}
        with translated(directory, begun=False), ExitStack() as undo:
            directory.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = connect(directory, "rwc")
            undo.callback(connection.close)
            fill(directory, connection, values, {"task": task, "algorithm": algorithm})
            journal = cls(directory, connection, lock, clock)
            journal.begin_run(called)
            undo.pop_all()
        return journal

    @classmethod
    def open(cls, directory: Path | str, *, clock: Callable[[], float] = time.time) -> Self:
        """Go on with a study; nothing of it changes before `begin_run`.

        Args:
            directory: of the study.
            clock: seconds since 1970.

        Raises:
            JournalError: there is none, another process is running it, or this version cannot read it.
        """
        directory = absolute(directory)
        open_existing(directory, write=True).close()  # leave no lock file where there is no study
        with translated(directory), ExitStack() as undo:
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = open_existing(directory, write=True)
            undo.callback(connection.close)
            migrate(connection)
            journal = cls(directory, connection, lock, clock)
            undo.pop_all()
        return journal

    def begin_run(self, called: float | None = None) -> None:
        """This process runs the study from now on.

        Args:
            called: when the user asked for that, from which the time of the run counts, in seconds since 1970; None:
                now.
        """
        with self.transaction():
            self.tables.rows(
                "INSERT INTO runs (pid, started, epochs) SELECT ?, ?, coalesce(sum(epoch - start), 0) FROM trials",
                os.getpid(),
                self._clock() if called is None else called,
            )

    def close(self) -> None:
        """Free the file and let another process write; may be called twice."""
        super().close()
        self._lock.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Record what is inside wholly or, after an exception or a kill, not at all; may be nested.

        Raises:
            StorageFullError: the disk is full; nothing of this transaction is recorded.
        """
        if self.tables.connection.in_transaction:
            yield
            return
        self.tables.rows("BEGIN IMMEDIATE")
        try:
            yield
            self.tables.rows("COMMIT")
        except BaseException:
            self._undone()
            if self.tables.connection.in_transaction:  # SQLite rolls back by itself after some errors
                self.tables.rows("ROLLBACK")
            raise

    def put(self, key: str, value: object) -> None:
        """What the study is has changed in one value, from now on and after a resume."""
        text = encode(value, f"the study's {key!r}")
        self.tables.rows("INSERT OR REPLACE INTO study (key, value) VALUES (?, ?)", key, text)
        self.study[key] = json.loads(text)

    def _undone(self) -> None:
        """A transaction was rolled back: what is remembered of it is to be forgotten."""

    def _many(self, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self.transaction(), translated(self.directory):
            self.tables.connection.executemany(sql, rows)
