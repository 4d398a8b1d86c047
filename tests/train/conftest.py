"""Fixtures for studies on small models: a job history per test, and one thread."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def each_has_its_own_history(own_history: None) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Limit jobs in this process to one thread; with small tensors, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        yield
    torch.set_num_threads(threads)
