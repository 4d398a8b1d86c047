"""Beginning a study, continuing with it, and every directory in which that is impossible."""

import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from journal_samples import SPEC, create, group, report
from support.recorded import RecordedJournal

from shoal.core.errors import JournalError, StudyExistsError
from shoal.host.process_lock import remove_abandoned
from shoal.journal.lock import LockOwner, lock_owner


@pytest.fixture
def journal(tmp_path):
    with create(tmp_path / "study") as journal:
        yield journal


def test_a_study_that_is_only_opened_was_not_run(tmp_path):
    with create(tmp_path) as journal:
        journal.record_proposal(1, [group([0], 5)])
        journal.record_reports("1", [report(0, 1), report(0, 2)])
    with RecordedJournal.open(tmp_path) as journal:
        assert [run.epochs for run in journal.runs()] == [0]
        journal.begin_run()
        assert [run.epochs for run in journal.runs()] == [0, 2]


@pytest.mark.parametrize(
    ("reported", "advice"),
    [
        pytest.param(True, r"\. Resume it \(shoal resume .*shoal\.resume\('.*another directory", id="with reports"),
        pytest.param(False, "in which no trial has reported anything. Remove the directory, begin", id="without"),
    ],
)
def test_a_directory_with_a_study_is_left_alone(journal, reported, advice):
    if reported:
        journal.record_proposal(1, [group([0], 5)])
        journal.record_reports("1", [report(0, 1)])
    journal.close()
    with pytest.raises(StudyExistsError, match=f"already holds a study.*{advice}"):
        create(journal.directory)
    with RecordedJournal.open(journal.directory) as again:
        assert again.spec == SPEC


@pytest.mark.parametrize("use", [RecordedJournal.open, RecordedJournal.read], ids=["open", "read"])
def test_a_directory_without_a_study_is_named_and_left_alone(tmp_path, use):
    with pytest.raises(JournalError, match=f"no study in {tmp_path}"):
        use(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("use", [create, RecordedJournal.open, RecordedJournal.read], ids=["create", "open", "read"])
def test_a_file_that_is_not_a_database_is_named(tmp_path, use):
    (tmp_path / "journal.sqlite").write_text("notes\n" * 1000)
    with pytest.raises(JournalError, match=r"journal\.sqlite cannot be used: file is not a database"):
        use(tmp_path)
    assert (tmp_path / "journal.sqlite").read_text() == "notes\n" * 1000


def test_a_database_of_something_else_is_left_alone(tmp_path):
    other = sqlite3.connect(tmp_path / "journal.sqlite")
    other.execute("CREATE TABLE notes (text)")
    other.close()
    with pytest.raises(JournalError, match="database of something else"):
        create(tmp_path)


def test_a_create_that_was_killed_before_it_was_whole_may_be_repeated(tmp_path):
    empty = sqlite3.connect(tmp_path / "journal.sqlite")
    empty.execute("PRAGMA journal_mode = WAL")
    empty.close()
    with pytest.raises(JournalError, match="no study"):
        RecordedJournal.read(tmp_path)
    with create(tmp_path) as journal:
        assert journal.trials() == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=f"cannot keep a study in {tmp_path}/file/study: Not a directory"):
        create(tmp_path / "file" / "study")


def test_a_value_that_cannot_be_stored_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(JournalError, match="the study's 'note' cannot be stored"):
        RecordedJournal.create(tmp_path / "study", SPEC, {"note": object()}, task=b"", algorithm=b"")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("use", [create, RecordedJournal.open], ids=["create", "open"])
def test_a_second_journal_of_one_process_is_refused(journal, use):
    with pytest.raises(JournalError, match="this process has it open already"):
        use(journal.directory)
    journal.close()
    with RecordedJournal.open(journal.directory):
        pass


@pytest.mark.parametrize("use", [RecordedJournal.open, RecordedJournal.read], ids=["open", "read"])
def test_a_look_in_the_process_of_the_writer_leaves_it_the_locks_of_sqlite(journal, use):
    with suppress(JournalError):
        use(journal.directory).close()
    look = (
        f"import sqlite3; sqlite3.connect({str(journal.directory / 'journal.sqlite')!r}).execute('SELECT * FROM study')"
    )
    subprocess.run([sys.executable, "-c", look], check=True)  # the last to close it would delete the WAL
    journal.put("note", "seen by all")
    with RecordedJournal.read(journal.directory) as view:
        assert view.study["note"] == "seen by all"


def test_a_second_process_is_refused_and_told_of_the_first(journal):
    code = f"from shoal.journal.writer import Journal; Journal.open({str(journal.directory)!r})"
    second = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert f"another process ({os.getpid()}) is running it; wait for its end or stop it" in second.stderr


