"""Writes checkpoints in a thread while training goes on."""

from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from pathlib import Path

from shoal.core.activity import Activity
from shoal.host.activity_clock import during
from shoal.train.checkpoint import Checkpoint, snapshot, write

__all__ = ["CheckpointWriter"]

HELD_BYTES = 1 << 30
"""Bytes of snapshots in memory from which `submit` waits until fewer are left to write."""


class CheckpointWriter:
    """Writes the checkpoints of a process in the order in which they are submitted.

    `submit` takes a snapshot, which a thread writes to the disk. What refers to a checkpoint is sent to the engine only
    once `written` has reached the value that `submitted` had then.

    After a checkpoint that could not be written, `check` and `flush` raise its error.
    """

    def __init__(self, directory: Path) -> None:
        self.submitted = 0
        """Number of checkpoints that the thread was given."""
        self._directory = directory
        self._pending: deque[tuple[Future[Path], int]] = deque()  # and bytes of the snapshot
        self._executor: ThreadPoolExecutor | None = None

    @property
    def written(self) -> int:
        """Number of checkpoints on the disk, of those submitted, before the first that is not."""
        while self._pending and (first := self._pending[0][0]).done() and first.exception() is None:
            self._pending.popleft()
        return self.submitted - len(self._pending)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Take a snapshot of a checkpoint to be written; wait first while earlier ones take too much memory."""
        while sum(size for future, size in self._pending if not future.done()) >= HELD_BYTES:
            wait_for_futures([future for future, _ in self._pending if not future.done()], None, FIRST_COMPLETED)
        taken = snapshot(checkpoint)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "shoal-checkpoints")
        self._pending.append((self._executor.submit(write, self._directory, taken), taken.bytes))
        self.submitted += 1

    def check(self) -> None:
        """Raise the error of the first checkpoint that could not be written, if there is one."""
        if self.written < self.submitted and (first := self._pending[0][0]).done():
            first.result()

    def flush(self) -> None:
        """Wait until all checkpoints are on the disk."""
        self.wait()
        self.check()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the thread has nothing to write, or for some seconds."""
        if self._pending:
            with during(Activity.CHECKPOINTS):
                wait_for_futures([future for future, _ in self._pending], seconds)

    def close(self) -> None:
        """Wait for the thread to end, and forget its errors."""
        if self._executor is not None:
            with during(Activity.CHECKPOINTS):
                self._executor.shutdown()
        self._executor = None
        self._pending.clear()
