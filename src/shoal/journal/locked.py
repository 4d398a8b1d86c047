"""A journal locked by its writer: creation, opening, closing and transactions."""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from shoal.journal.codec import encode
from shoal.journal.lock import WriterLock
from shoal.journal.schema import connect, create_tables, open_existing, translate_errors
from shoal.journal.storage import set_journal_mode
from shoal.journal.view import JournalView
from shoal.paths import absolute
from shoal.spec import StudySpec

__all__ = ["LockedJournal"]


class LockedJournal(JournalView):
    """A study's journal that only this process may write while it is open.

    A `kill -9` loses no committed transaction, and leaves no partial one.

    Args:
        clock: Clock, in seconds since 1970.
    """

    def __init__(
        self, directory: Path, connection: sqlite3.Connection, lock: WriterLock, clock: Callable[[], float]
    ) -> None:
        super().__init__(directory, connection)
        self._lock = lock
        self._clock = clock
        set_journal_mode(directory, connection)

    @classmethod
    def create(
        cls,
        directory: Path | str,
        spec: StudySpec,
        study: Mapping[str, Any] = MappingProxyType({}),
        *,
        task: bytes,
        algorithm: bytes,
        clock: Callable[[], float] = time.time,
        called: float | None = None,
    ) -> Self:
        """Create a study and begin its first run.

        Args:
            study: First values of those that change, see `JournalView.study`; JSON values.
            called: As in `begin_run`.

        Raises:
            StudyExistsError: the directory holds a study.
            JournalError: the directory cannot be written, or another process is creating a study there.
        """
        directory = absolute(directory)
        described = {"spec": spec.to_json(), **study}
        values = {key: encode(value, f"the study's {key!r}") for key, value in described.items()}
        with translate_errors(directory, begun=False), ExitStack() as undo:
            directory.mkdir(parents=True, exist_ok=True)
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = connect(directory, "rwc")
            undo.callback(connection.close)
            create_tables(directory, connection, values, {"task": task, "algorithm": algorithm})
            journal = cls(directory, connection, lock, clock)
            journal.begin_run(called)
            undo.pop_all()
        return journal

    @classmethod
    def open(cls, directory: Path | str, *, clock: Callable[[], float] = time.time) -> Self:
        """Open a study for writing; nothing of it changes before `begin_run`."""
        directory = absolute(directory)
        open_existing(directory, write=True).close()  # raises before a lock file is made where there is no study
        with translate_errors(directory), ExitStack() as undo:
            lock = WriterLock(directory)
            undo.callback(lock.release)
            connection = open_existing(directory, write=True)
            undo.callback(connection.close)
            journal = cls(directory, connection, lock, clock)
            undo.pop_all()
        return journal

    def begin_run(self, called: float | None = None) -> None:
        """Record that this process runs the study from now on.

        Args:
            called: Time of the user's call, in seconds since 1970, as the start of the run; None: now.
        """
        with self.transaction():
            self.tables.rows(
                "INSERT INTO runs (pid, started, epochs, before) "
                "SELECT ?, ?, coalesce(sum(epoch - start), 0), ? FROM trials",
                os.getpid(),
                self._clock() if called is None else called,
                self.last_moment(),
            )

    def close(self) -> None:
        """Close the file and free the writer's lock; may be called twice."""
        super().close()
        self._lock.release()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction; it may be nested. After an exception or a kill nothing inside is recorded."""
        if self.tables.connection.in_transaction:
            yield
            return
        self.tables.rows("BEGIN IMMEDIATE")
        try:
            yield
            self.tables.rows("COMMIT")
        except BaseException:
            self._discard_caches()
            if self.tables.connection.in_transaction:  # SQLite rolls back by itself after some errors
                self.tables.rows("ROLLBACK")
            raise

    def put(self, key: str, value: object) -> None:
        """Record a changed value of the study."""
        text = encode(value, f"the study's {key!r}")
        self.tables.rows("INSERT OR REPLACE INTO study (key, value) VALUES (?, ?)", key, text)
        self.study[key] = json.loads(text)

    def _discard_caches(self) -> None:
        """Discard caches after a rollback."""

    def _execute_many(self, sql: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self.transaction(), translate_errors(self.directory):
            self.tables.connection.executemany(sql, rows)
