"""What goes wrong when: from a seed."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.core.errors import StorageFullError
from shoal.journal.writer import Journal

__all__ = ["FAULTS", "Faults", "FaultyJournal", "Killed"]

FAULTS = {
    "kill": 0.004,
    "disk full": 0.01,
    "disk full, of a job": 0.01,
    "interrupt": 0.005,
    "start refused": 0.05,
    "crash": 0.03,
    "out of memory": 0.03,
    "hang": 0.02,
    "array fails": 0.03,
    "device lost": 0.02,
    "device held": 0.02,
    "late": 0.05,
    "repeated": 0.05,
    "reordered": 0.2,
    "devices changed": 0.02,
    "devices unknown": 0.02,
    "retry": 0.05,
    "pause": 0.05,
    "stop": 0.02,
    "policy": 0.02,
    "add trial": 0.02,
    "clone": 0.02,
    "pause study": 0.01,
    "end study": 0.002,
}
"""What may go wrong, or be asked for, and how likely it is wherever it could be."""

MOST = 3
"""Of each, in a study, at most; so it ends."""


class Killed(BaseException):
    """The process of the engine is gone at once, with all its jobs."""


class Faults:
    """What goes wrong when, from a seed.

    Args:
        seed: of the study.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"faults {seed}")
        self.counted: Counter[str] = Counter()
        """How often what has gone wrong."""
        self._left = {kind: self.random.choice([0, 0, 1, MOST]) for kind in FAULTS}

    def strikes(self, kind: str) -> bool:
        """Whether it happens here and now."""
        if not self._left[kind] or self.random.random() >= FAULTS[kind]:
            return False
        self._left[kind] -= 1
        self.counted[kind] += 1
        return True

    def moment(self) -> None:
        """The engine may be killed here.

        Raises:
            Killed: it is.
        """
        if self.strikes("kill"):
            raise Killed

    @contextmanager
    def moments(self) -> Iterator[None]:
        """The engine may be killed before and after what is done within.

        Raises:
            Killed: it is.
        """
        self.moment()
        yield
        self.moment()


class FaultyJournal(Journal):
    """A journal whose disk is full now and then, and whose process is killed before, in and after transactions."""

    faults: Faults | None = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """As it is; see the class."""
        faults = self.faults
        if faults is None or self.tables.connection.in_transaction:
            with super().transaction():
                yield
            return
        faults.moment()
        with super().transaction():
            yield
            faults.moment()
            if faults.strikes("disk full"):
                raise StorageFullError("the disk is full, as the simulation has it")
        faults.moment()
