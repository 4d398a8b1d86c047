"""A relative directory of a study stays where it was; a working directory that was removed is told of in words."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import check_plain, tune

import shoal
from shoal.core.errors import ShoalError
from shoal.core.trial import FIRST_ADDED

SPACE = {"lr": shoal.grid([0.01, 0.1])}


class Wandering(tasks.Blobs):
    """Goes elsewhere as soon as a model is made."""

    def model(self, config: Any) -> Any:
        os.chdir("/")
        return super().model(config)


def test_a_relative_directory_outlives_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = tune(Wandering(), SPACE, Path("one/study"))
    assert study.directory == tmp_path / "one" / "study"
    monkeypatch.chdir(tmp_path / "one")
    again = shoal.Study("study")
    monkeypatch.chdir("/")
    assert len(again.trials) == 2
    check_plain(again, tasks.Blobs())
    assert again.add({"lr": 0.1}, 1) == FIRST_ADDED
    monkeypatch.chdir(tmp_path)
    assert len(shoal.resume("one/study", show_progress=False).trials) == 3


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", [path for path in sys.path if os.path.isabs(path)])


@pytest.mark.parametrize(
    "begin",
    [
        lambda: tune(tasks.Blobs(), SPACE, Path("study")),
        lambda: tune(tasks.Blobs(), SPACE, None),
        lambda: shoal.Study("study"),
        lambda: shoal.resume("study"),
    ],
    ids=["tune", "tune, by default", "Study", "resume"],
)
@pytest.mark.usefixtures("gone")
def test_a_working_directory_that_was_removed_is_told_of(begin: Callable[[], object]) -> None:
    with pytest.raises(ShoalError, match=r"the working directory of this process is gone .*cd, os.chdir"):
        begin()


@pytest.mark.usefixtures("gone")
def test_whole_paths_need_no_working_directory(tmp_path: Path) -> None:
    assert len(tune(tasks.Blobs(), SPACE, tmp_path / "study").trials) == 2


def test_the_command_line_tells_before_torch_is_imported(tmp_path: Path) -> None:
    """Its arithmetic ends a process without a working directory: "cannot load libtorch_cpu.so"."""
    (tmp_path / "script.py").write_text("print('was run')")
    main = f"{sys.executable} -c 'from shoal.__main__ import main; main()'"
    line = f"mkdir gone && cd gone && rmdir ../gone && exec {main} run {tmp_path / 'script.py'}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "error: the working directory of this process is gone" in done.stderr
    assert "was run" not in done.stdout
