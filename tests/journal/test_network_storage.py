"""A journal on a network file system: its mode, its readers on other machines, and its lock."""

import os
import platform
import sqlite3
import subprocess
import sys

import pytest
from journal_samples import create

from shoal.core.errors import JournalError
from shoal.host.file_system import network_file_system
from shoal.journal.lock import LockOwner, lock_owner
from shoal.journal.storage import is_in_wal_mode
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.look.snapshot import snapshot

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:40 / /shared rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /shared/of\\040mine rw,relatime - tmpfs none rw
32 22 0:42 / /bucket rw - fuse.s3fs s3fs rw
33 22 0:43 / /layers rw - fuse.fuse-overlayfs overlay rw
34 22 0:44 / /twice rw - ext4 /dev/one rw
35 22 0:45 / /twice rw - lustre mds:/x rw
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    file = tmp_path / "mountinfo"
    file.write_text(MOUNTS)
    monkeypatch.setattr("shoal.host.file_system._MOUNTS", file)
    return file


@pytest.mark.parametrize(
    ("place", "system"),
    [
        ("/home/runs", ""),
        ("/shared", "nfs4"),
        ("/shared/runs/digits", "nfs4"),
        ("/shareddata", ""),
        ("/shared/of mine/runs", ""),
        ("/bucket/runs", "fuse.s3fs"),
        ("/layers/runs", ""),
        ("/twice/runs", "lustre"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_last_deepest_mount(place, system, mounts):
    assert network_file_system(place) == system


def test_without_a_list_of_mounts_no_file_system_is_one_of_a_network(mounts):
    mounts.unlink()
    assert network_file_system("/shared") == ""


@pytest.fixture
def network(monkeypatch):
    """All paths are on a network file system."""
    for module in ("storage", "schema"):
        monkeypatch.setattr(f"shoal.journal.{module}.network_file_system", lambda path: "nfs4")


def settings(journal):
    return [journal.tables.rows(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous")]


def test_a_journal_is_in_the_mode_that_is_safe_on_its_file_system(tmp_path, monkeypatch):
    with create(tmp_path / "study") as journal:
        assert settings(journal) == ["wal", 1]
    for system, expected in (("nfs4", ["truncate", 2]), ("", ["wal", 1])):
        monkeypatch.setattr("shoal.journal.storage.network_file_system", lambda path, system=system: system)
        with Journal.open(tmp_path / "study") as journal:
            assert settings(journal) == expected
        assert is_in_wal_mode(tmp_path / "study" / "journal.sqlite") == (system == "")


@pytest.mark.usefixtures("network")
def test_readers_on_other_machines_read_a_journal_in_a_safe_mode(tmp_path, monkeypatch):
    with create(tmp_path / "study") as journal:
        assert settings(journal) == ["truncate", 2]
        monkeypatch.setattr(platform, "node", lambda: "beech")
        with JournalView.read(tmp_path / "study") as view:
            owner = view.writer()
            assert not owner.is_here
            assert snapshot(view, 0.0).host == owner.host
            with pytest.raises(JournalError, match="readonly"):
                view.tables.rows("DELETE FROM trials")


@pytest.mark.usefixtures("network")
def test_a_journal_in_wal_mode_that_another_machine_writes_is_not_read(tmp_path, monkeypatch):
    with create(tmp_path / "study") as journal:
        journal.tables.rows("PRAGMA journal_mode = WAL")
        JournalView.read(tmp_path / "study").close()
        here = platform.node()
        monkeypatch.setattr(platform, "node", lambda: "beech")
        with pytest.raises(
            JournalError, match=rf"cannot be read here while process {os.getpid()} on {here} runs it: .* look at it on"
        ):
            JournalView.read(tmp_path / "study")
    JournalView.read(tmp_path / "study").close()


def test_a_lock_of_another_machine_says_so_and_how_to_recover(tmp_path, monkeypatch):
    with create(tmp_path / "study"):
        here = platform.node()
        monkeypatch.setattr(platform, "node", lambda: "beech")
        with pytest.raises(
            JournalError,
            match=rf"process {os.getpid()} on {here} is running it; wait for its end or stop it there\. If that "
            r"machine is down, .* delete .*journal\.lock once nothing of the study runs on",
        ):
            Journal.open(tmp_path / "study")


@pytest.mark.parametrize(
    ("content", "owner"),
    [
        *[("", LockOwner(0)), ("12\n", LockOwner(12)), ("ash:12\n", LockOwner(12, "ash"))],
        *[("a:b:3", LockOwner(3, "a:b")), ("garbage", LockOwner(0)), ("ash:99\n45\n", LockOwner(0))],
    ],
)
def test_a_lock_of_an_older_version_is_read_and_one_that_names_no_process_is_no_error(content, owner, tmp_path):
    with create(tmp_path / "study"):
        (tmp_path / "study" / "journal.lock").write_text(content)
        assert lock_owner(tmp_path / "study") == owner


KILLED = """
import os, signal, sys
from shoal.journal.storage import set_journal_mode
import shoal.journal.storage as storage
storage.network_file_system = lambda path: "nfs4"
from journal_samples import create
journal = create(sys.argv[1])
journal.tables.rows("PRAGMA cache_size = 1")
journal.tables.rows("BEGIN IMMEDIATE")
for number in range(200):  # more than the cache, so that half of it is in the file
    journal.tables.rows("INSERT INTO study VALUES (?, ?)", f"key {number}", "1" * 2000)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("copied", [False, True], ids=["own", "copied"])
def test_a_reader_rolls_back_what_a_kill_has_left_half_done(copied, tmp_path, monkeypatch):
    study = tmp_path / "study"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", KILLED, study], env=environment, check=False)
    assert (study / "journal.sqlite-journal").stat().st_size > 0
    if copied:
        monkeypatch.setattr("shoal.journal.schema.writable", lambda directory: False)
    with JournalView.read(study) as view:
        assert view.tables.rows("SELECT count(*) FROM study WHERE key LIKE 'key %'") == [(0,)]
        assert view.tables.rows("PRAGMA integrity_check") == [("ok",)]
        with pytest.raises((JournalError, sqlite3.Error)):
            view.tables.rows("DELETE FROM study")
