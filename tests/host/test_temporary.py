"""Temporary directories end with their process, or with the next run after a kill."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.host.process_lock import TemporaryFolder, remove_abandoned

OWNER = """
import signal
from shoal.host.process_lock import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "socket").touch()
print(folder.path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary ones whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_a_place_whose_path_is_too_long_for_sockets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with TemporaryFolder() as mine, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(mine.path / "report"))
        assert mine.path.parent == Path("/tmp")


def test_one_for_longer_names_has_a_shorter_path_and_is_removed_as_well(place: Path) -> None:
    owner = OWNER.replace("TemporaryFolder()", f"TemporaryFolder({len(str(place)) - 1})")
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        assert theirs.parent == Path("/tmp")
        remove_abandoned()
        assert theirs.exists()
        process.kill()
    remove_abandoned()
    assert not theirs.exists()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        assert theirs.parent == place
        with TemporaryFolder() as mine:
            remove_abandoned()
            assert mine.path.is_dir()
            assert (theirs / "socket").exists()
            owner.kill()
            owner.wait()
            assert (theirs / "socket").exists()
            remove_abandoned()
            assert not theirs.exists()
            assert mine.path.is_dir()
        assert not mine.path.exists()


def test_nothing_else_is_touched(place: Path) -> None:
    with TemporaryFolder() as mine:
        name = mine.path.name
    others = [place / "shoal-mps-0", place / "shoal-run", place / "shoal-experiment"]
    for other in others:
        other.mkdir()
    (place / f"{name}-a-file").touch()
    target = place / "target"
    target.mkdir()
    (place / f"{name}-a-link").symlink_to(target)
    remove_abandoned()
    assert sorted(place.iterdir()) == sorted([*others, target, place / f"{name}-a-file", place / f"{name}-a-link"])


def test_one_that_is_just_being_made_is_not_lost(place: Path) -> None:
    def make(count: int) -> list[bool]:
        found = []
        for _ in range(count):
            with TemporaryFolder() as folder:
                found.append((folder.path / "socket").write_text("") == 0)
        return found

    with ThreadPoolExecutor(2) as pool:
        making = pool.submit(make, 100)
        while not making.done():
            remove_abandoned()
        assert all(making.result())
