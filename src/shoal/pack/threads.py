"""Threads that share out the cores which torch would otherwise use within each of its functions."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import torch

from shoal.fuse.beside import beside

__all__ = ["Threads"]


class Threads:
    """Some threads, whose torch functions use an equal part of the cores each.

    The number of threads that torch uses within a function belongs to the thread that calls it. Setting it also sets
    the number of all threads that have not asked for theirs yet. So these ask, then set their own, and after that the
    one that made them sets its own again.

    Args:
        number: of threads.
        cores: that they have together.
    """

    def __init__(self, number: int, cores: int) -> None:
        self.number = number
        self._cores = cores
        self._pool = ThreadPoolExecutor(number, "shoal-lane")
        before = torch.get_num_threads()
        all_begun = Barrier(number)

        def begin() -> None:
            torch.get_num_threads()  # else the first function that asks would set it to what the maker has
            torch.set_num_threads(max(1, cores // number))
            all_begun.wait()

        try:
            for started in [self._pool.submit(begin) for _ in range(number)]:
                started.result()
        finally:
            torch.set_num_threads(before)

    def run(self, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Do the same work in all threads at once, and wait for all of them.

        Args:
            work: ends by itself.
            stop: makes it end soon; called when this thread is interrupted, or when the work raises in one.

        Raises:
            BaseException: what the work raised in the first of the threads in which it raised.
        """

        def accompanied() -> None:
            with beside(threads=max(1, self._cores // self.number), alone=self._cores):
                work()

        runs = [self._pool.submit(accompanied) for _ in range(self.number)]
        try:
            for run in runs:
                run.result()
        except BaseException:
            stop()
            wait(runs)
            raise
        finally:
            torch.set_num_threads(torch.get_num_threads())  # also for threads that have not asked for theirs yet

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