FORKING = """
import multiprocessing, os, subprocess, sys, time
from journal_samples import create

def outlive():
    print(os.getpid(), flush=True)
    time.sleep(600)

journal = create(sys.argv[1])
{start}
time.sleep(600)
"""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("if os.fork() == 0: outlive()", id="os.fork"),
        pytest.param("multiprocessing.get_context('fork').Process(target=outlive).start()", id="multiprocessing"),
        pytest.param(
            "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
            "subprocess.Popen([sys.executable, '-c', code], close_fds=False)",
            id="subprocess",
        ),
    ],
)
def test_a_child_that_outlives_its_engine_does_not_keep_the_study(start, tmp_path):
    engine = subprocess.Popen(
        [sys.executable, "-c", FORKING.format(start=start), tmp_path / "study"],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with engine:
        child = int(engine.stdout.readline())
        try:
            assert lock_owner(tmp_path / "study") == LockOwner(engine.pid, platform.node())
            engine.kill()
            engine.wait()
            os.kill(child, 0)
            assert lock_owner(tmp_path / "study") is None
            with RecordedJournal.open(tmp_path / "study") as again:
                assert again.spec == SPEC
        finally:
            os.kill(child, signal.SIGKILL)


def test_readers_know_whether_the_study_is_run(journal):
    with RecordedJournal.read(journal.directory) as view:
        assert view.writer() == LockOwner(os.getpid(), platform.node())
        journal.close()
        assert view.writer() is None
        with RecordedJournal.open(journal.directory) as again:
            assert view.writer() == again.writer() == LockOwner(os.getpid(), platform.node())


def test_a_reader_opens_beside_the_writer_in_another_process(journal):
    journal.record_proposal(1, [group([0, 1], 3)])
    code = (
        f"from shoal.journal.view import JournalView; print(len(JournalView.read({str(journal.directory)!r}).trials()))"
    )
    with journal.transaction():
        journal.record_reports("1", [report(0, 1)])
        reader = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
        )
    assert reader.stdout == "2\n"


READER = """
import os, sys
from shoal.core.errors import JournalError
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
if os.getuid() == 0:  # for whom permissions do not count
    os.setuid(65534)
directory = sys.argv[1]
with JournalView.read(directory) as view:
    print(len(view.trials()), view.writer() is not None)
try:
    Journal.open(directory)
except JournalError as error:
    print(error)
"""


@pytest.fixture
def shared():
    """A directory that all may enter, which that of pytest's own is not."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("state", ["closed", "killed", "killed, its shared memory gone", "being written"])
@pytest.mark.parametrize("folder", [0o555, 0o777], ids=["read only", "of a group"])
def test_a_study_of_somebody_else_is_read_whole_and_left_alone(shared, state, folder):
    journal = create(shared / "study")
    journal.record_proposal(1, [group([0, 1], 3)])
    directory = shared / "study"
    if state == "closed":
        journal.close()
    elif state != "being written":
        directory = Path(shutil.copytree(journal.directory, shared / "killed"))
        journal.close()
        if state != "killed":
            (directory / "journal.sqlite-shm").unlink()
    before = {path.name for path in directory.iterdir()}
    for path in directory.iterdir():
        path.chmod(0o444)
    directory.chmod(folder)
    reader = [sys.executable, "-c", READER, str(directory)]
    done = subprocess.run(reader, env=environment(), capture_output=True, text=True, check=False)
    found, *refusal = done.stdout.splitlines()
    assert found == f"2 {state == 'being written'}", done.stderr
    assert "cannot be resumed, because this process may not write its journal" in refusal[0]
    assert {path.name for path in directory.iterdir()} == before
    directory.chmod(0o755)
    journal.close()


DYING = """
import os, signal, sys
from pathlib import Path
from shoal.journal import schema
schema.writable = lambda directory: False
schema.connect = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
schema.open_existing(Path(sys.argv[1]), write=False)
"""


def test_the_next_run_removes_the_copy_of_a_reader_that_was_killed(journal, monkeypatch):
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # tmp_path is too long for sockets
    reader = [sys.executable, "-c", DYING, str(journal.directory)]
    subprocess.run(reader, env=environment() | {"TMPDIR": str(place)}, check=False)
    assert list(place.glob("*/journal.sqlite"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    remove_abandoned()
    place.rmdir()  # which it can be only if nothing is left


def test_a_study_that_may_not_be_read_is_an_error_that_says_so(shared):
    create(shared / "study").close()
    (shared / "study").chmod(0o600 if os.getuid() else 0o700)
    reader = [sys.executable, "-c", READER, str(shared / "study")]
    done = subprocess.run(reader, env=environment(), capture_output=True, text=True, check=False)
    assert "journal.sqlite (Permission denied); ask its owner for permission to read its files" in done.stderr
    (shared / "study").chmod(0o755)


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
