"""`shoal export` and `Study.export`: trained models as folders, to be loaded without the study."""

import errno
import importlib
import importlib.util
import json
import pickle
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from finished import Noisy, X
from typer.testing import CliRunner, Result

import shoal
from shoal.cli.app import app
from shoal.core.errors import CheckpointError, ShoalError
from shoal.integrations import load_pretrained, model_folder
from shoal.programs.opaque import Command

ODD = "<b>a|b</b> `x` [y](z)"


def export(study: shoal.Study, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", str(study.directory), *map(str, arguments)])


def loader(folder: Path) -> ModuleType:
    """The module load.py of a folder."""
    spec = importlib.util.spec_from_file_location(f"load_{id(folder)}", folder / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "trial.json").read_text())
    return found


def test_another_process_loads_the_same_model(
    finished: shoal.Study, tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    best = finished.best_trial.number
    done = export(finished, best, "--json")
    assert done.exit_code == 0, done.output
    files = json.loads(done.output)["files"][str(best)]
    folder = finished.directory / "export" / str(best)
    assert {str(Path(each).relative_to(folder)) for each in files} == {
        *("README.md", "load.py", "model.safetensors", "source/finished.py", "task.pkl", "trial.json")
    }
    folder = folder.rename(tmp_path / "handed over")
    finished.directory.rename(tmp_path / "gone")
    program = tmp_path / "predict.py"
    program.write_text(
        "import runpy, sys, torch\n"
        "folder, inputs, outputs = sys.argv[1:]\n"
        "model = runpy.run_path(f'{folder}/load.py')['load']()\n"
        "assert sys.modules['finished'].__file__ == f'{folder}/source/finished.py'\n"
        "assert not model.training\n"
        "torch.save(model(torch.load(inputs)), outputs)\n"
    )
    torch.save(X, tmp_path / "x.pt")
    status, _, errors = script(program, folder, tmp_path / "x.pt", tmp_path / "y.pt", cwd=tmp_path)
    assert status == 0, errors
    expected = shoal.Study(tmp_path / "gone").best_model()(X)
    assert torch.equal(torch.load(tmp_path / "y.pt"), expected)


SCRIPT = """
import sys, torch, shoal
from torch import nn
from torch.utils.data import TensorDataset

X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return self.layers(x) + self.calls

class Calls(shoal.Task):
    def data(self, config): return TensorDataset(X), TensorDataset(X)
    def model(self, config): return Net(config["width"])
    def optimizer(self, model, config): return torch.optim.SGD(model.parameters(), 0.1)
    def loss(self, model, batch): return model(batch[0]).square().mean()

if __name__ == "__main__":
    study = shoal.tune(Calls(), {"width": 3}, metric="valid_loss", mode="min", algorithm=shoal.Random(1, epochs=2),
        backend="inline", devices="cpu:1", directory="study", show_progress=False)
    torch.save((X, study.model(0, "last")(X)), "expected.pt")
    study.export(0, "out", which="last")
"""


def test_of_a_script_its_text_and_what_its_model_carries(
    tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "search.py").write_text(SCRIPT)
    status, _, errors = script(tmp_path / "search.py", cwd=tmp_path)
    assert status == 0, errors
    folder = tmp_path / "out"
    assert (folder / "source" / "search.py").read_text() == SCRIPT
    assert facts(folder)["bytecode"]
    x, expected = torch.load(tmp_path / "expected.pt")
    model = loader(folder).load()
    assert model.calls == 2
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_trial_json_says_what_the_weights_are(finished: shoal.Study, tmp_path: Path) -> None:
    row = finished.best_trial
    for which, epoch in (("best", row.best_epoch), ("last", row.epoch)):
        found = facts(finished.export(row.number, tmp_path / which, which=which))
        curve = finished.history(row.number).set_index("epoch")["valid_loss"]
        assert (found["epoch"], found["metrics"]) == (epoch, {"valid_loss": curve[epoch]})
        assert (found["rank"], found["of"]) == (1, 8)
        assert (found["config"], found["seed"], found["data_seed"]) == (row.config, row.seed, row.data_seed)
        assert found["best"] == {"epoch": row.best_epoch, "metrics": dict(row.ranked)}
        assert found["last"] == {"epoch": row.epoch, "metrics": dict(row.metrics)}
        assert found["versions"]["torch"] == torch.__version__
        assert found["missing"] == []


def test_without_safetensors_the_weights_are_for_plain_torch(
    finished: shoal.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None)
    folder = finished.export(3, tmp_path / "out")
    state = torch.load(folder / "model.pt", weights_only=True)
    Noisy().model({}).load_state_dict(state)
    torch.testing.assert_close(state, finished.model(3).state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(loader(folder).load().state_dict(), state, rtol=0, atol=0)


def test_the_card_is_one_of_the_hub(finished: shoal.Study, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    number = finished.best_trial.number
    card = hub.ModelCard.load(finished.export(number, tmp_path / "out") / "README.md")
    (result,) = card.data.eval_results
    assert card.data.library_name == "pytorch"
    assert (result.metric_type, result.metric_value) == ("valid_loss", finished.best_trial.ranked["valid_loss"])
    assert f"shoal rerun {finished.directory} {number}" in card.text
    assert f"Weights of trial {number} after 4 epochs. The trial ranks 1 of 8 by valid_loss (min)." in card.text
    assert "seed of weights and dropout" in card.text


def test_of_a_program_the_files_that_it_kept(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for value in (0.5, 0.1, 0.3):
            (shoal.checkpoint() / "model.txt").write_text(str(value))
            shoal.report({ODD: value})

    study = shoal.tune(
        train, {ODD: shoal.grid(["<i>", "|"])}, metric=ODD, mode="min", algorithm=shoal.Grid(epochs=3),
        backend="inline", devices="cpu:1", directory=tmp_path / "<b>study|</b>", show_progress=False,
    )  # fmt: skip
    folder = study.export(1, tmp_path / "out")
    assert (folder / "checkpoint" / "model.txt").read_text() == "0.1"
    assert not (folder / "load.py").exists()
    assert (folder / "source" / "test_export.py").read_text() == Path(__file__).read_text()
    card = (folder / "README.md").read_text()
    _, front, *body = card.split("---\n", 2)
    assert "<b>" not in "".join(body).replace("\\<", "")
    assert "\\<b\\>a\\|b\\</b\\>" in "".join(body)
    assert json.loads(front.split("model-index: ")[1])[0]["results"][0]["metrics"][0]["value"] == 0.1
    assert "Files of trial 1 after 2 reports. The trial ranks " in card
    assert not any(each in card for each in ("library_name", "pytorch", "dropout", "order of samples"))
    with pytest.raises(ShoalError, match="exported as they are"):
        study.export(0, merged=True)


def test_a_program_that_kept_nothing_is_told_how_to(tmp_path: Path) -> None:
    study = shoal.tune(
        lambda config: shoal.report({"loss": 1.0}), {"x": 1.0}, metric="loss", mode="min",
        algorithm=shoal.Random(1, epochs=1), backend="inline", devices="cpu:1",
        directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    with pytest.raises(ShoalError, match=r"has kept no files; let the program save its model in shoal.checkpoint\(\)"):
        study.export(0)
    assert not (study.directory / "export").exists()


def test_load_says_what_it_lacks(finished: shoal.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished.export(0, tmp_path / "out")
    load = loader(folder)
    described = facts(folder)
    described |= {"bytecode": True, "missing": ["lost.py"]}
    described["versions"]["python"] = "3.1.4"
    (folder / "trial.json").write_text(json.dumps(described))
    with pytest.raises(RuntimeError, match=r"holds the bytecode of Python 3\.1\.4, and this is"):
        load.load()
    (folder / "trial.json").write_text(json.dumps(described | {"bytecode": False}))
    (folder / "task.pkl").write_bytes(pickle.dumps(Noisy()).replace(b"finished", b"unfounds"))
    with pytest.raises(ImportError, match=r"No module named 'unfounds'. Missing in .*: lost.py"):
        load.load()
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs Shoal 0"):
        load.load()


@pytest.mark.parametrize(
    ("text", "script", "refused"),
    [
        pytest.param("y = 2\n", None, True, id="another module"),
        pytest.param("y = 1\n", None, False, id="the same text"),
        pytest.param("y = 2\n", "net.py", False, id="a script, which nothing imports"),
    ],
)
def test_a_module_of_the_same_name_is_not_taken_for_that_of_the_folder(
    text: str, script: str | None, refused: bool, finished: shoal.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "net", importlib.import_module("net"))
    folder = finished.export(0, tmp_path / "out")
    (folder / "source" / "net.py").write_text(text)
    (folder / "trial.json").write_text(json.dumps(facts(folder) | {"script": script}))
    if refused:
        with pytest.raises(ImportError, match=r"named net is already imported from .*net.py; load .* new process"):
            loader(folder).load()
    else:
        assert loader(folder).load() is not None


@pytest.mark.parametrize(("package", "refused"), [("net", True), ("json", False)])
def test_of_a_class_with_from_pretrained_only_its_own_source_counts(
    package: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text("y = 1\n")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "net.py").write_text("y = 2\n")
    (tmp_path / "load.py").write_text(Path(load_pretrained.__file__).read_text())
    (tmp_path / "trial.json").write_text(json.dumps({"class": [package, "Absent"], "missing": []}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "net", importlib.import_module("net"))
    with pytest.raises(ImportError, match="named net is already imported" if refused else r"json\.Absent cannot be"):
        loader(tmp_path).load()


RUN = """
import pathlib, sys
pathlib.Path(sys.argv[2], "model.txt").write_text("kept")
print('{"loss": 1.0, "size": 2}')
"""


def test_of_a_command_every_file_that_it_names_and_how_to_export_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.py").write_text(f"# {name}{RUN}")
    study = shoal.tune(
        Command((sys.executable, "a/run.py", "b/run.py", "{directory}"), ("loss", "size"), tmp_path),
        {"x": 1.0}, metric=["loss", "size"], mode=["min", "min"], algorithm=shoal.Random(1, epochs=1),
        backend="inline", devices="cpu:1", directory=tmp_path / "study",
    )  # fmt: skip
    assert capsys.readouterr().err.splitlines()[-1] == f"shoal:   shoal export {study.directory} 0"
    assert f"export the files: shoal export {study.directory} 0" in CliRunner().invoke(
        app, ["best", str(study.directory)]
    ).stderr  # fmt: skip
    folder = study.export(0, tmp_path / "out")
    for name in ("a", "b"):
        assert (folder / "source" / name / "run.py").read_text() == f"# {name}{RUN}"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        *("README.md", "checkpoint/model.txt", "source/a/run.py", "source/b/run.py", "trial.json")
    }


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
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors")} == {
        "out/1/model.safetensors",
        "out/3/model.safetensors",
    }
    again = export(finished, 2, 3, "--output", tmp_path / "out")
    assert "out/3 exists and is not empty; name another folder" in str(again.exception)
    assert not (tmp_path / "out" / "2").exists()
    both = export(finished, 1, "--adapter", "--merged")
    assert "give one of them" in str(both.exception)


def test_a_folder_that_cannot_be_written_is_named(finished: shoal.Study, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = export(finished, finished.best_trial.number, "--output", tmp_path / "file" / "out")
    assert "file/out cannot be written: " in str(done.exception)
    assert "name another folder (`directory`, --output)" in str(done.exception)
    assert done.exit_code != 0
    with pytest.raises(ShoalError, match="file exists and is not empty; name another folder"):
        finished.export(0, tmp_path / "file")
    with pytest.raises(ShoalError, match="must be the path of a directory"):
        finished.export(0, "")
    assert (tmp_path / "file").read_text() == ""


def test_a_full_disk_leaves_nothing(finished: shoal.Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(model: object, place: Path) -> str:
        (place / "model.pt").write_bytes(b"half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_folder, "_save", write)
    (tmp_path / "empty").mkdir()
    for name in ("out", "empty"):
        with pytest.raises(ShoalError, match=f"{name} cannot be written: .*No space left on device; name another"):
            finished.export(0, tmp_path / name)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "empty").iterdir()) == []
    monkeypatch.undo()
    assert (finished.export(0, tmp_path / "empty") / "README.md").exists()


def test_a_trial_without_a_checkpoint_leaves_no_folder(finished: shoal.Study, tmp_path: Path) -> None:
    for file in (finished.directory / "checkpoints").rglob("*.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="trial 2 has no intact checkpoint"):
        finished.export(2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_trial_that_has_saved_nothing_yet_is_told_from_one_without_a_checkpoint(finished: shoal.Study) -> None:
    with closing(sqlite3.connect(finished.directory / "journal.sqlite")) as journal, journal:
        journal.execute("UPDATE trials SET state = 'running' WHERE number = 2")
    for file in (finished.directory / "checkpoints").rglob("*.pt"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"trial 2 .* has not ended, and has saved no checkpoint yet; shoal status"
    ):
        finished.export(2)


def test_a_process_elsewhere_imports_the_modules_of_the_study(
    tmp_path: Path, script: Callable[..., tuple[int, str, str]], request: pytest.FixtureRequest
) -> None:
    (tmp_path / "search.py").write_text(
        f"import sys; sys.path.append({str(tmp_path)!r})\nfrom task import search\nsearch()\n"
    )
    (tmp_path / "task.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "def search():"))
    status, _, errors = script(tmp_path / "search.py", cwd=tmp_path)
    assert status == 0, errors
    (tmp_path / "elsewhere").mkdir()
    run = request.getfixturevalue("shoal")
    done = run("export", tmp_path / "study", 0, "--output", tmp_path / "again", cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "source" / "task.py").exists()


def test_the_rank_of_a_repeat_is_that_of_its_configuration(tmp_path: Path) -> None:
    study = shoal.tune(
        Noisy(), {"lr": shoal.grid([0.1, 0.2])}, metric="valid_loss", mode="min", repeats=2,
        algorithm=shoal.Grid(epochs=1), backend="inline", devices="cpu:1", directory=tmp_path / "study",
        show_progress=False,
    )  # fmt: skip
    text = (study.export(3) / "README.md").read_text()
    assert f"Its configuration ranks {1 + (study.best_trial.number < 2)} of 2 by the mean of its 2 trials of" in text
