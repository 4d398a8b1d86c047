"""What holds for all tests of fusion: one thread, and nothing that depends on the machine's speed."""

import sys
from collections.abc import Iterator

import pytest
import torch

from shoal.fuse.autotune import off


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many small tensors: one is fastest, most of all where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def no_autotuning() -> Iterator[None]:
    """Functions go their default way, unless a test turns measuring on."""
    with off():
        yield


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns after every few steps of the interpreter."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
