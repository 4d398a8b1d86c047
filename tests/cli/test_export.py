"""`shoal export`: the trained weights of one trial, for use without Shoal."""

import json
from pathlib import Path

import pytest
import torch
from finished import Noisy
from typer.testing import CliRunner, Result

import shoal
from shoal.cli.app import app


def export(study: shoal.Study, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", str(study.directory), *map(str, arguments)])


def test_weights_load_in_plain_torch(finished: shoal.Study) -> None:
    best = finished.best_trial.number
    done = export(finished, best, "--json")
    assert done.exit_code == 0, done.output
    (path,) = json.loads(done.output)["files"][str(best)]
    model = Noisy().model({})
    model.load_state_dict(torch.load(path, weights_only=True))
    torch.testing.assert_close(model.state_dict(), finished.model(best).state_dict())
    again = export(finished, best)
    assert again.exit_code != 0
    assert "is not empty; name another folder by --output" in str(again.exception)


def test_another_trial_or_no_adapter_is_refused_and_nothing_is_written(finished: shoal.Study, tmp_path: Path) -> None:
    place = tmp_path / "out"
    missing = export(finished, 77, "--output", place)
    assert "has no trial 77; its trials are 0-7" in str(missing.exception)
    pytest.importorskip("peft")
    plain = export(finished, finished.best_trial.number, "--adapter", "--output", place)
    assert "a Sequential, holds no PeftModel" in str(plain.exception)
    assert missing.exit_code != 0
    assert plain.exit_code != 0
    assert not place.exists()


def test_several_trials_have_a_folder_each(finished: shoal.Study, tmp_path: Path) -> None:
    done = export(finished, 1, 3, "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("model.pt")} == {
        "out/1/model.pt",
        "out/3/model.pt",
    }
    both = export(finished, 1, "--adapter", "--merged")
    assert "give one of them" in str(both.exception)


def test_a_folder_that_cannot_be_written_is_named(finished: shoal.Study, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = export(finished, finished.best_trial.number, "--output", tmp_path / "file" / "out")
    assert "file/out cannot be written: " in str(done.exception)
    assert "name another folder by --output" in str(done.exception)
    assert done.exit_code != 0
