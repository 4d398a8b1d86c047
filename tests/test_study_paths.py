"""Paths that outlive a change of the working directory."""

from pathlib import Path

import pytest

from shoal.core.errors import JournalError, ShoalError
from shoal.host.paths import absolute, as_given, working_directory
from shoal.host.remedy import command
from shoal.journal.schema import checked_file


def test_a_relative_path_is_made_whole_and_shown_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = absolute("runs/study")
    assert whole == tmp_path / "runs" / "study"
    monkeypatch.chdir("/")
    assert absolute(whole) == whole
    assert as_given(whole) == Path("runs/study")
    assert command("resume", whole) == "shoal resume runs/study"
    assert as_given(tmp_path) == tmp_path


def test_a_working_directory_that_was_removed_is_told_of_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for ask in (working_directory, lambda: absolute("study")):
        with pytest.raises(ShoalError, match=r"is gone \(No such file or directory\).*change to an existing directory"):
            ask()
    assert absolute(tmp_path) == tmp_path


def test_a_home_directory_is_meant_as_in_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.chdir(tmp_path)
    assert absolute("~/study") == Path("/home/ada/study")
    assert absolute("./~/study") == tmp_path / "~" / "study"


def test_a_path_that_sqlite_does_not_take_is_told_of_in_words() -> None:
    longest = Path("/", *["d" * 97] * 4, "d" * 96)  # with the name of the file 504 bytes
    assert checked_file(longest) == longest / "journal.sqlite"
    with pytest.raises(JournalError, match="has 506 bytes, and SQLite takes at most 504; choose a shorter directory"):
        checked_file(longest / "e")
