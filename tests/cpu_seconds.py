"""CPU seconds of each folder of tests, with those of the processes that its tests started and waited for.

Unlike wall time they hardly depend on what else the machine does, so that they show what a change of the suite saves.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

__all__ = ["CpuSeconds", "lasting"]

_lasting: list[psutil.Process] = []

BEGIN, SHARED = "imports and collection", "processes that tests share"


class CpuSeconds:
    """A plugin of pytest that prints a table at the end; processes of xdist hand theirs over."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, known = spent(), self._seconds.total()
        try:
            return (yield)
        finally:
            folder = item.nodeid.rpartition("::")[0].partition("::")[0].rpartition("/")[0]
            self._seconds[folder] += spent() - before - (self._seconds.total() - known)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> Iterator[None]:
        """What lasted until the end is of no folder."""
        before = spent()
        try:
            return (yield)
        finally:
            if nextitem is None:
                self._seconds[SHARED] += spent() - before

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            self._seconds[BEGIN] += spent() - self._seconds.total()
            session.config.workeroutput["cpu_seconds"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))  # none of one that crashed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if config.getoption("numprocesses", None):
            self._seconds[BEGIN] += sum(os.times()[:2])
        else:
            self._seconds[BEGIN] += spent() - self._seconds.total()
        terminalreporter.section("CPU seconds")
        for name, seconds in self._seconds.most_common():
            terminalreporter.line(f"{seconds:8.1f}  {name}")
        terminalreporter.line(f"{self._seconds.total():8.1f}  all")


@contextmanager
def lasting(pid: int) -> Iterator[None]:
    """A child that works for one test after another, each of which is to have what it asked for."""
    process = psutil.Process(pid)
    _lasting.append(process)
    yield
    _lasting.remove(process)


def spent() -> float:
    """CPU seconds, in user and in system mode: of this process, of what lasts, and of those that it has waited for."""
    return sum(os.times()[:4]) + sum(sum(each.cpu_times()[:4]) for each in _lasting)
