"""Studies on small models: a job history of its own for each test, and one thread."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.core.demand import Profile
from shoal.cost.history import history_path
from shoal.worker import run
from shoal.worker.profile import measure


@pytest.fixture(autouse=True)
def own_history() -> None:
    """An empty one where the last test had its own: in an environment of its own a test would have no warm server."""
    history_path().unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Also of a job in this process, which would take all cores: on small tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def fusing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been measured so, whatever else this machine is doing."""

    def sixteen_in_the_time_of_one(*arguments: Any) -> Profile:
        return replace(measure(*arguments), step_seconds={1: 1e-3, 16: 1e-3}, fuse_seconds={})

    monkeypatch.setattr(run, "measure", sixteen_in_the_time_of_one)
