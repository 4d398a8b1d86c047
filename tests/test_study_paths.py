"""Paths that outlive a change of the working directory."""

from pathlib import Path

import pytest

from shoal.core.errors import ShoalError
from shoal.host.paths import absolute, as_given, working_directory
from shoal.host.remedy import command


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
