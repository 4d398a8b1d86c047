"""Fixtures of tests on small tensors: one thread, and nothing that depends on the machine's speed."""

from collections.abc import Iterator

import pytest
import torch

from shoal.fuse.autotune import without_autotuning


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="module")
def no_autotuning() -> Iterator[None]:
    with without_autotuning():
        yield
