"""Checkpoints of a program are complete, belong to the reported step, and are copied only if files have changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shoal.core.errors import CheckpointError
from shoal.core.trial import Origin, Report, Trial
from shoal.programs.files import ProgramFiles
from shoal.train.checkpoint_paths import copy_checkpoint, program_checkpoints


def reports(count: int) -> list[Report]:
    return [Report(3, epoch, {"loss": 1 / epoch}, 0.5) for epoch in range(1, count + 1)]


@pytest.fixture
def store(tmp_path: Path) -> ProgramFiles:
    store = ProgramFiles(tmp_path, 3)
    store.prepare()
    return store


def again(tmp_path: Path, *metrics: str) -> ProgramFiles:
    store = ProgramFiles(tmp_path, 3)
    store.prepare(metrics)
    return store


def steps(tmp_path: Path) -> list[str]:
    return [path.name for path in program_checkpoints(tmp_path, 3)]


def test_what_was_there_at_the_last_report_is_handed_out(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "model").mkdir()
    (store.live / "model" / "weights").write_text("one")
    store.save_checkpoint(reports(1))
    (store.live / "model" / "weights").write_text("half of tw")
    other = again(tmp_path)
    assert (other.live / "model" / "weights").read_text() == "one"
    assert other.step == 1
    assert other.reports == reports(1)


def test_a_new_trial_has_an_empty_directory(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "left over").write_text("by a kill")
    other = again(tmp_path)
    assert list(other.live.iterdir()) == []
    assert other.step == 0


def test_the_two_newest_are_kept_and_nothing_that_says_nothing_new(tmp_path: Path, store: ProgramFiles) -> None:
    store.save_checkpoint(reports(1))
    assert steps(tmp_path) == []
    for count in (2, 3, 4):
        (store.live / "a").write_text(str(count))
        store.save_checkpoint(reports(count))
        store.save_checkpoint(reports(count))
    store.save_checkpoint(reports(5))
    assert steps(tmp_path) == ["000004-000000-files", "000003-000000-files"]


def test_files_of_one_size_written_at_once_are_told_apart(tmp_path: Path, store: ProgramFiles) -> None:
    for count in range(1, 30):
        (store.live / "a").write_text(f"{count:02d}")
        store.save_checkpoint(reports(count))
        assert (program_checkpoints(tmp_path, 3)[0] / "files" / "a").read_text() == f"{count:02d}"


def test_what_has_not_changed_is_not_copied_again_and_nobody_can_spoil_it(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "data").write_text("large")
    (store.live / "a").write_text("1")
    store.save_checkpoint(reports(1))
    (store.live / "a").write_text("2")
    store.save_checkpoint(reports(2))
    newest, older = program_checkpoints(tmp_path, 3)
    assert os.path.samefile(newest / "files" / "data", older / "files" / "data")
    assert not os.path.samefile(newest / "files" / "data", store.live / "data")
    (store.live / "data").write_text("spoilt")
    assert (newest / "files" / "data").read_text() == "large"
    assert (older / "files" / "a").read_text() == "1"


def test_a_copy_that_was_never_finished_is_none(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "a").write_text("1")
    store.save_checkpoint(reports(1))
    unfinished = store.live.parent / "000002-000000-files.partial"
    (unfinished / "files").mkdir(parents=True)
    other = again(tmp_path)
    assert other.step == 1
    assert not unfinished.exists()


def test_a_program_that_goes_back_has_its_later_copies_dropped(tmp_path: Path, store: ProgramFiles) -> None:
    for count in (4, 5, 2):
        (store.live / "a").write_text(str(count))
        store.save_checkpoint(reports(count))
    assert steps(tmp_path) == ["000002-000000-files"]
    (store.live / "a").write_text("another 2")
    store.save_checkpoint(reports(2))
    assert (program_checkpoints(tmp_path, 3)[0] / "files" / "a").read_text() == "another 2"


def test_what_does_not_fit_leaves_the_older_copy(
    tmp_path: Path, store: ProgramFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store.live / "a").write_text("1")
    store.save_checkpoint(reports(1))
    (store.live / "a").write_text("2")

    def full(*arguments: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copy2", full)
    with pytest.raises(OSError, match="No space left on device"):
        store.save_checkpoint(reports(2))
    assert steps(tmp_path) == ["000001-000000-files"]
    assert not list(store.live.parent.glob("*.partial"))


def printed(*steps: int | None) -> str:
    return "".join(json.dumps({"loss": 1.0} | ({} if step is None else {"step": step})) + "\n" for step in steps)


def test_a_program_that_prints_keeps_its_directory_and_its_reports(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "a").write_text("1")
    store.output.write_text("begins\n" + printed(1, 2))
    other = again(tmp_path, "loss")
    assert (other.live / "a").read_text() == "1"
    assert (other.resumed, other.step) == (True, 2)
    assert [report.epoch for report in other.reports] == [1, 2]
    assert other.output.name == "output-000002"


@pytest.mark.parametrize(
    ("outputs", "steps"),
    [
        pytest.param([printed(1, 2), printed(3)], [1, 2, 3], id="continues"),
        pytest.param([printed(1, 2), printed(2, 3)], [1, 2, 3], id="prints the last one again"),
        pytest.param([printed(None, None), printed(None)], [1, 2, 3], id="without steps"),
        pytest.param([printed(1, 2), '{"loss": 1.0, "st'], [1, 2], id="a line cut short"),
        pytest.param([printed(1, 2) + printed(3)[:-1]], [1, 2, 3], id="only the end of the line is missing"),
        pytest.param([printed(1, 2), printed(4, 5)], [1, 2], id="one was never printed"),
        pytest.param([printed(1, 3)], [1], id="one was left out"),
        pytest.param([printed(1), '{"loss": "low", "step": 2}\n'], [1], id="no number"),
        pytest.param([printed(1, 2, 3), printed(1, 2)], [1, 2], id="went back"),
    ],
)
def test_what_was_printed_is_known_after_a_kill(
    tmp_path: Path, store: ProgramFiles, outputs: list[str], steps: list[int]
) -> None:
    (store.live / "a").write_text("1")
    for output in outputs:
        store.output.write_text(output)
        store = again(tmp_path, "loss")
    assert [report.epoch for report in store.reports] == steps
    assert [report.epoch for report in again(tmp_path, "loss").reports] == steps


def test_a_kill_while_reports_are_gathered_loses_and_doubles_none(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "a").write_text("1")
    store.output.write_text(printed(1, 2))
    store = again(tmp_path, "loss")
    output, text = store.output, printed(None, None)
    output.write_text(text)
    again(tmp_path, "loss")
    output.write_text(text)  # as if it had not been removed yet
    assert [report.epoch for report in again(tmp_path, "loss").reports] == [1, 2, 3, 4]


def test_a_program_that_keeps_nothing_begins_again_though_its_reports_are_known(
    tmp_path: Path, store: ProgramFiles
) -> None:
    store.output.write_text(printed(1, 2))
    other = again(tmp_path, "loss")
    assert (other.resumed, other.step, len(other.reports)) == (False, 0, 2)


def test_a_start_from_the_beginning_leaves_nothing(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "a").write_text("1")
    store.output.write_text(printed(1, 2))
    store.record_end()
    store.reset()
    for other in (store, again(tmp_path, "loss")):
        assert (other.resumed, other.step, other.reports, other.ended) == (False, 0, [], False)
        assert list(other.live.iterdir()) == []


def test_a_process_that_was_left_is_ended_first(tmp_path: Path, store: ProgramFiles) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    store.record_process(left.pid)
    again(tmp_path)
    assert left.poll() is not None


def test_a_process_that_got_the_same_number_is_left_alone(tmp_path: Path, store: ProgramFiles) -> None:
    note = {"pid": os.getpid(), "created": psutil.Process().create_time() - 60}
    (store.live.parent / "process.json").write_text(json.dumps(note))
    assert again(tmp_path).step == 0


def test_what_a_program_that_prints_keeps_is_not_copied_to_another_trial(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "a").write_text("1")
    store.output.write_text(printed(1, 2))
    with pytest.raises(CheckpointError, match=r"copied when it calls shoal\.report, not when it prints"):
        copy_checkpoint(tmp_path, Trial(4, {}, 0, 0, Origin(3, 2)))


def test_the_copy_of_a_trial_that_keeps_nothing_is_refused_with_the_cause(tmp_path: Path, store: ProgramFiles) -> None:
    store.save_checkpoint(reports(2))
    with pytest.raises(CheckpointError, match=r"it keeps none; let it save its state in shoal\.checkpoint\(\)"):
        copy_checkpoint(tmp_path, Trial(4, {}, 0, 0, Origin(3, 2)))


def test_a_copy_of_a_trial_has_files_of_its_own(tmp_path: Path, store: ProgramFiles) -> None:
    (store.live / "a").write_text("1")
    store.save_checkpoint(reports(2))
    copy_checkpoint(tmp_path, Trial(4, {}, 0, 0, Origin(3, 2)))
    copy = ProgramFiles(tmp_path, 4)
    copy.prepare()
    assert (copy.live / "a").read_text() == "1"
    assert [report.trial for report in copy.reports] == [4, 4]
    assert copy.step == 2
