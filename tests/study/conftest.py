"""Studies on small models: a job history of its own for each test, and one thread."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tasks
import torch
from plain import tune

import shoal
from shoal.train import fused_stepper


@pytest.fixture(autouse=True)
def each_has_its_own_history(own_history: None) -> None: ...


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Also of a job in this process, which would take all cores: on small tensors threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda threads: None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a study that has ended, of which each test that needs one has a copy."""
    directory = tmp_path_factory.mktemp("finished") / "study"
    return tune(tasks.Blobs(), {"lr": shoal.grid([0.01, 0.03])}, directory).directory


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path) -> shoal.Study:
    """A study of `Blobs` that has ended: two learning rates, four epochs, one job of training."""
    return shoal.Study(shutil.copytree(finished_once, tmp_path / "study"))


@pytest.fixture
def eager(fusing_pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays take eager steps, whichever way of taking them would be the fastest on this machine now."""
    monkeypatch.setattr(fused_stepper, "modes_to_try", lambda profile, members: ("eager",))


@pytest.fixture
def turn(pytestconfig: pytest.Config) -> int:
    """The seed of what is drawn at random in this run of pytest."""
    drawn: int = pytestconfig.option.turn
    return drawn
