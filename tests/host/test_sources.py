"""Which files define a task, and what has changed in them."""

import importlib
import linecache
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

from shoal.host.sources import (
    NOTEBOOK_CELL,
    edits,
    files_in_command,
    imported_packages,
    project_files,
    script_source,
    sources,
    unrecorded_files,
)
from shoal.task import Task

PROJECT = {
    "mine/__init__.py": "",
    "mine/task.py": "import json\nimport lone\nfrom . import nets\nfrom .base import Base\n\nclass Mine(Base): pass\n",
    "mine/base.py": "class Base:\n    def late(self):\n        from mine import late\n",
    "mine/nets.py": "import colorsys\n",
    "mine/late.py": "",
    "mine/unused.py": "",
    "lone.py": "import installed\n",
    "venv/site-packages/installed.py": "",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "venv" / "site-packages")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine.task", "mine.unused"):
        importlib.import_module(name)
    yield tmp_path
    for name in ("mine", "mine.task", "mine.base", "mine.nets", "mine.unused", "lone", "installed"):
        del sys.modules[name]


def test_the_modules_of_its_own_project_define_a_task(project: Path) -> None:
    mine = importlib.import_module("mine.task").Mine
    root, found = project_files(cloudpickle.dumps(mine()), mine.__module__)
    assert root == project
    names = ["lone.py", "mine/__init__.py", "mine/base.py", "mine/late.py", "mine/nets.py", "mine/task.py"]
    assert [str(path.relative_to(project)) for path in found] == names


def test_what_is_pickled_whole_is_defined_by_what_it_imports(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    names = {"lone": importlib.import_module("lone"), "__name__": "__main__"}
    exec("def train(config):\n    return lone", names)
    assert project_files(cloudpickle.dumps(names["train"]), "nowhere") == (project, [project / "lone.py"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("train", "def model(): import mine.late\n", id="python train.py"),
        pytest.param("mine.train", "def model(): from . import late\n", id="python -m mine.train"),
    ],
)
def test_what_a_script_imports_defines_a_task_and_the_script_does_not(
    name: str, text: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(project / f"{name.replace('.', '/')}.py")
    main.__spec__ = ModuleSpec(name, None) if "." in name else None
    Path(main.__file__).write_text(text)
    monkeypatch.setitem(sys.modules, "__main__", main)
    files = [project / "mine" / "__init__.py", project / "mine" / "late.py"]
    assert project_files(cloudpickle.dumps("train"), "__main__") == (project, files)


def test_what_is_installed_or_standard_is_not_a_project(project: Path) -> None:
    importlib.import_module("lone")
    assert project_files(cloudpickle.dumps("installed"), "installed") == (None, [])
    made = type("Made", (Task,), {})
    assert made.__module__ == "abc"
    assert project_files(cloudpickle.dumps(made), "abc") == (None, [])
    assert project_files(cloudpickle.dumps(Task), Task.__module__) == (None, [])


def test_files_among_its_arguments_define_a_command(tmp_path: Path) -> None:
    for name in ("train.py", "conf.yaml", "{lr}"):
        (tmp_path / name).touch()
    arguments = ["python", "train.py", "--lr", "{lr}", "--config=conf.yaml", "--out", "gone.txt", "."]
    assert files_in_command(arguments, tmp_path) == [tmp_path / "conf.yaml", tmp_path / "train.py"]


def test_an_edit_is_told_as_a_difference(tmp_path: Path) -> None:
    contents = {
        "same.py": b"x = 1\n",
        "edited.py": b"a\nb\nc\n",
        "gone.py": b"",
        "data.bin": b"\xff",
        "ends.py": b"a\n",
    }
    paths = [tmp_path / name for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    then = sources([*paths, tmp_path / "never.py"])
    assert edits(then) == []
    (tmp_path / "edited.py").write_text("a\nB\nc\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "data.bin").write_bytes(b"\xfe")
    (tmp_path / "ends.py").write_bytes(b"a\r\n")
    told = {Path(edit.path).name: edit.text for edit in edits(then)}
    assert told.keys() == {"edited.py", "gone.py", "data.bin", "ends.py"}
    assert told["edited.py"].splitlines()[2:] == ["@@ -1,3 +1,3 @@", " a", "-b", "+B", " c"]
    assert told["gone.py"] == "cannot be read any more"
    assert told["data.bin"] == "holds something else"
    assert told["ends.py"] == "only the ends of its lines changed"


def test_of_what_a_pickle_names_the_unrecorded_files_are_found(project: Path) -> None:
    content = cloudpickle.dumps(importlib.import_module("mine.task").Mine)
    files = {project / name for name in ("lone.py", "mine/__init__.py", "mine/base.py", "mine/late.py", "mine/nets.py")}
    recorded = sources([project / "mine/task.py"])
    assert unrecorded_files(content, {}) == {project: sorted({project / "mine/task.py", *files})}
    assert unrecorded_files(content, recorded) == {}
    assert unrecorded_files(cloudpickle.dumps(Path), {}) == {}


def test_the_source_of_a_definition_is_its_file_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None: ...

    assert script_source(local) == {"name": Path(__file__).name, "text": Path(__file__).read_text()}
    session = ModuleType("session")
    monkeypatch.setitem(sys.modules, "session", session)
    exec("class Typed: pass", vars(session))
    assert script_source(session.Typed) == {"name": NOTEBOOK_CELL, "text": None}


DEFINITIONS = {
    "function": "def Mine(x): return WIDTH",
    "class": "class Mine:\n    loss = staticmethod(round)\n    def model(self): return WIDTH",
    "class of a property": "class Mine:\n    @property\n    def width(self): return WIDTH",
    "class of a decorated method": "class Mine:\n    @no_grad()\n    def model(self): return WIDTH",
}


@pytest.mark.parametrize("definition", DEFINITIONS.values(), ids=DEFINITIONS)
def test_the_source_of_a_definition_in_a_notebook_is_its_cell(definition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, text = ModuleType("session"), f"from torch import no_grad\nWIDTH = 3\n{definition}\n"
    monkeypatch.setitem(sys.modules, "session", session)
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(text), None, text.splitlines(True), "<cell 1>"))
    exec(compile(text, "<cell 1>", "exec"), vars(session))
    assert script_source(session.Mine) == {"name": NOTEBOOK_CELL, "text": text}


def test_packages_are_the_first_parts_of_absolute_imports() -> None:
    text = "import torch.nn as nn, os\nfrom sklearn.svm import SVC\nfrom .own import x\n"
    assert imported_packages(text) == {"torch", "os", "sklearn"}
