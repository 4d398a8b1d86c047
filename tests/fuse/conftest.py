"""Fixtures of all tests of fusion: one thread, and no choice that depends on measured times."""

import sys
from collections.abc import Iterator

import pytest
from quiet import no_autotuning, one_thread

__all__ = ["no_autotuning", "often", "one_thread"]


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns after every few steps of the interpreter."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
