"""Processes share compiled code, and know of one another which steps they compile."""

import errno
import fcntl
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shoal.fuse.compile_cache import CompileRecord, use_shared_directory

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "cache"


def test_compiled_code_lies_in_the_cache_directory(cache: Path) -> None:
    directory = use_shared_directory()
    assert directory is not None
    assert directory.parent == cache
    assert directory.is_dir()
    assert os.environ[VARIABLE] == str(directory)


def test_a_directory_of_the_user_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(cache / "own"))
    assert use_shared_directory() == cache / "own"
    assert os.environ[VARIABLE] == str(cache / "own")


def test_a_cache_that_cannot_be_written_leaves_torch_its_own(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file")
    assert use_shared_directory() is None
    assert VARIABLE not in os.environ
    assert "Set SHOAL_CACHE to a directory that can be written" in caplog.text
    record = CompileRecord("step")
    assert record.begin()
    record.end(compiled=True)
    assert not record.exists


def test_a_directory_that_cannot_be_written_leaves_torch_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).parent != cache)
    assert use_shared_directory() is None
    assert use_shared_directory() is None
    assert VARIABLE not in os.environ
    assert caplog.text.count("Permission denied") == 1


@pytest.mark.usefixtures("cache")
def test_users_do_not_share_code(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = use_shared_directory()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert use_shared_directory() not in (mine, None)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [
        pytest.param(os, "write", errno.ENOSPC, id="the disk is full"),
        pytest.param(fcntl, "flock", errno.ENOLCK, id="the file system has no locks"),
        pytest.param(Path, "stat", errno.EACCES, id="the record cannot be read"),
    ],
)
def test_without_a_usable_record_every_process_may_compile(
    owner: object, name: str, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object, **settings: object) -> None:
        raise OSError(code, os.strerror(code), f"{name} in {os.environ['SHOAL_CACHE']}")

    assert use_shared_directory() is not None
    one, two = CompileRecord(name), CompileRecord(name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        for record in (one, two):
            assert record.begin()
            record.end(compiled=True)
            assert not record.exists
    assert caplog.text.count(os.strerror(code)) == 1


@pytest.mark.usefixtures("cache")
def test_one_process_compiles_at_a_time() -> None:
    one, two, other = CompileRecord("step"), CompileRecord("step"), CompileRecord("another step")
    assert one.begin()
    assert not two.begin()
    assert other.begin()
    one.end(compiled=False)
    assert not one.exists
    assert two.begin()
    two.end(compiled=True)
    assert (one.exists, two.exists, other.exists) == (True, True, False)


def hold(begun: Connection) -> None:
    begun.send(CompileRecord("step").begin())
    begun.recv()


@pytest.mark.usefixtures("cache")
def test_a_killed_process_leaves_the_right_to_others() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    assert ours.recv()
    mine = CompileRecord("step")
    assert not mine.begin()
    process.kill()
    process.join()
    assert mine.begin()
    assert not mine.exists
    process.close()
