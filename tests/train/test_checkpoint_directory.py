"""Checkpoints of a study do not follow its path to another directory."""

from pathlib import Path

import pytest

from shoal.train.checkpoint_paths import make_checkpoint_directory


def test_checkpoints_are_made_in_the_directory_that_the_study_was_begun_in(tmp_path: Path) -> None:
    study = tmp_path / "study"
    with pytest.raises(FileNotFoundError):
        make_checkpoint_directory(study, 0)
    study.mkdir()
    assert (
        make_checkpoint_directory(study, 0) == make_checkpoint_directory(study, 0) == study / "checkpoints" / "000000"
    )
    study.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        make_checkpoint_directory(study, 1)
    study.mkdir()
    with pytest.raises(FileNotFoundError, match="another directory has taken the place of the study's"):
        make_checkpoint_directory(study, 1)
    assert list(study.iterdir()) == []
    (tmp_path / "other").mkdir()
    assert make_checkpoint_directory(tmp_path / "other", 1).is_dir(), "that of the next study of this process"
    assert make_checkpoint_directory(study, 1).is_dir()
