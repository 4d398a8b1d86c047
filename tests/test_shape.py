"""tools/shape.py counts what it says, and fails where a limit is missed."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "shape.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shape", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shape"] = module  # which dataclasses ask for
    spec.loader.exec_module(module)
    return module


shape = loaded()

FILES = {
    "__init__.py": "from made.used import Used\n",
    "used.py": "class Used: ...\n",
    "once.py": "import made.used\nclass Twice: ...\n",
    "sub/__init__.py": "",
    "sub/user.py": "from made import once, used\nfrom . import below\n",
    "sub/below.py": "class Outer:\n    class Twice: ...\n",
    "sub/registry.py": "from made.sub.strategy import X\n",
    "sub/strategy.py": "X = 1\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_files_and_lines_are_counted(package: Path) -> None:
    figures = shape.measure(package).figures
    assert (figures["files"], figures["lines"], figures["median_lines"]) == (8, 10, 1)


def test_a_reexport_is_not_an_importer_and_a_registry_is_told_apart(package: Path) -> None:
    found = shape.measure(package)
    assert found.named["single_importer"] == [
        "once.py: sub/user.py",
        "sub/below.py: sub/user.py",
        "sub/strategy.py: sub/registry.py",
    ]
    assert found.registered == 1


def test_a_class_name_that_two_places_have_is_named_with_both(package: Path) -> None:
    assert shape.measure(package).named["class_names_twice"] == ["Twice: once.py, sub/below.py"]


@pytest.mark.parametrize(
    ("figure", "allowed", "too_much"),
    [
        ("files_over_500_lines", "\n" * 500, "\n" * 501),
        ("functions_over_60_lines", "def f():\n" + "    1\n" * 59, "@g\ndef f():\n" + "    1\n" * 59),
        (
            "classes_over_25_methods",
            "class C:\n" + "".join(f"    def m{i % 25}(self): ...\n" for i in range(26)),
            "class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(26)),
        ),
    ],
)
def test_a_limit_is_exceeded_by_one_and_not_by_the_limit_itself(
    package: Path, figure: str, allowed: str, too_much: str
) -> None:
    for text, count in ((allowed, 0), (too_much, 1)):
        (package / "large.py").write_text(text)
        assert shape.measure(package).figures[figure] == count


def test_a_function_whose_parameters_are_the_interface_may_be_long_in_its_file_only(package: Path) -> None:
    long = "def tune():\n" + "    1\n" * 60
    (package / "api.py").write_text(long + "class C:\n    def tune(self):\n" + "        1\n" * 60)
    (package / "large.py").write_text(long)
    assert shape.measure(package).named["functions_over_60_lines"] == ["api.py: tune, 61", "large.py: tune, 61"]


def test_the_last_line_is_json_and_the_status_says_whether_anything_is_missed(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shape.main([str(package)]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["missed"] == ["class_names_twice", "median_lines"]
    for path in package.rglob("*.py"):
        path.write_text("\n" * 100)
    assert shape.main([str(package)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["missed"] == []
    assert last.keys() == {*shape.LIMITS, "single_importer_registry", "missed"}
