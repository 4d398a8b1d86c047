"""SQL access to the tables of a journal: typed rows, and errors that say what is damaged."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import JournalError
from shoal.journal.schema import FILE_NAME, translated

__all__ = ["JournalTables"]

_T = TypeVar("_T")

_WHOLE = ("number", "seed", "data_seed", "start", "epoch", "target", "failures", "seq", "trial", "pid", "epochs")
_NUMBER = ("seconds", "started")
_TEXT = (
    "config",
    "state",
    "reason",
    "device",
    "metrics",
    "best",
    "id",
    "purpose",
    "trials",
    "outcome",
    "request",
    "verb",
)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys((*_WHOLE, "free"), (int,)),
    **dict.fromkeys(_NUMBER, (int, float)),
    **dict.fromkeys((*_TEXT, "message", "keys", "key", "value", "proposed", "job", "name", "node", "kind"), (str,)),
    **dict.fromkeys(("origin", "memory"), (int, type(None))),
    **dict.fromkeys(("objective", "ended", "time", "compute", "cores", "node_cores"), (int, float, type(None))),
    **dict.fromkeys(("data",), (bytes,)),
}
"""Types of the columns by their names, which mean the same in all tables. SQLite itself takes any value."""


class JournalTables:
    """The tables of one journal, read and written by SQL.

    Args:
        directory: Directory of the study.
        connection: Connection to its journal, in autocommit mode.
    """

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        self.directory = directory
        self.connection = connection

    def rows(self, sql: str, *values: object) -> list[Any]:
        """All rows that a statement returns.

        Args:
            sql: One statement.
            values: Its parameters.

        Raises:
            JournalError: a column holds a value of another type than its name says.
        """
        with translated(self.directory):
            cursor = self.connection.execute(sql, values)
            rows = cursor.fetchall()
        names = [column for column, *_ in cursor.description or ()]
        kinds = [(place, _KINDS[name]) for place, name in enumerate(names) if name in _KINDS]
        for row in rows:
            for place, kind in kinds:
                if not isinstance(row[place], kind):
                    raise self.damaged(f"`{names[place]}` is {row[place]!r} where `{names[0]}` is {row[0]!r}")
        return rows

    def read(self, what: str, decode: Callable[[tuple[Any, ...]], _T], sql: str, *values: object) -> list[_T]:
        """All rows that a query returns, each as an object; see `decoded` for the arguments and the error."""
        return [self.decoded(what, decode, row) for row in self.rows(sql, *values)]

    def decoded(self, what: str, decode: Callable[[tuple[Any, ...]], _T], row: tuple[Any, ...]) -> _T:
        """One row as an object.

        Args:
            what: Noun for an error message: "trial", "job", "report" or "intervention".
            decode: Function of `shoal.journal.codec` for rows of this table.
            row: The row, its id first.

        Raises:
            JournalError: a column of the row cannot be decoded.
        """
        with self.sound(f"{what} {row[0]!r}"):
            return decode(row)

    @contextmanager
    def sound(self, what: str) -> Iterator[None]:
        """Turn decoding errors inside the block into an error that names the damaged part.

        Args:
            what: Name of the part that is decoded.

        Raises:
            JournalError: decoding failed.
        """
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # JSON, states and types of other values
            raise self.damaged(f"{what} is not understood ({type(error).__name__}: {error})") from error

    def damaged(self, how: str) -> JournalError:
        """An error that says how the journal is damaged, with the remedy."""
        file = self.directory / FILE_NAME
        return JournalError(f"the journal {file} is damaged: {how}; restore an older copy of it, if there is one")
