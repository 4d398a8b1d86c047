import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mps_fakes as fakes
import pytest


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FIFO that `slow_runner` waits for when it is imported, until it is opened here."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    monkeypatch.setenv("GATE", str(path))
    return path


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short path, the control program in it, and a file that stands for that of the driver."""
    place = Path(tempfile.mkdtemp(prefix="mps-", dir="/tmp"))
    fakes.install(place)
    monkeypatch.setenv(fakes.DEVICE_FILE, str(place / "nvidia-uvm"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield place
    shutil.rmtree(place)
