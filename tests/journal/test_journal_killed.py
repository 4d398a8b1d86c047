"""After `kill -9` or a full disk the journal holds whole transactions, and all acknowledged ones."""

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from journal_samples import SPEC, create, group, report
from killed_writer import begin, go_on, run_and_kill
from support.recorded import RecordedJournal

from shoal.core.errors import JournalError, StorageFullError, StudyExistsError
from shoal.core.trial import Report, TrialState
from shoal.journal.schema import FILE_NAME
from shoal.journal.view import JournalView


def check_integer(view, acknowledged):
    assert view.tables.rows("PRAGMA integrity_check") == [("ok",)]
    trials = view.trials()
    assert len(trials) in (4 * acknowledged, 4 * acknowledged + 4, 4 * acknowledged + 8)
    for start in range(0, len(trials), 4):
        step = trials[start : start + 4]
        (state,) = {row.state for row in step}
        (epoch,) = {row.epoch for row in step}
        assert (state is TrialState.COMPLETE) if epoch == 2 else (state in (TrialState.PENDING, TrialState.RUNNING))
        assert epoch == 2 or start >= 4 * acknowledged
        for row in step:
            assert [seen.epoch for seen in view.curve(row.number)] == list(range(1, epoch + 1))
    seen = [(event.trial, event.epoch) for event in view.events() if isinstance(event, Report)]
    assert len(seen) == len(set(seen)) == sum(row.epoch for row in trials)


def test_kills_at_random_moments_leave_whole_transactions(tmp_path):
    chance = random.Random(0)
    done = 0
    for _ in range(12):
        acknowledged = run_and_kill(go_on, tmp_path, chance.uniform(0.0, 0.05))
        assert acknowledged >= done
        done = acknowledged
        with JournalView.read(tmp_path) as view:
            assert view.writer() is None
            check_integer(view, acknowledged)
    assert done > 12


def test_a_kill_while_a_study_begins_leaves_a_study_or_none(tmp_path):
    for round_ in range(8):
        directory = tmp_path / str(round_)
        run_and_kill(begin, directory, round_ * 0.001)
        try:
            create(directory).close()
        except StudyExistsError:
            RecordedJournal.open(directory).close()
        with JournalView.read(directory) as view:
            assert view.spec == SPEC


def test_a_study_whose_first_transaction_was_half_written_has_not_begun(tmp_path):
    create(tmp_path).close()
    file = tmp_path / FILE_NAME
    content = file.read_bytes()
    file.write_bytes(content[:18] + b"\1\1" + content[20:])  # not in WAL mode yet
    magic, records, nonce, pages_before, sector, page = bytes.fromhex("d9d505f920a163d7"), 0, 0, 0, 512, 4096
    header = magic + struct.pack(">5I", records, nonce, pages_before, sector, page)
    (tmp_path / f"{FILE_NAME}-journal").write_bytes(header.ljust(sector, b"\0"))
    with pytest.raises(JournalError, match="there is no study in"):
        JournalView.read(tmp_path)
    create(tmp_path).close()
    with JournalView.read(tmp_path) as view:
        assert view.spec == SPEC


FILL = """
import resource, sys
from journal_samples import SPEC, create, group, report
from shoal.core.errors import StorageFullError, StudyExistsError

limit = 300_000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
journal = create(sys.argv[1])
journal.record_proposal(1, [group([0], 10**6)])
epoch = 0
try:
    while True:
        with journal.transaction():
            journal.record_reports("1", [report(0, epoch + 1), report(0, epoch + 2)])
        epoch += 2
except StorageFullError as error:
    print(epoch, error)
"""


def test_a_full_disk_says_what_to_do_and_loses_nothing(tmp_path):
    """A limit on the size of a file stands for the full disk: SQLite sees a write fail in both."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    filler = subprocess.run(
        [sys.executable, "-c", FILL, tmp_path],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    epochs, message = filler.stdout.split(" ", 1)
    assert message.startswith(f"no space is left for the journal in {tmp_path} (")
    assert f"shoal resume {tmp_path}" in message
    with RecordedJournal.open(tmp_path) as journal:
        assert [seen.epoch for seen in journal.curve(0)] == list(range(1, int(epochs) + 1))
        following = report(0, int(epochs) + 1)
        assert journal.record_reports("1", [following]) == [following]


FULL = """
import resource, sys
from journal_samples import create

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
create(sys.argv[1])
"""


@pytest.mark.parametrize(("room", "remedy"), [(0, "choose another directory"), (4096, "then begin it again")])
def test_a_study_that_cannot_begin_for_want_of_space_leaves_nothing_open(tmp_path, room, remedy):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-W", "error", "-c", FULL, tmp_path, str(room)]
    failed = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    said = failed.stderr.splitlines()[-1]
    assert said.startswith("shoal.core.errors.")
    assert said.endswith(remedy)  # there is no study to continue with
    assert "Warning" not in failed.stderr


def test_the_database_s_own_word_for_full_is_understood(tmp_path):
    with create(tmp_path) as journal:
        ((pages,),) = journal.tables.rows("PRAGMA page_count")
        journal.tables.rows(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StorageFullError, match="database or disk is full"):
            journal.record_proposal(1000, [group(range(1000), 1)])
        assert journal.trials() == []
        journal.tables.rows("PRAGMA max_page_count = 1000000")
        journal.record_proposal(1000, [group(range(1000, 2000), 1)])
        assert len(journal.trials()) == 1000
